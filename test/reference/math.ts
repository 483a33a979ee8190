/*
 * The layers' arithmetic, forward and backward side by side. Matrices are row-major Float64Array; letters: m rows,
 * n outputs, k inputs. Backward functions return the gradient of the input and add to the gradients of parameters.
 *
 * `Precision` other than 'exact' rounds what the policy of the same name rounds to BF16 - the operands of products, and
 * the results of projections and FFN products - and computes everything else exactly.
 */

export type Precision = 'exact' | 'bf16-tf32x3' | 'bf16';

const single = new Float32Array(1);
const word = new Uint32Array(single.buffer);

/** To the nearest BF16, ties to even. */
export function bf16(x: number): number {
  single[0] = x;
  word[0] = (word[0] + 0x7fff + ((word[0] >>> 16) & 1)) & 0xffff0000;
  return single[0];
}

const rounded = (x: Float64Array, round: boolean) => (round ? x.map(bf16) : x);

/** Four running sums: one alone would wait for its own last addition at every step. */
function dot(a: Float64Array, p: number, b: Float64Array, q: number, count: number): number {
  let s0 = 0;
  let s1 = 0;
  let s2 = 0;
  let s3 = 0;
  let i = 0;
  for (; i + 3 < count; i += 4) {
    s0 += a[p + i] * b[q + i];
    s1 += a[p + i + 1] * b[q + i + 1];
    s2 += a[p + i + 2] * b[q + i + 2];
    s3 += a[p + i + 3] * b[q + i + 3];
  }
  for (; i < count; i++) s0 += a[p + i] * b[q + i];
  return s0 + s1 + (s2 + s3);
}

function addScaled(
  target: Float64Array,
  p: number,
  scale: number,
  b: Float64Array,
  q: number,
  count: number,
): void {
  let i = 0;
  for (; i + 3 < count; i += 4) {
    target[p + i] += scale * b[q + i];
    target[p + i + 1] += scale * b[q + i + 1];
    target[p + i + 2] += scale * b[q + i + 2];
    target[p + i + 3] += scale * b[q + i + 3];
  }
  for (; i < count; i++) target[p + i] += scale * b[q + i];
}

/** y [m, n] = x [m, k] W^T, W [n, k]. */
export function linear(
  x: Float64Array,
  w: Float64Array,
  k: number,
  precision: Precision,
  roundResult = true,
): Float64Array {
  const round = precision !== 'exact';
  const a = rounded(x, round);
  const b = rounded(w, round);
  const m = a.length / k;
  const n = b.length / k;
  const y = new Float64Array(m * n);
  for (let i = 0; i < m; i++) {
    for (let j = 0; j < n; j++) {
      y[i * n + j] = dot(a, i * k, b, j * k, k);
    }
  }
  return rounded(y, round && roundResult);
}

export function linearBackward(
  x: Float64Array,
  w: Float64Array,
  dw: Float64Array,
  dy: Float64Array,
  k: number,
  precision: Precision,
): Float64Array {
  const round = precision !== 'exact';
  const a = rounded(x, round);
  const b = rounded(w, round);
  const g = rounded(dy, round);
  const m = a.length / k;
  const n = b.length / k;
  const dx = new Float64Array(m * k);
  for (let i = 0; i < m; i++) {
    for (let j = 0; j < n; j++) {
      const gij = g[i * n + j];
      if (gij === 0) continue;
      addScaled(dx, i * k, gij, b, j * k, k);
      addScaled(dw, j * k, gij, a, i * k, k);
    }
  }
  return dx;
}

export function rmsNorm(x: Float64Array, w: Float64Array, eps: number): Float64Array {
  const d = w.length;
  const y = new Float64Array(x.length);
  for (let first = 0; first < x.length; first += d) {
    let squares = 0;
    for (let i = 0; i < d; i++) squares += x[first + i] ** 2;
    const scale = 1 / Math.sqrt(squares / d + eps);
    for (let i = 0; i < d; i++) y[first + i] = x[first + i] * scale * w[i];
  }
  return y;
}

export function rmsNormBackward(
  x: Float64Array,
  w: Float64Array,
  dw: Float64Array,
  dy: Float64Array,
  eps: number,
): Float64Array {
  const d = w.length;
  const dx = new Float64Array(x.length);
  for (let first = 0; first < x.length; first += d) {
    let squares = 0;
    let dot = 0;
    for (let i = 0; i < d; i++) {
      squares += x[first + i] ** 2;
      dot += dy[first + i] * w[i] * x[first + i];
    }
    const scale = 1 / Math.sqrt(squares / d + eps);
    for (let i = 0; i < d; i++) {
      const p = first + i;
      dw[i] += dy[p] * x[p] * scale;
      dx[p] = scale * (dy[p] * w[i] - (x[p] * scale * scale * dot) / d);
    }
  }
  return dx;
}

