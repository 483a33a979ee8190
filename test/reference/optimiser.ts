import type { Weights } from './config.js';

export interface AdamW {
  betas: [number, number];
  eps: number;
  weightDecay: number;
  clipNorm: number;
}

export interface Schedule {
  peak: number;
  warmup: number;
  total: number;
}

/** Linear warmup, then cosine to a tenth of the peak at the last update; updates count from 1. */
export function learningRate({ peak, warmup, total }: Schedule, update: number): number {
  if (update <= warmup) return (peak * update) / warmup;
  const progress = (update - warmup) / (total - warmup);
  return peak * (0.1 + (0.9 * (1 + Math.cos(Math.PI * progress))) / 2);
}

export const clipCoefficient = (norm: number, clipNorm: number) => Math.min(1, clipNorm / (norm + 1e-6));

export interface Moments {
  first: Weights;
  second: Weights;
}

/** One update in place of weights and moments; weight decay is decoupled and applies to every parameter. */
export function adamW(
  weights: Weights,
  gradients: Weights,
  moments: Moments,
  gradNorm: number,
  update: number,
  rate: number,
  options: AdamW,
): void {
  const [b1, b2] = options.betas;
  const clip = clipCoefficient(gradNorm, options.clipNorm);
  for (const [name, w] of weights) {
    const g = gradients.get(name)!;
    const m = moments.first.get(name)!;
    const v = moments.second.get(name)!;
    for (let i = 0; i < w.length; i++) {
      m[i] = b1 * m[i] + (1 - b1) * clip * g[i];
      v[i] = b2 * v[i] + (1 - b2) * (clip * g[i]) ** 2;
      const step = m[i] / (1 - b1 ** update) / (Math.sqrt(v[i] / (1 - b2 ** update)) + options.eps);
      w[i] -= rate * options.weightDecay * w[i] + rate * step;
    }
  }
}
