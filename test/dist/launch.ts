import assert from 'node:assert/strict';
import { type ChildProcess, spawn, spawnSync } from 'node:child_process';
import { existsSync, readFileSync } from 'node:fs';
import { createServer } from 'node:net';
import { fileURLToPath } from 'node:url';

const root = fileURLToPath(new URL('../../', import.meta.url));

/** Whether ranks can be started here: a launcher, and an addon that was built with MPI. */
export const hasMpi =
  spawnSync('mpirun', ['--version']).status === 0 && existsSync(`${root}build/Release/duokv_mpi.so`);

export interface Run {
  code: number | null;
  stdout: string;
  stderr: string;
}

/** The environment of a process that no launcher started, whatever started the tests. */
const plainEnvironment = Object.fromEntries(
  Object.entries(process.env).filter(([name]) => !/^(OMPI_|PMI|PMIX_|SLURM_|RANK$|WORLD_SIZE$)/.test(name)),
);

/** Starts Node with `args` as `ranks` ranks, or as one process without a launcher. */
export function startRanks(ranks: number, args: readonly string[], environment: NodeJS.ProcessEnv = {}) {
  const launcher = ['--allow-run-as-root', '--oversubscribe', '--bind-to', 'none', '-np', String(ranks)];
  const [command, all] =
    ranks === 1 ? [process.execPath, args] : ['mpirun', [...launcher, process.execPath, ...args]];
  const child = spawn(command, all, {
    cwd: root,
    env: { ...plainEnvironment, ...environment },
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  const run: Run = { code: null, stdout: '', stderr: '' };
  child.stdout.setEncoding('utf8').on('data', (text: string) => {
    run.stdout += text;
  });
  child.stderr.setEncoding('utf8').on('data', (text: string) => {
    run.stderr += text;
  });
  const outcome = new Promise<Run>((resolve, reject) => {
    child.on('error', reject);
    child.on('close', (code) => resolve({ ...run, code }));
  });
  return { child, outcome };
}

/** What a run printed, which must have ended well and without a word on stderr. */
export async function succeeds(outcome: Promise<Run>): Promise<string> {
  const { code, stdout, stderr } = await outcome;
  assert.equal(stderr, '');
  assert.equal(code, 0);
  return stdout;
}

async function freePort(): Promise<number> {
  const server = createServer().listen(0);
  await new Promise((resolve) => server.once('listening', resolve));
  const { port } = server.address() as { port: number };
  await new Promise((resolve) => server.close(resolve));
  return port;
}

/** Starts Node with `args` as `ranks` ranks that meet at an address, without MPI; one process each, in their order. */
export async function startAtAddress(
  ranks: number,
  args: readonly string[],
  environment: NodeJS.ProcessEnv = {},
): Promise<ReturnType<typeof startRanks>[]> {
  const address = {
    MASTER_ADDR: 'localhost',
    MASTER_PORT: String(await freePort()),
    WORLD_SIZE: String(ranks),
  };
  return Array.from({ length: ranks }, (_, rank) =>
    startRanks(1, args, { ...environment, ...address, RANK: String(rank) }),
  );
}

/** The process of a rank that `mpirun` started. */
export function rankProcess(mpirun: ChildProcess, rank: number): number {
  const children = readFileSync(`/proc/${mpirun.pid}/task/${mpirun.pid}/children`, 'utf8').trim().split(' ');
  const found = children.find((pid) =>
    readFileSync(`/proc/${pid}/environ`, 'latin1').includes(`OMPI_COMM_WORLD_RANK=${rank}\0`),
  );
  if (found === undefined) throw new Error(`mpirun has no rank ${rank} among ${children.join(', ')}`);
  return Number(found);
}
