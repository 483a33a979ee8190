import assert from 'node:assert/strict';

import fc from 'fast-check';

import { batches, configs, randomModel, uniform } from '../reference/arbitraries.js';
import { assertNear } from '../reference/compare.js';
import { gradients, zerosLike } from '../reference/model.js';
import { adamW, learningRate } from '../reference/optimiser.js';
import { engineModel, useDevice } from './engine.js';

describe('engine and reference: training', () => {
  const device = useDevice();

  it('follows AdamW, the clip and the schedule over several updates', async () => {
    const cases = configs().chain((config) =>
      fc.record({
        config: fc.constant(config),
        batch: batches(config, { rows: 3, length: 20 }),
        seed: fc.nat(),
        clipNorm: fc.constantFrom(0.01, 1, 100),
        warmup: fc.integer({ min: 0, max: 3 }),
        betas: fc.constantFrom([0.9, 0.95] as [number, number], [0.8, 0.99] as [number, number]),
        weightDecay: fc.constantFrom(0, 0.1),
      }),
    );
    await fc.assert(
      fc.asyncProperty(cases, async ({ config, batch, seed, clipNorm, warmup, betas, weightDecay }) => {
        const reference = randomModel(config, seed);
        using model = await engineModel(device.current, reference);
        // A large eps: where a gradient is rounding noise, Adam's step is noise as well unless eps outweighs it.
        const options = { betas, eps: 1e-3, weightDecay, clipNorm };
        const schedule = { peak: 1e-2, warmup, total: 4 };
        using trainer = model.trainer({
          optimizer: { lr: schedule.peak, betas, eps: options.eps, weightDecay },
          schedule: { warmup, total: schedule.total },
          clipNorm,
          microbatch: 2,
        });
        const moments = { first: zerosLike(config), second: zerosLike(config) };
        const { length: _, ...targets } = batch;
        const next = uniform(seed);
        for (let update = 1; update <= schedule.total; update++) {
          for (let i = 0; i < batch.tokens.length; i++) batch.tokens[i] = Math.floor(next() * config.vocab);
          const expected = gradients(reference, batch);
          const rate = learningRate(schedule, update);
          adamW(reference.weights, expected.gradients, moments, expected.gradNorm, update, rate, options);
          const actual = await trainer.step(targets);
          assert.equal(actual.update, update);
          assert.equal(actual.validTargets, expected.validTargets);
          assert.equal(actual.tokens, batch.tokens.length);
          assertNear([actual.learningRate], [rate], { absolute: 0, relative: 1e-12 }, 'learningRate');
          assertNear(
            [actual.loss],
            [expected.loss],
            { absolute: 1e-5, relative: 1e-5 },
            `loss of update ${update}`,
          );
          assertNear([actual.gradNorm], [expected.gradNorm], { absolute: 1e-5, relative: 1e-4 }, 'gradNorm');
        }
        for (const [name, values] of reference.weights) {
          assertNear(await model.readTensor(name), values, { absolute: 1e-5, relative: 1e-5 }, name);
        }
      }),
      { numRuns: 20 },
    );
  });
});
