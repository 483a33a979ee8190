import { createRequire } from 'node:module';
import { fileURLToPath } from 'node:url';

import type { ModelConfig } from './config.js';
import { DuokvError, type ErrorCode } from './errors.js';

/*
 * The addon: its types, and the one place that loads it. Calls that return a promise run on the device's
 * engine thread, in the order in which they were made. Token and id arrays are copied when a call is made;
 * Float32Array arguments are used in place until it settles, so only arrays that nobody else holds are
 * passed.
 */

export type PrecisionName = 'fp32' | 'fp32-tf32x3' | 'bf16-tf32x3' | 'bf16';
export type RouteName = 'exact' | 'full' | 'uniform' | 'approximate';

/** K and V made from one representation; they fill the bank of the same name. */
export interface ProjectionRow {
  readonly bank: string;
  /** 0 is the token embedding, `i + 1` the output of layer `i`. */
  readonly representation: number;
  /** Parameter names. */
  readonly norm: string;
  readonly kProj: string;
  readonly vProj: string;
}

/** A bank as a layer reads it. K and V come from different banks only where the provider is `cross`. */
export interface ReadRow {
  readonly kBank: string;
  readonly vBank: string;
  /** Entries visible to a query, its own included; 0: all earlier ones. */
  readonly window: number;
  /** Scores get `+ log m_t`, `m_t = min(historyWindow, position in document + 1)`. */
  readonly multiplicityBias: boolean;
}

export interface LayerRow {
  readonly layer: number;
  readonly upper: boolean;
  readonly projects: readonly ProjectionRow[];
  /** One or two; a global bank comes before a local one. */
  readonly reads: readonly ReadRow[];
  /** Two branches normalised on their own and mixed per head, instead of one softmax over all reads. */
  readonly separateFusion: boolean;
  readonly adapter: boolean;
}

export interface BankRow {
  readonly name: string;
  readonly part: 'lower' | 'global' | 'local';
  /** Entries kept; 0: all. */
  readonly window: number;
}

export interface ParameterRow {
  readonly name: string;
  /** Matrices are `[out, in]`, row-major. */
  readonly shape: readonly number[];
  readonly elements: number;
}

/** What a config comes to: everything the engine computes, stores and counts derives from this table. */
export interface DesignPlan {
  /** The config with every key that applies to it. */
  readonly config: ModelConfig;
  readonly layers: readonly LayerRow[];
  /** In the order of `banks`: `projections[i]` fills `banks[i]`. */
  readonly projections: readonly ProjectionRow[];
  readonly banks: readonly BankRow[];
  readonly parameters: readonly ParameterRow[];
  readonly parameterCount: number;
  /** Upper layers share one bank: the schedules `uniform` and `{ approximate }` exist. */
  readonly hasGlobalBank: boolean;
  /** The shortest suffix that is enough for every upper layer; null without a global bank. */
  readonly uniformSuffix: number | null;
}

/**
 * Positions summed over the upper layers: inputs of their K/V projections (the provider's not counted), and
 * query/output.
 */
export interface PositionCounts {
  readonly kvInput: number;
  readonly queryOutput: number;
}

export interface SuffixTable extends PositionCounts {
  readonly exact: boolean;
  /** Query, output and FFN positions of each layer. */
  readonly layers: readonly number[];
  /** K/V-input positions of each projection. */
  readonly projections: readonly number[];
}

export interface CacheBytes {
  readonly lower: number;
  readonly global: number;
  readonly local: number;
  readonly documentIds: number;
  readonly total: number;
}

/**
 * FLOPs of matrix products, 2 per multiply-add. `forward` is the sum of the first four, `training` three
 * times that.
 */
export interface FlopCount {
  readonly projections: number;
  readonly ffn: number;
  readonly head: number;
  readonly attention: number;
  readonly forward: number;
  readonly training: number;
}

export interface NativeCancellation {
  cancel(): void;
}

/** Device memory of a program at its peak, in bytes. */
export interface MemoryPrediction {
  readonly total: number;
  /** By what it is for: `parameters`, `workspace`, `scratch`, …; see `predictMemory`. */
  readonly parts: Readonly<Record<string, number>>;
}

