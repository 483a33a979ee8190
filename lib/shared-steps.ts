import type { Lane } from './lane.js';
import { watch } from './native.js';

/** Runs the steps of several rows as one: their results, in order. A call that fails changes nothing. */
export type RunSteps<Step, Result> = (
  steps: readonly Step[],
  signal: AbortSignal | undefined,
) => Promise<readonly Result[]>;

interface Waiting<Step, Result> {
  readonly step: Step;
  readonly signal: AbortSignal | undefined;
  readonly resolve: (result: Result) => void;
  readonly reject: (reason: unknown) => void;
}

/**
 * Joins the decode steps that concurrent callers ask for, each for a row of its own, so that they share one pass
 * over the weights. A row's result does not depend on who shares its step.
 *
 * A lone caller's step begins at once. After a step of several, what is asked for in one turn of the event loop begins
 * together at its end: the callers that the step has answered come back one after another within that turn. What is asked
 * for while a step runs waits until it has ended.
 */
export class SharedSteps<Step extends { readonly row: number }, Result> {
  readonly #runSteps: RunSteps<Step, Result>;
  readonly #lane: Lane;
  #waiting: Waiting<Step, Result>[] = [];
  #running = 0;
  #scheduled = false;
  /** Whether the last step had several members. */
  #shared = false;

  /** `lane`: keeps the session's calls in order. */
  constructor(runSteps: RunSteps<Step, Result>, lane: Lane) {
    this.#runSteps = runSteps;
    this.#lane = lane;
  }

  /** The result of one row's step. Rejects with the signal's reason; the row is then as it was. */
  step(step: Step, signal?: AbortSignal): Promise<Result> {
    const result = new Promise<Result>((resolve, reject) => {
      this.#waiting.push({ step, signal, resolve, reject });
    });
    if (this.#running === 0 && this.#waiting.length === 1 && !this.#shared) this.flush();
    else this.#schedule();
    return result;
  }

  #schedule(): void {
    if (this.#scheduled || this.#running > 0 || this.#waiting.length === 0) return;
    this.#scheduled = true;
    setImmediate(() => {
      this.#scheduled = false;
      if (this.#running === 0) this.flush();
    });
  }

  /** Begins what waits, so that a call made next comes after it. */
  flush(): void {
    while (this.#waiting.length > 0) {
      const rows = new Set<number>();
      const together: Waiting<Step, Result>[] = [];
      const later: Waiting<Step, Result>[] = [];
      for (const waiting of this.#waiting) {
        if (waiting.signal?.aborted) waiting.reject(waiting.signal.reason);
        else if (rows.has(waiting.step.row)) later.push(waiting);
        else {
          rows.add(waiting.step.row);
          together.push(waiting);
        }
      }
      this.#waiting = later;
      if (together.length > 0) this.#begin(together);
    }
  }

  #begin(members: readonly Waiting<Step, Result>[]): void {
    this.#running++;
    this.#shared = members.length > 1;
    const run = () => this.#run(members);
    // A step of several rows may take several calls, and what is called meanwhile comes after all of them.
    const done = members.length > 1 ? this.#lane.exclusive(run) : this.#lane.run(run);
    done.finally(() => {
      this.#running--;
      this.#schedule();
    });
  }

  /** Answers all members; never rejects. */
  async #run(members: readonly Waiting<Step, Result>[]): Promise<void> {
    const stop = new AbortController();
    const signals = members.flatMap(({ signal }) => signal ?? []);
    const unwatch = signals.map((signal) => watch(signal, () => stop.abort()));
    if (signals.some(({ aborted }) => aborted)) stop.abort();
    try {
      const steps = members.map(({ step }) => step);
      const results = await this.#runSteps(steps, signals.length > 0 ? stop.signal : undefined);
      members.forEach(({ resolve }, i) => {
        resolve(results[i] as Result);
      });
    } catch (error) {
      await this.#part(members, error);
    } finally {
      for (const end of unwatch) end();
    }
  }

  /** A step failed for all of its members: those that are not the cause go on. */
  async #part(members: readonly Waiting<Step, Result>[], error: unknown): Promise<void> {
    const [first] = members;
    if (members.length === 1) {
      first?.reject(first.signal?.aborted ? first.signal.reason : error);
      return;
    }
    const aborted = members.filter(({ signal }) => signal?.aborted);
    const rest = members.filter(({ signal }) => !signal?.aborted);
    for (const { signal, reject } of aborted) reject(signal?.reason);
    if (aborted.length === 0) await Promise.all(rest.map((member) => this.#run([member])));
    else if (rest.length > 0) await this.#run(rest);
  }
}
