import { execFile } from 'node:child_process';
import { promisify } from 'node:util';

import { Command, Option } from 'commander';

import { ROUTES } from '../arguments.js';
import { DuokvError } from '../errors.js';
import { type Case, MEASUREMENTS, prepareWork, STEPPED, type Work, type WorkOptions } from './bench-cases.js';
import { benchLatencyCommand } from './bench-latency.js';
import { possibleRoutes, presetConfig } from './model-config.js';
import {
  choicesOption,
  type DeviceFlags,
  listOption,
  openChosenDevice,
  positiveInteger,
  positiveIntegers,
  withDevice,
  withPrecision,
} from './options.js';
import { formatTable, withProgress } from './output.js';
import { RateProgram } from './rate-program.js';
import { defineAction, UsageError } from './run.js';
import { harmonicMean, median } from './statistics.js';
import { describeMachine } from './version.js';

interface BenchOptions extends DeviceFlags, WorkOptions {
  rounds: number;
  readRate?: string;
  peers?: boolean;
  python: string;
  peerScript?: string;
}

interface PeerReport {
  ms_median: number;
  params: number;
}

/** The last line that the script prints. Errors: `ERR_ARGUMENT` where it fails or the line is no report. */
async function askPeer(python: string, args: readonly string[], signal: AbortSignal): Promise<PeerReport> {
  const lastLine = (text: string) => text.trim().split('\n').at(-1) as string;
  const refuse = (why: string, cause?: unknown) =>
    new DuokvError('ERR_ARGUMENT', `${python} ${args[0]}: ${why}`, { cause });
  const { stdout } = await promisify(execFile)(python, args, { signal }).catch((error) => {
    if (error.name === 'AbortError') throw error;
    throw refuse(lastLine(error.stderr || error.message), error);
  });
  const line = lastLine(stdout);
  let report: Partial<PeerReport> | null = null;
  try {
    report = JSON.parse(line);
  } catch {}
  if (typeof report?.ms_median !== 'number' || typeof report.params !== 'number')
    throw refuse(`printed ${JSON.stringify(line)}, no { ms_median, params }`);
  return report as PeerReport;
}

/** The same measurement by the peer script, a process per repetition, with as many threads as the device has. */
function peerWork(
  { measure, design, route, batch }: Case,
  parameters: number,
  threads: number,
  options: BenchOptions & { peerScript: string },
): Work {
  const shared = presetConfig(design).design;
  const dtype = options.precision.startsWith('bf16') ? 'bf16' : 'f32';
  const length = measure === 'train' ? options.trainLength : options.length;
  const args = [
    ...[options.peerScript, measure, '--design', shared, '--dtype', dtype, '--reps', '1'],
    ...['--n', String(length), '--batch', String(batch), '--threads', String(threads)],
    ...(route === null ? [] : ['--route', route]),
  ];
  return {
    cases: [{ engine: 'peer', measure, design, route, batch }],
    async run(signal) {
      const report = await askPeer(options.python, args, signal);
      if (report.params !== parameters) {
        throw new DuokvError(
          'ERR_ARGUMENT',
          `${options.peerScript}: ${shared} has ${report.params} parameters, ${design} has ${parameters}`,
        );
      }
      return [report.ms_median];
    },
  };
}

