import { readFile } from 'node:fs/promises';
import { join } from 'node:path';

import { Tokenizer as HuggingFaceTokenizer } from 'tokenizers';

import { makeDirectories } from '../directory.js';
import { DuokvError } from '../errors.js';
import { replaceFile } from '../replace-file.js';

/**
 * Text to token ids and back. Special tokens are ids only: no text, whatever it says, is encoded as one. What a vocabulary
 * does not tell apart comes back as one: SentencePiece writes a space as U+2581, and returns either as a space.
 */
export interface Tokenizer {
  /** Ids lie in `[0, vocab)`; `bos` and `eos` are among them. */
  readonly vocab: number;
  readonly bos: number;
  readonly eos: number;
  /** `tokenizer.json` in the format of Hugging Face's tokenizers, with `bos` and `eos` as special tokens. */
  readonly json: string;
  /** The ids of each text, without `bos` and `eos`. */
  encode(texts: readonly string[]): Promise<Int32Array[]>;
  decoder(): TokenDecoder;
}

/** Turns a stream of ids into text as soon as the characters are complete; `bos` and `eos` give no text. */
export interface TokenDecoder {
  /** Adds one id; the text that is certain now, often the empty string. */
  push(id: number): Promise<string>;
  /** The remaining text; an incomplete character becomes U+FFFD. */
  end(): Promise<string>;
}

interface TokenizerJson {
  decoder?: unknown;
  model: { vocab?: Record<string, number> | [string, number][] };
  added_tokens?: { id: number; content: string }[];
  [key: string]: unknown;
}

const BYTE_BOS = 256;
const BYTE_EOS = 257;

/** How ByteLevel spells the 256 bytes: printable Latin-1 stands for itself, the others follow from U+0100. */
function byteAlphabet(): string[] {
  const isPrintable = (byte: number) => (byte >= 33 && byte <= 126) || (byte >= 161 && byte !== 173);
  let shifted = 256;
  return Array.from({ length: 256 }, (_, byte) => String.fromCharCode(isPrintable(byte) ? byte : shifted++));
}

/** The byte-level vocabulary as a `tokenizer.json`: id b is byte b, 256 is `<|bos|>`, 257 is `<|eos|>`. */
function byteLevelJson(): string {
  const vocab = Object.fromEntries(byteAlphabet().map((character, byte) => [character, byte]));
  const special = { single_word: false, lstrip: false, rstrip: false, normalized: false, special: true };
  const byteLevel = { type: 'ByteLevel', add_prefix_space: false, trim_offsets: false, use_regex: false };
  return JSON.stringify({
    version: '1.0',
    truncation: null,
    padding: null,
    added_tokens: [
      { id: BYTE_BOS, content: '<|bos|>', ...special },
      { id: BYTE_EOS, content: '<|eos|>', ...special },
    ],
    normalizer: null,
    pre_tokenizer: byteLevel,
    post_processor: null,
    decoder: byteLevel,
    model: {
      type: 'BPE',
      dropout: null,
      unk_token: null,
      continuing_subword_prefix: null,
      end_of_word_suffix: null,
      fuse_unk: false,
      byte_fallback: false,
      vocab,
      merges: [],
    },
  });
}

/** The 256 bytes of UTF-8 and two special tokens, 258 ids: needs no file and covers every text. */
export function byteTokenizer(): Tokenizer {
  return {
    vocab: 258,
    bos: BYTE_BOS,
    eos: BYTE_EOS,
    json: byteLevelJson(),
    async encode(texts) {
      return texts.map((text) => Int32Array.from(Buffer.from(text)));
    },
    decoder() {
      const utf8 = new TextDecoder('utf-8', { ignoreBOM: true });
      return {
        // Ids beyond the bytes have no text: the special tokens, and the rest of a model's larger vocabulary.
        push: async (id) => (id < 256 ? utf8.decode(Uint8Array.of(id), { stream: true }) : ''),
        end: async () => utf8.decode(),
      };
    },
  };
}

