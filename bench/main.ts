// The campaign that fills the table of targets: duokv at 126M, its peers and the machine's ceilings in the same rounds,
// each job in a process of its own. Writes one JSON record with every raw time after each job.
//
//   npm run bench -- --python PYTHON --torch-script SCRIPT --llama-script SCRIPT --gguf-script SCRIPT
//                    [--rounds 1] [--peer-limit SECONDS] [--precisions fp32,bf16] [--only TEXT]
//                    [--out bench/records/targets.json | --resume RECORD]
//
// peers.ts says what the scripts print; without them only duokv is timed. `npm run bench:report` turns records into
// docs/performance.md.

import { existsSync, readFileSync } from 'node:fs';

import { PRECISIONS } from '../lib/arguments.js';
import { describeMachine } from '../lib/cli/version.js';
import type { PrecisionName } from '../lib/native.js';
import { openRecord, parseFlags, refuse } from './flags.js';
import { describeDevice, type Job, MAIN, ownJobs, PLAIN, PROMPT, STEPS, WINDOW } from './jobs.js';
import { llamaJob, type PeerType, prepareLlama, torchJob } from './peers.js';
import { buildProgram, run } from './processes.js';
import { type CampaignRecord, type CeilingSamples, type Result, sameWhat } from './record.js';
import { targetRows } from './targets.js';

const OPTIONS = {
  python: { type: 'string', default: 'python3' },
  'torch-script': { type: 'string' },
  'llama-script': { type: 'string' },
  'gguf-script': { type: 'string' },
  'peer-limit': { type: 'string', default: '150' },
  rounds: { type: 'string', default: '1' },
  precisions: { type: 'string', default: 'fp32,bf16' },
  only: { type: 'string', default: '' },
  out: { type: 'string' },
  resume: { type: 'string' },
} as const;

const flags = parseFlags(OPTIONS);

const rounds = Number(flags.rounds);
const limitSeconds = Number(flags['peer-limit']);
if (!Number.isInteger(rounds) || rounds < 1 || !(limitSeconds > 0)) {
  refuse('--rounds must be a positive integer, --peer-limit a positive number of seconds');
}
if ((flags['llama-script'] === undefined) !== (flags['gguf-script'] === undefined)) {
  refuse('--llama-script and --gguf-script go together');
}
for (const precision of flags.precisions.split(',')) {
  if (!PRECISIONS.includes(precision as PrecisionName)) {
    refuse(`--precisions ${precision} is none of ${PRECISIONS.join(', ')}`);
  }
}

/** The record to go on with. */
function resumedRecord(file: string): CampaignRecord {
  try {
    const record = JSON.parse(readFileSync(file, 'utf8')) as CampaignRecord;
    if (record?.campaign === 'targets') return record;
  } catch (error) {
    refuse(`--resume ${file}: ${(error as Error).message}`);
  }
  return refuse(`--resume ${file}: it is no record of this campaign`);
}
const resumed = flags.resume === undefined ? undefined : resumedRecord(flags.resume);

const controller = new AbortController();
for (const name of ['SIGINT', 'SIGTERM']) process.once(name, () => controller.abort());

const device = await describeDevice();
const ceilingsProgram = await buildProgram('ceilings_bench');
const rateProgram = await buildProgram('read_rate_bench');

async function peerJobs(): Promise<Job[]> {
  const { python, 'torch-script': torch, 'llama-script': llama, 'gguf-script': gguf } = flags;
  const jobs: Job[] = [];
  if (torch !== undefined) {
    const peer = { python, script: torch, threads: device.threads, limitSeconds };
    for (const precision of ['f32', 'bf16'] as PeerType[]) {
      const what = { precision, design: MAIN, route: null, batch: 1, length: PROMPT };
      jobs.push(torchJob(peer, { ...what, measure: 'prefill', route: 'exact' }));
      jobs.push(torchJob(peer, { ...what, measure: 'decode' }));
      jobs.push(torchJob(peer, { ...what, measure: 'train', length: WINDOW }));
    }
  }
  if (llama !== undefined && gguf !== undefined) {
    const peer = { python, script: llama, ggufScript: gguf, limitSeconds };
    const models = await prepareLlama(peer, PLAIN);
    for (const precision of ['f32', 'bf16'] as PeerType[]) {
      jobs.push(llamaJob(peer, models[precision], { precision, design: PLAIN, batch: 1, length: PROMPT }));
    }
  }
  return jobs;
}

