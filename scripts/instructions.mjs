// Counts the instructions of the hot CPU operations under callgrind and compares them with a committed baseline:
// times of a shared machine are noisy, counts are not. One thread, AVX2, fixed shapes (native/bench/operations.cpp).
//
//   node scripts/instructions.mjs [--update] [--build FOLDER]
//
// Counts depend on the compiler, so a baseline counts for one release of it. --update rewrites the baseline.

import { spawnSync } from 'node:child_process';
import fs from 'node:fs';
import os from 'node:os';
import path from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

const root = path.dirname(path.dirname(fileURLToPath(import.meta.url)));
const file = path.join(root, 'native', 'bench', 'instructions.json');
const TOLERANCE = 0.02;

const { values: flags } = parseArgs({
  options: {
    help: { type: 'boolean', default: false },
    update: { type: 'boolean', default: false },
    build: { type: 'string', default: path.join(root, 'build', 'ctest-native') },
  },
});

if (flags.help) {
  console.log('usage: node scripts/instructions.mjs [--update] [--build DIRECTORY]');
  process.exit(0);
}

function run(command, args, options = {}) {
  const result = spawnSync(command, args, { cwd: root, encoding: 'utf8', ...options });
  if (result.error?.code === 'ENOENT') return null;
  if (result.status !== 0) {
    console.error(`instructions: ${command} ${args.join(' ')} failed\n${result.stderr ?? ''}`);
    process.exit(1);
  }
  return result.stdout ?? '';
}

function skip(why) {
  console.log(`instructions: skipped: ${why}`);
  process.exit(0);
}

if (process.arch !== 'x64') skip(`the baseline is for x64, this is ${process.arch}`);
const valgrind = run('valgrind', ['--version'])?.trim();
if (valgrind === undefined) skip('no valgrind (Debian: apt-get install valgrind)');
const compiler = `g++ ${run('g++', ['-dumpversion']).trim()}`;
const baseline = fs.existsSync(file) ? JSON.parse(fs.readFileSync(file, 'utf8')) : { compiler, counts: {} };
if (!flags.update && baseline.compiler !== compiler) {
  skip(`the baseline is for ${baseline.compiler}, this is ${compiler}`);
}

const shown = { stdio: ['ignore', 'inherit', 'inherit'] };
const options = ['-DCMAKE_BUILD_TYPE=Release', '-DDUOKV_ADDON=OFF', '-DDUOKV_BENCH=ON'];
run('cmake', ['-S', root, '-B', flags.build, '-G', 'Ninja', '--log-level=WARNING', ...options], shown);
run('cmake', ['--build', flags.build, '--target', 'instructions_bench'], shown);

const folder = fs.mkdtempSync(path.join(os.tmpdir(), 'duokv-instructions-'));
const counts = {};
try {
  const measured = 'duokv_measured';
  const callgrind = ['--tool=callgrind', '--collect-atstart=no', `--toggle-collect=${measured}`];
  callgrind.push(`--dump-after=${measured}`, `--callgrind-out-file=${path.join(folder, 'out')}`);
  // Functions of libraries are looked up when the program starts: else the first operation to call one is charged for it.
  const env = { ...process.env, LD_BIND_NOW: '1' };
  const names = run('valgrind', [...callgrind, path.join(flags.build, 'instructions_bench')], { env })
    .trim()
    .split('\n');
  names.forEach((name, i) => {
    const dump = fs.readFileSync(path.join(folder, `out.${i + 1}`), 'utf8');
    counts[name] = Number(/^(?:summary|totals): (\d+)/m.exec(dump)[1]);
  });
} finally {
  fs.rmSync(folder, { recursive: true });
}

if (flags.update) {
  fs.writeFileSync(file, `${JSON.stringify({ compiler, valgrind, counts }, null, 2)}\n`);
  console.log(`instructions: wrote ${Object.keys(counts).length} counts to ${path.relative(root, file)}`);
  process.exit(0);
}

let failed = 0;
for (const name of new Set([...Object.keys(baseline.counts), ...Object.keys(counts)])) {
  const [before, now] = [baseline.counts[name], counts[name]];
  const change = now / before - 1;
  const grown = !(change <= TOLERANCE);
  // Fewer instructions are welcome; the baseline should say so.
  const stale = change < -TOLERANCE;
  if (grown) failed++;
  const verdict = grown ? 'GREW' : stale ? 'fewer: --update' : 'ok';
  const millions = (value) => (value === undefined ? 'none' : (value / 1e6).toFixed(2)).padStart(10);
  const percent = Number.isNaN(change) ? '–' : `${(100 * change).toFixed(2)} %`;
  console.log(`${name.padEnd(44)} ${millions(before)} ${millions(now)} M ${percent.padStart(9)}  ${verdict}`);
}
console.log(
  failed === 0
    ? `instructions: ${Object.keys(counts).length} operations within ${100 * TOLERANCE} %`
    : `instructions: ${failed} operations grew by more than ${100 * TOLERANCE} %, or have no baseline`,
);
process.exitCode = failed === 0 ? 0 : 1;
