import assert from 'node:assert/strict';
import type { ChildProcess } from 'node:child_process';
import { cp, mkdir, mkdtemp, readdir, readFile, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';

import { SafetensorsFile } from '../../lib/safetensors.js';
import { duokv, duokvFails, duokvJson, start, writeDocuments } from './command.js';

interface TrainResult {
  out: string;
  checkpoint: string;
  update: number;
  updates: number;
  interrupted: boolean;
  loss: number | null;
  heldOut: { update: number; nll: number; targets: number; perplexity: number } | null;
  data: { documents: number; heldOutDocuments: number; tokens: number; windows: number; orderHash: string };
}

const lines = async (path: string): Promise<Record<string, unknown>[]> =>
  (await readFile(path, 'utf8'))
    .trimEnd()
    .split('\n')
    .map((line) => JSON.parse(line) as Record<string, unknown>);

/** Metrics without what differs from run to run. */
const trajectory = async (run: string) =>
  (await lines(join(run, 'metrics.jsonl'))).map(({ seconds: _, tokensPerSecond: __, ...record }) => record);

async function tensors(path: string): Promise<Map<string, Buffer>> {
  await using file = await SafetensorsFile.open(path);
  const all = new Map<string, Buffer>();
  for (const name of file.tensors.keys()) all.set(name, Buffer.from((await file.readFloat32(name)).buffer));
  return all;
}

async function assertSameCheckpoint(a: string, b: string): Promise<void> {
  for (const file of ['model.safetensors', 'trainer.safetensors']) {
    assert.deepEqual(await tensors(join(a, file)), await tensors(join(b, file)), file);
  }
}

/** Waits until a run has made `updates` updates, or its process has ended. */
async function waitForUpdates(run: string, updates: number, child: ChildProcess): Promise<void> {
  const path = join(run, 'metrics.jsonl');
  while (child.exitCode === null) {
    const text = await readFile(path, 'utf8').catch(() => '');
    if (text.split('\n').length > updates) return;
    await sleep(5);
  }
}

describe('duokv train', () => {
  let directory: string;
  let text: string;
  /** A run without interruption, for the tests that compare with it: 40 updates of 2 windows. */
  let reference: string;
  let result: TrainResult;

  const recipe = () => [
    ...[
      'train',
      text,
      '--preset',
      'local-history-tiny',
      '--context',
      '48',
      '--batch',
      '2',
      '--microbatch',
      '1',
    ],
    ...['--updates', '40', '--epochs', '3', '--lr', '3e-3', '--seed', '5'],
    ...['--held-out', '0.2', '--eval-every', '20', '--save-every', '7'],
  ];

  before(async () => {
    directory = await mkdtemp(join(tmpdir(), 'duokv-train-'));
    text = await writeDocuments(directory);
    reference = join(directory, 'reference');
    result = await duokvJson<TrainResult>([...recipe(), '--out', reference]);
  });
  after(() => rm(directory, { recursive: true }));

  it('learns, and leaves a checkpoint, its settings and its metrics', async () => {
    assert.deepEqual([result.update, result.updates, result.interrupted], [40, 40, false]);
    assert.equal(result.data.documents + result.data.heldOutDocuments, 12);
    const files = await readdir(join(reference, 'checkpoint'));
    for (const file of ['config.json', 'model.safetensors', 'trainer.json', 'tokenizer.json']) {
      assert.ok(files.includes(file), file);
    }
    const settings = JSON.parse(await readFile(join(reference, 'run.json'), 'utf8')) as Record<
      string,
      unknown
    >;
    assert.deepEqual([settings['seed'], settings['updates'], settings['warmup']], [5, 40, 4]);
    assert.match((settings['data'] as { orderHash: string }).orderHash, /^[0-9a-f]{64}$/);
    const metrics = await lines(join(reference, 'metrics.jsonl'));
    const updates = metrics.filter(({ loss }) => loss !== undefined);
    assert.deepEqual(
      updates.map(({ update }) => update),
      Array.from({ length: 40 }, (_, i) => i + 1),
    );
    const losses = updates.map(({ loss }) => loss as number);
    // An untrained model spreads its guess over 258 ids.
    assert.ok(Math.abs((losses[0] as number) - Math.log(258)) < 0.3, `first loss ${losses[0]}`);
    assert.ok((losses.at(-1) as number) < 3.2, `last loss ${losses.at(-1)}`);
    const evaluations = metrics.filter(({ heldOut }) => heldOut !== undefined);
    assert.deepEqual(
      evaluations.map(({ update }) => update),
      [20, 40],
    );
    assert.deepEqual(evaluations[1]?.['heldOut'], result.heldOut);
  });

  it('is bitwise the same after Ctrl-C and --resume', async () => {
    const run = join(directory, 'interrupted');
    const { child, outcome } = start([...recipe(), '--out', run, '--json']);
    await waitForUpdates(run, 3, child);
    child.kill('SIGINT');
    const { code, stdout, stderr } = await outcome;
    assert.equal(stderr, '');
    assert.equal(code, 130);
    const stopped = JSON.parse(stdout) as TrainResult;
    assert.ok(stopped.interrupted && stopped.update >= 3 && stopped.update < 40, stdout);
    const resumed = await duokvJson<TrainResult>(['train', '--resume', run]);
    assert.deepEqual([resumed.update, resumed.interrupted], [40, false]);
    assert.equal(resumed.loss, result.loss);
    assert.deepEqual(resumed.heldOut, result.heldOut);
    await assertSameCheckpoint(join(run, 'checkpoint'), join(reference, 'checkpoint'));
    assert.deepEqual(await trajectory(run), await trajectory(reference));
  });

  it('is bitwise the same after being killed at any moment', async () => {
    const run = join(directory, 'killed');
    const { child, outcome } = start([...recipe(), '--out', run]);
    await waitForUpdates(run, 10, child);
    child.kill('SIGKILL');
    assert.equal((await outcome).signal, 'SIGKILL');
    const resumed = await duokvJson<TrainResult>(['train', '--resume', run]);
    assert.equal(resumed.update, 40);
    await assertSameCheckpoint(join(run, 'checkpoint'), join(reference, 'checkpoint'));
    assert.deepEqual(await trajectory(run), await trajectory(reference));
  });

  it('is bitwise the same with --recompute, which a resumed run keeps', async () => {
    const run = join(directory, 'recomputed');
    const { child, outcome } = start([...recipe(), '--recompute', '--out', run]);
    await waitForUpdates(run, 8, child);
    child.kill('SIGINT');
    assert.equal((await outcome).code, 130);
    await duokvJson<TrainResult>(['train', '--resume', run]);
    const { options } = JSON.parse(await readFile(join(run, 'checkpoint', 'trainer.json'), 'utf8')) as {
      options: { recompute: boolean };
    };
    assert.equal(options.recompute, true);
    await assertSameCheckpoint(join(run, 'checkpoint'), join(reference, 'checkpoint'));
    assert.deepEqual(await trajectory(run), await trajectory(reference));
  });

  it('exits with 143 on SIGTERM, and a finished run resumes to nothing', async () => {
    const run = join(directory, 'terminated');
    const { child, outcome } = start([...recipe(), '--out', run]);
    await waitForUpdates(run, 1, child);
    child.kill('SIGTERM');
    const { code, stdout } = await outcome;
    assert.equal(code, 143);
    assert.match(stdout, new RegExp(`Continue with: duokv train --resume ${run}`));
    const again = await duokvJson<TrainResult>(['train', '--resume', reference]);
    assert.deepEqual([again.update, again.interrupted, again.loss], [40, false, null]);
  });

  it('takes JSONL and a tokenizer.json', async () => {
    const records = Array.from({ length: 6 }, (_, i) => ({
      id: `d${i}`,
      text: 'one two three four five '.repeat(9 + i),
    }));
    const path = join(directory, 'text.jsonl');
    await writeFile(path, records.map((record) => `${JSON.stringify(record)}\n`).join(''));
    // A vocabulary of words: its training is another program's business.
    const words = ['<s>', '</s>', '<unk>', 'one', 'two', 'three', 'four', 'five'];
    const tokenizer = {
      version: '1.0',
      added_tokens: [],
      pre_tokenizer: { type: 'WhitespaceSplit' },
      model: {
        type: 'WordLevel',
        unk_token: '<unk>',
        vocab: Object.fromEntries(words.map((word, id) => [word, id])),
      },
    };
    const tokenizerPath = join(directory, 'tokenizer.json');
    await writeFile(tokenizerPath, JSON.stringify(tokenizer));
    const run = join(directory, 'words');
    const trained = await duokvJson<TrainResult>([
      ...['train', path, '--tokenizer', tokenizerPath, '--preset', 'gqa2-tiny', '--out', run],
      ...['--context', '16', '--batch', '2', '--epochs', '2', '--held-out', '0', '--lr', '3e-3'],
    ]);
    assert.deepEqual([trained.data.documents, trained.data.heldOutDocuments, trained.heldOut], [6, 0, null]);
    const config = JSON.parse(await readFile(join(run, 'checkpoint', 'config.json'), 'utf8')) as {
      vocab_size: number;
    };
    assert.equal(config.vocab_size, words.length);
    const stored = await readFile(join(run, 'checkpoint', 'tokenizer.json'), 'utf8');
    assert.deepEqual(JSON.parse(stored), tokenizer);
  });

  it('refuses what cannot work, and starts nothing', async () => {
    const out = join(directory, 'refused');
    const preset = ['--preset', 'local-history-tiny'];
    await duokvFails(['train', text, ...preset], 2, /no --out folder/);
    await duokvFails(['train', '--out', out, ...preset], 2, /no text/);
    await duokvFails(['train', text, '--out', out], 2, /either --preset or --config/);
    await duokvFails(['train', text, '--out', out, ...preset, '--bos', '<s>'], 2, /--bos .*--tokenizer/);
    await duokvFails(['train', '--resume', reference, '--lr', '1'], 2, /--lr is part of the run/);
    await duokvFails(['train', '--resume', reference, '--recompute'], 2, /--recompute is part of the run/);
    await duokvFails(
      ['train', text, '--out', out, ...preset, '--batch', '2', '--microbatch', '3'],
      2,
      /--microbatch 3/,
    );
    await duokvFails(
      ['train', text, ...preset, '--out', reference],
      1,
      /ERR_ARGUMENT: .*already holds a training run/,
    );
    const file = join(text, 'file');
    await writeFile(file, '');
    for (const path of [file, join(file, 'run')]) {
      await duokvFails(['train', text, ...preset, '--out', path], 1, /ERR_ARGUMENT: --out .*is not a folder/);
    }
    await rm(file);
    // Where no folder can be made.
    await duokvFails(['train', text, ...preset, '--out', '/proc/duokv/run'], 1, /mkdir '\/proc\/duokv'/);
    await duokvFails(
      ['train', join(directory, 'absent'), ...preset, '--out', out],
      1,
      /ERR_DATA: .*does not exist/,
    );
    const empty = join(directory, 'empty');
    await mkdir(empty);
    await duokvFails(['train', empty, ...preset, '--out', out], 1, /ERR_DATA: .*no \.txt or \.md file/);
    await duokvFails(
      ['train', text, ...preset, '--out', out, '--updates', '9999', '--context', '64'],
      1,
      /ERR_DATA: --updates 9999: the text gives \d+ updates of 8 windows with --epochs 1; --epochs \d+/,
    );
    await duokvFails(
      ['train', text, ...preset, '--out', out, '--context', '100000'],
      1,
      /ERR_DATA: .*needs 100001/,
    );
    await duokvFails(
      ['train', text, ...preset, '--out', out, '--set', 'vocab=200'],
      1,
      /ERR_CONFIG: vocab is 200.*258/,
    );
    await duokvFails(['train', '--resume', empty], 1, /ERR_CHECKPOINT: .*run\.json/);
    const changed = join(directory, 'changed');
    await cp(text, changed, { recursive: true });
    await writeFile(join(changed, '03.txt'), 'Something else.');
    await duokvFails(['train', changed, '--resume', reference], 1, /ERR_DATA: .*is not the text/);
    assert.ok(!(await readdir(directory)).includes('refused'));
  });

  it('names the key or the line that is damaged in a run, and changes nothing', async () => {
    const run = join(directory, 'damaged');
    await cp(reference, run, { recursive: true });
    const settingsPath = join(run, 'run.json');
    const metricsPath = join(run, 'metrics.jsonl');
    const settings = JSON.parse(await readFile(settingsPath, 'utf8')) as Record<string, unknown>;
    const metrics = await readFile(metricsPath, 'utf8');
    const refuses = (message: RegExp) => duokvFails(['train', '--resume', run], 1, message);
    for (const [json, message] of [
      ['{}', /ERR_DATA: .*run\.json: text is undefined/],
      ['[1]', /ERR_DATA: .*run\.json: must be a JSON object/],
      ['{"text": ', /ERR_DATA: .*run\.json: /],
      [JSON.stringify({ ...settings, batch: '2' }), /ERR_DATA: .*run\.json: batch is "2"/],
      [JSON.stringify({ ...settings, recompute: 'no' }), /ERR_DATA: .*run\.json: recompute is "no"/],
      [JSON.stringify({ ...settings, data: {} }), /ERR_DATA: .*run\.json: data\.streamHash is undefined/],
      [
        JSON.stringify({ ...settings, updates: 30 }),
        /ERR_ARGUMENT: .*damaged: the run has 30 updates in all, its checkpoint is of update 40/,
      ],
    ] as const) {
      await writeFile(settingsPath, json);
      await refuses(message);
    }
    await writeFile(settingsPath, JSON.stringify(settings));
    for (const line of ['garbage', 'null', '{"loss":1}']) {
      await writeFile(metricsPath, metrics.replace('\n', `\n${line}\n`));
      await refuses(/ERR_DATA: .*metrics\.jsonl: line 2 is no(t JSON: | record )/);
    }
    assert.equal(await readFile(metricsPath, 'utf8'), metrics.replace('\n', '\n{"loss":1}\n'));
    await assertSameCheckpoint(join(run, 'checkpoint'), join(reference, 'checkpoint'));
  });

  it('keeps the last good update where the next one is not finite', async () => {
    const run = join(directory, 'diverged');
    const { code, stderr } = await duokv([
      ...['train', text, '--preset', 'local-history-tiny', '--out', run, '--context', '48', '--batch', '2'],
      ...['--lr', '1e30', '--warmup', '0', '--epochs', '3', '--updates', '40'],
    ]);
    assert.equal(code, 1);
    const [, update] = /^duokv: ERR_NOT_FINITE: .*checkpoint is of update (\d+)\n$/.exec(stderr) ?? [];
    assert.ok(update !== undefined && update !== '0', stderr);
    const state = JSON.parse(await readFile(join(run, 'checkpoint', 'trainer.json'), 'utf8')) as {
      update: number;
    };
    assert.equal(state.update, Number(update));
    assert.equal((await lines(join(run, 'metrics.jsonl'))).at(-1)?.['update'], Number(update));
  });

  describe('its checkpoint', () => {
    it('generates: greedily, from stdin, and sampled by seed', async () => {
      interface Generated {
        text: string;
        tokens: number[];
        logprobs: number[];
        stop: string;
        promptTokens: number;
      }
      const args = ['generate', reference, '--max-tokens', '24'];
      const greedy = await duokvJson<Generated>([...args, '--prompt', 'bank ']);
      assert.equal(greedy.promptTokens, 6);
      assert.equal(greedy.stop, greedy.tokens.length === 24 ? 'max-tokens' : 'end-of-document');
      assert.equal(greedy.logprobs.length, greedy.tokens.length);
      assert.ok(greedy.logprobs.every((logprob) => logprob <= 0 && logprob > -10));
      const piped = await duokvJson<Generated>(args, 'bank ');
      assert.deepEqual(piped.tokens, greedy.tokens);
      await duokvFails(
        args,
        1,
        /ERR_DATA: stdin: line 2 is not valid UTF-8/,
        Buffer.from('a\n\xff', 'latin1'),
      );
      await duokvFails([...args, '--prompt', 'a', '--top-k', '5'], 2, /--top-k .*temperature 0/);
      const text = await duokv([...args, '--prompt', 'bank ']);
      assert.deepEqual([text.code, text.stdout, text.stderr], [0, `${greedy.text}\n`, '']);
      const sampled = (seed: string) =>
        duokvJson<Generated>([
          ...args,
          '--prompt',
          'bank ',
          '--temperature',
          '2',
          '--top-k',
          '50',
          '--seed',
          seed,
        ]);
      const [one, same, other] = [await sampled('1'), await sampled('1'), await sampled('2')];
      assert.deepEqual(one.tokens, same.tokens);
      assert.notDeepEqual(one.tokens, other.tokens);
    });

    it('scores documents, each the same alone and among others', async () => {
      interface Scored {
        documents: { id: string; nll: number; targets: number }[];
        totalNll: number;
        totalTargets: number;
        meanNll: number;
      }
      const all = await duokvJson<Scored>(['score', reference, text, '--context', '64', '--batch', '3']);
      assert.equal(all.documents.length, 12);
      const sum = all.documents.reduce((total, { nll }) => total + nll, 0);
      assert.ok(Math.abs(sum - all.totalNll) < 1e-9 * sum);
      const bytes = (await readFile(join(text, '04.txt'))).length;
      const alone = await duokvJson<Scored>([
        'score',
        reference,
        join(text, '04.txt'),
        '--context',
        '64',
        '--batch',
        '1',
      ]);
      // Every byte and the end of the document, each predicted from what is before it.
      assert.equal(alone.totalTargets, bytes + 1);
      assert.deepEqual(alone.documents[0], all.documents[4]);
      assert.ok(alone.meanNll < 3.5, String(alone.meanNll));
      const table = await duokv(['score', reference, text, '--context', '64']);
      assert.match(table.stdout, /^all +[\d,]+ +\d\.\d{4} +\d+\.\d\d$/m);
    });

    it('is inspected as what it is', async () => {
      const { config } = await duokvJson<{ config: { vocab: number } }>([
        'inspect',
        reference,
        '--length',
        '64',
      ]);
      assert.equal(config.vocab, 258);
      const direct = await duokvJson<{ config: unknown }>(['inspect', result.checkpoint]);
      assert.deepEqual(direct.config, config);
    });

    it('is asked for politely where there is none', async () => {
      await duokvFails(
        ['generate', join(directory, 'nowhere'), '--prompt', 'a'],
        1,
        /ERR_CHECKPOINT: .*does not exist/,
      );
      for (const command of [
        ['score', text, text],
        ['inspect', text],
        ['generate', text, '--prompt', 'a'],
      ]) {
        await duokvFails(command, 1, /ERR_CHECKPOINT: .*is no checkpoint, it has no config\.json/);
      }
    });
  });
});
