import fc from 'fast-check';

import type { Model } from './block.js';
import { type Config, hasLocalBanks, illegality, parameterShapes, type Weights } from './config.js';
import type { Precision } from './math.js';
import type { Batch } from './model.js';

/** Uniform numbers in [0, 1) from a seed (mulberry32). */
export function uniform(seed: number): () => number {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let z = Math.imul(state ^ (state >>> 15), state | 1);
    z ^= z + Math.imul(z ^ (z >>> 7), z | 61);
    return ((z ^ (z >>> 14)) >>> 0) / 2 ** 32;
  };
}

/**
 * Weights under which every term matters: unit-variance projections, so that attention is far from uniform, norm weights of
 * 1 ± 0.25 and fusion logits of ± 0.9. All are FP32 values. `gain` scales the matrices.
 */
export function randomWeights(c: Config, seed: number, gain = 1): Weights {
  const next = uniform(seed);
  const weights: Weights = new Map();
  for (const [name, shape] of parameterShapes(c)) {
    const values = new Float64Array(shape.reduce((a, b) => a * b, 1));
    for (let i = 0; i < values.length; i++) {
      // The sum of four uniforms has variance 1/3 and is close enough to normal.
      const symmetric = Math.sqrt(3) * (next() + next() + next() + next() - 2);
      let value = (0.8 * gain * symmetric) / Math.sqrt(shape.at(-1)!);
      if (name.endsWith('norm.weight')) value = 0.75 + 0.5 * next();
      else if (name.endsWith('fusion_logit')) value = 1.8 * next() - 0.9;
      else if (name.includes('embed_tokens')) value = 0.6 * gain * symmetric;
      values[i] = Math.fround(value);
    }
    weights.set(name, values);
  }
  return weights;
}

export const DESIGNS = [
  'local-history',
  'current-only',
  'repeated-current',
  'global-only',
  'global-adapters',
  'independent',
  'gqa2',
  'gqa4-cla2',
] as const;

/** Legal configurations of small models: every design and option, odd shapes included. */
export function configs(overrides: Partial<Config> = {}): fc.Arbitrary<Config> {
  return fc
    .record({
      // Half of the models are of the designs that have options.
      design: fc.constantFrom(...DESIGNS, 'local-history' as const, 'local-history' as const),
      fusion: fc.constantFrom('joint' as const, 'separate' as const),
      localSource: fc.constantFrom('per-layer' as const, 'paired-input' as const, 'shared-kv' as const),
      provider: fc.constantFrom('boundary' as const, 'cross' as const),
      vocab: fc.integer({ min: 5, max: 40 }),
      hidden: fc.constantFrom(6, 8, 12, 17, 24),
      ffn: fc.constantFrom(4, 9, 16, 32),
      lowerLayers: fc.integer({ min: 0, max: 3 }),
      upperLayers: fc.integer({ min: 0, max: 4 }),
      kvHeads: fc.integer({ min: 1, max: 3 }),
      groups: fc.integer({ min: 1, max: 3 }),
      headDim: fc.constantFrom(4, 8, 16, 32),
      window: fc.integer({ min: 1, max: 9 }),
      historyWindow: fc.integer({ min: 1, max: 9 }),
      adapterRank: fc.integer({ min: 1, max: 6 }),
      ropeTheta: fc.constantFrom(10000, 500),
      ropeScale: fc.constantFrom(1, 1, 4),
      rmsNormEps: fc.constantFrom(1e-5, 1e-3),
    })
    .map(({ groups, historyWindow, adapterRank, ...shape }): Config => {
      const c: Config = { ...shape, queryHeads: groups * shape.kvHeads, ...overrides };
      if (c.design === 'repeated-current') c.historyWindow = historyWindow;
      if (c.design === 'global-adapters') c.adapterRank = adapterRank;
      if (c.design !== 'local-history') c.window = 1;
      if (!hasLocalBanks(c))
        Object.assign(c, { fusion: 'joint', localSource: 'per-layer', provider: 'boundary' });
      return { ...c, ...overrides };
    })
    .filter((c) => illegality(c) === undefined);
}

/** Ids of documents 0, 1, ... of a row: beyond 32 bits, negative, in no order, some equal modulo 2^32. */
export function documentId(document: number, salt: number): bigint {
  const wide = BigInt.asIntN(64, (BigInt(document) + 1n) * 0x9e3779b97f4a7c15n);
  return salt % 2 === 0 ? BigInt(document) * 2n ** 32n + BigInt(salt) : wide;
}

/** The ids of consecutive documents of the given lengths. */
export function idsOf(documentLengths: readonly number[], salt: number): bigint[] {
  return documentLengths.flatMap((length, document) =>
    new Array<bigint>(length).fill(documentId(document, salt)),
  );
}

/** Lengths of consecutive documents that fill `length` positions. */
export function documentLengths(length: number): fc.Arbitrary<number[]> {
  return fc.subarray(Array.from({ length: length - 1 }, (_, i) => i + 1)).map((cuts) => {
    const ends = [...cuts, length];
    return ends.map((end, i) => end - (i === 0 ? 0 : ends[i - 1]));
  });
}

/** Batches with random documents; the last target of a row continues its document or starts another. */
export function batches(c: Config, limits: { rows: number; length: number }): fc.Arbitrary<Batch> {
  return fc
    .record({
      rows: fc.integer({ min: 1, max: limits.rows }),
      length: fc.integer({ min: 1, max: limits.length }),
    })
    .chain(({ rows, length }) =>
      fc.record({
        rows: fc.constant(rows),
        length: fc.constant(length),
        documents: fc.array(documentLengths(length), { minLength: rows, maxLength: rows }),
        salt: fc.nat(3),
        seed: fc.nat(),
      }),
    )
    .map(({ rows, length, documents, salt, seed }) => {
      const next = uniform(seed);
      const draw = () => Math.floor(next() * c.vocab);
      const documentIds = documents.flatMap((lengths) => idsOf(lengths, salt));
      // The first row's last target is valid, so that every batch has one.
      const targetDocumentIds = documentIds.map((id, i) =>
        (i + 1) % length !== 0
          ? documentIds[i + 1]
          : i < length || next() < 0.5
            ? id
            : documentId(length, salt),
      );
      return {
        rows,
        length,
        tokens: Int32Array.from(documentIds, draw),
        documentIds: BigInt64Array.from(documentIds),
        targets: Int32Array.from(documentIds, draw),
        targetDocumentIds: BigInt64Array.from(targetDocumentIds),
      };
    });
}

export function randomModel(config: Config, seed: number, precision: Precision = 'exact', gain = 1): Model {
  return { config, weights: randomWeights(config, seed, gain), precision };
}
