import assert from 'node:assert/strict';

import fc from 'fast-check';

import { logProbability, RandomStream, sampleToken } from '../../lib/sampling.js';
import { rejectsWith } from './support.js';

const all = { temperature: 1, topK: 1_000_000, topP: 1 };

function frequencies(logits: Float32Array, options: typeof all, draws: number): number[] {
  const random = new RandomStream(11n);
  const counts = new Array(logits.length).fill(0);
  for (let i = 0; i < draws; i++) counts[sampleToken(logits, options, random)]++;
  return counts.map((count) => count / draws);
}

describe('sampling', () => {
  it('follows the published SplitMix64 stream', () => {
    // First outputs of the reference implementation for seed 1234567, shifted to 53 bits.
    const random = new RandomStream(1234567n);
    const reference = [6457827717110365317n, 3203168211198807973n, 9817491932198370423n];
    for (const word of reference) assert.equal(random.next(), Number(word >> 11n) * 2 ** -53);
  });

  it('takes the first of the largest at temperature 0', () => {
    assert.equal(
      sampleToken(Float32Array.of(1, 5, 5, 2), { ...all, temperature: 0 }, new RandomStream(1n)),
      1,
    );
  });

  it('draws in proportion to the softmax', () => {
    const probabilities = [0.5, 0.25, 0.15, 0.1];
    const logits = Float32Array.from(probabilities, Math.log);
    frequencies(logits, all, 20_000).forEach((share, token) => {
      assert.ok(Math.abs(share - (probabilities[token] as number)) < 0.015, `${token}: ${share}`);
    });
    const cold = frequencies(logits, { ...all, temperature: 0.5 }, 20_000);
    const squares = probabilities.map((p) => p * p);
    const sum = squares.reduce((a, b) => a + b);
    cold.forEach((share, token) => {
      assert.ok(Math.abs(share - (squares[token] as number) / sum) < 0.015, `${token}: ${share}`);
    });
  });

  it('keeps the top k, and the smallest set that reaches top p', () => {
    const logits = Float32Array.from([0.1, 0.4, 0.3, 0.2], Math.log);
    const support = (options: Partial<typeof all>) =>
      frequencies(logits, { ...all, ...options }, 2000).flatMap((share, token) => (share > 0 ? [token] : []));
    assert.deepEqual(support({ topK: 1 }), [1]);
    assert.deepEqual(support({ topK: 2 }), [1, 2]);
    assert.deepEqual(support({ topP: 0.39 }), [1]);
    assert.deepEqual(support({ topP: 0.69 }), [1, 2]);
    assert.deepEqual(support({ topP: 0.71 }), [1, 2, 3]);
    assert.deepEqual(support({ topK: 3, topP: 0.5 }), [1, 2]);
    assert.deepEqual(support({}), [0, 1, 2, 3]);
  });

  it('never leaves the top p set of a plain sort, and is repeatable', () => {
    fc.assert(
      fc.property(
        fc.array(fc.float({ min: -8, max: 8, noNaN: true }), { minLength: 1, maxLength: 40 }),
        fc.double({ min: 0.01, max: 1, noNaN: true }),
        fc.bigInt({ min: 0n, max: 2n ** 64n - 1n }),
        (values, topP, seed) => {
          const logits = Float32Array.from(values);
          const options = { temperature: 1, topK: 1000, topP };
          const token = sampleToken(logits, options, new RandomStream(seed));
          assert.equal(sampleToken(logits, options, new RandomStream(seed)), token);
          const probabilities = Array.from(logits, (_, i) => Math.exp(logProbability(logits, i)));
          const more = probabilities.filter((p) => p > (probabilities[token] as number) * (1 + 1e-9));
          assert.ok(more.reduce((a, b) => a + b, 0) < topP + 1e-9);
        },
      ),
    );
  });

  it('gives log probabilities that sum to one, and refuses what is not a number', async () => {
    const logits = Float32Array.of(1000, 999, -1000);
    const total = [0, 1, 2].reduce((sum, token) => sum + Math.exp(logProbability(logits, token)), 0);
    assert.ok(Math.abs(total - 1) < 1e-12);
    await rejectsWith('ERR_NOT_FINITE', /logit 1/, () =>
      sampleToken(Float32Array.of(0, Number.NaN), all, new RandomStream(0n)),
    );
  });
});
