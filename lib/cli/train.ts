import { resolve } from 'node:path';

import { Command } from 'commander';

import {
  holdOut,
  loadTokenDocuments,
  orderHash,
  type TokenDocument,
  type WindowBatch,
  WindowCorpus,
  windowOrder,
} from '../data/corpus.js';
import { byteTokenizer, loadCheckpointTokenizer, loadTokenizer, type Tokenizer } from '../data/tokenizer.js';
import { DuokvError } from '../errors.js';
import type { Group } from '../group.js';
import { Model } from '../model.js';
import type { PrecisionName } from '../native.js';
import { Trainer } from '../trainer.js';
import { type ConfigOptions, configFromOptions, withConfig } from './model-config.js';
import {
  type DeviceFlags,
  fraction,
  nonNegativeInteger,
  openChosenDevice,
  positiveInteger,
  positiveNumber,
  withDevice,
  withPrecision,
} from './options.js';
import { formatCount, formatSeconds, type Progress, withProgress } from './output.js';
import { asRank, stopRequested } from './ranks.js';
import { type Context, defineAction, UsageError } from './run.js';
import { type MetricsRecord, RunFolder } from './run-folder.js';
import { checkRunSettings, type RunSettings } from './run-settings.js';
import { scoreDocuments } from './score.js';
import { describeMachine } from './version.js';

interface TrainOptions extends DeviceFlags, ConfigOptions {
  tokenizer?: string;
  bos?: string;
  eos?: string;
  context: number;
  batch: number;
  microbatch?: number;
  recompute?: true;
  updates?: number;
  epochs: number;
  lr: number;
  warmup?: number;
  precision: PrecisionName;
  seed: number;
  heldOut: number;
  evalEvery?: number;
  saveEvery: number;
  out?: string;
  resume?: string;
}

/** What a run reads of its text; the same for the same text, tokenizer and settings. */
async function readText(
  text: string,
  tokenizer: Tokenizer,
  { heldOut: share, context, batch }: { heldOut: number; context: number; batch: number },
) {
  const { documents, empty } = await loadTokenDocuments(text, tokenizer);
  const { training, heldOut } = holdOut(documents, share);
  const corpus = new WindowCorpus(training, context);
  if (corpus.windows < batch) {
    throw new DuokvError(
      'ERR_DATA',
      `${text}: has ${corpus.windows} windows of ${context} tokens, one update needs ${batch}: lower --batch or --context`,
    );
  }
  return { corpus, heldOut, documents: training.length, empty };
}

/** The windows of each update: every pass is a permutation of its own, and its remainder short of a batch is left out. */
class WindowSchedule {
  readonly #corpus: WindowCorpus;
  readonly #batch: number;
  readonly #seed: number;
  #epoch = -1;
  #order: Uint32Array = new Uint32Array();

  constructor(corpus: WindowCorpus, batch: number, seed: number) {
    this.#corpus = corpus;
    this.#batch = batch;
    this.#seed = seed;
  }

