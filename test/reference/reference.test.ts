import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { basename, join } from 'node:path';

import fc from 'fast-check';

import { findGoldenCases, type GoldenCase, readGoldenCase } from '../../lib/golden.js';
import { batches, configs, randomModel } from './arbitraries.js';
import { assertNear } from './compare.js';
import { type Config, illegality, parameterCount, parameterShapes } from './config.js';
import { cacheBytes, forwardFlops, type Schedule, upperPositions } from './counts.js';
import { ReferenceRow } from './execution.js';
import { batchOf, fixturesDirectory, modelOf, readTables } from './fixtures.js';
import { initialStd, philox, standardNormal } from './initialise.js';
import { attend, bf16 } from './math.js';
import { evaluate, forwardRow, gradients, localMass, zerosLike } from './model.js';
import { adamW, clipCoefficient, learningRate } from './optimiser.js';

const fixtures = fixturesDirectory();
const goldenCases = await findGoldenCases(join(fixtures, 'golden'));
/** Two orders of summation in FP64. */
const ROUNDING = { absolute: 1e-11, relative: 1e-11 };
const ADAMW = { betas: [0.9, 0.95] as [number, number], eps: 1e-8, weightDecay: 0.1, clipNorm: 1 };

/**
 * Golden tensors are FP64 results stored as FP32. Two FP64 implementations differ by far less than that storage: half a
 * unit in the last place, 6e-8 of the largest value.
 */
function assertStored(actual: ArrayLike<number>, golden: GoldenCase, name: string): void {
  const tensor = golden.expected.get(name);
  assert.ok(tensor !== undefined, `${golden.name}: has no ${name}`);
  assert.equal(actual.length, tensor.values.length, `${golden.name}: ${name}`);
  const largest = tensor.values.reduce((max, value) => Math.max(max, Math.abs(value)), 0);
  let worst = 0;
  for (let i = 0; i < actual.length; i++) worst = Math.max(worst, Math.abs(actual[i] - tensor.values[i]));
  assert.ok(
    worst <= 1e-7 * largest + 1e-12,
    `${golden.name}: ${name} deviates by ${worst}, largest value ${largest}`,
  );
}

function assertClose(actual: number, expected: number, name: string): void {
  assert.ok(
    Math.abs(actual - expected) <= 1e-10 * Math.abs(expected),
    `${name}: ${actual}, expected ${expected}`,
  );
}

/** Concatenation of what `read` returns for each row. */
function stacked(rows: ReferenceRow[], name: string): Float64Array {
  const parts = rows.map((row) => row.read(name));
  const all = new Float64Array(parts.length * parts[0].length);
  for (const [r, part] of parts.entries()) all.set(part, r * part.length);
  return all;
}

function prefilled(golden: GoldenCase, schedule: Schedule) {
  const { rows, length, tokens, documentIds } = batchOf(golden);
  const model = modelOf(golden);
  const slots: ReferenceRow[] = [];
  const logits: number[] = [];
  for (let r = 0; r < rows; r++) {
    const slot = new ReferenceRow(model);
    const span = [r * length, (r + 1) * length];
    logits.push(...slot.prefill(tokens.slice(...span), documentIds.slice(...span), schedule));
    slots.push(slot);
  }
  return { slots, logits };
}

function checkBytes(golden: GoldenCase, key: string, length: number): void {
  const { config } = modelOf(golden);
  const bytes = cacheBytes(config, golden.shape[0], length, 4);
  const expected = {
    kv: bytes.fullLengthKv + bytes.local,
    document_ids: bytes.documentIds,
    total: bytes.total,
  };
  assert.deepEqual(golden.facts[key], expected);
}

/** Cache tensors named with `prefix` are exactly those that the rows store, with the same values. */
function checkCache(golden: GoldenCase, slots: ReferenceRow[], prefix: string, part = ''): void {
  const names = slots[0].names().filter((name) => name.startsWith(part));
  const stored = [...golden.expected.keys()].filter((name) => name.startsWith(prefix));
  assert.deepEqual(names.map((name) => prefix + name).sort(), stored.sort());
  for (const name of names) assertStored(stacked(slots, name), golden, prefix + name);
}

