import {
  checkCallOptions,
  checkDirectory,
  checkFloats,
  checkOptions,
  checkTargetBatch,
  checkTokenBatch,
  type DocumentRun,
  documentRuns,
  show,
  type TargetBatch,
  type TokenBatch,
} from './arguments.js';
import { type OpenCheckpoint, openCheckpoint, writeCheckpoint } from './checkpoint.js';
import type { ModelConfig } from './config.js';
import { Device } from './device.js';
import { DuokvError } from './errors.js';
import { Lane } from './lane.js';
import { callEngine, type DesignPlan, type NativeModel, type PrecisionName } from './native.js';
import { designPlan } from './plan.js';
import { Session, type SessionOptions } from './session.js';
import { Trainer, type TrainerOptions } from './trainer.js';

export interface CallOptions {
  /** Default `fp32`. */
  readonly precision?: PrecisionName;
  readonly signal?: AbortSignal;
}

export interface DocumentScore {
  readonly row: number;
  readonly id: bigint;
  /** Sum over the document's valid targets, in nats, FP64. */
  readonly nll: number;
  /** Valid targets. */
  readonly targets: number;
}

export interface Score {
  /** Every document of every row in order, also those without a valid target. */
  readonly documents: DocumentScore[];
  readonly totalNll: number;
  readonly totalTargets: number;
  /** `[R, T]` cross-entropies in nats at every position, whether its target is valid or not. */
  readonly tokenNll: Float32Array;
}

export function seedText(seed: unknown): string {
  const whole = typeof seed === 'bigint' || Number.isSafeInteger(seed);
  if (!whole || (seed as number | bigint) < 0) {
    throw new DuokvError('ERR_ARGUMENT', `seed is ${show(seed)}; it must be an integer of at least 0`);
  }
  return String(seed);
}

export function checkDevice(device: unknown): asserts device is Device {
  if (!(device instanceof Device))
    throw new DuokvError('ERR_ARGUMENT', `device must be a Device, not ${show(device)}`);
}

/**
 * A model's FP32 parameters on a device. Calls on one model run in the order in which they are made; dispose
 * it, or the device, to free its memory.
 */
export class Model implements Disposable {
  readonly device: Device;
  /** The config with every key that applies to it. */
  readonly config: ModelConfig;
  readonly plan: DesignPlan;
  /** @internal */
  readonly native: NativeModel;
  /** @internal */
  readonly lane = new Lane();

  private constructor(device: Device, plan: DesignPlan, model: NativeModel) {
    this.device = device;
    this.plan = plan;
    this.config = plan.config;
    this.native = model;
  }

  /**
   * A new model, its parameters drawn from `seed` and each tensor's name (architecture section 6): equal
   * tensors of two designs start bit-identical. Errors: `ERR_CONFIG`, `ERR_DEVICE_MEMORY`, `ERR_DISPOSED`.
   *
   * @example
   * const model = await Model.create(device, presets.localHistory126M(), { seed: 17 });
   */
  static async create(
    device: Device,
    config: ModelConfig,
    options: { readonly seed?: number | bigint } = {},
  ): Promise<Model> {
    checkDevice(device);
    checkOptions(options, 'options', ['seed']);
    const seed = seedText(options.seed ?? 0);
    const plan = designPlan(config);
    return new Model(device, plan, await callEngine(() => device.native.createModel(plan.config, seed)));
  }

  /**
   * Reads a checkpoint directory: config.json and model.safetensors or its shards, F32, BF16 or F16 under
   * Hugging Face names. A directory of a tied `LlamaForCausalLM` loads as well. Errors: `ERR_CHECKPOINT`
   * naming the file and the tensor with its expected and found shape, `ERR_DEVICE_MEMORY`.
   *
   * @example
   * using model = await Model.load(device, 'runs/docs/checkpoint');
   */
  static async load(device: Device, directory: string): Promise<Model> {
    checkDevice(device);
    checkDirectory(directory);
    await using checkpoint = await openCheckpoint(directory);
    return await Model.of(device, checkpoint);
  }

  /** @internal */
  static async of(device: Device, { plan, read }: OpenCheckpoint): Promise<Model> {
    const model = new Model(device, plan, await callEngine(() => device.native.createModel(plan.config, '')));
    try {
      for (const { name } of plan.parameters) {
        const values = await read(name);
        await callEngine(() => model.native.writeTensor(name, values));
      }
    } catch (error) {
      model.dispose();
      throw error;
    }
    return model;
  }

  get parameterCount(): number {
    return this.plan.parameterCount;
  }

  /** Bytes on the device: parameters, tables, and packed copies as the last call left them. */
  get bytes(): number {
    return this.native.bytes;
  }

  get disposed(): boolean {
    return this.native.disposed;
  }

