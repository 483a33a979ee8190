// The parts of docs/performance.md on requests, the cache and operations.

import { type LatencyRecord, summarise } from '../lib/cli/latency-campaign.js';
import { presetConfig } from '../lib/cli/model-config.js';
import { median } from '../lib/cli/statistics.js';
import { cacheBytes } from '../lib/plan.js';
import { machineLine, table } from './markdown.js';
import { bars, draw, lines } from './plots.js';
import type { OperationsRecord } from './record.js';
import { time } from './targets.js';

export async function latencySection(record: LatencyRecord, link: string): Promise<string[]> {
  const rows = summarise(record);
  const label = ({ preset, route, precision }: (typeof rows)[number]) =>
    `${preset.replace('-126m', '')} ${route} ${precision}`;
  const requests = rows.filter(({ batch, prompt }) => batch === 1 && prompt === 1792);
  const prefills = rows.filter(({ batch, steps }) => batch === 1 && steps === 128);
  const machine = { ...record.machine, threads: record.device['threads'] };
  return [
    '## Requests',
    '',
    `Record ${link}, ${record.date.slice(0, 10)}: ${machineLine(machine)}. Made by`,
    '',
    '```',
    record.command,
    '```',
    '',
    'A request is a prefill and teacher-forced decode steps. The ratio is the geometric mean over blocks of a request over ' +
      'the first line of its shape and precision.',
    '',
    await draw(
      'request-by-steps',
      'Time of a request against its decode steps',
      lines(
        requests.map((row) => ({ x: row.steps, y: row.requestMs, series: label(row) })),
        { x: 'decode steps after 1,792 tokens', y: 'milliseconds' },
      ),
    ),
    '',
    await draw(
      'prefill-by-length',
      'Time of a prefill against its length',
      lines(
        prefills.map((row) => ({ x: row.prompt, y: row.prefillMs, series: label(row) })),
        { x: 'tokens of one row', y: 'milliseconds' },
      ),
    ),
    '',
    ...table(
      ['rows x prompt + steps', 'design', 'route', 'precision', 'prefill', 'step', 'request', 'ratio'],
      rows.map((row) => [
        `${row.batch} x ${row.prompt.toLocaleString('en')} + ${row.steps}`,
        ...[`\`${row.preset}\``, `\`${row.route}\``, `\`${row.precision}\``],
        ...[time(row.prefillMs), time(row.stepMs), time(row.requestMs), row.ratio.toFixed(3)],
      ]),
    ),
  ];
}

/** From the plan alone: no measurement decides it. */
export async function cacheSection(): Promise<string[]> {
  const designs = ['local-history', 'global-only', 'independent', 'gqa2', 'gqa4-cla2'];
  const values = designs.flatMap((series) =>
    [1, 256, 512, 1024, 1792, 2048].map((positions) => {
      const { total } = cacheBytes(presetConfig(`${series}-126m`), { positions });
      return { x: positions, y: total / 2 ** 20, series };
    }),
  );
  const titles = { x: 'positions of one row', y: 'MiB, FP32' };
  return [
    '## Cache',
    '',
    await draw('cache-by-length', 'Bytes of a complete cache', lines(values, titles)),
    '',
  ];
}

/** The section of one record, made on a CPU with `isa`. */
export async function operationsSection(
  record: OperationsRecord,
  link: string,
  isa: string,
): Promise<string[]> {
  const shares = record.operations.map(({ operation, mode, share }) => ({ label: operation, mode, share }));
  return [
    `## Operations with ${isa}`,
    '',
    `Record ${link}, ${record.date.slice(0, 10)}: ${machineLine(record.machine)}. Made by \`${record.command}\`. The share is ` +
      "the roofline's time over the median: FP32 multiply-adds from registers, twice as many in BF16 where the processor has " +
      'instructions for pairs, and reading memory, sampled between the calls. It is over 100 % where a cache held some of it ' +
      'or memory was faster meanwhile.',
    '',
    await draw(
      `roofline-${isa.toLowerCase()}`,
      `Share of the roofline, ${isa}`,
      bars(shares, 'share of the roofline'),
    ),
    '',
    ...table(
      ['operation', 'mode', 'median', 'GFLOP/s', 'GB/s', 'share'],
      record.operations.map(({ operation, mode, ms, gflops, gbytes, share }) => [
        operation,
        mode,
        time(median(ms)),
        gflops > 0 ? gflops.toFixed(1) : '–',
        gbytes > 0 ? gbytes.toFixed(1) : '–',
        `${(100 * share).toFixed(0)} %`,
      ]),
    ),
  ];
}
