// Times of the CPU backend's hot operations beside the roofline, by native/bench/operations_bench.cpp.
//
//   npm run bench:operations -- [--only TEXT] [--out bench/records/operations.json]

import { describeMachine } from '../lib/cli/version.js';
import { openRecord, parseFlags } from './flags.js';
import { describeDevice } from './jobs.js';
import { buildProgram, run } from './processes.js';
import type { OperationsRecord, OperationTimes } from './record.js';

const flags = parseFlags({ only: { type: 'string' }, out: { type: 'string' } });
const file = await openRecord(flags.out);

const program = await buildProgram('operations_bench');
const { lines } = await run(program, flags.only === undefined ? [] : [flags.only]);
const record: OperationsRecord = {
  campaign: 'operations',
  command: `npm run bench:operations${flags.only === undefined ? '' : ` -- --only '${flags.only}'`}`,
  date: new Date().toISOString(),
  machine: { ...describeMachine(), ...(await describeDevice()) },
  operations: lines.map((line) => JSON.parse(line) as OperationTimes),
};
const text = JSON.stringify(record, null, 1);
if (file === undefined) process.stdout.write(`${text}\n`);
else await file.keep(text);
