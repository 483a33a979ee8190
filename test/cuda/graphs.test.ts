import assert from 'node:assert/strict';

import {
  type Device,
  type GeneratedToken,
  type GenerateOptions,
  Model,
  type ModelConfig,
  openDevice,
  predictMemory,
  type Session,
} from '../../lib/index.js';
import { randomTokens, sameBits, small, smallDesigns, testBackend } from '../api/support.js';

const { vocab } = small();

/** The smallest head that the card's kernels know. */
const onCard = (config: ModelConfig): ModelConfig => ({ ...config, headDim: 16 });

/** Random documents of a prompt: ids that change after a few positions. */
function documents(count: number, seed: number): BigInt64Array {
  const draws = randomTokens(count, 4, seed);
  let id = BigInt(seed) << 33n;
  return BigInt64Array.from(draws, (draw) => (draw === 0 ? ++id : id));
}

/** Everything a session stores, as one buffer per tensor and row. */
async function contents(session: Session): Promise<Map<string, Buffer>> {
  const all = new Map<string, Buffer>();
  for (let row = 0; row < session.batch; row++) {
    for (const name of session.cache.names()) {
      const values = await session.cache.read(name, row);
      all.set(`${name} of row ${row}`, Buffer.from(values.buffer, values.byteOffset, values.byteLength));
    }
  }
  return all;
}

async function assertSameState(a: Session, b: Session): Promise<void> {
  const [first, second] = [await contents(a), await contents(b)];
  for (const [name, bytes] of first) assert.ok(bytes.equals(second.get(name) as Buffer), name);
}

async function generated(session: Session, options: GenerateOptions): Promise<GeneratedToken[]> {
  await session.reset([options.row ?? 0]);
  const drawn: GeneratedToken[] = [];
  for await (const token of session.generate(options)) drawn.push(token);
  return drawn;
}

