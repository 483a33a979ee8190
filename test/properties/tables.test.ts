import assert from 'node:assert/strict';

import fc from 'fast-check';

import {
  cacheBytes,
  countFlops,
  designPlan,
  Model,
  type ModelConfig,
  planMatchedUpdates,
  presets,
  suffixes,
} from '../../lib/index.js';
import { configs } from '../reference/arbitraries.js';
import { assertNear, holds } from '../reference/compare.js';
import {
  type Config,
  hasGlobalBank,
  illegality,
  layerCount,
  parameterCount,
  parameterShapes,
} from '../reference/config.js';
import * as counts from '../reference/counts.js';
import { initialise } from '../reference/initialise.js';
import { sameBits, useDevice } from './engine.js';

describe('engine and reference: tables', () => {
  const device = useDevice();

  it('derives the parameters of any legal config', async () => {
    await holds(
      fc.property(configs(), (config) => {
        const plan = designPlan(config);
        const shapes = plan.parameters.map(({ name, shape }) => [name, [...shape]] as const);
        assert.deepEqual(new Map(shapes), parameterShapes(config));
        assert.equal(plan.parameterCount, parameterCount(config));
      }),
      200,
    );
  });

  it('accepts a config exactly where one exists', async () => {
    const wild = fc
      .record({
        config: configs(),
        change: fc.record(
          {
            design: fc.constantFrom(
              'local-history',
              'current-only',
              'global-only',
              'independent',
              'gqa4-cla2',
            ),
            fusion: fc.constantFrom('joint', 'separate'),
            localSource: fc.constantFrom('per-layer', 'paired-input', 'shared-kv'),
            provider: fc.constantFrom('boundary', 'cross'),
            upperLayers: fc.integer({ min: -1, max: 5 }),
            kvHeads: fc.integer({ min: 0, max: 4 }),
            headDim: fc.integer({ min: 0, max: 9 }),
            window: fc.constantFrom(0, 1, 2, 1.5),
            ropeTheta: fc.constantFrom(0, 10000),
          },
          { requiredKeys: [] },
        ),
      })
      .map(({ config, change }) => ({ ...config, ...change }) as Config);
    await holds(
      fc.property(wild, (config) => {
        const reason = illegality(config);
        if (reason === undefined) designPlan(config);
        else assert.throws(() => designPlan(config), { name: 'DuokvError', code: 'ERR_CONFIG' }, reason);
      }),
      500,
    );
  });

  it('walks to the suffixes that the formulas give, by every route, at any length', async () => {
    const cases = fc.record({
      config: configs(),
      window: fc.integer({ min: 1, max: 130 }),
      upperLayers: fc.integer({ min: 1, max: 12 }),
      n: fc.integer({ min: 1, max: 3000 }),
      suffix: fc.integer({ min: 1, max: 3000 }),
    });
    await holds(
      fc.property(cases, ({ config, window, upperLayers, n, suffix }) => {
        const c = { ...config, upperLayers, ...(config.design === 'local-history' && { window }) };
        if (illegality(c) !== undefined) return;
        const schedules: counts.Schedule[] = ['exact', 'full'];
        if (hasGlobalBank(c)) schedules.push('uniform', { approximate: suffix });
        else assert.throws(() => suffixes(c, n, 'uniform'), { code: 'ERR_CONFIG' });
        for (const schedule of schedules) {
          const { kvInput, queryOutput, layers, exact } = suffixes(c, n, schedule);
          assert.deepEqual(
            { kvInput, queryOutput },
            counts.upperPositions(c, n, schedule),
            JSON.stringify(schedule),
          );
          const expected = counts.suffixes(c, n, schedule).map((layer) => layer.queryOutput);
          assert.deepEqual(layers.slice(c.lowerLayers), expected.slice(c.lowerLayers));
          if (typeof schedule === 'string') assert.equal(exact, true);
        }
      }),
      300,
    );
  });

  it('counts the bytes of a complete cache as the formula does', async () => {
    const cases = fc.record({
      config: configs(),
      batch: fc.integer({ min: 1, max: 9 }),
      positions: fc.nat(5000),
    });
    await holds(
      fc.property(
        cases,
        fc.constantFrom('fp32' as const, 'bf16' as const),
        ({ config, batch, positions }, precision) => {
          const { lower, global, local, documentIds, total } = cacheBytes(config, {
            batch,
            positions,
            precision,
          });
          const expected = counts.cacheBytes(config, batch, positions, precision === 'bf16' ? 2 : 4);
          assert.deepEqual({ fullLengthKv: lower + global, local, documentIds, total }, expected);
        },
      ),
      200,
    );
  });

  it('counts the FLOPs of documents as the formula does', async () => {
    const lengths = fc.array(fc.integer({ min: 1, max: 300 }), { minLength: 1, maxLength: 8 });
    await holds(
      fc.property(configs(), lengths, (config, documentLengths) => {
        const tokens = documentLengths.reduce((a, b) => a + b, 0);
        const causal = counts.visiblePairs(documentLengths);
        const local = counts.visiblePairs(documentLengths, config.window);
        const expected = counts.forwardFlops(config, tokens, causal, local);
        const { forward, training } = countFlops(config, { documentLengths });
        assertNear([forward, training], [expected, 3 * expected], { absolute: 0, relative: 1e-12 }, 'FLOPs');
      }),
      200,
    );
  });

  it('matches compute as the paper does', () => {
    const updates = (config: ModelConfig) =>
      planMatchedUpdates({
        reference: presets.localHistory126M(),
        referenceUpdates: 19074,
        config,
        tokensPerUpdate: 64 * 2048,
        causalPairs: 604,
        windowPairs: 117.1,
      }).updates;
    assert.equal(updates(presets.currentOnly126M()), 19267);
    assert.equal(updates(presets.gqa2_126M()), 19269);
    assert.equal(updates(presets.gqa4Cla2_126M()), 19269);
    assert.equal(updates(presets.independent126M()), 19323);
  });

  it('draws the initial values of the reference, bit for bit, whatever the design', async () => {
    await holds(
      fc.asyncProperty(configs(), fc.bigInt({ min: 0n, max: 2n ** 70n }), async (config, seed) => {
        using model = await Model.create(device.current, config, { seed });
        for (const [name, values] of initialise(config, String(seed))) {
          assert.ok(sameBits(await model.readTensor(name), Float32Array.from(values)), name);
        }
      }),
      15,
    );
  });

  it('has the layers that it says', async () => {
    await holds(
      fc.property(configs(), (config) => {
        const { layers, banks, projections } = designPlan(config);
        assert.equal(layers.length, layerCount(config));
        assert.equal(layers.filter(({ upper }) => upper).length, config.upperLayers);
        assert.equal(banks.length, projections.length);
      }),
      50,
    );
  });
});
