import type { ModelConfig } from './config.js';
import { DuokvError } from './errors.js';
import type { PrecisionName, RouteName } from './native.js';

/*
 * Checks of what callers pass, with messages that name the argument, the index, the limit and the value. The
 * addon checks again what memory safety rests on.
 */

/** Tokens as an Int32Array, or as a plain array of integers. */
export type Tokens = Int32Array | readonly number[];

export const PRECISIONS: readonly PrecisionName[] = ['fp32', 'fp32-tf32x3', 'bf16-tf32x3', 'bf16'];

/** A value as a message shows it. */
export function show(value: unknown): string {
  if (typeof value === 'string') return JSON.stringify(value.length > 40 ? `${value.slice(0, 40)}…` : value);
  if (typeof value === 'bigint') return `${value}n`;
  if (Array.isArray(value)) return 'an array';
  if (typeof value === 'object' && value !== null)
    return `a ${value.constructor?.name ?? 'null-prototype object'}`;
  if (typeof value === 'function') return 'a function';
  return String(value);
}

const bad = (message: string) => new DuokvError('ERR_ARGUMENT', message);

/** A plain object with no other keys than `keys`; `undefined` counts as empty where `optional`. */
export function checkOptions(value: unknown, name: string, keys: readonly string[]): void {
  if (typeof value !== 'object' || value === null || Array.isArray(value) || ArrayBuffer.isView(value)) {
    throw bad(`${name} must be an object, not ${show(value)}`);
  }
  for (const key of Object.keys(value)) {
    if (!keys.includes(key))
      throw bad(`${name} has an unknown key ${show(key)}; known keys: ${keys.join(', ')}`);
  }
}

export function checkInteger(
  value: unknown,
  name: string,
  least: number,
  most: number = Number.MAX_SAFE_INTEGER,
): asserts value is number {
  if (!Number.isSafeInteger(value) || (value as number) < least || (value as number) > most) {
    const limit = most === Number.MAX_SAFE_INTEGER ? `of at least ${least}` : `between ${least} and ${most}`;
    throw bad(`${name} is ${show(value)}; it must be an integer ${limit}`);
  }
}

/** A finite number in `[least, most]`, or above `least` where `open`. */
export function checkNumber(
  value: unknown,
  name: string,
  { least, most = Number.POSITIVE_INFINITY, open = false }: { least: number; most?: number; open?: boolean },
): asserts value is number {
  const inside =
    typeof value === 'number' &&
    Number.isFinite(value) &&
    value <= most &&
    (open ? value > least : value >= least);
  if (!inside) {
    const upper = most === Number.POSITIVE_INFINITY ? '' : ` and at most ${most}`;
    throw bad(
      `${name} is ${show(value)}; it must be a number ${open ? 'above' : 'of at least'} ${least}${upper}`,
    );
  }
}

export function checkDirectory(value: unknown): asserts value is string {
  if (typeof value !== 'string' || value === '') throw bad(`directory is ${show(value)}; it must be a path`);
}

export function checkBoolean(value: unknown, name: string): asserts value is boolean {
  if (typeof value !== 'boolean') throw bad(`${name} is ${show(value)}; it must be true or false`);
}

export function checkPrecision(value: unknown): asserts value is PrecisionName {
  if (!PRECISIONS.includes(value as PrecisionName)) {
    throw bad(`precision is ${show(value)}; it must be one of ${PRECISIONS.join(', ')}`);
  }
}

export function checkSignal(value: unknown): asserts value is AbortSignal | undefined {
  if (value !== undefined && !(value instanceof AbortSignal))
    throw bad(`signal must be an AbortSignal, not ${show(value)}`);
}

/** `{ precision, signal }`, the options of calls that only compute. */
export function checkCallOptions(options: unknown, keys: readonly string[]): void {
  checkOptions(options, 'options', keys);
  const { precision, signal } = options as { precision?: unknown; signal?: unknown };
  if (precision !== undefined) checkPrecision(precision);
  checkSignal(signal);
}

/** Schedules that have a name. */
export const ROUTES = ['exact', 'full', 'uniform'] as const;

/**
 * A prefill schedule: a route's name, or `{ approximate: R }`, every upper layer over the last R positions
 * only.
 */
export type Schedule = (typeof ROUTES)[number] | { readonly approximate: number };

