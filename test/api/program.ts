/*
 * What the lifecycle tests run in processes and workers of their own: `program.ts MODE`.
 */
import { setTimeout as sleep, setImmediate as turn } from 'node:timers/promises';
import { parentPort } from 'node:worker_threads';

import { Model, openDevice, presets } from '../../lib/index.js';
import { native } from '../../lib/native.js';
import { randomBatch, randomTokens, small, testBackend } from './support.js';

const busy = presets.localHistoryTiny({ window: 16 });

/** Three long training steps in the queue. */
async function startSteps(): Promise<void> {
  const device = await openDevice({ backend: testBackend });
  const model = await Model.create(device, busy);
  const trainer = model.trainer({ microbatch: 4 });
  for (let i = 0; i < 3; i++) trainer.step(randomBatch(busy, 4, 512)).catch(() => {});
}

const modes: Record<string, () => Promise<void>> = {
  /** Prints the most and the least objects alive while sessions are made and dropped. */
  async collect() {
    const device = await openDevice({ backend: testBackend, threads: 1 });
    const model = await Model.create(device, small());
    let most = 0;
    for (let i = 0; i < 32; i++) {
      await model.session({ capacity: 64 }).ready;
      most = Math.max(most, native.liveResources());
    }
    let least = most;
    for (let i = 0; i < 20 && least > 2; i++) {
      (globalThis as unknown as { gc(): void }).gc();
      await turn();
      least = Math.min(least, native.liveResources());
    }
    await model.readTensor('model.norm.weight');
    console.log(JSON.stringify({ most, least }));
  },
  /** Nothing but the pending call keeps the process. */
  async finish() {
    const device = await openDevice({ backend: testBackend });
    const model = await Model.create(device, small());
    model
      .trainer()
      .step(randomBatch(small(), 1, 8))
      .then(({ update }) => console.log(`update ${update}`));
  },
  /** An open device does not keep it. */
  async idle() {
    const device = await openDevice({ backend: testBackend });
    await Model.create(device, small());
    console.log('idle');
  },
  async exit() {
    await startSteps();
    await sleep(30);
    process.stdout.write('leaving\n', () => process.exit(0));
  },
  async throw() {
    await startSteps();
    await sleep(30);
    throw new Error('thrown on purpose');
  },
  /** Saves models whose parameters all have one value, another in every save, until it is killed. */
  async save() {
    const device = await openDevice({ backend: testBackend, threads: 1 });
    const model = await Model.create(device, small());
    for (let value = 1; ; value++) {
      for (const { name, elements } of model.plan.parameters) {
        await model.writeTensor(name, new Float32Array(elements).fill(value));
      }
      await model.save(process.argv[3] as string);
      process.stdout.write('.');
    }
  },
  /** Posts the logits of a fixed model. */
  async logits() {
    const device = await openDevice({ backend: testBackend });
    const model = await Model.create(device, small(), { seed: 1 });
    parentPort?.postMessage(Array.from(await model.logits({ tokens: randomTokens(6, 61), rows: 1 })));
  },
  /** Posts a message when a long call has begun. */
  async busy() {
    await startSteps();
    parentPort?.postMessage([]);
  },
};

await modes[process.argv[2] as string]?.();
