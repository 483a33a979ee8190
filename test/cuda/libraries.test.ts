import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { copyFileSync, existsSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';

import type { DeviceInfo } from '../../lib/index.js';
import { hasMpi, startRanks } from '../dist/launch.js';

const ROOT = fileURLToPath(new URL('../../', import.meta.url));
const MAIN = join(ROOT, 'dist/cli/main.js');

/** NCCL's functions that duokv calls, and version 2.27.3. */
const FUNCTIONS = ['GetUniqueId', 'CommInitRankConfig', 'CommGetAsyncError', 'CommAbort', 'GetErrorString'];
const FAKE = `extern "C" int ncclGetVersion(int* version) { *version = 22703; return 0; }
${[...FUNCTIONS, 'GetLastError', 'AllReduce'].map((name) => `extern "C" int nccl${name}() { return 5; }`).join('\n')}`;

type Distributed = DeviceInfo['distributed'];

/** What `duokv doctor` says of the libraries, and `device.info()` in it, which must be the same; then its text. */
async function doctor(environment: NodeJS.ProcessEnv): Promise<Distributed> {
  const env = { DUOKV_CUDA: 'emulator', ...environment };
  const { stdout } = await startRanks(1, [MAIN, 'doctor', '--backend', 'cpu', '--json'], env).outcome;
  const { machine, device } = JSON.parse(stdout) as {
    machine: { distributed: Distributed };
    device: DeviceInfo;
  };
  assert.deepEqual(device.distributed, machine.distributed);
  const text = (await startRanks(1, [MAIN, 'doctor', '--backend', 'cpu'], env).outcome).stdout;
  for (const [name, { description }] of [
    ['MPI', machine.distributed.mpi],
    ['NCCL', machine.distributed.nccl],
  ] as const) {
    assert.ok(text.includes(`\n${name.padEnd(8)} ${description}\n`), `${name} ${description}\n${text}`);
  }
  return machine.distributed;
}

describe('the libraries that ranks need', () => {
  let folder: string;
  before(() => {
    folder = mkdtempSync(join(tmpdir(), 'duokv-libraries-'));
  });
  after(() => rmSync(folder, { recursive: true }));

  function compile(name: string, source: string): string {
    writeFileSync(join(folder, `${name}.cpp`), source);
    const library = join(folder, `${name}.so.2`);
    execFileSync('g++', ['-shared', '-fPIC', '-o', library, join(folder, `${name}.cpp`)]);
    return library;
  }

  it('are named with version and file where they are found', async () => {
    const path = compile('libnccl', FAKE);
    const { nccl, mpi } = await doctor({ DUOKV_NCCL: path });
    assert.deepEqual(nccl, {
      found: true,
      version: 'NCCL 2.27.3',
      path,
      description: `NCCL 2.27.3 (${path})`,
    });
    assert.equal(mpi.found, hasMpi);
    if (hasMpi) {
      assert.ok(existsSync(mpi.path as string));
      assert.equal(mpi.description, `${mpi.version} (${mpi.path})`);
    }
    assert.equal((await doctor({})).nccl.description, 'NCCL (emulated)');
  });

  it('are missing for a reason, with what they are for and where they were looked for', async () => {
    const without = 'not found, so ranks on GPUs cannot sum their gradients: ';
    for (const [environment, why] of [
      [
        { DUOKV_NCCL: '/nowhere/libnccl.so' },
        /^NCCL cannot be used \(install pip's .*\): \/nowhere\/libnccl\.so: /,
      ],
      [
        { DUOKV_NCCL: compile('libolder', 'extern "C" int ncclGetVersion(int*) { return 0; }') },
        /libolder\.so\.2 has no function ncclGetUniqueId$/,
      ],
      [
        { DUOKV_CUDA_LIBRARY: '/nowhere/libduokv_cuda.so' },
        /^this installation has no CUDA library: \/nowhere/,
      ],
    ] as const) {
      const { nccl } = await doctor(environment);
      assert.deepEqual([nccl.found, nccl.version, nccl.path], [false, null, null]);
      assert.ok(nccl.description.startsWith(without), nccl.description);
      assert.match(nccl.description.slice(without.length), why);
      assert.ok(!nccl.description.includes('\n'));
    }
    // The addon without the library that stands beside it where duokv was built with MPI.
    const addon = join(folder, 'duokv.node');
    copyFileSync(join(ROOT, 'build/Release/duokv.node'), addon);
    const print = 'console.log(JSON.stringify(require(process.argv[1]).findLibraries().mpi))';
    const mpi = JSON.parse(execFileSync(process.execPath, ['-e', print, addon], { encoding: 'utf8' })) as {
      found: boolean;
      why: string;
    };
    assert.equal(mpi.found, false);
    assert.match(
      mpi.why,
      /^duokv was built without MPI \(there is no .*duokv_mpi\.so\): install its headers/,
    );
  });
});
