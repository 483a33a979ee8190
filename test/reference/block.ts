import { type Config, hasGlobalBank, isUpper, type Weights } from './config.js';
import {
  type Attended,
  accumulate,
  add,
  attend,
  attendBackward,
  type Bank,
  linear,
  linearBackward,
  multiply,
  type Precision,
  type Queries,
  type Read,
  rmsNorm,
  rmsNormBackward,
  rotary,
  sigmoid,
  silu,
  siluBackward,
} from './math.js';

export interface Model {
  config: Config;
  weights: Weights;
  precision: Precision;
}

/** Documents of one row: the number of each position's document, and the position within it. */
export interface Documents {
  documents: Int32Array;
  positions: Int32Array;
}

/** A document is a maximal run of equal ids. */
export function documentsOf(ids: ArrayLike<bigint>): Documents {
  const documents = new Int32Array(ids.length);
  const positions = new Int32Array(ids.length);
  for (let t = 1; t < ids.length; t++) {
    const same = ids[t] === ids[t - 1];
    documents[t] = documents[t - 1] + (same ? 0 : 1);
    positions[t] = same ? positions[t - 1] + 1 : 0;
  }
  return { documents, positions };
}

/** Names of the tensors that turn a representation into K and V: a layer's own, or the global provider's. */
export function kvNames(layer: number | 'global') {
  if (layer === 'global') {
    const prefix = 'model.global_kv';
    return { norm: `${prefix}.norm.weight`, k: `${prefix}.k_proj.weight`, v: `${prefix}.v_proj.weight` };
  }
  const prefix = `model.layers.${layer}`;
  return {
    norm: `${prefix}.input_layernorm.weight`,
    k: `${prefix}.self_attn.k_proj.weight`,
    v: `${prefix}.self_attn.v_proj.weight`,
  };
}

/** K = RoPE(Wk u) and V = Wv u with u = RMSNorm(x), for x at positions `first`, ... of the row. */
export function projectKv(
  model: Model,
  source: number | 'global',
  x: Float64Array,
  first: number,
  row: Documents,
): Bank {
  const { config, weights, precision } = model;
  const names = kvNames(source);
  const u = rmsNorm(x, weights.get(names.norm)!, config.rmsNormEps);
  const k = linear(u, weights.get(names.k)!, config.hidden, precision);
  const v = linear(u, weights.get(names.v)!, config.hidden, precision);
  const positions = row.positions.subarray(first, first + x.length / config.hidden);
  return { k: rotary(k, positions, config.headDim, config.ropeTheta, config.ropeScale, 1), v, first };
}

/** From the bank's gradients to the gradient of x. */
export function projectKvBackward(
  model: Model,
  source: number | 'global',
  x: Float64Array,
  bank: Bank,
  row: Documents,
  gradients: Weights,
): Float64Array {
  const { config, weights, precision } = model;
  const names = kvNames(source);
  const d = config.hidden;
  const u = rmsNorm(x, weights.get(names.norm)!, config.rmsNormEps);
  const dk = rotary(bank.dk!, row.positions, config.headDim, config.ropeTheta, config.ropeScale, -1);
  const du = add(
    linearBackward(u, weights.get(names.k)!, gradients.get(names.k)!, dk, d, precision),
    linearBackward(u, weights.get(names.v)!, gradients.get(names.v)!, bank.dv!, d, precision),
  );
  return rmsNormBackward(x, weights.get(names.norm)!, gradients.get(names.norm)!, du, config.rmsNormEps);
}

/** What an upper layer over two banks adds to the local score of each query: log m_t of the repeated-current control. */
export function multiplicityBias(c: Config, positions: Int32Array): Float64Array | undefined {
  if (c.design !== 'repeated-current') return undefined;
  return Float64Array.from(positions, (p) => Math.log(Math.min(c.historyWindow!, p + 1)));
}

/** Everything a block computed, for its backward pass. */
export interface BlockTape {
  x: Float64Array;
  queries: Queries;
  reads: Read[];
  /** One entry for a joint softmax, [global, local] for separate fusion. */
  branches: Attended[];
  attended: Float64Array;
  middle: Float64Array;
  gate: Float64Array;
  up: Float64Array;
  hidden: Float64Array;
  adapter?: { up: Float64Array; hidden: Float64Array; x: Float64Array };
  out: Float64Array;
}

