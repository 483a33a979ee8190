import assert from 'node:assert/strict';

import fc from 'fast-check';

import { openDevice } from '../../lib/index.js';
import { batches, configs, randomModel } from '../reference/arbitraries.js';
import { engineModel, sameBits, useDevice } from './engine.js';

describe('engine: determinism', () => {
  const device = useDevice();
  const cases = configs().chain((config) =>
    fc.record({
      config: fc.constant(config),
      batch: batches(config, { rows: 3, length: 40 }),
      seed: fc.nat(),
    }),
  );

  it('gives a row of a batch the bits that it has alone', async () => {
    await fc.assert(
      fc.asyncProperty(cases, async ({ config, batch, seed }) => {
        using model = await engineModel(device.current, randomModel(config, seed));
        const { rows, length, tokens, documentIds } = batch;
        const together = await model.logits({ rows, tokens, documentIds });
        for (let row = 0; row < rows; row++) {
          const span = [row * length, (row + 1) * length];
          const alone = await model.logits({
            rows: 1,
            tokens: tokens.slice(...span),
            documentIds: documentIds.slice(...span),
          });
          assert.ok(
            sameBits(alone, together.slice(span[0] * config.vocab, span[1] * config.vocab)),
            `row ${row}`,
          );
        }
      }),
      { numRuns: 40 },
    );
  });

  it('gives the same bits on another device of as many threads: logits, gradients, updates', async () => {
    await using other = await openDevice({ backend: 'cpu', threads: 2 });
    await fc.assert(
      fc.asyncProperty(cases, async ({ config, batch, seed }) => {
        const reference = randomModel(config, seed);
        const { length: _, ...targets } = batch;
        const runs = [device.current, other].map(async (device) => {
          using model = await engineModel(device, reference);
          using trainer = model.trainer({ microbatch: 2 });
          const { rows, tokens, documentIds } = targets;
          const logits = await model.logits({ rows, tokens, documentIds });
          const { loss, gradNorm, gradients } = await trainer.gradients(targets);
          for (let update = 0; update < 2; update++) await trainer.step(targets);
          const parameters: Float32Array[] = [];
          for (const name of gradients.keys()) parameters.push(await model.readTensor(name));
          return { logits, loss, gradNorm, tensors: [...gradients.values(), ...parameters] };
        });
        const [a, b] = await Promise.all(runs);
        assert.ok(sameBits(a.logits, b.logits));
        assert.equal(a.loss, b.loss);
        assert.equal(a.gradNorm, b.gradNorm);
        for (const [i, tensor] of a.tensors.entries()) assert.ok(sameBits(tensor, b.tensors[i]));
      }),
      { numRuns: 20 },
    );
  });
});
