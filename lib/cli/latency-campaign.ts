import type { Device } from '../device.js';
import { Model } from '../model.js';
import type { PrecisionName } from '../native.js';
import { countFlops, type ModelConfig } from '../plan.js';
import type { Session } from '../session.js';
import { presetConfig } from './model-config.js';
import { median, pairedRatio } from './statistics.js';
import { syntheticTokens } from './synthetic-tokens.js';

/*
 * The latency campaign of protocols section 4. A request is a prefill of N tokens for B rows and D teacher-forced
 * decode steps; the copies of its inputs and logits are timed, making models, sessions and graphs is not. The shorter
 * requests of a shape are prefixes of the longest: its times are kept after the prefill and after every step.
 */

/** A shape of the grid. `steps` are ascending; the last is what runs. */
export interface Cell {
  readonly batch: number;
  readonly prompt: number;
  readonly steps: readonly number[];
}

/** The grid: B 1/4/8 x N 512/1,024/1,792 x D 128, with D 1/8/32 at (1, 1792) and (4, 1024). */
export const GRID: readonly Cell[] = [1, 4, 8].flatMap((batch) =>
  [512, 1024, 1792].map((prompt) => {
    const isDetailed = (batch === 1 && prompt === 1792) || (batch === 4 && prompt === 1024);
    return { batch, prompt, steps: isDetailed ? [1, 8, 32, 128] : [128] };
  }),
);

/** What competes: a design by a prefill route under a precision policy. */
export interface Contender {
  readonly preset: string;
  readonly route: 'exact' | 'full' | 'uniform';
  readonly precision: PrecisionName;
}

/** One request: milliseconds from its start to the end of the prefill and of each decode step. */
export interface Timing {
  /** Index into `contenders`. */
  readonly contender: number;
  readonly ms: readonly number[];
}

/** Making a session, milliseconds. A campaign that was resumed made it again. */
export interface SetUp {
  readonly cell: number;
  readonly seed: number;
  readonly preset: string;
  readonly precision: PrecisionName;
  readonly createMs: number;
}

/** Graphs that a contender's session held after its warm-ups, where the backend has them. */
export interface GraphCost extends Contender {
  readonly cell: number;
  readonly seed: number;
  readonly recorded: number;
  /** Device memory that the graphs name, and what the driver took for them, as in `session.graphs`. */
  readonly bytes: number;
  readonly driverBytes: number;
  /** Spent recording. */
  readonly ms: number;
  /** Requests after which recording has paid off; null where it saves nothing. */
  readonly callsToAmortise: number | null;
}

export interface LatencyRecord {
  readonly campaign: 'latency';
  readonly command: string;
  readonly date: string;
  readonly machine: Record<string, unknown>;
  readonly device: Record<string, unknown>;
  readonly note: string;
  readonly seeds: number;
  readonly blocks: number;
  readonly warmups: number;
  readonly cells: readonly Cell[];
  readonly contenders: readonly Contender[];
  /** Making a model with its parameters on the device. */
  readonly loading: { preset: string; seed: number; ms: number; bytes: number }[];
  readonly setUps: SetUp[];
  readonly graphs: GraphCost[];
  /** In the order in which they ran. */
  readonly runs: { cell: number; seed: number; block: number; timings: Timing[] }[];
}

export const NOTE =
  'A request of D steps is the prefix of the longest request of its shape: ms[0] is its prefill, ms[D] the whole request.';

async function timeRequest(
  session: Session,
  { batch, prompt }: Cell,
  { route }: Contender,
  steps: number,
  signal: AbortSignal,
): Promise<number[]> {
  const { vocab } = session.model.config;
  const tokens = syntheticTokens(batch * prompt, vocab);
  const next = Array.from({ length: steps }, (_, step) => syntheticTokens(batch, vocab, step));
  await session.reset();
  const began = performance.now();
  const ms: number[] = [];
  const mark = () => ms.push(Number((performance.now() - began).toFixed(3)));
  await session.prefill({ tokens, schedule: route }, { signal });
  mark();
  for (const step of next) {
    await session.decode({ tokens: step }, { signal });
    mark();
  }
  return ms;
}

/** Turn `turn` of block `block` among `count`: each block starts one further, and every second runs backwards. */
export function order(count: number, block: number): number[] {
  const forward = Array.from({ length: count }, (_, turn) => (turn + (block >> 1)) % count);
  return block % 2 === 0 ? forward : forward.reverse();
}

