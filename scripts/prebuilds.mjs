#!/usr/bin/env node
// Packs the built addon, with every library it needs beside it, into prebuilds/<platform>-<arch>/.
//
// prebuildify names, strips and places what a `node-gyp rebuild` leaves in build/Release. Here it works in a staging
// folder, and this same file stands in for node-gyp: it lets CMake install the addon of the checkout's own build there,
// together with its run-time dependencies, so nothing is compiled twice and build/ stays as it is.

import { spawnSync } from 'node:child_process';
import fs from 'node:fs';
import path from 'node:path';
import { fileURLToPath } from 'node:url';

const self = fileURLToPath(import.meta.url);
const root = path.dirname(path.dirname(self));
const staging = path.join(root, 'build', 'prebuild');

function run(command, args, env = {}) {
  const result = spawnSync(command, args, {
    cwd: root,
    env: { ...process.env, ...env },
    stdio: ['ignore', 'inherit', 'inherit'],
  });
  if (result.status !== 0) {
    console.error(
      `${[command, ...args].join(' ')} failed: ${result.error?.message ?? `exit code ${result.status}`}`,
    );
    process.exit(1);
  }
}

if (process.argv[2] === 'rebuild') {
  // Called by prebuildify in node-gyp's place.
  run('cmake', [
    '--install',
    path.join('build', 'cmake'),
    '--prefix',
    path.join(staging, 'build', 'Release'),
  ]);
} else {
  fs.rmSync(path.join(root, 'prebuilds'), { recursive: true, force: true });
  fs.rmSync(staging, { recursive: true, force: true });
  fs.mkdirSync(staging, { recursive: true });
  const prebuildify = path.join(root, 'node_modules', '.bin', 'prebuildify');
  const options = ['--napi', '--strip', '--tag-libc', '--name', 'duokv', '--cwd', staging, '--out', root];
  run(prebuildify, options, { PREBUILD_NODE_GYP: self });
}
