import { Command } from 'commander';

import { PRECISIONS, ROUTES } from '../arguments.js';
import type { Device } from '../device.js';
import { Model } from '../model.js';
import type { PrecisionName } from '../native.js';
import {
  type Cell,
  type Contender,
  Estimate,
  fitBudget,
  GRID,
  type LatencyRecord,
  NOTE,
  runCampaign,
  summarise,
} from './latency-campaign.js';
import { readRecord } from './latency-record.js';
import { possibleRoutes, presetConfig, presetNames } from './model-config.js';
import {
  choicesOption,
  type DeviceFlags,
  nameList,
  openChosenDevice,
  positiveInteger,
  positiveNumber,
  withDevice,
} from './options.js';
import { formatSeconds, formatTable, withProgress } from './output.js';
import { RecordFile } from './record-file.js';
import { defineAction, UsageError } from './run.js';
import { describeMachine } from './version.js';

/** Options that are part of a campaign, and where its record goes. */
const SETTINGS = 'designs routes precisions cells full blocks warmups seeds minutes out'.split(' ');

interface LatencyOptions extends DeviceFlags {
  designs?: string[];
  routes: string[];
  precisions: string[];
  cells?: string[];
  full?: boolean;
  blocks: number;
  warmups: number;
  seeds: number;
  minutes?: number;
  out?: string;
  resume?: string;
}

/** `4x1024x128`, or `4x1024x1/8/32/128` for a request and its prefixes. */
function parseCell(text: string): Cell {
  const match = /^(\d+)x(\d+)x(\d+(?:\/\d+)*)$/.exec(text);
  const numbers = match?.slice(1, 3).map(Number) ?? [];
  const steps = (match?.[3] ?? '')
    .split('/')
    .map(Number)
    .sort((a, b) => a - b);
  const [batch = 0, prompt = 0] = numbers;
  if (batch < 1 || prompt < 1 || (steps[0] ?? 0) < 1) {
    throw new UsageError(`--cells ${text} is not BATCHxPROMPTxSTEPS, such as 4x1024x1/8/128`);
  }
  return { batch, prompt, steps };
}

function listContenders(options: LatencyOptions): Contender[] {
  const { routes, precisions } = options;
  const sizes = presetNames.filter((name) => name.endsWith('-126m'));
  // The first preset of every plan: a model under two names is one design.
  const everything = sizes.filter((name, i) => {
    const text = (preset: string) => JSON.stringify(presetConfig(preset));
    return sizes.findIndex((other) => text(other) === text(name)) === i;
  });
  const presets = options.designs ?? (options.full ? everything : DEFAULT_PRESETS);
  const wanted = options.full ? [...ROUTES] : (routes as Contender['route'][]);
  return (precisions as PrecisionName[]).flatMap((precision) =>
    presets.flatMap((preset) =>
      possibleRoutes(preset, wanted).map((route) => ({ preset, route, precision })),
    ),
  );
}

const DEFAULT_PRESETS = ['local-history-126m', 'gqa4-126m', 'gqa4-cla2-126m'];

/** The campaign as asked for, cut to what fits into --minutes. */
async function plan(
  device: Device,
  options: LatencyOptions,
  say: (text: string) => void,
  signal: AbortSignal,
): Promise<{ record: LatencyRecord; blockMs: (cell: Cell) => number }> {
  const contenders = listContenders(options);
  const asked = options.cells?.map(parseCell) ?? [...GRID];
  const models = new Map<string, Model>();
  let estimate: Estimate;
  try {
    estimate = await Estimate.measure(
      contenders,
      async (preset) => {
        const model = models.get(preset) ?? (await Model.create(device, presetConfig(preset), { seed: 0 }));
        models.set(preset, model);
        return model;
      },
      signal,
    );
  } finally {
    for (const model of models.values()) model.dispose();
  }
  const { seeds, warmups } = options;
  const blockMs = (cell: Cell) => estimate.block(cell);
  const budget = options.minutes === undefined ? Number.POSITIVE_INFINITY : options.minutes * 60_000;
  const { cells, blocks, ms } = fitBudget(asked, options.blocks, warmups, budget / seeds, blockMs);
  const dropped = asked.filter((cell) => !cells.includes(cell));
  say(
    `${contenders.length} contenders, ${cells.length} shapes, ${blocks} blocks, ${seeds} seeds: about ${formatSeconds((ms * seeds) / 1000)}` +
      (dropped.length === 0
        ? ''
        : `; left out: ${dropped.map(({ batch, prompt }) => `${batch} x ${prompt}`).join(', ')}`),
  );
  const command = ['duokv bench latency', `--blocks ${blocks}`, `--warmups ${warmups}`, `--seeds ${seeds}`];
  command.push(`--precisions ${options.precisions.join(',')}`);
  command.push(
    `--cells ${cells.map((cell) => `${cell.batch}x${cell.prompt}x${cell.steps.join('/')}`).join(',')}`,
  );
  command.push(
    options.full
      ? '--full'
      : `--designs ${(options.designs ?? DEFAULT_PRESETS).join(',')} --routes ${options.routes.join(',')}`,
  );
  return {
    blockMs,
    record: {
      campaign: 'latency',
      command: command.join(' '),
      date: new Date().toISOString(),
      machine: describeMachine(),
      device: { ...device.info() },
      note: NOTE,
      ...{ seeds, blocks, warmups, cells, contenders },
      ...{ loading: [], setUps: [], graphs: [], runs: [] },
    },
  };
}

