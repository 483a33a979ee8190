import { checkBoolean, checkInteger, checkNumber, checkPrecision, show } from '../arguments.js';
import { DuokvError } from '../errors.js';
import type { PrecisionName } from '../native.js';
import type { ModelConfig } from '../plan.js';
import type { describeMachine } from './version.js';

/** `run.json`: the run as it was resolved when it began. Resuming changes none of it. */
export interface RunSettings {
  text: string;
  config: ModelConfig;
  context: number;
  batch: number;
  microbatch: number;
  recompute: boolean;
  updates: number;
  lr: number;
  warmup: number;
  precision: PrecisionName;
  seed: number;
  heldOut: number;
  evalEvery: number | null;
  saveEvery: number;
  data: {
    documents: number;
    heldOutDocuments: number;
    emptyDocuments: number;
    tokens: number;
    windows: number;
    droppedTokens: number;
    validTargets: number;
    /** SHA-256 of the token stream, and of the order of its windows in the first pass. */
    streamHash: string;
    orderHash: string;
  };
  machine: ReturnType<typeof describeMachine>;
}

const isRecord = (value: unknown): value is Record<string, unknown> =>
  typeof value === 'object' && value !== null && !Array.isArray(value);

function checkText(value: unknown, name: string): void {
  if (typeof value !== 'string')
    throw new DuokvError('ERR_DATA', `${name} is ${show(value)}; it must be a string`);
}

/** The settings that the object in the file `path` holds. Errors: `ERR_DATA` naming the file and the key. */
export function checkRunSettings(path: string, settings: Record<string, unknown>): RunSettings {
  try {
    checkText(settings['text'], 'text');
    for (const key of ['context', 'batch', 'updates', 'saveEvery']) checkInteger(settings[key], key, 1);
    checkInteger(settings['microbatch'], 'microbatch', 1, settings['batch'] as number);
    checkBoolean(settings['recompute'], 'recompute');
    if (settings['evalEvery'] !== null) checkInteger(settings['evalEvery'], 'evalEvery', 1);
    checkNumber(settings['lr'], 'lr', { least: 0, open: true });
    for (const key of ['warmup', 'seed']) checkInteger(settings[key], key, 0);
    checkPrecision(settings['precision'] as PrecisionName);
    checkNumber(settings['heldOut'], 'heldOut', { least: 0, most: 1 - Number.EPSILON });
    for (const key of ['config', 'data', 'machine']) {
      if (!isRecord(settings[key])) {
        throw new DuokvError('ERR_DATA', `${key} is ${show(settings[key])}; it must be an object`);
      }
    }
    const data = settings['data'] as Record<string, unknown>;
    for (const key of ['streamHash', 'orderHash']) checkText(data[key], `data.${key}`);
    for (const key of [
      'documents',
      'heldOutDocuments',
      'emptyDocuments',
      'tokens',
      'windows',
      'droppedTokens',
      'validTargets',
    ]) {
      checkInteger(data[key], `data.${key}`, 0);
    }
  } catch (error) {
    throw new DuokvError('ERR_DATA', `${path}: ${(error as Error).message}`, { cause: error });
  }
  return settings as unknown as RunSettings;
}
