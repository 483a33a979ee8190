import { type Command, InvalidArgumentError, Option } from 'commander';

import { PRECISIONS } from '../arguments.js';
import { type BackendName, cannotOpen, type Device, openDevice } from '../device.js';
import type { Group } from '../group.js';
import type { PrecisionName } from '../native.js';

function parseNumber(text: string, accept: (value: number) => boolean, expected: string): number {
  const value = text.trim() === '' ? Number.NaN : Number(text);
  if (!accept(value)) throw new InvalidArgumentError(`Expected ${expected}.`);
  return value;
}

export const positiveInteger = (text: string): number =>
  parseNumber(text, (value) => Number.isSafeInteger(value) && value > 0, 'a positive integer');

export const nonNegativeInteger = (text: string): number =>
  parseNumber(text, (value) => Number.isSafeInteger(value) && value >= 0, 'an integer of at least 0');

export const positiveNumber = (text: string): number =>
  parseNumber(text, (value) => Number.isFinite(value) && value > 0, 'a positive number');

export const nonNegativeNumber = (text: string): number =>
  parseNumber(text, (value) => Number.isFinite(value) && value >= 0, 'a number of at least 0');

/** A share, 1 excluded. */
export const fraction = (text: string): number =>
  parseNumber(text, (value) => value >= 0 && value < 1, 'a number in [0, 1)');

/** A probability mass, 0 excluded. */
export const mass = (text: string): number =>
  parseNumber(text, (value) => value > 0 && value <= 1, 'a number in (0, 1]');

export const nameList = (text: string): string[] => {
  const names = text.split(',').map((name) => name.trim());
  if (names.includes('')) throw new InvalidArgumentError('Expected names with commas between them.');
  return names;
};

export const positiveIntegers = (text: string): number[] => nameList(text).map(positiveInteger);

/** An option that takes names with commas between them, and whose help shows its default so. */
export const listOption = (flags: string, description: string, standard: readonly string[]): Option =>
  new Option(flags, description).argParser(nameList).default(standard, standard.join(','));

/** A list option whose names are some of `choices`. */
export function choicesOption(
  flags: string,
  description: string,
  choices: readonly string[],
  standard: readonly string[],
): Option {
  const listed = choices.join(', ');
  return listOption(flags, `${description}: any of ${listed}, with commas`, standard).argParser((text) => {
    const names = nameList(text);
    const unknown = names.find((name) => !choices.includes(name));
    if (unknown !== undefined) throw new InvalidArgumentError(`${unknown} is none of ${listed}.`);
    return names;
  });
}

/** Collects `--set KEY=VALUE`; values that read as numbers are numbers. */
export function collectSetting(
  text: string,
  earlier: Readonly<Record<string, string | number>> = {},
): Record<string, string | number> {
  const match = /^([A-Za-z]\w*)=(.+)$/.exec(text);
  if (match === null) throw new InvalidArgumentError('Expected KEY=VALUE.');
  const [, key, value] = match as unknown as [string, string, string];
  const number = Number(value);
  return { ...earlier, [key]: Number.isNaN(number) ? value : number };
}

/** The values of --backend and --threads. */
export interface DeviceFlags {
  backend: BackendName;
  threads?: number;
}

/** --backend and --threads. */
export function withDevice(command: Command): Command {
  return command
    .option('--backend <name>', 'auto, cpu, cuda or cuda:N', 'auto')
    .option('--threads <count>', 'compute threads (default: what the process may use)', positiveInteger);
}

/**
 * With several ranks: by default this rank's share of the CPUs, the card of its number among the machine's ranks, and under
 * `auto` cards for all ranks or for none.
 */
export async function openChosenDevice(flags: DeviceFlags, group?: Group): Promise<Device> {
  const threads = flags.threads ?? group?.threads;
  const open = (backend: BackendName) =>
    openDevice(threads === undefined ? { backend } : { backend, threads });
  if (group === undefined || group.size === 1) return open(flags.backend);
  const card = `cuda:${group.localRank}` as const;
  if (flags.backend !== 'auto') return open(flags.backend === 'cuda' ? card : flags.backend);
  const device = await open(card).catch((error: unknown) => {
    if (cannotOpen(error)) return undefined;
    throw error;
  });
  const [cards] = await group.sum([device === undefined ? 0 : 1]);
  if (device !== undefined && cards === group.size) return device;
  await device?.close();
  return open('cpu');
}

export function withPrecision(command: Command, standard: PrecisionName): Command {
  return command.addOption(
    new Option('--precision <policy>', 'precision policy').choices(PRECISIONS).default(standard),
  );
}
