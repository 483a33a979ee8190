import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { readFileSync, statSync } from 'node:fs';
import { fileURLToPath } from 'node:url';

const root = fileURLToPath(new URL('../../', import.meta.url));
const run = (command: string, ...args: string[]) =>
  execFileSync(command, args, { cwd: root, encoding: 'utf8' });

describe('the npm package', () => {
  let packed: Set<string>;

  before(() => {
    const [pack] = JSON.parse(run('npm', 'pack', '--dry-run', '--json', '--ignore-scripts'));
    packed = new Set(pack.files.map((file: { path: string }) => file.path));
  });

  it('carries every source that a build without a prebuilt addon compiles', () => {
    const folders = ['addon', 'core', 'cpu', 'dist', 'ops'].map((name) => `native/${name}`);
    const sources = run('git', 'ls-files', ...folders).split('\n');
    const needed = [...sources.filter(Boolean), 'CMakeLists.txt', 'binding.gyp'];
    assert.deepEqual(
      needed.filter((file) => !packed.has(file)),
      [],
    );
  });

  // npx makes it executable only when it first links a folder: not after the next build there.
  it('has a command that a build leaves executable', () => {
    assert.equal(statSync(`${root}/dist/cli/main.js`).mode & 0o111, 0o111);
  });

  it('carries its documentation and licence', () => {
    for (const file of ['README.md', 'LICENSE', 'CHANGELOG.md', 'package.json'])
      assert.ok(packed.has(file), file);
  });

  it('carries nothing that only development needs', () => {
    const allowed = /^(dist|lib|native|prebuilds)\/|^[^/]+$/;
    const native = /^native\/(.*\/)?(test|bench)\//;
    assert.deepEqual(
      [...packed].filter((file) => !allowed.test(file) || native.test(file)),
      [],
    );
  });

  it('names a command whose source starts with a Node shebang', () => {
    const { bin } = JSON.parse(readFileSync(`${root}package.json`, 'utf8'));
    const source = bin.duokv.replace(/^dist\//, 'lib/').replace(/\.js$/, '.ts');
    assert.match(readFileSync(root + source, 'utf8'), /^#!\/usr\/bin\/env node\n/);
  });
});
