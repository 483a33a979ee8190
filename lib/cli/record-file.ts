import { existsSync } from 'node:fs';
import { dirname } from 'node:path';

import { makeDirectories } from '../directory.js';
import { checkReplaceable, replaceFile } from '../replace-file.js';
import { UsageError } from './run.js';

/** Where a campaign keeps its record: the file holds the last record that was written whole. */
export class RecordFile {
  readonly #path: string;
  #exists: boolean;

  private constructor(path: string) {
    this.#path = path;
    this.#exists = existsSync(path);
  }

  /** Errors: `UsageError` where no record can be written, found before anything is measured for it. */
  static async open(path: string): Promise<RecordFile> {
    if (path === '') throw new UsageError('--out is empty');
    try {
      await makeDirectories(dirname(path));
      await checkReplaceable(path);
    } catch (error) {
      throw new UsageError(`--out ${path}: ${(error as Error).message}`);
    }
    return new RecordFile(path);
  }

  async keep(text: string): Promise<void> {
    try {
      await replaceFile(this.#path, (file) => file.writeFile(`${text}\n`));
      this.#exists = true;
    } catch (error) {
      const { code, message } = error as NodeJS.ErrnoException;
      const left = this.#exists ? 'it holds what was kept before' : 'nothing was kept';
      const lost = new Error(`${this.#path}: ${message}; ${left}`, { cause: error });
      throw Object.assign(lost, { code });
    }
  }
}
