import assert from 'node:assert/strict';

import { type Device, Model, type ModelConfig, openDevice } from '../../lib/index.js';
import type { Model as ReferenceModel } from '../reference/block.js';
import { distanceOf, normOf } from '../reference/compare.js';

/** The limits of the numerics specification for FP32 logits and caches. */
export const FP32 = { absolute: 1e-4, relative: 1e-4 };

/**
 * The limits of the numerics specification for an FP32 gradient: 3e-5 of its L2 norm, or 1e-7 per element where it vanishes,
 * be it exactly or but for rounding.
 */
export function assertGradient(actual: Float32Array, expected: Float64Array, name: string): void {
  const distance = distanceOf(actual, expected);
  const farthest = expected.reduce((most, value, i) => Math.max(most, Math.abs(actual[i] - value)), 0);
  const limit = 3e-5 * normOf(expected);
  assert.ok(
    distance <= limit || farthest <= 1e-7,
    `${name}: distance ${distance}, limit ${limit}, farthest ${farthest}`,
  );
}

/** A CPU device for the tests of the calling `describe`. */
export function useDevice(threads = 2): { get current(): Device } {
  let device: Device | undefined;
  before(async () => {
    device = await openDevice({ backend: 'cpu', threads });
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
