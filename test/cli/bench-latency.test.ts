import assert from 'node:assert/strict';
import { mkdtemp, readFile, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

import {
  type Cell,
  fitBudget,
  type LatencyRecord,
  order,
  summarise,
} from '../../lib/cli/latency-campaign.js';
import { geometricMean, median, pairedRatio } from '../../lib/cli/statistics.js';
import { duokvFails, duokvJson } from './command.js';

describe('statistics of a campaign', () => {
  it('takes the middle value, or the mean of the middle two', () => {
    assert.equal(median([3, 1, 20]), 3);
    assert.equal(median([4, 1, 20, 3]), 3.5);
    assert.ok(Number.isNaN(median([])));
  });

  it('takes geometric means of ratios of one block', () => {
    assert.ok(Math.abs(geometricMean([1, 4, 16]) - 4) < 1e-12);
    // 2, 1/2 and a block without the other: unlike the mean of ratios, order does not matter.
    assert.ok(Math.abs(pairedRatio([2, 1, 7], [1, 2, undefined]) - 1) < 1e-12);
    assert.ok(Math.abs(pairedRatio([3, 12], [1, 1]) - 6) < 1e-12);
  });
});

describe('the latency campaign', () => {
  it('lets every contender go first, and follow every neighbour', () => {
    const orders = Array.from({ length: 6 }, (_, block) => order(3, block));
    assert.deepEqual(
      orders.map((turns) => turns[0]),
      [0, 2, 1, 0, 2, 1],
    );
    for (const turns of orders) assert.deepEqual(turns.toSorted(), [0, 1, 2]);
    const pairs = new Set(orders.flatMap((turns) => turns.slice(1).map((turn, i) => `${turns[i]}>${turn}`)));
    assert.equal(pairs.size, 6);
  });

  it('fits a budget by fewer blocks, then without the slowest shapes', () => {
    const cells: Cell[] = [1, 2, 4].map((batch) => ({ batch, prompt: 8, steps: [1] }));
    const blockMs = ({ batch }: Cell) => batch * 10;
    assert.deepEqual(fitBudget(cells, 3, 1, 280, blockMs), { cells, blocks: 3, ms: 280 });
    assert.deepEqual(fitBudget(cells, 3, 1, 279, blockMs), { cells, blocks: 2, ms: 210 });
    assert.deepEqual(fitBudget(cells, 3, 1, 139, blockMs), { cells: cells.slice(0, 2), blocks: 1, ms: 60 });
  });

  it('reads shorter requests off the longest, and pairs ratios within blocks', () => {
    const contenders = (['exact', 'full'] as const).map((route) => ({
      ...{ preset: 'a', route, precision: 'fp32' as const },
    }));
    const run = (block: number, exact: number[], full: number[]) => ({
      ...{ cell: 0, seed: 0, block },
      timings: [
        { contender: 1, ms: full },
        { contender: 0, ms: exact },
      ],
    });
    const cells = [{ batch: 2, prompt: 16, steps: [1, 2] }];
    const runs = [run(0, [10, 12, 15], [20, 24, 30]), run(1, [10, 16, 25], [40, 64, 100])];
    const rows = summarise({ cells, contenders, runs } as unknown as LatencyRecord);
    assert.deepEqual(
      rows.map(({ steps, route, prefillMs, requestMs, stepMs }) => [
        steps,
        route,
        prefillMs,
        requestMs,
        stepMs,
      ]),
      [
        [1, 'exact', 10, 14, 4],
        [1, 'full', 30, 44, 14],
        [2, 'exact', 10, 20, 5],
        [2, 'full', 30, 65, 17.5],
      ],
    );
    assert.equal(rows[0]?.ratio, 1);
    assert.ok(Math.abs((rows[3]?.ratio as number) - Math.sqrt(8)) < 1e-12);
  });

  describe('duokv bench latency', () => {
    let directory: string;
    beforeEach(async () => {
      directory = await mkdtemp(join(tmpdir(), 'duokv-latency-'));
    });
    afterEach(() => rm(directory, { recursive: true }));

    const args = [
      'bench',
      'latency',
      '--designs',
      'local-history-tiny,gqa2-tiny',
      '--cells',
      '1x16x1/3,2x8x2',
    ];

    it('keeps every time and goes on where a record ends', async () => {
      const file = join(directory, 'latency.json');
      const first = await duokvJson<LatencyRecord & { summary: { ratio: number }[] }>([
        ...args,
        ...['--blocks', '2', '--seeds', '2', '--out', file],
      ]);
      assert.deepEqual(
        first.contenders.map(({ preset, route }) => [preset, route]),
        [
          ['local-history-tiny', 'exact'],
          ['local-history-tiny', 'full'],
          ['gqa2-tiny', 'exact'],
          ['gqa2-tiny', 'full'],
        ],
      );
      assert.equal(first.runs.length, 2 * 2 * 2);
      for (const { cell, timings } of first.runs) {
        assert.equal(timings.length, 4);
        for (const { ms } of timings) {
          assert.equal(ms.length, cell === 0 ? 4 : 3);
          assert.ok(ms.every((value, i) => value > (ms[i - 1] ?? 0)));
        }
      }
      assert.equal(first.loading.length, 4);
      assert.equal(first.summary.length, 3 * 4);

      const record = JSON.parse(await readFile(file, 'utf8')) as LatencyRecord;
      assert.deepEqual(record.runs, first.runs);
      const kept = record.runs.slice(0, 5);
      await writeFile(file, JSON.stringify({ ...record, runs: kept }));
      const resumed = await duokvJson<LatencyRecord>(['bench', 'latency', '--resume', file]);
      assert.deepEqual(resumed.runs.slice(0, 5), kept);
      assert.equal(resumed.runs.length, 8);
    });

    it('refuses what it cannot run', async () => {
      await duokvFails([...args, '--cells', '1x16'], 2, /--cells 1x16 is not BATCHxPROMPTxSTEPS/);
      await duokvFails(
        [...args, '--routes', 'fast'],
        2,
        /option '--routes <routes>'.* fast is none of exact, full, uniform/,
      );
      await duokvFails([...args, '--routes', 'uniform'], 2, /--routes uniform: gqa2-tiny has no global bank/);
      await duokvFails(
        ['bench', 'latency', '--resume', join(directory, 'none')],
        2,
        /there is no such record/,
      );
      const file = join(directory, 'file');
      await writeFile(file, '');
      await duokvFails([...args, '--out', directory], 2, /--out .*: it is not a regular file/);
      await duokvFails([...args, '--out', join(file, 'latency.json')], 2, /--out .*: (ENOTDIR|EEXIST): /);
    });

    it('refuses a record that is broken, or not its own, before anything runs', async () => {
      const file = join(directory, 'broken.json');
      const refuses = async (text: string, message: RegExp, ...more: string[]) => {
        await writeFile(file, text);
        await duokvFails(['bench', 'latency', '--resume', file, ...more], 2, message);
        assert.equal(await readFile(file, 'utf8'), text);
      };
      const record = {
        ...{ campaign: 'latency', seeds: 1, blocks: 1, warmups: 1, loading: [], setUps: [], graphs: [] },
        cells: [{ batch: 1, prompt: 4, steps: [1] }],
        contenders: [{ preset: 'gqa2-tiny', route: 'full', precision: 'fp32' }],
        runs: [{ cell: 0, seed: 0, block: 0, timings: [{ contender: 0, ms: [1, 2] }] }],
      };
      const [run] = record.runs;
      await refuses('', /--resume .*broken\.json: Unexpected end of JSON input/);
      for (const other of ['null', '{}', '{"campaign":"targets"}']) {
        await refuses(other, /broken\.json: it is no record of `duokv bench latency`/);
      }
      for (const [change, message] of [
        [{ blocks: -1 }, /blocks is -1; it must be an integer of at least 1/],
        [{ seeds: 0 }, /seeds is 0; it must be an integer of at least 1/],
        [{ cells: 'no' }, /cells is "no"; it must be a list/],
        [{ cells: [{ batch: -3, prompt: 4, steps: [1] }] }, /cells\[0\]\.batch is -3/],
        [{ runs: [{ ...run, cell: 77 }] }, /runs\[0\]\.cell is 77; it must be an integer between 0 and 0/],
        [{ runs: [{ ...run, timings: [] }] }, /runs\[0\]\.timings must have one for each of 1 contenders/],
        [{ runs: [{ ...run, timings: [{ contender: 99, ms: [1, 2] }] }] }, /\.contender is 99/],
        [{ runs: [{ ...run, timings: [{ contender: 0, ms: ['a', 2] }] }] }, /\.ms must have 2 numbers/],
      ] as const) {
        await refuses(JSON.stringify({ ...record, ...change }), message);
      }
      await refuses(JSON.stringify(record), /--blocks and --resume exclude each other/, '--blocks', '2');
    });
  });
});