  #elementsOf(name: unknown): number {
    const parameter = this.plan.parameters.find((candidate) => candidate.name === name);
    if (parameter === undefined)
      throw new DuokvError('ERR_TENSOR_NAME', `the model has no tensor ${show(name)}`);
    return parameter.elements;
  }

  /**
   * A copy of a parameter, row-major as its checkpoint has it. Errors: `ERR_TENSOR_NAME`, `ERR_DISPOSED`.
   *
   * @example
   * const embedding = await model.readTensor('model.embed_tokens.weight'); // [vocab, hidden]
   */
  async readTensor(name: string): Promise<Float32Array> {
    this.#elementsOf(name);
    return this.lane.run(() => callEngine(() => this.native.readTensor(name)));
  }

  /**
   * Overwrites a parameter with a copy of `values`. Errors: `ERR_TENSOR_NAME`, `ERR_SHAPE`, `ERR_ARGUMENT`,
   * `ERR_DISPOSED`.
   *
   * @example
   * await model.writeTensor('model.norm.weight', new Float32Array(model.config.hidden).fill(1));
   */
  async writeTensor(name: string, values: Float32Array): Promise<void> {
    const elements = this.#elementsOf(name);
    const copy = checkFloats(values, 'values').slice();
    if (copy.length !== elements) {
      throw new DuokvError(
        'ERR_SHAPE',
        `values has ${copy.length} elements, tensor ${show(name)} has ${elements}`,
      );
    }
    return this.lane.run(() => callEngine(() => this.native.writeTensor(name, copy)));
  }

  /**
   * Logits of every position, `[R, T, V]` FP32, for qualification. Errors: `ERR_SHAPE`, `ERR_TOKEN_RANGE`,
   * `ERR_DOCUMENT_IDS`, `ERR_DEVICE_MEMORY`, `ERR_DISPOSED`; rejects with the signal's reason.
   *
   * @example
   * const logits = await model.logits({ tokens: Int32Array.of(1, 2, 3), rows: 1 });
   */
  async logits(batch: TokenBatch, options: CallOptions = {}): Promise<Float32Array> {
    checkCallOptions(options, ['precision', 'signal']);
    const { precision = 'fp32', signal } = options;
    const { rows, tokens, documentIds } = checkTokenBatch(batch, this.config);
    const input = { rows, tokens: tokens.slice(), documentIds: documentIds?.slice() };
    return this.lane.run(() =>
      callEngine((cancellation) => this.native.logits(input, precision, cancellation), signal),
    );
  }

  /**
   * Cross-entropy of every target: FP32 per token, FP64 sums per document and in all, in nats (protocols
   * section 3). A target is valid when its document is its input's. Errors: as `logits`, and
   * `ERR_NO_TARGETS`.
   *
   * @example
   * const { totalNll, totalTargets } = await model.score(batch, { precision: 'bf16-tf32x3' });
   */
  async score(batch: TargetBatch, options: CallOptions = {}): Promise<Score> {
    checkCallOptions(options, ['precision', 'signal']);
    const { precision = 'fp32', signal } = options;
    const checked = checkTargetBatch(batch, this.config);
    const { rows, length, targets } = checked;
    const tokens = checked.tokens.slice();
    const documentIds = checked.documentIds?.slice();
    const targetDocumentIds = checked.targetDocumentIds?.slice();
    const input = { rows, tokens, documentIds, targets: targets.slice(), targetDocumentIds };
    const tokenNll = await this.lane.run(() =>
      callEngine((cancellation) => this.native.tokenNll(input, precision, cancellation), signal),
    );
    const documents: DocumentScore[] = [];
    for (let row = 0; row < rows; row++) {
      const runs: DocumentRun[] =
        documentIds === undefined
          ? [{ id: 0n, begin: 0, end: length }]
          : documentRuns(documentIds, row, length, 'documentIds');
      for (const { id, begin, end } of runs) {
        let nll = 0;
        let valid = 0;
        for (let i = row * length + begin; i < row * length + end; i++) {
          if (targetDocumentIds !== undefined && targetDocumentIds[i] !== id) continue;
          nll += tokenNll[i] as number;
          valid++;
        }
        documents.push({ row, id, nll, targets: valid });
      }
    }
    return {
      documents,
      totalNll: documents.reduce((sum, { nll }) => sum + nll, 0),
      totalTargets: checked.validTargets,
      tokenNll,
    };
  }

  /**
   * A trainer of this model: gradients and both AdamW moments, allocated on the engine thread. Errors:
   * `ERR_ARGUMENT`, `ERR_DISPOSED`; a lack of memory rejects the trainer's first call.
   *
   * @example
   * using trainer = model.trainer({ precision: 'bf16-tf32x3', schedule: { warmup: 128, total: 7630 } });
   */
  trainer(options: TrainerOptions = {}): Trainer {
    return Trainer.of(this, options);
  }

  /**
   * A session: `batch` independent rows of at most `capacity` positions with a complete cache each. Errors:
   * `ERR_ARGUMENT`, `ERR_DISPOSED`; a lack of memory rejects the session's first call.
   *
   * @example
   * using session = model.session({ batch: 4, capacity: 2048 });
   */
  session(options: SessionOptions): Session {
    return Session.of(this, options);
  }

  /**
   * Writes a checkpoint directory, created where it is missing: new files first, which then take the place
   * of the old ones together, so that nothing is lost in a crash or on a full disk. Updates called meanwhile
   * wait, and so do other saves into the directory. Its other files stay, and so does the directory itself
   * with its mode and owner. Where the plan is plain grouped-query attention, Transformers loads the directory as
   * `LlamaForCausalLM`. Errors: `ERR_CHECKPOINT` with the system's error as its cause, `ERR_ARGUMENT` for a
   * path that is not a directory, `ERR_DISPOSED`.
   *
   * @example
   * await model.save('checkpoints/final');
   */
  async save(directory: string): Promise<void> {
    checkDirectory(directory);
    return this.lane.exclusive(() =>
      writeCheckpoint(directory, this.plan, (name) => callEngine(() => this.native.readTensor(name))),
    );
  }

  /**
   * Frees its memory, and disposes its trainers and sessions: their calls reject with `ERR_DISPOSED`.
   * Idempotent.
   */
  dispose(): void {
    this.native.dispose();
  }

  [Symbol.dispose](): void {
    this.dispose();
  }
}
