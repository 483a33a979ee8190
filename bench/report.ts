// docs/performance.md from the records in bench/records/.
//
//   npx tsx bench/report.ts

import { readdirSync, readFileSync, writeFileSync } from 'node:fs';

import { gpuSections } from './gpu-report.js';
import { type CampaignRecord, median, type Result } from './record.js';

const records = new URL('records/', import.meta.url);
const page = new URL('../docs/performance.md', import.meta.url);

const peerPrecision = (precision: string) => (precision.startsWith('bf16') ? 'bf16' : 'f32');

function describe({ measure, route }: Result, { shape }: CampaignRecord): string {
  if (measure === 'prefill') return `prefill of ${shape.prompt.toLocaleString('en')}, \`${route}\``;
  if (measure === 'decode') return `decode step at ${shape.prompt.toLocaleString('en')}`;
  return `training step of 1 x ${shape.window.toLocaleString('en')}`;
}

const milliseconds = (ms: number) => (ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : `${ms.toFixed(1)} ms`);
const gibibytes = (bytes: number) => `${(bytes / 2 ** 30).toFixed(2)} GiB`;

function section(name: string, record: CampaignRecord): string {
  const own = record.results.filter(({ engine }) => engine === 'duokv');
  const rows = own.map((result) => {
    const peer = record.results.find(
      ({ engine, precision, measure, route }) =>
        engine !== 'duokv' &&
        precision === peerPrecision(result.precision) &&
        measure === result.measure &&
        route === result.route,
    );
    const cells = [describe(result, record), `\`${result.precision}\``, milliseconds(median(result.ms))];
    cells.push(peer === undefined ? '–' : milliseconds(median(peer.ms)));
    cells.push(peer === undefined ? '–' : `${(median(peer.ms) / median(result.ms)).toFixed(2)}x`);
    cells.push(gibibytes(result.peakBytes), peer === undefined ? '–' : gibibytes(peer.peakBytes));
    return `| ${cells.join(' | ')} |`;
  });
  const { machine } = record;
  return [
    `## \`${record.shape.design}\` at 126M, batch ${record.shape.batch}`,
    '',
    `Record [\`bench/records/${name}\`](../bench/records/${name}), ${record.date.slice(0, 10)}: ${machine['cpu']}, ` +
      `${machine['threads']} threads, Node ${machine['node']}, commit \`${String(machine['commit']).slice(0, 12)}\`. Made by`,
    '',
    '```',
    record.command,
    '```',
    '',
    '| what | precision | duokv | PyTorch | faster by | peak memory | PyTorch |',
    '| --- | --- | --- | --- | --- | --- | --- |',
    ...rows,
    '',
  ].join('\n');
}

const sections = readdirSync(records)
  .filter((name) => name.endsWith('.json'))
  .sort()
  .map((name) => section(name, JSON.parse(readFileSync(new URL(name, records), 'utf8')) as CampaignRecord));

writeFileSync(
  page,
  `# Performance

Written by \`npx tsx bench/report.ts\` from the records in [\`bench/records/\`](../bench/records). Times are medians; every raw time
is in the record. The peer is the same decoder as a PyTorch user would write it (SDPA, static cache, fused AdamW), at
float32 or under bfloat16 autocast, run in turn with duokv on the same threads. Peak memory is that of the whole process.

${[...sections, ...gpuSections()].join('\n')}`,
);
