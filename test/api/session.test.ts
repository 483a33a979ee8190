import assert from 'node:assert/strict';

import {
  cacheBytes,
  type Device,
  type GeneratedToken,
  Model,
  type ModelConfig,
  openDevice,
  presets,
  type Session,
  suffixes,
} from '../../lib/index.js';
import { randomTokens, rejectsWith, sameBits, small, smallDesigns } from './support.js';

const { vocab } = small();

/** Everything a session stores, row by row. */
async function contents(session: Session): Promise<Map<string, Float32Array | BigInt64Array>> {
  const all = new Map<string, Float32Array | BigInt64Array>();
  for (let row = 0; row < session.batch; row++) {
    for (const name of session.cache.names())
      all.set(`${name} of row ${row}`, await session.cache.read(name, row));
  }
  return all;
}

function assertSameContents(
  a: Awaited<ReturnType<typeof contents>>,
  b: Awaited<ReturnType<typeof contents>>,
  rows?: number[],
) {
  for (const [name, values] of a) {
    if (rows !== undefined && !rows.some((row) => name.endsWith(`row ${row}`))) continue;
    const other = b.get(name) as Float32Array;
    assert.ok(Buffer.from(values.buffer).equals(Buffer.from(other.buffer)), name);
  }
}

function assertClose(a: Float32Array, b: Float32Array, what: string): void {
  assert.equal(a.length, b.length, what);
  a.forEach((value, i) => {
    const reference = b[i] as number;
    assert.ok(
      Math.abs(value - reference) <= 1e-4 + 1e-4 * Math.abs(reference),
      `${what}[${i}]: ${value}, ${reference}`,
    );
  });
}

