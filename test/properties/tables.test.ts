import assert from 'node:assert/strict';

import fc from 'fast-check';

import {
  cacheBytes,
  countFlops,
  designPlan,
  Model,
  type ModelConfig,
  type Preset,
  planMatchedUpdates,
  presets,
  suffixes,
} from '../../lib/index.js';
import { configs } from '../reference/arbitraries.js';
import { assertNear } from '../reference/compare.js';
import {
  bankLayer,
  type Config,
  hasGlobalBank,
  illegality,
  isUpper,
  kvInputLayer,
  layerCount,
  parameterCount,
  parameterShapes,
  projectsKv,
} from '../reference/config.js';
import * as counts from '../reference/counts.js';
import { readTables } from '../reference/fixtures.js';
import { initialise } from '../reference/initialise.js';
import { sameBits, useDevice } from './engine.js';

const PRESETS_126M: Record<Config['design'], Preset> = {
  'local-history': presets.localHistory126M,
  'current-only': presets.currentOnly126M,
  'repeated-current': presets.repeatedCurrent126M,
  'global-only': presets.globalOnly126M,
  'global-adapters': presets.globalAdapters126M,
  independent: presets.independent126M,
  gqa2: presets.gqa2_126M,
  'gqa4-cla2': presets.gqa4Cla2_126M,
};
const PRESETS_305M: Partial<Record<Config['design'], Preset>> = {
  'local-history': presets.localHistory305M,
  'current-only': presets.currentOnly305M,
  'repeated-current': presets.repeatedCurrent305M,
};

describe('engine and reference: tables', () => {
  const device = useDevice();

  it('gives the parameters, positions and cache bytes of every preset that the tables have', () => {
    for (const { design, fusion, localSource, provider, ...table } of readTables().designs) {
      const options = fusion === undefined ? {} : { fusion, localSource, provider };
      const config = PRESETS_126M[design](options);
      assert.equal(designPlan(config).parameterCount, table.parameters_126m);
      const larger = PRESETS_305M[design]?.(options);
      if (larger !== undefined) assert.equal(designPlan(larger).parameterCount, table.parameters_305m);
      for (const { N, ...routes } of table.positions_126m) {
        for (const [route, expected] of Object.entries(routes)) {
          const { kvInput, queryOutput } = suffixes(config, N, route as 'exact');
          assert.deepEqual(
            [kvInput, queryOutput],
            [expected.kv_input_positions, expected.query_output_positions],
          );
        }
      }
      for (const { N, B, ...expected } of table.cache_126m) {
        const bytes = cacheBytes(config, { batch: B, positions: N });
        assert.equal(bytes.total - bytes.documentIds, expected.kv_bytes_fp32);
        assert.equal(bytes.documentIds, expected.document_id_bytes);
        assert.equal(bytes.total, expected.total_bytes_fp32);
      }
    }
  });

  it('derives the parameters of any legal config', async () => {
    await fc.assert(
      fc.property(configs(), (config) => {
        const plan = designPlan(config);
        const shapes = plan.parameters.map(({ name, shape }) => [name, [...shape]] as const);
        assert.deepEqual(new Map(shapes), parameterShapes(config));
        assert.equal(plan.parameterCount, parameterCount(config));
      }),
      { numRuns: 200 },
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
    await fc.assert(
      fc.property(wild, (config) => {
        const reason = illegality(config);
        if (reason === undefined) designPlan(config);
        else assert.throws(() => designPlan(config), { name: 'DuokvError', code: 'ERR_CONFIG' }, reason);
      }),
      { numRuns: 500 },
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
    await fc.assert(
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
      { numRuns: 300 },
    );
  });

  it('counts the bytes of a complete cache as the formula does', async () => {
    const cases = fc.record({
      config: configs(),
      batch: fc.integer({ min: 1, max: 9 }),
      positions: fc.nat(5000),
    });
    await fc.assert(
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
      { numRuns: 200 },
    );
  });

  it('counts the FLOPs of documents as the formula does', async () => {
    const lengths = fc.array(fc.integer({ min: 1, max: 300 }), { minLength: 1, maxLength: 8 });
    await fc.assert(
      fc.property(configs(), lengths, (config, documentLengths) => {
        const tokens = documentLengths.reduce((a, b) => a + b, 0);
        const causal = counts.visiblePairs(documentLengths);
        const local = counts.visiblePairs(documentLengths, config.window);
        const expected = counts.forwardFlops(config, tokens, causal, local);
        const { forward, training } = countFlops(config, { documentLengths });
        assertNear([forward, training], [expected, 3 * expected], { absolute: 0, relative: 1e-12 }, 'FLOPs');
      }),
      { numRuns: 200 },
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
    await fc.assert(
      fc.asyncProperty(configs(), fc.bigInt({ min: 0n, max: 2n ** 70n }), async (config, seed) => {
        using model = await Model.create(device.current, config, { seed });
        for (const [name, values] of initialise(config, String(seed))) {
          assert.ok(sameBits(await model.readTensor(name), Float32Array.from(values)), name);
        }
      }),
      { numRuns: 15 },
    );
  });

  it('tells what each layer projects, from which representation, and what it reads', async () => {
    await fc.assert(
      fc.property(configs(), (config) => {
        const bank = (layer: number) =>
          `${hasGlobalBank(config) && isUpper(config, layer) ? 'local' : 'layer'}.${layer}`;
        const { lowerLayers, provider } = config;
        const [k, v] = provider === 'cross' ? [bank(lowerLayers - 1), bank(0)] : ['global', 'global'];
        const { layers } = designPlan(config);
        assert.equal(layers.length, layerCount(config));
        for (const { layer, upper, projects, reads } of layers) {
          assert.equal(upper, isUpper(config, layer));
          const own = projects.filter((projection) => projection.bank !== 'global');
          // Representation i is the input of layer i.
          const expected = projectsKv(config, layer) ? [[bank(layer), kvInputLayer(config, layer)]] : [];
          assert.deepEqual(
            own.map((projection) => [projection.bank, projection.representation]),
            expected,
          );
          const readsGlobal = upper && hasGlobalBank(config);
          const source = bankLayer(config, layer);
          const window = readsGlobal ? config.window : 0;
          const wanted = [
            ...(readsGlobal ? [[k, v, 0]] : []),
            ...(source === undefined ? [] : [[bank(source), bank(source), window]]),
          ];
          assert.deepEqual(
            reads.map((read) => [read.kBank, read.vBank, read.window]),
            wanted,
          );
        }
      }),
      { numRuns: 100 },
    );
  });
});