export interface NativeDevice {
  readonly disposed: boolean;
  info(): {
    name: string;
    isa: string;
    libraries: string;
    attention: string;
    threads: number;
    memoryTotal: number;
    memoryUsed: number;
    memoryFree: number;
    memoryPeak: number;
  };
  /** `seed`: decimal digits, or empty for parameters that will be written. */
  createModel(config: object, seed: string): Promise<NativeModel>;
  predictMemory(config: object, program: object): Promise<MemoryPrediction>;
  close(): Promise<void>;
}

export interface NativeBatch {
  rows: number;
  tokens: Int32Array;
  documentIds?: BigInt64Array | undefined;
  targets?: Int32Array | undefined;
  targetDocumentIds?: BigInt64Array | undefined;
}

export interface NativeTrainerOptions {
  precision: PrecisionName;
  lr: number;
  beta1: number;
  beta2: number;
  eps: number;
  weightDecay: number;
  warmup: number;
  total: number;
  finalFraction: number;
  clipNorm: number;
  microbatch: number;
  recompute: boolean;
  bucketBytes: number;
}

export interface NativeGroup {
  readonly rank: number;
  readonly size: number;
  readonly localRank: number;
  readonly threads: number;
  readonly description: string;
  sum(values: Float64Array): Promise<Float64Array>;
  broadcast(bytes: Uint8Array, root: number): Promise<Uint8Array>;
  fail(reason: string): void;
  close(): Promise<void>;
}

export interface NativeModel {
  readonly disposed: boolean;
  readonly bytes: number;
  readTensor(name: string): Promise<Float32Array>;
  writeTensor(name: string, values: Float32Array): Promise<void>;
  logits(
    batch: NativeBatch,
    precision: PrecisionName,
    cancellation?: NativeCancellation,
  ): Promise<Float32Array>;
  tokenNll(
    batch: NativeBatch,
    precision: PrecisionName,
    cancellation?: NativeCancellation,
  ): Promise<Float32Array>;
  createTrainer(
    options: NativeTrainerOptions,
    group?: NativeGroup,
  ): { trainer: NativeTrainer; ready: Promise<void> };
  createSession(
    batch: number,
    capacity: number,
    precision: PrecisionName,
    graphs: boolean,
  ): { session: NativeSession; ready: Promise<void> };
  dispose(): void;
}

export interface NativeTrainer {
  readonly disposed: boolean;
  readonly bytes: number;
  readonly update: number;
  /** Leaves the gradients to be read with `readState`. */
  gradients(
    batch: NativeBatch,
    cancellation?: NativeCancellation,
  ): Promise<{ loss: number; gradNorm: number; validTargets: number }>;
  step(
    batch: NativeBatch,
    cancellation?: NativeCancellation,
  ): Promise<{
    update: number;
    loss: number;
    gradNorm: number;
    learningRate: number;
    validTargets: number;
    tokens: number;
    seconds: number;
  }>;
  /** In place of `gradients` or `step`, where this rank's batch cannot be used. */
  refuse(): Promise<void>;
  checkRanks(): Promise<void>;
  readState(kind: 'gradient' | 'm' | 'v', name: string): Promise<Float32Array>;
  writeState(kind: 'm' | 'v', name: string, values: Float32Array): Promise<void>;
  setUpdate(update: number): Promise<void>;
  dispose(): void;
}

export interface NativeSession {
  readonly disposed: boolean;
  prefill(
    rows: readonly number[],
    counts: readonly number[],
    tokens: Int32Array,
    documentIds: BigInt64Array | undefined,
    schedule: RouteName,
    suffix: number,
    cancellation?: NativeCancellation,
  ): Promise<{ logits: Float32Array; exact: boolean; positions: PositionCounts[] }>;
  decode(
    rows: readonly number[],
    tokens: Int32Array,
    documentIds: BigInt64Array | undefined,
    cancellation?: NativeCancellation,
  ): Promise<Float32Array>;
  /** Appends tokens and draws one after each row. `settings`: temperature, top k, top p and draw of each row. */
  draw(
    rows: readonly number[],
    counts: readonly number[],
    tokens: Int32Array,
    settings: readonly number[],
    schedule: RouteName,
    suffix: number,
    cancellation?: NativeCancellation,
  ): Promise<{ tokens: number[]; logprobs: number[] }>;
  reset(rows: readonly number[]): Promise<void>;
  /** `row` -1: all rows. */
  readCache(name: string, row: number): Promise<Float32Array | BigInt64Array>;
  /** As the last call that ended left it. */
  state(): CacheBytes & {
    reserved: number;
    device: number;
    host: number;
    graphs: {
      held: number;
      recorded: number;
      replayed: number;
      dropped: number;
      bytes: number;
      driverBytes: number;
      seconds: number;
    };
    lengths: number[];
    exact: boolean[];
  };
  dispose(): void;
}

