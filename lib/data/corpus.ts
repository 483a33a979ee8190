import { createHash } from 'node:crypto';

import { checkInteger, type TargetBatch } from '../arguments.js';
import { DuokvError } from '../errors.js';
import { readDocuments, type TextDocument } from './documents.js';
import type { Tokenizer } from './tokenizer.js';

/** A document's tokens, wrapped in BOS and EOS. */
export interface TokenDocument {
  readonly id: string;
  readonly tokens: Int32Array;
}

/** A batch for `trainer.step`, `trainer.gradients` and `model.score`: `rows` rows of one length, arrays `[rows, length]`. */
export interface WindowBatch extends TargetBatch {
  readonly rows: number;
  readonly tokens: Int32Array;
  readonly documentIds: BigInt64Array;
  readonly targets: Int32Array;
  readonly targetDocumentIds: BigInt64Array;
}

/** Texts are tokenised in groups of about this many characters: enough for the tokenizer's threads, little memory. */
const GROUP_CHARACTERS = 1 << 20;

/**
 * Tokenises documents as they stream in and wraps each in BOS and EOS. Documents without text are dropped and counted
 * in `onEmpty`.
 */
export async function* tokenizeDocuments(
  documents: AsyncIterable<TextDocument> | Iterable<TextDocument>,
  tokenizer: Tokenizer,
  onEmpty: (document: TextDocument) => void = () => {},
): AsyncGenerator<TokenDocument> {
  let group: TextDocument[] = [];
  let characters = 0;
  async function* flush(): AsyncGenerator<TokenDocument> {
    const encoded = await tokenizer.encode(group.map(({ text }) => text));
    for (const [index, ids] of encoded.entries()) {
      const tokens = new Int32Array(ids.length + 2);
      tokens[0] = tokenizer.bos;
      tokens.set(ids, 1);
      tokens[tokens.length - 1] = tokenizer.eos;
      yield { id: (group[index] as TextDocument).id, tokens };
    }
    group = [];
    characters = 0;
  }
  for await (const document of documents) {
    if (document.text === '') {
      onEmpty(document);
      continue;
    }
    group.push(document);
    characters += document.text.length;
    if (characters >= GROUP_CHARACTERS) yield* flush();
  }
  if (group.length > 0) yield* flush();
}

/**
 * All documents under `path`, tokenised (see `readDocuments` for what a path may be), and how many without text were
 * dropped. Errors: `ERR_DATA`, also where no document has text.
 */
export async function loadTokenDocuments(
  path: string,
  tokenizer: Tokenizer,
): Promise<{ documents: TokenDocument[]; empty: number }> {
  const documents: TokenDocument[] = [];
  let empty = 0;
  const stream = tokenizeDocuments(readDocuments(path), tokenizer, () => empty++);
  for await (const document of stream) documents.push(document);
  if (documents.length === 0)
    throw new DuokvError('ERR_DATA', `${path}: no document has text (${empty} without)`);
  return { documents, empty };
}

/** SHA-256 of `text` as an integer of 48 bits, which a number holds exactly. */
function hash48(text: string): number {
  return createHash('sha256').update(text).digest().readUIntBE(0, 6);
}

/** The indices `0 … keys.length-1` sorted by the hashes of `keys`; equal hashes keep their order. */
function hashOrder(keys: Iterable<string>): Uint32Array {
  const hashes = Array.from(keys, hash48);
  return Uint32Array.from(hashes.keys()).sort(
    (a, b) => (hashes[a] as number) - (hashes[b] as number) || a - b,
  );
}

/**
 * Parts documents into training and held-out ones. The held-out share is taken in the order of the SHA-256 of the ids:
 * the same documents every time, at least one of two or more. Both parts keep the source's order.
 */