export function checkSchedule(schedule: unknown): { route: RouteName; suffix: number } {
  const route = ROUTES.find((name) => name === schedule);
  if (route !== undefined) return { route, suffix: 0 };
  if (typeof schedule === 'object' && schedule !== null) {
    checkOptions(schedule, 'schedule', ['approximate']);
    const { approximate } = schedule as { approximate?: unknown };
    checkInteger(approximate, 'schedule.approximate', 1);
    return { route: 'approximate', suffix: approximate };
  }
  throw bad(`schedule is ${show(schedule)}; it must be one of ${ROUTES.join(', ')}, { approximate: R }`);
}

function checkUnshared(array: Int32Array | BigInt64Array | Float32Array, name: string): void {
  // Another thread could change shared memory between a check and its use.
  if (!(array.buffer instanceof ArrayBuffer))
    throw bad(`${name} is backed by a SharedArrayBuffer; pass a copy`);
}

/** Tokens as an Int32Array, each in `[0, vocab)`. Errors: `ERR_ARGUMENT`, `ERR_TOKEN_RANGE`. */
export function checkTokens(value: unknown, name: string, vocab: number): Int32Array {
  if (value instanceof Int32Array) checkUnshared(value, name);
  else if (!Array.isArray(value)) throw bad(`${name} must be an Int32Array, not ${show(value)}`);
  const tokens: ArrayLike<unknown> = value;
  for (let i = 0; i < tokens.length; i++) {
    const token = tokens[i];
    if (typeof token !== 'number' || !Number.isInteger(token) || token < 0 || token >= vocab) {
      const reason = Number.isInteger(token) ? `is outside [0, ${vocab})` : 'is not an integer';
      throw new DuokvError('ERR_TOKEN_RANGE', `${name}[${i}]: token ${show(token)} ${reason}`);
    }
  }
  return value instanceof Int32Array ? value : Int32Array.from(value as number[]);
}

/** Document ids, int64 in any order. Errors: `ERR_ARGUMENT`, `ERR_SHAPE`. */
export function checkIds(value: unknown, name: string, length: number): BigInt64Array {
  if (!(value instanceof BigInt64Array)) throw bad(`${name} must be a BigInt64Array, not ${show(value)}`);
  checkUnshared(value, name);
  checkLength(value.length, name, length);
  return value;
}

export function checkLength(found: number, name: string, expected: number): void {
  if (found !== expected)
    throw new DuokvError('ERR_SHAPE', `${name} has ${found} elements, expected ${expected}`);
}

export function checkFloats(value: unknown, name: string): Float32Array {
  if (!(value instanceof Float32Array)) throw bad(`${name} must be a Float32Array, not ${show(value)}`);
  checkUnshared(value, name);
  return value;
}

/** A document of one row: the tokens `[begin, end)`, counted from the row's start, with one id. */
export interface DocumentRun {
  readonly id: bigint;
  readonly begin: number;
  readonly end: number;
}

/**
 * The documents of row `row`, `ids[begin … begin + length - 1]`: maximal runs of equal ids.
 * Errors: `ERR_DOCUMENT_IDS` with the position where an id recurs.
 */
export function documentRuns(ids: BigInt64Array, row: number, length: number, name: string): DocumentRun[] {
  const first = row * length;
  // Pairs of 32-bit words compare without making a bigint of every element.
  const words = new Int32Array(ids.buffer, ids.byteOffset + 8 * first, 2 * length);
  const runs: DocumentRun[] = [];
  const seen = new Set<bigint>();
  for (let begin = 0; begin < length; ) {
    let end = begin + 1;
    while (end < length && words[2 * end] === words[2 * begin] && words[2 * end + 1] === words[2 * begin + 1])
      end++;
    const id = ids[first + begin] as bigint;
    if (seen.has(id)) {
      throw new DuokvError(
        'ERR_DOCUMENT_IDS',
        `${name}: id ${id} recurs in row ${row} at position ${begin}; a document is one run of equal ids`,
      );
    }
    seen.add(id);
    runs.push({ id, begin, end });
    begin = end;
  }
  return runs;
}

/** Distinct rows in `[0, batch)`; all of them where absent. Errors: `ERR_ARGUMENT`, `ERR_SHAPE`. */
export function checkRows(rows: unknown, batch: number): number[] {
  if (rows === undefined) return Array.from({ length: batch }, (_, row) => row);
  if (!Array.isArray(rows)) throw bad(`rows must be an array of row numbers, not ${show(rows)}`);
  if (rows.length === 0) throw new DuokvError('ERR_SHAPE', 'rows is empty; at least 1 row must be named');
  if (rows.length > batch) {
    throw new DuokvError('ERR_SHAPE', `rows names ${rows.length} rows; the session has ${batch}`);
  }
  const seen = new Set<number>();
  for (const [index, row] of rows.entries()) {
    checkInteger(row, `rows[${index}]`, 0, batch - 1);
    if (seen.has(row)) throw new DuokvError('ERR_SHAPE', `rows[${index}]: row ${row} is named twice`);
    seen.add(row);
  }
  return [...rows] as number[];
}