const jobs = [
  ...flags.precisions.split(',').flatMap((precision) => ownJobs(precision, rateProgram)),
  ...(await peerJobs()),
].filter(({ name }) => name.includes(flags.only));
if (jobs.length === 0) refuse(`--only ${flags.only}: no job's name has that in it`);

const out = flags.resume ?? flags.out;
const record: CampaignRecord = resumed ?? {
  campaign: 'targets',
  command: `npm run bench -- --rounds ${rounds} --peer-limit ${limitSeconds} --precisions ${flags.precisions}${
    flags['torch-script'] === undefined ? '' : ' --python PYTHON --torch-script SCRIPT'
  }${flags['llama-script'] === undefined ? '' : ' --llama-script SCRIPT --gguf-script SCRIPT'}`,
  date: new Date().toISOString(),
  machine: { ...describeMachine(), ...device },
  steps: STEPS,
  ceilings: { gflops: [], gbytes: [] },
  results: [],
  completed: [],
};

const file = await openRecord(out);

function add(result: Result): void {
  const { ms, peakBytes, readGbytes, atLeastMs, ...what } = result;
  const known = record.results.find((other) => sameWhat(other, what));
  if (known === undefined) {
    record.results.push(result);
    return;
  }
  known.ms.push(...ms);
  known.peakBytes = Math.max(known.peakBytes, peakBytes);
  if (readGbytes !== undefined) known.readGbytes = [...(known.readGbytes ?? []), ...readGbytes];
  if (atLeastMs !== undefined) known.atLeastMs = Math.max(known.atLeastMs ?? 0, atLeastMs);
}

async function sampleCeilings(): Promise<void> {
  const { lines } = await run(ceilingsProgram, ['12'], { signal: controller.signal });
  const { gflops, gbytes } = JSON.parse(lines.join('')) as CeilingSamples;
  record.ceilings.gflops.push(...gflops);
  record.ceilings.gbytes.push(...gbytes);
}

const describe = ({ measure, design, route, batch, length, ms, atLeastMs }: Result) =>
  `${[measure, design, route, `${batch}x${length}`].filter(Boolean).join(' ')} ` +
  (atLeastMs === undefined
    ? `${ms.map((value) => value.toFixed(1)).join(', ')} ms`
    : `stopped: at least ${atLeastMs} ms`);

const total = rounds * jobs.length;
const started = performance.now();
let done = 0;
let spent = 0;
try {
  for (let round = 0; round < rounds; round++) {
    // Each round starts elsewhere, so that no job always follows the same one.
    const first = Math.floor((round * jobs.length) / rounds);
    for (let turn = 0; turn < jobs.length; turn++) {
      const job = jobs[(turn + first) % jobs.length] as Job;
      const key = `${round} ${job.name}`;
      done++;
      if (record.completed.includes(key)) continue;
      const began = performance.now();
      const results = await job.run(controller.signal);
      for (const result of results) add(result);
      await sampleCeilings();
      record.completed.push(key);
      await file?.keep(JSON.stringify(record, null, 1));
      spent++;
      const elapsed = (performance.now() - started) / 1000;
      const left = (elapsed / spent) * (total - done);
      console.error(
        `${done}/${total} ${job.name}, ${((performance.now() - began) / 1000).toFixed(0)} s, about ${Math.ceil(left / 60)} min left`,
      );
      for (const result of results) console.error(`    ${describe(result)}`);
    }
  }
} catch (error) {
  if (!controller.signal.aborted) throw error;
  const goesOn = out !== undefined && existsSync(out);
  console.error(goesOn ? `bench: stopped; go on with --resume ${out}` : 'bench: stopped');
  process.exit(130);
}

for (const { name, target, measured, verdict } of targetRows(record)) {
  console.error(`${name.padEnd(58)} ${target.padEnd(14)} ${measured.padEnd(30)} ${verdict}`);
}
if (out === undefined) process.stdout.write(`${JSON.stringify(record, null, 1)}\n`);
