/**
 * Keeps what is called on one model in order where a single call is many jobs on the engine: saving a
 * checkpoint reads one tensor after another, and an update called meanwhile must wait for its end. Outside
 * such calls everything passes at once, and the engine's own queue keeps the order.
 */
export class Lane {
  /** Settles when everything that must begin before the next call has begun. */
  #tail: Promise<void> | undefined;

  /** Begins `task` now, or when the exclusive calls before it have ended. */
  run<T>(task: () => Promise<T>): Promise<T> {
    if (this.#tail === undefined) return task();
    let result: Promise<T> | undefined;
    const begun = this.#tail.then(() => {
      result = task();
      // Its rejection is the caller's to handle, through the promise returned below.
      result.catch(() => {});
    });
    this.#extend(begun);
    return begun.then(() => result as Promise<T>);
  }

  /** As `run`, and calls made after it begin when it has ended. */
  exclusive<T>(task: () => Promise<T>): Promise<T> {
    const result = this.run(task);
    this.#extend(
      result.then(
        () => {},
        () => {},
      ),
    );
    return result;
  }

  #extend(until: Promise<void>): void {
    const tail: Promise<void> = until.then(() => {
      if (this.#tail === tail) this.#tail = undefined;
    });
    this.#tail = tail;
  }
}
