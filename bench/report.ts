// docs/performance.md and docs/plots/ from the records in bench/records/.
//
//   npm run bench:report

import { existsSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs';

import type { LatencyRecord } from '../lib/cli/latency-campaign.js';
import { parseFlags } from './flags.js';
import { gpuSections } from './gpu-report.js';
import { plotFolder } from './plots.js';
import type { CampaignRecord, OperationsRecord } from './record.js';
import { cacheSection, latencySection, operationsSection } from './report-latency.js';
import { targetsSection } from './report-targets.js';

parseFlags({});

const page = new URL('../docs/performance.md', import.meta.url);

/** What `write` makes of a record, or nothing where there is no such record. */
async function section<Record>(
  name: string,
  write: (record: Record, link: string) => string[] | Promise<string[]>,
): Promise<string[]> {
  const file = new URL(`records/${name}`, import.meta.url);
  if (!existsSync(file)) return [];
  const link = `[\`bench/records/${name}\`](../bench/records/${name})`;
  return write(JSON.parse(readFileSync(file, 'utf8')) as Record, link);
}

mkdirSync(plotFolder, { recursive: true });
const sections = [
  ...(await section<CampaignRecord>('targets.json', (record, link) =>
    targetsSection(record, link, 'AVX-512'),
  )),
  ...(await section<CampaignRecord>('targets-avx2.json', (record, link) =>
    targetsSection(record, link, 'AVX2'),
  )),
  ...(await section<LatencyRecord>('latency.json', latencySection)),
  ...(await cacheSection()),
  ...(await section<OperationsRecord>('operations.json', (record, link) =>
    operationsSection(record, link, 'AVX-512'),
  )),
  ...(await section<OperationsRecord>('operations-avx2.json', (record, link) =>
    operationsSection(record, link, 'AVX2'),
  )),
  ...gpuSections(),
];

writeFileSync(
  page,
  `# Performance

Written by \`npm run bench:report\` from the records in [\`bench/records/\`](../bench/records); the [guide](guides/benchmarks.md)
says how they are made. Times are medians; every raw time is in its record.

${sections.join('\n')}`,
);