describe('session', () => {
  let device: Device;
  before(async () => {
    device = await openDevice({ backend: 'cpu' });
  });
  after(() => device.close());

  for (const [name, config] of Object.entries(smallDesigns)) {
    it(`serves ${name}: the prompt's logits, complete caches of the planned size, positions of the plan`, async () => {
      using model = await Model.create(device, config, { seed: 6 });
      using session = model.session({ batch: 2, capacity: 24 });
      const tokens = randomTokens(2 * 11, vocab, 3);
      const all = await model.logits({ tokens, rows: 2 });
      const { logits, route, exact, positions } = await session.prefill({ tokens });
      assert.equal(route, 'exact');
      assert.equal(exact, true);
      for (const row of [0, 1]) {
        const last = all.subarray((row * 11 + 10) * vocab, (row * 11 + 11) * vocab);
        assertClose(logits.subarray(row * vocab, (row + 1) * vocab), last, 'prompt-end logits');
      }
      const { kvInput, queryOutput } = suffixes(config, 11);
      assert.deepEqual(positions, { kvInput, queryOutput });
      const { reserved, device: onDevice, host, ...parts } = session.cache.bytes();
      assert.deepEqual(parts, cacheBytes(config, { batch: 2, positions: 11 }));
      assert.equal(onDevice + host, parts.total);
      assert.ok(reserved >= parts.total);
      let sum = 0;
      for (const entry of (await contents(session)).values()) sum += entry.byteLength;
      assert.equal(sum, parts.total, 'bytes are those of the tensors that exist');
      const step = randomTokens(2, vocab, 4);
      const decoded = await session.decode({ tokens: step });
      const longer = new Int32Array(24);
      for (const row of [0, 1]) {
        longer.set(tokens.subarray(row * 11, (row + 1) * 11), row * 12);
        longer[row * 12 + 11] = step[row] as number;
      }
      const after = await model.logits({ tokens: longer, rows: 2 });
      for (const row of [0, 1]) {
        assertClose(
          decoded.logits.subarray(row * vocab, (row + 1) * vocab),
          after.subarray((row * 12 + 11) * vocab, (row * 12 + 12) * vocab),
          'decode logits',
        );
      }
      assert.deepEqual(session.lengths, [12, 12]);
    });
  }

  it('has the same logits and cache whatever the schedule', async () => {
    using model = await Model.create(device, small({ upperLayers: 4 }), { seed: 8 });
    const tokens = randomTokens(20, vocab, 5);
    using full = model.session({ capacity: 32 });
    const reference = await full.prefill({ tokens, schedule: 'full' });
    for (const schedule of ['exact', 'uniform'] as const) {
      using session = model.session({ capacity: 32 });
      const { logits, exact } = await session.prefill({ tokens, schedule });
      assert.equal(exact, true);
      assertClose(logits, reference.logits, 'logits');
      for (const name of session.cache.names()) {
        if (name === 'documentIds') continue;
        assertClose(await session.cache.read(name, 0), await full.cache.read(name, 0), name);
      }
    }
    using approximate = model.session({ capacity: 32 });
    const { exact, route } = await approximate.prefill({ tokens, schedule: { approximate: 2 } });
    assert.deepEqual([exact, route], [false, 'approximate']);
    assert.equal((await approximate.cache.read('local.2.k', 0)).length, 2 * 16);
    assert.equal((await approximate.prefill({ tokens: tokens.slice(0, 3) })).exact, false);
    await approximate.reset();
    assert.equal((await approximate.prefill({ tokens })).exact, true);
  });

  it('keeps rows apart: unequal prompts, rows by number, reset', async () => {
    using model = await Model.create(device, small(), { seed: 8 });
    using session = model.session({ batch: 3, capacity: 16 });
    const prompts = [randomTokens(5, vocab, 1), randomTokens(9, vocab, 2), randomTokens(5, vocab, 3)];
    const together = await session.prefill({ tokens: prompts });
    const counts = [5, 9].map((length) => suffixes(model.config, length));
    assert.deepEqual(together.positions, {
      kvInput: counts.reduce((sum, { kvInput }) => sum + kvInput, 0),
      queryOutput: counts.reduce((sum, { queryOutput }) => sum + queryOutput, 0),
    });
    for (const [row, prompt] of prompts.entries()) {
      using alone = model.session({ capacity: 16 });
      const { logits } = await alone.prefill({ tokens: prompt });
      assert.ok(sameBits(logits, together.logits.slice(row * vocab, (row + 1) * vocab)), `row ${row}`);
    }
    await rejectsWith('ERR_SHAPE', /rows 0 and 1 hold 5 and 9 positions/, () =>
      session.cache.read('global.k'),
    );
    const before = await contents(session);
    await session.decode({ tokens: Int32Array.of(7), rows: [2] });
    await session.reset([0]);
    await session.prefill({ tokens: prompts[1] as Int32Array, rows: [0] });
    assert.deepEqual(session.lengths, [9, 9, 6]);
    assertSameContents(before, await contents(session), [1]);
    await session.reset();
    assert.deepEqual(session.lengths, [0, 0, 0]);
    assert.equal(session.cache.bytes().total, 0);
    await session.prefill({ tokens: randomTokens(12, vocab) });
    assert.equal((await session.cache.read('global.k')).length, 3 * 4 * 16);
    assert.deepEqual(await session.cache.read('documentIds', 1), new BigInt64Array(4));
  });

  it('names only tensors that are stored', async () => {
    const names = async (config: ModelConfig) => {
      using model = await Model.create(device, config);
      using session = model.session({ capacity: 4 });
      await session.prefill({ tokens: [1, 2] });
      for (const name of session.cache.names()) await session.cache.read(name, 0);
      return session.cache.names();
    };
    const kv = (...banks: string[]) => [
      ...banks.flatMap((bank) => [`${bank}.k`, `${bank}.v`]),
      'documentIds',
    ];
    const named = async (config: ModelConfig, ...banks: string[]) =>
      assert.deepEqual((await names(config)).sort(), kv(...banks).sort());
    await named(small(), 'layer.0', 'layer.1', 'global', 'local.2', 'local.3');
    await named(small({ localSource: 'shared-kv', provider: 'cross' }), 'layer.0', 'layer.1', 'local.2');
    await named(smallDesigns['gqa4Cla2'] as ModelConfig, 'layer.0', 'layer.2');
    await named(smallDesigns['globalOnly'] as ModelConfig, 'layer.0', 'layer.1', 'global');
  });

  it('leaves everything bitwise as it was when a prefill or a decode is aborted or fails', async () => {
    const config = presets.localHistoryTiny({ window: 8 });
    using model = await Model.create(device, config, { seed: 2 });
    const capacity = 16_384;
    using session = model.session({ batch: 2, capacity });
    await session.prefill({ tokens: randomTokens(2 * 20, config.vocab), documentIds: new BigInt64Array(40) });
    const before = await contents(session);
    const bytes = session.cache.bytes();
    const long = randomTokens(2 * 4000, config.vocab);
    // So much that no machine ends it before the abort.
    const endless = randomTokens(2 * 16_000, config.vocab);
    for (const delay of [1, 15, 60]) {
      const controller = new AbortController();
      const prefill = session.prefill({ tokens: endless, schedule: 'full' }, { signal: controller.signal });
      setTimeout(() => controller.abort(), delay);
      await assert.rejects(prefill, { name: 'AbortError' });
      assert.deepEqual(session.lengths, [20, 20]);
      assertSameContents(before, await contents(session));
    }
    // The second row's prompt fails after the first row's would have succeeded.
    await rejectsWith('ERR_CAPACITY', /row 1/, () =>
      session.prefill({ tokens: [randomTokens(3, config.vocab), randomTokens(capacity - 6, config.vocab)] }),
    );
    await rejectsWith('ERR_DOCUMENT_IDS', /recurs/, async () => {
      await session.decode({ tokens: [1, 2], documentIds: BigInt64Array.of(5n, 0n) });
      await session.decode({ tokens: [1, 2], documentIds: BigInt64Array.of(6n, 1n) });
      await session.decode({ tokens: [1, 2], documentIds: BigInt64Array.of(7n, 0n) });
    });
    assert.deepEqual(session.lengths, [22, 22]);
    await session.reset();
    await session.prefill({ tokens: randomTokens(2 * 20, config.vocab), documentIds: new BigInt64Array(40) });
    assertSameContents(before, await contents(session));
    const aborted = new AbortController();
    const queued = [
      session.prefill({ tokens: long }),
      session.decode({ tokens: [1, 2] }, { signal: aborted.signal }),
      session.cache.read('documentIds', 0),
    ] as const;
    aborted.abort();
    await assert.rejects(queued[1], { name: 'AbortError' });
    await queued[0];
    assert.equal((await queued[2]).length, 4020);
    assert.equal(bytes.documentIds, 2 * 20 * 8);
  });

  it('generates the same tokens for the same seed, and the most likely ones at temperature 0', async () => {
    using model = await Model.create(device, small(), { seed: 12 });
    const prompt = randomTokens(6, vocab, 2);
    const generate = async (options: object) => {
      using session = model.session({ batch: 2, capacity: 32 });
      const tokens: number[] = [];
      for await (const { token, logprob } of session.generate({ prompt, maxTokens: 8, ...options })) {
        tokens.push(token);
        assert.ok(logprob < 0);
      }
      return { tokens, lengths: session.lengths };
    };
    const a = await generate({ seed: 1 });
    assert.deepEqual(await generate({ seed: 1n }), a);
    assert.deepEqual(await generate({ seed: 1, row: 1 }), { tokens: a.tokens, lengths: [0, 13] });
    assert.deepEqual(a.lengths, [13, 0]);
    assert.notDeepEqual((await generate({ seed: 2 })).tokens, a.tokens);
    const greedy = await generate({ temperature: 0 });
    const context = [...prompt];
    for (const token of greedy.tokens) {
      const logits = (await model.logits({ tokens: context, rows: 1 })).slice(-vocab);
      assert.equal(token, logits.indexOf(Math.max(...logits)));
      context.push(token);
    }
    assert.deepEqual((await generate({ topK: 1, seed: 5 })).tokens, greedy.tokens);
  });

  it('stops generating when left or aborted, at a whole token', async () => {
    using model = await Model.create(device, small());
    using session = model.session({ capacity: 32 });
    for await (const _ of session.generate({ prompt: [1, 2, 3], maxTokens: 20 })) break;
    assert.deepEqual(session.lengths, [3]);
    const controller = new AbortController();
    let count = 0;
    await assert.rejects(
      async () => {
        for await (const _ of session.generate({ prompt: [4], maxTokens: 20, signal: controller.signal })) {
          if (++count === 3) controller.abort();
        }
      },
      { name: 'AbortError' },
    );
    assert.equal(count, 3);
    assert.deepEqual(session.lengths, [6]);
    await session.decode({ tokens: [1] });
    await rejectsWith('ERR_CAPACITY', /capacity|holds/, async () => {
      for await (const _ of session.generate({ prompt: new Int32Array(30), maxTokens: 2 }));
    });
    assert.deepEqual(session.lengths, [7]);
  });

  it('shares decode steps between generators, each of which draws what it draws alone', async () => {
    using model = await Model.create(device, small());
    using session = model.session({ batch: 4, capacity: 40 });
    const collect = async (row: number, maxTokens: number, signal?: AbortSignal) => {
      const drawn: GeneratedToken[] = [];
      const options = { prompt: randomTokens(3 + 2 * row, vocab), maxTokens, seed: row, row };
      for await (const token of session.generate(signal === undefined ? options : { ...options, signal })) {
        drawn.push(token);
      }
      return drawn;
    };
    const counts = [20, 7, 31, 12];
    const alone: GeneratedToken[][] = [];
    for (const [row, count] of counts.entries()) alone.push(await collect(row, count));
    await session.reset();
    assert.deepEqual(await Promise.all(counts.map((count, row) => collect(row, count))), alone);
    assert.deepEqual(
      session.lengths,
      counts.map((count, row) => 3 + 2 * row + count - 1),
    );
  });

  it('runs a step of a generator before what is called after it was asked for', async () => {
    using model = await Model.create(device, small());
    using session = model.session({ batch: 2, capacity: 40 });
    const generator = session.generate({ prompt: [1, 2, 3], maxTokens: 20 });
    await generator.next();
    let held = 3;
    const calls: [() => Promise<unknown>, number][] = [
      [async () => assert.equal((await session.cache.read('documentIds', 0)).length, held), 0],
      [() => session.decode({ tokens: [4], rows: [0] }), 1],
      [() => session.prefill({ tokens: [4, 5], rows: [0] }), 2],
      [() => session.generate({ prompt: [6], maxTokens: 1, row: 0 }).next(), 1],
    ];
    for (const [call, appended] of calls) {
      const step = generator.next();
      held += 1;
      await call();
      held += appended;
      assert.deepEqual(session.lengths, [held, 0]);
      await step;
    }
    const step = generator.next();
    await session.reset();
    assert.deepEqual(session.lengths, [0, 0]);
    await step;
  });

  it('takes the tokens of a call that has to wait as they were when it was made', async () => {
    using model = await Model.create(device, small());
    using session = model.session({ batch: 3, capacity: 40 });
    await session.prefill({ tokens: [1, 2, 3], rows: [2] });
    const expected = await session.decode({ tokens: [7], rows: [2] });
    await session.reset();
    await session.prefill({ tokens: [1, 2, 3], rows: [2] });
    const generators = [0, 1].map((row) => session.generate({ prompt: [row], maxTokens: 20, row }));
    await Promise.all(generators.map((generator) => generator.next()));
    const steps = generators.map((generator) => generator.next());
    const tokens = Int32Array.of(7);
    const decoded = session.decode({ tokens, rows: [2] });
    tokens.fill(9);
    assert.deepEqual((await decoded).logits, expected.logits);
    await Promise.all(steps);
  });

  it('stores BF16 under the bf16 policy, at half the bytes', async () => {
    const config = small();
    using model = await Model.create(device, config);
    using session = model.session({ capacity: 16, precision: 'bf16', graphs: true });
    await session.prefill({ tokens: randomTokens(9, vocab) });
    const { total } = session.cache.bytes();
    assert.equal(total, cacheBytes(config, { positions: 9, precision: 'bf16' }).total);
    const keys = await session.cache.read('layer.0.k', 0);
    const words = new Uint32Array(keys.buffer);
    assert.ok(
      words.every((word) => (word & 0xffff) === 0),
      'every value is a BF16',
    );
  });
});
