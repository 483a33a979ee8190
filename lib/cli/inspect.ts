import { Command } from 'commander';

import { type MemoryPrediction, predictMemory } from '../memory.js';
import type { PrecisionName } from '../native.js';
import {
  cacheBytes,
  countFlops,
  type DesignPlan,
  designPlan,
  type LayerRow,
  type ModelConfig,
  suffixes,
} from '../plan.js';
import { type ConfigOptions, resolveConfig, withSettings } from './model-config.js';
import {
  type DeviceFlags,
  nonNegativeInteger,
  openChosenDevice,
  positiveInteger,
  withDevice,
  withPrecision,
} from './options.js';
import { formatCount, formatFlops, formatMiB, formatTable } from './output.js';
import { defineAction } from './run.js';

interface InspectOptions extends Pick<ConfigOptions, 'set'>, DeviceFlags {
  length: number;
  batch: number;
  microbatch: number;
  decode: number;
  precision: PrecisionName;
}

/** Representation 0 is the token embedding, representation i + 1 the output of layer i. */
const representationName = (index: number) => (index === 0 ? 'embedding' : `output of ${index - 1}`);

function describeReads({ reads }: LayerRow): string {
  return reads
    .map(({ kBank, vBank, window, multiplicityBias }) => {
      const bank = kBank === vBank ? kBank : `K of ${kBank}, V of ${vBank}`;
      const extent = window === 0 ? 'all' : window === 1 ? 'current' : `last ${window}`;
      return `${bank} (${extent}${multiplicityBias ? ', + log m' : ''})`;
    })
    .join(' + ');
}

function planTable(plan: DesignPlan): string {
  const layers = plan.layers.map((layer) => [
    String(layer.layer),
    layer.upper ? 'upper' : 'lower',
    layer.projects.map(({ bank }) => bank).join(', ') || '–',
    layer.projects.map(({ representation }) => representationName(representation)).join(', ') || '–',
    describeReads(layer),
    layer.reads.length < 2 ? '–' : layer.separateFusion ? 'separate' : 'joint',
    layer.adapter ? 'yes' : '–',
  ]);
  // A projection of no layer stands between the stacks: it makes the bank that all upper layers read.
  const ofLayers = new Set(plan.layers.flatMap(({ projects }) => projects.map(({ bank }) => bank)));
  const between = plan.projections
    .filter(({ bank }) => !ofLayers.has(bank))
    .map(({ bank, representation }) => ['–', '–', bank, representationName(representation), '–', '–', '–']);
  const firstUpper = plan.layers.findIndex(({ upper }) => upper);
  return formatTable(
    ['layer', 'stack', 'projects K/V', 'from', 'reads', 'fusion', 'adapter'],
    [...layers.slice(0, firstUpper), ...between, ...layers.slice(firstUpper)],
    [0],
  );
}

const BAR_CELLS = 48;

/** The prompt as a bar that ends at its last position: █ computed whole, ▒ only projected to K/V, · not needed. */
function suffixBar(length: number, queryOutput: number, kvInput: number): string {
  const cells = (positions: number) =>
    positions === 0 ? 0 : Math.max(1, Math.round((positions / length) * BAR_CELLS));
  const whole = cells(queryOutput);
  const projected = Math.max(0, cells(kvInput) - whole);
  return '·'.repeat(BAR_CELLS - whole - projected) + '▒'.repeat(projected) + '█'.repeat(whole);
}

/** Per layer of the exact route: query/output positions, and inputs of its K/V projections (0 where it has none). */
function layerSuffixes(plan: DesignPlan, length: number) {
  const { layers, projections } = suffixes(plan.config, length, 'exact');
  const kvInput = new Map(plan.projections.map(({ bank }, index) => [bank, projections[index] as number]));
  return plan.layers.map(({ layer, upper, projects }) => ({
    layer,
    upper,
    queryOutput: layers[layer] as number,
    kvInput: projects
      .filter(({ bank }) => bank !== 'global')
      .reduce((most, { bank }) => Math.max(most, kvInput.get(bank) as number), 0),
  }));
}

function suffixDrawing(plan: DesignPlan, length: number): string {
  const rows = layerSuffixes(plan, length)
    .filter(({ upper }) => upper)
    .map(({ layer, queryOutput, kvInput }) => [
      String(layer),
      suffixBar(length, queryOutput, kvInput),
      formatCount(queryOutput),
      kvInput === 0 ? '–' : formatCount(kvInput),
    ]);
  return [
    formatTable(
      ['layer', `positions 0 … ${formatCount(length - 1)}`, 'query/output', 'K/V input'],
      rows,
      [0, 2, 3],
    ),
    '█ computed   ▒ projected to K/V only   · not needed; lower layers compute every position',
  ].join('\n');
}

/** Summed over the upper layers, for every route that the plan has. */
function routeCounts(plan: DesignPlan, length: number) {
  const routes = ['exact', 'full', ...(plan.hasGlobalBank ? (['uniform'] as const) : [])] as const;
  return routes.map((route) => {
    const { kvInput, queryOutput } = suffixes(plan.config, length, route);
    return { route, kvInput, queryOutput };
  });
}

