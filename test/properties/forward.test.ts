import assert from 'node:assert/strict';

import fc from 'fast-check';

import { batches, configs, idsOf, randomModel, uniform } from '../reference/arbitraries.js';
import { block, documentsOf, kvNames, type Model, projectKv } from '../reference/block.js';
import { assertNear, distanceOf, normOf } from '../reference/compare.js';
import { type Config, hasLocalBanks, isUpper } from '../reference/config.js';
import { type Bank, rotary } from '../reference/math.js';
import { type Batch, embed, evaluate, gradients, head } from '../reference/model.js';
import { assertGradients, engineModel, FP32, MEAN_NLL, roundingOf, sameBits, useDevice } from './engine.js';

/** A model with a batch for it. */
function cases(overrides: Partial<Config> = {}, limits = { rows: 3, length: 40 }) {
  return configs(overrides).chain((config) =>
    fc.record({ config: fc.constant(config), batch: batches(config, limits), seed: fc.nat() }),
  );
}

const tokensOf = ({ rows, tokens, documentIds }: Batch) => ({ rows, tokens, documentIds });

describe('engine and reference: whole sequences', () => {
  const device = useDevice();

  it('gives the logits, the cross-entropies and the sums per document', async () => {
    await fc.assert(
      fc.asyncProperty(cases(), async ({ config, batch, seed }) => {
        const reference = randomModel(config, seed);
        const expected = evaluate(reference, batch);
        using model = await engineModel(device.current, reference);
        assertNear(await model.logits(tokensOf(batch)), expected.logits, FP32, 'logits');
        const { length, ...targets } = batch;
        const score = await model.score(targets);
        assertNear(score.tokenNll, expected.nll, FP32, 'tokenNll');
        assert.equal(score.totalTargets, expected.validTargets);
        const rounding = roundingOf(reference, (moved) => evaluate(moved, batch).loss);
        assertNear(
          [score.totalNll / score.totalTargets],
          [expected.loss],
          { ...MEAN_NLL, rounding: () => rounding((loss) => Math.abs(loss - expected.loss)) },
          'mean NLL',
        );
        const sums = new Map<string, { nll: number; targets: number }>();
        for (let i = 0; i < batch.tokens.length; i++) {
          const key = `${Math.floor(i / length)}:${batch.documentIds[i]}`;
          const valid = batch.documentIds[i] === batch.targetDocumentIds[i];
          const sum = sums.get(key) ?? { nll: 0, targets: 0 };
          sums.set(key, {
            nll: sum.nll + (valid ? expected.nll[i] : 0),
            targets: sum.targets + (valid ? 1 : 0),
          });
        }
        assert.deepEqual(
          score.documents.map(({ row, id }) => `${row}:${id}`),
          [...sums.keys()],
        );
        for (const [i, { nll, targets }] of [...sums.values()].entries()) {
          assert.equal(score.documents[i].targets, targets);
          assertNear([score.documents[i].nll], [nll], FP32, 'document');
        }
      }),
      { numRuns: 60 },
    );
  });

  it('gives the loss and the gradient of every parameter, whatever the microbatch', async () => {
    await fc.assert(
      fc.asyncProperty(
        cases(),
        fc.integer({ min: 1, max: 3 }),
        async ({ config, batch, seed }, microbatch) => {
          const reference = randomModel(config, seed);
          const expected = gradients(reference, batch);
          using model = await engineModel(device.current, reference);
          using trainer = model.trainer({ microbatch });
          const { length: _, ...targets } = batch;
          const actual = await trainer.gradients(targets);
          assert.equal(actual.validTargets, expected.validTargets);
          const rounding = roundingOf(reference, (moved) => gradients(moved, batch));
          const near = (name: 'loss' | 'gradNorm', limits: { absolute: number; relative: number }) => {
            const granted = () => rounding((moved) => Math.abs(moved[name] - expected[name]));
            assertNear([actual[name]], [expected[name]], { ...limits, rounding: granted }, name);
          };
          near('loss', MEAN_NLL);
          near('gradNorm', { absolute: 1e-6, relative: 1e-5 });
          assertGradients(actual.gradients, expected, rounding);
        },
      ),
      { numRuns: 60 },
    );
  });

  it('lets no position see a later one, nor another document or row', async () => {
    await fc.assert(
      fc.asyncProperty(cases(), fc.nat(), async ({ config, batch, seed }, where) => {
        using model = await engineModel(device.current, randomModel(config, seed));
        const before = await model.logits(tokensOf(batch));
        const changed = where % batch.tokens.length;
        const tokens = batch.tokens.slice();
        tokens[changed] = (tokens[changed] + 1) % config.vocab;
        const after = await model.logits({ ...tokensOf(batch), tokens });
        const rowOf = (i: number) => Math.floor(i / batch.length);
        for (let i = 0; i < tokens.length; i++) {
          const sameDocument =
            rowOf(i) === rowOf(changed) && batch.documentIds[i] === batch.documentIds[changed];
          const span = [i * config.vocab, (i + 1) * config.vocab];
          const same = sameBits(before.slice(...span), after.slice(...span));
          // How far a change reaches within its document is for the comparison with the reference to tell.
          if (!sameDocument || i < changed) assert.ok(same, `position ${i} sees position ${changed}`);
          if (i === changed) assert.ok(!same, `position ${i} does not see itself`);
        }
      }),
      { numRuns: 40 },
    );
  });

  it('restarts rotary positions with the document: stored keys show it, logits do not', async () => {
    const documents = fc.record({
      before: fc.integer({ min: 1, max: 20 }),
      length: fc.integer({ min: 1, max: 20 }),
    });
    await fc.assert(
      fc.asyncProperty(
        configs({ ropeScale: 1 }),
        documents,
        fc.nat(),
        async (config, { before, length }, seed) => {
          using model = await engineModel(device.current, randomModel(config, seed));
          const next = uniform(seed);
          const tokens = Int32Array.from({ length: before + length }, () =>
            Math.floor(next() * config.vocab),
          );
          const documentIds = BigInt64Array.from(idsOf([before, length], 1));
          const packed = await model.logits({ rows: 1, tokens, documentIds });
          const alone = await model.logits({ rows: 1, tokens: tokens.slice(before) });
          assertNear(packed.slice(before * config.vocab), alone, FP32, 'logits');

          using session = model.session({ batch: 1, capacity: before + length });
          await session.prefill({ tokens, documentIds });
          const keys = (await session.cache.read('layer.0.k', 0)).slice(
            before * config.kvHeads * config.headDim,
          );
          using other = model.session({ batch: 1, capacity: length });
          await other.prefill({ tokens: tokens.slice(before) });
          assertNear(keys, await other.cache.read('layer.0.k', 0), FP32, 'keys');
          // Keys at positions that went on counting would be turned by `before` more.
          const shift = new Float64Array(length).fill(before);
          const unshifted = rotary(Float64Array.from(keys), shift, config.headDim, config.ropeTheta, 1, 1);
          assert.ok(distanceOf(unshifted, keys) > 1e-3 * normOf(keys));
        },
      ),
      { numRuns: 30 },
    );
  });

  it('repeats the current entry as literal duplicates would', async () => {
    const repeated = cases(
      { design: 'repeated-current', fusion: 'joint', localSource: 'per-layer', provider: 'boundary' },
      { rows: 1, length: 30 },
    );
    await fc.assert(
      fc.asyncProperty(repeated, async ({ config, batch, seed }) => {
        const reference = randomModel(config, seed);
        using model = await engineModel(device.current, reference);
        const expected = logitsWithDuplicates(reference, batch);
        assertNear(await model.logits(tokensOf(batch)), expected, FP32, 'logits');
      }),
      { numRuns: 30 },
    );
  });

  it('makes repeated-current and current-only coincide under separate fusion', async () => {
    await fc.assert(
      fc.asyncProperty(
        cases({ design: 'repeated-current', fusion: 'separate' }),
        async ({ config, batch, seed }) => {
          const repeated = randomModel(config, seed);
          const { historyWindow: _, ...shape } = config;
          const current: Model = { ...repeated, config: { ...shape, design: 'current-only' } };
          using a = await engineModel(device.current, repeated);
          using b = await engineModel(device.current, current);
          const tolerance = { absolute: 1e-6, relative: 1e-6 };
          assertNear(await a.logits(tokensOf(batch)), await b.logits(tokensOf(batch)), tolerance, 'logits');
        },
      ),
      { numRuns: 20 },
    );
  });

  it('gives exactly zero gradient to the keys of a separate one-entry branch', async () => {
    const single = fc.constantFrom(
      'current-only' as const,
      'repeated-current' as const,
      'local-history' as const,
    );
    const separate = single.chain((design) =>
      cases({ design, fusion: 'separate', ...(design === 'local-history' && { window: 1 }) }),
    );
    await fc.assert(
      fc.asyncProperty(separate, async ({ config, batch, seed }) => {
        using model = await engineModel(device.current, randomModel(config, seed));
        using trainer = model.trainer({});
        const { length: _, ...targets } = batch;
        const result = await trainer.gradients(targets);
        for (let layer = config.lowerLayers; layer < config.lowerLayers + config.upperLayers; layer++) {
          const gradient = result.gradients.get(kvNames(layer).k);
          if (gradient !== undefined)
            assert.ok(
              gradient.every((value) => value === 0),
              `layer ${layer}`,
            );
        }
      }),
      { numRuns: 30 },
    );
  });
});

