import assert from 'node:assert/strict';

import { type Device, Model, type ModelConfig, openDevice } from '../../lib/index.js';
import { testBackend } from '../api/support.js';
import type { Model as ReferenceModel } from '../reference/block.js';
import { distanceOf, normOf } from '../reference/compare.js';
import type { GradientEvaluation } from '../reference/model.js';

/** The limits of the numerics specification for FP32 logits and caches. */
export const FP32 = { absolute: 1e-4, relative: 1e-4 };

/**
 * Every gradient is within 3e-5 of its L2 norm. Where one vanishes because its terms cancel, what is left is their rounding:
 * 1e-7 per element, times the norm of all gradients where that exceeds 1. (Gradients that vanish by construction have tests of
 * their own.)
 */
export function assertGradients(
  actual: ReadonlyMap<string, Float32Array>,
  expected: GradientEvaluation,
): void {
  assert.deepEqual([...actual.keys()].sort(), [...expected.gradients.keys()].sort());
  const rounding = 1e-7 * Math.max(1, expected.gradNorm);
  for (const [name, gradient] of expected.gradients) {
    const found = actual.get(name)!;
    const distance = distanceOf(found, gradient);
    const farthest = gradient.reduce((most, value, i) => Math.max(most, Math.abs(found[i] - value)), 0);
    const limit = 3e-5 * normOf(gradient);
    assert.ok(
      distance <= limit || farthest <= rounding,
      `${name}: distance ${distance}, limit ${limit}; farthest ${farthest}, limit ${rounding}`,
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
