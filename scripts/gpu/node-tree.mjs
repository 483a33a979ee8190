// Puts together, in one folder, all that the TypeScript tests and the command need to run on a machine without Node:
//
//   node scripts/gpu/node-tree.mjs FOLDER
//
//   bin/node              this Node
//   prebuilds             the addon, the CUDA backend and the libraries they need (scripts/prebuilds.mjs)
//   dist, lib, test       the command, and what the tests are and import
//   node_modules          the dependencies, mocha, tsx and fast-check, with what these depend on

import fs from 'node:fs';
import path from 'node:path';
import { fileURLToPath } from 'node:url';

const root = path.dirname(path.dirname(path.dirname(fileURLToPath(import.meta.url))));

const TESTING = ['mocha', 'tsx', 'fast-check'];
/** Needed to build the addon, not to run it. */
const BUILDING = ['cmake-js', 'node-addon-api'];

/** Keys of package-lock.json's `packages` that the named packages need, their own included. */
export function packagesOf(packages, names) {
  const found = new Set();
  // As Node looks a package up: in node_modules of the folder that asks, then of the folders around it.
  const resolve = (name, folder) => {
    for (let at = folder; ; at = at.slice(0, Math.max(0, at.lastIndexOf('node_modules/') - 1))) {
      const key = `${at === '' ? '' : `${at}/`}node_modules/${name}`;
      if (packages[key]) return key;
      if (at === '') return undefined;
    }
  };
  const add = (key) => {
    if (key === undefined || found.has(key)) return;
    found.add(key);
    const { dependencies, optionalDependencies } = packages[key];
    for (const name of Object.keys({ ...dependencies, ...optionalDependencies })) add(resolve(name, key));
  };
  for (const name of names) add(resolve(name, ''));
  return [...found];
}

/** Binaries of packages that carry one for every platform, except this one's. */
const isForeign = (file) =>
  /\.node$/.test(file) &&
  /tokenizers\.\w/.test(file) &&
  !file.includes(`.${process.platform}-${process.arch}-gnu.`);

function main(folder) {
  fs.rmSync(folder, { recursive: true, force: true });
  fs.mkdirSync(path.join(folder, 'bin'), { recursive: true });
  fs.copyFileSync(process.execPath, path.join(folder, 'bin', 'node'));
  const copy = (name) =>
    fs.cpSync(path.join(root, name), path.join(folder, name), {
      recursive: true,
      dereference: true,
      filter: (source) => !isForeign(source),
    });
  for (const name of ['package.json', 'tsconfig.json', 'dist', 'lib', 'test', 'prebuilds']) copy(name);
  const { packages } = JSON.parse(fs.readFileSync(path.join(root, 'package-lock.json'), 'utf8'));
  const wanted = Object.keys(packages[''].dependencies).filter((name) => !BUILDING.includes(name));
  // Packages of other platforms are in the lock file, and not here.
  for (const key of packagesOf(packages, [...wanted, ...TESTING])) {
    if (fs.existsSync(path.join(root, key))) copy(key);
  }
}

if (process.argv[1] === fileURLToPath(import.meta.url)) main(process.argv[2]);
