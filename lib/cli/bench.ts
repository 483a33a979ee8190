import { execFile } from 'node:child_process';
import { promisify } from 'node:util';

import { Command } from 'commander';

import type { Device } from '../device.js';
import { DuokvError } from '../errors.js';
import { Model } from '../model.js';
import type { PrecisionName } from '../native.js';
import { benchLatencyCommand } from './bench-latency.js';
import { presetConfig } from './model-config.js';
import {
  type DeviceFlags,
  listOption,
  openChosenDevice,
  positiveInteger,
  withDevice,
  withPrecision,
} from './options.js';
import { formatTable, withProgress } from './output.js';
import { defineAction, UsageError } from './run.js';
import { median } from './statistics.js';
import { syntheticTokens } from './synthetic-tokens.js';
import { describeMachine } from './version.js';

const MEASUREMENTS = ['prefill', 'decode', 'request', 'train'] as const;
type Measurement = (typeof MEASUREMENTS)[number];

interface BenchOptions extends DeviceFlags {
  designs: string[];
  measure: Measurement[];
  routes: string[];
  length: number;
  trainLength: number;
  batch: number;
  steps: number;
  rounds: number;
  precision: PrecisionName;
  peers?: boolean;
  python: string;
  peerScript?: string;
}

/** Something to time: `run` gives the milliseconds of one repetition, set-up not included. */
interface Case {
  readonly engine: 'duokv' | 'peer';
  readonly measure: Measurement;
  readonly design: string;
  readonly route: string | null;
  run(signal: AbortSignal): Promise<number>;
}

async function timed(work: () => Promise<unknown>): Promise<number> {
  const began = performance.now();
  await work();
  return performance.now() - began;
}

/** `rows` rows of tokens that use the whole vocabulary, with the next token as target. */
function syntheticBatch(rows: number, length: number, vocab: number) {
  const documentIds = BigInt64Array.from({ length: rows * length }, (_, index) =>
    BigInt(Math.floor(index / length)),
  );
  return {
    rows,
    tokens: syntheticTokens(rows * length, vocab),
    documentIds,
    targets: syntheticTokens(rows * length, vocab, 1),
    targetDocumentIds: documentIds,
  };
}

/**
 * The cases of one design; they share a model, and training has one of its own so that packed serving weights stay.
 * Everything here lives until the device closes.
 */
async function designCases(device: Device, design: string, options: BenchOptions) {
  const { batch, length, precision, steps, trainLength } = options;
  const config = presetConfig(design);
  const cases: Case[] = [];
  const model = await Model.create(device, config, { seed: 0 });
  const { tokens: prompt } = syntheticBatch(batch, length, config.vocab);
  if (options.measure.includes('prefill')) {
    const session = model.session({ batch, capacity: length, precision });
    for (const route of options.routes) {
      cases.push({
        engine: 'duokv',
        measure: 'prefill',
        design,
        route,
        async run(signal) {
          await session.reset();
          return timed(() => session.prefill({ tokens: prompt, schedule: route as 'exact' }, { signal }));
        },
      });
    }
  }
  if (options.measure.includes('decode')) {
    const session = model.session({ batch, capacity: length + steps, precision });
    const tokens = prompt.slice(0, batch);
    cases.push({
      engine: 'duokv',
      measure: 'decode',
      design,
      route: null,
      async run(signal) {
        await session.reset();
        await session.prefill({ tokens: prompt }, { signal });
        const total = await timed(async () => {
          for (let step = 0; step < steps; step++) await session.decode({ tokens }, { signal });
        });
        return total / steps;
      },
    });
  }
  if (options.measure.includes('request')) {
    const session = model.session({ batch, capacity: length + steps, precision });
    const tokens = prompt.slice(0, batch);
    for (const route of options.routes) {
      cases.push({
        engine: 'duokv',
        measure: 'request',
        design,
        route,
        async run(signal) {
          await session.reset();
          return timed(async () => {
            await session.prefill({ tokens: prompt, schedule: route as 'exact' }, { signal });
            for (let step = 0; step < steps; step++) await session.decode({ tokens }, { signal });
          });
        },
      });
    }
  }
  if (options.measure.includes('train')) {
    const trained = await Model.create(device, config, { seed: 0 });
    const trainer = trained.trainer({ precision, microbatch: 1 });
    const trainingBatch = syntheticBatch(batch, trainLength, config.vocab);
    cases.push({
      engine: 'duokv',
      measure: 'train',
      design,
      route: null,
      run: (signal) => timed(() => trainer.step(trainingBatch, { signal })),
    });
  }
  return { cases, parameters: model.parameterCount, design: config.design };
}

interface PeerReport {
  ms_median: number;
  params: number;
}

