import assert from 'node:assert/strict';
import { fileURLToPath } from 'node:url';
import { readLaunch } from '../../lib/group.js';
import { joinGroup } from '../../lib/index.js';
import { rejectsWith } from '../api/support.js';
import { hasMpi, startAtAddress, startRanks } from './launch.js';

const PROGRAM = fileURLToPath(new URL('program.ts', import.meta.url));
const program = (mode: string) => ['--import', 'tsx', PROGRAM, mode];

describe('a group of ranks', () => {
  it('is one rank where no launcher started more', async () => {
    await using group = await joinGroup();
    assert.deepEqual([group.rank, group.size, group.localRank, group.threads], [0, 1, 0, undefined]);
    assert.deepEqual(await group.sum([1, 2.5]), [1, 2.5]);
    assert.deepEqual(await group.broadcast({ a: [1] }), { a: [1] });
    await group.barrier();
    await rejectsWith('ERR_ARGUMENT', /root is 1/, () => group.broadcast(1, 1));
  });

  it('reads what launchers say', () => {
    assert.deepEqual(readLaunch({}), { size: 1 });
    for (const name of ['OMPI_COMM_WORLD_SIZE', 'PMI_SIZE', 'SLURM_STEP_NUM_TASKS']) {
      assert.deepEqual(readLaunch({ [name]: '4' }), { size: 4 });
    }
    // A batch script of SLURM is no rank, whatever the job's number of tasks.
    assert.deepEqual(readLaunch({ SLURM_NTASKS: '4', SLURM_PROCID: '0' }), { size: 1 });
    const torchrun = { RANK: '1', WORLD_SIZE: '2', MASTER_ADDR: 'node1', MASTER_PORT: '29500' };
    assert.deepEqual(readLaunch(torchrun), { host: 'node1', port: 29500, rank: 1, size: 2 });
    assert.throws(() => readLaunch({ ...torchrun, RANK: '2' }), /RANK is 2; it must be below WORLD_SIZE/);
    // With a variable missing or wrong, each rank would train alone.
    for (const name of Object.keys(torchrun)) {
      const reason = (text: string) => new RegExp(`^${name} is ${text}; a launch with WORLD_SIZE needs`);
      if (name !== 'MASTER_ADDR') {
        assert.throws(() => readLaunch({ ...torchrun, [name]: 'x' }), { message: reason('"x"') });
      }
      if (name === 'WORLD_SIZE') continue;
      const { [name as keyof typeof torchrun]: _, ...rest } = torchrun;
      assert.throws(() => readLaunch(rest), { message: reason('not set') });
      assert.deepEqual(readLaunch({ ...rest, OMPI_COMM_WORLD_SIZE: '2' }), { size: 2 });
    }
    assert.deepEqual(readLaunch({ WORLD_SIZE: '1' }), { size: 1 });
  });

  it('meets at an address without MPI, which CPUs cannot train without', async () => {
    const started = await startAtAddress(2, program('meet'));
    const [first, second] = await Promise.all(started.map(({ outcome }) => outcome));
    assert.equal(first?.stderr, '');
    assert.equal(second?.stdout, '');
    const { sum, said, trains } = JSON.parse(first?.stdout as string);
    assert.deepEqual(sum, [3, 1]);
    assert.equal(said, 'rank 1');
    assert.match(trains, /^ERR_DISTRIBUTED: ranks on the CPU sum their gradients through MPI/);
  });

  it('checks an address', async () => {
    const address = { host: 'localhost', port: 1024, rank: 0, size: 2 };
    for (const [wrong, message] of [
      [{ port: 0 }, /address\.port is 0/],
      [{ rank: 2 }, /address\.rank is 2/],
      [{ size: 0 }, /address\.size is 0/],
      [{ host: 1 as unknown as string }, /address\.host must be a string/],
    ] as const) {
      await rejectsWith('ERR_ARGUMENT', message, () => joinGroup({ address: { ...address, ...wrong } }));
    }
  });
});

if (!hasMpi) {
  describe('a group of ranks without MPI', () => {
    it('says how to get it', async () => {
      const { stderr } = await startRanks(1, program('meet'), { OMPI_COMM_WORLD_SIZE: '2' }).outcome;
      assert.match(stderr, /built without MPI.*apt-get install libopenmpi-dev.*code: 'ERR_DISTRIBUTED'/s);
    });
  });
} else {
  describe('a group of ranks under mpirun', () => {
    for (const ranks of [2, 3]) {
      it(`sums the gradients of every design over ${ranks} ranks, bucket by bucket`, async () => {
        const { code, stdout, stderr } = await startRanks(ranks, program('gradients')).outcome;
        assert.equal(stderr, '');
        assert.equal(code, 0);
        assert.ok(Number(stdout) >= 10);
      });
    }

    it('refuses what only one rank could do, and goes on', async () => {
      const { code, stdout, stderr } = await startRanks(2, program('refusals')).outcome;
      assert.equal(stderr, '');
      assert.equal(code, 0);
      const [zero, one] = JSON.parse(stdout) as [Record<string, string>, Record<string, string>];
      const both = (key: string, pattern: RegExp) => {
        for (const results of [zero, one]) assert.match(results[key] as string, pattern);
      };
      assert.match(zero['batch'] as string, /^ERR_DISTRIBUTED: rank 1 refused its part of the batch/);
      assert.match(one['batch'] as string, /^ERR_TOKEN_RANGE: /);
      both('signal', /^ERR_ARGUMENT: options\.signal/);
      both('options', /^ERR_DISTRIBUTED: rank 1 has another model, other trainer options/);
      both('save', /^ERR_DISTRIBUTED: the parameters of rank 1 are no longer those of rank 0/);
      both('saved', /^false$/);
      both('first step', /^ERR_DISTRIBUTED: the parameters of rank 1 are no longer those of rank 0/);
    });

    it('tells the others when a rank throws, or ends', async () => {
      const thrown = await startRanks(2, program('throws')).outcome;
      assert.match(thrown.stdout, /"ERR_DISTRIBUTED: rank 1 failed: it has had enough"/);
      assert.match(thrown.stderr, /thrown on purpose/);
      assert.notEqual(thrown.code, 0);
      const ended = await startRanks(2, program('exits')).outcome;
      assert.match(ended.stdout, /"ERR_DISTRIBUTED: rank 1 ended without leaving the group"/);
      assert.notEqual(ended.code, 0);
    });

    it('is not taken for a group of one by processes that MPI does not connect', async () => {
      const { stderr } = await startRanks(1, program('meet'), { OMPI_COMM_WORLD_SIZE: '2' }).outcome;
      assert.match(
        stderr,
        /the launcher started 2 processes, but each is alone to Open MPI.*code: 'ERR_DISTRIBUTED'/s,
      );
    });
  });
}
