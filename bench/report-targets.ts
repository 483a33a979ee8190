// The targets campaign's part of docs/performance.md.

import { median } from '../lib/cli/statistics.js';
import { machineLine, table } from './markdown.js';
import type { CampaignRecord, Result } from './record.js';
import { ceilings, targetRows, time } from './targets.js';

const gibibytes = (bytes: number) => `${(bytes / 2 ** 30).toFixed(2)} GiB`;
const number = (value: number) => value.toLocaleString('en');

function what({ measure, design, route, batch, length }: Result): string {
  const shape = `${batch} x ${number(length)}`;
  const by = route === null || measure === 'request' ? '' : `, \`${route}\``;
  const name = {
    prefill: 'prefill',
    decode: 'decode step at',
    request: 'request after',
    train: 'training step',
  };
  return `${name[measure]} ${shape}${by}, \`${design}\``;
}

/** The section of one record, made on a CPU with `isa`. */
export function targetsSection(record: CampaignRecord, link: string, isa: string): string[] {
  const peak = ceilings(record);
  const timed = record.results.map((result) => {
    const ms = result.ms.length > 0 ? time(median(result.ms)) : `> ${time(result.atLeastMs ?? 0)}, stopped`;
    return [what(result), result.engine, `\`${result.precision}\``, ms, gibibytes(result.peakBytes)];
  });
  return [
    `## 126M on a CPU with ${isa}: targets`,
    '',
    `Record ${link}, ${record.date.slice(0, 10)}: ${machineLine(record.machine)}. Made by`,
    '',
    '```',
    record.command,
    '```',
    '',
    `Ceilings, measured between the jobs: ${(peak.flops / 1e9).toFixed(0)} GFLOP/s of FP32 multiply-adds from registers ` +
      `(the best; BF16 instructions, where the processor has them, do twice that), ` +
      `${(peak.bytes / 1e9).toFixed(1)} GB/s of reading memory (the median; it changes with where the host runs the ` +
      'processors, so that a decode step is held against samples taken close to it). The PyTorch peer is the ' +
      'same decoder as a user would write it (SDPA, static cache, fused AdamW), float32 or bfloat16 autocast; llama.cpp runs ' +
      'the `independent` shape. A peer that did not end within its limit gives a lower bound.',
    '',
    ...table(
      ['what', 'target', 'measured', '', 'how close to the machine'],
      targetRows(record).map(({ name, target, measured, verdict, note }) => [
        name,
        target,
        measured,
        verdict,
        note,
      ]),
    ),
    `### All times with ${isa}`,
    '',
    ...table(['what', 'by', 'precision', 'median', 'peak memory of the process'], timed),
  ];
}
