// What `duokv bench` times.

import type { Device } from '../device.js';
import { Model } from '../model.js';
import type { PrecisionName } from '../native.js';
import type { Session } from '../session.js';
import { possibleRoutes, presetConfig } from './model-config.js';
import { syntheticTokens } from './synthetic-tokens.js';

export const MEASUREMENTS = ['prefill', 'decode', 'generate', 'request', 'train'] as const;
export type Measurement = (typeof MEASUREMENTS)[number];

/** Those whose steps take turns, a few at a time. */
export const STEPPED: readonly Measurement[] = ['decode', 'generate'];

/** One line of the table. */
export interface Case {
  readonly engine: 'duokv' | 'peer';
  readonly measure: Measurement;
  readonly design: string;
  readonly route: string | null;
  readonly batch: number;
}

/** What is repeated in one go: gives the milliseconds of each case, set-up not included. */
export interface Work {
  readonly cases: readonly Case[];
  run(signal: AbortSignal): Promise<number[]>;
}

export interface WorkOptions {
  designs: readonly string[];
  measure: readonly Measurement[];
  routes: readonly string[];
  batch: readonly number[];
  length: number;
  trainLength: number;
  steps: number;
  precision: PrecisionName;
}

/** Decode steps of one case before the next one's. */
const STEPS_IN_TURN = 4;

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

/** A case of many steps of all its rows, after their prompts. */
interface Stepped {
  readonly case: Case;
  begin(signal: AbortSignal): Promise<unknown>;
  step(signal: AbortSignal): Promise<unknown>;
}

/** Steps by `session.decode`, of the same tokens. */
function decoding(made: Case, session: Session, prompt: Int32Array): Stepped {
  const tokens = prompt.slice(0, made.batch);
  return {
    case: made,
    async begin(signal) {
      await session.reset();
      await session.prefill({ tokens: prompt }, { signal });
    },
    step: (signal) => session.decode({ tokens }, { signal }),
  };
}

/** Steps of one generator a row, each token drawn by temperature and top-p. */
function generating(made: Case, session: Session, prompt: Int32Array, steps: number): Stepped {
  const length = prompt.length / made.batch;
  let generators: AsyncGenerator<unknown>[] = [];
  const step = () => Promise.all(generators.map((generator) => generator.next()));
  return {
    case: made,
    async begin(signal) {
      await session.reset();
      generators = Array.from({ length: made.batch }, (_, row) =>
        session.generate({
          prompt: prompt.subarray(row * length, (row + 1) * length),
          ...{ row, seed: row, maxTokens: steps + 1, temperature: 0.8, topP: 0.95, signal },
        }),
      );
      await step();
    },
    step,
  };
}

/**
 * Steps of all cases by turns, a few at a time: what else the machine does changes within seconds, and so touches all of them.
 * `beforeTurns` is awaited whenever all have had as many.
 */
function steppedWork(
  all: readonly Stepped[],
  steps: number,
  beforeTurns: (signal: AbortSignal) => Promise<void>,
): Work {
  return {
    cases: all.map((stepped) => stepped.case),
    async run(signal) {
      for (const stepped of all) await stepped.begin(signal);
      const total = all.map(() => 0);
      for (let done = 0; done < steps; done += STEPS_IN_TURN) {
        await beforeTurns(signal);
        const count = Math.min(STEPS_IN_TURN, steps - done);
        for (let turn = 0; turn < all.length; turn++) {
          const index = (turn + done / STEPS_IN_TURN) % all.length;
          const stepped = all[index] as Stepped;
          total[index] += await timed(async () => {
            for (let step = 0; step < count; step++) await stepped.step(signal);
          });
        }
      }
      return total.map((ms) => ms / steps);
    },
  };
}

/**
 * The work asked for, and its cases by design, batch and measure. The cases of a design share a model, and training has one of
 * its own so that packed serving weights stay. Everything here lives until the device closes.
 */
export async function prepareWork(
  device: Device,
  options: WorkOptions,
  beforeTurns: (signal: AbortSignal) => Promise<void>,
): Promise<{ works: Work[]; cases: Case[]; parameters: Map<string, number> }> {
  const { length, precision, steps, trainLength, measure } = options;
  const works: Work[] = [];
  const cases: Case[] = [];
  const stepped: Stepped[] = [];
  const parameters = new Map<string, number>();
  for (const design of options.designs) {
    const config = presetConfig(design);
    const routes = possibleRoutes(design, options.routes);
    const model = await Model.create(device, config, { seed: 0 });
    parameters.set(design, model.parameterCount);
    const trained = measure.includes('train') ? await Model.create(device, config, { seed: 0 }) : undefined;
    const trainer = trained?.trainer({ precision, microbatch: 1 });
    for (const batch of options.batch) {
      let made: Int32Array | undefined;
      const prompt = () => {
        made ??= syntheticTokens(batch * length, config.vocab);
        return made;
      };
      // What the device cannot hold is refused before its tokens are made.
      const open = async (capacity: number): Promise<Session> => {
        const session = model.session({ batch, capacity, precision });
        await session.ready;
        return session;
      };
      const add = (what: Measurement, route: string | null): Case => {
        const timedCase = { engine: 'duokv', measure: what, design, route, batch } as const;
        cases.push(timedCase);
        return timedCase;
      };
      const alone = (made: Case, run: (signal: AbortSignal) => Promise<number>) =>
        works.push({ cases: [made], run: async (signal) => [await run(signal)] });
      if (measure.includes('prefill')) {
        const session = await open(length);
        const tokens = prompt();
        for (const route of routes) {
          alone(add('prefill', route), async (signal) => {
            await session.reset();
            return timed(() => session.prefill({ tokens, schedule: route as 'exact' }, { signal }));
          });
        }
      }
      if (measure.includes('decode')) {
        stepped.push(decoding(add('decode', null), await open(length + steps), prompt()));
      }
      if (measure.includes('generate')) {
        stepped.push(generating(add('generate', null), await open(length + steps), prompt(), steps));
      }
      if (measure.includes('request')) {
        const session = await open(length + steps);
        const tokens = prompt();
        const next = tokens.slice(0, batch);
        for (const route of routes) {
          alone(add('request', route), async (signal) => {
            await session.reset();
            return timed(async () => {
              await session.prefill({ tokens, schedule: route as 'exact' }, { signal });
              for (let step = 0; step < steps; step++) await session.decode({ tokens: next }, { signal });
            });
          });
        }
      }
      if (trainer !== undefined) {
        const trainingBatch = syntheticBatch(batch, trainLength, config.vocab);
        alone(add('train', null), (signal) => timed(() => trainer.step(trainingBatch, { signal })));
      }
    }
  }
  if (stepped.length > 0) works.push(steppedWork(stepped, steps, beforeTurns));
  return { works, cases, parameters };
}