export function holdOut(
  documents: readonly TokenDocument[],
  fraction: number,
): { training: TokenDocument[]; heldOut: TokenDocument[] } {
  if (!(fraction >= 0 && fraction < 1)) {
    throw new DuokvError('ERR_ARGUMENT', `fraction: must lie in [0, 1), got ${fraction}`);
  }
  const most = Math.max(0, documents.length - 1);
  const count = fraction === 0 ? 0 : Math.min(most, Math.max(1, Math.round(documents.length * fraction)));
  const chosen = new Set(hashOrder(documents.map(({ id }) => id)).subarray(0, count));
  return {
    training: documents.filter((_, index) => !chosen.has(index)),
    heldOut: documents.filter((_, index) => chosen.has(index)),
  };
}

/**
 * Documents laid end to end and cut into training windows (spec, protocols section 1): window w has the inputs
 * `[w·context, (w+1)·context)` of the stream and the targets one token later, so the boundary token is the last target of
 * one window and the first input of the next. The tail too short for a window is dropped.
 */
export class WindowCorpus {
  readonly context: number;
  /** Number of windows. */
  readonly windows: number;
  /** Tokens of the whole stream, and those at its end that are neither input nor target of any window. */
  readonly tokens: number;
  readonly droppedTokens: number;
  /** Targets in the document of their input, over all windows. */
  readonly validTargets: number;
  readonly #stream: Int32Array;
  /** Document index of each stream token. */
  readonly #document: Int32Array;

