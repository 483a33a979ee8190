// What a call costs through the TypeScript face: the tiny model, whose kernels take little of it.
//
//   npx tsx bench/calls.ts

import benny from 'benny';

import { openDevice } from '../lib/device.js';
import { Model } from '../lib/model.js';
import { presets } from '../lib/presets.js';

const device = await openDevice({ backend: 'cpu' });
const model = await Model.create(device, presets.localHistoryTiny(), { seed: 0 });
// benny starts the first call of a case before the last one has ended: room for both.
const session = model.session({ batch: 1, capacity: 128 });
const one = Int32Array.of(7);
const prompt = new Int32Array(32).fill(7);

await benny.suite(
  'calls of the tiny model',
  benny.add('reset', async () => {
    await session.reset();
  }),
  benny.add('reset and prefill of 32', async () => {
    await session.reset();
    await session.prefill({ tokens: prompt });
  }),
  benny.add('reset, prefill of 1 and 16 decode steps', async () => {
    await session.reset();
    await session.prefill({ tokens: one });
    for (let step = 0; step < 16; step++) await session.decode({ tokens: one });
  }),
  benny.cycle(),
);
await device.close();
