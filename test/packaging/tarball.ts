/*
 * The packed tarball on a machine that has Node and nothing else. Run by `npm run test:package`, after
 * `npm run prebuilds`: packing and installing take too long for the ordinary suite.
 */

import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import {
  chmodSync,
  copyFileSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readFileSync,
  realpathSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { basename, dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';

const root = fileURLToPath(new URL('../../', import.meta.url));
const addon = 'node_modules/duokv/prebuilds';

describe('the packed tarball', () => {
  let jail: string;
  let app: string;
  let environment: NodeJS.ProcessEnv;

  const run = (cwd: string, command: string, ...args: string[]) =>
    execFileSync(command, args, {
      cwd,
      env: environment,
      encoding: 'utf8',
      stdio: ['ignore', 'pipe', 'inherit'],
    });

  before(() => {
    jail = realpathSync(mkdtempSync(join(tmpdir(), 'duokv-package-')));
    app = join(jail, 'app');
    const shims = join(jail, 'shims');
    for (const folder of [app, shims]) mkdirSync(folder);
    for (const compiler of ['c++', 'g++', 'gcc', 'cc', 'clang', 'clang++', 'cmake', 'make', 'ninja']) {
      const shim = join(shims, compiler);
      writeFileSync(shim, `#!/bin/sh\necho "this machine has no ${compiler}" >&2\nexit 127\n`);
      chmodSync(shim, 0o755);
    }
    environment = { ...process.env, PREBUILDS_ONLY: '1', PATH: `${shims}:${process.env['PATH']}` };
    writeFileSync(join(app, 'package.json'), '{ "name": "consumer", "private": true, "type": "module" }\n');
    const [pack] = JSON.parse(
      run(root, 'npm', 'pack', '--json', '--ignore-scripts', '--pack-destination', jail),
    );
    run(app, 'npm', 'install', '--no-audit', '--no-fund', '--prefer-offline', join(jail, pack.filename));
  });

  after(() => rmSync(jail, { recursive: true, force: true }));

  it('installs without a compiler, and its command runs', () => {
    const report = JSON.parse(run(app, join(app, 'node_modules/.bin/duokv'), 'doctor', '--json'));
    assert.equal(report.ok, true);
  });

  it('says why it does not use a GPU that is not there', () => {
    const environment = { ...process.env, CUDA_VISIBLE_DEVICES: '' };
    const report = JSON.parse(
      execFileSync(join(app, 'node_modules/.bin/duokv'), ['doctor', '--json'], {
        cwd: app,
        env: environment,
        encoding: 'utf8',
      }),
    );
    assert.equal(report.device.backend, 'cpu');
    const { why } = report.device.fallbacks.find(({ backend }: { backend: string }) => backend === 'cuda');
    const carried = existsSync(join(app, addon, `${process.platform}-${process.arch}`, 'libduokv_cuda.so'));
    assert.match(why, carried ? /driver|device|GPU/ : /has no CUDA library/);
  });

  it('loads oneDNN and Highway, and what they need, from beside the addon', () => {
    const script = `
      await import('duokv').then(({ openDevice }) => openDevice({ backend: 'cpu' })).then((device) => device.close());
      console.log(JSON.stringify(process.report.getReport().sharedObjects));`;
    const objects: string[] = JSON.parse(run(app, process.execPath, '--input-type=module', '--eval', script));
    const carried = objects.filter((file) =>
      /^(duokv|libdnnl|libhwy|libgomp|libOpenCL)\b/.test(basename(file)),
    );
    assert.ok(carried.length >= 4, `only ${carried.join(', ')}`);
    for (const file of carried) assert.ok(file.startsWith(join(app, addon)), file);
  });

  it('carries a licence for every library of others', () => {
    const folder = join(app, addon, `${process.platform}-${process.arch}`);
    const libraries = run(folder, 'ls')
      .split('\n')
      .filter((name) => /\.so(\.\d+)?$/.test(name) && name !== 'libduokv_cuda.so');
    assert.ok(libraries.length > 0);
    for (const library of libraries)
      assert.ok(readFileSync(join(folder, `${library}.LICENSE`), 'utf8').length > 100);
  });

  it('computes in a root folder that holds Node, the C library and the installed package, and nothing else', () => {
    const ldd = run(jail, 'ldd', process.execPath);
    const libraries = [...ldd.matchAll(/(\/\S+) \(0x/g)].map(([, file]) => file!);
    // Also of the C library, though Node does without: the tokenizer's addon asks for it.
    const libc = libraries.find((file) => basename(file) === 'libc.so.6')!;
    for (const file of [...libraries, join(dirname(libc), 'librt.so.1')]) {
      mkdirSync(dirname(jail + file), { recursive: true });
      copyFileSync(file, jail + file);
    }
    copyFileSync(process.execPath, join(jail, 'node'));
    const script = `
      import { Model, openDevice, presets } from 'duokv';
      const device = await openDevice({ backend: 'cpu' });
      const model = await Model.create(device, presets.localHistoryTiny(), { seed: 1 });
      const tokens = new Int32Array([1, 2, 3, 4]);
      const logits = await model.logits({ tokens, documentIds: new BigInt64Array(4), rows: 1 }, { precision: 'fp32' });
      console.log(logits.length / model.config.vocab, logits.every(Number.isFinite));
      model.dispose();
      await device.close();`;
    writeFileSync(join(app, 'compute.mjs'), script);
    const enter = process.getuid?.() === 0 ? ['chroot'] : ['unshare', '--map-root-user', 'chroot'];
    const [command, ...args] = [...enter, jail, '/node', '/app/compute.mjs'];
    assert.equal(run(jail, command!, ...args), '4 true\n');
  });
});
