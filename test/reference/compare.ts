import assert from 'node:assert/strict';

/**
 * Every |actual - expected| is at most absolute + relative * |expected|; NaN is not. Where one is more, `rounding` says what is
 * granted besides.
 */
export function assertNear(
  actual: ArrayLike<number>,
  expected: ArrayLike<number>,
  { absolute, relative, rounding }: { absolute: number; relative: number; rounding?: () => number },
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
  if (worst > 1 && rounding !== undefined) {
    assertNear(actual, expected, { absolute: absolute + rounding(), relative }, what);
    return;
  }
  assert.ok(
    worst <= 1,
    `${what}[${at}] is ${actual[at]}, expected ${expected[at]}: ${worst} of the tolerance`,
  );
}

export function normOf(values: ArrayLike<number>): number {
  let squares = 0;
  for (let i = 0; i < values.length; i++) squares += values[i] ** 2;
  return Math.sqrt(squares);
}

/** L2 norm of the difference; NaN where lengths differ. */
export function distanceOf(actual: ArrayLike<number>, expected: ArrayLike<number>): number {
  if (actual.length !== expected.length) return NaN;
  return normOf(Float64Array.from(actual, (value, i) => value - expected[i]));
}
