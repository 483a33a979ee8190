// docs/performance.md from the records in bench/records/.
//
//   npm run bench:report

import { existsSync, readFileSync, writeFileSync } from 'node:fs';

import { gpuSections } from './gpu-report.js';
import type { CampaignRecord } from './record.js';
import { targetsSection } from './report-targets.js';

const page = new URL('../docs/performance.md', import.meta.url);

/** The sections of a record, or none where there is no such record. */
function section<Record>(name: string, write: (record: Record, file: string) => string[]): string[] {
  const file = new URL(`records/${name}`, import.meta.url);
  if (!existsSync(file)) return [];
  const link = `[\`bench/records/${name}\`](../bench/records/${name})`;
  return write(JSON.parse(readFileSync(file, 'utf8')) as Record, link);
}

const sections = [...section<CampaignRecord>('targets.json', targetsSection), ...gpuSections()];

writeFileSync(
  page,
  `# Performance

Written by \`npm run bench:report\` from the records in [\`bench/records/\`](../bench/records); the [guide](guides/benchmarks.md)
says how they are made. Times are medians; every raw time is in its record.

${sections.join('\n')}`,
);
