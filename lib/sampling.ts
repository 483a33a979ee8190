import { DuokvError } from './errors.js';

/**
 * SplitMix64 (Steele, Lea, Flood 2014): one 64-bit state, the same stream for the same seed on every machine.
 */
export class RandomStream {
  #state: bigint;

  constructor(seed: bigint) {
    this.#state = BigInt.asUintN(64, seed);
  }

  /** Uniform in `[0, 1)`, 53 bits. */
  next(): number {
    this.#state = BigInt.asUintN(64, this.#state + 0x9e3779b97f4a7c15n);
    let z = this.#state;
    z = BigInt.asUintN(64, (z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n);
    z = BigInt.asUintN(64, (z ^ (z >> 27n)) * 0x94d049bb133111ebn);
    return Number((z ^ (z >> 31n)) >> 11n) * 2 ** -53;
  }
}

export interface SamplingOptions {
  /** Logits are divided by this; 0: the most likely token, the first of equals. */
  readonly temperature: number;
  /** Only the `topK` most likely tokens. */
  readonly topK: number;
  /** Only the most likely tokens whose probabilities first reach `topP` together. */
  readonly topP: number;
}

function indexOfLargest(logits: Float32Array): number {
  let best = 0;
  for (let i = 0; i < logits.length; i++) {
    const value = logits[i] as number;
    if (Number.isNaN(value)) throw new DuokvError('ERR_NOT_FINITE', `logit ${i} is not a number`);
    if (value > (logits[best] as number)) best = i;
  }
  return best;
}

/** `log softmax(logits)[token]`, summed in FP64. */
export function logProbability(logits: Float32Array, token: number): number {
  const largest = logits[indexOfLargest(logits)] as number;
  let sum = 0;
  for (let i = 0; i < logits.length; i++) sum += Math.exp((logits[i] as number) - largest);
  return (logits[token] as number) - largest - Math.log(sum);
}

/** The `count` largest entries; of equals at the end the first. */
function largestEntries(logits: Float32Array, count: number): number[] {
  if (count >= logits.length) return Array.from(logits.keys());
  const threshold = logits.slice().sort()[logits.length - count] as number;
  const above: number[] = [];
  const equal: number[] = [];
  for (let i = 0; i < logits.length; i++) {
    if ((logits[i] as number) > threshold) above.push(i);
    else if (logits[i] === threshold) equal.push(i);
  }
  return [...above, ...equal.slice(0, count - above.length)];
}

/**
 * Draws a token from `logits` `[V]`. `topK` is applied first, then `topP` to the probabilities that remain.
 * Errors: `ERR_NOT_FINITE` where a logit is not a number.
 */
export function sampleToken(
  logits: Float32Array,
  { temperature, topK, topP }: SamplingOptions,
  random: RandomStream,
): number {
  const largest = indexOfLargest(logits);
  if (temperature === 0) return largest;
  const peak = logits[largest] as number;
  const weightOf = (token: number) => Math.exp(((logits[token] as number) - peak) / temperature);
  let candidates = largestEntries(logits, topK).map((token) => ({ token, weight: weightOf(token) }));
  let total = candidates.reduce((sum, { weight }) => sum + weight, 0);
  if (topP < 1) {
    // Tokens below this hold less than 1 - topP together, so none of them is needed: few are left to sort.
    const negligible = ((1 - topP) * total) / candidates.length;
    const likely = candidates
      .filter(({ weight }) => weight >= negligible)
      .sort((a, b) => b.weight - a.weight || a.token - b.token);
    let mass = 0;
    let count = 0;
    while (count < likely.length && mass < topP * total) mass += likely[count++]?.weight as number;
    candidates = likely.slice(0, Math.max(count, 1));
    total = candidates.reduce((sum, { weight }) => sum + weight, 0);
  }
  let rest = random.next() * total;
  for (const { token, weight } of candidates) {
    rest -= weight;
    if (rest < 0) return token;
  }
  // Rounding can leave the sum a little short.
  return candidates.findLast(({ weight }) => weight > 0)?.token ?? largest;
}
