/*
 * An independent FP64 reference of the model, written from the paper and nothing else: plain loops over Float64Array,
 * no code shared with lib/ or native/. It follows the paper's case distinctions literally, design by design, where the
 * engine derives everything from one table, so that the two can only agree by both being right.
 */

export interface Config {
  design:
    | 'local-history'
    | 'current-only'
    | 'repeated-current'
    | 'global-only'
    | 'global-adapters'
    | 'independent'
    | 'gqa2'
    | 'gqa4-cla2';
  fusion: 'joint' | 'separate';
  localSource: 'per-layer' | 'paired-input' | 'shared-kv';
  provider: 'boundary' | 'cross';
  vocab: number;
  hidden: number;
  ffn: number;
  lowerLayers: number;
  upperLayers: number;
  queryHeads: number;
  kvHeads: number;
  headDim: number;
  /** Width W of the stored local banks, the current position included. */
  window: number;
  /** Caps m_t; only `repeated-current`. */
  historyWindow?: number;
  /** Only `global-adapters`. */
  adapterRank?: number;
  ropeTheta: number;
  ropeScale: number;
  rmsNormEps: number;
}

export type Weights = Map<string, Float64Array>;

const LOCAL_DESIGNS = ['local-history', 'current-only', 'repeated-current'];
const GLOBAL_DESIGNS = [...LOCAL_DESIGNS, 'global-only', 'global-adapters'];

export const layerCount = (c: Config) => c.lowerLayers + c.upperLayers;
export const isUpper = (c: Config, layer: number) => layer >= c.lowerLayers;
export const hasLocalBanks = (c: Config) => LOCAL_DESIGNS.includes(c.design);
export const hasGlobalBank = (c: Config) => GLOBAL_DESIGNS.includes(c.design);
/** Upper layers form pairs whose local K/V come from the pair's input. */
export const hasPairs = (c: Config) => hasLocalBanks(c) && c.localSource !== 'per-layer';

/** The first layer of the pair that `layer` belongs to; the layer itself where there are no pairs. */
export function pairStart(c: Config, layer: number): number {
  if (c.design === 'gqa4-cla2') return layer - (layer % 2);
  if (hasPairs(c) && isUpper(c, layer)) return layer - ((layer - c.lowerLayers) % 2);
  return layer;
}

/** The layer whose K/V projections fill the bank that `layer` reads besides the global one; undefined: none. */
export function bankLayer(c: Config, layer: number): number | undefined {
  if (!isUpper(c, layer) || !hasGlobalBank(c)) {
    return c.design === 'gqa4-cla2' ? pairStart(c, layer) : layer;
  }
  if (!hasLocalBanks(c)) return undefined;
  return c.localSource === 'shared-kv' ? pairStart(c, layer) : layer;
}

export const projectsKv = (c: Config, layer: number) => bankLayer(c, layer) === layer;

/** The layer whose block input is projected to the K/V of `layer`. */
export function kvInputLayer(c: Config, layer: number): number {
  return hasPairs(c) ? pairStart(c, layer) : layer;
}

/** Reason why no model of this configuration exists, or undefined. */
export function illegality(c: Config): string | undefined {
  const counts = ['vocab', 'hidden', 'ffn', 'queryHeads', 'kvHeads', 'headDim', 'window'] as const;
  for (const key of counts)
    if (!Number.isSafeInteger(c[key]) || c[key] < 1) return `${key} is not a positive integer`;
  // A global bank needs a stack below it and one above; other designs only draw a line between their layers.
  const least = hasGlobalBank(c) ? 1 : 0;
  for (const key of ['lowerLayers', 'upperLayers'] as const) {
    if (!Number.isSafeInteger(c[key]) || c[key] < least)
      return `${key} is not an integer of at least ${least}`;
  }
  if (layerCount(c) === 0) return 'there is no layer';
  for (const key of ['ropeTheta', 'ropeScale', 'rmsNormEps'] as const) {
    if (!(c[key] > 0 && c[key] < Infinity)) return `${key} is not positive`;
  }
  if (c.headDim % 2 !== 0) return 'rotary positions need an even head dimension';
  if (c.queryHeads % c.kvHeads !== 0) return 'query heads do not divide into KV heads';
  if (!hasLocalBanks(c)) {
    if (c.fusion !== 'joint') return 'fusion is an option of the local designs';
    if (c.localSource !== 'per-layer') return 'localSource is an option of the local designs';
    if (c.provider !== 'boundary') return 'provider is an option of the local designs';
  }
  if (hasPairs(c) && c.upperLayers % 2 !== 0) return 'pairs need an even number of upper layers';
  if (c.design === 'gqa4-cla2' && layerCount(c) % 2 !== 0) return 'pairs need an even number of layers';
  if (hasGlobalBank(c) && c.design !== 'local-history' && c.window !== 1) return `window of ${c.design} is 1`;
  if ((c.design === 'repeated-current') !== (c.historyWindow !== undefined)) {
    return 'historyWindow belongs to repeated-current';
  }
  if ((c.design === 'global-adapters') !== (c.adapterRank !== undefined)) {
    return 'adapterRank belongs to global-adapters';
  }
  return undefined;
}

/** Every parameter tensor and its shape. */
export function parameterShapes(c: Config): Map<string, number[]> {
  const shapes = new Map<string, number[]>();
  const queryWidth = c.queryHeads * c.headDim;
  const kvWidth = c.kvHeads * c.headDim;
  shapes.set('model.embed_tokens.weight', [c.vocab, c.hidden]);
  for (let i = 0; i < layerCount(c); i++) {
    const prefix = `model.layers.${i}`;
    shapes.set(`${prefix}.input_layernorm.weight`, [c.hidden]);
    shapes.set(`${prefix}.self_attn.q_proj.weight`, [queryWidth, c.hidden]);
    if (projectsKv(c, i)) {
      shapes.set(`${prefix}.self_attn.k_proj.weight`, [kvWidth, c.hidden]);
      shapes.set(`${prefix}.self_attn.v_proj.weight`, [kvWidth, c.hidden]);
    }
    shapes.set(`${prefix}.self_attn.o_proj.weight`, [c.hidden, queryWidth]);
    if (c.fusion === 'separate' && isUpper(c, i)) {
      shapes.set(`${prefix}.self_attn.fusion_logit`, [c.queryHeads]);
    }
    shapes.set(`${prefix}.post_attention_layernorm.weight`, [c.hidden]);
    shapes.set(`${prefix}.mlp.gate_proj.weight`, [c.ffn, c.hidden]);
    shapes.set(`${prefix}.mlp.up_proj.weight`, [c.ffn, c.hidden]);
    shapes.set(`${prefix}.mlp.down_proj.weight`, [c.hidden, c.ffn]);
    if (c.design === 'global-adapters' && isUpper(c, i)) {
      shapes.set(`${prefix}.adapter.up_proj.weight`, [c.adapterRank!, c.hidden]);
      shapes.set(`${prefix}.adapter.down_proj.weight`, [c.hidden, c.adapterRank!]);
    }
  }
  if (hasGlobalBank(c) && c.provider === 'boundary') {
    shapes.set('model.global_kv.norm.weight', [c.hidden]);
    shapes.set('model.global_kv.k_proj.weight', [kvWidth, c.hidden]);
    shapes.set('model.global_kv.v_proj.weight', [kvWidth, c.hidden]);
  }
  shapes.set('model.norm.weight', [c.hidden]);
  return shapes;
}

export function parameterCount(c: Config): number {
  let count = 0;
  for (const shape of parameterShapes(c).values()) count += shape.reduce((a, b) => a * b, 1);
  return count;
}
