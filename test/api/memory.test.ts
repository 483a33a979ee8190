import assert from 'node:assert/strict';

import { type Device, Model, openDevice, predictMemory, presets } from '../../lib/index.js';

const config = presets.localHistoryTiny();

describe('predictMemory', () => {
  let device: Device;
  beforeEach(async () => {
    device = await openDevice({ backend: 'cpu', threads: 2 });
  });
  afterEach(() => device.close());

  const batch = (rows: number, length: number) => {
    const tokens = Int32Array.from({ length: rows * length }, (_, i) => (i * 7) % config.vocab);
    return { rows, tokens, targets: tokens };
  };

  for (const recompute of [false, true]) {
    it(`gives what training takes${recompute ? ', recomputed' : ''}`, async () => {
      const shape = { rows: 3, length: 64, microbatch: 2, recompute };
      const prediction = await predictMemory(device, config, { training: shape });
      assert.equal(device.info().memory.peak, 0);
      using model = await Model.create(device, config, { seed: 1 });
      using trainer = model.trainer({ microbatch: 2, recompute });
      await trainer.step(batch(3, 64));
      assert.equal(device.info().memory.peak, prediction.total);
      const { parameters, gradients } = prediction.parts;
      assert.equal(parameters, gradients);
      const sum = Object.values(prediction.parts).reduce((a, b) => a + b, 0);
      assert.equal(sum, prediction.total);
    });
  }

  it('gives what a session takes', async () => {
    const prediction = await predictMemory(device, config, {
      serving: { batch: 2, capacity: 80, prompt: 70, precision: 'bf16' },
    });
    using model = await Model.create(device, config, { seed: 1 });
    using session = model.session({ batch: 2, capacity: 80, precision: 'bf16' });
    await session.prefill({ rows: [0, 1], tokens: batch(2, 70).tokens });
    for (let step = 0; step < 10; step++) await session.decode({ tokens: Int32Array.of(1, 2) });
    assert.equal(device.info().memory.peak, prediction.total);
    assert.equal(
      prediction.parts['key-value cache']! + prediction.parts['document ids']!,
      session.cache.bytes().reserved,
    );
  });

  it('needs less memory when activations are recomputed', async () => {
    const shape = { rows: 1, length: 512 };
    const large = presets.localHistory126M();
    const kept = await predictMemory(device, large, { training: shape });
    const recomputed = await predictMemory(device, large, { training: { ...shape, recompute: true } });
    assert.ok(recomputed.parts['workspace']! < kept.parts['workspace']! / 2);
  });

  it('predicts what no machine has', async () => {
    const { total } = await predictMemory(device, presets.localHistory126M(), {
      serving: { batch: 1024, capacity: 2048, prompt: 2048 },
    });
    assert.ok(total > device.info().memory.total);
  });

  it('refuses programs that are none', async () => {
    const fails = (program: object, message: RegExp) =>
      assert.rejects(predictMemory(device, config, program as never), { code: 'ERR_ARGUMENT', message });
    await fails({}, /one of training, serving, scoring/);
    await fails({ training: { rows: 0, length: 5 } }, /training\.rows is 0/);
    await fails({ serving: { capacity: 5, prompt: 6 } }, /serving\.prompt is 6/);
    await fails({ scoring: { length: 5, precision: 'fp8' } }, /precision/);
  });
});
