/**
 * duokv trains and serves decoder-only transformers whose upper layers read one shared global KV bank and
 * their own bounded local bank through one softmax, beside the designs they are compared with.
 *
 * @example
 * import { Model, openDevice, presets } from 'duokv';
 *
 * await using device = await openDevice();
 * using model = await Model.create(device, presets.localHistoryTiny(), { seed: 17 });
 * using session = model.session({ capacity: 512 });
 * const { logits } = await session.prefill({ tokens: Int32Array.of(1, 2, 3) });
 */
export type { Schedule, TargetBatch, TokenBatch, Tokens } from './arguments.js';
export type { Design } from './config.js';
export * from './data/index.js';
export { type BackendName, Device, type DeviceInfo, type DeviceOptions, openDevice } from './device.js';
export { DuokvError, type ErrorCode } from './errors.js';
export { Group, type GroupAddress, joinGroup } from './group.js';
export type { FoundLibrary } from './libraries.js';
export { type MemoryPrediction, type MemoryProgram, predictMemory } from './memory.js';
export { type CallOptions, type DocumentScore, Model, type Score } from './model.js';
export type { PrecisionName, RouteName } from './native.js';
export {
  type BankRow,
  type CacheBytes,
  cacheBytes,
  countFlops,
  type DesignPlan,
  designPlan,
  type FlopCount,
  type FlopWorkload,
  type LayerRow,
  type MatchedUpdates,
  type ModelConfig,
  type ParameterRow,
  type PositionCounts,
  type ProjectionRow,
  planMatchedUpdates,
  type ReadRow,
  type SuffixTable,
  suffixes,
} from './plan.js';
export { type Preset, type PresetOptions, presets } from './presets.js';
export {
  type DecodeInput,
  type GeneratedToken,
  type GenerateOptions,
  type GraphStats,
  type PrefillInput,
  type PrefillResult,
  Session,
  type SessionBytes,
  type SessionOptions,
} from './session.js';
export {
  type GradientResult,
  type RankOptions,
  type ResolvedTrainerOptions,
  type StepResult,
  Trainer,
  type TrainerOptions,
} from './trainer.js';
