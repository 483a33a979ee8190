import { type ChildProcessByStdio, spawn } from 'node:child_process';
import { createInterface } from 'node:readline';
import type { Readable, Writable } from 'node:stream';

import { DuokvError } from '../errors.js';

/** A program that measures how fast memory is read: for every line it gets, it writes a line with the GB/s. */
export class RateProgram implements AsyncDisposable {
  readonly #file: string;
  readonly #signal: AbortSignal;
  readonly #child: ChildProcessByStdio<Writable, Readable, null>;
  readonly #lines: AsyncIterator<string>;
  readonly #ended: Promise<string>;

  constructor(file: string, signal: AbortSignal) {
    this.#file = file;
    this.#signal = signal;
    this.#child = spawn(file, { stdio: ['pipe', 'pipe', 'inherit'], signal });
    this.#lines = createInterface({ input: this.#child.stdout })[Symbol.asyncIterator]();
    this.#ended = new Promise((resolve) => {
      this.#child.once('error', (error) => resolve(error.message));
      this.#child.once('close', (code, signal) => resolve(`it ended with ${code ?? signal}`));
    });
    // A program that has ended is told by `sample`.
    this.#child.stdin.on('error', () => {});
  }

  /** GB/s. */
  async sample(): Promise<number> {
    this.#child.stdin.write('\n');
    const { value, done } = await this.#lines.next();
    this.#signal.throwIfAborted();
    if (done) throw new DuokvError('ERR_ARGUMENT', `--read-rate ${this.#file}: ${await this.#ended}`);
    const rate = Number(value);
    if (!(rate > 0))
      throw new DuokvError('ERR_ARGUMENT', `--read-rate ${this.#file}: "${value}" is no rate in GB/s`);
    return rate;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    // It has nothing to save, and what it started may hold on to its output.
    this.#child.kill('SIGKILL');
    this.#child.stdin.destroy();
    this.#child.stdout.destroy();
    await this.#ended;
  }
}
