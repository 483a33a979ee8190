import { isUtf8 } from 'node:buffer';
import { createReadStream } from 'node:fs';
import { readdir, readFile, realpath, stat } from 'node:fs/promises';
import { basename, join } from 'node:path';
import { pipeline, type Readable } from 'node:stream';
import { createGunzip } from 'node:zlib';

import { DuokvError } from '../errors.js';

export interface TextDocument {
  /** What names the document in its source: a path relative to the folder, or a JSONL record's id. */
  readonly id: string;
  readonly text: string;
}

const TEXT_FILE = /\.(txt|md)$/i;
const JSONL_FILE = /\.jsonl(\.gz)?$/i;
const NEWLINE = 0x0a;

function unreadable(path: string, error: unknown): DuokvError {
  const { code, message } = error as NodeJS.ErrnoException;
  const reason =
    code === 'ENOENT'
      ? 'does not exist'
      : code === 'EACCES'
        ? 'permission denied'
        : `cannot be read: ${message}`;
  return new DuokvError('ERR_DATA', `${path}: ${reason}`, { cause: error });
}

/**
 * `bytes` as text; `line` is the number of its first line in `path`. A byte order mark is dropped. Errors: `ERR_DATA`
 * naming the line.
 */
export function decodeUtf8(bytes: Buffer, path: string, line: number): string {
  if (isUtf8(bytes)) return new TextDecoder().decode(bytes);
  // A newline is never part of a longer UTF-8 sequence, so some single line is invalid on its own.
  for (let begin = 0; ; line++) {
    const newline = bytes.indexOf(NEWLINE, begin);
    const end = newline < 0 ? bytes.length : newline;
    if (newline < 0 || !isUtf8(bytes.subarray(begin, end))) break;
    begin = end + 1;
  }
  throw new DuokvError('ERR_DATA', `${path}: line ${line} is not valid UTF-8`);
}

async function readTextFile(path: string, id: string): Promise<TextDocument> {
  const bytes = await readFile(path).catch((error: unknown) => {
    throw unreadable(path, error);
  });
  return { id, text: decodeUtf8(bytes, path, 1) };
}

/**
 * Relative paths of the text files below `folder`. Links are followed, but a folder or file that several paths lead to
 * is taken once: links cannot run in circles, nor put a document on both sides of a split.
 */
async function listTextFiles(folder: string): Promise<string[]> {
  const ids: string[] = [];
  /** Real paths. */
  const seen = new Set<string>();
  const links: { id: string; path: string }[] = [];
  function addFile(id: string, real: string): void {
    if (!TEXT_FILE.test(id) || seen.has(real)) return;
    seen.add(real);
    ids.push(id);
  }
  /** Adds what is below a folder, and puts links off, so that they change no path of what is there without them. */
  async function walk(id: string, real: string): Promise<void> {
    seen.add(real);
    const entries = await readdir(real, { withFileTypes: true });
    for (const entry of entries) {
      const entryId = `${id}${entry.name}`;
      const path = join(real, entry.name);
      if (entry.isDirectory() && !seen.has(path)) await walk(`${entryId}/`, path);
      else if (entry.isFile()) addFile(entryId, path);
      else if (entry.isSymbolicLink()) links.push({ id: entryId, path });
    }
  }
  await walk('', await realpath(folder));
  while (links.length > 0) {
    // Of two links to one target the first by path counts, whatever order the file system lists them in.
    for (const { id, path } of links.splice(0).sort((a, b) => (a.id < b.id ? -1 : 1))) {
      const status = await stat(path).catch((error: unknown) => {
        // A link to nowhere matters only where it is named as text.
        if (TEXT_FILE.test(id)) throw unreadable(join(folder, id), error);
      });
      if (status === undefined) continue;
      const real = await realpath(path);
      if (status.isDirectory() && !seen.has(real)) await walk(`${id}/`, real);
      else if (status.isFile()) addFile(id, real);
    }
  }
  // Sorted by code units of the relative path, because directory order differs between file systems.
  return ids.sort();
}