  /** Errors: `ERR_DATA` where the documents do not fill one window. */
  constructor(documents: readonly TokenDocument[], context: number) {
    if (!Number.isSafeInteger(context) || context < 1) {
      throw new DuokvError('ERR_ARGUMENT', `context: must be a positive integer, got ${context}`);
    }
    this.context = context;
    this.tokens = documents.reduce((sum, { tokens }) => sum + tokens.length, 0);
    this.windows = Math.max(0, Math.floor((this.tokens - 1) / context));
    if (this.windows === 0) {
      throw new DuokvError(
        'ERR_DATA',
        `the text has ${this.tokens} tokens in ${documents.length} documents; one window of context ${context} needs ${context + 1}`,
      );
    }
    this.droppedTokens = this.tokens - (this.windows * context + 1);
    this.#stream = new Int32Array(this.tokens);
    this.#document = new Int32Array(this.tokens);
    let end = 0;
    for (const [index, { tokens }] of documents.entries()) {
      this.#stream.set(tokens, end);
      this.#document.fill(index, end, end + tokens.length);
      end += tokens.length;
    }
    const last = this.windows * context;
    // Between a first and a last token as many targets are invalid as there are steps to another document.
    this.validTargets = last;
    for (let i = 1; i <= last; i++) if (this.#document[i] !== this.#document[i - 1]) this.validTargets--;
  }

  /** SHA-256 of the stream's tokens and document boundaries: equal for equal text, tokenizer and order. */
  hash(): string {
    const hash = createHash('sha256');
    for (const array of [this.#stream, this.#document]) hash.update(new Uint8Array(array.buffer));
    return hash.digest('hex');
  }

  /** The given windows as the rows of one batch. Document ids are the indices of the documents. */
  batch(windows: ArrayLike<number>): WindowBatch {
    const { context } = this;
    const rows = windows.length;
    const tokens = new Int32Array(rows * context);
    const targets = new Int32Array(rows * context);
    const documentIds = new BigInt64Array(rows * context);
    const targetDocumentIds = new BigInt64Array(rows * context);
    for (let row = 0; row < rows; row++) {
      const window = windows[row] as number;
      if (!Number.isSafeInteger(window) || window < 0 || window >= this.windows) {
        throw new DuokvError('ERR_ARGUMENT', `windows[${row}]: ${window} is outside [0, ${this.windows})`);
      }
      const begin = window * context;
      tokens.set(this.#stream.subarray(begin, begin + context), row * context);
      targets.set(this.#stream.subarray(begin + 1, begin + context + 1), row * context);
      for (let i = 0; i < context; i++) {
        documentIds[row * context + i] = BigInt(this.#document[begin + i] as number);
        targetDocumentIds[row * context + i] = BigInt(this.#document[begin + i + 1] as number);
      }
    }
    return { rows, tokens, documentIds, targets, targetDocumentIds };
  }
}

/**
 * The permutation of `windows` windows that training with `seed` follows in pass `epoch`: their order by
 * SHA-256("seed:epoch:window"), which is simple to reproduce elsewhere. Errors: `ERR_ARGUMENT` for counts below 0 and
 * anything that is no integer.
 */
export function windowOrder(windows: number, seed: number | bigint, epoch = 0): Uint32Array {
  checkInteger(windows, 'windows', 0);
  if (typeof seed !== 'bigint') checkInteger(seed, 'seed', Number.MIN_SAFE_INTEGER);
  checkInteger(epoch, 'epoch', 0);
  return hashOrder(Array.from({ length: windows }, (_, window) => `${seed}:${epoch}:${window}`));
}

/** SHA-256 of an order's little-endian 32-bit words: equal in two runs that saw the same windows in the same order. */
export function orderHash(order: Uint32Array): string {
  return createHash('sha256')
    .update(new Uint8Array(order.buffer, order.byteOffset, order.byteLength))
    .digest('hex');
}

/** Document ids of padding: of the inputs, and of their targets, which are thereby invalid. */
const PADDING = -1n;
const PADDING_TARGET = -2n;

/**
 * Rows for scoring. Every target of a document is scored once, each with the context from the start of its window.
 * A document starts a window of its own unless it fits into the rest of the current one, so its score does not depend
 * on its neighbours; what is left of a row is padding without valid targets.
 *
 * Yields batches of up to `rows` rows; document ids are the indices of `documents`, -1 for padding. Errors, at the call:
 * `ERR_ARGUMENT` for a `context` or `rows` that is no positive integer.
 */
export function scoringBatches(
  documents: readonly TokenDocument[],
  context: number,
  rows: number,
): Generator<WindowBatch> {
  checkInteger(context, 'context', 1);
  checkInteger(rows, 'rows', 1);
  return packRows(documents, context, rows);
}

function* packRows(
  documents: readonly TokenDocument[],
  context: number,
  rows: number,
): Generator<WindowBatch> {
  // Pieces of one row: inputs [begin, end) of a document, targets [begin + 1, end + 1).
  type Piece = { document: number; begin: number; end: number };
  const packed: Piece[][] = [];
  let room = 0;
  for (const [document, { tokens }] of documents.entries()) {
    const inputs = tokens.length - 1;
    for (let begin = 0; begin < inputs; begin += context) {
      const end = Math.min(inputs, begin + context);
      if (begin > 0 || inputs > room) {
        packed.push([]);
        room = context;
      }
      (packed.at(-1) as Piece[]).push({ document, begin, end });
      room -= end - begin;
    }
  }
  for (let first = 0; first < packed.length; first += rows) {
    const group = packed.slice(first, first + rows);
    const tokens = new Int32Array(group.length * context);
    const targets = new Int32Array(group.length * context);
    const documentIds = new BigInt64Array(group.length * context).fill(PADDING);
    const targetDocumentIds = new BigInt64Array(group.length * context).fill(PADDING_TARGET);
    for (const [row, pieces] of group.entries()) {
      let at = row * context;
      for (const { document, begin, end } of pieces) {
        const source = (documents[document] as TokenDocument).tokens;
        tokens.set(source.subarray(begin, end), at);
        targets.set(source.subarray(begin + 1, end + 1), at);
        documentIds.fill(BigInt(document), at, at + end - begin);
        targetDocumentIds.fill(BigInt(document), at, at + end - begin);
        at += end - begin;
      }
    }
    yield { rows: group.length, tokens, documentIds, targets, targetDocumentIds };
  }
}
