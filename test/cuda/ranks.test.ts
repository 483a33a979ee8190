import assert from 'node:assert/strict';
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';

import { writeDocuments } from '../cli/command.js';
import { startAtAddress, startRanks, succeeds } from '../dist/launch.js';
import { assertSameRun, waitForUpdates } from '../dist/runs.js';

const MAIN = fileURLToPath(new URL('../../dist/cli/main.js', import.meta.url));
const PROGRAM = fileURLToPath(new URL('../dist/program.ts', import.meta.url));

/** Two cards, one for each rank, whose sums go over the emulated NCCL; the ranks meet at an address. */
const EMULATOR = { DUOKV_CUDA: 'emulator', DUOKV_SIMT_DEVICES: '2', DUOKV_TEST_BACKEND: 'cuda' };

describe('ranks on emulated cards', () => {
  let directory: string;
  let recipe: string[];
  const run = (name: string) => join(directory, name);
  const train = (...args: string[]) => [MAIN, 'train', '--backend', 'cuda', ...args];

  before(async () => {
    directory = await mkdtemp(join(tmpdir(), 'duokv-cards-'));
    const text = await writeDocuments(directory);
    const shape = ['hidden=32', 'ffn=48', 'queryHeads=2', 'kvHeads=1', 'headDim=16'];
    recipe = [
      ...[text, '--preset', 'local-history-tiny', '--context', '16', '--batch', '3', '--microbatch', '1'],
      ...['--updates', '12', '--epochs', '6', '--lr', '1e-3', '--held-out', '0.2'],
      ...shape.flatMap((setting) => ['--set', setting]),
    ];
  });
  after(() => rm(directory, { recursive: true }));

  it('sum the gradients of every design, bucket by bucket', async () => {
    const started = await startAtAddress(2, ['--import', 'tsx', PROGRAM, 'gradients'], EMULATOR);
    const [first] = await Promise.all(started.map(({ outcome }) => succeeds(outcome)));
    assert.ok(Number(first) >= 10);
  });

  it('train as one rank does, and end in seconds when one dies', async () => {
    await succeeds(startRanks(1, train(...recipe, '--out', run('one')), EMULATOR).outcome);
    const two = await startAtAddress(2, train(...recipe, '--out', run('two')), EMULATOR);
    await Promise.all(two.map(({ outcome }) => succeeds(outcome)));
    await assertSameRun(run('two'), run('one'), 12);

    for (const victim of [1, 0]) {
      const name = run(`killed-${victim}`);
      const ranks = await startAtAddress(2, train(...recipe, '--updates', '200', '--out', name), EMULATOR);
      const survivor = ranks[1 - victim]!;
      await waitForUpdates(name, 3, ranks[0]!.child);
      const killed = Date.now();
      ranks[victim]!.child.kill('SIGKILL');
      const { code, stderr } = await survivor.outcome;
      assert.ok(Date.now() - killed < 10_000, `it took ${Date.now() - killed} ms`);
      assert.notEqual(code, 0);
      assert.match(stderr, new RegExp(`duokv: ERR_DISTRIBUTED: rank ${victim} ended without leaving`));
    }
  });
});