export function benchCommand(): Command {
  const command = new Command('bench')
    .enablePositionalOptions()
    .addCommand(benchLatencyCommand())
    .description(
      'Time prefill by route, decode and generation steps, requests or training steps; medians over rounds that rotate the order',
    )
    .addOption(listOption('--designs <presets>', 'presets to time, with commas', ['local-history-126m']))
    .addOption(
      choicesOption('--measure <kinds>', 'what to time', MEASUREMENTS, ['prefill', 'decode', 'train']),
    )
    .addOption(choicesOption('--routes <routes>', 'prefill routes', ROUTES, ['exact', 'full']))
    .option('--length <tokens>', 'prompt length', positiveInteger, 1792)
    .option('--train-length <tokens>', 'window length of the training step', positiveInteger, 2048)
    .addOption(
      new Option('--batch <rows>', 'rows, several with commas').argParser(positiveIntegers).default([1], '1'),
    )
    .option('--steps <count>', 'steps in one repetition', positiveInteger, 32)
    .option('--rounds <count>', 'repetitions after one to warm up', positiveInteger, 5)
    .option(
      '--read-rate <program>',
      'asked between steps of decode and generate how fast memory is read: writes GB/s on a line for every line it gets',
    )
    .option('--peers', 'time a PyTorch peer in the same rounds')
    .option('--python <path>', 'the Python that runs it', 'python3')
    .option(
      '--peer-script <file>',
      'SCRIPT prefill|decode|train --design … prints { ms_median, params } as JSON',
    )
    .addHelpText(
      'after',
      '\nExample:\n  $ duokv bench --designs local-history-126m,gqa4-cla2-126m --measure prefill --routes exact,full --json',
    );
  withPrecision(withDevice(command), 'fp32');
  return defineAction<BenchOptions, []>(command, async ({ signal, print }, options) => {
    const { peerScript } = options;
    const unknown = options.measure.find((name) => ['generate', 'request'].includes(name));
    if (options.peers && unknown !== undefined) throw new UsageError(`--peers knows no --measure ${unknown}`);
    if (options.peers && peerScript === undefined) throw new UsageError('--peers needs --peer-script');
    if (options.readRate !== undefined && !options.measure.some((name) => STEPPED.includes(name))) {
      throw new UsageError(`--read-rate needs --measure ${STEPPED.join(' or ')}`);
    }
    // Before anything is built.
    for (const design of options.designs) possibleRoutes(design, options.routes);
    await using device = await openChosenDevice(options);
    await using reader =
      options.readRate === undefined ? undefined : new RateProgram(options.readRate, signal);
    let rates: number[] = [];
    const { works, cases, parameters } = await prepareWork(device, options, async () => {
      if (reader !== undefined) rates.push(await reader.sample());
    });
    const peerOf = new Map<Case, Case>();
    if (peerScript !== undefined && options.peers) {
      const { threads } = device.info();
      for (const ours of [...cases]) {
        const peer = peerWork(ours, parameters.get(ours.design) as number, threads, {
          ...options,
          peerScript,
        });
        const [theirs] = peer.cases as [Case];
        peerOf.set(ours, theirs);
        works.push(peer);
        cases.push(theirs);
      }
    }
    const raw = new Map(cases.map((timed): [Case, number[]] => [timed, []]));
    const readGbytes = new Map(cases.map((timed): [Case, number[]] => [timed, []]));
    await withProgress('timing', works.length * (options.rounds + 1), async (progress) => {
      for (let round = 0; round <= options.rounds; round++) {
        for (let turn = 0; turn < works.length; turn++) {
          const work = works[(turn + round) % works.length] as Work;
          rates = [];
          const times = await work.run(signal);
          // Round 0 warms up: packed weights, page faults, the peer's file cache.
          if (round > 0) {
            for (const [index, timed] of work.cases.entries()) {
              raw.get(timed)?.push(times[index] as number);
              if (rates.length > 0) readGbytes.get(timed)?.push(harmonicMean(rates));
            }
          }
          progress.update(round * works.length + turn + 1);
        }
      }
    });
    const resultOf = (timed: Case) => {
      const rawMs = raw.get(timed) as number[];
      const rate = readGbytes.get(timed) as number[];
      return {
        ...timed,
        medianMs: median(rawMs),
        minMs: Math.min(...rawMs),
        rawMs,
        ...(rate.length > 0 && { readGbytes: rate }),
      };
    };
    print(
      formatTable(
        [
          ...['measure', 'design', 'route', 'rows', 'median ms', 'min ms'],
          ...(reader ? ['memory GB/s'] : []),
          ...(options.peers ? ['peer ms', 'peer / duokv'] : []),
        ],
        cases
          .filter(({ engine }) => engine === 'duokv')
          .map((timed) => {
            const result = resultOf(timed);
            const theirs = peerOf.get(timed);
            const peer = theirs && resultOf(theirs);
            const columns = [result.measure, result.design, result.route ?? '–', String(result.batch)];
            columns.push(result.medianMs.toFixed(2), result.minMs.toFixed(2));
            if (reader) columns.push(result.readGbytes ? median(result.readGbytes).toFixed(1) : '–');
            if (peer) columns.push(peer.medianMs.toFixed(2), (peer.medianMs / result.medianMs).toFixed(2));
            return columns;
          }),
        [3, 4, 5, 6, 7, 8],
      ),
    );
    const { length, trainLength, steps, rounds, precision } = options;
    return {
      machine: describeMachine(),
      device: device.info(),
      precision,
      ...{ length, trainLength, steps, rounds },
      results: cases.map(resultOf),
      peakResidentBytes: process.resourceUsage().maxRSS * 1024,
    };
  });
}