/** One decoder block over x at positions `first`, ... of the row. */
export function block(
  model: Model,
  layer: number,
  x: Float64Array,
  first: number,
  row: Documents,
  reads: Read[],
): BlockTape {
  const { config, weights, precision } = model;
  const d = config.hidden;
  const w = (name: string) => weights.get(`model.layers.${layer}.${name}`)!;
  const positions = row.positions.subarray(first, first + x.length / d);
  const u = rmsNorm(x, w('input_layernorm.weight'), config.rmsNormEps);
  const { queryHeads, kvHeads, headDim } = config;
  const q = linear(u, w('self_attn.q_proj.weight'), d, precision);
  const queries = {
    q: rotary(q, positions, headDim, config.ropeTheta, config.ropeScale, 1),
    first,
    documents: row.documents,
    queryHeads,
    kvHeads,
    headDim,
  };
  let branches: Attended[];
  let attended: Float64Array;
  if (config.fusion === 'separate' && reads.length === 2) {
    branches = reads.map((read) => attend(queries, [read], precision));
    const [global, local] = branches;
    const beta = w('self_attn.fusion_logit').map(sigmoid);
    attended = global.out.map((a, i) => {
      const b = beta[Math.floor(i / headDim) % queryHeads];
      return (1 - b) * a + b * local.out[i];
    });
  } else {
    branches = [attend(queries, reads, precision)];
    attended = branches[0].out;
  }
  const middle = add(x, linear(attended, w('self_attn.o_proj.weight'), queryHeads * headDim, precision));
  const n = rmsNorm(middle, w('post_attention_layernorm.weight'), config.rmsNormEps);
  const gate = linear(n, w('mlp.gate_proj.weight'), d, precision);
  const up = linear(n, w('mlp.up_proj.weight'), d, precision);
  const hidden = multiply(silu(gate), up);
  let out = add(middle, linear(hidden, w('mlp.down_proj.weight'), config.ffn, precision));
  let adapter: BlockTape['adapter'];
  if (config.design === 'global-adapters' && isUpper(config, layer)) {
    const normed = rmsNorm(out, w('post_attention_layernorm.weight'), config.rmsNormEps);
    const adapterUp = linear(normed, w('adapter.up_proj.weight'), d, precision);
    adapter = { up: adapterUp, hidden: silu(adapterUp), x: out };
    out = add(out, linear(adapter.hidden, w('adapter.down_proj.weight'), config.adapterRank!, precision));
  }
  return { x, queries, reads, branches, attended, middle, gate, up, hidden, adapter, out };
}

/** Returns the gradient of x through queries, residuals and FFN; K/V gradients go to the banks that were read. */
export function blockBackward(
  model: Model,
  layer: number,
  tape: BlockTape,
  dout: Float64Array,
  row: Documents,
  gradients: Weights,
): Float64Array {
  const { config, weights, precision } = model;
  const d = config.hidden;
  const eps = config.rmsNormEps;
  const w = (name: string) => weights.get(`model.layers.${layer}.${name}`)!;
  const g = (name: string) => gradients.get(`model.layers.${layer}.${name}`)!;
  const norm2 = 'post_attention_layernorm.weight';
  const product = (name: string, x: Float64Array, dy: Float64Array, k: number) =>
    linearBackward(x, w(name), g(name), dy, k, precision);

  let dx = dout;
  if (tape.adapter !== undefined) {
    const { up, hidden, x } = tape.adapter;
    const dhidden = product('adapter.down_proj.weight', hidden, dx, config.adapterRank!);
    const normed = rmsNorm(x, w(norm2), eps);
    const dnormed = product('adapter.up_proj.weight', normed, siluBackward(up, dhidden), d);
    dx = add(dx, rmsNormBackward(x, w(norm2), g(norm2), dnormed, eps));
  }
  const { gate, up, middle } = tape;
  const dhidden = product('mlp.down_proj.weight', tape.hidden, dx, config.ffn);
  const n = rmsNorm(middle, w(norm2), eps);
  const dn = add(
    product('mlp.gate_proj.weight', n, siluBackward(gate, multiply(dhidden, up)), d),
    product('mlp.up_proj.weight', n, multiply(dhidden, silu(gate)), d),
  );
  const dmiddle = add(dx, rmsNormBackward(middle, w(norm2), g(norm2), dn, eps));

  const { queryHeads, headDim } = config;
  const dattended = product('self_attn.o_proj.weight', tape.attended, dmiddle, queryHeads * headDim);
  let dq: Float64Array;
  if (tape.branches.length === 2) {
    const [global, local] = tape.branches;
    const dglobal = new Float64Array(dattended.length);
    const dlocal = new Float64Array(dattended.length);
    const logits = w('self_attn.fusion_logit');
    for (let i = 0; i < dattended.length; i++) {
      const h = Math.floor(i / headDim) % queryHeads;
      const beta = sigmoid(logits[h]);
      dglobal[i] = (1 - beta) * dattended[i];
      dlocal[i] = beta * dattended[i];
      g('self_attn.fusion_logit')[h] += beta * (1 - beta) * (local.out[i] - global.out[i]) * dattended[i];
    }
    dq = add(
      attendBackward(tape.queries, [tape.reads[0]], global, dglobal, precision),
      attendBackward(tape.queries, [tape.reads[1]], local, dlocal, precision),
    );
  } else {
    dq = attendBackward(tape.queries, tape.reads, tape.branches[0], dattended, precision);
  }
  const unrotated = rotary(dq, row.positions, headDim, config.ropeTheta, config.ropeScale, -1);
  const u = rmsNorm(tape.x, w('input_layernorm.weight'), eps);
  const du = product('self_attn.q_proj.weight', u, unrotated, d);
  const fromNorm = rmsNormBackward(tape.x, w('input_layernorm.weight'), g('input_layernorm.weight'), du, eps);
  accumulate(fromNorm, dmiddle);
  return fromNorm;
}

/** The reads of a layer, global before local, from the banks filled so far. */
export function readsOf(
  c: Config,
  layer: number,
  own: Bank | undefined,
  global: Bank | undefined,
  queryPositions: Int32Array,
): Read[] {
  if (!isUpper(c, layer) || !hasGlobalBank(c)) return [{ bank: own!, window: Infinity }];
  const reads: Read[] = [{ bank: global!, window: Infinity }];
  if (own !== undefined) {
    reads.push({ bank: own, window: c.window, bias: multiplicityBias(c, queryPositions) });
  }
  return reads;
}
