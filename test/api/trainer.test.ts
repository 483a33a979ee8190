import assert from 'node:assert/strict';
import { readdir, readFile, writeFile } from 'node:fs/promises';
import { join } from 'node:path';

import { type Device, Model, openDevice, Trainer } from '../../lib/index.js';
import {
  integers,
  randomBatch,
  rejectsWith,
  sameBits,
  small,
  smallDesigns,
  temporaryDirectory,
} from './support.js';

async function parametersOf(model: Model): Promise<Map<string, Float32Array>> {
  const names = model.plan.parameters.map(({ name }) => name);
  return new Map(await Promise.all(names.map(async (name) => [name, await model.readTensor(name)] as const)));
}

async function assertSame(a: Model, b: Model): Promise<void> {
  const [left, right] = [await parametersOf(a), await parametersOf(b)];
  for (const [name, values] of left) assert.ok(sameBits(values, right.get(name) as Float32Array), name);
}

const options = {
  precision: 'fp32',
  optimizer: { lr: 1e-2 },
  schedule: { warmup: 2, total: 8 },
  microbatch: 2,
} as const;

describe('trainer', () => {
  let device: Device;
  before(async () => {
    device = await openDevice({ backend: 'cpu' });
  });
  after(() => device.close());

  it('resumes bit for bit', async () => {
    await using directory = await temporaryDirectory();
    for (const name of ['localHistory', 'separateSharedKv', 'gqa2']) {
      const config = smallDesigns[name] as ReturnType<typeof small>;
      const batches = [1, 2, 3, 4, 5].map((seed) => randomBatch(config, 3, 12, seed));
      using model = await Model.create(device, config, { seed: 4 });
      using trainer = model.trainer(options);
      for (const batch of batches.slice(0, 2)) await trainer.step(batch);
      const path = join(directory.path, name);
      await trainer.save(path);
      const expected = [];
      for (const batch of batches.slice(2)) expected.push(await trainer.step(batch));

      using resumed = await Trainer.resume(device, path);
      assert.equal(resumed.update, 2);
      assert.deepEqual(resumed.options, trainer.options);
      for (const [i, batch] of batches.slice(2).entries()) {
        const { seconds: _, ...step } = await resumed.step(batch);
        const { seconds: __, ...uninterrupted } = expected[i] as typeof step & { seconds: number };
        assert.deepEqual(step, uninterrupted);
      }
      await assertSame(model, resumed.model);
      using loaded = await Model.load(device, path);
      assert.deepEqual(loaded.config, model.config);
      resumed.model.dispose();
    }
  });

  it('saves the state at the time of the call, and replaces the one before', async () => {
    await using directory = await temporaryDirectory();
    const config = small();
    const batch = randomBatch(config, 2, 8);
    using model = await Model.create(device, config);
    using trainer = model.trainer(options);
    await trainer.step(batch);
    await trainer.save(directory.path);
    const [, saved] = [trainer.step(batch), trainer.save(directory.path)];
    const steps = [trainer.step(batch), trainer.step(batch)];
    await saved;
    await Promise.all(steps);
    assert.equal(trainer.update, 4);
    using resumed = await Trainer.resume(device, directory.path);
    assert.equal(resumed.update, 2);
    await resumed.step(batch);
    await resumed.step(batch);
    await assertSame(model, resumed.model);
    assert.deepEqual(await readdir(directory.path), [
      'config.json',
      'model.safetensors',
      'trainer.json',
      'trainer.safetensors',
    ]);
    resumed.model.dispose();
  });

  it('refuses state that is not of one save', async () => {
    await using directory = await temporaryDirectory();
    const path = directory.path;
    using model = await Model.create(device, small());
    using trainer = model.trainer(options);
    await rejectsWith('ERR_CHECKPOINT', /trainer\.json: ENOENT/, () => Trainer.resume(device, path));
    await trainer.save(path);
    const state = JSON.parse(await readFile(join(path, 'trainer.json'), 'utf8'));
    const cases: [object, RegExp][] = [
      [{ ...state, format: 2 }, /trainer\.json: format is 2; this version reads 1/],
      [{ ...state, update: -1 }, /trainer\.json: update is -1/],
      [{ ...state, options: { microbatch: 0 } }, /trainer\.json: microbatch is 0/],
      [{ ...state, save: 'other' }, /model\.safetensors: was not written by the same save/],
    ];
    for (const [content, message] of cases) {
      await writeFile(join(path, 'trainer.json'), JSON.stringify(content));
      await rejectsWith('ERR_CHECKPOINT', message, () => Trainer.resume(device, path));
    }
    await writeFile(join(path, 'trainer.json'), JSON.stringify(state));
    (await Trainer.resume(device, path)).model.dispose();
    await model.save(path);
    await rejectsWith('ERR_CHECKPOINT', /model\.safetensors: was not written by the same save/, () =>
      Trainer.resume(device, path),
    );
  });

  it('follows the schedule of the protocols', async () => {
    const config = small();
    using model = await Model.create(device, config);
    using trainer = model.trainer({ optimizer: { lr: 3e-4 }, schedule: { warmup: 2, total: 6 } });
    for (let s = 1; s <= 6; s++) {
      const { update, learningRate, tokens, validTargets } = await trainer.step(randomBatch(config, 2, 8, s));
      const cosine = 0.1 + (0.9 * (1 + Math.cos((Math.PI * (s - 2)) / 4))) / 2;
      assert.equal(update, s);
      assert.ok(Math.abs(learningRate - 3e-4 * (s <= 2 ? s / 2 : cosine)) < 1e-12, `${s}: ${learningRate}`);
      assert.equal(tokens, 16);
      assert.ok(validTargets <= 16);
    }
  });

  it('gives gradients of the global mean, whatever the microbatch', async () => {
    const config = small();
    const batch = randomBatch(config, 5, 9);
    using model = await Model.create(device, config, { seed: 1 });
    using one = model.trainer({ microbatch: 1 });
    using all = model.trainer({ microbatch: 8 });
    const a = await one.gradients(batch);
    const b = await all.gradients(batch);
    assert.deepEqual(
      [...a.gradients.keys()],
      model.plan.parameters.map(({ name }) => name),
    );
    assert.equal(a.validTargets, b.validTargets);
    assert.ok(Math.abs(a.loss - b.loss) < 1e-6);
    let squares = 0;
    for (const [name, left] of a.gradients) {
      const right = b.gradients.get(name) as Float32Array;
      let difference = 0;
      let norm = 0;
      left.forEach((value, i) => {
        difference += (value - (right[i] as number)) ** 2;
        norm += value ** 2;
      });
      squares += norm;
      assert.ok(Math.sqrt(difference) <= 3e-5 * Math.sqrt(norm) + 1e-7, name);
    }
    assert.ok(Math.abs(Math.sqrt(squares) - a.gradNorm) <= 1e-5 * a.gradNorm);
    assert.equal(one.update, 0);
    const { totalNll, totalTargets } = await model.score(batch);
    assert.equal(totalTargets, a.validTargets);
    assert.ok(Math.abs(totalNll / totalTargets - a.loss) < 1e-6);
  });

  it('scores documents as the sums of their tokens', async () => {
    const config = small();
    const next = integers(7);
    const batch = randomBatch(config, 3, 10);
    using model = await Model.create(device, config, { seed: next(100) });
    const { documents, totalNll, totalTargets, tokenNll } = await model.score(batch);
    let targets = 0;
    let nll = 0;
    for (const document of documents) {
      let sum = 0;
      let count = 0;
      for (let t = 0; t < 10; t++) {
        const i = document.row * 10 + t;
        if (batch.documentIds[i] !== document.id || batch.targetDocumentIds[i] !== document.id) continue;
        sum += tokenNll[i] as number;
        count++;
      }
      assert.deepEqual([document.nll, document.targets], [sum, count]);
      targets += count;
      nll += sum;
    }
    assert.deepEqual([totalNll, totalTargets], [nll, targets]);
    assert.equal(tokenNll.length, 30);
    const whole = await model.score({ tokens: batch.tokens, targets: batch.targets, rows: 3 });
    assert.deepEqual(
      whole.documents.map(({ row, id, targets: count }) => [row, id, count]),
      [0, 1, 2].map((row) => [row, 0n, 10]),
    );
  });
});
