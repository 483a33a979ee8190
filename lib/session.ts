import {
  checkBoolean,
  checkCallOptions,
  checkIds,
  checkInteger,
  checkLength,
  checkNumber,
  checkOptions,
  checkPrecision,
  checkRows,
  checkSchedule,
  checkSignal,
  checkTokens,
  type Schedule,
  show,
  type Tokens,
} from './arguments.js';
import { DuokvError } from './errors.js';
import { Lane } from './lane.js';
import { type Model, seedText } from './model.js';
import {
  type CacheBytes,
  callEngine,
  callNow,
  type NativeSession,
  type PositionCounts,
  type PrecisionName,
  type RouteName,
} from './native.js';
import { RandomStream } from './random.js';
import { SharedSteps } from './shared-steps.js';

export interface SessionOptions {
  /** Rows (default 1). */
  readonly batch?: number;
  /** Positions that each row can hold. */
  readonly capacity: number;
  /** Of every call; caches are FP32, under `bf16` BF16. Default `fp32`. */
  readonly precision?: PrecisionName;
  /** Record prefills of empty rows and decode steps as graphs, where the backend has them (default true). */
  readonly graphs?: boolean;
}

export interface PrefillInput {
  /** `[B, N]` row-major, or one array per row where lengths differ. */
  readonly tokens: Tokens | readonly Tokens[];
  /** In the form of `tokens`. Without ids a row continues its last document, or starts one. */
  readonly documentIds?: BigInt64Array | readonly BigInt64Array[];
  /** The rows that `tokens` are for, in their order (default all). Other rows stay bitwise as they were. */
  readonly rows?: readonly number[];
  /** Default `exact`. */
  readonly schedule?: Schedule;
}

export interface PrefillResult {
  /** `[B, V]`: after the last token of each given row. */
  readonly logits: Float32Array;
  readonly route: RouteName;
  /** False once anything approximate is in one of the given rows. */
  readonly exact: boolean;
  /**
   * Computed per row, summed over the upper layers and over the groups of equal length that the call ran as.
   */
  readonly positions: PositionCounts;
}

export interface DecodeInput {
  /** `[B]`, one token for each given row. */
  readonly tokens: Tokens;
  /**
   * `[B]`: an id equal to the row's last continues its document, a new one starts another. Without ids
   * documents go on.
   */
  readonly documentIds?: BigInt64Array;
  readonly rows?: readonly number[];
}

export interface GenerateOptions {
  /** Appended to what the row holds. */
  readonly prompt: Tokens;
  readonly maxTokens: number;
  /** 0: the most likely token. Default 1. */
  readonly temperature?: number;
  /** Default: all. */
  readonly topK?: number;
  /** Default 1: all. */
  readonly topP?: number;
  /** Of the random stream (default 0). Same seed, options and state: same tokens. */
  readonly seed?: number | bigint;
  readonly signal?: AbortSignal;
  /** Default 0. */
  readonly row?: number;
  /** Of the prompt; default `exact`. */
  readonly schedule?: Schedule;
}

export interface GeneratedToken {
  readonly token: number;
  /** Natural logarithm of the token's probability under the model, before temperature and truncation. */
  readonly logprob: number;
}

/** Retained bytes by part; what was reserved for them, and where they are. */
export interface SessionBytes extends CacheBytes {
  readonly reserved: number;
  readonly device: number;
  readonly host: number;
}

/**
 * Passes a session recorded as graphs, where the backend has them. A shape runs as it is the first time, is
 * recorded the second time and replayed from then on; the least recently used of 16 makes room for another.
 */
export interface GraphStats {
  readonly held: number;
  readonly recorded: number;
  readonly replayed: number;
  readonly dropped: number;
  /** Device memory of the passes kept, which graphs name: what `predictMemory` says as `graphs` beforehand. */
  readonly bytes: number;
  /** Measured: by how much the driver's free memory fell while it made the graphs held. Nobody can predict it. */
  readonly driverBytes: number;
  /** Spent recording. */
  readonly seconds: number;
}