function checkTraining(golden: GoldenCase): void {
  const model = modelOf(golden);
  const result = gradients(model, batchOf(golden));
  assertStored(result.logits, golden, 'logits');
  assertStored(result.nll, golden, 'nll');
  assert.equal(result.validTargets, golden.facts.valid_targets);
  assertClose(result.loss, golden.facts.loss as number, 'loss');
  assertClose(result.gradNorm, golden.facts.grad_norm as number, 'grad_norm');
  assertClose(
    clipCoefficient(result.gradNorm, 1),
    golden.facts.clip_coefficient as number,
    'clip_coefficient',
  );
  for (const [name, gradient] of result.gradients) assertStored(gradient, golden, `grad.${name}`);
  const moments = { first: zerosLike(model.config), second: zerosLike(model.config) };
  adamW(model.weights, result.gradients, moments, result.gradNorm, 1, 3e-4, ADAMW);
  if (!golden.expected.has('adamw1.model.norm.weight')) return;
  for (const [name, values] of model.weights) assertStored(values, golden, `adamw1.${name}`);
}

function checkExecution(golden: GoldenCase): void {
  const { config } = modelOf(golden);
  const { rows, length } = batchOf(golden);
  const positions = golden.facts.upper_positions as Record<string, Record<string, number>>;
  for (const schedule of Object.keys(positions) as ('exact' | 'full' | 'uniform')[]) {
    const { kvInput, queryOutput } = upperPositions(config, length, schedule);
    const { kv_input_positions, query_output_positions } = positions[schedule];
    assert.deepEqual([kvInput, queryOutput], [kv_input_positions, query_output_positions], schedule);
    // Beyond 512 positions the costlier routes would take most of the suite's time and show nothing new.
    if (schedule !== 'exact' && length > 512) continue;
    const { slots, logits } = prefilled(golden, schedule);
    assertStored(logits, golden, 'prefill_logits');
    checkCache(golden, slots, 'cache.');
    if (schedule !== 'exact') continue;

    const steps = golden.facts.decode_steps as number;
    const tokens = golden.tokens.get('decode_tokens')!;
    const ids = golden.documentIds.get('decode_document_ids')!;
    const decoded = slots.flatMap((slot, r) =>
      Array.from({ length: steps }, (_, s) => slot.decode(tokens[r * steps + s], ids[r * steps + s])),
    );
    assertStored(
      decoded.flatMap((row) => [...row]),
      golden,
      'decode_logits',
    );
    checkCache(golden, slots, 'decoded.cache.');
    checkBytes(golden, 'cache_bytes_fp32_after_decode', length + steps);
  }
  checkBytes(golden, 'cache_bytes_fp32', length);
  assert.equal(rows, golden.shape[0]);
  const approximate = golden.facts.approximate_R as number | null;
  if (approximate !== null) {
    const { slots, logits } = prefilled(golden, { approximate });
    assertStored(logits, golden, 'approximate.prefill_logits');
    checkCache(golden, slots, 'approximate.cache.', 'local.');
  }
}

function checkThreeUpdates(golden: GoldenCase): void {
  const model = modelOf(golden);
  const moments = { first: zerosLike(model.config), second: zerosLike(model.config) };
  const schedule = golden.facts.schedule as { peak: number; warmup: number; total: number };
  for (const facts of golden.facts.updates as Record<string, number>[]) {
    const result = gradients(model, batchOf(golden, facts.update - 1));
    assert.equal(result.validTargets, facts.valid_targets);
    assertClose(result.loss, facts.loss, 'loss');
    assertClose(result.gradNorm, facts.grad_norm, 'grad_norm');
    const rate = learningRate(schedule, facts.update);
    assertClose(rate, facts.lr, 'lr');
    adamW(model.weights, result.gradients, moments, result.gradNorm, facts.update, rate, ADAMW);
    for (const [name, values] of model.weights) assertStored(values, golden, `update${facts.update}.${name}`);
  }
}

