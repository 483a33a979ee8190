import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';

import {
  cacheBytes,
  countFlops,
  designPlan,
  type ModelConfig,
  planMatchedUpdates,
  presets,
  suffixes,
} from '../../lib/index.js';
import { rejectsWith, small } from './support.js';

interface TableRow {
  design: ModelConfig['design'];
  fusion: ModelConfig['fusion'];
  localSource: ModelConfig['localSource'];
  provider: ModelConfig['provider'];
  parameters_126m: number;
  positions_126m: ({ N: number } & Record<
    string,
    { kv_input_positions: number; query_output_positions: number }
  >)[];
  cache_126m: { N: number; B: number; total_bytes_fp32: number; document_id_bytes: number }[];
}

const table = JSON.parse(readFileSync(new URL('../fixtures/tables.json', import.meta.url), 'utf8'));
const rows = table.designs as TableRow[];

const byDesign: Record<ModelConfig['design'], (options: Partial<ModelConfig>) => ModelConfig> = {
  'local-history': presets.localHistory126M,
  'current-only': presets.currentOnly126M,
  'repeated-current': presets.repeatedCurrent126M,
  'global-only': presets.globalOnly126M,
  'global-adapters': presets.globalAdapters126M,
  independent: presets.independent126M,
  gqa2: presets.gqa2_126M,
  'gqa4-cla2': presets.gqa4Cla2_126M,
};
const configOf = ({ design, fusion, localSource, provider }: TableRow) =>
  byDesign[design]({ fusion, localSource, provider } as Partial<ModelConfig>);
const nameOf = ({ design, fusion, localSource, provider }: TableRow) =>
  [design, fusion, localSource, provider].join(' ');