/** The bytes of UTF-8 that a piece of the vocabulary stands for; undefined where it is text by the tokenizer's own rules. */
function bytesOfPieces(decoder: unknown): (piece: string) => Uint8Array | undefined {
  const { type, decoders = [] } = (decoder ?? {}) as { type?: string; decoders?: { type?: string }[] };
  const types = type === 'Sequence' ? decoders.map((one) => one.type) : [type];
  if (types.includes('ByteLevel')) {
    const byteOf = new Map(byteAlphabet().map((character, byte) => [character, byte]));
    return (piece) => {
      const bytes = Array.from(piece, (character) => byteOf.get(character));
      return bytes.includes(undefined) ? undefined : Uint8Array.from(bytes as number[]);
    };
  }
  if (types.includes('ByteFallback')) {
    return (piece) => {
      const hex = /^<0x([0-9A-F]{2})>$/.exec(piece)?.[1];
      return hex === undefined ? undefined : Uint8Array.of(Number.parseInt(hex, 16));
    };
  }
  return () => undefined;
}

class HuggingFaceDecoder implements TokenDecoder {
  readonly #tokenizer: HuggingFaceTokenizer;
  readonly #silent: ReadonlySet<number>;
  readonly #bytesOf: (id: number) => Uint8Array | undefined;
  // The tokenizer makes U+FFFD of characters whose bytes are not all there, which a text may contain itself.
  readonly #utf8 = new TextDecoder('utf-8', { ignoreBOM: true });
  // Decoders look at neighbours (a leading space is dropped only at the start), so a piece is decoded after another that was
  // already given out, and that piece's text is cut off again.
  #context: number[] = [];

  constructor(
    tokenizer: HuggingFaceTokenizer,
    silent: ReadonlySet<number>,
    bytesOf: (id: number) => Uint8Array | undefined,
  ) {
    this.#tokenizer = tokenizer;
    this.#silent = silent;
    this.#bytesOf = bytesOf;
  }

