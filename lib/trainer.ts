import { randomUUID } from 'node:crypto';
import { join } from 'node:path';

import {
  checkBoolean,
  checkCallOptions,
  checkDirectory,
  checkInteger,
  checkNumber,
  checkOptions,
  checkPrecision,
  checkTargetBatch,
  show,
  type TargetBatch,
} from './arguments.js';
import { openCheckpoint, readJson, writeCheckpoint, writeJson } from './checkpoint.js';
import type { Device } from './device.js';
import { openCurrent } from './directory.js';
import { DuokvError } from './errors.js';
import { Group } from './group.js';
import { checkDevice, Model } from './model.js';
import { callEngine, callNow, type NativeBatch, type NativeTrainer, type PrecisionName } from './native.js';
import { SafetensorsFile, writeSafetensors } from './safetensors.js';

/** What a process's place among others asks for; no part of the training itself, so a checkpoint does not hold it. */
export interface RankOptions {
  /**
   * The ranks that train together (default: this process alone). Every rank passes its own rows of each global batch,
   * in any number and any microbatch, and makes the calls `step`, `gradients` and `save` of its trainer in the order in
   * which the others make them.
   */
  readonly group?: Group;
  /** Bytes of gradients that the ranks sum at once (default 25 MiB); the same on all. */
  readonly bucketBytes?: number;
}

export interface TrainerOptions extends RankOptions {
  /** Default `fp32`. */
  readonly precision?: PrecisionName;
  /**
   * AdamW with decoupled weight decay on all parameters. Defaults: lr 3e-4 (the peak), betas [0.9, 0.95], eps
   * 1e-8, weightDecay 0.1.
   */
  readonly optimizer?: {
    readonly lr?: number;
    readonly betas?: readonly [number, number];
    readonly eps?: number;
    readonly weightDecay?: number;
  };
  /**
   * `lr * s / warmup` up to update `warmup`, then cosine to `finalFraction * lr` (default 0.1) at update `total`. Without
   * `total` the rate stays at its peak.
   */
  readonly schedule?: { readonly warmup?: number; readonly total?: number; readonly finalFraction?: number };
  /** Gradients are scaled to at most this L2 norm over all parameters (default 1); 0: not at all. */
  readonly clipNorm?: number;
  /** Rows of one forward and backward pass (default 1). Any number gives the same gradient to rounding. */
  readonly microbatch?: number;
  /**
   * Activation checkpointing: of every layer keep only its input, and rerun it in the backward pass. Less
   * memory, the same bits, a slower step (default false).
   */
  readonly recompute?: boolean;
}

/** The options with every default filled in. */
export interface ResolvedTrainerOptions {
  readonly precision: PrecisionName;
  readonly optimizer: {
    readonly lr: number;
    readonly betas: readonly [number, number];
    readonly eps: number;
    readonly weightDecay: number;
  };
  readonly schedule: { readonly warmup: number; readonly total: number; readonly finalFraction: number };
  readonly clipNorm: number;
  readonly microbatch: number;
  readonly recompute: boolean;
}

export interface GradientResult {
  /** Mean cross-entropy over the valid targets of the whole batch, in nats. */
  readonly loss: number;
  readonly validTargets: number;
  /** L2 over all parameters, before clipping. */
  readonly gradNorm: number;
  /** By parameter name, in the parameter's shape, before clipping. */
  readonly gradients: Map<string, Float32Array>;
}

export interface StepResult {
  /** Number of this update, from 1. */
  readonly update: number;
  /** Before the update. */
  readonly loss: number;
  readonly gradNorm: number;
  readonly learningRate: number;
  readonly validTargets: number;
  readonly tokens: number;
  readonly seconds: number;
}

const STATE_FILE = 'trainer.json';
const MOMENTS_FILE = 'trainer.safetensors';
const FORMAT = 1;

const OPTIONS = ['precision', 'optimizer', 'schedule', 'clipNorm', 'microbatch', 'recompute'];
const BUCKET_BYTES = 25 * 2 ** 20;

function checkRankOptions({ group, bucketBytes = BUCKET_BYTES }: RankOptions): number {
  if (group !== undefined && !(group instanceof Group)) {
    throw new DuokvError('ERR_ARGUMENT', `group must be a Group, not ${show(group)}`);
  }
  checkInteger(bucketBytes, 'bucketBytes', 4);
  return bucketBytes;
}