/** What a contender needs of a cell, for the estimate: measured on a short prompt, scaled by FLOPs. */
export class Estimate {
  readonly #perFlop: readonly number[];
  readonly #perStep: readonly number[];
  readonly #configs: readonly ModelConfig[];

  private constructor(perFlop: number[], perStep: number[], configs: ModelConfig[]) {
    this.#perFlop = perFlop;
    this.#perStep = perStep;
    this.#configs = configs;
  }

  static async measure(
    contenders: readonly Contender[],
    modelOf: (preset: string) => Promise<Model>,
    signal: AbortSignal,
  ): Promise<Estimate> {
    const cell = { batch: 1, prompt: 256, steps: [4] };
    const perFlop: number[] = [];
    const perStep: number[] = [];
    const configs: ModelConfig[] = [];
    for (const contender of contenders) {
      const model = await modelOf(contender.preset);
      using session = model.session({
        batch: 1,
        capacity: cell.prompt + 4,
        precision: contender.precision,
      });
      await timeRequest(session, cell, contender, 1, signal);
      const ms = await timeRequest(session, cell, contender, 4, signal);
      perFlop.push((ms[0] as number) / Estimate.#flops(model.config, cell));
      perStep.push(((ms[4] as number) - (ms[0] as number)) / 4);
      configs.push(model.config);
    }
    return new Estimate(perFlop, perStep, configs);
  }

  static #flops(config: ModelConfig, { batch, prompt }: Cell): number {
    const { forward, head } = countFlops(config, { documentLengths: [prompt] });
    return batch * (forward - head);
  }

  /** Milliseconds of one block of a cell. Suffix routes skip more of a longer prompt: they take less. */
  block(cell: Cell): number {
    const steps = cell.steps.at(-1) as number;
    return this.#configs.reduce((sum, config, i) => {
      const prefill = (this.#perFlop[i] as number) * Estimate.#flops(config, cell);
      return sum + prefill + (this.#perStep[i] as number) * steps * (1 + cell.batch / 8);
    }, 0);
  }
}

/** Blocks and cells that fit: fewer blocks first, then without the slowest cells. */
export function fitBudget(
  cells: readonly Cell[],
  blocks: number,
  warmups: number,
  budgetMs: number,
  blockMs: (cell: Cell) => number,
): { cells: Cell[]; blocks: number; ms: number } {
  const total = (kept: readonly Cell[], count: number) =>
    kept.reduce((sum, cell) => sum + blockMs(cell) * (count + warmups), 0);
  for (let count = blocks; count >= 1; count--) {
    if (total(cells, count) <= budgetMs) return { cells: [...cells], blocks: count, ms: total(cells, count) };
  }
  const kept = [...cells];
  while (kept.length > 1 && total(kept, 1) > budgetMs) {
    const slowest = kept.reduce((a, b) => (blockMs(a) >= blockMs(b) ? a : b));
    kept.splice(kept.indexOf(slowest), 1);
  }
  return { cells: kept, blocks: 1, ms: total(kept, 1) };
}

/** Runs the blocks that a record lacks and calls `keep` after each. */
export async function runCampaign(
  device: Device,
  record: LatencyRecord,
  keep: () => Promise<void>,
  signal: AbortSignal,
): Promise<void> {
  const { cells, contenders, seeds, blocks } = record;
  for (let seed = 0; seed < seeds; seed++) {
    const models = new Map<string, Model>();
    try {
      for (let cell = 0; cell < cells.length; cell++) {
        const done = record.runs.filter((run) => run.cell === cell && run.seed === seed);
        const missing = Array.from({ length: blocks }, (_, block) => block).filter(
          (block) => !done.some((run) => run.block === block),
        );
        if (missing.length === 0) continue;
        for (const { preset } of contenders) {
          if (models.has(preset)) continue;
          const began = performance.now();
          const model = await Model.create(device, presetConfig(preset), { seed });
          models.set(preset, model);
          const known = record.loading.some((entry) => entry.preset === preset && entry.seed === seed);
          if (!known)
            record.loading.push({ preset, seed, ms: performance.now() - began, bytes: model.bytes });
        }
        await runCell({ device, record, cell, seed, missing, models, keep, signal });
      }
    } finally {
      for (const model of models.values()) model.dispose();
    }
  }
}

