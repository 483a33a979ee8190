import {
  checkBoolean,
  checkInteger,
  checkOptions,
  checkPrecision,
  checkSchedule,
  type Schedule,
} from './arguments.js';
import type { ModelConfig } from './config.js';
import type { Device } from './device.js';
import { DuokvError } from './errors.js';
import { callEngine, type MemoryPrediction, type PrecisionName } from './native.js';

export type { MemoryPrediction } from './native.js';

/** What memory is predicted for; `precision` is `fp32` by default. */
export type MemoryProgram =
  /** A trainer that has done a step on `rows` x `length` tokens. `microbatch` (1), `recompute` (false): as in `model.trainer`. */
  | {
      readonly training: {
        readonly rows: number;
        readonly length: number;
        readonly microbatch?: number;
        readonly recompute?: boolean;
        readonly precision?: PrecisionName;
      };
    }
  /**
   * A session whose `batch` (1) rows were prefilled with `prompt` tokens in one call, and decoded to the end of their
   * `capacity`. `schedule` (`exact`), `graphs` (true): as in `session.prefill` and `model.session`.
   */
  | {
      readonly serving: {
        readonly batch?: number;
        readonly capacity: number;
        readonly prompt: number;
        readonly schedule?: Schedule;
        readonly graphs?: boolean;
        readonly precision?: PrecisionName;
      };
    }
  /** `model.score` of rows of `length` tokens. */
  | { readonly scoring: { readonly length: number; readonly precision?: PrecisionName } };

const LONGEST = 2 ** 31 - 2;

/** The program as the addon takes it. */
function checkProgram(program: MemoryProgram): object {
  checkOptions(program, 'program', ['training', 'serving', 'scoring']);
  const [kind, ...more] = Object.keys(program);
  if (kind === undefined || more.length > 0)
    throw new DuokvError('ERR_ARGUMENT', 'program needs one of training, serving, scoring');
  if ('training' in program) {
    checkOptions(program.training, kind, ['rows', 'length', 'microbatch', 'recompute', 'precision']);
    const { rows, length, microbatch = 1, recompute = false, precision = 'fp32' } = program.training;
    checkInteger(rows, 'training.rows', 1, LONGEST);
    checkInteger(length, 'training.length', 1, LONGEST);
    checkInteger(microbatch, 'training.microbatch', 1, LONGEST);
    checkBoolean(recompute, 'training.recompute');
    checkPrecision(precision);
    return { kind, rows, length, microbatch, recompute, precision };
  }
  if ('serving' in program) {
    const keys = ['batch', 'capacity', 'prompt', 'schedule', 'graphs', 'precision'];
    checkOptions(program.serving, kind, keys);
    const { batch = 1, capacity, prompt, schedule = 'exact', graphs = true } = program.serving;
    const { precision = 'fp32' } = program.serving;
    checkInteger(batch, 'serving.batch', 1, LONGEST);
    checkInteger(capacity, 'serving.capacity', 1, LONGEST);
    checkInteger(prompt, 'serving.prompt', 1, capacity);
    checkBoolean(graphs, 'serving.graphs');
    checkPrecision(precision);
    const { route, suffix } = checkSchedule(schedule);
    return { kind, batch, capacity, prompt, schedule: route, suffix, graphs, precision };
  }
  checkOptions(program.scoring, kind, ['length', 'precision']);
  const { length, precision = 'fp32' } = program.scoring;
  checkInteger(length, 'scoring.length', 1, LONGEST);
  checkPrecision(precision);
  return { kind, length, precision };
}

/**
 * The device memory that a program takes at its peak, in bytes: what `device.info().memory.peak` says after it on a
 * device that runs nothing else. The program itself runs, on a twin of the device that computes nothing and allocates
 * nothing, so every design, precision and backend is predicted by the code that will run. Documents are taken to
 * fill their rows, which takes the most.
 *
 * `parts`: `parameters`, `gradients`, `AdamW first moments`, `AdamW second moments`, `key-value cache`, `document ids`,
 * `rotary table`, `packed weights` (copies that the backend keeps for serving), `workspace` (activations, staged cache
 * entries, logits), `inputs` (tokens, positions, descriptors), `graphs` (workspaces and inputs of the passes that a
 * session records: of the prefill alone where `capacity` is `prompt`, else of every decode step too), `scratch` (what
 * operations hold for themselves). What the driver takes for a recorded graph is not among them, since it says so to
 * nobody: `session.graphs.driverBytes` is a measurement. Errors: `ERR_CONFIG`, `ERR_ARGUMENT`.
 *
 * @example
 * const { total } = await predictMemory(device, presets.localHistory126M(), { training: { rows: 1, length: 2048 } });
 */
export async function predictMemory(
  device: Device,
  config: ModelConfig,
  program: MemoryProgram,
): Promise<MemoryPrediction> {
  const checked = checkProgram(program);
  return callEngine(() => device.native.predictMemory(config, checked));
}