describe('FP64 reference: golden values', () => {
  for (const directory of goldenCases) {
    it(basename(directory), async function () {
      // One case has 1,100 positions in nine layers, which plain loops take their time for.
      this.timeout(600_000);
      const golden = await readGoldenCase(directory);
      const { config } = modelOf(golden);
      assert.equal(illegality(config), undefined);
      assert.deepEqual([...golden.weights.keys()].sort(), [...parameterShapes(config).keys()].sort());
      if (golden.facts.updates !== undefined) checkThreeUpdates(golden);
      else {
        assert.equal(parameterCount(config), golden.facts.parameters);
        checkTraining(golden);
        checkExecution(golden);
      }
    });
  }
});

/** The configurations of the tables: the two shapes of the paper. */
function presetOf(design: Partial<Config>, size: '126m' | '305m'): Config {
  const shape =
    size === '126m'
      ? { hidden: 768, ffn: 2048, lowerLayers: 8, upperLayers: 8, queryHeads: 12 }
      : { hidden: 1024, ffn: 2816, lowerLayers: 12, upperLayers: 12, queryHeads: 16 };
  const c: Config = {
    design: 'local-history',
    fusion: 'joint',
    localSource: 'per-layer',
    provider: 'boundary',
    vocab: 32768,
    kvHeads: 4,
    headDim: 64,
    window: 1,
    ropeTheta: 10000,
    ropeScale: 1,
    rmsNormEps: 1e-5,
    ...shape,
    ...design,
  };
  if (c.design === 'local-history') c.window = 128;
  if (c.design === 'repeated-current') c.historyWindow = 128;
  if (c.design === 'global-adapters') c.adapterRank = 256;
  if (c.design === 'gqa2') c.kvHeads = 2;
  if (c.design.startsWith('gqa')) c.ffn = 2144;
  return c;
}

describe('FP64 reference: tables', () => {
  const tables = readTables();

  it('counts parameters, positions and cache bytes of every design as the tables do', () => {
    for (const {
      parameters_126m,
      parameters_305m,
      positions_126m,
      cache_126m,
      ...design
    } of tables.designs) {
      const c = presetOf(design, '126m');
      assert.equal(illegality(c), undefined);
      assert.equal(parameterCount(c), parameters_126m);
      if (parameters_305m !== undefined)
        assert.equal(parameterCount(presetOf(design, '305m')), parameters_305m);
      for (const { N, ...routes } of positions_126m) {
        for (const [route, counts] of Object.entries(routes)) {
          const { kvInput, queryOutput } = upperPositions(c, N, route as Schedule);
          assert.deepEqual(
            [kvInput, queryOutput],
            [counts.kv_input_positions, counts.query_output_positions],
          );
        }
      }
      for (const { N, B, ...bytes } of cache_126m) {
        const { fullLengthKv, local, documentIds, total } = cacheBytes(c, B, N, 4);
        assert.equal(fullLengthKv + local, bytes.kv_bytes_fp32);
        assert.equal(documentIds, bytes.document_id_bytes);
        assert.equal(total, bytes.total_bytes_fp32);
      }
    }
  });

  it('follows the learning-rate schedules', () => {
    for (const { points, ...schedule } of tables.learning_rates) {
      for (const [update, rate] of points)
        assertClose(learningRate(schedule, update), rate, `update ${update}`);
    }
  });

  it("gives the paper's matched update counts", () => {
    const pairs = { causal: 604, local: 117.1 };
    const flops = (design: Partial<Config>) => {
      const c = presetOf(design, '126m');
      return forwardFlops(c, 1, pairs.causal, c.window === 1 ? 1 : pairs.local);
    };
    const budget = 19074 * flops({});
    const matched = (design: Config['design']) => {
      const updates = Math.ceil(budget / flops({ design }));
      return [updates, Number((100 * ((updates * flops({ design })) / budget - 1)).toFixed(4))];
    };
    assert.deepEqual(matched('current-only'), [19267, 0.0006]);
    assert.deepEqual(matched('gqa2'), [19269, 0.0023]);
    assert.deepEqual(matched('gqa4-cla2'), [19269, 0.0023]);
    assert.deepEqual(matched('independent'), [19323, 0.003]);
    assertClose(
      Number((100 * (1 - flops({ localSource: 'shared-kv' }) / flops({}))).toFixed(3)),
      1.104,
      'shared-kv',
    );
  });

  it('draws the initial values of the golden streams', () => {
    const { cases } = JSON.parse(readFileSync(join(fixtures, 'initialisation.json'), 'utf8')) as {
      cases: { seed: string; name: string; std: number; index: number[]; value: number[] }[];
    };
    const c = presetOf({}, '126m');
    for (const { seed, name, std, index, value } of cases) {
      assertClose(initialStd(c, name) ?? NaN, std, `standard deviation of ${name}`);
      const normal = standardNormal(seed, name);
      index.forEach((element, i) => {
        assert.equal(
          Math.fround(normal(element) * std),
          Math.fround(value[i]),
          `${seed}:${name}[${element}]`,
        );
      });
    }
  });

  it("computes Philox4x32-10 as its authors' known answers say", () => {
    const hex = (words: number[]) => words.map((w) => w.toString(16).padStart(8, '0')).join(' ');
    const ones = 0xffffffff;
    assert.equal(hex(philox([0, 0, 0, 0], [0, 0])), '6627e8d5 e169c58d bc57ac4c 9b00dbd8');
    assert.equal(hex(philox([ones, ones, ones, ones], [ones, ones])), '408f276d 41c83b0e a20bc7c6 6d5451fd');
    const counter: [number, number, number, number] = [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344];
    assert.equal(hex(philox(counter, [0xa4093822, 0x299f31d0])), 'd16cfe09 94fdcceb 5001e420 24126ea1');
  });
});