interface CellRun {
  readonly device: Device;
  readonly record: LatencyRecord;
  /** Index into `record.cells`. */
  readonly cell: number;
  readonly seed: number;
  readonly missing: readonly number[];
  readonly models: ReadonlyMap<string, Model>;
  readonly keep: () => Promise<void>;
  readonly signal: AbortSignal;
}

async function runCell({
  device,
  record,
  cell: at,
  seed,
  missing,
  models,
  keep,
  signal,
}: CellRun): Promise<void> {
  const { contenders, warmups } = record;
  const cell = record.cells[at] as Cell;
  const steps = cell.steps.at(-1) as number;
  // Only graphs are made for every step of a request.
  const warmSteps = device.info().backend === 'cpu' ? Math.min(steps, 2) : steps;
  const sessions = new Map<string, Session>();
  const sessionOf = ({ preset, precision }: Contender) => sessions.get(`${preset} ${precision}`);
  try {
    for (const contender of contenders) {
      const { preset, precision } = contender;
      let session = sessionOf(contender);
      if (session === undefined) {
        const began = performance.now();
        const options = { batch: cell.batch, capacity: cell.prompt + steps, precision };
        session = (models.get(preset) as Model).session(options);
        sessions.set(`${preset} ${precision}`, session);
        await session.ready;
        record.setUps.push({ cell: at, seed, preset, precision, createMs: performance.now() - began });
      }
      for (let warmup = 0; warmup < warmups; warmup++) {
        await timeRequest(session, cell, contender, warmSteps, signal);
      }
      const { recorded, bytes, driverBytes, seconds } = session.graphs;
      if (recorded === 0) continue;
      const callsToAmortise = await amortise(session, cell, contender, signal);
      record.graphs.push({
        cell: at,
        seed,
        ...contender,
        recorded,
        bytes,
        driverBytes,
        ms: seconds * 1000,
        callsToAmortise,
      });
    }
    for (const block of missing) {
      const timings: Timing[] = [];
      for (const contender of order(contenders.length, block)) {
        const runs = contenders[contender] as Contender;
        const ms = await timeRequest(sessionOf(runs) as Session, cell, runs, steps, signal);
        timings.push({ contender, ms });
      }
      record.runs.push({ cell: at, seed, block, timings });
      await keep();
    }
  } finally {
    for (const session of sessions.values()) session.dispose();
  }
}

/** Recording's time over what a replayed request saves beside the same request without graphs. */
async function amortise(
  session: Session,
  cell: Cell,
  contender: Contender,
  signal: AbortSignal,
): Promise<number | null> {
  const { batch, capacity, precision, model } = session;
  const steps = cell.steps.at(-1) as number;
  using eager = model.session({ batch, capacity, precision, graphs: false });
  await timeRequest(eager, cell, contender, steps, signal);
  const without = (await timeRequest(eager, cell, contender, steps, signal)).at(-1) as number;
  const replayed = (await timeRequest(session, cell, contender, steps, signal)).at(-1) as number;
  return without > replayed ? Math.ceil((session.graphs.seconds * 1000) / (without - replayed)) : null;
}

export interface SummaryRow extends Contender {
  readonly batch: number;
  readonly prompt: number;
  readonly steps: number;
  readonly prefillMs: number;
  readonly requestMs: number;
  /** Per step, over the request. */
  readonly stepMs: number;
  /** Geometric mean over blocks and seeds of this request's time over the first contender's of the same precision. */
  readonly ratio: number;
  readonly measurements: number;
}

/** Medians, and ratios paired within blocks, of every shape that has been measured. */
export function summarise({ cells, contenders, runs }: LatencyRecord): SummaryRow[] {
  return cells.flatMap((cell, cellIndex) => {
    const blocks = runs.filter((run) => run.cell === cellIndex);
    if (blocks.length === 0) return [];
    const at = (contender: number, step: number) =>
      blocks.map(({ timings }) => timings.find((timing) => timing.contender === contender)?.ms[step]);
    return cell.steps.flatMap((steps) =>
      contenders.map((contender, index) => {
        const reference = contenders.findIndex(({ precision }) => precision === contender.precision);
        const request = at(index, steps) as number[];
        const prefill = at(index, 0) as number[];
        return {
          ...contender,
          batch: cell.batch,
          prompt: cell.prompt,
          steps,
          prefillMs: median(prefill),
          requestMs: median(request),
          stepMs: median(request.map((ms, block) => (ms - (prefill[block] as number)) / steps)),
          ratio: pairedRatio(request, at(reference, steps)),
          measurements: blocks.length,
        };
      }),
    );
  });
}
