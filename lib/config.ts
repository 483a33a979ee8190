import { DuokvError } from './errors.js';

/**
 * A model's shape and design. Field names and designs are those of the paper; everything else derives from
 * the plan (`designPlan`). Illegal combinations raise `ERR_CONFIG` with the reason, unknown keys with their
 * name.
 *
 * @example
 * const config: ModelConfig = {
 *   design: 'local-history', fusion: 'joint', localSource: 'per-layer', provider: 'boundary',
 *   vocab: 32768, hidden: 768, ffn: 2048, lowerLayers: 8, upperLayers: 8,
 *   queryHeads: 12, kvHeads: 4, headDim: 64, window: 128,
 * };
 */
export interface ModelConfig {
  /**
   * What the upper layers read:
   * `local-history` the global bank and their own last `window` entries, in one softmax;
   * `current-only` the same with the current entry only;
   * `repeated-current` the current entry with its score raised by `log min(historyWindow, position + 1)`;
   * `global-only` the global bank; `global-adapters` the same with an adapter after each upper block;
   * `independent` their own full K/V (grouped-query attention), `gqa2` the same with two KV heads;
   * `gqa4-cla2` the full K/V of their pair.
   */
  readonly design: Design;
  /**
   * `joint` (default): one softmax over both banks. `separate`: normalised apart, mixed by a learned scalar
   * per head.
   */
  readonly fusion?: 'joint' | 'separate';
  /**
   * `per-layer` (default); `paired-input`: pairs project from their entry; `shared-kv`: pairs share the bank
   * as well.
   */
  readonly localSource?: 'per-layer' | 'paired-input' | 'shared-kv';
  /**
   * `boundary` (default): projected from the last lower layer's output. `cross`: K of the last, V of the
   * first lower layer.
   */
  readonly provider?: 'boundary' | 'cross';
  readonly vocab: number;
  readonly hidden: number;
  readonly ffn: number;
  readonly lowerLayers: number;
  readonly upperLayers: number;
  readonly queryHeads: number;
  readonly kvHeads: number;
  readonly headDim: number;
  /** Entries of a local bank, the current one included; 1 (default) for every design but `local-history`. */
  readonly window?: number;
  /** `repeated-current` only: the window whose weight the current entry takes. */
  readonly historyWindow?: number;
  /** `global-adapters` only. */
  readonly adapterRank?: number;
  /** Default 10,000. */
  readonly ropeTheta?: number;
  /** Positions are divided by this (position interpolation); default 1. */
  readonly ropeScale?: number;
  /** Default 1e-5. */
  readonly rmsNormEps?: number;
}

export type Design =
  | 'local-history'
  | 'current-only'
  | 'repeated-current'
  | 'global-only'
  | 'global-adapters'
  | 'independent'
  | 'gqa2'
  | 'gqa4-cla2';

type Json = Readonly<Record<string, unknown>>;

/**
 * The parameters of rotary positions, which Transformers 5 keeps under `rope_parameters` and earlier versions
 * apart.
 */
function ropeOfLlama(json: Json, fail: (message: string) => DuokvError): { theta: unknown; scale: unknown } {
  const nested = (json['rope_parameters'] ?? json['rope_scaling'] ?? {}) as Json;
  if (typeof nested !== 'object')
    throw fail(`rope_parameters is ${JSON.stringify(nested)}; it must be an object`);
  const type = nested['rope_type'] ?? nested['type'] ?? 'default';
  if (type !== 'default' && type !== 'linear') {
    throw fail(`rope_type is ${JSON.stringify(type)}; only default and linear are supported`);
  }
  return {
    theta: nested['rope_theta'] ?? json['rope_theta'] ?? 10000,
    scale: type === 'linear' ? nested['factor'] : 1,
  };
}

/**
 * The config of a `LlamaForCausalLM` directory that carries no `duokv` block: grouped-query attention in
 * every layer. The split into lower and upper layers has no meaning there; the lower half gets the odd layer.
 * Errors: `ERR_CHECKPOINT` naming `file` and the key where the architecture is another one.
 */
export function configFromLlama(json: Json, file: string): ModelConfig {
  const fail = (message: string) => new DuokvError('ERR_CHECKPOINT', `${file}: ${message}`);
  const integer = (key: string, value: unknown = json[key]): number => {
    if (!Number.isSafeInteger(value) || (value as number) < 1) {
      throw fail(`${key} is ${JSON.stringify(value)}; it must be a positive integer`);
    }
    return value as number;
  };
  const number = (key: string, value: unknown): number => {
    if (typeof value !== 'number' || !(value > 0))
      throw fail(`${key} is ${JSON.stringify(value)}; it must be a positive number`);
    return value;
  };
  if (json['model_type'] !== 'llama') {
    throw fail(
      `model_type is ${JSON.stringify(json['model_type'])} and there is no duokv block; expected "llama"`,
    );
  }
  if (json['tie_word_embeddings'] !== true) {
    throw fail('tie_word_embeddings is not true; input and output embedding must be one tensor');
  }
  for (const key of ['attention_bias', 'mlp_bias'])
    if (json[key] === true) throw fail(`${key} is true; biases are not supported`);
  if ((json['hidden_act'] ?? 'silu') !== 'silu')
    throw fail(`hidden_act is ${JSON.stringify(json['hidden_act'])}; expected "silu"`);
  const layers = integer('num_hidden_layers');
  const hidden = integer('hidden_size');
  const queryHeads = integer('num_attention_heads');
  const rope = ropeOfLlama(json, fail);
  return {
    design: 'independent',
    vocab: integer('vocab_size'),
    hidden,
    ffn: integer('intermediate_size'),
    lowerLayers: Math.ceil(layers / 2),
    upperLayers: Math.floor(layers / 2),
    queryHeads,
    kvHeads: integer('num_key_value_heads', json['num_key_value_heads'] ?? queryHeads),
    headDim: integer('head_dim', json['head_dim'] ?? hidden / queryHeads),
    ropeTheta: number('rope_theta', rope.theta),
    ropeScale: number('rope_parameters.factor', rope.scale),
    rmsNormEps: number('rms_norm_eps', json['rms_norm_eps'] ?? 1e-6),
  };
}
