#!/usr/bin/env node
// Packs the built addon, with every library it needs beside it, into prebuilds/<platform>-<arch>/; the CUDA backend too,
// where scripts/cuda/build.sh has built it.
//
// prebuildify names, strips and places what a `node-gyp rebuild` leaves in build/Release. Here it works in a
// staging folder, and this file stands in for node-gyp: it lets CMake install the checkout's own build there, with
// its run-time dependencies, so nothing is compiled twice and build/ stays as it is.

import { spawnSync } from 'node:child_process';
import fs from 'node:fs';
import path from 'node:path';
import { fileURLToPath } from 'node:url';

const self = fileURLToPath(import.meta.url);
const root = path.dirname(path.dirname(self));
const staging = path.join(root, 'build', 'prebuild');
const staged = path.join(staging, 'build', 'Release');
const cudaLibrary = 'libduokv_cuda.so';

function fail(message) {
  console.error(`prebuilds: ${message}`);
  process.exit(1);
}

function run(command, args, env = {}) {
  const result = spawnSync(command, args, {
    cwd: root,
    env: { ...process.env, ...env },
    stdio: ['ignore', 'inherit', 'inherit'],
  });
  if (result.status !== 0) {
    fail(`${[command, ...args].join(' ')} failed: ${result.error?.message ?? `exit code ${result.status}`}`);
  }
}

const newest = (folder) =>
  Math.max(
    ...fs
      .readdirSync(folder, { recursive: true, withFileTypes: true })
      .filter((entry) => entry.isFile() && !/\b(test|emulator)\b/.test(entry.parentPath))
      .map((entry) => fs.statSync(path.join(entry.parentPath, entry.name)).mtimeMs),
  );

/** Places the CUDA backend beside the addon, stripped, unless there is none that the sources of today made. */
function addCudaLibrary() {
  const built = path.join(root, 'build', 'Release', cudaLibrary);
  if (!fs.existsSync(built)) {
    console.log(`prebuilds: without the CUDA backend: there is no ${built} (scripts/cuda/build.sh makes it)`);
    return;
  }
  const sources = ['cuda', 'ops', 'dist'].map((name) => newest(path.join(root, 'native', name)));
  if (fs.statSync(built).mtimeMs < Math.max(...sources)) {
    console.log(
      `prebuilds: without the CUDA backend: ${built} is older than its sources (scripts/cuda/build.sh)`,
    );
    return;
  }
  run('strip', ['--strip-unneeded', '-o', path.join(staged, cudaLibrary), built]);
}

/** The Debian package that a library beside the addon was copied from. */
function packageOf(library) {
  const ldd = spawnSync('ldconfig', ['-p'], { encoding: 'utf8' }).stdout ?? '';
  const source = ldd.match(new RegExp(`^\\s*${library.replaceAll('.', '\\.')} .* => (.+)$`, 'm'))?.[1];
  if (!source) fail(`${library} is not among the libraries of this system, so its licence cannot be found`);
  const real = fs.realpathSync(source);
  for (const file of [real, real.replace(/^\/usr/, '')]) {
    const owner = spawnSync('dpkg-query', ['-S', file], { encoding: 'utf8' });
    if (owner.status === 0) return owner.stdout.split(':')[0];
  }
  return fail(`no Debian package owns ${real}, so its licence cannot be found`);
}

/** Every library of others that travels in the package travels with its licence. */
function addLicences(folder) {
  const libraries = fs
    .readdirSync(folder)
    .filter((name) => /\.so(\.\d+)?$/.test(name) && name !== cudaLibrary);
  for (const library of libraries) {
    const licence = path.join('/usr/share/doc', packageOf(library), 'copyright');
    if (!fs.existsSync(licence))
      fail(`${licence} is missing: the package may not carry ${library} without it`);
    fs.copyFileSync(licence, path.join(folder, `${library}.LICENSE`));
  }
}

if (process.argv[2] === 'rebuild') {
  // Called by prebuildify in node-gyp's place.
  run('cmake', ['--install', path.join('build', 'cmake'), '--prefix', staged]);
  addCudaLibrary();
} else {
  fs.rmSync(path.join(root, 'prebuilds'), { recursive: true, force: true });
  fs.rmSync(staging, { recursive: true, force: true });
  fs.mkdirSync(staging, { recursive: true });
  const prebuildify = path.join(root, 'node_modules', '.bin', 'prebuildify');
  const options = ['--napi', '--strip', '--tag-libc', '--name', 'duokv', '--cwd', staging, '--out', root];
  run(prebuildify, options, { PREBUILD_NODE_GYP: self });
  addLicences(path.join(root, 'prebuilds', `${process.platform}-${process.arch}`));
}
