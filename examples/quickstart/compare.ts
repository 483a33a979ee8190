import type { Model, Session } from 'duokv';

import { formatCount, row } from './report.js';

const REPETITIONS = 5;

function largestDifference(a: ArrayLike<number>, b: ArrayLike<number>): number {
  if (a.length !== b.length) throw new Error(`${a.length} and ${b.length} values cannot be compared`);
  let largest = 0;
  for (let i = 0; i < a.length; i++)
    largest = Math.max(largest, Math.abs((a[i] as number) - (b[i] as number)));
  return largest;
}

/** Prefills an empty session; the logits, position counts and the best time of a few repetitions in ms. */
async function prefill(session: Session, prompt: Int32Array, schedule: 'exact' | 'full') {
  let best = Number.POSITIVE_INFINITY;
  for (let repetition = 0; ; repetition++) {
    await session.reset();
    const began = performance.now();
    const { logits, positions } = await session.prefill({ tokens: prompt, schedule });
    best = Math.min(best, performance.now() - began);
    if (repetition === REPETITIONS) return { logits, positions, best };
  }
}

/** Prefills `prompt` by both routes and prints what they computed, how long it took, and how far the results differ. */
export async function compareRoutes(model: Model, prompt: Int32Array): Promise<void> {
  using fullSession = model.session({ batch: 1, capacity: prompt.length });
  using exactSession = model.session({ batch: 1, capacity: prompt.length });
  const full = await prefill(fullSession, prompt, 'full');
  const exact = await prefill(exactSession, prompt, 'exact');

  let cacheDifference = 0;
  for (const name of exactSession.cache.names()) {
    if (name === 'documentIds') continue;
    const [a, b] = await Promise.all([exactSession.cache.read(name), fullSession.cache.read(name)]);
    cacheDifference = Math.max(cacheDifference, largestDifference(a as Float32Array, b as Float32Array));
  }
  const count = (value: number) => formatCount(value).padStart(7);
  const ms = (value: number) => value.toFixed(2).padStart(7);
  console.log();
  row(`prefill of ${prompt.length} tokens`, '  exact     full');
  row('K/V-input positions', `${count(exact.positions.kvInput)}  ${count(full.positions.kvInput)}`);
  row(
    'query/output positions',
    `${count(exact.positions.queryOutput)}  ${count(full.positions.queryOutput)}`,
  );
  row('time, ms (best)', `${ms(exact.best)}  ${ms(full.best)}`);
  row(
    'largest difference',
    `logits ${largestDifference(exact.logits, full.logits).toExponential(1)}, cache ${cacheDifference.toExponential(1)}`,
  );
}