/** Rotates x [m, heads, headDim] by `direction` times the angle of each row's position; -1 is the backward pass. */
export function rotary(
  x: Float64Array,
  positions: ArrayLike<number>,
  headDim: number,
  theta: number,
  scale: number,
  direction: 1 | -1,
): Float64Array {
  const y = new Float64Array(x.length);
  const width = x.length / positions.length;
  const half = headDim / 2;
  for (let t = 0; t < positions.length; t++) {
    for (let i = 0; i < half; i++) {
      const angle = (direction * positions[t]) / scale / theta ** ((2 * i) / headDim);
      const cos = Math.cos(angle);
      const sin = Math.sin(angle);
      for (let head = 0; head < width; head += headDim) {
        const p = t * width + head + i;
        y[p] = x[p] * cos - x[p + half] * sin;
        y[p + half] = x[p + half] * cos + x[p] * sin;
      }
    }
  }
  return y;
}

export const sigmoid = (z: number) => 1 / (1 + Math.exp(-z));

export const silu = (z: Float64Array) => z.map((value) => value * sigmoid(value));

export function siluBackward(z: Float64Array, dy: Float64Array): Float64Array {
  return z.map((value, i) => {
    const s = sigmoid(value);
    return dy[i] * s * (1 + value * (1 - s));
  });
}

export const multiply = (a: Float64Array, b: Float64Array) => a.map((value, i) => value * b[i]);

export const add = (a: Float64Array, b: Float64Array) => a.map((value, i) => value + b[i]);

export function accumulate(target: Float64Array, source: Float64Array): void {
  for (let i = 0; i < target.length; i++) target[i] += source[i];
}

/** Stored K and V [entries, kvHeads, headDim] of positions `first`, `first` + 1, ..., with their gradients while training. */
export interface Bank {
  k: Float64Array;
  v: Float64Array;
  first: number;
  dk?: Float64Array;
  dv?: Float64Array;
}

/** A bank as a layer reads it: entries t - window < i <= t, with a `bias` added to the scores of each query. */
export interface Read {
  bank: Bank;
  window: number;
  bias?: Float64Array;
}

export interface Heads {
  queryHeads: number;
  kvHeads: number;
  headDim: number;
}

/** Queries at positions `first`, ... of one row; `documents` numbers the document of every position of the row. */
export interface Queries extends Heads {
  q: Float64Array;
  first: number;
  documents: Int32Array;
}

export interface Attended {
  /** [queries, queryHeads, headDim] */
  out: Float64Array;
  /** Log-sum-exp of each read, [queries, queryHeads]. */
  lse: Float64Array[];
}

/** Entries that position t may read: not later, in the window, of the same document, stored. */
function visibleEntries(read: Read, documents: Int32Array, t: number): Int32Array {
  const entries: number[] = [];
  for (let i = Math.max(read.bank.first, t - read.window + 1); i <= t; i++) {
    if (documents[i] === documents[t]) entries.push(i - read.bank.first);
  }
  return Int32Array.from(entries);
}

/** Calls `visit` for every query and head, with where its query and its KV head lie, and with the visible entries. */
function forEachQuery(
  { q, queryHeads, kvHeads, headDim, first, documents }: Queries,
  reads: Read[],
  visit: (query: { row: number; index: number; base: number; kvHead: number; visible: Int32Array[] }) => void,
): void {
  for (let row = 0; row < q.length / (queryHeads * headDim); row++) {
    const visible = reads.map((read) => visibleEntries(read, documents, first + row));
    for (let h = 0; h < queryHeads; h++) {
      const index = row * queryHeads + h;
      visit({ row, index, base: index * headDim, kvHead: Math.floor((h * kvHeads) / queryHeads), visible });
    }
  }
}

/** Products of the vector at `base` with the entries' vectors of one KV head. */
function productsWith(
  a: Float64Array,
  base: number,
  b: Float64Array,
  entries: Int32Array,
  kvHead: number,
  heads: Heads,
) {
  const { kvHeads, headDim } = heads;
  const products = new Float64Array(entries.length);
  for (let i = 0; i < entries.length; i++) {
    products[i] = dot(a, base, b, (entries[i] * kvHeads + kvHead) * headDim, headDim);
  }
  return products;
}

