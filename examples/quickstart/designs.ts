import { type ModelConfig, presets } from 'duokv';

export interface CacheFormula {
  lower: number;
  global: number;
  local: number;
  documentIds: number;
}

/** A model to train, and the paper's formula for the bytes of its complete FP32 cache: one row of `N` positions, by part. */
export interface QuickstartDesign {
  readonly config: ModelConfig;
  readonly cacheFormula: (N: number) => CacheFormula;
}

/** Bytes of K and V of one position in one bank. */
const entry = ({ kvHeads, headDim }: ModelConfig) => 2 * kvHeads * headDim * 4;

/** Lower layers keep all positions, upper layers the last W, and one global bank serves them all. */
export function sharedGlobal(vocab: number): QuickstartDesign {
  const config = presets.localHistoryTiny({ vocab, lowerLayers: 2, upperLayers: 4 });
  const { lowerLayers: L, upperLayers: U, window: W = 1 } = config;
  return {
    config,
    cacheFormula: (N) => ({
      lower: entry(config) * L * N,
      global: entry(config) * N,
      local: entry(config) * U * Math.min(N, W),
      documentIds: 8 * N,
    }),
  };
}

/** Adjacent pairs of layers share one bank of all positions. */
export function sharedPairs(vocab: number): QuickstartDesign {
  const config = presets.gqa4Cla2Tiny({ vocab, lowerLayers: 2, upperLayers: 4 });
  const { lowerLayers: L, upperLayers: U } = config;
  return {
    config,
    cacheFormula: (N) => ({
      lower: entry(config) * ((L + U) / 2) * N,
      global: 0,
      local: 0,
      documentIds: 8 * N,
    }),
  };
}
