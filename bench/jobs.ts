// What duokv is timed at. A job is one process; several times come from one where they share a model.

import { fileURLToPath } from 'node:url';

import { run } from './processes.js';
import type { Measure, Result } from './record.js';

export interface Job {
  name: string;
  run(signal: AbortSignal): Promise<Result[]>;
}

export const PROMPT = 1792;
export const WINDOW = 2048;
export const SHORT = 512;
export const STEPS = { decode: 32, request: 128 };
export const MAIN = 'local-history';
/** What duokv's request is compared with, and the design that llama.cpp's model has. */
export const RIVAL = 'gqa4-cla2';
export const PLAIN = 'independent';

const cli = fileURLToPath(new URL('../dist/cli/main.js', import.meta.url));

/** What a record adds to the machine: the CPU device's threads and vector instructions. */
export async function describeDevice(): Promise<{ threads: number; isa: string }> {
  const { lines } = await run(process.execPath, [cli, 'doctor', '--json']);
  const { threads, isa } = JSON.parse(lines.join('')).device as { threads: number; isa: string };
  return { threads, isa };
}

interface OwnCase {
  precision: string;
  measure: Measure[];
  designs?: string[];
  routes?: string[];
  batch?: number[];
  length?: number;
  repetitions?: number;
}

/** A result of `duokv bench --json`. */
interface OwnResult {
  measure: Measure;
  design: string;
  route: string | null;
  batch: number;
  rawMs: number[];
  readGbytes?: number[];
}

/** `rateProgram`: read_rate_bench. */
function ownJob(given: OwnCase, rateProgram: string): Job {
  const { precision, measure, designs = [MAIN], routes = ['exact'], batch = [1], repetitions = 2 } = given;
  const isTraining = measure.includes('train');
  const length = given.length ?? (isTraining ? WINDOW : PROMPT);
  const steps = measure.includes('request') ? STEPS.request : STEPS.decode;
  const preset = (design: string) => `${design}-126m`;
  const shape = `${batch.join('+')}x${length}`;
  return {
    name: ['duokv', precision, measure.join('+'), designs.join('+'), shape].join(' '),
    async run(signal) {
      const args = ['--designs', designs.map(preset).join(','), '--measure', measure.join(',')];
      args.push('--precision', precision, '--routes', routes.join(','), '--batch', batch.join(','));
      args.push(isTraining ? '--train-length' : '--length', String(length));
      if (measure.includes('decode')) args.push('--read-rate', rateProgram);
      args.push('--steps', String(steps), '--rounds', String(repetitions));
      const { lines, peakBytes } = await run(process.execPath, [cli, 'bench', '--json', ...args], { signal });
      const { results } = JSON.parse(lines.join('')) as { results: OwnResult[] };
      return results.map((result) => ({
        engine: 'duokv',
        precision,
        measure: result.measure,
        design: designs.find((design) => preset(design) === result.design) as string,
        route: result.route,
        batch: result.batch,
        length,
        ms: result.rawMs,
        ...(result.readGbytes && { readGbytes: result.readGbytes }),
        peakBytes,
      }));
    },
  };
}

/** Everything the targets ask of duokv under one precision policy. */
export function ownJobs(precision: string, rateProgram: string): Job[] {
  const job = (given: Omit<OwnCase, 'precision'>) => ownJob({ precision, ...given }, rateProgram);
  return [
    job({ measure: ['prefill'], routes: ['exact', 'full'], repetitions: 5 }),
    // The prompt of 8 rows takes longer than everything that is timed.
    job({ measure: ['decode'], batch: [1, 8] }),
    job({ measure: ['decode'], batch: [1, 8], length: SHORT, repetitions: 4 }),
    job({ measure: ['prefill'], routes: ['exact', 'full'], length: SHORT, repetitions: 9 }),
    job({ measure: ['prefill'], routes: ['exact', 'full'], length: 1024, repetitions: 5 }),
    job({ measure: ['prefill', 'decode'], designs: [PLAIN], repetitions: 4 }),
    job({ measure: ['request'], designs: [MAIN, RIVAL], repetitions: 3 }),
    job({ measure: ['train'], repetitions: 1 }),
    job({ measure: ['train'], length: 1024, repetitions: 1 }),
    job({ measure: ['train'], length: SHORT, repetitions: 1 }),
  ];
}
