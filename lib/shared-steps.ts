/** Runs one decode step of several rows: `[B, V]`, rows in the given order. A call that fails changes nothing. */
export type DecodeRows = (
  rows: number[],
  tokens: Int32Array,
  signal: AbortSignal | undefined,
) => Promise<Float32Array>;

interface Waiting {
  readonly row: number;
  readonly token: number;
  readonly signal: AbortSignal | undefined;
  readonly resolve: (logits: Float32Array) => void;
  readonly reject: (reason: unknown) => void;
}

/**
 * Joins the decode steps that concurrent callers ask for, each for a row of its own, so that they share one pass
 * over the weights. A row's logits do not depend on who shares its step.
 *
 * A lone caller's step begins at once. What is asked for while a step runs begins together when it has ended.
 */
export class SharedSteps {
  readonly #decode: DecodeRows;
  #waiting: Waiting[] = [];
  #running = 0;

  constructor(decode: DecodeRows) {
    this.#decode = decode;
  }

  /** The logits `[V]` after `token` in `row`. Rejects with the signal's reason; the row is then as it was. */
  step(row: number, token: number, signal?: AbortSignal): Promise<Float32Array> {
    const logits = new Promise<Float32Array>((resolve, reject) => {
      this.#waiting.push({ row, token, signal, resolve, reject });
    });
    if (this.#running === 0) this.flush();
    return logits;
  }

  /** Begins what waits, so that a call made next comes after it. */
  flush(): void {
    while (this.#waiting.length > 0) {
      const rows = new Set<number>();
      const together: Waiting[] = [];
      const later: Waiting[] = [];
      for (const waiting of this.#waiting) {
        if (waiting.signal?.aborted) waiting.reject(waiting.signal.reason);
        else if (rows.has(waiting.row)) later.push(waiting);
        else {
          rows.add(waiting.row);
          together.push(waiting);
        }
      }
      this.#waiting = later;
      if (together.length > 0) this.#run(together);
    }
  }

  #run(members: readonly Waiting[]): void {
    const stop = new AbortController();
    const abort = () => stop.abort();
    for (const { signal } of members) signal?.addEventListener('abort', abort);
    this.#running++;
    const watched = members.some(({ signal }) => signal !== undefined);
    this.#decode(
      members.map(({ row }) => row),
      Int32Array.from(members, ({ token }) => token),
      watched ? stop.signal : undefined,
    )
      .then(
        (logits) => {
          const width = logits.length / members.length;
          members.forEach(({ resolve }, i) => {
            resolve(logits.subarray(i * width, (i + 1) * width));
          });
        },
        (error: unknown) => this.#part(members, error),
      )
      .finally(() => {
        for (const { signal } of members) signal?.removeEventListener('abort', abort);
        this.#running--;
        // The callers that have just been answered may ask for their next step in this turn.
        setImmediate(() => {
          if (this.#running === 0) this.flush();
        });
      });
  }

  /** A step failed for all of its members: those that are not the cause go on. */
  #part(members: readonly Waiting[], error: unknown): void {
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