function resolveOptions(options: unknown): ResolvedTrainerOptions {
  checkOptions(options, 'options', OPTIONS);
  const {
    precision = 'fp32',
    optimizer = {},
    schedule = {},
    clipNorm = 1,
    microbatch = 1,
    recompute = false,
  } = options as TrainerOptions;
  checkPrecision(precision);
  checkOptions(optimizer, 'optimizer', ['lr', 'betas', 'eps', 'weightDecay']);
  const { lr = 3e-4, betas = [0.9, 0.95], eps = 1e-8, weightDecay = 0.1 } = optimizer;
  checkNumber(lr, 'optimizer.lr', { least: 0 });
  if (!Array.isArray(betas) || betas.length !== 2) {
    throw new DuokvError(
      'ERR_ARGUMENT',
      `optimizer.betas must be an array of two numbers, not ${show(betas)}`,
    );
  }
  const [beta1, beta2] = betas as [number, number];
  for (const [i, beta] of [beta1, beta2].entries()) {
    checkNumber(beta, `optimizer.betas[${i}]`, { least: 0, most: 1 - Number.EPSILON });
  }
  checkNumber(eps, 'optimizer.eps', { least: 0, open: true });
  checkNumber(weightDecay, 'optimizer.weightDecay', { least: 0 });
  checkOptions(schedule, 'schedule', ['warmup', 'total', 'finalFraction']);
  const { warmup = 0, total = 0, finalFraction = 0.1 } = schedule;
  checkInteger(warmup, 'schedule.warmup', 0);
  checkInteger(total, 'schedule.total', 0);
  if (total > 0 && warmup > total) {
    throw new DuokvError(
      'ERR_ARGUMENT',
      `schedule.warmup is ${warmup}; it must be at most schedule.total, which is ${total}`,
    );
  }
  checkNumber(finalFraction, 'schedule.finalFraction', { least: 0, most: 1 });
  checkNumber(clipNorm, 'clipNorm', { least: 0 });
  checkInteger(microbatch, 'microbatch', 1);
  checkBoolean(recompute, 'recompute');
  return {
    precision,
    optimizer: { lr, betas: [beta1, beta2], eps, weightDecay },
    schedule: { warmup, total, finalFraction },
    clipNorm,
    microbatch,
    recompute,
  };
}

/**
 * Trains a model: gradients of the mean loss over a global batch, clipping, AdamW, schedule. Made by
 * `model.trainer`.
 */
export class Trainer implements Disposable {
  readonly model: Model;
  readonly options: ResolvedTrainerOptions;
  readonly #native: NativeTrainer;
  /** Undefined: one rank. */
  readonly #group: Group | undefined;

  private constructor(
    model: Model,
    options: ResolvedTrainerOptions,
    trainer: NativeTrainer,
    group: Group | undefined,
  ) {
    this.model = model;
    this.options = options;
    this.#native = trainer;
    this.#group = group;
  }

  /** @internal */
  static of(model: Model, given: TrainerOptions): Trainer {
    checkOptions(given, 'options', [...OPTIONS, 'group', 'bucketBytes']);
    const { group, bucketBytes, ...training } = given;
    const options = resolveOptions(training);
    const bucket = checkRankOptions(given);
    const { precision, optimizer, schedule, clipNorm, microbatch, recompute } = options;
    const { lr, betas, eps, weightDecay } = optimizer;
    const { trainer, ready } = callNow(() =>
      model.native.createTrainer(
        {
          precision,
          lr,
          beta1: betas[0],
          beta2: betas[1],
          eps,
          weightDecay,
          ...schedule,
          clipNorm,
          microbatch,
          recompute,
          bucketBytes: bucket,
        },
        group?.native,
      ),
    );
    // Every later call rejects with the same error.
    ready.catch(() => {});
    return new Trainer(model, options, trainer, group !== undefined && group.size > 1 ? group : undefined);
  }

  /** Updates done. */
  get update(): number {
    return this.#native.update;
  }

  /** Bytes of gradients, moments and work space, as the last call left them. */
  get bytes(): number {
    return this.#native.bytes;
  }

  get disposed(): boolean {
    return this.#native.disposed;
  }

