import {
  type BlockTape,
  block,
  blockBackward,
  type Documents,
  documentsOf,
  type Model,
  projectKv,
  projectKvBackward,
  readsOf,
} from './block.js';
import {
  bankLayer,
  type Config,
  hasGlobalBank,
  kvInputLayer,
  layerCount,
  parameterShapes,
  projectsKv,
  type Weights,
} from './config.js';
import {
  accumulate,
  add,
  type Bank,
  crossEntropy,
  crossEntropyBackward,
  linear,
  linearBackward,
  rmsNorm,
  rmsNormBackward,
  sigmoid,
} from './math.js';

/** All arrays [rows, length]. A target is valid when its document id equals its input's. */
export interface Batch {
  rows: number;
  length: number;
  tokens: Int32Array;
  documentIds: BigInt64Array;
  targets: Int32Array;
  targetDocumentIds: BigInt64Array;
}

interface RowTape {
  tokens: Int32Array;
  row: Documents;
  blocks: BlockTape[];
  /** Filled by each layer that projects K/V. */
  banks: Map<number, Bank>;
  global: Bank | undefined;
  logits: Float64Array;
}

const EMBEDDING = 'model.embed_tokens.weight';
const FINAL_NORM = 'model.norm.weight';

export function embed(model: Model, tokens: ArrayLike<number>): Float64Array {
  const d = model.config.hidden;
  const table = model.weights.get(EMBEDDING)!;
  const x = new Float64Array(tokens.length * d);
  for (let t = 0; t < tokens.length; t++) x.set(table.subarray(tokens[t] * d, (tokens[t] + 1) * d), t * d);
  return x;
}

/** Logits [positions, V] of the last layer's output. */
export function head(model: Model, x: Float64Array): Float64Array {
  const { config, weights, precision } = model;
  const normed = rmsNorm(x, weights.get(FINAL_NORM)!, config.rmsNormEps);
  return linear(normed, weights.get(EMBEDDING)!, config.hidden, precision, false);
}

function withGradients(bank: Bank): Bank {
  return { ...bank, dk: new Float64Array(bank.k.length), dv: new Float64Array(bank.v.length) };
}

/** The whole model over every position of one row. */
export function forwardRow(model: Model, tokens: Int32Array, documentIds: BigInt64Array): RowTape {
  const c = model.config;
  const row = documentsOf(documentIds);
  const banks = new Map<number, Bank>();
  const blocks: BlockTape[] = [];
  let global: Bank | undefined;
  let x = embed(model, tokens);
  const inputs: Float64Array[] = [];
  for (let layer = 0; layer < layerCount(c); layer++) {
    if (layer === c.lowerLayers && hasGlobalBank(c)) {
      if (c.provider === 'boundary') global = withGradients(projectKv(model, 'global', x, 0, row));
      else {
        const [last, first] = [banks.get(c.lowerLayers - 1)!, banks.get(0)!];
        global = { k: last.k, dk: last.dk, v: first.v, dv: first.dv, first: 0 };
      }
    }
    inputs.push(x);
    if (projectsKv(c, layer)) {
      banks.set(layer, withGradients(projectKv(model, layer, inputs[kvInputLayer(c, layer)], 0, row)));
    }
    const source = bankLayer(c, layer);
    const own = source === undefined ? undefined : banks.get(source)!;
    const tape = block(model, layer, x, 0, row, readsOf(c, layer, own, global, row.positions));
    blocks.push(tape);
    x = tape.out;
  }
  return { tokens, row, blocks, banks, global, logits: head(model, x) };
}

