import assert from 'node:assert/strict';
import { fileURLToPath } from 'node:url';

import { Model, openDevice, predictMemory } from '../../lib/index.js';
import { randomTokens, rejectsWith, sameBits, small } from '../api/support.js';
import { duokv, duokvJson } from '../cli/command.js';

const GOLDEN = fileURLToPath(new URL('../fixtures/golden/', import.meta.url));

describe('the emulated card', () => {
  const variable = process.env.DUOKV_CUDA;
  before(() => {
    process.env.DUOKV_CUDA = 'emulator';
  });
  after(() => {
    if (variable === undefined) delete process.env.DUOKV_CUDA;
    else process.env.DUOKV_CUDA = variable;
  });

  it('says what it is', async () => {
    await using device = await openDevice({ backend: 'cuda' });
    const { backend, reason, isa, libraries, attention, memory, fallbacks } = device.info();
    assert.deepEqual([backend, reason, fallbacks], ['cuda', 'requested', []]);
    assert.match(isa, /^sm_[89]0$/);
    assert.deepEqual(libraries, ['cuBLASLt (emulated)']);
    assert.match(attention, /TF32x3/);
    assert.ok(memory.total > memory.used);
    const { stdout } = await duokv(['doctor']);
    assert.match(stdout, /^backend +cuda: SIMT emulator \(auto: /m);
  });

  it('says that its memory is taken, and `auto` goes on without it', async () => {
    process.env.DUOKV_SIMT_MEMORY = '200000';
    const [asked, auto] = await Promise.all([
      duokv(['doctor', '--backend', 'cuda']),
      duokv(['doctor']),
    ]).finally(() => delete process.env.DUOKV_SIMT_MEMORY);
    assert.equal(asked.code, 1);
    assert.match(
      asked.stderr,
      /ERR_DEVICE_MEMORY: backend 'cuda': out of memory on cuda:0: \d+ bytes asked for .*, 200000 of 200000 bytes free/,
    );
    assert.match(auto.stdout, /^not used: cuda: out of memory on cuda:0: /m);
  });

  it('has no second card', async () => {
    await rejectsWith(
      'ERR_DEVICE_UNAVAILABLE',
      /^backend 'cuda:1': cuda:1 does not exist: there is 1 GPU$/,
      () => openDevice({ backend: 'cuda:1' }),
    );
  });

  it('names a value of DUOKV_CUDA that it does not know', async () => {
    process.env.DUOKV_CUDA = 'simulator';
    try {
      await rejectsWith('ERR_DEVICE_UNAVAILABLE', /DUOKV_CUDA is 'simulator'/, () =>
        openDevice({ backend: 'cuda' }),
      );
    } finally {
      process.env.DUOKV_CUDA = 'emulator';
    }
  });

  it('says what a model would have needed, and goes on', async () => {
    await using device = await openDevice({ backend: 'cuda' });
    const config = small({ headDim: 16 });
    const before = device.info().memory.used;
    // 8 GiB of embeddings on a card of 4 GiB.
    const message =
      /^parameters: \d+ bytes more are needed, \d+ of \d+ are free on cuda; this device object holds/;
    await rejectsWith('ERR_DEVICE_MEMORY', message, () =>
      Model.create(device, { ...config, vocab: 1 << 20, hidden: 2048 }),
    );
    assert.equal(device.info().memory.used, before);
    using model = await Model.create(device, config);
    assert.equal(
      (await model.logits({ rows: 1, tokens: randomTokens(5, config.vocab) })).length,
      5 * config.vocab,
    );
  });

  it('refuses a head that its kernels do not know', async () => {
    await using device = await openDevice({ backend: 'cuda' });
    await rejectsWith('ERR_CONFIG', /head_dim is 8, must be 16, 32, 64 or 128/, () =>
      Model.create(device, small()),
    );
    assert.equal(device.info().memory.used, device.info().memory.peak);
  });

  it('takes the memory that is predicted', async () => {
    await using device = await openDevice({ backend: 'cuda' });
    const config = small({ headDim: 16 });
    for (const recompute of [false, true]) {
      const training = { rows: 2, length: 24, recompute };
      const { total } = await predictMemory(device, config, { training });
      await using fresh = await openDevice({ backend: 'cuda' });
      using model = await Model.create(fresh, config, { seed: 1 });
      const tokens = randomTokens(48, config.vocab);
      await model.trainer({ recompute }).step({ rows: 2, tokens, targets: tokens });
      assert.equal(fresh.info().memory.peak, total);
    }
  });

  it('recomputes activations with the same bits', async () => {
    await using device = await openDevice({ backend: 'cuda' });
    using model = await Model.create(device, small({ headDim: 16 }), { seed: 1 });
    const tokens = randomTokens(48, model.config.vocab);
    for (const precision of ['fp32', 'bf16'] as const) {
      const [kept, rerun] = await Promise.all(
        [false, true].map((recompute) =>
          model.trainer({ precision, recompute }).gradients({ rows: 2, tokens, targets: tokens }),
        ),
      );
      for (const [name, gradient] of kept!.gradients)
        assert.ok(sameBits(gradient, rerun!.gradients.get(name)!), `${name}, ${precision}`);
    }
  });

  it('reproduces the golden cases', async () => {
    interface Report {
      passed: boolean;
      device: { backend: string };
      cases: { name: string; passed: boolean; worst: number }[];
    }
    const report = await duokvJson<Report>(['qualify', '--golden', GOLDEN, '--backend', 'cuda']);
    assert.equal(report.device.backend, 'cuda');
    for (const { name, passed, worst } of report.cases)
      assert.ok(passed, `${name}: ${worst} times its tolerance`);
    assert.ok(report.cases.length >= 10);
  }).timeout(600_000);
});