function summaryTable(record: LatencyRecord): string {
  const rows = summarise(record).map((row) => [
    `${row.batch} x ${row.prompt} + ${row.steps}`,
    row.preset,
    row.route,
    row.precision,
    row.prefillMs.toFixed(1),
    row.stepMs.toFixed(2),
    row.requestMs.toFixed(1),
    row.ratio.toFixed(3),
  ]);
  const header = ['request', 'design', 'route', 'precision', 'prefill ms', 'step ms', 'request ms', 'ratio'];
  return formatTable(header, rows, [4, 5, 6, 7]);
}

export function benchLatencyCommand(): Command {
  const command = new Command('latency')
    .description('Time requests over a grid of shapes: designs and routes in blocks whose order rotates')
    .option('--designs <presets>', `presets, with commas (default: ${DEFAULT_PRESETS.join(',')})`, nameList)
    .addOption(choicesOption('--routes <routes>', 'prefill routes', ROUTES, ['exact', 'full']))
    .addOption(choicesOption('--precisions <policies>', 'precision policies', PRECISIONS, ['fp32']))
    .option(
      '--cells <shapes>',
      'BATCHxPROMPTxSTEPS with commas; steps may be a list, 1x1792x1/8/128',
      nameList,
    )
    .option('--full', 'every design at 126M by every route')
    .option('--blocks <count>', 'requests of each contender and shape', positiveInteger, 3)
    .option('--warmups <count>', 'requests before the first block', positiveInteger, 1)
    .option('--seeds <count>', 'models, made from seeds 0, 1, …', positiveInteger, 1)
    .option('--minutes <budget>', 'fewer blocks, then fewer shapes, until this is enough', positiveNumber)
    .option('--out <record>', 'write the record here after every block')
    .option('--resume <record>', 'go on with this record; its settings count')
    .addHelpText(
      'after',
      '\nThe ratio is the geometric mean over blocks of a request over the first contender of its precision.\n' +
        '\nExample:\n  $ duokv bench latency --designs local-history-126m,gqa4-cla2-126m --minutes 10 --out latency.json',
    );
  withDevice(command);
  return defineAction<LatencyOptions, []>(command, async ({ signal, print, json }, options) => {
    const say = (text: string) => void (json || process.stderr.write(`${text}\n`));
    const out = options.resume ?? options.out;
    const own = SETTINGS.find((name) => command.getOptionValueSource(name) === 'cli');
    if (options.resume !== undefined && own !== undefined) {
      throw new UsageError(`--${own} and --resume exclude each other: the record's settings count`);
    }
    const resumed = options.resume === undefined ? undefined : readRecord(options.resume);
    const file = out === undefined ? undefined : await RecordFile.open(out);
    await using device = await openChosenDevice(options);
    const { record, blockMs } =
      resumed === undefined
        ? await plan(device, options, say, signal)
        : { record: resumed, blockMs: () => 1 };
    const total = record.cells.length * record.blocks * record.seeds;
    let spentMs = 0;
    let expectedMs = 0;
    const leftMs = () => {
      const all = record.cells.reduce((sum, cell) => sum + blockMs(cell) * record.blocks * record.seeds, 0);
      const done = record.runs.reduce((sum, run) => sum + blockMs(record.cells[run.cell] as Cell), 0);
      return expectedMs === 0 ? 0 : (all - done) * (spentMs / expectedMs);
    };
    try {
      await withProgress('blocks', total, async (progress) => {
        let last = performance.now();
        const keep = async () => {
          const { cell } = record.runs.at(-1) as LatencyRecord['runs'][number];
          const now = performance.now();
          spentMs += now - last;
          last = now;
          expectedMs += blockMs(record.cells[cell] as Cell);
          await file?.keep(JSON.stringify(record));
          const { batch, prompt } = record.cells[cell] as Cell;
          const detail = `${batch} x ${prompt}, about ${formatSeconds(leftMs() / 1000)} left`;
          progress.update(record.runs.length, detail);
        };
        await runCampaign(device, record, keep, signal);
      });
    } finally {
      if (signal.aborted && out !== undefined) say(`stopped; go on with --resume ${out}`);
      if (record.runs.length > 0) print(summaryTable(record));
    }
    return { ...record, summary: summarise(record) };
  });
}