describe('graphs on the emulated card', () => {
  const before_ = process.env.DUOKV_CUDA;
  let device: Device;
  before(async () => {
    // Tests that run on CUDA have their card from the environment.
    if (testBackend === 'cpu') process.env.DUOKV_CUDA = 'emulator';
    device = await openDevice({ backend: 'cuda' });
  });
  after(async () => {
    await device.close();
    if (before_ === undefined) delete process.env.DUOKV_CUDA;
    else process.env.DUOKV_CUDA = before_;
  });

  for (const [name, design] of Object.entries(smallDesigns)) {
    it(`replays ${name} with the bits of the launches it recorded`, async () => {
      using model = await Model.create(device, onCard(design), { seed: 3 });
      for (const precision of ['fp32', 'bf16'] as const) {
        using eager = model.session({ batch: 2, capacity: 40, precision, graphs: false });
        using graphed = model.session({ batch: 2, capacity: 40, precision });
        // The same shapes three times, with other tokens and documents: run, recorded, replayed.
        for (let round = 0; round < 3; round++) {
          const prompt = { tokens: randomTokens(2 * 9, vocab, round), documentIds: documents(18, round + 7) };
          const kept: Float32Array[] = [];
          for (const session of [eager, graphed]) {
            await session.reset();
            kept.push((await session.prefill(prompt)).logits);
          }
          assert.ok(sameBits(kept[0] as Float32Array, kept[1] as Float32Array), `prefill ${round}`);
          const held = Float32Array.from(kept[1] as Float32Array);
          for (let step = 0; step < 4; step++) {
            const next = { tokens: randomTokens(2, vocab, 50 + step) };
            const a = (await eager.decode(next)).logits;
            const b = (await graphed.decode(next)).logits;
            assert.ok(sameBits(a, b), `round ${round}, step ${step}`);
          }
          assert.ok(sameBits(kept[1] as Float32Array, held), 'results handed out do not change');
          await assertSameState(eager, graphed);
        }
        const { recorded, replayed } = graphed.graphs;
        assert.equal(recorded, 2, 'one prefill and one step');
        assert.ok(replayed >= 8, `${replayed} replays`);
        assert.deepEqual(eager.graphs, {
          held: 0,
          recorded: 0,
          replayed: 0,
          dropped: 0,
          bytes: 0,
          driverBytes: 0,
          seconds: 0,
        });
      }
    });
  }

  it('takes the memory for graphs that is predicted', async () => {
    for (const [i, [name, design]] of Object.entries(smallDesigns).entries()) {
      const config = onCard(design);
      const precision = i % 2 === 0 ? 'fp32' : 'bf16';
      // A prompt that fills the rows; a step after it.
      for (const capacity of [9, 10]) {
        const serving = { batch: 2, capacity, prompt: 9, precision } as const;
        const { total, parts } = await predictMemory(device, config, { serving });
        await using fresh = await openDevice({ backend: 'cuda' });
        using model = await Model.create(fresh, config, { seed: 3 });
        using session = model.session({ batch: 2, capacity, precision });
        // Run, run again where the step moved the rotary table, and recorded.
        for (let round = 0; round < 3; round++) {
          await session.reset();
          await session.prefill({ tokens: randomTokens(18, vocab, round) });
          if (capacity > 9) await session.decode({ tokens: randomTokens(2, vocab, round) });
        }
        const { held, bytes, driverBytes } = session.graphs;
        assert.equal(held, capacity - 8, name);
        assert.ok(bytes > 0);
        assert.equal(bytes, parts['graphs'], `${name}, ${capacity} positions`);
        assert.equal(fresh.info().memory.peak, total, name);
        if (testBackend === 'cpu') assert.equal(driverBytes, 0, 'the emulator takes nothing for a graph');
      }
    }
    const serving = { capacity: 10, prompt: 9, graphs: false };
    assert.equal((await predictMemory(device, onCard(small()), { serving })).parts['graphs'], undefined);
  });

  it('draws the tokens of launches, of rows that share steps, and of the CPU', async () => {
    await using cpu = await openDevice({ backend: 'cpu' });
    using model = await Model.create(device, onCard(small()), { seed: 3 });
    using sameModel = await Model.create(cpu, onCard(small()), { seed: 3 });
    using eager = model.session({ batch: 2, capacity: 40, graphs: false });
    using graphed = model.session({ batch: 2, capacity: 40 });
    using onCpu = sameModel.session({ batch: 2, capacity: 40 });
    for (let round = 0; round < 3; round++) {
      const requests = [0, 0.9].map((temperature, row) => ({
        ...{ row, temperature, topP: 0.95, topK: 20, seed: round, maxTokens: 5 },
        prompt: randomTokens(7, vocab, 10 * round + row),
      }));
      const alone: GeneratedToken[][] = [];
      for (const request of requests) alone.push(await generated(eager, request));
      const together = await Promise.all(requests.map((request) => generated(graphed, request)));
      assert.deepEqual(together, alone, `round ${round}`);
      for (const [row, request] of requests.entries()) {
        const drawn = await generated(onCpu, request);
        for (const [i, { token, logprob }] of drawn.entries()) {
          assert.equal(alone[row]?.[i]?.token, token, `round ${round}, row ${row}, token ${i}`);
          assert.ok(Math.abs((alone[row]?.[i]?.logprob as number) - logprob) < 1e-4);
        }
      }
    }
    assert.ok(graphed.graphs.recorded >= 2 && graphed.graphs.replayed >= 6, JSON.stringify(graphed.graphs));
  });

  it('keeps at most 16 programs over 200 lengths, and stays right', async () => {
    // As little of a model as has graphs: the emulator computes all these prompts.
    const least = small({ hidden: 16, ffn: 16, lowerLayers: 1, upperLayers: 1, queryHeads: 1, kvHeads: 1 });
    using model = await Model.create(device, onCard(least), { seed: 3 });
    using eager = model.session({ capacity: 200, graphs: false });
    using graphed = model.session({ capacity: 200 });
    const lengths = Array.from({ length: 200 }, (_, i) => i + 1);
    // The last ones are kept, the first ones were dropped.
    for (const length of [...lengths, 199, 3, 1]) {
      const prompt = { tokens: randomTokens(length, vocab, length) };
      // Run once and recorded, where it is not kept.
      for (let repeat = 0; repeat < 2; repeat++) {
        await graphed.reset();
        await graphed.prefill(prompt);
      }
      const other = { tokens: randomTokens(length, vocab, 1000 + length) };
      await graphed.reset();
      await eager.reset();
      const expected = (await eager.prefill(other)).logits;
      assert.ok(sameBits(expected, (await graphed.prefill(other)).logits), `length ${length}`);
    }
    const { held, recorded, dropped } = graphed.graphs;
    assert.deepEqual({ held, recorded, dropped }, { held: 16, recorded: 202, dropped: 202 - 16 });
  }).timeout(600_000);

  it('records again when weights change, in place or by a longer rotary table', async () => {
    using model = await Model.create(device, onCard(small()), { seed: 3 });
    for (const precision of ['fp32', 'bf16'] as const) {
      using eager = model.session({ capacity: 600, precision, graphs: false });
      using graphed = model.session({ capacity: 600, precision });
      const compare = async (what: string) => {
        for (let i = 0; i < 3; i++) {
          const prompt = { tokens: randomTokens(7, vocab, i) };
          await eager.reset();
          await graphed.reset();
          const a = (await eager.prefill(prompt)).logits;
          assert.ok(sameBits(a, (await graphed.prefill(prompt)).logits), `${what}, ${i}`);
        }
      };
      await compare('first');
      const name = 'model.layers.0.mlp.up_proj.weight';
      const weight = await model.readTensor(name);
      await model.writeTensor(
        name,
        weight.map((value) => value * 1.5),
      );
      await compare('after a weight changed');
      using other = model.session({ capacity: 600, graphs: false });
      await other.prefill({ tokens: randomTokens(500, vocab, 1) });
      await compare('after the rotary table moved');
    }
  });

  it('lets sessions come and go between replays, and a recording follow another session', async () => {
    using model = await Model.create(device, onCard(small()), { seed: 3 });
    using lasting = model.session({ capacity: 32 });
    using reference = model.session({ capacity: 32, graphs: false });
    for (let i = 0; i < 4; i++) {
      const passing = model.session({ capacity: 32 });
      for (let repeat = 0; repeat < 2; repeat++) {
        const prompt = { tokens: randomTokens(11, vocab, i) };
        await Promise.all([passing.reset(), lasting.reset(), reference.reset()]);
        const [a, b, c] = await Promise.all([
          passing.prefill(prompt),
          lasting.prefill(prompt),
          reference.prefill(prompt),
        ]);
        assert.ok(sameBits(a.logits, c.logits) && sameBits(b.logits, c.logits), `session ${i}`);
      }
      passing.dispose();
    }
    assert.ok(lasting.graphs.replayed >= 5);
  });

  it('continues rows that are not empty without recording', async () => {
    using model = await Model.create(device, onCard(small()), { seed: 3 });
    using session = model.session({ capacity: 40 });
    for (let i = 0; i < 3; i++) {
      await session.reset();
      await session.prefill({ tokens: randomTokens(6, vocab, i) });
      await session.prefill({ tokens: randomTokens(5, vocab, i + 9) });
    }
    assert.equal(session.graphs.recorded, 1);
  });
});