/** The options of the design in one line, its numbers in the next. */
function describeConfig(config: ModelConfig): string {
  const entries = Object.entries(config).map(([key, value]) => ({
    text: `${key} ${value}`,
    isName: typeof value === 'string',
  }));
  const line = (names: boolean) => entries.filter(({ isName }) => isName === names).map(({ text }) => text);
  return `${line(true).join(', ')}\n${line(false).join(', ')}`;
}

/** A row per part, a column per program. */
function memoryTable(programs: readonly (readonly [string, MemoryPrediction])[]): string {
  const parts = [...new Set(programs.flatMap(([, { parts }]) => Object.keys(parts)))];
  const row = (name: string, bytes: (prediction: MemoryPrediction) => number | undefined) => [
    name,
    ...programs.map(([, prediction]) => {
      const value = bytes(prediction);
      return value === undefined ? '–' : formatMiB(value);
    }),
  ];
  return formatTable(
    ['MiB', ...programs.map(([name]) => name)],
    [...parts.map((part) => row(part, ({ parts }) => parts[part])), row('total', ({ total }) => total)],
    programs.map((_, i) => i + 1),
  );
}

async function predictAll(plan: DesignPlan, options: InspectOptions) {
  const { batch, length, microbatch, decode, precision } = options;
  await using device = await openChosenDevice(options);
  const training = { rows: batch, length, microbatch, precision };
  const serving = { batch, capacity: length + decode, prompt: length, precision };
  return {
    backend: device.info().backend,
    training: await predictMemory(device, plan.config, { training }),
    recomputed: await predictMemory(device, plan.config, { training: { ...training, recompute: true } }),
    serving: await predictMemory(device, plan.config, { serving }),
  };
}

export function inspectCommand(): Command {
  const command = new Command('inspect')
    .description(
      'Show what a design computes and keeps: plan, parameters, FLOPs, cache bytes, memory, prefill schedule',
    )
    .argument('<model>', 'a preset, a config .json, a checkpoint directory or the folder of a training run')
    .option('--length <tokens>', 'prompt length N', positiveInteger, 1792)
    .option('--batch <rows>', 'rows B', positiveInteger, 1)
    .option('--microbatch <rows>', 'rows of one pass of training', positiveInteger, 1)
    .option('--decode <steps>', 'steps after the prompt that a session has room for', nonNegativeInteger, 128)
    .addHelpText(
      'after',
      '\nExample:\n  $ duokv inspect local-history-126m --set fusion=separate --length 1024',
    );
  withDevice(withPrecision(withSettings(command), 'fp32'));
  return defineAction<InspectOptions, [string]>(command, async (context, options, model) => {
    const { length, batch, precision } = options;
    const plan = designPlan(await resolveConfig(model, options.set));
    const cache = cacheBytes(plan.config, { batch, positions: length, precision });
    const flops = countFlops(plan.config, { documentLengths: [length] });
    const routes = routeCounts(plan, length);
    const memory = await predictAll(plan, options);
    context.print(`${describeConfig(plan.config)}\n`);
    context.print(`${planTable(plan)}\n`);
    context.print(`Parameters: ${formatCount(plan.parameterCount)}`);
    context.print(
      `FLOPs per token of one document of ${formatCount(length)}: forward ${formatFlops(flops.forward / length)}, ` +
        `training ${formatFlops(flops.training / length)}\n`,
    );
    const withoutIds = cache.total - cache.documentIds;
    context.print(`Complete cache of ${batch} x ${formatCount(length)} positions (${precision})`);
    context.print(
      `${formatTable(
        ['part', 'bytes', 'MiB'],
        [
          ['lower', cache.lower],
          ['global', cache.global],
          ['local', cache.local],
          ['keys and values', withoutIds],
          ['document ids', cache.documentIds],
          ['total', cache.total],
        ].map(([part, bytes]) => [part as string, formatCount(bytes as number), formatMiB(bytes as number)]),
        [1, 2],
      )}\n`,
    );
    const shape = `${batch} x ${formatCount(length)}`;
    context.print(`Device memory at its peak (${memory.backend}, ${precision})`);
    context.print(
      `${memoryTable([
        [`training ${shape}`, memory.training],
        ['recomputed', memory.recomputed],
        [`serving ${shape} + ${options.decode}`, memory.serving],
      ])}\n`,
    );
    context.print(`Positions of a prefill of ${formatCount(length)} tokens, summed over the upper layers`);
    context.print(
      `${formatTable(
        ['route', 'K/V input', 'query/output'],
        routes.map(({ route, kvInput, queryOutput }) => [
          route,
          formatCount(kvInput),
          formatCount(queryOutput),
        ]),
        [1, 2],
      )}\n`,
    );
    context.print('Exact route');
    context.print(suffixDrawing(plan, length));
    return {
      config: plan.config,
      parameters: plan.parameterCount,
      layers: plan.layers,
      length,
      batch,
      precision,
      flopsPerToken: { forward: flops.forward / length, training: flops.training / length },
      memory,
      cacheBytes: { ...cache, withoutDocumentIds: withoutIds },
      positions: Object.fromEntries(routes.map(({ route, ...counts }) => [route, counts])),
      uniformSuffix: plan.uniformSuffix,
      suffixes: layerSuffixes(plan, length),
    };
  });
}
