/** The middle value, or the mean of the two middle ones. NaN where there are none. */
export function median(values: readonly number[]): number {
  const sorted = values.toSorted((a, b) => a - b);
  const middle = sorted.length >> 1;
  if (sorted.length % 2 === 1) return sorted[middle] as number;
  return ((sorted[middle - 1] as number) + (sorted[middle] as number)) / 2;
}

/** The rate at which equal amounts pass that take turns at these rates. NaN where there are none. */
export function harmonicMean(rates: readonly number[]): number {
  return rates.length / rates.reduce((sum, rate) => sum + 1 / rate, 0);
}

/** exp of the mean logarithm of positive values. NaN where there are none. */
export function geometricMean(values: readonly number[]): number {
  return Math.exp(values.reduce((sum, value) => sum + Math.log(value), 0) / values.length);
}

/** Geometric mean of `ours[i] / theirs[i]`, times of one block each; blocks that lack either are left out. */
export function pairedRatio(
  ours: readonly (number | undefined)[],
  theirs: readonly (number | undefined)[],
): number {
  const ratios = ours.flatMap((time, block) => {
    const other = theirs[block];
    return time === undefined || other === undefined ? [] : [time / other];
  });
  return geometricMean(ratios);
}
