// Builds native tests in one of several ways and runs them with ctest.
//
//   node scripts/ctest.mjs native|asan|tsan|emulator|mutants [ctest arguments]

import { spawnSync } from 'node:child_process';
import os from 'node:os';
import path from 'node:path';
import { fileURLToPath } from 'node:url';

const root = path.dirname(path.dirname(fileURLToPath(import.meta.url)));
const emulator = ['-DCMAKE_BUILD_TYPE=Release', '-DDUOKV_CUDA_EMULATOR_TESTS=ON'];
const parallel = ['--parallel', String(os.availableParallelism())];
const variants = {
  native: { options: ['-DCMAKE_BUILD_TYPE=Release', '-DDUOKV_TESTS=ON'] },
  asan: {
    options: ['-DCMAKE_BUILD_TYPE=RelWithDebInfo', '-DDUOKV_TESTS=ON', '-DDUOKV_SANITIZE=address'],
    env: { ASAN_OPTIONS: 'detect_stack_use_after_return=1', UBSAN_OPTIONS: 'print_stacktrace=1' },
  },
  tsan: {
    options: ['-DCMAKE_BUILD_TYPE=RelWithDebInfo', '-DDUOKV_TESTS=ON', '-DDUOKV_SANITIZE=thread'],
    // Address randomisation of recent kernels can leave no room for ThreadSanitizer's shadow memory.
    wrapper: ['setarch', '-R'],
  },
  // Both in one folder: the tests that mutants must fail are compiled once. Their programs have one thread each.
  emulator: { folder: 'emulator', parallel, options: [...emulator, '-DDUOKV_CUDA_MUTANTS=OFF'] },
  mutants: { folder: 'emulator', parallel, options: [...emulator, '-DDUOKV_CUDA_MUTANTS=ON'] },
};

const [name, ...ctestArguments] = process.argv.slice(2);
if (!Object.hasOwn(variants, name)) {
  console.error(`usage: node scripts/ctest.mjs ${Object.keys(variants).join('|')} [ctest arguments]`);
  process.exit(2);
}
const { options, folder = name, parallel: jobs = [], env = {}, wrapper = [] } = variants[name];

function run(command, ...args) {
  const result = spawnSync(command, args, {
    cwd: root,
    env: { ...process.env, ...env },
    stdio: ['ignore', 'inherit', 'inherit'],
  });
  if (result.error) console.error(`${command}: ${result.error.message}`);
  if (result.status !== 0) process.exit(result.status ?? 1);
}

const build = path.join('build', `ctest-${folder}`);
run('cmake', '-S', '.', '-B', build, '-G', 'Ninja', '-DDUOKV_ADDON=OFF', ...options);
run('cmake', '--build', build);
const ctest = [
  'ctest',
  '--test-dir',
  build,
  '--output-on-failure',
  '--no-tests=error',
  ...jobs,
  ...ctestArguments,
];
run(...wrapper, ...ctest);
