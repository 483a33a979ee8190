import assert from 'node:assert/strict';

import { type Device, Model, type ModelConfig, openDevice } from '../../lib/index.js';
import { testBackend } from '../api/support.js';
import { uniform } from '../reference/arbitraries.js';
import type { Model as ReferenceModel } from '../reference/block.js';
import { distanceOf, normOf } from '../reference/compare.js';
import type { GradientEvaluation } from '../reference/model.js';

/** The limits of the numerics specification for FP32 logits and caches. */
export const FP32 = { absolute: 1e-4, relative: 1e-4 };
/** Of mean cross-entropies. */
export const MEAN_NLL = { absolute: 1e-6, relative: 1e-6 };

/** What is granted where `measure` tells how far results of moved weights are from those of the model. */
export type Rounding<T> = (measure: (moved: T) => number) => number;

/**
 * What FP32 can do to `results` of a model: 32 times the farthest that they go when all weights move by up to half an ulp, in
 * three tries. Of random models one in hundreds all but cancels something, and its results say more of FP32 than of the engine:
 * a limit that is missed is held against this.
 */
export function roundingOf<T>(model: ReferenceModel, results: (moved: ReferenceModel) => T): Rounding<T> {
  let tries: T[] | undefined;
  return (measure) => {
    tries ??= [1, 2, 3].map((seed) => {
      const next = uniform(seed);
      const move = (values: Float64Array) => values.map((value) => value * (1 + (2 * next() - 1) * 2 ** -24));
      const weights = new Map(Array.from(model.weights, ([name, values]) => [name, move(values)]));
      return results({ ...model, weights });
    });
    return 32 * Math.max(...tries.map(measure));
  };
}

/**
 * Every gradient is within 3e-5 of its L2 norm. Where one vanishes because its terms cancel, what is left is their rounding:
 * 1e-7 per element, times the norm of all gradients where that exceeds 1. (Gradients that vanish by construction have tests of
 * their own.)
 */
export function assertGradients(
  actual: ReadonlyMap<string, Float32Array>,
  expected: GradientEvaluation,
  rounding?: Rounding<GradientEvaluation>,
): void {
  assert.deepEqual([...actual.keys()].sort(), [...expected.gradients.keys()].sort());
  const residue = 1e-7 * Math.max(1, expected.gradNorm);
  for (const [name, gradient] of expected.gradients) {
    const found = actual.get(name)!;
    const distance = distanceOf(found, gradient);
    const farthest = gradient.reduce((most, value, i) => Math.max(most, Math.abs(found[i] - value)), 0);
    let limit = 3e-5 * normOf(gradient);
    if (distance <= limit || farthest <= residue) continue;
    limit = Math.max(limit, rounding?.(({ gradients }) => distanceOf(gradients.get(name)!, gradient)) ?? 0);
    assert.ok(
      distance <= limit,
      `${name}: distance ${distance}, limit ${limit}; farthest ${farthest}, limit ${residue}`,
    );
  }
}

/** A device of the tests' backend for the tests of the calling `describe`. */
export function useDevice(threads = 2): { get current(): Device } {
  let device: Device | undefined;
  before(async () => {
    device = await openDevice({ backend: testBackend, threads });
  });
  after(async () => {
    await device?.close();
  });
  return {
    get current() {
      return device!;
    },
  };
}

/** The reference's model on a device. */
export async function engineModel(device: Device, { config, weights }: ReferenceModel): Promise<Model> {
  const model = await Model.create(device, config satisfies ModelConfig);
  for (const [name, values] of weights) await model.writeTensor(name, Float32Array.from(values));
  return model;
}

/** The same bits, not only the same numbers. */
export function sameBits(a: Float32Array, b: Float32Array): boolean {
  const bytes = ({ buffer, byteOffset, byteLength }: Float32Array) =>
    Buffer.from(buffer, byteOffset, byteLength);
  return bytes(a).equals(bytes(b));
}