/** The same measurement by the peer script, a process per repetition, with as many threads as the device has. */
function peerCase(
  model: { design: string; parameters: number },
  { measure, design, route }: Case,
  threads: number,
  options: BenchOptions & { peerScript: string },
): Case {
  const dtype = options.precision.startsWith('bf16') ? 'bf16' : 'f32';
  const length = measure === 'train' ? options.trainLength : options.length;
  const args = [
    ...[options.peerScript, measure, '--design', model.design, '--dtype', dtype, '--reps', '1'],
    ...['--n', String(length), '--batch', String(options.batch), '--threads', String(threads)],
    ...(route === null ? [] : ['--route', route]),
  ];
  return {
    engine: 'peer',
    measure,
    design,
    route,
    async run(signal) {
      const { stdout } = await promisify(execFile)(options.python, args, { signal });
      const report = JSON.parse(stdout.trim().split('\n').at(-1) as string) as PeerReport;
      if (report.params !== model.parameters) {
        throw new DuokvError(
          'ERR_ARGUMENT',
          `${options.peerScript}: ${model.design} has ${report.params} parameters, ${design} has ${model.parameters}`,
        );
      }
      return report.ms_median;
    },
  };
}

export function benchCommand(): Command {
  const command = new Command('bench')
    .enablePositionalOptions()
    .addCommand(benchLatencyCommand())
    .description(
      'Time prefill by route, a decode step, a request of both or a training step; medians over rounds that rotate the order',
    )
    .addOption(listOption('--designs <presets>', 'presets to time, with commas', ['local-history-126m']))
    .addOption(
      listOption('--measure <kinds>', `any of ${MEASUREMENTS.join(', ')}, with commas`, [
        'prefill',
        'decode',
        'train',
      ]),
    )
    .addOption(listOption('--routes <routes>', 'prefill routes, with commas', ['exact', 'full']))
    .option('--length <tokens>', 'prompt length', positiveInteger, 1792)
    .option('--train-length <tokens>', 'window length of the training step', positiveInteger, 2048)
    .option('--batch <rows>', 'rows', positiveInteger, 1)
    .option('--steps <count>', 'decode steps in one repetition', positiveInteger, 32)
    .option('--rounds <count>', 'repetitions after one to warm up', positiveInteger, 5)
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
    for (const name of options.measure) {
      if (!MEASUREMENTS.includes(name))
        throw new UsageError(`--measure ${name} is none of ${MEASUREMENTS.join(', ')}`);
    }
    const { peerScript } = options;
    if (options.peers && options.measure.includes('request')) {
      throw new UsageError('--peers knows no --measure request');
    }
    if (options.peers && peerScript === undefined) throw new UsageError('--peers needs --peer-script');
    await using device = await openChosenDevice(options);
    const cases: Case[] = [];
    for (const design of options.designs) {
      const made = await designCases(device, design, options);
      cases.push(...made.cases);
      if (options.peers && peerScript !== undefined) {
        const { threads } = device.info();
        cases.push(...made.cases.map((ours) => peerCase(made, ours, threads, { ...options, peerScript })));
      }
    }
    const raw = cases.map((): number[] => []);
    await withProgress('timing', cases.length * (options.rounds + 1), async (progress) => {
      for (let round = 0; round <= options.rounds; round++) {
        for (let turn = 0; turn < cases.length; turn++) {
          const index = (turn + round) % cases.length;
          const ms = await (cases[index] as Case).run(signal);
          // Round 0 warms up: packed weights, page faults, the peer's file cache.
          if (round > 0) raw[index]?.push(ms);
          progress.update(round * cases.length + turn + 1);
        }
      }
    });
    const results = cases.map(({ engine, measure, design, route }, index) => {
      const times = raw[index] as number[];
      return {
        engine,
        measure,
        design,
        route,
        medianMs: median(times),
        minMs: Math.min(...times),
        rawMs: times,
      };
    });
    const peerOf = (result: (typeof results)[number]) =>
      results.find(
        ({ engine, measure, design: preset, route }) =>
          engine === 'peer' &&
          measure === result.measure &&
          preset === result.design &&
          route === result.route,
      );
    print(
      formatTable(
        [
          'measure',
          'design',
          'route',
          'median ms',
          'min ms',
          ...(options.peers ? ['peer ms', 'peer / duokv'] : []),
        ],
        results
          .filter(({ engine }) => engine === 'duokv')
          .map((result) => {
            const peer = peerOf(result);
            const columns = [result.measure, result.design, result.route ?? '–'];
            columns.push(result.medianMs.toFixed(2), result.minMs.toFixed(2));
            if (peer) columns.push(peer.medianMs.toFixed(2), (peer.medianMs / result.medianMs).toFixed(2));
            return columns;
          }),
        [3, 4, 5, 6],
      ),
    );
    const { length, trainLength, batch, steps, rounds, precision } = options;
    return {
      machine: describeMachine(),
      device: device.info(),
      precision,
      ...{ length, trainLength, batch, steps, rounds },
      results,
      peakResidentBytes: process.resourceUsage().maxRSS * 1024,
    };
  });
}
