import { Command } from 'commander';

import { type CaseResult, findGoldenCases, qualifyGoldenCase, readGoldenCase } from '../golden.js';
import { Model } from '../model.js';
import { type DeviceFlags, openChosenDevice, withDevice } from './options.js';
import { formatSeconds, formatTable, withProgress } from './output.js';
import { defineAction } from './run.js';
import { describeMachine } from './version.js';

interface QualifyOptions extends DeviceFlags {
  golden: string[];
  details?: boolean;
}

/** A share of a tolerance, short where it is nothing to look at. */
const share = (worst: number) =>
  worst === 0 ? '0' : worst < 1e-3 ? worst.toExponential(0) : worst.toFixed(3);

/** The worst quantity of each case. */
function caseTable(cases: readonly CaseResult[]): string {
  return formatTable(
    ['case', 'worst', 'of', 'quantities', 'time', ''],
    cases.map(({ name, quantities, worst, passed, seconds }) => [
      name,
      share(worst),
      quantities.find((result) => result.worst === worst)?.quantity ?? '–',
      String(quantities.length),
      formatSeconds(seconds),
      passed ? 'ok' : 'FAILED',
    ]),
    [1, 3, 4],
  );
}

/** Each quantity with the case where it is worst. */
function quantityTable(cases: readonly CaseResult[]): string {
  const worst = new Map<string, { worst: number; tolerance: string; name: string }>();
  for (const { name, quantities } of cases) {
    for (const { quantity, tolerance, worst: value } of quantities) {
      if (value >= (worst.get(quantity)?.worst ?? 0)) worst.set(quantity, { worst: value, tolerance, name });
    }
  }
  return formatTable(
    ['quantity', 'worst', 'in', 'tolerance'],
    Array.from(worst, ([quantity, { worst: value, tolerance, name }]) => [
      quantity,
      share(value),
      name,
      tolerance,
    ]),
    [1],
  );
}

/** Columns of a terminal that the place of a deviation may take; --json has it whole. */
const PLACE = 90;
const shorten = (text: string) => (text.length > PLACE ? `${text.slice(0, PLACE - 1)}…` : text);

/** Quantities with the place of their worst deviation: all of them, or those out of tolerance. */
function detailTable(cases: readonly CaseResult[], all: boolean): string {
  return formatTable(
    ['case', 'quantity', 'worst', 'at'],
    cases.flatMap(({ name, quantities }) =>
      quantities
        .filter(({ passed }) => all || !passed)
        .map(({ quantity, worst, at }) => [name, quantity, share(worst), shorten(at)]),
    ),
    [2],
  );
}

export function qualifyCommand(): Command {
  const command = new Command('qualify')
    .description('Compare the engine with golden values; deviations are given as a share of their tolerance')
    .requiredOption('--golden <folders...>', 'golden cases, or folders of them')
    .option('--details', 'print every quantity of every case')
    .addHelpText('after', '\nExample:\n  $ duokv qualify --golden test/fixtures/golden');
  withDevice(command);
  return defineAction<QualifyOptions, []>(command, async (context, options) => {
    const folders = (await Promise.all(options.golden.map(findGoldenCases))).flat();
    await using device = await openChosenDevice(options);
    const cases: CaseResult[] = [];
    await withProgress('qualifying', folders.length, async (progress) => {
      for (const [index, folder] of folders.entries()) {
        context.signal.throwIfAborted();
        const golden = await readGoldenCase(folder);
        progress.update(index, golden.name);
        cases.push(await qualifyGoldenCase(golden, (config) => Model.create(device, config)));
      }
    });
    const failed = cases.filter(({ passed }) => !passed);
    if (failed.length > 0) process.exitCode = 1;
    context.print(`${caseTable(cases)}\n`);
    context.print(`${quantityTable(cases)}\n`);
    if (options.details || failed.length > 0) {
      context.print(`${detailTable(cases, options.details === true)}\n`);
    }
    context.print(`${cases.length - failed.length} of ${cases.length} cases within tolerance`);
    return {
      passed: failed.length === 0,
      worst: cases.reduce((largest, { worst }) => Math.max(largest, worst), 0),
      cases,
      machine: describeMachine(),
      device: device.info(),
    };
  });
}