describe('plan', () => {
  it('has the table of every design and option', () => {
    assert.ok(rows.length >= 12, `${rows.length} rows`);
    assert.deepEqual(new Set(rows.map(({ design }) => design)), new Set(Object.keys(byDesign)));
  });

  for (const row of rows) {
    it(`counts parameters, positions and cache bytes of ${nameOf(row)} exactly`, () => {
      const config = configOf(row);
      const plan = designPlan(config);
      assert.equal(plan.parameterCount, row.parameters_126m);
      assert.equal(
        plan.parameters.reduce((sum, { elements }) => sum + elements, 0),
        row.parameters_126m,
      );
      for (const { N, ...routes } of row.positions_126m) {
        for (const route of ['exact', 'full', 'uniform'] as const) {
          const expected = routes[route];
          if (expected === undefined) continue;
          const { kvInput, queryOutput } = suffixes(config, N, route);
          assert.deepEqual(
            { N, route, kvInput, queryOutput },
            { N, route, kvInput: expected.kv_input_positions, queryOutput: expected.query_output_positions },
          );
        }
      }
      for (const { N, B, total_bytes_fp32, document_id_bytes } of row.cache_126m) {
        const bytes = cacheBytes(config, { batch: B, positions: N });
        assert.deepEqual([N, B, bytes.total, bytes.documentIds], [N, B, total_bytes_fp32, document_id_bytes]);
      }
    });
  }

  it('gives the parameter counts of the architecture specification', () => {
    const count = (config: ModelConfig) => designPlan(config).parameterCount;
    assert.equal(count(presets.localHistory126M()), 126_248_448);
    assert.equal(count(presets.localHistory126M({ fusion: 'separate' })), 126_248_544);
    assert.equal(count(presets.localHistory126M({ localSource: 'shared-kv' })), 124_675_584);
    assert.equal(count(presets.localHistory126M({ provider: 'cross' })), 125_854_464);
    assert.equal(count(presets.repeatedCurrent126M()), 126_248_448);
    assert.equal(count(presets.globalOnly126M()), 123_102_720);
    assert.equal(count(presets.globalAdapters126M()), 126_248_448);
    assert.equal(count(presets.gqa4_126M()), 125_854_464);
    assert.equal(count(presets.gqa2_126M()), 126_247_680);
    assert.equal(count(presets.gqa4Cla2_126M()), 126_247_680);
    assert.equal(count(presets.localHistory305M()), 304_662_528);
  });

  it('gives the position counts and cache sizes of the execution specification', () => {
    const local = presets.localHistory126M();
    const of = ({ kvInput, queryOutput }: { kvInput: number; queryOutput: number }) => [kvInput, queryOutput];
    assert.deepEqual(of(suffixes(local, 1792, 'exact')), [4580, 3564]);
    assert.deepEqual(of(suffixes(local, 1792, 'uniform')), [8136, 8136]);
    assert.deepEqual(of(suffixes(local, 1792, 'full')), [8 * 1792, 8 * 1792]);
    assert.deepEqual(
      of(suffixes(presets.localHistory126M({ localSource: 'paired-input' }), 1792)),
      [2548, 1532],
    );
    assert.deepEqual(
      of(suffixes(presets.localHistory126M({ localSource: 'shared-kv' }), 1792)),
      [1274, 1532],
    );
    assert.equal(designPlan(local).uniformSuffix, 1017);
    assert.equal(suffixes(local, 1792, { approximate: 128 }).exact, false);
    const mebibytes = (config: ModelConfig) =>
      Number((cacheBytes(config, { positions: 1792 }).total / 2 ** 20).toFixed(3));
    assert.equal(mebibytes(local), 33.514);
    assert.equal(mebibytes(presets.localHistory126M({ localSource: 'shared-kv' })), 32.514);
    assert.equal(mebibytes(presets.gqa2_126M()), 28.014);
    assert.equal(mebibytes(presets.gqa4Cla2_126M()), 28.014);
    assert.equal(mebibytes(presets.gqa4_126M()), 56.014);
    const half = cacheBytes(local, { positions: 1792, precision: 'bf16' });
    const whole = cacheBytes(local, { positions: 1792 });
    assert.equal(half.total - half.documentIds, (whole.total - whole.documentIds) / 2);
  });

  it('matches updates to the compute of local history as the paper does', () => {
    const matched = (config: ModelConfig, reference = presets.localHistory126M()) =>
      planMatchedUpdates({
        reference,
        referenceUpdates: 19074,
        config,
        tokensPerUpdate: 64 * 2048,
        causalPairs: 604,
        windowPairs: 117.1,
      });
    const cases: [ModelConfig, number, number][] = [
      [presets.currentOnly126M(), 19267, 0.0006],
      [presets.gqa2_126M(), 19269, 0.0023],
      [presets.gqa4Cla2_126M(), 19269, 0.0023],
      [presets.gqa4_126M(), 19323, 0.003],
    ];
    for (const [config, updates, percent] of cases) {
      const result = matched(config);
      assert.equal(result.updates, updates, config.design);
      assert.equal(Number((100 * result.excess).toFixed(4)), percent, config.design);
      assert.equal(result.tokens, updates * 64 * 2048);
    }
    const perUpdate = (config: ModelConfig) =>
      countFlops(config, { tokens: 64 * 2048, causalPairs: 604, windowPairs: 117.1 }).training;
    const saving =
      1 -
      perUpdate(presets.localHistory126M({ localSource: 'shared-kv' })) /
        perUpdate(presets.localHistory126M());
    assert.equal((100 * saving).toFixed(3), '1.104');
  });

  it('counts FLOPs of documents by their visible pairs', () => {
    const config = small();
    const { hidden, ffn, vocab, queryHeads, kvHeads, headDim, lowerLayers, upperLayers } = config;
    const lengths = [1, 3, 9];
    const tokens = 13;
    const causal = lengths.reduce((sum, n) => sum + (n * (n + 1)) / 2, 0);
    const windowed = 1 + 6 + (10 + 5 * 4);
    const flops = countFlops(config, { documentLengths: lengths });
    assert.equal(flops.ffn, tokens * 6 * hidden * ffn * 4);
    assert.equal(flops.head, tokens * 2 * hidden * vocab);
    // Query and output of four layers; K and V of two lower layers, two upper ones and the provider.
    assert.equal(
      flops.projections,
      tokens * (4 * hidden * queryHeads * headDim * 4 + 4 * hidden * kvHeads * headDim * 5),
    );
    assert.equal(
      flops.attention,
      4 * headDim * queryHeads * (causal * (lowerLayers + upperLayers) + windowed * upperLayers),
    );
    assert.equal(flops.forward, flops.projections + flops.ffn + flops.head + flops.attention);
    assert.equal(flops.training, 3 * flops.forward);
    assert.deepEqual(countFlops(config, { window: 9 }), countFlops(config, { documentLengths: [9] }));
    assert.deepEqual(countFlops(config, { documentLengths: Int32Array.from(lengths) }), flops);
  });

  it('describes each layer', () => {
    const plan = designPlan(small({ localSource: 'shared-kv', fusion: 'separate', provider: 'cross' }));
    assert.deepEqual(
      plan.banks.map(({ name, part, window }) => [name, part, window]),
      [
        ['layer.0', 'lower', 0],
        ['layer.1', 'lower', 0],
        ['local.2', 'local', 4],
      ],
    );
    assert.deepEqual(
      plan.layers[3]?.reads.map(({ kBank, vBank, window }) => [kBank, vBank, window]),
      [
        ['layer.1', 'layer.0', 0],
        ['local.2', 'local.2', 4],
      ],
    );
    assert.deepEqual(
      plan.layers.map(({ projects }) => projects.map(({ representation }) => representation)),
      [[0], [1], [2], []],
    );
    assert.deepEqual(
      plan.layers.map(({ separateFusion }) => separateFusion),
      [false, false, true, true],
    );
  });

  it('builds every preset', () => {
    for (const [name, preset] of Object.entries(presets)) {
      const plan = designPlan(preset());
      assert.ok(plan.parameterCount > 0, name);
      assert.equal(plan.layers.length, plan.config.lowerLayers + plan.config.upperLayers, name);
    }
    assert.equal(presets.localHistoryTiny({ vocab: 258 }).vocab, 258);
  });

  it('rejects illegal configs with the reason', async () => {
    const cases: [unknown, RegExp][] = [
      [{ ...small(), windw: 3 }, /unknown config key 'windw'/],
      [{ ...small(), hidden: 12.5 }, /hidden is 12\.5; it must be an integer/],
      [{ ...small(), hidden: '24' }, /hidden is '24'; it must be an integer/],
      [{ ...small(), hidden: undefined }, /hidden is missing/],
      [{ ...small(), hidden: Number.NaN }, /hidden is NaN/],
      [{ ...small(), ropeTheta: 'ten' }, /ropeTheta is 'ten'/],
      [{ ...small(), ropeTheta: -1 }, /ropeTheta is -1/],
      [{ ...small(), design: 'localHistory' }, /design is 'localHistory'; it must be one of local-history,/],
      [{ ...small(), fusion: true }, /fusion is true; it must be a string/],
      [small({ localSource: 'paired-input', upperLayers: 3 }), /upperLayers is 3, an odd number/],
      [small({ localSource: 'shared-kv', upperLayers: 1 }), /upperLayers is 1, an odd number/],
      [presets.gqa4Cla2Tiny({ lowerLayers: 1 }), /lowerLayers \+ upperLayers is 3, an odd number/],
      [presets.globalOnlyTiny({ fusion: 'separate' }), /has no local bank/],
      [presets.currentOnlyTiny({ window: 2 }), /window is 2; design 'current-only' needs 1/],
      [small({ lowerLayers: 100_000 }), /lowerLayers \+ upperLayers is 10000\d; it must be at most 1024/],
      [small({ historyWindow: 4 }), /historyWindow is an option of design 'repeated-current'/],
      [small({ kvHeads: 3 }), /queryHeads is 4; it must be a multiple of kvHeads, which is 3/],
      [null, /config must be an object, not null/],
      ['local-history', /config must be an object/],
      [[], /config must be an object/],
    ];
    for (const [config, message] of cases)
      await rejectsWith('ERR_CONFIG', message, () => designPlan(config as ModelConfig));
    await rejectsWith('ERR_CONFIG', /'uniform' needs a design with a global bank/, () =>
      suffixes(presets.gqa2Tiny(), 10, 'uniform'),
    );
    await rejectsWith('ERR_ARGUMENT', /positions is 0/, () => suffixes(small(), 0));
    await rejectsWith('ERR_ARGUMENT', /documentLengths\[1\] is 2\.5/, () =>
      countFlops(small(), { documentLengths: [1, 2.5] }),
    );
  });
});
