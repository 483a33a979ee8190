import type { Design, ModelConfig } from './config.js';

/** Options of the local designs, and any other key of the config to override. */
export type PresetOptions = Partial<Omit<ModelConfig, 'design'>>;

/** Makes a config; without options, the one that the paper names. */
export type Preset = (options?: PresetOptions) => ModelConfig;

type Shape = Omit<
  ModelConfig,
  'design' | 'fusion' | 'localSource' | 'provider' | 'historyWindow' | 'adapterRank'
>;

/** The paper's larger and smaller shapes (its symbols table); the window is that of local history. */
const SHAPE_126M: Shape = {
  vocab: 32768,
  hidden: 768,
  ffn: 2048,
  lowerLayers: 8,
  upperLayers: 8,
  queryHeads: 12,
  kvHeads: 4,
  headDim: 64,
  window: 128,
};
const SHAPE_305M: Shape = {
  ...SHAPE_126M,
  hidden: 1024,
  ffn: 2816,
  lowerLayers: 12,
  upperLayers: 12,
  queryHeads: 16,
};
/** Trains on a laptop in minutes: 0.9 million parameters, the ratios of heads and layers as at 126M. */
const SHAPE_TINY: Shape = {
  vocab: 512,
  hidden: 128,
  ffn: 352,
  lowerLayers: 2,
  upperLayers: 2,
  queryHeads: 4,
  kvHeads: 2,
  headDim: 32,
  window: 32,
};
const ADAPTER_RANK = { '126M': 256, tiny: 64 };

function preset(design: Design, shape: Shape, extra: PresetOptions = {}): Preset {
  return (options = {}) => ({ design, ...shape, ...extra, ...options });
}

/** The designs that only read the current local entry, or none: their bank has one entry. */
const singleEntry = (shape: Shape): Shape => ({ ...shape, window: 1 });

/**
 * Model configurations by name: every design of the paper at 126M, the local ones at 305M, all at a tiny
 * shape for CPU work.
 *
 * @example
 * const config = presets.localHistory126M({ fusion: 'separate', localSource: 'shared-kv' });
 */
export const presets = {
  /** Local history, W128/B2. 126,248,448 parameters. */
  localHistory126M: preset('local-history', SHAPE_126M),
  /** Current only, W1. */
  currentOnly126M: preset('current-only', singleEntry(SHAPE_126M)),
  /** Repeated current, W1M. */
  repeatedCurrent126M: preset('repeated-current', singleEntry(SHAPE_126M), { historyWindow: 128 }),
  /** Global only, B1. 123,102,720 parameters. */
  globalOnly126M: preset('global-only', singleEntry(SHAPE_126M)),
  /** Global + adapters, B1C. */
  globalAdapters126M: preset('global-adapters', singleEntry(SHAPE_126M), {
    adapterRank: ADAPTER_RANK['126M'],
  }),
  /** Independent KV, B0. 125,854,464 parameters. */
  independent126M: preset('independent', singleEntry(SHAPE_126M)),
  /** The same model under its other name, GQA4. */
  gqa4_126M: preset('independent', singleEntry(SHAPE_126M)),
  /** GQA2, whose FFN takes the parameters that its KV heads leave. 126,247,680 parameters. */
  gqa2_126M: preset('gqa2', singleEntry({ ...SHAPE_126M, kvHeads: 2, ffn: 2144 })),
  /** GQA4–CLA2. */
  gqa4Cla2_126M: preset('gqa4-cla2', singleEntry({ ...SHAPE_126M, ffn: 2144 })),

  /** 304,662,528 parameters. */
  localHistory305M: preset('local-history', SHAPE_305M),
  currentOnly305M: preset('current-only', singleEntry(SHAPE_305M)),
  repeatedCurrent305M: preset('repeated-current', singleEntry(SHAPE_305M), { historyWindow: 128 }),

  localHistoryTiny: preset('local-history', SHAPE_TINY),
  currentOnlyTiny: preset('current-only', singleEntry(SHAPE_TINY)),
  repeatedCurrentTiny: preset('repeated-current', singleEntry(SHAPE_TINY), { historyWindow: 32 }),
  globalOnlyTiny: preset('global-only', singleEntry(SHAPE_TINY)),
  globalAdaptersTiny: preset('global-adapters', singleEntry(SHAPE_TINY), { adapterRank: ADAPTER_RANK.tiny }),
  independentTiny: preset('independent', singleEntry(SHAPE_TINY)),
  gqa2Tiny: preset('gqa2', singleEntry({ ...SHAPE_TINY, kvHeads: 1, ffn: 364 })),
  gqa4Cla2Tiny: preset('gqa4-cla2', singleEntry({ ...SHAPE_TINY, ffn: 368 })),
} satisfies Record<string, Preset>;
