import assert from 'node:assert/strict';
import { cp, mkdtemp, readFile, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';

import { duokv, duokvFails, duokvJson } from './command.js';

const GOLDEN = fileURLToPath(new URL('../fixtures/golden/', import.meta.url));

interface Report {
  passed: boolean;
  worst: number;
  cases: {
    name: string;
    passed: boolean;
    worst: number;
    quantities: { quantity: string; worst: number; tolerance: string; passed: boolean }[];
  }[];
}

describe('duokv qualify', () => {
  let directory: string;
  beforeEach(async () => {
    directory = await mkdtemp(join(tmpdir(), 'duokv-qualify-'));
    await cp(join(GOLDEN, 'gqa2'), join(directory, 'gqa2'), { recursive: true });
    await cp(join(GOLDEN, 'independent'), join(directory, 'independent'), { recursive: true });
  });
  afterEach(() => rm(directory, { recursive: true }));

  it('reports every quantity of every case as a share of its tolerance', async () => {
    const folders = [join(directory, 'gqa2'), join(directory, 'independent')];
    const named = await duokvJson<Report>(['qualify', '--golden', ...folders]);
    const report = await duokvJson<Report>(['qualify', '--golden', directory]);
    assert.deepEqual(
      named.cases.map(({ name, worst }) => [name, worst]),
      report.cases.map(({ name, worst }) => [name, worst]),
    );
    assert.equal(report.passed, true);
    assert.deepEqual(
      report.cases.map(({ name, passed }) => [name, passed]),
      [
        ['gqa2', true],
        ['independent', true],
      ],
    );
    for (const { quantities, worst } of report.cases) {
      assert.equal(worst, Math.max(...quantities.map((quantity) => quantity.worst)));
      assert.ok(worst > 0 && worst <= report.worst && report.worst <= 1);
      const names = quantities.map(({ quantity }) => quantity);
      for (const name of ['logits', 'gradients', 'decode logits']) assert.ok(names.includes(name), name);
    }
  });

  it('fails where a value is out of tolerance, and shows where', async () => {
    const path = join(directory, 'gqa2', 'expected.json');
    const facts = JSON.parse(await readFile(path, 'utf8')) as { loss: number };
    await writeFile(path, JSON.stringify({ ...facts, loss: facts.loss + 1e-5 }));
    const { code, stdout, stderr } = await duokv(['qualify', '--golden', directory]);
    assert.equal(code, 1);
    assert.equal(stderr, '');
    assert.match(stdout, /^gqa2 .* FAILED$/m);
    assert.match(stdout, /^independent .* ok$/m);
    assert.match(stdout, new RegExp(`^gqa2 +loss +[12]\\.\\d{3} +.*expected ${facts.loss + 1e-5}`, 'm'));
    assert.match(stdout, /1 of 2 cases within tolerance/);
    const json = await duokv(['qualify', '--golden', join(directory, 'gqa2'), '--json']);
    assert.equal(json.code, 1);
    assert.equal((JSON.parse(json.stdout) as Report).passed, false);
  });

  it('says what it needs', async () => {
    await duokvFails(['qualify'], 2, /required option '--golden <folders...>'/);
    await duokvFails(['qualify', '--golden', join(directory, 'none')], 1, /ERR_ARGUMENT: .*no golden case/);
  });
});