describe('FP64 reference: properties', () => {
  it('has gradients that finite differences confirm, tensor by tensor', async () => {
    const models = configs().chain((c) =>
      fc.record({ c: fc.constant(c), batch: batches(c, { rows: 2, length: 12 }), seed: fc.nat() }),
    );
    await fc.assert(
      fc.property(models, ({ c, batch, seed }) => {
        const model = randomModel(c, seed);
        const { gradients: analytic, gradNorm } = gradients(model, batch);
        for (const [name, w] of model.weights) {
          // Near the gradient the derivative is large against the rounding of the differences; the rest of the
          // direction tells a wrong gradient of the right length.
          const gradient = analytic.get(name)!;
          const norm = Math.hypot(...gradient);
          const direction = gradient.map(
            (value, i) => (norm === 0 ? 0 : value / norm) + Math.cos(i) / Math.sqrt(w.length),
          );
          const expected = gradient.reduce((sum, value, i) => sum + value * direction[i], 0);
          const lossAt = (step: number) => {
            model.weights.set(
              name,
              w.map((value, i) => value + step * direction[i]),
            );
            return evaluate(model, batch).loss;
          };
          const h = 1e-4;
          const difference = (8 * (lossAt(h) - lossAt(-h)) - (lossAt(2 * h) - lossAt(-2 * h))) / (12 * h);
          model.weights.set(name, w);
          assert.ok(
            Math.abs(difference - expected) <= 1e-6 * norm + 1e-9 * (1 + gradNorm),
            `${name}: ${difference}, gradient ${expected}`,
          );
        }
      }),
      { numRuns: 15 },
    );
  });

  it('prefills alike by every exact route, in chunks, and step by step', async () => {
    const cases = configs({}).chain((c) =>
      fc.record({
        c: fc.constant(c),
        batch: batches(c, { rows: 1, length: 24 }),
        seed: fc.nat(),
        cut: fc.nat(23),
      }),
    );
    await fc.assert(
      fc.property(cases, ({ c, batch, seed, cut }) => {
        const model = randomModel(c, seed);
        const { tokens, documentIds, length } = batch;
        const { logits } = forwardRow(model, tokens, documentIds);
        const end = logits.subarray((length - 1) * c.vocab);
        const full = new ReferenceRow(model);
        full.prefill(tokens, documentIds, 'full');
        const check = (row: ReferenceRow, prefilled: Float64Array, how: string) => {
          assertNear(prefilled, end, ROUNDING, `${how}: logits`);
          assert.deepEqual(row.names(), full.names());
          for (const name of full.names())
            assertNear(row.read(name), full.read(name), ROUNDING, `${how}: ${name}`);
        };
        const exact = new ReferenceRow(model);
        check(exact, exact.prefill(tokens, documentIds, 'exact'), 'exact');
        const chunked = new ReferenceRow(model);
        const at = 1 + (cut % length);
        let logitsOfChunk = chunked.prefill(tokens.slice(0, at), documentIds.slice(0, at), 'exact');
        if (at < length) logitsOfChunk = chunked.prefill(tokens.slice(at), documentIds.slice(at), 'exact');
        check(chunked, logitsOfChunk, 'chunks');
        const stepwise = new ReferenceRow(model);
        let logitsOfStep: Float64Array = new Float64Array();
        for (let t = 0; t < length; t++) logitsOfStep = stepwise.decode(tokens[t], documentIds[t]);
        check(stepwise, logitsOfStep, 'steps');
      }),
      { numRuns: 40 },
    );
  });

  it('mixes its branches by the mass that paper equation 2 states', async () => {
    const cases = configs({ fusion: 'joint' })
      .filter((c) => ['local-history', 'current-only', 'repeated-current'].includes(c.design))
      .chain((c) =>
        fc.record({ c: fc.constant(c), batch: batches(c, { rows: 1, length: 16 }), seed: fc.nat() }),
      );
    await fc.assert(
      fc.property(cases, ({ c, batch, seed }) => {
        const tape = forwardRow(randomModel(c, seed), batch.tokens, batch.documentIds);
        for (let layer = c.lowerLayers; layer < c.lowerLayers + c.upperLayers; layer++) {
          const { queries, reads, attended } = tape.blocks[layer];
          const [global, local] = reads.map((read) => attend(queries, [read], 'exact').out);
          const alpha = localMass(tape, layer);
          const mixed = global.map((g, i) => {
            const mass = alpha[Math.floor(i / c.headDim)];
            return (1 - mass) * g + mass * local[i];
          });
          assertNear(attended, mixed, ROUNDING, `layer ${layer}`);
        }
      }),
      { numRuns: 20 },
    );
  });

  it('rounds to the nearest BF16, ties to even', () => {
    const cases: [number, number][] = [
      [1 + 2 ** -8, 1],
      [1 + 2 ** -8 + 2 ** -20, 1 + 2 ** -7],
      [1 + 3 * 2 ** -8, 1 + 2 ** -6],
      [-(1 + 2 ** -8), -1],
      [0, 0],
      [3.4e38, Infinity],
    ];
    for (const [x, expected] of cases) assert.equal(bf16(x), expected);
  });

  it('names the reason where no such model exists', () => {
    const c = presetOf({}, '126m');
    const illegal: [Partial<Config>, RegExp][] = [
      [{ upperLayers: 7, localSource: 'shared-kv' }, /even number of upper layers/],
      [{ upperLayers: 7, localSource: 'paired-input' }, /even number of upper layers/],
      [{ design: 'gqa4-cla2', upperLayers: 7 }, /even number of layers/],
      [{ design: 'independent', fusion: 'separate' }, /fusion/],
      [{ design: 'global-only', window: 1, provider: 'cross' }, /provider/],
      [{ design: 'current-only', window: 2 }, /window/],
      [{ design: 'repeated-current', window: 1 }, /historyWindow/],
      [{ design: 'global-adapters', window: 1 }, /adapterRank/],
      [{ headDim: 63 }, /head dimension/],
      [{ kvHeads: 5 }, /query heads/],
      [{ hidden: 0 }, /hidden/],
      [{ ropeScale: 0 }, /ropeScale/],
    ];
    for (const [change, reason] of illegal) assert.match(illegality({ ...c, ...change }) ?? '', reason);
  });
});
