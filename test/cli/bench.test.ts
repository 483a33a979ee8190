import assert from 'node:assert/strict';
import { mkdtemp, readFile, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

import { duokvFails, duokvJson } from './command.js';

interface Result {
  engine: string;
  measure: string;
  design: string;
  route: string | null;
  batch: number;
  medianMs: number;
  minMs: number;
  rawMs: number[];
  readGbytes?: number[];
}
interface Report {
  machine: { cpu: string; duokv: string; node: string };
  device: { threads: number };
  precision: string;
  results: Result[];
}

const SMALL = ['--length', '24', '--train-length', '16', '--steps', '2', '--rounds', '2'];

describe('duokv bench', () => {
  let directory: string;
  beforeEach(async () => {
    directory = await mkdtemp(join(tmpdir(), 'duokv-bench-'));
  });
  afterEach(() => rm(directory, { recursive: true }));

  it('times every measure of every design and keeps the raw times', async () => {
    const report = await duokvJson<Report>(['bench', '--designs', 'local-history-tiny,gqa2-tiny', ...SMALL]);
    assert.equal(report.precision, 'fp32');
    assert.ok(report.machine.cpu !== '' && report.machine.node === process.versions.node);
    assert.deepEqual(
      report.results.map(({ engine, measure, design, route }) => [engine, measure, design, route]),
      ['local-history-tiny', 'gqa2-tiny'].flatMap((design) => [
        ['duokv', 'prefill', design, 'exact'],
        ['duokv', 'prefill', design, 'full'],
        ['duokv', 'decode', design, null],
        ['duokv', 'train', design, null],
      ]),
    );
    for (const { rawMs, medianMs, minMs } of report.results) {
      assert.equal(rawMs.length, 2);
      assert.ok(rawMs.every((ms) => ms > 0));
      assert.equal(minMs, Math.min(...rawMs));
      assert.equal(medianMs, ((rawMs[0] as number) + (rawMs[1] as number)) / 2);
    }
  });

  it('decodes several batches by turns and asks between the turns how fast memory is read', async () => {
    const program = join(directory, 'rate');
    const asked = join(directory, 'asked');
    const says = (text: string) =>
      writeFile(
        program,
        `#!${process.execPath}
         const { appendFileSync } = require('node:fs');
         require('node:readline').createInterface({ input: process.stdin }).on('line', () => {
           appendFileSync(${JSON.stringify(asked)}, '.');
           console.log(${text});
         });`,
        { mode: 0o755 },
      );
    const args = ['bench', '--designs', 'local-history-tiny,gqa2-tiny'];
    args.push('--measure', 'generate,decode,prefill');
    args.push('--routes', 'exact', '--batch', '1,3', ...SMALL, '--steps', '6', '--read-rate', program);
    // 20 and 30 GB/s by turns: two samples in each repetition of 6 steps.
    await says('(globalThis.count = (globalThis.count ?? 0) + 1) % 2 ? 20 : 30');
    const { results } = await duokvJson<Report>(args);
    assert.deepEqual(
      results.map(({ measure, design, batch, rawMs }) => [measure, design, batch, rawMs.length]),
      ['local-history-tiny', 'gqa2-tiny'].flatMap((design) =>
        [1, 3].flatMap((batch) => [
          ['prefill', design, batch, 2],
          ['decode', design, batch, 2],
          ['generate', design, batch, 2],
        ]),
      ),
    );
    for (const { measure, readGbytes } of results)
      assert.deepEqual(readGbytes?.map(Math.round), measure === 'prefill' ? undefined : [24, 24]);
    assert.equal((await readFile(asked, 'utf8')).length, 6);

    await says('"fast"');
    await duokvFails(args, 1, /--read-rate .*rate: "fast" is no rate in GB\/s/);
    await says('process.exit(3)');
    await duokvFails(args, 1, /--read-rate .*rate: it ended with 3/);
    await says('process.kill(process.pid, "SIGKILL")');
    await duokvFails(args, 1, /--read-rate .*rate: it ended with SIGKILL/);
    await duokvFails([...args, '--read-rate', join(directory, 'none')], 1, /--read-rate .*none: .*ENOENT/);
    await duokvFails([...args, '--batch', '1,0'], 2, /--batch <rows>.* Expected a positive integer/);
  });

  it('calls a peer with the same work in the same rounds', async () => {
    const peer = join(directory, 'peer.mjs');
    await writeFile(
      peer,
      `import { appendFileSync } from 'node:fs';
       appendFileSync(${JSON.stringify(join(directory, 'calls'))}, JSON.stringify(process.argv.slice(2)) + '\\n');
       console.log('warming up');
       console.log(JSON.stringify({ ms_median: 12.5, params: Number(process.env.PEER_PARAMETERS) }));`,
    );
    const args = ['bench', '--designs', 'gqa2-tiny', '--measure', 'prefill', '--routes', 'exact', ...SMALL];
    const peers = ['--peers', '--python', process.execPath, '--peer-script', peer, '--threads', '1'];
    const { parameters } = await duokvJson<{ parameters: number }>(['inspect', 'gqa2-tiny']);
    process.env['PEER_PARAMETERS'] = String(parameters);
    const { results } = await duokvJson<Report>([...args, ...peers]);
    assert.deepEqual(
      results.map(({ engine, rawMs }) => [engine, rawMs.length]),
      [
        ['duokv', 2],
        ['peer', 2],
      ],
    );
    assert.equal(results[1]?.medianMs, 12.5);
    process.env['PEER_PARAMETERS'] = '7';
    await duokvFails([...args, ...peers], 1, /ERR_ARGUMENT: .*gqa2 has 7 parameters, gqa2-tiny has \d+/);
    delete process.env['PEER_PARAMETERS'];
    const report = /^duokv: ERR_ARGUMENT: .*peer\.mjs: printed "\{.*", no \{ ms_median, params \}\n$/;
    await duokvFails([...args, ...peers], 1, report);
    for (const [body, why] of [
      ['console.log("done")', /^duokv: ERR_ARGUMENT: .*peer\.mjs: printed "done", no .*\n$/],
      ['console.error("first\\nlast"); process.exit(3)', /^duokv: ERR_ARGUMENT: .*peer\.mjs: last\n$/],
      ['', /^duokv: ERR_ARGUMENT: .*peer\.mjs: printed "", no .*\n$/],
    ] as const) {
      await writeFile(peer, body);
      await duokvFails([...args, ...peers], 1, why);
    }
    await duokvFails([...args, '--peers'], 2, /--peers needs --peer-script/);
    const generate = [...args, ...peers, '--measure', 'decode,generate'];
    await duokvFails(generate, 2, /--peers knows no --measure generate/);
  });
});
