import {
  checkInteger,
  checkNumber,
  checkOptions,
  checkPrecision,
  checkSchedule,
  type Schedule,
  show,
} from './arguments.js';
import type { ModelConfig } from './config.js';
import { DuokvError } from './errors.js';
import {
  type CacheBytes,
  callNow,
  type DesignPlan,
  type FlopCount,
  native,
  type PrecisionName,
  type SuffixTable,
} from './native.js';

export type { ModelConfig } from './config.js';
export type {
  BankRow,
  CacheBytes,
  DesignPlan,
  FlopCount,
  LayerRow,
  ParameterRow,
  PositionCounts,
  ProjectionRow,
  ReadRow,
  SuffixTable,
} from './native.js';

/**
 * The plan of a config: per layer what it projects, from which representation, and which banks it reads; the
 * parameter table; counts. Errors: `ERR_CONFIG` where the config describes no legal model, naming the key.
 *
 * @example
 * designPlan(presets.localHistory126M()).parameterCount; // 126248448
 */
export function designPlan(config: ModelConfig): DesignPlan {
  return callNow(() => native.designPlan(config));
}

/**
 * Which of the last positions each layer computes in a prefill of `positions` tokens, by a walk over the
 * plan's dependencies. Errors: `ERR_CONFIG` where the design has no such schedule, `ERR_ARGUMENT`.
 *
 * @example
 * suffixes(presets.localHistory126M(), 1792, 'exact'); // kvInput 4580, queryOutput 3564, …
 */
export function suffixes(config: ModelConfig, positions: number, schedule: Schedule = 'exact'): SuffixTable {
  checkInteger(positions, 'positions', 1, 2 ** 31 - 2);
  const { route, suffix } = checkSchedule(schedule);
  return callNow(() => native.suffixes(config, positions, route, suffix));
}

/**
 * Bytes of a complete cache of `batch` rows of `positions` tokens: what `session.cache.bytes()` reports after
 * such a prefill.
 *
 * @example
 * cacheBytes(presets.localHistory126M(), { batch: 1, positions: 1792 }).total / 2 ** 20; // 33.514
 */
export function cacheBytes(
  config: ModelConfig,
  options: { batch?: number; positions: number; precision?: PrecisionName },
): CacheBytes {
  checkOptions(options, 'options', ['batch', 'positions', 'precision']);
  const { batch = 1, positions, precision = 'fp32' } = options;
  checkInteger(batch, 'batch', 1, 2 ** 31 - 1);
  checkInteger(positions, 'positions', 0, 2 ** 31 - 2);
  checkPrecision(precision);
  return callNow(() => native.cacheBytes(config, batch, positions, precision));
}

/** What attention is counted over. */
export type FlopWorkload =
  /** Documents, each attending within itself. */
  | { readonly documentLengths: ArrayLike<number> }
  /** One document that fills a training window of this many tokens. */
  | { readonly window: number }
  /** Averages over a corpus: tokens, and pairs per token that a full and a windowed bank show. */
  | { readonly tokens: number; readonly causalPairs: number; readonly windowPairs: number };

/**
 * FLOPs of the matrix products of one forward pass, and of training on the same tokens (three times that):
 * projections, FFN, head, and attention over the visible same-document pairs. Norms, softmax, rotary
 * positions, elementwise work, the optimiser, padding and recomputation are not counted (protocols section
 * 2).
 *
 * @example
 * countFlops(presets.gqa2_126M(), { documentLengths: [700, 1348] }).training;
 */
export function countFlops(config: ModelConfig, workload: FlopWorkload): FlopCount {
  if (typeof workload === 'object' && workload !== null && 'tokens' in workload) {
    checkOptions(workload, 'workload', ['tokens', 'causalPairs', 'windowPairs']);
    const { tokens, causalPairs, windowPairs } = workload;
    checkNumber(tokens, 'tokens', { least: 0, open: true });
    checkNumber(causalPairs, 'causalPairs', { least: 1 });
    checkNumber(windowPairs, 'windowPairs', { least: 1 });
    return callNow(() => native.flopsOfPairs(config, tokens, causalPairs, windowPairs));
  }
  checkOptions(workload, 'workload', ['documentLengths', 'window']);
  const { documentLengths, window } = workload as { documentLengths?: ArrayLike<number>; window?: number };
  if ((documentLengths === undefined) === (window === undefined)) {
    throw new DuokvError(
      'ERR_ARGUMENT',
      'workload needs one of documentLengths, window, { tokens, causalPairs, windowPairs }',
    );
  }
  const isList = Array.isArray(documentLengths) || ArrayBuffer.isView(documentLengths);
  if (documentLengths !== undefined && !isList) {
    throw new DuokvError(
      'ERR_ARGUMENT',
      `documentLengths must be an array of lengths, not ${show(documentLengths)}`,
    );
  }
  const lengths = documentLengths === undefined ? [window as number] : Array.from(documentLengths);
  lengths.forEach((length, i) => {
    checkInteger(length, documentLengths === undefined ? 'window' : `documentLengths[${i}]`, 1, 2 ** 31 - 1);
  });
  return callNow(() => native.flopsOfDocuments(config, lengths));
}

export interface MatchedUpdates {
  /** The first whole number of updates whose counted FLOPs reach the reference's. */
  readonly updates: number;
  readonly tokens: number;
  /** Counted training FLOPs of the reference arm and of this one. */
  readonly referenceFlops: number;
  readonly flops: number;
  /** `flops / referenceFlops - 1`. */
  readonly excess: number;
}

/**
 * How many updates of `config` cost as many counted matrix-product FLOPs as `referenceUpdates` of
 * `reference`, when both see the same tokens per update and the same average visible pairs (the paper's
 * matched-compute rule, protocols section 2).
 *
 * @example
 * planMatchedUpdates({
 *   reference: presets.localHistory126M(), referenceUpdates: 19074, config: presets.gqa2_126M(),
 *   tokensPerUpdate: 64 * 2048, causalPairs: 604, windowPairs: 117.1,
 * }).updates; // 19269
 */
export function planMatchedUpdates(options: {
  reference: ModelConfig;
  referenceUpdates: number;
  config: ModelConfig;
  tokensPerUpdate: number;
  causalPairs: number;
  windowPairs: number;
}): MatchedUpdates {
  const keys = ['reference', 'referenceUpdates', 'config', 'tokensPerUpdate', 'causalPairs', 'windowPairs'];
  checkOptions(options, 'options', keys);
  const { reference, referenceUpdates, config, tokensPerUpdate, causalPairs, windowPairs } = options;
  checkInteger(referenceUpdates, 'referenceUpdates', 1);
  checkInteger(tokensPerUpdate, 'tokensPerUpdate', 1);
  const workload = { tokens: tokensPerUpdate, causalPairs, windowPairs };
  const referenceFlops = referenceUpdates * countFlops(reference, workload).training;
  const perUpdate = countFlops(config, workload).training;
  const updates = Math.ceil(referenceFlops / perUpdate);
  const flops = updates * perUpdate;
  return {
    updates,
    tokens: updates * tokensPerUpdate,
    referenceFlops,
    flops,
    excess: flops / referenceFlops - 1,
  };
}
