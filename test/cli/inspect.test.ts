import assert from 'node:assert/strict';
import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

import { duokv, duokvFails, duokvJson } from './command.js';

interface Report {
  config: Record<string, unknown>;
  parameters: number;
  positions: Record<string, { kvInput: number; queryOutput: number }>;
  cacheBytes: { total: number; documentIds: number; withoutDocumentIds: number };
  suffixes: { layer: number; upper: boolean; queryOutput: number; kvInput: number }[];
  uniformSuffix: number | null;
  flopsPerToken: { forward: number; training: number };
  memory: Record<'training' | 'recomputed' | 'serving', { total: number; parts: Record<string, number> }>;
}

const MiB = (bytes: number) => Number((bytes / 2 ** 20).toFixed(3));

describe('duokv inspect', () => {
  let directory: string;
  beforeEach(async () => {
    directory = await mkdtemp(join(tmpdir(), 'duokv-inspect-'));
  });
  afterEach(() => rm(directory, { recursive: true }));

  // [preset and settings, parameters, MiB at (1, 1792) with ids] of the architecture and execution specifications.
  const PRESETS: [string[], number, number][] = [
    [['local-history-126m'], 126_248_448, 33.514],
    [['local-history-126m', '--set', 'fusion=separate'], 126_248_544, 33.514],
    [['local-history-126m', '--set', 'localSource=paired-input'], 126_248_448, 33.514],
    [['local-history-126m', '--set', 'localSource=shared-kv'], 124_675_584, 32.514],
    [['global-only-126m'], 123_102_720, 31.514],
    [['gqa2-126m'], 126_247_680, 28.014],
    [['gqa4-cla2-126m'], 126_247_680, 28.014],
    [['independent-126m'], 125_854_464, 56.014],
    [['gqa4-126m'], 125_854_464, 56.014],
  ];
  for (const [args, parameters, mebibytes] of PRESETS) {
    it(`counts ${args.join(' ')}`, async () => {
      const report = await duokvJson<Report>(['inspect', ...args]);
      assert.equal(report.parameters, parameters);
      assert.equal(MiB(report.cacheBytes.total), mebibytes);
      assert.equal(
        report.cacheBytes.total - report.cacheBytes.documentIds,
        report.cacheBytes.withoutDocumentIds,
      );
      assert.equal(report.flopsPerToken.training, 3 * report.flopsPerToken.forward);
    });
  }

  it('predicts the memory of training and serving', async () => {
    const args = ['inspect', 'local-history-126m', '--length', '2048', '--backend', 'cpu'];
    const { memory } = await duokvJson<Report>(args);
    const weights = 4 * 126_248_448;
    assert.ok(memory.training.total < 4 * 2 ** 30, 'training at 1 x 2048 takes more than 4 GiB');
    const [kept, recomputed] = [memory.training.parts['workspace']!, memory.recomputed.parts['workspace']!];
    assert.ok(recomputed < 0.4 * kept, `a workspace of ${recomputed} bytes instead of ${kept}`);
    assert.equal(memory.training.total - memory.recomputed.total, kept - recomputed);
    assert.ok(memory.serving.parts['parameters']! >= weights);
    assert.equal(memory.training.parts['gradients'], memory.training.parts['parameters']);
  });

  it('gives the position counts of every route and the suffix of every layer', async () => {
    const report = await duokvJson<Report>(['inspect', 'localHistory126M', '--length', '1792']);
    assert.deepEqual(report.positions, {
      exact: { kvInput: 4580, queryOutput: 3564 },
      full: { kvInput: 8 * 1792, queryOutput: 8 * 1792 },
      uniform: { kvInput: 8136, queryOutput: 8136 },
    });
    assert.equal(report.uniformSuffix, 1017);
    const upper = report.suffixes.filter((row) => row.upper);
    assert.deepEqual(
      upper.map(({ layer, queryOutput, kvInput }) => [layer, queryOutput, kvInput]),
      Array.from({ length: 8 }, (_, j) => [8 + j, 1 + (7 - j) * 127, 1 + (8 - j) * 127]),
    );
    const paired = await duokvJson<Report>([
      'inspect',
      'local-history-126m',
      '--set',
      'localSource=shared-kv',
    ]);
    assert.deepEqual(paired.positions['exact'], { kvInput: 1274, queryOutput: 1532 });
    const baseline = await duokvJson<Report>(['inspect', 'gqa2-126m']);
    assert.deepEqual(Object.keys(baseline.positions), ['exact', 'full']);
  });

  it('draws the plan and the schedule for people', async () => {
    const { code, stdout, stderr } = await duokv([
      'inspect',
      'local-history-126m',
      '--batch',
      '4',
      '--length',
      '512',
    ]);
    assert.equal(code, 0);
    assert.equal(stderr, '');
    assert.match(
      stdout,
      /^ *15 +upper +local\.15 +output of 14 +global \(all\) \+ local\.15 \(last 128\) +joint/m,
    );
    assert.match(stdout, /^Parameters: 126,248,448$/m);
    assert.match(stdout, /^keys and values +46,137,344 +44\.000$/m);
    assert.match(stdout, /^total +46,153,728 +44\.016$/m);
    // 512 positions in 48 cells: the last layer computes 1 position, and projects 128.
    assert.match(stdout, /^ *15 +·{36}▒{11}█ +1 +128$/m);
    assert.match(stdout, /^ *8 +█{48} +512 +512$/m);
  });

  it('reads a config file and takes changes to it', async () => {
    const { config } = await duokvJson<Report>(['inspect', 'current-only-tiny']);
    const path = join(directory, 'config.json');
    await writeFile(path, JSON.stringify(config));
    const again = await duokvJson<Report>(['inspect', path]);
    assert.deepEqual(again.config, config);
    await writeFile(path, `\ufeff${JSON.stringify(config)}`);
    assert.deepEqual((await duokvJson<Report>(['inspect', path])).config, config);
    const changed = await duokvJson<Report>([
      'inspect',
      path,
      '--set',
      'vocab=1000',
      '--set',
      'fusion=separate',
    ]);
    assert.deepEqual(changed.config, { ...config, vocab: 1000, fusion: 'separate' });
  });

  it('names what is wrong', async () => {
    await duokvFails(
      ['inspect', 'local-history'],
      2,
      /"local-history" is no file, no directory and none of the presets local-history-126m, /,
    );
    await duokvFails(['inspect', 'local-history-tiny', '--set', 'windows=3'], 1, /ERR_CONFIG: .*windows/);
    await duokvFails(
      ['inspect', 'local-history-tiny', '--set', 'localSource=shared-kv', '--set', 'upperLayers=3'],
      1,
      /ERR_CONFIG: .*upperLayers/,
    );
    const path = join(directory, 'config.json');
    await writeFile(path, '{"design": ');
    await duokvFails(['inspect', path], 1, /ERR_CONFIG: .*config\.json: /);
    for (const json of ['[1]', '"x"', 'null']) {
      await writeFile(path, json);
      await duokvFails(['inspect', path], 1, /ERR_CONFIG: .*config\.json: must be a JSON object, not /);
    }
    await duokvFails(['inspect', directory], 1, /ERR_CHECKPOINT: /);
  });
});