  get updatesPerEpoch(): number {
    return Math.floor(this.#corpus.windows / this.#batch);
  }

  /** The part of `group`'s rank in the batch of update `update`, counted from 1: the ranks divide its windows in order. */
  at(update: number, { rank, size }: Group): WindowBatch {
    const epoch = Math.floor((update - 1) / this.updatesPerEpoch);
    if (epoch !== this.#epoch) {
      this.#order = windowOrder(this.#corpus.windows, this.#seed, epoch);
      this.#epoch = epoch;
    }
    const begin = (update - 1 - epoch * this.updatesPerEpoch) * this.#batch;
    const share = (ranks: number) => begin + Math.floor((this.#batch * ranks) / size);
    return this.#corpus.batch(this.#order.subarray(share(rank), share(rank + 1)));
  }
}

interface Evaluation {
  update: number;
  /** Mean over the targets of the held-out documents, in nats. */
  nll: number;
  targets: number;
  perplexity: number;
}

/** Trains from where `trainer` stands to the run's last update, or until the signal, and saves either way. */
async function runUpdates(
  context: Context,
  group: Group,
  folder: RunFolder<RunSettings>,
  trainer: Trainer,
  { corpus, heldOut }: { corpus: WindowCorpus; heldOut: TokenDocument[] },
  recorded: readonly MetricsRecord[],
) {
  const { settings } = folder;
  // Several ranks can only stop together, between two updates.
  const signal = group.size === 1 ? context.signal : new AbortController().signal;
  const schedule = new WindowSchedule(corpus, settings.batch, settings.seed);
  const began = performance.now();
  const last: { loss: number | null; evaluation: Evaluation | null } = {
    loss: null,
    evaluation: await group.broadcast(
      (recorded.findLast(({ heldOut: result }) => result !== undefined)?.['heldOut'] ??
        null) as Evaluation | null,
    ),
  };

  function isEvaluationDue(): boolean {
    const { update } = trainer;
    if (heldOut.length === 0 || update === 0 || last.evaluation?.update === update) return false;
    return update === settings.updates || (settings.evalEvery !== null && update % settings.evalEvery === 0);
  }
  async function evaluate(): Promise<void> {
    const { update } = trainer;
    const { context: length, microbatch: rows, precision } = settings;
    const share = heldOut.filter((_, document) => document % group.size === group.rank);
    const scored = await scoreDocuments(trainer.model, share, { context: length, rows, precision, signal });
    const [nll, targets] = (await group.sum([scored.nll, scored.targets])) as [number, number];
    const mean = nll / targets;
    last.evaluation = { update, nll: mean, targets, perplexity: Math.exp(mean) };
    await folder.appendMetrics({ update, heldOut: last.evaluation });
  }
  let interrupted = false;
  async function train(progress: Progress): Promise<void> {
    progress.update(trainer.update);
    for (;;) {
      if (group.size > 1 && (await stopRequested(group, context.signal))) {
        interrupted = true;
        return;
      }
      // Before the next update, so that a run that was interrupted here evaluates when it is resumed.
      if (isEvaluationDue()) await evaluate();
      if (trainer.update === settings.updates) return;
      const { update, ...step } = await trainer.step(
        schedule.at(trainer.update + 1, group),
        group.size === 1 ? { signal } : {},
      );
      const tokensPerSecond = step.tokens / step.seconds;
      last.loss = step.loss;
      await folder.appendMetrics({ update, ...step, tokensPerSecond });
      if (update % settings.saveEvery === 0) await trainer.save(folder.checkpoint);
      const detail = [
        `loss ${step.loss.toFixed(3)}`,
        ...(last.evaluation === null ? [] : [`held-out ${last.evaluation.nll.toFixed(3)}`]),
        `lr ${step.learningRate.toExponential(2)}`,
        `${formatCount(Math.round(tokensPerSecond))} tokens/s`,
      ];
      progress.update(update, detail.join('  '));
    }
  }

  try {
    await withProgress('training', settings.updates, train);
  } catch (error) {
    if (error instanceof DuokvError && error.code === 'ERR_NOT_FINITE') {
      // The failed update changed nothing, so the one before it can still be kept.
      await trainer.save(folder.checkpoint);
      const saved = `${folder.checkpoint} is of update ${trainer.update}`;
      throw new DuokvError('ERR_NOT_FINITE', `${error.message}; ${saved}`, { cause: error });
    }
    if ((error as Error).name !== 'AbortError') throw error;
    interrupted = true;
  }
  await trainer.save(folder.checkpoint);
  const seconds = (performance.now() - began) / 1000;
  const { loss, evaluation } = last;
  const summary = [
    `${interrupted ? 'Stopped after' : 'Trained'} ${trainer.update} of ${settings.updates} updates; ${formatSeconds(seconds)} here`,
  ];
  if (loss !== null) summary.push(`last loss ${loss.toFixed(4)}`);
  if (evaluation !== null) {
    summary.push(`held-out NLL ${evaluation.nll.toFixed(4)}, perplexity ${evaluation.perplexity.toFixed(2)}`);
  }
  context.print(summary.join('; '));
  context.print(`Checkpoint: ${folder.checkpoint}`);
  if (interrupted) context.print(`Continue with: duokv train --resume ${folder.path}`);
  return {
    out: folder.path,
    checkpoint: folder.checkpoint,
    update: trainer.update,
    updates: settings.updates,
    ranks: group.size,
    interrupted,
    loss,
    heldOut: evaluation,
    seconds,
    data: settings.data,
  };
}

/** The tokenizer of a new run: byte-level, or from a file. */
function chooseTokenizer(options: TrainOptions): Promise<Tokenizer> | Tokenizer {
  if (options.tokenizer === undefined) {
    const name = options.bos !== undefined ? '--bos' : options.eos !== undefined ? '--eos' : undefined;
    if (name !== undefined)
      throw new UsageError(`${name} names a token of a --tokenizer file, and none is given`);
    return byteTokenizer();
  }
  return loadTokenizer(options.tokenizer, {
    ...(options.bos === undefined ? {} : { bos: options.bos }),
    ...(options.eos === undefined ? {} : { eos: options.eos }),
  });
}

async function startRun(context: Context, group: Group, text: string | undefined, options: TrainOptions) {
  if (text === undefined)
    throw new UsageError('no text: name a folder of text files, a .jsonl file or a text file');
  if (options.out === undefined) throw new UsageError('no --out folder for checkpoints and metrics');
  if (group.rank === 0) await RunFolder.check(options.out);
  const tokenizer = await chooseTokenizer(options);
  const config = await configFromOptions(options, tokenizer.vocab);
  const microbatch = options.microbatch ?? Math.min(options.batch, 4);
  if (microbatch > options.batch)
    throw new UsageError(`--microbatch ${microbatch} is larger than --batch ${options.batch}`);
  if (options.batch < group.size)
    throw new UsageError(`--batch ${options.batch} gives some of the ${group.size} ranks nothing to do`);
  const { corpus, heldOut, documents, empty } = await readText(text, tokenizer, options);
  if (options.evalEvery !== undefined && heldOut.length === 0) {
    throw new UsageError(
      '--eval-every needs held-out documents: two documents or more, and --held-out above 0',
    );
  }
  const available = Math.floor(corpus.windows / options.batch) * options.epochs;
  const updates = options.updates ?? available;
  if (updates > available) {
    throw new DuokvError(
      'ERR_DATA',
      `--updates ${updates}: the text gives ${available} updates of ${options.batch} windows with --epochs ${options.epochs}; ` +
        `--epochs ${Math.ceil((updates * options.epochs) / available)} would be enough`,
    );
  }
  const settings: RunSettings = await group.broadcast({
    text: resolve(text),
    config,
    context: options.context,
    batch: options.batch,
    microbatch,
    recompute: options.recompute === true,
    updates,
    lr: options.lr,
    warmup: options.warmup ?? Math.min(128, Math.ceil(updates / 10)),
    precision: options.precision,
    seed: options.seed,
    heldOut: options.heldOut,
    evalEvery: options.evalEvery ?? null,
    saveEvery: options.saveEvery,
    data: {
      documents,
      heldOutDocuments: heldOut.length,
      emptyDocuments: empty,
      tokens: corpus.tokens,
      windows: corpus.windows,
      droppedTokens: corpus.droppedTokens,
      validTargets: corpus.validTargets,
      streamHash: corpus.hash(),
      orderHash: orderHash(windowOrder(corpus.windows, options.seed)),
    },
    machine: describeMachine(),
  });
  checkText(text, corpus, settings);
  await using device = await openChosenDevice(options, group);
  const model = await Model.create(device, settings.config, { seed: settings.seed });
  using trainer = trainerFor(model, settings, group);
  const folder = await RunFolder.create(options.out, settings, trainer, tokenizer, group.rank === 0);
  context.print(
    `Training ${formatCount(model.parameterCount)} parameters on ${formatCount(settings.data.tokens)} tokens of ` +
      `${formatCount(documents)} documents, ${heldOut.length} held out${group.size === 1 ? '' : `; ${group.description}`}`,
  );
  return await runUpdates(context, group, folder, trainer, { corpus, heldOut }, []);
}

async function resumeRun(
  context: Context,
  group: Group,
  text: string | undefined,
  options: TrainOptions & { resume: string },
) {
  const folder = await RunFolder.open(options.resume, checkRunSettings, group.rank === 0);
  const { settings } = folder;
  const tokenizer = await loadCheckpointTokenizer(folder.checkpoint);
  const { corpus, heldOut } = await readText(text ?? settings.text, tokenizer, settings);
  checkText(text ?? settings.text, corpus, settings);
  if (settings.batch < group.size) {
    throw new UsageError(
      `the run's ${settings.batch} windows give some of the ${group.size} ranks nothing to do`,
    );
  }
  await using device = await openChosenDevice(options, group);
  using trainer = await Trainer.resume(device, folder.checkpoint, { group });
  if (trainer.update > settings.updates) {
    throw new DuokvError(
      'ERR_ARGUMENT',
      `${folder.path}: the run has ${settings.updates} updates in all, its checkpoint is of update ${trainer.update}`,
    );
  }
  const recorded = await folder.truncateMetrics(trainer.update);
  context.print(
    `Resuming after ${trainer.update} of ${settings.updates} updates${group.size === 1 ? '' : `; ${group.description}`}`,
  );
  return await runUpdates(context, group, folder, trainer, { corpus, heldOut }, recorded);
}

/** Errors: `ERR_DATA` where this rank, or a resumed run, reads another text than the run's. */
function checkText(text: string, corpus: WindowCorpus, settings: RunSettings): void {
  if (corpus.hash() !== settings.data.streamHash) {
    throw new DuokvError('ERR_DATA', `${text}: is not the text that the run is trained on`);
  }
}

function trainerFor(model: Model, settings: RunSettings, group: Group): Trainer {
  return model.trainer({
    group,
    precision: settings.precision,
    optimizer: { lr: settings.lr },
    schedule: { warmup: settings.warmup, total: settings.updates },
    microbatch: settings.microbatch,
    recompute: settings.recompute,
  });
}

/** Options that may differ when a run is resumed; everything else is part of the run. */
const RESUME_OPTIONS = new Set(['resume', 'json', 'backend', 'threads']);

export function trainCommand(): Command {
  const command = new Command('train')
    .description('Train a model on text; Ctrl-C saves a checkpoint')
    .argument('[text]', 'folder of .txt and .md files, a .jsonl or .jsonl.gz file, or a single text file')
    .option('--out <folder>', 'new folder for checkpoints, metrics.jsonl and run.json')
    .option('--resume <folder>', 'continue the run of this folder with the settings it began with')
    .option('--tokenizer <file>', 'a tokenizer.json (default: byte-level, 258 ids)')
    .option(
      '--bos <token>',
      'the token that begins a document, where the tokenizer does not have a common one',
    )
    .option('--eos <token>', 'the token that ends it')
    .option('--context <tokens>', 'window length', positiveInteger, 512)
    .option('--batch <windows>', 'windows in one update', positiveInteger, 8)
    .option(
      '--microbatch <windows>',
      'windows in one forward and backward pass (default: up to 4)',
      positiveInteger,
    )
    .option('--recompute', 'rerun each layer in the backward pass: less memory, the same bits, slower')
    .option('--updates <count>', 'optimiser updates (default: all that --epochs allow)', positiveInteger)
    .option('--epochs <count>', 'passes over the text that updates may use', positiveInteger, 1)
    .option(
      '--lr <rate>',
      'peak learning rate; a cosine takes it to a tenth at the last update',
      positiveNumber,
      3e-4,
    )
    .option(
      '--warmup <updates>',
      'linear warmup (default: a tenth of the updates, up to 128)',
      nonNegativeInteger,
    )
    .option(
      '--seed <integer>',
      'seed of the initialisation and of the order of windows',
      nonNegativeInteger,
      0,
    )
    .option('--held-out <share>', 'share of the documents kept for evaluation', fraction, 0.05)
    .option('--eval-every <updates>', 'evaluate on them this often (default: at the end)', positiveInteger)
    .option('--save-every <updates>', 'save a checkpoint this often', positiveInteger, 200)
    .addHelpText(
      'after',
      '\nExamples:\n  $ duokv train docs/ --preset local-history-tiny --out runs/docs --context 128 --epochs 6 --lr 3e-3' +
        '\n  $ duokv train --resume runs/docs',
    );
  withPrecision(withDevice(withConfig(command)), 'fp32');
  return defineAction<TrainOptions, [string | undefined]>(command, async (context, options, text) => {
    const { resume } = options;
    if (resume === undefined) {
      return asRank(context, (rank, group) => startRun(rank, group, text, options));
    }
    for (const option of command.options) {
      const name = option.attributeName();
      if (command.getOptionValueSource(name) === 'cli' && !RESUME_OPTIONS.has(name)) {
        throw new UsageError(`${option.long} is part of the run and cannot change with --resume`);
      }
    }
    return asRank(context, (rank, group) => resumeRun(rank, group, text, { ...options, resume }));
  });
}
