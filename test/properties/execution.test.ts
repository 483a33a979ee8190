import assert from 'node:assert/strict';

import fc from 'fast-check';

import type { Session } from '../../lib/index.js';
import { configs, documentId, randomModel, uniform } from '../reference/arbitraries.js';
import { assertNear } from '../reference/compare.js';
import { type Config, hasGlobalBank } from '../reference/config.js';
import { cacheBytes, type Schedule, upperPositions } from '../reference/counts.js';
import { ReferenceRow } from '../reference/execution.js';
import { engineModel, FP32, sameBits, useDevice } from './engine.js';

/** What one call does to one row: how many tokens it appends, and after how many of them a document starts. */
interface Appended {
  row: number;
  count: number;
  /** Positions, before each of which a document starts; 0 is the first appended token. */
  starts: number[];
}

type Call =
  | { kind: 'prefill'; schedule: Schedule; rows: Appended[] }
  | { kind: 'decode'; rows: Appended[] }
  | { kind: 'reset'; rows: number[] };

const BATCH = 3;
const CAPACITY = 90;

function appended(row: number, most: number): fc.Arbitrary<Appended> {
  return fc.integer({ min: 1, max: most }).chain((count) =>
    fc.record({
      row: fc.constant(row),
      count: fc.constant(count),
      starts: fc.uniqueArray(fc.nat(count - 1), { maxLength: 4 }),
    }),
  );
}

/** One or more of the rows, in any order. */
const someRows = fc
  .shuffledSubarray(
    Array.from({ length: BATCH }, (_, row) => row),
    { minLength: 1 },
  )
  .filter((rows) => rows.length > 0);

const toSomeRows = (most: number) =>
  someRows.chain((rows) => fc.tuple(...rows.map((row) => appended(row, most))));

function calls(config: Config): fc.Arbitrary<Call[]> {
  const schedules: Schedule[] = hasGlobalBank(config) ? ['exact', 'full', 'uniform'] : ['exact', 'full'];
  if (hasGlobalBank(config)) schedules.push({ approximate: 3 }, { approximate: 12 });
  const prefill = fc.record({
    kind: fc.constant('prefill' as const),
    schedule: fc.constantFrom(...schedules, 'exact' as const),
    rows: toSomeRows(40),
  });
  const decode = fc.record({ kind: fc.constant('decode' as const), rows: toSomeRows(1) });
  const reset = fc.record({ kind: fc.constant('reset' as const), rows: someRows });
  return fc.array(
    fc.oneof(
      { weight: 3, arbitrary: prefill },
      { weight: 5, arbitrary: decode },
      { weight: 1, arbitrary: reset },
    ),
    {
      minLength: 1,
      maxLength: 12,
    },
  );
}

/** The rows of a session beside their references, fed with the same calls. */
class Pair {
  readonly #session: Session;
  readonly #config: Config;
  readonly #fresh: () => ReferenceRow;
  readonly #rows: ReferenceRow[];
  readonly #documents = new Array<number>(BATCH).fill(0);
  /** Nothing approximate has gone into the row since it was empty. */
  readonly #exact = new Array<boolean>(BATCH).fill(true);
  readonly #next: () => number;

  constructor(session: Session, config: Config, fresh: () => ReferenceRow, seed: number) {
    this.#session = session;
    this.#config = config;
    this.#fresh = fresh;
    this.#rows = Array.from({ length: BATCH }, fresh);
    this.#next = uniform(seed);
  }