/** Makes a session's call after those that were made before it. */
type InOrder = <T>(call: () => Promise<T>) => Promise<T>;

/** The complete cache of a session, by name. */
class SessionCache {
  readonly #native: NativeSession;
  readonly #names: readonly string[];
  readonly #batch: number;
  readonly #inOrder: InOrder;

  constructor(session: NativeSession, names: readonly string[], batch: number, inOrder: InOrder) {
    this.#native = session;
    this.#names = names;
    this.#batch = batch;
    this.#inOrder = inOrder;
  }

  /**
   * Bytes of the entries in use, summed over the tensors that exist, as the last call that ended left them:
   * of a disposed session, before it was disposed.
   *
   * @example
   * const { lower, global, local, documentIds, total } = session.cache.bytes();
   */
  bytes(): SessionBytes {
    const { lengths: _, exact: __, graphs: ___, ...bytes } = this.#native.state();
    return bytes;
  }

  /**
   * `layer.0.k`, `layer.0.v`, …, `global.k`, …, `local.8.k`, …, `documentIds`: only tensors that are stored
   * have names.
   */
  names(): string[] {
    return [...this.#names];
  }

  /**
   * A copy, oldest entry first: FP32 `[entries, kvHeads, headDim]` of a row, or `[B, entries, kvHeads,
   * headDim]` of all rows where they hold equally many positions; document ids as a BigInt64Array `[entries]`
   * or `[B, entries]`. Keys are stored after the rotary transform. Errors: `ERR_TENSOR_NAME`, `ERR_SHAPE`,
   * `ERR_ARGUMENT`, `ERR_DISPOSED`.
   *
   * @example
   * const keys = await session.cache.read('global.k', 0);
   */
  read(name: 'documentIds', row?: number): Promise<BigInt64Array>;
  read(name: string, row?: number): Promise<Float32Array>;
  async read(name: string, row?: number): Promise<Float32Array | BigInt64Array> {
    if (!this.#names.includes(name)) {
      throw new DuokvError(
        'ERR_TENSOR_NAME',
        `the cache has no tensor ${show(name)}; it has ${this.#names.join(', ')}`,
      );
    }
    if (row !== undefined) checkInteger(row, 'row', 0, this.#batch - 1);
    return this.#inOrder(() => callEngine(() => this.#native.readCache(name, row ?? -1)));
  }
}

export type { SessionCache };

/** Tokens to append to a row, and how the next is drawn. */
interface Draw {
  readonly row: number;
  readonly tokens: Int32Array;
  /** Temperature, top k, top p, and a number in `[0, 1)`. */
  readonly settings: readonly [number, number, number, number];
}

/** Prompts of a prefill: what each given row is to append. */
interface Prompts {
  rows: number[];
  counts: number[];
  tokens: Int32Array;
  documentIds: BigInt64Array | undefined;
}

function concatenate(arrays: readonly Int32Array[]): Int32Array {
  const all = new Int32Array(arrays.reduce((sum, { length }) => sum + length, 0));
  let offset = 0;
  for (const array of arrays) {
    all.set(array, offset);
    offset += array.length;
  }
  return all;
}

function concatenateIds(arrays: readonly BigInt64Array[]): BigInt64Array {
  const all = new BigInt64Array(arrays.reduce((sum, { length }) => sum + length, 0));
  let offset = 0;
  for (const array of arrays) {
    all.set(array, offset);
    offset += array.length;
  }
  return all;
}

/**
 * Serves a model: `batch` rows, each an independent slot with a complete cache of its own. Calls run in the
 * order in which they are made. A call that fails or is aborted changes nothing. Made by `model.session`.
 */
export class Session implements Disposable {
  readonly model: Model;
  readonly batch: number;
  readonly capacity: number;
  readonly precision: PrecisionName;
  readonly cache: SessionCache;
  /**
   * Settles when the memory of the session is allocated, or could not be; every later call then rejects
   * likewise.
   */
  readonly ready: Promise<void>;
  readonly #native: NativeSession;
  readonly #lane = new Lane();
  readonly #steps: SharedSteps<Draw, GeneratedToken>;

  private constructor(
    model: Model,
    { batch, capacity, precision }: { batch: number; capacity: number; precision: PrecisionName },
    session: NativeSession,
    ready: Promise<void>,
  ) {
    this.model = model;
    this.batch = batch;
    this.capacity = capacity;
    this.precision = precision;
    const names = [...model.plan.banks.flatMap(({ name }) => [`${name}.k`, `${name}.v`]), 'documentIds'];
    this.cache = new SessionCache(session, names, batch, (call) => this.#inOrder(call));
    this.ready = ready;
    this.#native = session;
    this.#steps = new SharedSteps((draws, signal) => this.#draw(draws, 'exact', signal), this.#lane);
  }

  #inOrder<T>(call: () => Promise<T>): Promise<T> {
    this.#steps.flush();
    return this.#lane.run(call);
  }

  /** @internal */
  static of(model: Model, options: SessionOptions): Session {
    checkOptions(options, 'options', ['batch', 'capacity', 'precision', 'graphs']);
    const { batch = 1, capacity, precision = 'fp32', graphs = true } = options;
    checkInteger(batch, 'batch', 1, 2 ** 20);
    checkInteger(capacity, 'capacity', 1, 2 ** 31 - 2);
    checkPrecision(precision);
    checkBoolean(graphs, 'graphs');
    const { session, ready } = callNow(() => model.native.createSession(batch, capacity, precision, graphs));
    const translated = callEngine(() => ready);
    translated.catch(() => {});
    return new Session(model, { batch, capacity, precision }, session, translated);
  }

  /** Positions that each row holds, as the last call that ended left them; of a disposed session, the last. */
  get lengths(): number[] {
    const { lengths } = this.#native.state();
    return lengths.length === 0 ? new Array(this.batch).fill(0) : lengths;
  }

  /** Graphs recorded so far, as the last call that ended left them; zeros where the backend has none. */
  get graphs(): GraphStats {
    return this.#native.state().graphs;
  }

  get disposed(): boolean {
    return this.#native.disposed;
  }

  #prompts(input: PrefillInput): Prompts {
    const rows = checkRows(input.rows, this.batch);
    const { vocab } = this.model.config;
    const { tokens: given, documentIds: givenIds } = input;
    const listed = Array.isArray(given) && (given.length === 0 || typeof given[0] === 'object');
    let prompts: Int32Array[];
    if (listed) {
      checkLength(given.length, 'tokens', rows.length);
      prompts = Array.from(given, (row: unknown, i) => checkTokens(row, `tokens[${i}]`, vocab));
    } else {
      const flat = checkTokens(given, 'tokens', vocab);
      if (flat.length === 0) {
        const row = rows[0];
        throw new DuokvError(
          'ERR_SHAPE',
          `tokens: the prompt of row ${row} is empty, or its buffer is detached`,
        );
      }
      if (flat.length % rows.length !== 0) {
        throw new DuokvError(
          'ERR_SHAPE',
          `tokens has ${flat.length} elements, which do not make ${rows.length} rows of equal length; pass an array per row`,
        );
      }
      const length = flat.length / rows.length;
      prompts = rows.map((_, i) => flat.subarray(i * length, (i + 1) * length));
    }
    prompts.forEach(({ length }, i) => {
      if (length === 0) throw new DuokvError('ERR_SHAPE', `tokens: the prompt of row ${rows[i]} is empty`);
      if (length > this.capacity) {
        throw new DuokvError(
          'ERR_CAPACITY',
          `row ${rows[i]} gets ${length} tokens; the session's capacity is ${this.capacity}`,
        );
      }
    });
    const counts = prompts.map(({ length }) => length);
    return {
      rows,
      counts,
      tokens: concatenate(prompts),
      documentIds: this.#ids(givenIds, listed, rows, counts),
    };
  }

  #ids(
    given: unknown,
    listed: boolean,
    rows: readonly number[],
    counts: readonly number[],
  ): BigInt64Array | undefined {
    if (given === undefined) return undefined;
    let ids: BigInt64Array[];
    if (listed) {
      if (!Array.isArray(given)) {
        throw new DuokvError(
          'ERR_ARGUMENT',
          `documentIds must be an array of BigInt64Arrays, as tokens is one per row`,
        );
      }
      checkLength(given.length, 'documentIds', rows.length);
      ids = Array.from(given, (row: unknown, i) => checkIds(row, `documentIds[${i}]`, counts[i] as number));
    } else {
      const length = counts[0] as number;
      const flat = checkIds(given, 'documentIds', length * counts.length);
      ids = counts.map((_, i) => flat.subarray(i * length, (i + 1) * length));
    }
    return concatenateIds(ids);
  }

