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
 * What is asked for in one turn of the event loop begins together at its end: the callers that a step has answered come
 * back one after another within a turn. What is asked for while a step runs waits until it has ended.
 */
export class SharedSteps<Step extends { readonly row: number }, Result> {
  readonly #runSteps: RunSteps<Step, Result>;
  #waiting: Waiting<Step, Result>[] = [];
  #running = 0;
  #scheduled = false;

  constructor(runSteps: RunSteps<Step, Result>) {
    this.#runSteps = runSteps;
  }

  /** The result of one row's step. Rejects with the signal's reason; the row is then as it was. */
  step(step: Step, signal?: AbortSignal): Promise<Result> {
    const result = new Promise<Result>((resolve, reject) => {
      this.#waiting.push({ step, signal, resolve, reject });
    });
    this.#schedule();
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
      if (together.length > 0) this.#run(together);
    }
  }

  #run(members: readonly Waiting<Step, Result>[]): void {
    const stop = new AbortController();
    const abort = () => stop.abort();
    for (const { signal } of members) signal?.addEventListener('abort', abort);
    this.#running++;
    const watched = members.some(({ signal }) => signal !== undefined);
    this.#runSteps(
      members.map(({ step }) => step),
      watched ? stop.signal : undefined,
    )
      .then(
        (results) => {
          members.forEach(({ resolve }, i) => {
            resolve(results[i] as Result);
          });
        },
        (error: unknown) => this.#part(members, error),
      )
      .finally(() => {
        for (const { signal } of members) signal?.removeEventListener('abort', abort);
        this.#running--;
        this.#schedule();
      });
  }

  /** A step failed for all of its members: those that are not the cause go on. */
  #part(members: readonly Waiting<Step, Result>[], error: unknown): void {
    const [first] = members;
    if (members.length === 1) {
      first?.reject(first.signal?.aborted ? first.signal.reason : error);
      return;
    }
    const aborted = members.filter(({ signal }) => signal?.aborted);
    const rest = members.filter(({ signal }) => !signal?.aborted);
    for (const { signal, reject } of aborted) reject(signal?.reason);
    if (rest.length === 0) return;
    if (aborted.length > 0) this.#run(rest);
    else for (const member of rest) this.#run([member]);
  }
}
