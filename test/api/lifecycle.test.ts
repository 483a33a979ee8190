import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { copyFile, readFile } from 'node:fs/promises';
import { createRequire } from 'node:module';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import { Worker } from 'node:worker_threads';

import { type Device, Model, openDevice, presets } from '../../lib/index.js';
import { native } from '../../lib/native.js';
import {
  randomBatch,
  randomTokens,
  rejectsWith,
  sameBits,
  small,
  temporaryDirectory,
  testBackend,
} from './support.js';

const root = fileURLToPath(new URL('../..', import.meta.url));
const program = fileURLToPath(new URL('program.ts', import.meta.url));
const run = (mode: string, ...flags: string[]) =>
  promisify(execFile)(process.execPath, [...flags, '--import', 'tsx', program, mode], {
    cwd: root,
    timeout: 60_000,
  });

const addonPath = () => createRequire(import.meta.url)('node-gyp-build').path(root) as string;

/** A model whose step on `work` takes long enough to do something meanwhile: some 65 ms on two cores. */
const busy = presets.localHistoryTiny({ window: 16 });
const work = randomBatch(busy, 4, 512);
/** So much that no machine ends a step of it in the milliseconds that a test gives it. */
const endless = randomBatch(busy, 256, 512);

describe('lifecycle', () => {
  let device: Device;
  beforeEach(async () => {
    device = await openDevice({ backend: testBackend });
  });
  afterEach(() => device.close());

  it('says which device it opened, and why', async () => {
    const { backend, reason, threads, memory, libraries, fallbacks, attention } = device.info();
    assert.equal(backend, testBackend);
    assert.equal(reason, 'requested');
    assert.ok(threads >= 1);
    assert.ok(memory.total > 0);
    assert.ok(
      libraries.some((library) => library.startsWith(testBackend === 'cpu' ? 'oneDNN' : 'cuBLASLt')),
      libraries.join(),
    );
    assert.ok(attention.length > 0);
    assert.deepEqual(fallbacks, []);
    const before = memory.used;
    using model = await Model.create(device, small());
    assert.ok(device.info().memory.used >= before + 4 * model.parameterCount);
  });

  it('falls back to the CPU and says why', async () => {
    const library = process.env.DUOKV_CUDA_LIBRARY;
    process.env.DUOKV_CUDA_LIBRARY = '/nowhere/libduokv_cuda.so';
    try {
      await using chosen = await openDevice({ threads: 1 });
      const { backend, reason, threads, fallbacks } = chosen.info();
      assert.deepEqual([backend, threads], ['cpu', 1]);
      assert.match(reason, /auto/);
      assert.deepEqual(fallbacks, [
        {
          backend: 'cuda',
          why: 'this installation has no CUDA library: /nowhere/libduokv_cuda.so does not exist',
        },
      ]);
      const requested = () => openDevice({ backend: 'cuda' });
      await rejectsWith('ERR_DEVICE_UNAVAILABLE', /^backend 'cuda': this installation has no/, requested);
      process.env.DUOKV_CUDA_LIBRARY = process.execPath;
      await rejectsWith('ERR_DEVICE_UNAVAILABLE', /^backend 'cuda': .*node/, requested);
    } finally {
      if (library === undefined) delete process.env.DUOKV_CUDA_LIBRARY;
      else process.env.DUOKV_CUDA_LIBRARY = library;
    }
  });

  it('refuses disposed objects, and disposes what belongs to them', async () => {
    const config = small();
    const model = await Model.create(device, config);
    const trainer = model.trainer();
    const session = model.session({ capacity: 8 });
    const batch = randomBatch(config, 1, 4);
    session.dispose();
    session.dispose();
    assert.ok(session.disposed);
    await rejectsWith('ERR_DISPOSED', /the session was disposed$/, () => session.reset());
    await trainer.step(batch);
    model.dispose();
    assert.ok(trainer.disposed);
    await rejectsWith('ERR_DISPOSED', /the trainer was disposed with the model/, () => trainer.step(batch));
    await rejectsWith('ERR_DISPOSED', /the model was disposed$/, () =>
      model.logits({ tokens: [1], rows: 1 }),
    );
    await rejectsWith('ERR_DISPOSED', /the model was disposed/, () => model.session({ capacity: 8 }));
    await rejectsWith('ERR_DISPOSED', /the model was disposed/, () => model.readTensor('model.norm.weight'));
    const other = await Model.create(device, config);
    const second = other.session({ capacity: 8 });
    await second.ready;
    await device.close();
    await device.close();
    await rejectsWith('ERR_DISPOSED', /the session was disposed with the device/, () => second.reset());
    await rejectsWith('ERR_DISPOSED', /the device was disposed/, () => Model.create(device, config));
    await rejectsWith('ERR_DISPOSED', /the device was disposed/, () => device.info());
  });

  it('rejects what was in the queue when its device is closed', async () => {
    const creations = [1, 2, 3].map((seed) => Model.create(device, small(), { seed }));
    const closing = device.close();
    for (const outcome of await Promise.allSettled(creations)) {
      assert.equal(outcome.status, 'rejected');
      assert.equal((outcome as PromiseRejectedResult).reason.code, 'ERR_DISPOSED');
    }
    await closing;
  });

  it('frees memory on disposal, also while a call runs', async () => {
    const used = () => device.info().memory.used;
    const model = await Model.create(device, busy);
    // The device keeps what operations work in: a first trainer grows it as far as the second.
    const first = model.trainer({ microbatch: 4 });
    await first.step(work);
    first.dispose();
    await model.readTensor('model.norm.weight');
    const before = used();
    const trainer = model.trainer({ microbatch: 4 });
    const running = trainer.step(work);
    const queued = trainer.step(work);
    const settled = Promise.allSettled([running, queued]);
    await sleep(30);
    trainer.dispose();
    const outcomes = await settled;
    for (const outcome of outcomes) {
      assert.equal(outcome.status, 'rejected');
      assert.equal((outcome as PromiseRejectedResult).reason.code, 'ERR_DISPOSED');
    }
    // The freeing is a job of its own; a call after it sees its effect.
    await model.readTensor('model.norm.weight');
    assert.equal(used(), before);
    model.dispose();
  });

  it('supports using', async () => {
    let model: Model;
    {
      using scoped = await Model.create(device, small());
      using trainer = scoped.trainer();
      using session = scoped.session({ capacity: 4 });
      await session.ready;
      assert.equal(trainer.update, 0);
      model = scoped;
    }
    assert.ok(model.disposed);
  });

  it('keeps calls on one object in order', async () => {
    using model = await Model.create(device, small());
    const order: number[] = [];
    const name = 'model.norm.weight';
    const values = [1, 2, 3].map((value) => new Float32Array(24).fill(value));
    const reads: Promise<Float32Array>[] = [];
    const all = values.flatMap((value, i) => {
      const written = model.writeTensor(name, value).then(() => order.push(2 * i));
      const read = model.readTensor(name);
      reads.push(read);
      return [written, read.then(() => order.push(2 * i + 1))];
    });
    await Promise.all(all);
    assert.deepEqual(order, [0, 1, 2, 3, 4, 5]);
    for (const [i, read] of reads.entries()) assert.ok(sameBits(await read, values[i] as Float32Array));
  });

  it('blocks neither the event loop nor the thread pool', async () => {
    using model = await Model.create(device, busy);
    using trainer = model.trainer({ microbatch: 4 });
    let done = false;
    const steps = Promise.all([trainer.step(work), trainer.step(work)]).then(() => {
      done = true;
    });
    let ticks = 0;
    const files = await Promise.all(
      Array.from({ length: 8 }, () => readFile(new URL('support.ts', import.meta.url), 'utf8')),
    );
    assert.equal(files.length, 8);
    assert.equal(done, false, 'reading files took longer than two training steps');
    while (!done) {
      await sleep(1);
      ticks++;
    }
    assert.ok(ticks >= 5, `${ticks} timers fired during two training steps`);
    await steps;
  });

  it('aborts a step and leaves everything bitwise as it was', async () => {
    using model = await Model.create(device, busy, { seed: 5 });
    using trainer = model.trainer({ microbatch: 1, optimizer: { lr: 1e-2 } });
    await trainer.step(work);
    const names = ['model.embed_tokens.weight', 'model.layers.3.mlp.down_proj.weight', 'model.norm.weight'];
    const read = () => Promise.all(names.map((name) => model.readTensor(name)));
    const before = await read();
    const controller = new AbortController();
    const step = trainer.step(endless, { signal: controller.signal });
    setTimeout(() => controller.abort(), 20);
    await assert.rejects(step, { name: 'AbortError' });
    assert.equal(trainer.update, 1);
    (await read()).forEach((tensor, i) => {
      assert.ok(sameBits(tensor, before[i] as Float32Array), names[i]);
    });
    const reason = new Error('enough');
    await assert.rejects(
      trainer.step(work, { signal: AbortSignal.abort(reason) }),
      (error) => error === reason,
    );
    const late = new AbortController();
    const queued = [trainer.step(work), trainer.step(work, { signal: late.signal })];
    late.abort(reason);
    const outcomes = await Promise.allSettled(queued);
    assert.equal(outcomes[0]?.status, 'fulfilled');
    assert.equal((outcomes[1] as PromiseRejectedResult).reason, reason);
    assert.equal(trainer.update, 2);
  });

  it('lets many calls share one signal', async () => {
    using model = await Model.create(device, busy, { seed: 5 });
    const warnings: string[] = [];
    const listen = ({ name }: Error) => warnings.push(name);
    process.on('warning', listen);
    const shared = new AbortController();
    const calls = Array.from({ length: 40 }, () => model.score({ ...work }, { signal: shared.signal }));
    const settled = Promise.allSettled(calls);
    shared.abort();
    for (const { status } of await settled) assert.equal(status, 'rejected');
    await new Promise((resolve) => setImmediate(resolve));
    process.off('warning', listen);
    assert.deepEqual(warnings, []);
  });

  it('collects objects that nobody disposed', async () => {
    const { stdout } = await run('collect', '--expose-gc');
    const { most, least } = JSON.parse(stdout);
    assert.ok(most > 20, `${most} sessions alive at once`);
    assert.equal(least, 2, 'the device and the model remain');
  });

  it('keeps the process alive while a call runs, and only then', async () => {
    assert.equal((await run('finish')).stdout, 'update 1\n');
    assert.equal((await run('idle')).stdout, 'idle\n');
  });

  it('exits cleanly while a call runs', async () => {
    assert.equal((await run('exit')).stdout, 'leaving\n');
    const failed = await run('throw').catch((error) => error);
    assert.equal(failed.code, 1);
    assert.equal(failed.signal, null);
    assert.match(failed.stderr, /Error: thrown on purpose/);
  });

  it('runs in workers, which may be terminated in the middle of a call', async () => {
    // The loader hooks of the main thread do not reach a worker.
    const boot = `import('tsx/esm/api').then(({ register }) => { register(); return import(${JSON.stringify(program)}); })`;
    const start = (mode: string) => new Worker(boot, { eval: true, argv: [mode] });
    const answer = (worker: Worker) =>
      new Promise<number[]>((resolve, reject) => worker.once('message', resolve).once('error', reject));
    const workers = [start('logits'), start('logits')];
    const [a, b] = await Promise.all(workers.map(answer));
    assert.deepEqual(a, b);
    assert.ok((a?.length ?? 0) > 0);
    await Promise.all(workers.map((worker) => worker.terminate()));
    for (let i = 0; i < 3; i++) {
      const worker = start('busy');
      await answer(worker);
      await sleep(10 * i);
      await worker.terminate();
    }
    using model = await Model.create(device, small(), { seed: 1 });
    const here = await model.logits({ tokens: randomTokens(6, 61), rows: 1 });
    assert.deepEqual(Array.from(here), a);
  });

  it('survives the termination of workers at any moment of many short calls', async () => {
    const boot = `
      const { parentPort, workerData } = require('node:worker_threads');
      const { addon, config } = workerData;
      const native = require(addon);
      (async () => {
        const device = await native.openDevice('cpu', 1);
        const model = await device.createModel(config, '1');
        const { session } = model.createSession(1, 64, 'fp32', true);
        parentPort.postMessage(null);
        const call = async () => {
          for (;;) {
            await model.logits({ rows: 1, tokens: Int32Array.of(1, 2, 3) }, 'fp32');
            await session.decode([0], Int32Array.of(99)).catch(() => {});
            try { model.readTensor('none'); } catch {}
          }
        };
        for (let i = 0; i < 8; i++) call();
      })();`;
    for (let i = 0; i < 40; i++) {
      const worker = new Worker(boot, { eval: true, workerData: { addon: addonPath(), config: small() } });
      await new Promise((resolve, reject) => worker.once('message', resolve).once('error', reject));
      await sleep(i / 4);
      await worker.terminate();
    }
  });

  it('loads twice in one process', async () => {
    await using directory = await temporaryDirectory();
    const copy = join(directory.path, 'copy.node');
    await copyFile(addonPath(), copy);
    const twin = createRequire(import.meta.url)(copy) as typeof native;
    assert.notEqual(twin.openDevice, native.openDevice);
    const opened = await twin.openDevice('cpu', 1);
    const model = await opened.createModel(small(), '1');
    assert.equal((await model.readTensor('model.norm.weight')).length, 24);
    await opened.close();
  });

  it('refuses foreign objects where it expects its own', async () => {
    using model = await Model.create(device, small());
    const { logits } = model.native;
    const batch = { tokens: Int32Array.of(1), rows: 1 };
    assert.throws(() => logits.call({} as never, batch, 'fp32'), TypeError);
    assert.throws(() => logits.call(device.native as never, batch, 'fp32'), TypeError);
    assert.throws(
      () => model.native.logits(batch, 'fp32', {} as never),
      /cancellation must be a Cancellation/,
    );
    assert.throws(() => model.native.logits(batch, 'fp32', model.native as never), /cancellation must be/);
    const constructors = [device.native.constructor, model.native.constructor] as (new (
      x?: unknown,
    ) => unknown)[];
    for (const Class of constructors) {
      assert.throws(() => new Class(), /no public constructor/);
      assert.throws(() => new Class({}), /no public constructor/);
    }
  });
});
