import {
  bankLayer,
  type Config,
  hasGlobalBank,
  hasLocalBanks,
  hasPairs,
  isUpper,
  layerCount,
  projectsKv,
} from './config.js';

export type Schedule = 'exact' | 'full' | 'uniform' | { approximate: number };

/** How many of the last positions a layer computes: inputs of its K/V projection, and queries up to the FFN. */
export interface LayerSuffix {
  kvInput: number;
  queryOutput: number;
}

/** Suffixes of every layer for `n` appended positions, by the formulas of Proposition 1 and its group form. */
export function suffixes(c: Config, n: number, schedule: Schedule): LayerSuffix[] {
  const all = { kvInput: n, queryOutput: n };
  return Array.from({ length: layerCount(c) }, (_, layer): LayerSuffix => {
    if (!hasGlobalBank(c)) {
      // Only the prompt-end output is wanted: of the last layer, or of the whole pair that shares its bank.
      const tail = c.design === 'gqa4-cla2' ? 2 : 1;
      return schedule === 'exact' && layer >= layerCount(c) - tail ? { kvInput: n, queryOutput: 1 } : all;
    }
    if (!isUpper(c, layer) || schedule === 'full') return all;
    const j = layer - c.lowerLayers; // paper: j + 1
    const steps = hasPairs(c) ? c.upperLayers / 2 : c.upperLayers;
    const step = hasPairs(c) ? Math.floor(j / 2) : j;
    const reach = (remaining: number) => Math.min(n, 1 + remaining * (c.window - 1));
    if (schedule === 'exact') return { kvInput: reach(steps - step), queryOutput: reach(steps - step - 1) };
    const suffix = schedule === 'uniform' ? reach(steps) : Math.min(n, schedule.approximate);
    return { kvInput: suffix, queryOutput: suffix };
  });
}

/** Positions summed over the upper layers; a layer that projects no K/V has no K/V input. */
export function upperPositions(c: Config, n: number, schedule: Schedule): LayerSuffix {
  const total = { kvInput: 0, queryOutput: 0 };
  suffixes(c, n, schedule).forEach((suffix, layer) => {
    if (!isUpper(c, layer)) return;
    total.queryOutput += suffix.queryOutput;
    if (projectsKv(c, layer)) total.kvInput += suffix.kvInput;
  });
  return total;
}

/** Bytes of the complete cache, by part, from the paper's formula. */
export function cacheBytes(c: Config, batch: number, n: number, elementBytes: number) {
  const entry = 2 * batch * c.kvHeads * c.headDim * elementBytes;
  const documentIds = 8 * batch * n;
  let lower: number;
  let global = 0;
  let local = 0;
  if (c.design === 'gqa4-cla2') lower = (entry * n * layerCount(c)) / 2;
  else if (!hasGlobalBank(c)) lower = entry * n * layerCount(c);
  else {
    lower = entry * n * c.lowerLayers;
    if (c.provider === 'boundary') global = entry * n;
    if (hasLocalBanks(c)) {
      const banks = c.localSource === 'shared-kv' ? c.upperLayers / 2 : c.upperLayers;
      local = entry * Math.min(n, c.window) * banks;
    }
  }
  return { fullLengthKv: lower + global, local, documentIds, total: lower + global + local + documentIds };
}

/** (query, key) pairs visible in documents of these lengths, itself included: in a window, or causally. */
export function visiblePairs(documentLengths: readonly number[], window = Infinity): number {
  let pairs = 0;
  for (const length of documentLengths) for (let t = 0; t < length; t++) pairs += Math.min(window, t + 1);
  return pairs;
}

/** Matrix-product FLOPs of one forward pass: 2 per multiply-add, 4 * headDim per visible pair and query head. */
export function forwardFlops(c: Config, tokens: number, causalPairs: number, localPairs: number): number {
  const queryWidth = c.queryHeads * c.headDim;
  const kvWidth = c.kvHeads * c.headDim;
  let perToken = 2 * c.vocab * c.hidden;
  let pairs = 0;
  for (let layer = 0; layer < layerCount(c); layer++) {
    perToken += 2 * 2 * c.hidden * queryWidth + 3 * 2 * c.hidden * c.ffn;
    if (projectsKv(c, layer)) perToken += 2 * 2 * c.hidden * kvWidth;
    if (c.design === 'global-adapters' && isUpper(c, layer)) perToken += 2 * 2 * c.hidden * c.adapterRank!;
    // An upper layer over a global bank reads it causally, and its local bank besides; every other layer reads one bank.
    pairs += causalPairs;
    if (isUpper(c, layer) && hasGlobalBank(c) && bankLayer(c, layer) !== undefined) pairs += localPairs;
  }
  if (hasGlobalBank(c) && c.provider === 'boundary') perToken += 2 * 2 * c.hidden * kvWidth;
  return tokens * perToken + 4 * c.headDim * c.queryHeads * pairs;
}
