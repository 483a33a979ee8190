// Brings a checkout to the point where everything runs: system packages, npm packages, the native build, the
// TypeScript build. A step is skipped when its result is newer than its sources, so commands run this first.
// Uses Node's own modules only: it runs before node_modules exists.
//
//   node scripts/setup.mjs [--lint] [--valgrind] [--emulator]
//
// --lint also provides clang-format, --valgrind valgrind where packages may be installed, --emulator also builds the
// CUDA backend on the SIMT emulator, for the tests.

import { spawnSync } from 'node:child_process';
import fs from 'node:fs';
import path from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';

const root = path.dirname(path.dirname(fileURLToPath(import.meta.url)));
const lockFile = path.join(root, 'build', '.setup-lock');

const FLAGS = ['--lint', '--valgrind', '--emulator'];
const usage = `usage: node scripts/setup.mjs [${FLAGS.join('] [')}]`;
const unknown = process.argv.slice(2).find((flag) => !FLAGS.includes(flag));
if (unknown === '--help') {
  console.log(usage);
  process.exit(0);
} else if (unknown !== undefined) {
  console.error(`setup: ${unknown}; ${usage}`);
  process.exit(2);
}

const tools = [
  { command: 'g++', package: 'g++', atLeast: [11, 0] },
  { command: 'cmake', package: 'cmake', atLeast: [3, 21] },
  { command: 'ninja', package: 'ninja-build', atLeast: [1, 8] },
];
if (process.argv.includes('--lint')) {
  tools.push({ command: 'clang-format', package: 'clang-format', atLeast: [14, 0] });
}
// Nothing but the instruction counts needs it, and they say so where it is missing.
if (process.argv.includes('--valgrind') && process.getuid?.() === 0) {
  tools.push({ command: 'valgrind', package: 'valgrind', atLeast: [3, 15] });
}
const headers = [
  { file: 'dnnl.hpp', package: 'libdnnl-dev', name: 'oneDNN' },
  { file: 'hwy/highway.h', package: 'libhwy-dev', name: 'Highway' },
];

class SetupError extends Error {}

const say = (line) => console.log(`setup: ${line}`);

/** Runs a command with its output shown, or throws a SetupError that names it. */
function run(command, args, { env = {}, hint = '' } = {}) {
  const result = spawnSync(command, args, {
    cwd: root,
    env: { ...process.env, ...env },
    stdio: ['ignore', 'inherit', 'inherit'],
  });
  if (result.status === 0) return;
  const why =
    result.error?.message ?? (result.signal ? `signal ${result.signal}` : `exit code ${result.status}`);
  throw new SetupError(`${[command, ...args].join(' ')} failed: ${why}.${hint && ` ${hint}`}`);
}

/** The version that `command --version` prints, as numbers, or null where there is no such command. */
function versionOf(command) {
  const result = spawnSync(command, ['--version'], { encoding: 'utf8' });
  const version = /(\d+)\.(\d+)/.exec(result.stdout ?? '');
  return result.status === 0 && version ? [Number(version[1]), Number(version[2])] : null;
}

const older = (version, limit) => version[0] < limit[0] || (version[0] === limit[0] && version[1] < limit[1]);

function includeFolders() {
  const prefixes = (process.env.CMAKE_PREFIX_PATH ?? '').split(path.delimiter).filter(Boolean);
  const listed = (process.env.CPATH ?? '').split(path.delimiter).filter(Boolean);
  return [
    '/usr/include',
    '/usr/local/include',
    ...listed,
    ...prefixes.map((prefix) => path.join(prefix, 'include')),
  ];
}

/** Debian packages that would provide what is missing; throws where a tool is there but too old. */
function missingPackages() {
  const packages = [];
  for (const tool of tools) {
    const version = versionOf(tool.command);
    if (!version) packages.push(tool.package);
    else if (older(version, tool.atLeast)) {
      throw new SetupError(
        `${tool.command} ${version.join('.')} is too old: ${tool.atLeast.join('.')} or newer is needed ` +
          '(Debian 12 and Ubuntu 24.04 have it).',
      );
    }
  }
  const folders = includeFolders();
  for (const header of headers) {
    if (!folders.some((folder) => fs.existsSync(path.join(folder, header.file))))
      packages.push(header.package);
  }
  return packages;
}