/** A library of ranks. Found: `version` and `path`, else `why` not. */
export interface NativeFinding {
  readonly found: boolean;
  readonly version: string;
  readonly path: string;
  readonly why: string;
}

interface NativeAddon {
  readonly Cancellation: new () => NativeCancellation;
  /** `options`: of the CUDA backend, the card's index; else empty. */
  openDevice(backend: 'cpu' | 'cuda', threads: number, options?: string): Promise<NativeDevice>;
  /** Without an address: through MPI. */
  joinGroup(address?: { host: string; port: number; rank: number; size: number }): Promise<NativeGroup>;
  findLibraries(): { mpi: NativeFinding; nccl: NativeFinding };
  designPlan(config: unknown): DesignPlan;
  suffixes(config: unknown, positions: number, schedule: RouteName, suffix: number): SuffixTable;
  cacheBytes(config: unknown, batch: number, positions: number, precision: PrecisionName): CacheBytes;
  flopsOfDocuments(config: unknown, documentLengths: readonly number[]): FlopCount;
  flopsOfPairs(config: unknown, tokens: number, causalPairs: number, windowPairs: number): FlopCount;
  /** Devices, models, trainers and sessions whose memory is not freed yet. */
  liveResources(): number;
}

// The package root is one level above this file, in lib/ as in dist/.
const load = createRequire(import.meta.url)('node-gyp-build') as (root: string) => NativeAddon;
export const native = load(fileURLToPath(new URL('..', import.meta.url)));

/** An error of the addon as a DuokvError; anything else as it is. */
function translate(error: unknown): unknown {
  const code = (error as { code?: unknown } | undefined)?.code;
  if (
    !(error instanceof Error) ||
    typeof code !== 'string' ||
    !code.startsWith('ERR_') ||
    error instanceof DuokvError
  ) {
    return error;
  }
  return new DuokvError(code as ErrorCode, error.message, { cause: error });
}

/** Calls a synchronous function of the addon. */
export function callNow<T>(call: () => T): T {
  try {
    return call();
  } catch (error) {
    throw translate(error);
  }
}

/** What waits for a signal. One listener a signal serves them all: a server may share one signal among hundreds. */
const waiting = new WeakMap<AbortSignal, Set<() => void>>();

/** Calls `aborted`, a function of this call alone, when the signal is; not once the function returned has been called. */
export function watch(signal: AbortSignal, aborted: () => void): () => void {
  let calls = waiting.get(signal);
  if (calls === undefined) {
    const all = new Set<() => void>();
    const callAll = () => {
      for (const call of all) call();
    };
    signal.addEventListener('abort', callAll, { once: true });
    waiting.set(signal, all);
    calls = all;
  }
  const joined = calls.add(aborted);
  return () => joined.delete(aborted);
}

/**
 * Makes a call on the engine thread, at once, and lets `signal` cancel it. An aborted call rejects with the
 * signal's reason; a call that was already complete when the signal came resolves.
 */
export async function callEngine<T>(
  call: (cancellation?: NativeCancellation) => Promise<T>,
  signal?: AbortSignal,
): Promise<T> {
  signal?.throwIfAborted();
  const cancellation = signal === undefined ? undefined : new native.Cancellation();
  const unwatch = signal && cancellation && watch(signal, () => cancellation.cancel());
  try {
    return await call(cancellation);
  } catch (error) {
    if ((error as { code?: unknown }).code === 'ABORT_ERR') signal?.throwIfAborted();
    throw translate(error);
  } finally {
    unwatch?.();
  }
}
