import assert from 'node:assert/strict';

import fc from 'fast-check';

/** Every |actual - expected| is at most absolute + relative * |expected|; NaN is not. */
export function assertNear(
  actual: ArrayLike<number>,
  expected: ArrayLike<number>,
  { absolute, relative }: { absolute: number; relative: number },
  what: string,
): void {
  assert.equal(actual.length, expected.length, `${what}: length`);
  let worst = 0;
  let at = 0;
  for (let i = 0; i < actual.length; i++) {
    const share = Math.abs(actual[i] - expected[i]) / (absolute + relative * Math.abs(expected[i]));
    if (share > worst || Number.isNaN(share)) [worst, at] = [share, i];
    if (Number.isNaN(share)) break;
  }
  assert.ok(
    worst <= 1,
    `${what}[${at}] is ${actual[at]}, expected ${expected[at]}: ${worst} of the tolerance`,
  );
}

/** ||actual - expected|| / ||expected||, or the absolute distance where the expected tensor is zero. */
export function relativeDistance(actual: ArrayLike<number>, expected: ArrayLike<number>): number {
  let distance = 0;
  let norm = 0;
  for (let i = 0; i < expected.length; i++) {
    distance += (actual[i] - expected[i]) ** 2;
    norm += expected[i] ** 2;
  }
  return Math.sqrt(norm === 0 ? distance : distance / norm);
}

/** Runs a property on the same cases every time; DUOKV_SEED gives others. */
export async function holds<T>(property: fc.IRawProperty<T>, numRuns: number): Promise<void> {
  await fc.assert(property, { numRuns, seed: Number(process.env.DUOKV_SEED ?? 1) });
}
