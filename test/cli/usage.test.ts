import assert from 'node:assert/strict';
import { spawnSync } from 'node:child_process';
import { closeSync, openSync } from 'node:fs';

import { duokv, duokvFails, duokvJson, MAIN } from './command.js';

const COMMANDS = ['doctor', 'inspect', 'train', 'generate', 'score', 'qualify', 'bench'];

describe('duokv', () => {
  it('lists its commands, and each has help with an example', async () => {
    const { code, stdout } = await duokv(['--help']);
    assert.equal(code, 0);
    const listed = Array.from(stdout.matchAll(/^ {2}([a-z]+) .*/gm), ([, name]) => name).filter(
      (name) => name !== 'help',
    );
    assert.deepEqual(listed, COMMANDS);
    for (const command of COMMANDS) {
      const help = await duokv([command, '--help']);
      assert.equal(help.code, 0);
      assert.match(help.stdout, new RegExp(`Examples?:\\n {2}\\$ duokv ${command} `));
      assert.match(help.stdout, /--json/);
    }
  });

  it('exits with 2 for a usage error, in one line that names it', async () => {
    await duokvFails(['trian'], 2, /unknown command 'trian'/);
    await duokvFails(['doctor', '--fast'], 2, /unknown option '--fast'/);
    await duokvFails(['inspect'], 2, /missing required argument 'model'/);
    await duokvFails(
      ['inspect', 'local-history-tiny', '--length', '1.5'],
      2,
      /'1\.5' is invalid.*positive integer/,
    );
    await duokvFails(['inspect', 'local-history-tiny', '--set', 'window'], 2, /KEY=VALUE/);
    await duokvFails(
      ['bench', '--measure', 'serve'],
      2,
      /option '--measure <kinds>'.* serve is none of prefill, decode, generate, request, train/,
    );
    await duokvFails(
      ['bench', '--routes', 'exact,fast'],
      2,
      /option '--routes <routes>'.* fast is none of exact, full, uniform/,
    );
    await duokvFails(
      ['bench', '--designs', 'gqa2-tiny', '--routes', 'uniform'],
      2,
      /--routes uniform: gqa2-tiny has no global bank/,
    );
    await duokvFails(['bench', '--designs', 'nope'], 2, /preset "nope" is none of local-history-126m, /);
    await duokvFails(
      ['bench', '--measure', 'train', '--read-rate', 'cat'],
      2,
      /--read-rate needs --measure decode or generate/,
    );
    await duokvFails(['score', 'a', 'b', '--precision', 'fp8'], 2, /'fp8' is invalid.*fp32, fp32-tf32x3/);
    const { code } = await duokv([]);
    assert.equal(code, 2);
  });

  it('says in one line that stdout cannot be written', async () => {
    const full = openSync('/dev/full', 'w');
    const child = spawnSync(process.execPath, [MAIN, 'inspect', 'local-history-tiny'], {
      encoding: 'utf8',
      stdio: ['ignore', full, 'pipe'],
    });
    closeSync(full);
    assert.match(child.stderr, /^duokv: stdout: ENOSPC: .*\n$/);
    assert.equal(child.status, 1);
  });

  it('doctor describes the machine and the backend', async () => {
    const report = await duokvJson<{
      ok: boolean;
      machine: {
        cpu: string;
        features: string[];
        usableCores: number;
        memory: number;
        node: string;
        duokv: string;
        mpirun: { path: string | null; version: string | null };
      };
      device: {
        backend: string;
        isa: string;
        threads: number;
        memory: { total: number };
        libraries: string[];
      };
    }>(['doctor', '--backend', 'cpu', '--threads', '1']);
    assert.equal(report.ok, true);
    assert.equal(report.machine.node, process.versions.node);
    assert.ok(report.machine.usableCores >= 1 && report.machine.memory > 0);
    assert.deepEqual([report.device.backend, report.device.threads], ['cpu', 1]);
    assert.ok(report.device.memory.total > 0 && report.device.libraries.length > 0);
    const { path, version } = report.machine.mpirun;
    assert.equal(path !== null, version !== null);
    const text = await duokv(['doctor']);
    assert.equal(text.code, 0);
    assert.match(text.stdout, /^backend +cpu: /m);
    const [, mpirun] = /^mpirun +(.*)$/m.exec(text.stdout) ?? [];
    assert.equal(mpirun, path === null ? 'not found on the path' : `${path} (${version})`);
  });

  it('doctor fails where the backend cannot be opened', async () => {
    const { code, stdout, stderr } = await duokv(['doctor', '--backend', 'cuda:99', '--json']);
    assert.equal(code, 1);
    assert.equal(stderr, '');
    const report = JSON.parse(stdout) as { ok: boolean; error: { code: string } };
    assert.deepEqual([report.ok, report.error.code], [false, 'ERR_DEVICE_UNAVAILABLE']);
    const text = await duokv(['doctor', '--backend', 'cuda:99']);
    assert.equal(text.code, 1);
    assert.match(text.stderr, /^duokv: ERR_DEVICE_UNAVAILABLE: .+\n$/);
  });
});
