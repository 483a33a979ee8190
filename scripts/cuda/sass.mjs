// Shows from the machine code of the attention kernels for tensor cores, forward and backward, that they use tensor
// cores, read global memory in 16 bytes, and keep nothing in local memory.
//
//   node scripts/cuda/sass.mjs [object ...]       default: those of scripts/cuda/build.sh in build/cuda
//
// cuobjdump is $CUOBJDUMP, else the one on the path, else that of pip's triton. Without one the script says so and succeeds.

import { spawnSync } from 'node:child_process';
import fs from 'node:fs';
import { fileURLToPath } from 'node:url';

const KERNELS = /attention_mma_kernel|(?:key|query)_gradients_kernel\w*TensorCoreProducts/;
// LD is a load whose pointer is one of two: global here, which the compiler does not see.
const VECTOR_LOAD = /\bLD(?:G|GSTS)?\.E(?:\.\w+)*\.128\b/;

/** What each of the kernels does in a listing of `cuobjdump -sass`. */
export function kernelsOf(listing) {
  const kernels = [];
  let architecture = '';
  let kernel;
  for (const line of listing.split('\n')) {
    architecture = /^\s*(?:arch = |\.target\s+)(sm_\w+)/.exec(line)?.[1] ?? architecture;
    const start = /^\s*Function : (\S+)/.exec(line);
    if (start) {
      kernel = undefined;
      if (!KERNELS.test(start[1])) continue;
      kernel = { symbol: start[1], architecture, products: 0, loads: 0, local: 0 };
      kernels.push(kernel);
    } else if (kernel) {
      if (/\bHMMA\./.test(line)) kernel.products++;
      if (VECTOR_LOAD.test(line)) kernel.loads++;
      if (/\b(?:LDL|STL)\b/.test(line)) kernel.local++;
    }
  }
  return kernels;
}

/** What is wrong with a kernel; empty where nothing is. */
export function faultsOf({ products, loads, local }) {
  const faults = [];
  if (products === 0) faults.push('no tensor-core instruction (HMMA)');
  if (loads === 0) faults.push('no 16-byte load from global memory (LDG, LDGSTS or LD .128)');
  if (local > 0) faults.push(`${local} accesses of local memory (LDL, STL)`);
  return faults;
}

const answers = (command) => spawnSync(command, ['--version']).status === 0;

function findCuobjdump() {
  const ofTriton = spawnSync(
    'python3',
    [
      '-c',
      'import glob, sys; print(*(f for p in sys.path for f in glob.glob(p + "/triton/backends/nvidia/bin/cuobjdump")))',
    ],
    { encoding: 'utf8' },
  );
  const candidates = [process.env.CUOBJDUMP, 'cuobjdump', ...(ofTriton.stdout ?? '').trim().split(' ')];
  return candidates.find((command) => command && answers(command));
}

function main(objects) {
  const cuobjdump = findCuobjdump();
  if (!cuobjdump) {
    console.log('machine code not checked: no cuobjdump (in the CUDA toolkit, or pip install triton)');
    return 0;
  }
  let failed = 0;
  for (const object of objects) {
    const dump = spawnSync(cuobjdump, ['-sass', object], { encoding: 'utf8', maxBuffer: 2 ** 30 });
    if (dump.status !== 0)
      throw new Error(`${cuobjdump} -sass ${object}: ${dump.error?.message ?? dump.stderr}`);
    const kernels = kernelsOf(dump.stdout);
    if (kernels.length === 0) {
      console.error(`${object}: there is no attention kernel for tensor cores`);
      failed++;
    }
    for (const kernel of kernels) {
      const faults = faultsOf(kernel);
      console.log(
        `${kernel.symbol} (${kernel.architecture}): ${kernel.products} HMMA, ${kernel.loads} 16-byte loads, ` +
          `${kernel.local} local${faults.length > 0 ? `: FAILED: ${faults.join('; ')}` : ''}`,
      );
      if (faults.length > 0) failed++;
    }
  }
  return failed > 0 ? 1 : 0;
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const built = ['attention_forward', 'attention_backward'].map((name) => `build/cuda/${name}.o`);
  const objects = process.argv.slice(2);
  const missing = (objects.length > 0 ? objects : built).filter((file) => !fs.existsSync(file));
  if (missing.length > 0)
    throw new Error(`${missing.join(', ')}: no such file (scripts/cuda/build.sh makes them)`);
  process.exitCode = main(objects.length > 0 ? objects : built);
}