/**
 * Logits [length, V] with the m_t copies of the current local entry of which the paper speaks as entries of their own:
 * copy number n is hidden from a query with m_t <= n.
 */
function logitsWithDuplicates(model: Model, batch: Batch): Float64Array {
  const { config } = model;
  assert.ok(hasLocalBanks(config) && config.localSource === 'per-layer' && config.provider === 'boundary');
  const row = documentsOf(batch.documentIds);
  let x = embed(model, batch.tokens);
  let global: Bank = { k: new Float64Array(), v: new Float64Array(), first: 0 };
  for (let layer = 0; layer < config.lowerLayers + config.upperLayers; layer++) {
    if (layer === config.lowerLayers) global = projectKv(model, 'global', x, 0, row);
    const own = projectKv(model, layer, x, 0, row);
    if (!isUpper(config, layer)) {
      x = block(model, layer, x, 0, row, [{ bank: own, window: Infinity }]).out;
      continue;
    }
    const copies = Array.from({ length: config.historyWindow! }, (_, copy) => ({
      bank: own,
      window: 1,
      bias: Float64Array.from(row.positions, (p) =>
        copy < Math.min(config.historyWindow!, p + 1) ? 0 : -Infinity,
      ),
    }));
    x = block(model, layer, x, 0, row, [{ bank: global, window: Infinity }, ...copies]).out;
  }
  return head(model, x);
}