  async push(id: number): Promise<string> {
    if (this.#silent.has(id)) return '';
    const bytes = this.#bytesOf(id);
    if (bytes !== undefined) {
      if (this.#context.length === 0) this.#context = [id];
      return this.#utf8.decode(bytes, { stream: true });
    }
    const broken = this.#utf8.decode();
    const before = await this.#tokenizer.decode(this.#context, false);
    const after = await this.#tokenizer.decode([...this.#context, id], false);
    this.#context = [id];
    return broken + after.slice(before.length);
  }

  async end(): Promise<string> {
    return this.#utf8.decode();
  }
}

/** Special tokens of common vocabularies, tried in this order when none is named. */
const COMMON_BOS = ['<s>', '<|bos|>', '<bos>', '<|begin_of_text|>', '<|startoftext|>', '<|endoftext|>'];
const COMMON_EOS = ['</s>', '<|eos|>', '<eos>', '<|end_of_text|>', '<|endoftext|>'];

/**
 * A tokenizer from the text of a `tokenizer.json`. Its `added_tokens` and `post_processor` are not applied: a document
 * that contains `</s>` is text, and `bos` and `eos` are added by whoever wraps documents.
 *
 * `bos` and `eos` name the special tokens; without them the names of common vocabularies are looked for.
 * Errors: `ERR_DATA` for a malformed file or special tokens that are not in it.
 */
export function huggingFaceTokenizer(
  json: string,
  options: { path: string; bos?: string; eos?: string },
): Tokenizer {
  const { path } = options;
  if (json === byteLevelJson()) return byteTokenizer();
  let parsed: TokenizerJson;
  let tokenizer: HuggingFaceTokenizer;
  try {
    parsed = JSON.parse(json) as TokenizerJson;
    tokenizer = HuggingFaceTokenizer.fromString(
      JSON.stringify({ ...parsed, added_tokens: [], post_processor: null, truncation: null, padding: null }),
    );
  } catch (error) {
    throw new DuokvError('ERR_DATA', `${path}: not a tokenizer.json: ${(error as Error).message}`, {
      cause: error,
    });
  }
  const { vocab: pieces = {} } = parsed.model;
  const ids = new Map<string, number>(
    // Unigram models list [piece, score] in the order of their ids, the others map piece to id.
    Array.isArray(pieces) ? pieces.map(([piece], id) => [piece, id]) : Object.entries(pieces),
  );
  const pieceOf = new Map(Array.from(ids, ([piece, id]) => [id, piece]));
  for (const { content, id } of parsed.added_tokens ?? []) ids.set(content, id);

  function special(key: 'bos' | 'eos', common: readonly string[]): number {
    const named = options[key];
    const found = (named === undefined ? common : [named]).find((name) => ids.has(name));
    if (found !== undefined) return ids.get(found) as number;
    const looked =
      named === undefined ? `none of ${common.join(' ')} is in it` : `no token ${JSON.stringify(named)}`;
    throw new DuokvError('ERR_DATA', `${path}: ${key}: ${looked}; name the ${key} token with --${key}`);
  }
  const bos = special('bos', COMMON_BOS);
  const eos = special('eos', COMMON_EOS);
  const silent = new Set([bos, eos]);
  const bytesOfPiece = bytesOfPieces(parsed.decoder);
  const bytesOf = (id: number) => bytesOfPiece(pieceOf.get(id) ?? '');
  return {
    vocab: Array.from(ids.values()).reduce((highest, id) => Math.max(highest, id), -1) + 1,
    bos,
    eos,
    json,
    async encode(texts) {
      const encodings = await tokenizer.encodeBatch([...texts], { addSpecialTokens: false });
      return encodings.map((encoding) => Int32Array.from(encoding.getIds()));
    },
    decoder: () => new HuggingFaceDecoder(tokenizer, silent, bytesOf),
  };
}

async function readJson(path: string): Promise<string> {
  try {
    return await readFile(path, 'utf8');
  } catch (error) {
    throw new DuokvError('ERR_DATA', `${path}: ${(error as Error).message}`, { cause: error });
  }
}

/** The tokenizer in a `tokenizer.json` file. Errors: `ERR_DATA`. */
export async function loadTokenizer(
  path: string,
  names: { bos?: string; eos?: string } = {},
): Promise<Tokenizer> {
  return huggingFaceTokenizer(await readJson(path), { path, ...names });
}

function tokenName(json: string, id: number): string {
  const { added_tokens: added = [], model } = JSON.parse(json) as TokenizerJson;
  const name = added.find((token) => token.id === id)?.content;
  if (name !== undefined) return name;
  const { vocab = {} } = model;
  return Array.isArray(vocab)
    ? (vocab[id] as [string, number])[0]
    : (Object.entries(vocab).find(([, value]) => value === id) as [string, number])[0];
}

/** Stores the tokenizer beside a checkpoint, as Hugging Face does: `tokenizer.json` and `tokenizer_config.json`. */
export async function saveTokenizer(directory: string, tokenizer: Tokenizer): Promise<void> {
  await makeDirectories(directory);
  const config = {
    tokenizer_class: 'PreTrainedTokenizerFast',
    bos_token: tokenName(tokenizer.json, tokenizer.bos),
    eos_token: tokenName(tokenizer.json, tokenizer.eos),
  };
  await replaceFile(join(directory, 'tokenizer.json'), (file) => file.writeFile(tokenizer.json));
  await replaceFile(join(directory, 'tokenizer_config.json'), (file) =>
    file.writeFile(`${JSON.stringify(config, null, 2)}\n`),
  );
}

/** The tokenizer stored with a checkpoint. Errors: `ERR_DATA` where the directory has none. */
export async function loadCheckpointTokenizer(directory: string): Promise<Tokenizer> {
  const path = join(directory, 'tokenizer.json');
  const json = await readJson(path);
  if (json === byteLevelJson()) return byteTokenizer();
  const configPath = join(directory, 'tokenizer_config.json');
  let config: Record<string, unknown>;
  try {
    config = JSON.parse(await readFile(configPath, 'utf8')) as Record<string, unknown>;
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === 'ENOENT') return huggingFaceTokenizer(json, { path });
    throw new DuokvError('ERR_DATA', `${configPath}: ${(error as Error).message}`, { cause: error });
  }
  // Hugging Face writes a special token as its text, or as { content, … }.
  const text = (token: unknown): string | undefined =>
    typeof token === 'string' ? token : (token as { content?: string } | null | undefined)?.content;
  const [bos, eos] = [text(config['bos_token']), text(config['eos_token'])];
  return huggingFaceTokenizer(json, {
    path,
    ...(bos === undefined ? {} : { bos }),
    ...(eos === undefined ? {} : { eos }),
  });
}
