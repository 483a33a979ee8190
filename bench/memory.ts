// Predicted memory beside the resident memory of processes that do what was predicted: one process each, so that a
// process's high-water mark belongs to one program.
//
// Usage: npx tsx bench/memory.ts [--out bench/records/memory.json]
import { readFile } from 'node:fs/promises';
import { fileURLToPath } from 'node:url';

import { syntheticTokens } from '../lib/cli/synthetic-tokens.js';
import { describeMachine } from '../lib/cli/version.js';
import { type MemoryProgram, Model, openDevice, predictMemory, presets } from '../lib/index.js';
import { openRecord, parseFlags } from './flags.js';
import { run } from './processes.js';

const CONFIG = presets.localHistory126M();
const PROGRAMS: Readonly<Record<string, MemoryProgram>> = {
  'training 1 x 2048': { training: { rows: 1, length: 2048 } },
  'training 1 x 2048, recomputed': { training: { rows: 1, length: 2048, recompute: true } },
  'serving 1 x 1792 + 8': { serving: { batch: 1, capacity: 1800, prompt: 1792 } },
  'serving 1 x 1792 + 8, bf16': {
    serving: { batch: 1, capacity: 1800, prompt: 1792, precision: 'bf16' },
  },
};

/** Bytes of this process: the most that was resident, and what is now. */
async function resident(field: 'VmHWM' | 'VmRSS'): Promise<number> {
  const status = await readFile('/proc/self/status', 'utf8');
  const [, kibibytes] = new RegExp(`^${field}:\\s+(\\d+) kB`, 'm').exec(status) as unknown as [
    string,
    string,
  ];
  return Number(kibibytes) * 1024;
}

const tokens = (count: number) => syntheticTokens(count, CONFIG.vocab);

/** Does a program on a fresh device; gives the bytes predicted and those that the process grew by. */
async function measure(program: MemoryProgram) {
  await using device = await openDevice({ backend: 'cpu' });
  const { total: predicted, parts } = await predictMemory(device, CONFIG, program);
  const before = await resident('VmRSS');
  using model = await Model.create(device, CONFIG, { seed: 1 });
  let seconds: number[] = [];
  if ('training' in program) {
    const { rows, length, recompute = false } = program.training;
    using trainer = model.trainer({ recompute });
    const all = tokens(rows * length);
    for (let i = 0; i < 2; i++)
      seconds.push((await trainer.step({ rows, tokens: all, targets: all })).seconds);
  } else if ('serving' in program) {
    const { batch = 1, capacity, prompt, precision = 'fp32' } = program.serving;
    using session = model.session({ batch, capacity, precision });
    const begin = performance.now();
    await session.prefill({
      rows: Array.from({ length: batch }, (_, i) => i),
      tokens: tokens(batch * prompt),
    });
    seconds = [(performance.now() - begin) / 1000];
    for (let t = prompt; t < capacity; t++) await session.decode({ tokens: tokens(batch) });
  }
  const measured = (await resident('VmHWM')) - before;
  return {
    predicted,
    parts,
    counted: device.info().memory.peak,
    measured,
    ratio: predicted / measured,
    seconds,
  };
}

const values = parseFlags({ out: { type: 'string' }, program: { type: 'string' } });
if (values.program !== undefined) {
  console.log(JSON.stringify(await measure(PROGRAMS[values.program] as MemoryProgram)));
} else {
  const file = await openRecord(values.out);
  const results: Record<string, Awaited<ReturnType<typeof measure>>> = {};
  for (const name of Object.keys(PROGRAMS)) {
    const script = fileURLToPath(import.meta.url);
    const { lines } = await run('npx', ['tsx', script, '--program', name]);
    results[name] = JSON.parse(lines.join(''));
    console.error(name, results[name]);
  }
  const record = {
    campaign: 'memory',
    command: 'npx tsx bench/memory.ts --out bench/records/memory.json',
    date: new Date().toISOString(),
    machine: describeMachine(),
    config: CONFIG,
    results,
  };
  await file?.keep(JSON.stringify(record, null, 2));
}
