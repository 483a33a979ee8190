import assert from 'node:assert/strict';
import { cp, mkdtemp, readFile, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';

import { writeDocuments } from '../cli/command.js';
import { hasMpi, rankProcess, startRanks, succeeds } from './launch.js';
import { assertSameRun, type Update, updates, waitForUpdates } from './runs.js';

const MAIN = fileURLToPath(new URL('../../dist/cli/main.js', import.meta.url));

const suite = () => {
  let directory: string;
  let recipe: string[];
  const run = (name: string) => join(directory, name);

  const train = (ranks: number, ...args: string[]) => startRanks(ranks, [MAIN, 'train', ...args]);

  before(async () => {
    directory = await mkdtemp(join(tmpdir(), 'duokv-ranks-'));
    const text = await writeDocuments(directory);
    const shape = ['hidden=48', 'ffn=80', 'queryHeads=6', 'kvHeads=2', 'headDim=8'];
    recipe = [
      ...[text, '--preset', 'local-history-tiny', '--context', '32', '--batch', '5', '--microbatch', '2'],
      ...['--updates', '256', '--epochs', '6', '--lr', '1e-3', '--held-out', '0.2', '--save-every', '128'],
      ...shape.flatMap((setting) => ['--set', setting]),
    ];
    await succeeds(train(1, ...recipe, '--out', run('one'), '--threads', '1').outcome);
  });
  after(() => rm(directory, { recursive: true }));

  it('gives the losses of one rank over 256 updates', async () => {
    const stdout = await succeeds(train(2, ...recipe, '--out', run('two')).outcome);
    assert.match(stdout, /; 2 ranks, Open MPI/);
    assert.equal(stdout.match(/Trained 256 of 256 updates/g)?.length, 1, 'only rank 0 prints');
    await assertSameRun(run('two'), run('one'), 256);
  });

  it('gives them with 3 ranks, which get unequal parts, and --json on rank 0 alone', async () => {
    const stdout = await succeeds(
      train(3, ...recipe, '--updates', '12', '--out', run('three'), '--json').outcome,
    );
    const { ranks, update } = JSON.parse(stdout) as { ranks: number; update: number };
    assert.deepEqual({ ranks, update }, { ranks: 3, update: 12 });
    const [three, one] = [await updates(run('three')), await updates(run('one'))];
    assert.deepEqual(
      three.map(({ validTargets }) => validTargets),
      one.slice(0, 12).map(({ validTargets }) => validTargets),
    );
    assert.ok(Math.abs((three[0] as Update).loss / (one[0] as Update).loss - 1) < 1e-6);
  });

  it('continues on 2 ranks what one rank began', async () => {
    const first = train(1, ...recipe, '--out', run('mixed'), '--threads', '1');
    // Its only checkpoint so far is of update 128.
    await waitForUpdates(run('mixed'), 132, first.child);
    first.child.kill('SIGKILL');
    await first.outcome;
    const stdout = await succeeds(train(2, '--resume', run('mixed')).outcome);
    assert.match(stdout, /Resuming after 128 of 256 updates; 2 ranks/);
    await assertSameRun(run('mixed'), run('one'), 256);
  });

  for (const victim of [1, 0]) {
    it(`ends within seconds when rank ${victim} dies, and its last checkpoint is whole`, async () => {
      const name = `killed-${victim}`;
      const { child, outcome } = train(2, ...recipe, '--save-every', '3', '--out', run(name));
      await waitForUpdates(run(name), 20, child);
      const killed = Date.now();
      process.kill(rankProcess(child, victim), 'SIGKILL');
      const { code, stderr } = await outcome;
      assert.ok(Date.now() - killed < 10_000, `it took ${Date.now() - killed} ms`);
      assert.notEqual(code, 0);
      assert.match(stderr, new RegExp(`duokv: ERR_DISTRIBUTED: rank ${victim} ended without leaving`));
      await cp(run(name), run(`${name}-resumed`), { recursive: true });
      const { child: resumed, outcome: end } = train(1, '--resume', run(`${name}-resumed`), '--threads', '1');
      await waitForUpdates(run(`${name}-resumed`), 24, resumed);
      resumed.kill('SIGTERM');
      const { code: stopped, stdout } = await end;
      assert.equal(stopped, 143);
      const [, from] = /Resuming after (\d+) of 256/.exec(stdout) as unknown as [string, string];
      assert.ok(Number(from) >= 18 && Number(from) % 3 === 0, `resumed after update ${from}`);
    });
  }

  it('saves where it is when it is told to stop', async () => {
    // mpirun sends its ranks a signal after this many seconds, and kills them after as many again; until then they
    // must have something to do.
    const long = ['--updates', '20000', '--epochs', '500', '--out', run('stopped')];
    const { child, outcome } = startRanks(2, [MAIN, 'train', ...recipe, ...long], {
      OMPI_MCA_odls_base_sigkill_timeout: '3',
    });
    await waitForUpdates(run('stopped'), 10, child);
    child.kill('SIGINT');
    const { stdout } = await outcome;
    const [, update] = /Stopped after (\d+) of 20000 updates/.exec(stdout) as unknown as [string, string];
    const recorded = await updates(run('stopped'));
    assert.equal(recorded.at(-1)?.update, Number(update));
    const state = JSON.parse(
      await readFile(join(run('stopped'), 'checkpoint', 'trainer.json'), 'utf8'),
    ) as Update;
    assert.equal(state.update, Number(update));
  });

  it('says on every rank what one rank cannot do', async () => {
    // Rank 0 alone looks for a run in the folder.
    const { code, stderr } = await train(2, ...recipe, '--out', run('one')).outcome;
    assert.notEqual(code, 0);
    assert.match(stderr, /duokv: ERR_ARGUMENT: .*already holds a training run/);
    assert.match(stderr, /duokv: ERR_DISTRIBUTED: rank 0 failed: ERR_ARGUMENT: .*already holds/);
  });

  it('refuses a batch with fewer windows than ranks', async () => {
    const { stderr } = await train(2, ...recipe, '--batch', '1', '--microbatch', '1', '--out', run('few'))
      .outcome;
    assert.match(stderr, /duokv: --batch 1 gives some of the 2 ranks nothing to do/);
  });
};

// Without MPI, group.test.ts holds that a launcher's processes say how to get it.
if (hasMpi) describe('duokv train with several ranks', suite);
