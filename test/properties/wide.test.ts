import assert from 'node:assert/strict';

import fc from 'fast-check';

import { configs, idsOf, randomModel, uniform } from '../reference/arbitraries.js';
import { assertNear } from '../reference/compare.js';
import type { Config } from '../reference/config.js';
import { ReferenceRow } from '../reference/execution.js';
import { gradients } from '../reference/model.js';
import { assertGradients, engineModel, FP32, sameBits, useDevice } from './engine.js';

/** Matrices larger than the blocks that products and attention are cut into, most of them with remainders. */
const shapes = fc.record({
  vocab: fc.constantFrom(257, 512, 700),
  hidden: fc.constantFrom(64, 100, 130, 192),
  ffn: fc.constantFrom(96, 200, 257),
  headDim: fc.constantFrom(32, 64, 80, 128),
  lowerLayers: fc.constant(1),
  upperLayers: fc.constantFrom(1, 2),
  window: fc.constantFrom(1, 17, 40),
});

const models = shapes
  .chain(({ window, ...shape }) =>
    configs(shape).map(
      (config): Config => (config.design === 'local-history' ? { ...config, window } : config),
    ),
  )
  .filter(({ queryHeads }) => queryHeads <= 6);

function draw(config: Config, length: number, next: () => number): Int32Array {
  return Int32Array.from({ length }, () => Math.floor(next() * config.vocab));
}

describe('engine and reference: shapes beyond the blocks of the kernels', () => {
  const device = useDevice();

  it('gives logits, gradients, and the cache and logits of an exact prefill', async () => {
    const lengths = fc.array(fc.integer({ min: 1, max: 70 }), { minLength: 1, maxLength: 3 });
    await fc.assert(
      fc.asyncProperty(models, lengths, fc.nat(), async (config, lengths, seed) => {
        const reference = randomModel(config, seed);
        const next = uniform(seed);
        const documentIds = BigInt64Array.from(idsOf(lengths, 0));
        const [tokens, targets] = [
          draw(config, documentIds.length, next),
          draw(config, documentIds.length, next),
        ];
        const batch = { rows: 1, tokens, documentIds, targets, targetDocumentIds: documentIds };
        const expected = gradients(reference, { ...batch, length: tokens.length });
        using model = await engineModel(device.current, reference);
        assertNear(await model.logits({ rows: 1, tokens, documentIds }), expected.logits, FP32, 'logits');
        using trainer = model.trainer({});
        const { gradients: actual } = await trainer.gradients(batch);
        assertGradients(actual, expected);
        const row = new ReferenceRow(reference);
        const end = row.prefill(tokens, documentIds, 'exact');
        using session = model.session({ capacity: tokens.length });
        assertNear((await session.prefill({ tokens, documentIds })).logits, end, FP32, 'prefill');
        for (const name of row.names())
          assertNear(await session.cache.read(name, 0), row.read(name), FP32, name);
      }),
      { numRuns: 6 },
    );
  });

  it('gives a row the same bits alone and in any batch', async () => {
    const batches = fc.record({
      rows: fc.integer({ min: 2, max: 6 }),
      length: fc.integer({ min: 1, max: 150 }),
    });
    await fc.assert(
      fc.asyncProperty(models, batches, fc.nat(), async (config, { rows, length }, seed) => {
        using model = await engineModel(device.current, randomModel(config, seed));
        const next = uniform(seed);
        const tokens = draw(config, rows * length, next);
        const steps = draw(config, rows, next);
        using together = model.session({ batch: rows, capacity: length + 1 });
        using alone = model.session({ batch: 1, capacity: length + 1 });
        const logits = await model.logits({ rows, tokens });
        const prefilled = await together.prefill({ tokens });
        const decoded = await together.decode({ tokens: steps });
        const row = Math.floor(next() * rows);
        const own = tokens.slice(row * length, (row + 1) * length);
        const part = (all: Float32Array, size: number) => all.slice(row * size, (row + 1) * size);
        const { vocab } = config;
        assert.ok(
          sameBits(await model.logits({ rows: 1, tokens: own }), part(logits, length * vocab)),
          'logits',
        );
        await alone.reset();
        assert.ok(
          sameBits((await alone.prefill({ tokens: own })).logits, part(prefilled.logits, vocab)),
          'prefill',
        );
        const step = await alone.decode({ tokens: [steps[row]] });
        assert.ok(sameBits(step.logits, part(decoded.logits, vocab)), 'decode');
        for (const name of together.cache.names().filter((name) => name !== 'documentIds')) {
          assert.ok(sameBits(await alone.cache.read(name, 0), await together.cache.read(name, row)), name);
        }
      }),
      { numRuns: 12 },
    );
  });
});
