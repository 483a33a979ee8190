import assert from 'node:assert/strict';
import { basename, join } from 'node:path';

import { findGoldenCases, type GoldenCase, qualifyGoldenCase, readGoldenCase } from '../lib/golden.js';
import { Model } from '../lib/index.js';
import { useDevice } from './properties/engine.js';
import { fixturesDirectory } from './reference/fixtures.js';

const goldenDirectory = join(fixturesDirectory(), 'golden');
const cases = await findGoldenCases(goldenDirectory);
const committed = join(import.meta.dirname, 'fixtures', 'golden');

describe('golden cases', () => {
  const device = useDevice();
  const qualify = (golden: GoldenCase) =>
    qualifyGoldenCase(golden, (config) => Model.create(device.current, config));

  for (const directory of cases) {
    it(basename(directory), async () => {
      const { quantities } = await qualify(await readGoldenCase(directory));
      const wrong = quantities.filter(({ passed }) => !passed);
      assert.deepEqual(wrong, []);
    });
  }

  it('compare everything that a case has', async () => {
    const { quantities } = await qualify(
      await readGoldenCase(join(committed, 'local-history-separate-sharedkv-cross')),
    );
    const names = quantities.map(({ quantity }) => quantity);
    assert.deepEqual(names.sort(), [
      'adamw1',
      'approximate cache',
      'approximate logits',
      'cache bytes',
      'cache tensors',
      'decode logits',
      'decoded cache',
      'document ids',
      'exact cache',
      'exact logits',
      'exactness',
      'full cache',
      'full logits',
      'gradient elements',
      'gradient norm',
      'gradients',
      'logits',
      'loss',
      'mean nll',
      'nll',
      'parameter names',
      'parameters',
      'positions',
      'recomputed gradients',
      'uniform cache',
      'uniform logits',
      'valid targets',
    ]);
  });

  it('report what is off, where, and by how much', async () => {
    const golden = await readGoldenCase(join(committed, 'local-history-separate-sharedkv-cross'));
    const change = (name: string, index: number, difference: number): GoldenCase => {
      const tensor = golden.expected.get(name)!;
      const values = tensor.values.slice();
      values[index] += difference;
      return { ...golden, expected: new Map([...golden.expected, [name, { ...tensor, values }]]) };
    };
    const fact = (changed: Record<string, unknown>): GoldenCase => ({
      ...golden,
      facts: { ...golden.facts, ...changed },
    });
    const positions = golden.facts.upper_positions as Record<string, Record<string, number>>;
    const broken: [GoldenCase, string, RegExp][] = [
      [change('logits', 7, 1e-2), 'logits', /^logits\[7\] is /],
      [change('nll', 3, Number.NaN), 'nll', /^nll\[3\] .* NaN$/],
      [change('grad.model.norm.weight', 1, 1e-2), 'gradients', /model\.norm\.weight/],
      [change('adamw1.model.norm.weight', 1, 1e-4), 'adamw1', /^model\.norm\.weight\[1\]/],
      [change('prefill_logits', 0, -1e-2), 'uniform logits', /^logits\[0\]/],
      [change('cache.layer.0.k', 5, 1e-2), 'exact cache', /^layer\.0\.k\[5\]/],
      [change('decode_logits', 2, 1e-2), 'decode logits', /^row 0, step 0: logits\[2\]/],
      [change('decoded.cache.layer.1.v', 0, 1e-2), 'decoded cache', /^layer\.1\.v\[0\]/],
      [change('approximate.prefill_logits', 0, 1e-2), 'approximate logits', /^logits\[0\]/],
      [fact({ parameters: 7 }), 'parameters', /expected 7$/],
      [fact({ loss: 1 }), 'loss', /expected 1$/],
      [fact({ grad_norm: 1 }), 'gradient norm', /expected 1$/],
      [
        fact({ upper_positions: { ...positions, exact: { ...positions.exact, kv_input_positions: 1 } } }),
        'positions',
        /expected 1 and /,
      ],
      [
        fact({ cache_bytes_fp32: { kv: 1, document_ids: 2, total: 3 } }),
        'cache bytes',
        /expected 1 \+ 2 \+ 3$/,
      ],
    ];
    for (const [changed, quantity, at] of broken) {
      const result = await qualify(changed);
      assert.equal(result.passed, false, quantity);
      const found = result.quantities.find((candidate) => candidate.quantity === quantity);
      assert.ok(found !== undefined && !found.passed && found.worst > 1, quantity);
      assert.match(found.at, at);
      assert.deepEqual(JSON.parse(JSON.stringify(result)), { ...result });
    }
  });

  it('of training report recomputation that changes a bit', async () => {
    const golden = await readGoldenCase(join(committed, 'train3-gqa4-cla2'));
    let models = 0;
    const { quantities, passed } = await qualifyGoldenCase(golden, (config) => {
      models++;
      return Model.create(device.current, models === 2 ? { ...config, rmsNormEps: 1e-4 } : config);
    });
    assert.ok(models === 2 && !passed);
    const found = quantities.find(({ quantity }) => quantity === 'recomputed parameters');
    assert.equal(found?.passed, false);
    assert.match(found.at, /^model\..*\[\d+\] is .*, expected /);
  });

  it('refuse what is no case, and a case that lacks something', async () => {
    await assert.rejects(findGoldenCases(import.meta.dirname), { code: 'ERR_ARGUMENT' });
    await assert.rejects(findGoldenCases(join(committed, 'absent')), { code: 'ERR_ARGUMENT' });
    assert.deepEqual(await findGoldenCases(join(committed, 'gqa2')), [join(committed, 'gqa2')]);
    const golden = await readGoldenCase(join(committed, 'gqa2'));
    const without = {
      ...golden,
      expected: new Map([...golden.expected].filter(([name]) => name !== 'logits')),
    };
    await assert.rejects(qualify(without), { code: 'ERR_CHECKPOINT', message: /logits/ });
    const facts = { ...golden.facts, upper_positions: null };
    await assert.rejects(qualify({ ...golden, facts }), {
      code: 'ERR_CHECKPOINT',
      message: /upper_positions/,
    });
    await assert.rejects(qualify({ ...golden, config: { ...golden.config, kvHeads: 5 } }), {
      code: 'ERR_CONFIG',
    });
  });
});
