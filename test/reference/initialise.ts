import { createHash } from 'node:crypto';

import { type Config, layerCount, parameterShapes, type Weights } from './config.js';

const M0 = 0xd2511f53n;
const M1 = 0xcd9e8d57n;
const W0 = 0x9e3779b9;
const W1 = 0xbb67ae85;

/** Philox4x32-10 (Salmon et al., 2011). */
export function philox(
  counter: [number, number, number, number],
  key: [number, number],
): [number, number, number, number] {
  let [c0, c1, c2, c3] = counter;
  let [k0, k1] = key;
  for (let round = 0; round < 10; round++) {
    const p0 = M0 * BigInt(c0);
    const p1 = M1 * BigInt(c2);
    [c0, c1, c2, c3] = [
      (Number(p1 >> 32n) ^ c1 ^ k0) >>> 0,
      Number(p1 & 0xffffffffn),
      (Number(p0 >> 32n) ^ c3 ^ k1) >>> 0,
      Number(p0 & 0xffffffffn),
    ];
    k0 = (k0 + W0) >>> 0;
    k1 = (k1 + W1) >>> 0;
  }
  return [c0, c1, c2, c3];
}

/** Element `index` of the standard normal stream of a seed and a tensor name, in FP64. */
export function standardNormal(seed: string, name: string): (index: number) => number {
  const hash = createHash('sha256').update(`${seed}:${name}`).digest();
  const h = [0, 1, 2, 3].map((i) => hash.readUInt32LE(4 * i));
  let block = -1;
  let x: number[] = [];
  return (index) => {
    if (block !== Math.floor(index / 4)) {
      block = Math.floor(index / 4);
      x = philox([block >>> 0, Math.floor(block / 2 ** 32), h[2], h[3]], [h[0], h[1]]);
    }
    const pair = index % 4 < 2 ? 0 : 2;
    const radius = Math.sqrt(-2 * Math.log((x[pair] + 1) / 2 ** 32));
    const angle = (2 * Math.PI * x[pair + 1]) / 2 ** 32;
    return radius * (index % 2 === 0 ? Math.cos(angle) : Math.sin(angle));
  };
}

/** Standard deviation of a tensor's initial values: undefined for norms (ones) and fusion logits (zeros). */
export function initialStd(c: Config, name: string): number | undefined {
  if (name.endsWith('norm.weight') || name.endsWith('fusion_logit')) return undefined;
  const residual = /\.(o_proj|mlp\.down_proj|adapter\.down_proj)\.weight$/.test(name);
  return residual ? 0.02 / Math.sqrt(2 * layerCount(c)) : 0.02;
}

export function initialise(c: Config, seed: string): Weights {
  const weights: Weights = new Map();
  for (const [name, shape] of parameterShapes(c)) {
    const values = new Float64Array(shape.reduce((a, b) => a * b, 1));
    const std = initialStd(c, name);
    if (std === undefined) values.fill(name.endsWith('fusion_logit') ? 0 : 1);
    else {
      const normal = standardNormal(seed, name);
      for (let i = 0; i < values.length; i++) values[i] = Math.fround(normal(i) * std);
    }
    weights.set(name, values);
  }
  return weights;
}
