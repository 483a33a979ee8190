// Builds the native tests in one of three ways and runs them with ctest.
//
//   node scripts/ctest.mjs native|asan|tsan [ctest arguments]

import { spawnSync } from 'node:child_process';
import path from 'node:path';
import { fileURLToPath } from 'node:url';

const root = path.dirname(path.dirname(fileURLToPath(import.meta.url)));
const variants = {
  native: { type: 'Release', sanitize: '', wrapper: [], env: {} },
  asan: {
    type: 'RelWithDebInfo',
    sanitize: 'address',
    wrapper: [],
    env: { ASAN_OPTIONS: 'detect_stack_use_after_return=1', UBSAN_OPTIONS: 'print_stacktrace=1' },
  },
  // Address randomisation of recent kernels can leave no room for ThreadSanitizer's shadow memory.
  tsan: { type: 'RelWithDebInfo', sanitize: 'thread', wrapper: ['setarch', '-R'], env: {} },
};

const [name, ...ctestArguments] = process.argv.slice(2);
const variant = variants[name];
if (!variant) {
  console.error(`usage: node scripts/ctest.mjs ${Object.keys(variants).join('|')} [ctest arguments]`);
  process.exit(2);
}

function run(command, ...args) {
  const env = { ...process.env, ...variant.env };
  const result = spawnSync(command, args, { cwd: root, env, stdio: ['ignore', 'inherit', 'inherit'] });
  if (result.status !== 0) process.exit(result.status ?? 1);
}

const folder = path.join('build', `ctest-${name}`);
run(
  'cmake',
  ...['-S', '.', '-B', folder, '-G', 'Ninja', `-DCMAKE_BUILD_TYPE=${variant.type}`, '-DDUOKV_ADDON=OFF'],
  ...['-DDUOKV_TESTS=ON', `-DDUOKV_SANITIZE=${variant.sanitize}`],
);
run('cmake', '--build', folder);
const ctest = ['ctest', '--test-dir', folder, '--output-on-failure', '--no-tests=error', ...ctestArguments];
run(...variant.wrapper, ...ctest);