/** One softmax over the union of the reads' visible entries (paper equation 1). */
export function attend(queries: Queries, reads: Read[], precision: Precision): Attended {
  const { kvHeads, headDim } = queries;
  const round = precision === 'bf16';
  const q = rounded(queries.q, round);
  const banks = reads.map(({ bank }) => ({ k: rounded(bank.k, round), v: rounded(bank.v, round) }));
  const out = new Float64Array(q.length);
  const lse = reads.map(() => new Float64Array(q.length / headDim));
  const scale = 1 / Math.sqrt(headDim);
  forEachQuery(queries, reads, ({ row, index, base, kvHead, visible }) => {
    const scores = reads.map(({ bias }, r) =>
      productsWith(q, base, banks[r].k, visible[r], kvHead, queries).map(
        (s) => s * scale + (bias?.[row] ?? 0),
      ),
    );
    const max = Math.max(...scores.map((s) => s.reduce((a, b) => Math.max(a, b), -Infinity)));
    let total = 0;
    for (let r = 0; r < reads.length; r++) {
      let sum = 0;
      for (let i = 0; i < visible[r].length; i++) {
        const weight = Math.exp(scores[r][i] - max);
        sum += weight;
        const entry = (visible[r][i] * kvHeads + kvHead) * headDim;
        addScaled(out, base, round ? bf16(weight) : weight, banks[r].v, entry, headDim);
      }
      total += sum;
      lse[r][index] = max + Math.log(sum);
    }
    for (let i = 0; i < headDim; i++) out[base + i] /= total;
  });
  return { out, lse };
}

/** Returns dq, and adds to the gradients of the banks. */
export function attendBackward(
  queries: Queries,
  reads: Read[],
  { out, lse }: Attended,
  dout: Float64Array,
  precision: Precision,
): Float64Array {
  const { kvHeads, headDim } = queries;
  const round = precision === 'bf16';
  const q = rounded(queries.q, round);
  const g = rounded(dout, round);
  const banks = reads.map(({ bank }) => ({ k: rounded(bank.k, round), v: rounded(bank.v, round) }));
  const dq = new Float64Array(q.length);
  const scale = 1 / Math.sqrt(headDim);
  forEachQuery(queries, reads, ({ row, index, base, kvHead, visible }) => {
    const parts = lse.map((l) => l[index]);
    const max = Math.max(...parts);
    const total = max + Math.log(parts.reduce((sum, part) => sum + Math.exp(part - max), 0));
    const weights = reads.map(({ bias }, r) =>
      productsWith(q, base, banks[r].k, visible[r], kvHead, queries).map((s) =>
        Math.exp(s * scale + (bias?.[row] ?? 0) - total),
      ),
    );
    const dweights = banks.map(({ v }, r) => productsWith(g, base, v, visible[r], kvHead, queries));
    // The softmax's backward pass subtracts the weighted mean of dweights, which is the product of dout and out.
    const mean = dot(g, base, out, base, headDim);
    for (let r = 0; r < reads.length; r++) {
      const { dk, dv } = reads[r].bank;
      for (let i = 0; i < visible[r].length; i++) {
        const entry = (visible[r][i] * kvHeads + kvHead) * headDim;
        const weight = weights[r][i];
        const dscore = weight * (dweights[r][i] - mean);
        const operand = (round ? bf16(dscore) : dscore) * scale;
        addScaled(dq, base, operand, banks[r].k, entry, headDim);
        addScaled(dk!, entry, operand, q, base, headDim);
        addScaled(dv!, entry, round ? bf16(weight) : weight, g, base, headDim);
      }
    }
  });
  return dq;
}

/** -log softmax(logits)[target] of every row, in nats. */
export function crossEntropy(logits: Float64Array, targets: Int32Array, vocab: number): Float64Array {
  return Float64Array.from(targets, (target, t) => {
    const row = logits.subarray(t * vocab, (t + 1) * vocab);
    const max = row.reduce((a, b) => Math.max(a, b));
    return max + Math.log(row.reduce((sum, z) => sum + Math.exp(z - max), 0)) - row[target];
  });
}

/** Gradient of the sum of scale[t] * crossEntropy[t]. */
export function crossEntropyBackward(
  logits: Float64Array,
  targets: Int32Array,
  nll: Float64Array,
  scale: Float64Array,
): Float64Array {
  const vocab = logits.length / targets.length;
  return logits.map((z, p) => {
    const t = Math.floor(p / vocab);
    if (scale[t] === 0) return 0;
    const logNormaliser = nll[t] + logits[t * vocab + targets[t]];
    return scale[t] * (Math.exp(z - logNormaliser) - (p % vocab === targets[t] ? 1 : 0));
  });
}
