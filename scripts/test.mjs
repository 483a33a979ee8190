// `npm test`: the mocha suite, then the CUDA kernels on the SIMT emulator. Arguments reach mocha and choose among its
// tests, so that the kernels' are left out.
//
//   node scripts/test.mjs [mocha arguments]

import { spawnSync } from 'node:child_process';
import path from 'node:path';
import { fileURLToPath } from 'node:url';

const root = path.dirname(path.dirname(fileURLToPath(import.meta.url)));
const mochaArguments = process.argv.slice(2);

function run(command, ...args) {
  const result = spawnSync(command, args, { cwd: root, stdio: 'inherit' });
  if (result.error) console.error(`${command}: ${result.error.message}`);
  if (result.status !== 0) process.exit(result.status ?? 1);
}

run(process.execPath, 'scripts/setup.mjs', '--emulator');
run(path.join('node_modules', '.bin', 'mocha'), ...mochaArguments);
if (mochaArguments.length === 0) run(process.execPath, 'scripts/ctest.mjs', 'emulator');