async function* readFolder(folder: string): AsyncGenerator<TextDocument> {
  const ids = await listTextFiles(folder).catch((error: unknown) => {
    throw error instanceof DuokvError ? error : unreadable(folder, error);
  });
  if (ids.length === 0) throw new DuokvError('ERR_DATA', `${folder}: no .txt or .md file in this folder`);
  for (const id of ids) yield readTextFile(join(folder, id), id);
}

/** The lines of a byte stream without their newlines, numbered from 1. Memory: the longest line. */
async function* readLines(stream: Readable): AsyncGenerator<{ bytes: Buffer; line: number }> {
  let parts: Buffer[] = [];
  let line = 1;
  for await (const chunk of stream as AsyncIterable<Buffer>) {
    let begin = 0;
    for (let end = chunk.indexOf(NEWLINE); end >= 0; end = chunk.indexOf(NEWLINE, begin)) {
      parts.push(chunk.subarray(begin, end));
      yield { bytes: Buffer.concat(parts), line: line++ };
      parts = [];
      begin = end + 1;
    }
    if (begin < chunk.length) parts.push(chunk.subarray(begin));
  }
  if (parts.length > 0) yield { bytes: Buffer.concat(parts), line };
}

function parseRecord(text: string, path: string, line: number): TextDocument {
  const where = `${path}: line ${line}`;
  let record: unknown;
  try {
    record = JSON.parse(text);
  } catch (error) {
    throw new DuokvError('ERR_DATA', `${where} is not JSON: ${(error as Error).message}`, { cause: error });
  }
  if (typeof record !== 'object' || record === null || Array.isArray(record)) {
    throw new DuokvError('ERR_DATA', `${where} is not a JSON object`);
  }
  const { text: body, id } = record as Record<string, unknown>;
  if (typeof body !== 'string') {
    throw new DuokvError(
      'ERR_DATA',
      `${where}: "text" must be a string, got ${body === null ? 'null' : typeof body}`,
    );
  }
  if (id !== undefined && typeof id !== 'string' && typeof id !== 'number') {
    throw new DuokvError('ERR_DATA', `${where}: "id" must be a string or a number`);
  }
  return { id: id === undefined ? `${basename(path)}:${line}` : String(id), text: body };
}

async function* readJsonl(path: string): AsyncGenerator<TextDocument> {
  const file = createReadStream(path);
  // `pipeline` destroys the last stream with the error of any other, so reading it meets every error.
  const stream = path.toLowerCase().endsWith('.gz') ? pipeline(file, createGunzip(), () => {}) : file;
  let documents = 0;
  try {
    for await (const { bytes, line } of readLines(stream)) {
      const text = decodeUtf8(bytes, path, line);
      if (text.trim() === '') continue;
      documents++;
      yield parseRecord(text, path, line);
    }
  } catch (error) {
    throw error instanceof DuokvError ? error : unreadable(path, error);
  } finally {
    file.destroy();
  }
  if (documents === 0) throw new DuokvError('ERR_DATA', `${path}: no records in this file`);
}

/**
 * Streams the documents under `path`, in an order that depends on the input only:
 *
 * - a folder: every .txt and .md file below it, one document each, by relative path; links are followed, each file
 *   is read once;
 * - a .jsonl or .jsonl.gz file: one document a line, `{ "text": …, "id"?: … }`;
 * - any other file: one document.
 *
 * Errors: `ERR_DATA` naming the file, and the line where there is one, for a folder without text files, a file that
 * cannot be read, a line that is no such record, and invalid UTF-8.
 */
export async function* readDocuments(path: string): AsyncGenerator<TextDocument> {
  const status = await stat(path).catch((error: unknown) => {
    throw unreadable(path, error);
  });
  if (status.isDirectory()) yield* readFolder(path);
  else if (JSONL_FILE.test(path)) yield* readJsonl(path);
  else yield readTextFile(path, basename(path));
}
