import { appendFile, readFile, rm, stat } from 'node:fs/promises';
import { join } from 'node:path';

import { readJson, writeJson } from '../checkpoint.js';
import { saveTokenizer, type Tokenizer } from '../data/tokenizer.js';
import { makeDirectories } from '../directory.js';
import { DuokvError } from '../errors.js';
import { replaceFile } from '../replace-file.js';
import type { Trainer } from '../trainer.js';

const RUN_FILE = 'run.json';
const METRICS_FILE = 'metrics.jsonl';
const CHECKPOINT = 'checkpoint';

/** A line of metrics.jsonl: the result of an update, or of an evaluation after it. */
export interface MetricsRecord {
  readonly update: number;
  readonly [key: string]: unknown;
}

function parseMetrics(line: string, where: string): MetricsRecord {
  let record: unknown;
  try {
    record = JSON.parse(line);
  } catch (error) {
    throw new DuokvError('ERR_DATA', `${where} is not JSON: ${(error as Error).message}`, { cause: error });
  }
  if (!Number.isSafeInteger((record as Partial<MetricsRecord> | null)?.update)) {
    throw new DuokvError('ERR_DATA', `${where} is no record with the number of an update`);
  }
  return record as MetricsRecord;
}

const exists = (path: string): Promise<boolean> =>
  stat(path).then(
    () => true,
    () => false,
  );

/** A checkpoint directory as it is, or the checkpoint of a training run's folder. Errors: `ERR_CHECKPOINT`. */
export async function findCheckpoint(path: string): Promise<string> {
  if (!(await exists(path))) throw new DuokvError('ERR_CHECKPOINT', `${path}: does not exist`);
  const checkpoint = (await exists(join(path, RUN_FILE))) ? join(path, CHECKPOINT) : path;
  if (!(await exists(join(checkpoint, 'config.json')))) {
    throw new DuokvError('ERR_CHECKPOINT', `${checkpoint}: is no checkpoint, it has no config.json`);
  }
  return checkpoint;
}

/**
 * The folder of one training run:
 *
 *     checkpoint/      model, optimiser and tokenizer as last saved; `trainer.save` replaces it at once
 *     run.json         what was asked for and what the data was; there from the moment the run can be resumed
 *     metrics.jsonl    one line per update and per evaluation
 *
 * Of several ranks one `writes`; the others' folder is for reading.
 */
export class RunFolder<Settings extends object> {
  readonly path: string;
  readonly checkpoint: string;
  readonly settings: Settings;
  readonly #writes: boolean;

  private constructor(path: string, settings: Settings, writes: boolean) {
    this.path = path;
    this.checkpoint = join(path, CHECKPOINT);
    this.settings = settings;
    this.#writes = writes;
  }

  /** Errors: `ERR_ARGUMENT` where the folder already has a run, or is no folder. */
  static async check(path: string): Promise<void> {
    const isFolder = await stat(path).then(
      (status) => status.isDirectory(),
      (error: NodeJS.ErrnoException) => error.code !== 'ENOTDIR',
    );
    if (!isFolder) throw new DuokvError('ERR_ARGUMENT', `--out ${path}: is not a folder, nor can be one`);
    if (await exists(join(path, RUN_FILE))) {
      throw new DuokvError(
        'ERR_ARGUMENT',
        `${path}: already holds a training run; continue it with --resume ${path}`,
      );
    }
  }

  /** Starts a run with the checkpoint of an untrained model, so that it can be resumed from here on. */
  static async create<Settings extends object>(
    path: string,
    settings: Settings,
    trainer: Trainer,
    tokenizer: Tokenizer,
    writes: boolean,
  ): Promise<RunFolder<Settings>> {
    if (writes) {
      await RunFolder.check(path);
      await makeDirectories(path);
    }
    const folder = new RunFolder(path, settings, writes);
    await trainer.save(folder.checkpoint);
    if (writes) {
      await saveTokenizer(folder.checkpoint, tokenizer);
      await rm(join(path, METRICS_FILE), { force: true });
      await writeJson(join(path, RUN_FILE), settings);
    }
    return folder;
  }

  /**
   * The run of the folder `path`; `check` makes settings of what its run.json holds. Errors: `ERR_CHECKPOINT` where there
   * is no run, `ERR_DATA` where run.json is damaged.
   */
  static async open<Settings extends object>(
    path: string,
    check: (file: string, json: Record<string, unknown>) => Settings,
    writes: boolean,
  ): Promise<RunFolder<Settings>> {
    const file = join(path, RUN_FILE);
    if (!(await exists(file))) throw new DuokvError('ERR_CHECKPOINT', `${file}: does not exist`);
    return new RunFolder(path, check(file, await readJson(file, 'ERR_DATA')), writes);
  }

  async appendMetrics(record: MetricsRecord): Promise<void> {
    if (!this.#writes) return;
    await appendFile(join(this.path, METRICS_FILE), `${JSON.stringify(record)}\n`);
  }

  /**
   * Drops metrics of updates after `update`: those that a crash left behind, and that a resumed run does again.
   * Returns the others, or none where this rank writes nothing. Errors: `ERR_DATA` naming the first line that is no
   * record; the file stays as it was.
   */
  async truncateMetrics(update: number): Promise<MetricsRecord[]> {
    if (!this.#writes) return [];
    const path = join(this.path, METRICS_FILE);
    const text = await readFile(path, 'utf8').catch(() => '');
    // A line is whole only with its newline.
    const lines = text.split('\n').slice(0, -1);
    const kept = lines
      .map((line, index) => parseMetrics(line, `${path}: line ${index + 1}`))
      .filter((record) => record.update <= update);
    await replaceFile(path, (file) =>
      file.writeFile(kept.map((record) => `${JSON.stringify(record)}\n`).join('')),
    );
    return kept;
  }
}
