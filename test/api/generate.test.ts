import assert from 'node:assert/strict';

import fc from 'fast-check';

import { type Device, Model, openDevice } from '../../lib/index.js';
import { RandomStream } from '../../lib/random.js';
import { randomTokens, rejectsWith, small } from './support.js';

const { vocab } = small();
const prompt = randomTokens(9, vocab);

function logSoftmax(logits: Float32Array): number[] {
  const largest = Math.max(...logits);
  const sum = logits.reduce((total, logit) => total + Math.exp(logit - largest), 0);
  return Array.from(logits, (logit) => logit - largest - Math.log(sum));
}

describe('sampling', () => {
  let device: Device;
  let model: Model;
  let logprobs: number[];
  before(async () => {
    device = await openDevice({ backend: 'cpu' });
    model = await Model.create(device, small(), { seed: 3 });
    // Logits far enough apart to tell settings from each other.
    const norm = await model.readTensor('model.norm.weight');
    await model.writeTensor(
      'model.norm.weight',
      norm.map((weight) => 25 * weight),
    );
    logprobs = logSoftmax((await model.logits({ tokens: prompt, rows: 1 })).slice(-vocab));
  });
  after(() => device.close());

  /** The first tokens that `draws` seeds give. */
  async function drawn(options: object, draws: number): Promise<number[]> {
    using session = model.session({ capacity: prompt.length });
    const tokens: number[] = [];
    for (let seed = 0; seed < draws; seed++) {
      await session.reset();
      for await (const { token, logprob } of session.generate({ prompt, maxTokens: 1, seed, ...options })) {
        assert.ok(Math.abs(logprob - (logprobs[token] as number)) < 1e-5, `token ${token}: ${logprob}`);
        tokens.push(token);
      }
    }
    return tokens;
  }

  it('follows the published SplitMix64 stream', () => {
    // First outputs of the reference implementation for seed 1234567, shifted to 53 bits.
    const random = new RandomStream(1234567n);
    const reference = [6457827717110365317n, 3203168211198807973n, 9817491932198370423n];
    for (const word of reference) assert.equal(random.next(), Number(word >> 11n) * 2 ** -53);
  });

  it('draws in proportion to the softmax at the temperature', async () => {
    for (const temperature of [1, 0.5]) {
      const weights = logprobs.map((logprob) => Math.exp(logprob / temperature));
      const total = weights.reduce((a, b) => a + b);
      const draws = 1500;
      const counts = new Array<number>(vocab).fill(0);
      for (const token of await drawn({ temperature }, draws)) counts[token]++;
      counts.forEach((count, token) => {
        const share = (weights[token] as number) / total;
        const deviation = Math.sqrt((share * (1 - share)) / draws);
        assert.ok(
          Math.abs(count / draws - share) < 5 * deviation + 2 / draws,
          `${token}: ${count}, ${share}`,
        );
      });
    }
  });

  it('never leaves the top k, nor the smallest set that reaches top p', async () => {
    const order = logprobs
      .map((_, token) => token)
      .sort((a, b) => (logprobs[b] as number) - (logprobs[a] as number));
    const options = fc.record({
      topK: fc.integer({ min: 1, max: vocab }),
      topP: fc.double({ min: 0.05, max: 1, noNaN: true }),
    });
    await fc.assert(
      fc.asyncProperty(options, async ({ topK, topP }) => {
        const kept = order.slice(0, topK);
        const mass = kept.reduce((sum, token) => sum + Math.exp(logprobs[token] as number), 0);
        let reached = 0;
        const allowed = new Set<number>();
        for (const token of kept) {
          // A set that ends within rounding of its limit may go on by one.
          if (reached > topP * mass * (1 + 1e-5)) break;
          allowed.add(token);
          reached += Math.exp(logprobs[token] as number);
        }
        for (const token of await drawn({ topK, topP }, 12)) assert.ok(allowed.has(token), `${token}`);
      }),
      { numRuns: 40 },
    );
  });

  it('refuses logits that are not numbers and leaves the row as it was', async () => {
    using broken = await Model.create(device, small(), { seed: 3 });
    using session = broken.session({ batch: 2, capacity: 20 });
    await session.prefill({ tokens: [1, 2, 3], rows: [1] });
    const norm = await broken.readTensor('model.norm.weight');
    await broken.writeTensor(
      'model.norm.weight',
      norm.map(() => Number.NaN),
    );
    await rejectsWith('ERR_NOT_FINITE', /row 1: logit 0/, async () => {
      for await (const _ of session.generate({ prompt: [4], maxTokens: 2, row: 1 }));
    });
    assert.deepEqual(session.lengths, [0, 3]);
  });
});