function backwardRow(model: Model, tape: RowTape, dlogits: Float64Array, gradients: Weights): void {
  const { config: c, weights, precision } = model;
  const d = c.hidden;
  const dEmbedding = gradients.get(EMBEDDING)!;
  const out = tape.blocks[layerCount(c) - 1].out;
  const normed = rmsNorm(out, weights.get(FINAL_NORM)!, c.rmsNormEps);
  const dnormed = linearBackward(normed, weights.get(EMBEDDING)!, dEmbedding, dlogits, d, precision);
  let dx = rmsNormBackward(out, weights.get(FINAL_NORM)!, gradients.get(FINAL_NORM)!, dnormed, c.rmsNormEps);
  // What layers above contributed to the input of a pair through their own K/V projections.
  const dinputs = tape.blocks.map(({ x }) => new Float64Array(x.length));
  for (let layer = layerCount(c) - 1; layer >= 0; layer--) {
    dx = blockBackward(model, layer, tape.blocks[layer], dx, tape.row, gradients);
    if (projectsKv(c, layer)) {
      const input = kvInputLayer(c, layer);
      const bank = tape.banks.get(layer)!;
      accumulate(
        dinputs[input],
        projectKvBackward(model, layer, tape.blocks[input].x, bank, tape.row, gradients),
      );
    }
    dx = add(dx, dinputs[layer]);
    if (layer === c.lowerLayers && hasGlobalBank(c) && c.provider === 'boundary') {
      const boundary = tape.blocks[layer].x;
      accumulate(dx, projectKvBackward(model, 'global', boundary, tape.global!, tape.row, gradients));
    }
  }
  tape.tokens.forEach((token, t) => {
    for (let i = 0; i < d; i++) dEmbedding[token * d + i] += dx[t * d + i];
  });
}

function rowOf(batch: Batch, row: number) {
  const [first, end] = [row * batch.length, (row + 1) * batch.length];
  return {
    tokens: batch.tokens.subarray(first, end),
    documentIds: batch.documentIds.subarray(first, end),
    targets: batch.targets.subarray(first, end),
    valid: Array.from(
      { length: batch.length },
      (_, t) => batch.documentIds[first + t] === batch.targetDocumentIds[first + t],
    ),
  };
}

export function countValid(batch: Batch): number {
  return batch.documentIds.reduce((count, id, i) => count + (id === batch.targetDocumentIds[i] ? 1 : 0), 0);
}

export interface Evaluation {
  /** [rows, length, V] */
  logits: Float64Array;
  /** [rows, length], also where the target is not valid. */
  nll: Float64Array;
  /** Mean over the valid targets. */
  loss: number;
  validTargets: number;
}

export interface GradientEvaluation extends Evaluation {
  gradients: Weights;
  /** L2 over all parameters. */
  gradNorm: number;
}

export function zerosLike(c: Config): Weights {
  return new Map(
    [...parameterShapes(c)].map(([name, shape]) => [
      name,
      new Float64Array(shape.reduce((a, b) => a * b, 1)),
    ]),
  );
}

/** Logits, token cross-entropies, mean valid loss and its exact gradient. */
export function gradients(model: Model, batch: Batch): GradientEvaluation {
  return run(model, batch, zerosLike(model.config)) as GradientEvaluation;
}

export function evaluate(model: Model, batch: Batch): Evaluation {
  return run(model, batch, undefined);
}

function run(
  model: Model,
  batch: Batch,
  gradients: Weights | undefined,
): Evaluation & Partial<GradientEvaluation> {
  const { vocab } = model.config;
  const logits = new Float64Array(batch.rows * batch.length * vocab);
  const nll = new Float64Array(batch.rows * batch.length);
  const validTargets = countValid(batch);
  let loss = 0;
  for (let r = 0; r < batch.rows; r++) {
    const { tokens, documentIds, targets, valid } = rowOf(batch, r);
    const tape = forwardRow(model, tokens, documentIds);
    const rowNll = crossEntropy(tape.logits, targets, vocab);
    logits.set(tape.logits, r * batch.length * vocab);
    nll.set(rowNll, r * batch.length);
    valid.forEach((isValid, t) => {
      if (isValid) loss += rowNll[t] / validTargets;
    });
    if (gradients !== undefined) {
      const scale = Float64Array.from(valid, (isValid) => (isValid ? 1 / validTargets : 0));
      backwardRow(model, tape, crossEntropyBackward(tape.logits, targets, rowNll, scale), gradients);
    }
  }
  if (gradients === undefined) return { logits, nll, loss, validTargets };
  let squares = 0;
  for (const gradient of gradients.values()) for (const value of gradient) squares += value ** 2;
  return { logits, nll, loss, validTargets, gradients, gradNorm: Math.sqrt(squares) };
}

/**
 * Local attention mass alpha = sigmoid(LSE(s_l) - LSE(s_g)) of paper equation 2 for an upper layer, [positions, queryHeads].
 */
export function localMass(tape: RowTape, layer: number): Float64Array {
  const [global, local] = tape.blocks[layer].branches[0].lse;
  return local.map((lse, i) => sigmoid(lse - global[i]));
}