/** Throws, with the command to run, where this process may not install packages itself. */
function requireApt(packages) {
  const hasApt = spawnSync('apt-get', ['--version']).status === 0;
  if (hasApt && process.getuid?.() === 0) return;
  throw new SetupError(
    `the build needs what these Debian packages provide: ${packages.join(', ')}. ` +
      (hasApt
        ? `Run\n\n  sudo apt-get update && sudo apt-get install -y ${packages.join(' ')}\n\nand this command again.`
        : 'Install their equivalents, with headers, and run this command again.'),
  );
}

function aptInstall(packages) {
  say(`system packages: ${packages.join(', ')} ...`);
  const env = { DEBIAN_FRONTEND: 'noninteractive' };
  const install = () => run('apt-get', ['install', '-y', '--no-install-recommends', ...packages], { env });
  const known = spawnSync('apt-cache', ['policy', ...packages], { encoding: 'utf8' }).stdout ?? '';
  const candidates = known.match(/Candidate: (?!\(none\))/g) ?? [];
  if (candidates.length < packages.length) run('apt-get', ['update'], { env });
  try {
    install();
  } catch {
    // Package lists that have aged name files the mirror has dropped.
    run('apt-get', ['update'], { env });
    install();
  }
}

function installSystemPackages() {
  const packages = missingPackages();
  if (packages.length === 0) return false;
  aptInstall(packages);
  const still = missingPackages();
  if (still.length > 0) {
    throw new SetupError(`apt-get succeeded, yet this is still missing: ${still.join(', ')}.`);
  }
  return true;
}

/** MPI, which training with several CPU ranks needs and nothing else does: installed where that is allowed. */
function installMpi() {
  if (versionOf('mpirun') && versionOf('mpicxx')) return;
  const packages = ['libopenmpi-dev', 'openmpi-bin'];
  try {
    requireApt(packages);
    aptInstall(packages);
  } catch (error) {
    if (!(error instanceof SetupError)) throw error;
    say(`going on without MPI, so without training on several CPU ranks (Debian: ${packages.join(', ')})`);
  }
}

const modified = (file) => fs.statSync(file, { throwIfNoEntry: false })?.mtimeMs ?? 0;

/** Newest modification under the paths. Folders count too, so that a deleted file is noticed. */
function newest(...paths) {
  let time = 0;
  for (const file of paths) {
    const stat = fs.statSync(file, { throwIfNoEntry: false });
    if (!stat) continue;
    time = Math.max(time, stat.mtimeMs);
    if (stat.isDirectory())
      time = Math.max(time, newest(...fs.readdirSync(file).map((name) => path.join(file, name))));
  }
  return time;
}

const at = (...parts) => path.join(root, ...parts);
const bin = (name) => at('node_modules', '.bin', name);

/** The native folders that end up in the addon. */
function addonFolders() {
  if (!fs.existsSync(at('native'))) return [];
  return fs
    .readdirSync(at('native'))
    .filter((name) => !['test', 'bench', 'cuda'].includes(name))
    .map((name) => at('native', name));
}

const steps = [
  {
    name: 'npm packages',
    isStale: () => modified(at('node_modules', '.package-lock.json')) < modified(at('package-lock.json')),
    // Without scripts: this package's own install script would build the addon, the next step's work.
    build: () => npm('ci', '--ignore-scripts', '--no-audit', '--no-fund'),
  },
  {
    name: 'native build',
    output: at('build', 'Release', 'duokv.node'),
    stamp: at('build', '.native-built'),
    sources: () => [at('CMakeLists.txt'), ...addonFolders()],
    build: () =>
      run(bin('cmake-js'), ['build', '-l', 'warn', '-O', at('build', 'cmake')], {
        hint: 'If the folder was built elsewhere or with another compiler, remove build/ and try again.',
      }),
  },
  {
    name: 'TypeScript build',
    output: at('dist', 'index.js'),
    stamp: at('build', '.typescript-built'),
    sources: () => [at('tsconfig.json'), at('lib')],
    build: () => npm('run', '--silent', 'build:ts'),
  },
];

