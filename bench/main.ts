// The 126M campaign: prefill by route, decode and a training step under every precision policy, each in a process of its
// own, beside a PyTorch peer in the same rounds. Writes one JSON record with every raw time.
//
//   npm run bench -- --python PYTHON --peer-script SCRIPT [--rounds 3] [--out bench/records/NAME.json]
//
// The peer prints { ms_median } for `SCRIPT prefill|decode|train --design … --dtype f32|bf16 --n … --route … --reps …`.
// Without --python only duokv is timed. `npx tsx bench/report.ts` turns records into docs/performance.md.

import { spawn } from 'node:child_process';
import { mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { dirname } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

import { describeMachine } from '../lib/cli/version.js';
import type { CampaignRecord, Measure, Result } from './record.js';

const { values: flags } = parseArgs({
  options: {
    python: { type: 'string' },
    'peer-script': { type: 'string' },
    design: { type: 'string', default: 'local-history' },
    rounds: { type: 'string', default: '3' },
    precisions: { type: 'string', default: 'fp32,fp32-tf32x3,bf16-tf32x3,bf16' },
    out: { type: 'string' },
  },
});
if ((flags.python === undefined) !== (flags['peer-script'] === undefined)) {
  console.error('bench: --python and --peer-script go together');
  process.exit(2);
}

const PROMPT = 1792;
const WINDOW = 2048;
const STEPS = 32;
const cli = fileURLToPath(new URL('../dist/cli/main.js', import.meta.url));
const preset = `${flags.design}-126m`;
const { threads } = JSON.parse((await run(process.execPath, [cli, 'doctor', '--json'])).stdout).device as {
  threads: number;
};

/** Runs a command to its end: what it printed, and the largest memory it held (VmHWM, read while it runs). */
async function run(command: string, args: string[]): Promise<{ stdout: string; peakBytes: number }> {
  const child = spawn(command, args, { stdio: ['ignore', 'pipe', 'inherit'] });
  let stdout = '';
  let peakBytes = 0;
  child.stdout.on('data', (chunk: Buffer) => {
    stdout += chunk.toString();
  });
  const watch = setInterval(() => {
    try {
      const status = readFileSync(`/proc/${child.pid}/status`, 'utf8');
      peakBytes = Math.max(peakBytes, Number(/VmHWM:\s+(\d+)/.exec(status)?.[1] ?? 0) * 1024);
    } catch {
      // The process has ended; its last reading stands.
    }
  }, 20);
  const code = await new Promise<number | null>((resolve, reject) => {
    child.on('error', reject);
    child.on('close', resolve);
  });
  clearInterval(watch);
  if (code !== 0) throw new Error(`${command} ${args.join(' ')} ended with ${code}`);
  return { stdout, peakBytes };
}

interface Case extends Omit<Result, 'ms' | 'peakBytes'> {
  time(): Promise<{ ms: number[]; peakBytes: number }>;
}

function ownCase(precision: string, measure: Measure, route: string | null): Case {
  return {
    ...{ engine: 'duokv', precision, measure, route },
    async time() {
      const { stdout, peakBytes } = await run(process.execPath, [
        ...[cli, 'bench', '--json', '--designs', preset, '--measure', measure, '--precision', precision],
        ...['--length', String(PROMPT), '--train-length', String(WINDOW), '--steps', String(STEPS)],
        ...['--rounds', measure === 'train' ? '1' : '2', ...(route === null ? [] : ['--routes', route])],
      ]);
      return { ms: JSON.parse(stdout).results[0].rawMs as number[], peakBytes };
    },
  };
}

function peerCase(dtype: 'f32' | 'bf16', measure: Measure, route: string | null): Case {
  const { python = '', 'peer-script': script = '' } = flags;
  return {
    ...{ engine: 'PyTorch', precision: dtype, measure, route },
    async time() {
      const { stdout, peakBytes } = await run(python, [
        ...[script, measure, '--design', flags.design, '--dtype', dtype],
        ...[
          '--n',
          String(measure === 'train' ? WINDOW : PROMPT),
          '--threads',
          String(threads),
          '--reps',
          '1',
        ],
        ...(route === null ? [] : ['--route', route]),
      ]);
      return { ms: [JSON.parse(stdout).ms_median as number], peakBytes };
    },
  };
}

const cases: Case[] = flags.precisions
  .split(',')
  .flatMap((precision) => [
    ...['exact', 'full', 'uniform'].map((route) => ownCase(precision, 'prefill', route)),
    ownCase(precision, 'decode', null),
    ownCase(precision, 'train', null),
  ]);
if (flags.python !== undefined) {
  for (const dtype of ['f32', 'bf16'] as const) {
    for (const route of ['exact', 'full']) cases.push(peerCase(dtype, 'prefill', route));
    cases.push(peerCase(dtype, 'decode', null), peerCase(dtype, 'train', null));
  }
}

const results: Result[] = cases.map(({ time: _, ...what }) => ({ ...what, ms: [], peakBytes: 0 }));
const rounds = Number(flags.rounds);
const record: CampaignRecord = {
  campaign: '126m',
  command: `npm run bench -- --rounds ${rounds}${flags.python === undefined ? '' : ' --python PYTHON --peer-script SCRIPT'}`,
  date: new Date().toISOString(),
  machine: { ...describeMachine(), threads },
  shape: { design: flags.design, batch: 1, prompt: PROMPT, window: WINDOW, steps: STEPS },
  results,
};

/** The record as it stands: a campaign that is stopped keeps what it has measured. */
function keep(file: string): void {
  mkdirSync(dirname(file), { recursive: true });
  const measured = results.filter(({ ms }) => ms.length > 0);
  writeFileSync(file, `${JSON.stringify({ ...record, results: measured }, null, 2)}\n`);
}

for (let round = 0; round < rounds; round++) {
  // Each round starts elsewhere, so that no case always follows the same one.
  for (let i = 0; i < cases.length; i++) {
    const at = (i + Math.floor((round * cases.length) / rounds)) % cases.length;
    const result = results[at] as Result;
    const { ms, peakBytes } = await (cases[at] as Case).time();
    result.ms.push(...ms);
    result.peakBytes = Math.max(result.peakBytes, peakBytes);
    const label = [result.engine, result.precision, result.measure, result.route].filter(Boolean).join(' ');
    console.error(`round ${round + 1}/${rounds}  ${label}: ${ms.map((x) => x.toFixed(1)).join(', ')} ms`);
    if (flags.out !== undefined) keep(flags.out);
  }
}
if (flags.out === undefined) process.stdout.write(`${JSON.stringify(record, null, 2)}\n`);
