import assert from 'node:assert/strict';
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

import { type BackendName, DuokvError, type ErrorCode, type ModelConfig, presets } from '../../lib/index.js';

/** Where tests run that pass on every backend: DUOKV_TEST_BACKEND, or the CPU. */
export const testBackend = (process.env.DUOKV_TEST_BACKEND ?? 'cpu') as BackendName;

/** Every design at a shape that runs in milliseconds. CUDA knows no smaller heads than of 16. */
export const SMALL = {
  vocab: 61,
  hidden: 24,
  ffn: 40,
  lowerLayers: 2,
  upperLayers: 2,
  queryHeads: 4,
  kvHeads: 2,
  headDim: testBackend === 'cpu' ? 8 : 16,
} as const;

export const small = (options: Partial<ModelConfig> = {}): ModelConfig =>
  presets.localHistoryTiny({ ...SMALL, window: 4, ...options });

/** Every design with `SMALL` sizes, by preset name. */
export const smallDesigns: Record<string, ModelConfig> = {
  localHistory: small(),
  separateSharedKv: small({ fusion: 'separate', localSource: 'shared-kv' }),
  pairedCross: small({ localSource: 'paired-input', provider: 'cross' }),
  currentOnly: presets.currentOnlyTiny(SMALL),
  repeatedCurrent: presets.repeatedCurrentTiny({ ...SMALL, historyWindow: 4 }),
  globalOnly: presets.globalOnlyTiny(SMALL),
  globalAdapters: presets.globalAdaptersTiny({ ...SMALL, adapterRank: 8 }),
  independent: presets.independentTiny(SMALL),
  gqa2: presets.gqa2Tiny({ ...SMALL, kvHeads: 1 }),
  gqa4Cla2: presets.gqa4Cla2Tiny(SMALL),
};

/** A small deterministic stream of integers in `[0, limit)`. */
export function integers(seed: number): (limit: number) => number {
  let state = (seed * 2654435761 + 12345) >>> 0;
  return (limit) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * limit);
  };
}

export function randomTokens(count: number, vocab: number, seed = 1): Int32Array {
  const next = integers(seed);
  return Int32Array.from({ length: count }, () => next(vocab));
}

/** A batch of rows of packed documents, with the targets that continue them. */
export function randomBatch({ vocab }: ModelConfig, rows: number, length: number, seed = 1) {
  const next = integers(seed);
  const batch = {
    rows,
    tokens: new Int32Array(rows * length),
    targets: new Int32Array(rows * length),
    documentIds: new BigInt64Array(rows * length),
    targetDocumentIds: new BigInt64Array(rows * length),
  };
  for (let row = 0; row < rows; row++) {
    let token = next(vocab);
    let id = BigInt(row) * 1_000_000_007n;
    for (let i = row * length; i < (row + 1) * length; i++) {
      batch.tokens[i] = token;
      batch.documentIds[i] = id;
      if (next(6) === 0) id += 4_294_967_296n;
      token = next(vocab);
      batch.targets[i] = token;
      batch.targetDocumentIds[i] = id;
    }
  }
  return batch;
}

/** `call` rejects, or throws, with this code and a message that matches. */
export async function rejectsWith(code: ErrorCode, message: RegExp, call: () => unknown): Promise<void> {
  await assert.rejects(
    async () => call(),
    (error) => {
      assert.ok(error instanceof DuokvError, `expected a DuokvError, got ${error}`);
      assert.equal(error.code, code, error.message);
      assert.match(error.message, message);
      return true;
    },
  );
}

export function sameBits(a: Float32Array, b: Float32Array): boolean {
  return Buffer.from(a.buffer, a.byteOffset, a.byteLength).equals(
    Buffer.from(b.buffer, b.byteOffset, b.byteLength),
  );
}

/** A temporary directory for one test. */
export async function temporaryDirectory(): Promise<AsyncDisposable & { path: string }> {
  const path = await mkdtemp(join(tmpdir(), 'duokv-'));
  return { path, [Symbol.asyncDispose]: () => rm(path, { recursive: true, force: true }) };
}