  /**
   * Appends a prompt to each given row by one of the schedules of the execution specification and returns the
   * logits after it. A row that holds something is continued. Errors: `ERR_SHAPE`, `ERR_CAPACITY`,
   * `ERR_TOKEN_RANGE`, `ERR_DOCUMENT_IDS`, `ERR_CONFIG` where the design has no such schedule,
   * `ERR_DEVICE_MEMORY`, `ERR_DISPOSED`; rejects with the signal's reason.
   *
   * @example
   * const { logits, positions } = await session.prefill({ tokens, schedule: 'exact' });
   */
  async prefill(
    input: PrefillInput,
    options: { readonly signal?: AbortSignal } = {},
  ): Promise<PrefillResult> {
    checkOptions(input, 'input', ['tokens', 'documentIds', 'rows', 'schedule']);
    checkCallOptions(options, ['signal']);
    const { route, suffix } = checkSchedule(input.schedule ?? 'exact');
    const { rows, counts, tokens, documentIds } = this.#prompts(input);
    const { logits, exact, positions } = await this.#inOrder(() =>
      callEngine(
        (cancellation) =>
          this.#native.prefill(rows, counts, tokens, documentIds, route, suffix, cancellation),
        options.signal,
      ),
    );
    const byLength = new Map(positions.map((position, i) => [counts[i], position]));
    const sum = { kvInput: 0, queryOutput: 0 };
    for (const { kvInput, queryOutput } of byLength.values()) {
      sum.kvInput += kvInput;
      sum.queryOutput += queryOutput;
    }
    return { logits, route, exact, positions: sum };
  }

  async #draw(draws: readonly Draw[], schedule: Schedule, signal?: AbortSignal): Promise<GeneratedToken[]> {
    const { route, suffix } = checkSchedule(schedule);
    const { tokens, logprobs } = await callEngine(
      (cancellation) =>
        this.#native.draw(
          draws.map(({ row }) => row),
          draws.map((draw) => draw.tokens.length),
          concatenate(draws.map((draw) => draw.tokens)),
          draws.flatMap(({ settings }) => settings),
          route,
          suffix,
          cancellation,
        ),
      signal,
    );
    return tokens.map((token, i) => ({ token, logprob: logprobs[i] as number }));
  }

  /**
   * One step: appends one token to each given row and returns the logits after it, `[B, V]`. Errors: as
   * `prefill`.
   *
   * @example
   * const { logits } = await session.decode({ tokens: Int32Array.of(7), rows: [2] });
   */
  async decode(
    input: DecodeInput,
    options: { readonly signal?: AbortSignal } = {},
  ): Promise<{ readonly logits: Float32Array }> {
    checkOptions(input, 'input', ['tokens', 'documentIds', 'rows']);
    checkCallOptions(options, ['signal']);
    const rows = checkRows(input.rows, this.batch);
    // Copied: the call may have to wait, and the caller may use the arrays again.
    const tokens = checkTokens(input.tokens, 'tokens', this.model.config.vocab).slice();
    checkLength(tokens.length, 'tokens', rows.length);
    const documentIds =
      input.documentIds === undefined
        ? undefined
        : checkIds(input.documentIds, 'documentIds', rows.length).slice();
    const logits = await this.#inOrder(() =>
      callEngine(
        (cancellation) => this.#native.decode(rows, tokens, documentIds, cancellation),
        options.signal,
      ),
    );
    return { logits };
  }

  /**
   * Empties rows (default all). Errors: `ERR_SHAPE`, `ERR_ARGUMENT`, `ERR_DISPOSED`.
   *
   * @example
   * await session.reset([1]);
   */
  async reset(rows?: readonly number[]): Promise<void> {
    const checked = checkRows(rows, this.batch);
    await this.#inOrder(() => callEngine(() => this.#native.reset(checked)));
  }

  /**
   * Appends a prompt to a row and draws tokens after it, one per iteration. The row holds all but the last of
   * them. Generators that run at the same time, each in a row of its own, share their decode steps: the weights
   * are read once for all of them. Stopping early, aborting included, leaves the session usable at the last whole
   * token. Errors: as `prefill`, and `ERR_NOT_FINITE`.
   *
   * @example
   * const options = { prompt, maxTokens: 64, temperature: 0.8, topP: 0.95, seed: 1 };
   * for await (const { token, logprob } of session.generate(options)) tokens.push(token);
   */
  generate(options: GenerateOptions): AsyncGenerator<GeneratedToken, void, undefined> {
    const keys = ['prompt', 'maxTokens', 'temperature', 'topK', 'topP', 'seed', 'signal', 'row', 'schedule'];
    checkOptions(options, 'options', keys);
    const { vocab } = this.model.config;
    const {
      maxTokens,
      temperature = 1,
      topK = vocab,
      topP = 1,
      seed = 0,
      signal,
      row = 0,
      schedule = 'exact',
    } = options;
    const prompt = checkTokens(options.prompt, 'prompt', vocab).slice();
    if (prompt.length === 0) throw new DuokvError('ERR_SHAPE', 'prompt is empty; it needs at least 1 token');
    checkInteger(maxTokens, 'maxTokens', 1);
    checkNumber(temperature, 'temperature', { least: 0 });
    checkInteger(topK, 'topK', 1);
    checkNumber(topP, 'topP', { least: 0, most: 1, open: true });
    checkSignal(signal);
    checkInteger(row, 'row', 0, this.batch - 1);
    checkSchedule(schedule);
    const random = new RandomStream(BigInt(seedText(seed)));
    if (prompt.length + maxTokens - 1 > this.capacity) {
      throw new DuokvError(
        'ERR_CAPACITY',
        `a prompt of ${prompt.length} and ${maxTokens} tokens need ${prompt.length + maxTokens - 1} positions; ` +
          `the session's capacity is ${this.capacity}`,
      );
    }
    const draw = (tokens: Int32Array): Draw => ({
      row,
      tokens,
      settings: [temperature, Math.min(topK, vocab), topP, random.next()],
    });
    const begin = () => this.#inOrder(() => this.#draw([draw(prompt)], schedule, signal));
    const steps = this.#steps;
    return (async function* () {
      let [drawn] = (await begin()) as [GeneratedToken];
      for (let count = 1; ; count++) {
        yield drawn;
        if (count === maxTokens) return;
        drawn = await steps.step(draw(Int32Array.of(drawn.token)), signal);
      }
    })();
  }

  /** Frees its memory: calls in the queue reject with `ERR_DISPOSED`. Idempotent. */
  dispose(): void {
    this.#native.dispose();
  }

  [Symbol.dispose](): void {
    this.dispose();
  }
}
