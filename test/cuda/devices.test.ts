import assert from 'node:assert/strict';
import { fileURLToPath } from 'node:url';

import { startRanks } from '../dist/launch.js';

const PROGRAM = fileURLToPath(new URL('devices.program.ts', import.meta.url));

describe('two emulated cards in one process', () => {
  it('have their own memory, errors and end', async () => {
    const { code, stdout } = await startRanks(1, ['--import', 'tsx', PROGRAM], {
      DUOKV_CUDA: 'emulator',
      DUOKV_SIMT_DEVICES: '2',
      DUOKV_SIMT_MEMORY: String(96 << 20),
    }).outcome;
    assert.equal(code, 0);
    const found = JSON.parse(stdout) as Record<string, unknown>;
    assert.equal(found['same'], true, 'a model has the same logits on both');
    assert.deepEqual(
      found['grown'],
      [0, found['parameterBytes']],
      'a model on one takes nothing of the other',
    );
    const fitted = found['fitted'] as number;
    assert.ok(fitted >= 4 && fitted < 16, `${fitted} models of 4 MiB fit into what 96 MiB leave`);
    assert.match(
      found['full'] as string,
      /^ERR_DEVICE_MEMORY: parameters: \d+ bytes more are needed, \d+ of \d+ are free on cuda:0, in pieces too small; /,
    );
    assert.equal(found['sameWhileFull'], true, 'the other goes on while one is full');
    assert.equal(found['update'], 1, 'and trains');
    assert.equal(found['sameOnTheFullOne'], true, 'and so does the full one');
    assert.match(found['closed'] as string, /^ERR_DISPOSED/);
    assert.ok((found['afterwards'] as number) > 0, 'closing one leaves the other');
    assert.equal(
      found['missing'],
      "ERR_DEVICE_UNAVAILABLE: backend 'cuda:2': cuda:2 does not exist: there are 2 GPUs",
    );
  });
});