  async run(call: Call): Promise<void> {
    if (call.kind === 'reset') {
      await this.#session.reset(call.rows);
      for (const row of call.rows) {
        this.#rows[row] = this.#fresh();
        this.#exact[row] = true;
      }
      return;
    }
    const fitting = call.rows.filter(({ row, count }) => this.#rows[row].length + count <= CAPACITY);
    if (fitting.length === 0) return;
    const rows = fitting.map(({ row }) => row);
    const tokens = fitting.map(({ count }) =>
      Int32Array.from({ length: count }, () => Math.floor(this.#next() * this.#config.vocab)),
    );
    const ids = fitting.map((part) => this.#ids(part));
    if (call.kind === 'prefill') await this.#prefill(call.schedule, rows, tokens, ids);
    else await this.#decode(rows, tokens, ids);
  }

  #ids({ row, count, starts }: Appended): BigInt64Array {
    return BigInt64Array.from({ length: count }, (_, t) => {
      if (starts.includes(t)) this.#documents[row]++;
      return documentId(this.#documents[row], row);
    });
  }

  async #prefill(
    schedule: Schedule,
    rows: number[],
    tokens: Int32Array[],
    documentIds: BigInt64Array[],
  ): Promise<void> {
    const result = await this.#session.prefill({ rows, tokens, documentIds, schedule });
    if (typeof schedule === 'object') for (const row of rows) this.#exact[row] = false;
    assert.equal(
      result.exact,
      rows.every((row) => this.#exact[row]),
    );
    const expected = rows.flatMap((row, i) => [
      ...this.#rows[row].prefill(tokens[i], documentIds[i], schedule),
    ]);
    assertNear(result.logits, expected, FP32, `${schedule} logits of rows ${rows}`);
    const counts = { kvInput: 0, queryOutput: 0 };
    for (const length of new Set(tokens.map((part) => part.length))) {
      const { kvInput, queryOutput } = upperPositions(this.#config, length, schedule);
      counts.kvInput += kvInput;
      counts.queryOutput += queryOutput;
    }
    assert.deepEqual(result.positions, counts);
  }

  async #decode(rows: number[], tokens: Int32Array[], ids: BigInt64Array[]): Promise<void> {
    const { logits } = await this.#session.decode({
      rows,
      tokens: Int32Array.from(tokens, ([token]) => token),
      documentIds: BigInt64Array.from(ids, ([id]) => id),
    });
    const expected = rows.flatMap((row, i) => [...this.#rows[row].decode(tokens[i][0], ids[i][0])]);
    assertNear(logits, expected, FP32, `decode logits of rows ${rows}`);
  }

  /** Every stored tensor of every row, their names, and the bytes. */
  async checkCaches(): Promise<void> {
    const sum = { kv: 0, documentIds: 0, total: 0 };
    for (const [row, expected] of this.#rows.entries()) {
      const length = expected.length;
      const kv = expected.names().reduce((bytes, name) => bytes + 4 * expected.read(name).length, 0);
      sum.kv += kv;
      sum.documentIds += 8 * length;
      sum.total += kv + 8 * length;
      // What an approximate suffix dropped is missing from the formula's banks.
      if (this.#exact[row]) assert.equal(kv + 8 * length, cacheBytes(this.#config, 1, length, 4).total);
      assert.deepEqual(await this.#session.cache.read('documentIds', row), expected.documentIds);
      for (const name of expected.names()) {
        const actual = await this.#session.cache.read(name, row);
        assertNear(actual, expected.read(name), FP32, `${name} of row ${row}`);
      }
      if (length > 0) {
        assert.deepEqual(this.#session.cache.names().sort(), [...expected.names(), 'documentIds'].sort());
      }
    }
    const { lower, global, local, documentIds, total } = this.#session.cache.bytes();
    assert.deepEqual({ kv: lower + global + local, documentIds, total }, sum);
  }
}

describe('engine and reference: sessions', () => {
  const device = useDevice();

  it('agrees after any sequence of prefills, decode steps and resets of any rows', async () => {
    const scripts = configs().chain((config) =>
      fc.record({ config: fc.constant(config), calls: calls(config), seed: fc.nat() }),
    );
    await fc.assert(
      fc.asyncProperty(scripts, async ({ config, calls, seed }) => {
        const reference = randomModel(config, seed);
        using model = await engineModel(device.current, reference);
        using session = model.session({ batch: BATCH, capacity: CAPACITY });
        const pair = new Pair(session, config, () => new ReferenceRow(reference), seed);
        for (const call of calls) await pair.run(call);
        await pair.checkCaches();
      }),
      { numRuns: 60 },
    );
  });

  it('drops what an approximate suffix drops, and says so until the row is reset', async () => {
    const prompts = configs()
      .filter(hasGlobalBank)
      .chain((config) =>
        fc.record({
          config: fc.constant(config),
          length: fc.integer({ min: 1, max: 40 }),
          suffix: fc.integer({ min: 1, max: 45 }),
          seed: fc.nat(),
        }),
      );
    await fc.assert(
      fc.asyncProperty(prompts, async ({ config, length, suffix, seed }) => {
        const reference = randomModel(config, seed);
        using model = await engineModel(device.current, reference);
        using session = model.session({ batch: 1, capacity: 50 });
        const next = uniform(seed);
        const tokens = Int32Array.from({ length }, () => Math.floor(next() * config.vocab));
        const documentIds = BigInt64Array.from(tokens, (_, t) => documentId(t < length / 3 ? 0 : 1, 1));
        const schedule = { approximate: suffix };
        const expected = new ReferenceRow(reference);
        const check = async (logits: Float32Array, wanted: Float64Array, what: string) => {
          assertNear(logits, wanted, FP32, `${what} logits`);
          for (const name of expected.names()) {
            assertNear(await session.cache.read(name, 0), expected.read(name), FP32, `${what} ${name}`);
          }
        };
        const result = await session.prefill({ tokens, documentIds, schedule });
        await check(result.logits, expected.prefill(tokens, documentIds, schedule), 'approximate');
        assert.deepEqual(result.positions, upperPositions(config, length, schedule));
        for (let step = 0; step < 3; step++) {
          const [token, id] = [tokens[step % length], documentIds[length - 1]];
          const { logits } = await session.decode({ tokens: [token], documentIds: BigInt64Array.of(id) });
          await check(logits, expected.decode(token, id), `step ${step}`);
        }
        // Whatever it dropped, an approximate prefill does not claim to be exact.
        assert.equal(result.exact, false);
        const more = await session.prefill({
          tokens: [0],
          documentIds: documentIds.slice(-1),
          schedule: 'exact',
        });
        assert.equal(more.exact, false);
        await session.reset();
        assert.equal((await session.prefill({ tokens, documentIds })).exact, true);
      }),
      { numRuns: 40 },
    );
  });

  it('gives a row the same bits whatever its mates, its slot, and the calls on other rows', async () => {
    const lengths = fc.array(fc.integer({ min: 1, max: 30 }), { minLength: BATCH, maxLength: BATCH });
    await fc.assert(
      fc.asyncProperty(configs(), lengths, fc.nat(), async (config, lengths, seed) => {
        using model = await engineModel(device.current, randomModel(config, seed));
        const next = uniform(seed);
        const prompts = lengths.map((length) =>
          Int32Array.from({ length }, () => Math.floor(next() * config.vocab)),
        );
        const steps = prompts.map(() =>
          Int32Array.from({ length: 4 }, () => Math.floor(next() * config.vocab)),
        );
        using together = model.session({ batch: BATCH, capacity: 40 });
        const prefilled = await together.prefill({ tokens: prompts });
        const decoded: Float32Array[] = [];
        for (let step = 0; step < 4; step++) {
          const tokens = steps.map((tokens) => tokens[step]);
          decoded.push((await together.decode({ tokens })).logits);
        }
        using apart = model.session({ batch: 2, capacity: 35 });
        for (const [row, prompt] of prompts.entries()) {
          const slot = row % 2;
          const span = [row * config.vocab, (row + 1) * config.vocab];
          await apart.reset([slot]);
          const { logits } = await apart.prefill({ tokens: prompt, rows: [slot] });
          assert.ok(sameBits(logits, prefilled.logits.slice(...span)), `prefill of row ${row}`);
          for (let step = 0; step < 4; step++) {
            const alone = await apart.decode({ tokens: [steps[row][step]], rows: [slot] });
            assert.ok(sameBits(alone.logits, decoded[step].slice(...span)), `step ${step} of row ${row}`);
          }
          for (const name of together.cache.names().filter((name) => name !== 'documentIds')) {
            const [a, b] = [await apart.cache.read(name, slot), await together.cache.read(name, row)];
            assert.ok(sameBits(a, b), `${name} of row ${row}`);
          }
        }
      }),
      { numRuns: 30 },
    );
  });
});