  #batch(batch: TargetBatch): NativeBatch {
    const { rows, tokens, documentIds, targets, targetDocumentIds } = checkTargetBatch(
      batch,
      this.model.config,
    );
    return {
      rows,
      tokens: tokens.slice(),
      documentIds: documentIds?.slice(),
      targets: targets.slice(),
      targetDocumentIds: targetDocumentIds?.slice(),
    };
  }

  /** Makes a call with what was given, checked and copied. Where it cannot be used, the ranks that wait for this one learn so. */
  async #call<T>(
    batch: TargetBatch,
    options: { readonly signal?: AbortSignal },
    call: (input: NativeBatch) => Promise<T>,
  ): Promise<T> {
    let input: NativeBatch;
    try {
      checkCallOptions(options, ['signal']);
      if (options.signal !== undefined && this.#group !== undefined) {
        throw new DuokvError(
          'ERR_ARGUMENT',
          'options.signal: one rank cannot abort a call that all make; agree through group.sum to make no more',
        );
      }
      input = this.#batch(batch);
    } catch (error) {
      if (this.#group !== undefined) {
        await this.model.lane.run(() => callEngine(() => this.#native.refuse()));
      }
      throw error;
    }
    return call(input);
  }

  /**
   * Gradients of the mean loss over the valid targets of the whole batch; no update. Errors: `ERR_SHAPE`,
   * `ERR_TOKEN_RANGE`, `ERR_DOCUMENT_IDS`, `ERR_NO_TARGETS`, `ERR_DEVICE_MEMORY`, `ERR_DISPOSED`,
   * `ERR_DISTRIBUTED`; rejects with the signal's reason. With several ranks there is no signal.
   *
   * @example
   * const { loss, gradients } = await trainer.gradients(batch);
   */
  async gradients(
    batch: TargetBatch,
    options: { readonly signal?: AbortSignal } = {},
  ): Promise<GradientResult> {
    return this.#call(batch, options, (input) =>
      this.model.lane.exclusive(async () => {
        const result = await callEngine(
          (cancellation) => this.#native.gradients(input, cancellation),
          options.signal,
        );
        const gradients = new Map<string, Float32Array>();
        // One call each: allocating all of them at once would keep the event loop waiting.
        for (const { name } of this.model.plan.parameters) {
          gradients.set(name, await callEngine(() => this.#native.readState('gradient', name)));
        }
        return { ...result, gradients };
      }),
    );
  }

  /**
   * One update from one global batch. A step that fails or is aborted changes nothing. Errors: as
   * `gradients`, and `ERR_NOT_FINITE`. With several ranks, results are those of all ranks' rows, and the first
   * step checks that all end with the same parameters.
   *
   * @example
   * const { update, loss } = await trainer.step(batch, { signal });
   */
  async step(batch: TargetBatch, options: { readonly signal?: AbortSignal } = {}): Promise<StepResult> {
    return this.#call(batch, options, (input) =>
      this.model.lane.run(() =>
        callEngine((cancellation) => this.#native.step(input, cancellation), options.signal),
      ),
    );
  }

  /**
   * Writes model, moments, options and the number of updates to a directory that `Trainer.resume` continues
   * from bit for bit, and that `Model.load` reads as well. Crash-safe as `model.save`; steps called meanwhile
   * wait. With several ranks, rank 0 writes once all are seen to hold the same parameters (else
   * `ERR_DISTRIBUTED`), and every rank's call resolves when it has.
   *
   * @example
   * await trainer.save('checkpoints/latest');
   */
  async save(directory: string): Promise<void> {
    checkDirectory(directory);
    return this.model.lane.exclusive(() =>
      this.#group === undefined ? this.#write(directory) : this.#writeOnRank0(directory, this.#group),
    );
  }

  async #writeOnRank0(directory: string, group: Group): Promise<void> {
    await callEngine(() => this.#native.checkRanks());
    let failure: unknown;
    if (group.rank === 0) {
      await this.#write(directory).catch((error: unknown) => {
        failure = error;
      });
    }
    const [failures] = await group.sum([failure === undefined ? 0 : 1]);
    if (failure !== undefined) throw failure;
    if (failures !== 0) throw new DuokvError('ERR_DISTRIBUTED', `rank 0 could not write ${directory}`);
  }

  async #write(directory: string): Promise<void> {
    const { plan, native } = this.model;
    // Ties the files of one save together: a model saved over another's leaves moments that are not its own.
    const save = randomUUID();
    const moments = (['m', 'v'] as const).flatMap((kind) =>
      plan.parameters.map(({ name, shape }) => ({
        name: `${kind}.${name}`,
        shape,
        dtype: 'F32' as const,
        data: () => callEngine(() => this.#native.readState(kind, name)),
      })),
    );
    await writeCheckpoint(directory, plan, (name) => callEngine(() => native.readTensor(name)), {
      metadata: { 'duokv.save': save },
      belongs: (name) => name === STATE_FILE || name === MOMENTS_FILE,
      write: async (staging) => {
        await writeSafetensors(join(staging, MOMENTS_FILE), moments, { 'duokv.save': save });
        // Only now, as the steps called before this save have run by the time that a tensor was read.
        const state = { format: FORMAT, save, update: this.update, options: this.options };
        await writeJson(join(staging, STATE_FILE), state);
      },
    });
  }

  /**
   * Loads what `trainer.save` wrote: a new model (`trainer.model`) and its trainer. Continuing gives the bits
   * that an uninterrupted run gives on the same machine, thread count and number of ranks; another number of
   * ranks continues it to rounding. Every rank loads it. Errors: `ERR_CHECKPOINT`, `ERR_DEVICE_MEMORY`,
   * `ERR_DISTRIBUTED`.
   *
   * @example
   * using trainer = await Trainer.resume(device, 'checkpoints/latest');
   */
  static async resume(device: Device, directory: string, ranks: RankOptions = {}): Promise<Trainer> {
    checkDevice(device);
    checkDirectory(directory);
    checkOptions(ranks, 'ranks', ['group', 'bucketBytes']);
    checkRankOptions(ranks);
    const { save, update, options } = await openCurrent(directory, STATE_FILE, readState);
    await using checkpoint = await openCheckpoint(directory);
    await using moments = await openCurrent(directory, MOMENTS_FILE, (path) => SafetensorsFile.open(path));
    for (const { file, metadata } of [checkpoint, { file: moments.path, metadata: moments.metadata }]) {
      if (metadata['duokv.save'] !== save) {
        throw new DuokvError(
          'ERR_CHECKPOINT',
          `${file}: was not written by the same save as ${STATE_FILE} beside it`,
        );
      }
    }
    const { parameters } = checkpoint.plan;
    for (const kind of ['m', 'v'] as const) {
      for (const { name, shape } of parameters) {
        const found = moments.tensors.get(`${kind}.${name}`)?.shape.join(', ');
        if (found !== undefined && found !== shape.join(', ')) {
          throw new DuokvError(
            'ERR_CHECKPOINT',
            `${moments.path}: tensor "${kind}.${name}": shape [${found}], expected [${shape.join(', ')}]`,
          );
        }
      }
    }
    const model = await Model.of(device, checkpoint);
    try {
      const trainer = Trainer.of(model, { ...options, ...ranks });
      for (const kind of ['m', 'v'] as const) {
        for (const { name } of parameters) {
          const values = await moments.readFloat32(`${kind}.${name}`);
          await callEngine(() => trainer.#native.writeState(kind, name, values));
        }
      }
      await callEngine(() => trainer.#native.setUpdate(update));
      return trainer;
    } catch (error) {
      model.dispose();
      throw error;
    }
  }

  /** Frees gradients and moments; the model stays. Idempotent. */
  dispose(): void {
    this.#native.dispose();
  }

  [Symbol.dispose](): void {
    this.dispose();
  }
}

async function readState(
  path: string,
): Promise<{ save: string; update: number; options: ResolvedTrainerOptions }> {
  const { format, save, update, options } = await readJson(path);
  const fail = (message: string) => new DuokvError('ERR_CHECKPOINT', `${path}: ${message}`);
  if (format !== FORMAT) throw fail(`format is ${show(format)}; this version reads ${FORMAT}`);
  if (typeof save !== 'string') throw fail(`save is ${show(save)}; it must be a string`);
  if (!Number.isSafeInteger(update) || (update as number) < 0)
    throw fail(`update is ${show(update)}; it must be a count`);
  try {
    return { save, update: update as number, options: resolveOptions(options) };
  } catch (error) {
    throw fail((error as Error).message);
  }
}