/** The arrays of `R` rows of `T` positions, row-major. */
export interface TokenBatch {
  /** `[R, T]`, each in `[0, vocab)`. */
  readonly tokens: Tokens;
  /** `[R, T]`; a document is a run of equal ids within a row. Without ids every row is one document. */
  readonly documentIds?: BigInt64Array;
  /** `R`, the number of rows. */
  readonly rows: number;
}

export interface TargetBatch extends TokenBatch {
  /** `[R, T]`, the token after each input token. */
  readonly targets: Tokens;
  /** `[R, T]`; a target counts when its id equals its input's. Given exactly when `documentIds` are. */
  readonly targetDocumentIds?: BigInt64Array;
}

export interface CheckedBatch {
  rows: number;
  length: number;
  tokens: Int32Array;
  documentIds: BigInt64Array | undefined;
}

/** Errors: `ERR_ARGUMENT`, `ERR_SHAPE`, `ERR_TOKEN_RANGE`, `ERR_DOCUMENT_IDS`. */
export function checkTokenBatch(
  batch: unknown,
  { vocab }: ModelConfig,
  keys: readonly string[] = [],
): CheckedBatch {
  checkOptions(batch, 'batch', ['tokens', 'documentIds', 'rows', ...keys]);
  const { tokens: given, documentIds: givenIds, rows } = batch as TokenBatch;
  checkInteger(rows, 'rows', 1);
  const tokens = checkTokens(given, 'tokens', vocab);
  if (tokens.length === 0)
    throw new DuokvError('ERR_SHAPE', 'tokens is empty; a batch needs at least 1 position');
  if (tokens.length % rows !== 0) {
    throw new DuokvError(
      'ERR_SHAPE',
      `tokens has ${tokens.length} elements, which do not make ${rows} rows of equal length`,
    );
  }
  const length = tokens.length / rows;
  const documentIds = givenIds === undefined ? undefined : checkIds(givenIds, 'documentIds', tokens.length);
  if (documentIds !== undefined) {
    for (let row = 0; row < rows; row++) documentRuns(documentIds, row, length, 'documentIds');
  }
  return { rows, length, tokens, documentIds };
}

/** Also `ERR_NO_TARGETS` where no target is valid. */
export function checkTargetBatch(
  batch: unknown,
  config: ModelConfig,
): CheckedBatch & {
  targets: Int32Array;
  targetDocumentIds: BigInt64Array | undefined;
  validTargets: number;
} {
  const checked = checkTokenBatch(batch, config, ['targets', 'targetDocumentIds']);
  const { targets: given, targetDocumentIds: givenIds } = batch as TargetBatch;
  const targets = checkTokens(given, 'targets', config.vocab);
  checkLength(targets.length, 'targets', checked.tokens.length);
  if ((givenIds === undefined) !== (checked.documentIds === undefined)) {
    throw bad(
      'documentIds and targetDocumentIds belong together: pass both, or neither where every row is one document',
    );
  }
  if (givenIds === undefined)
    return { ...checked, targets, targetDocumentIds: undefined, validTargets: targets.length };
  const targetDocumentIds = checkIds(givenIds, 'targetDocumentIds', targets.length);
  const validTargets = countEqual(checked.documentIds as BigInt64Array, targetDocumentIds);
  if (validTargets === 0) {
    throw new DuokvError(
      'ERR_NO_TARGETS',
      `none of the ${targets.length} targets is valid: no targetDocumentIds[i] equals documentIds[i]`,
    );
  }
  return { ...checked, targets, targetDocumentIds, validTargets };
}

function countEqual(a: BigInt64Array, b: BigInt64Array): number {
  const x = new Int32Array(a.buffer, a.byteOffset, 2 * a.length);
  const y = new Int32Array(b.buffer, b.byteOffset, 2 * b.length);
  let count = 0;
  for (let i = 0; i < x.length; i += 2) if (x[i] === y[i] && x[i + 1] === y[i + 1]) count++;
  return count;
}