if (process.argv.includes('--emulator')) {
  steps.push({
    name: 'CUDA emulator',
    output: at('build', 'Release', 'libduokv_cuda_emulator.so'),
    stamp: at('build', '.emulator-built'),
    sources: () => [at('CMakeLists.txt'), at('native', 'cuda'), at('native', 'ops')],
    build: () => {
      const folder = at('build', 'emulator');
      const options = ['-DCMAKE_BUILD_TYPE=Release', '-DDUOKV_ADDON=OFF', '-DDUOKV_CUDA_EMULATOR=ON'];
      run('cmake', ['-S', root, '-B', folder, '-G', 'Ninja', '--log-level=WARNING', ...options]);
      run('cmake', ['--build', folder, '--target', 'duokv_cuda_emulator']);
    },
  });
}

const nativeBuild = steps.find(({ name }) => name === 'native build');
const isStale = (step) =>
  step.isStale?.() ?? (!fs.existsSync(step.output) || modified(step.stamp) < newest(...step.sources()));

function npm(...args) {
  const script = process.env.npm_execpath;
  if (script && /\.c?js$/.test(script)) run(process.execPath, [script, ...args]);
  else run('npm', args);
}

function perform(step) {
  say(`${step.name} ...`);
  const start = Date.now();
  step.build();
  if (step.stamp) {
    // Stamped with the start: a source edited while the build ran is newer, and built next time.
    fs.mkdirSync(path.dirname(step.stamp), { recursive: true });
    fs.writeFileSync(step.stamp, '');
    fs.utimesSync(step.stamp, start / 1000, start / 1000);
  }
  say(`${step.name}: ${((Date.now() - start) / 1000).toFixed(1)} s`);
}

function isAlive(pid) {
  try {
    process.kill(pid, 0);
    return true;
  } catch (error) {
    return error.code === 'EPERM';
  }
}

/** Takes the lock that keeps two setups of one checkout apart, waiting for a living holder. */
async function lock() {
  fs.mkdirSync(path.dirname(lockFile), { recursive: true });
  for (let told = false; ; ) {
    try {
      fs.writeFileSync(lockFile, String(process.pid), { flag: 'wx' });
      process.on('exit', () => fs.rmSync(lockFile, { force: true }));
      return;
    } catch (error) {
      if (error.code !== 'EEXIST') throw error;
    }
    const holder = Number(fs.readFileSync(lockFile, { encoding: 'utf8', flag: 'a+' }));
    if (holder && !isAlive(holder)) fs.rmSync(lockFile, { force: true });
    else if (!told) {
      say(`waiting for the setup that process ${holder} runs in this checkout`);
      told = true;
    }
    await sleep(200);
  }
}

function checkNode() {
  const [major, minor] = process.versions.node.split('.').map(Number);
  if (older([major, minor], [20, 17])) {
    throw new SetupError(`Node ${process.versions.node} is too old: 20.17 or newer is needed.`);
  }
  if (process.platform !== 'linux' || !['x64', 'arm64'].includes(process.arch)) {
    throw new SetupError(`duokv runs on Linux x64 and arm64, not on ${process.platform} ${process.arch}.`);
  }
}

try {
  const start = Date.now();
  checkNode();
  let done = 0;
  const packages = missingPackages();
  if (packages.length > 0) requireApt(packages);
  if (packages.length > 0 || steps.some(isStale)) {
    await lock();
    if (installSystemPackages()) done++;
    if (isStale(nativeBuild)) installMpi();
    for (const step of steps) {
      if (!isStale(step)) continue;
      perform(step);
      done++;
    }
  }
  const seconds = ((Date.now() - start) / 1000).toFixed(1);
  say(done === 0 ? `nothing to do (${seconds} s)` : `ready (${seconds} s)`);
} catch (error) {
  if (!(error instanceof SetupError)) throw error;
  console.error(`setup: ${error.message}`);
  process.exitCode = 1;
}
