import assert from 'node:assert/strict';

import fc from 'fast-check';

import { batches, configs, randomModel, uniform } from '../reference/arbitraries.js';
import { assertNear, distanceOf, normOf } from '../reference/compare.js';
import { hasGlobalBank } from '../reference/config.js';
import { ReferenceRow } from '../reference/execution.js';
import { evaluate, gradients } from '../reference/model.js';
import { engineModel, FP32, useDevice } from './engine.js';

/**
 * With weights of unit variance a few sums that FP32 and FP64 round to different BF16 neighbours would grow from layer to
 * layer; with these the models are about as tame as trained ones.
 */
const GAIN = 0.4;

describe('engine and reference: precision policies', () => {
  const device = useDevice();
  const cases = configs({ hidden: 24, ffn: 32, headDim: 16 }).chain((config) =>
    fc.record({
      config: fc.constant(config),
      // A loss over a few targets is as far off as the worst of them.
      batch: batches(config, { rows: 3, length: 40 }).filter(({ tokens }) => tokens.length >= 40),
      seed: fc.nat(),
    }),
  );

  for (const precision of ['bf16-tf32x3', 'bf16'] as const) {
    it(`rounds what ${precision} rounds, and nothing else`, async () => {
      await fc.assert(
        fc.asyncProperty(cases, async ({ config, batch, seed }) => {
          const reference = randomModel(config, seed, precision, GAIN);
          const expected = gradients(reference, batch);
          const exact = evaluate({ ...reference, precision: 'exact' }, batch);
          using model = await engineModel(device.current, reference);
          using trainer = model.trainer({ precision });
          const { length: _, ...targets } = batch;
          const actual = await trainer.gradients(targets);
          assertNear([actual.loss], [exact.loss], { absolute: 5e-3, relative: 0 }, 'loss');
          for (const [name, gradient] of expected.gradients) {
            const distance = distanceOf(actual.gradients.get(name)!, gradient);
            const limit = 1e-2 * normOf(gradient) + 1e-7;
            assert.ok(distance <= limit, `${name}: distance ${distance}, limit ${limit}`);
          }
        }),
        { numRuns: 12 },
      );
    });
  }

  it('runs fp32-tf32x3 as accurately as fp32 where no kernel splits products', async () => {
    await fc.assert(
      fc.asyncProperty(cases, async ({ config, batch, seed }) => {
        const reference = randomModel(config, seed);
        const { rows, tokens, documentIds } = batch;
        using model = await engineModel(device.current, reference);
        const logits = await model.logits({ rows, tokens, documentIds }, { precision: 'fp32-tf32x3' });
        assertNear(logits, evaluate(reference, batch).logits, FP32, 'logits');
      }),
      { numRuns: 20 },
    );
  });

  it('stores BF16 caches under bf16 alone, of half the bytes', async () => {
    await fc.assert(
      fc.asyncProperty(configs().filter(hasGlobalBank), fc.nat(), async (config, seed) => {
        const reference = randomModel(config, seed, 'bf16');
        using model = await engineModel(device.current, reference);
        const next = uniform(seed);
        const tokens = Int32Array.from({ length: 20 }, () => Math.floor(next() * config.vocab));
        const bytes: number[] = [];
        for (const precision of ['fp32', 'fp32-tf32x3', 'bf16-tf32x3', 'bf16'] as const) {
          using session = model.session({ capacity: 24, precision });
          await session.prefill({ tokens });
          const { total, documentIds } = session.cache.bytes();
          bytes.push(total - documentIds);
          if (precision !== 'bf16') continue;
          const row = new ReferenceRow(reference);
          row.prefill(tokens, new BigInt64Array(20), 'exact');
          for (const name of row.names()) {
            const values = await session.cache.read(name, 0);
            const words = new Uint32Array(values.buffer, values.byteOffset, values.length);
            assert.ok(
              words.every((word) => (word & 0xffff) === 0),
              `${name} is not BF16`,
            );
            assert.ok(distanceOf(values, row.read(name)) <= 2e-2 * normOf(row.read(name)), name);
          }
        }
        assert.deepEqual(bytes, [bytes[0], bytes[0], bytes[0], bytes[0] / 2]);
      }),
      { numRuns: 20 },
    );
  });
});
