import { type FileHandle, open, readFile, stat } from 'node:fs/promises';
import { basename, dirname, join } from 'node:path';

import { DuokvError } from './errors.js';
import { replaceFile } from './replace-file.js';

/*
 * The safetensors container (https://github.com/huggingface/safetensors): an 8-byte little-endian header length, a JSON
 * header { name: { dtype, shape, data_offsets: [begin, end] } }, then the tensors' bytes without holes or overlaps.
 * Data is little-endian, as is every platform that duokv builds on, so bytes and typed arrays share memory unconverted.
 */

const BYTES_PER_ELEMENT = {
  BOOL: 1,
  U8: 1,
  I8: 1,
  F8_E4M3: 1,
  F8_E5M2: 1,
  U16: 2,
  I16: 2,
  F16: 2,
  BF16: 2,
  U32: 4,
  I32: 4,
  F32: 4,
  U64: 8,
  I64: 8,
  F64: 8,
} as const;

export type SafetensorsDtype = keyof typeof BYTES_PER_ELEMENT;

export interface TensorInfo {
  readonly dtype: SafetensorsDtype;
  readonly shape: readonly number[];
  /** Number of elements: the product of `shape`, 1 for a scalar. */
  readonly length: number;
  /** Bytes `[begin, end)`, counted from the first byte after the header. */
  readonly begin: number;
  readonly end: number;
}

/** Named tensors to read from: one file, or the shards of a checkpoint directory. */
export interface TensorSource extends AsyncDisposable {
  readonly tensors: ReadonlyMap<string, TensorInfo>;
  /** An F32, BF16 or F16 tensor, widened to FP32. Errors: `ERR_CHECKPOINT` for an absent name or another dtype. */
  readFloat32(name: string): Promise<Float32Array>;
  close(): Promise<void>;
}

/** A tensor to write. `data` may be a function, so that a large checkpoint never exists in memory as a whole. */
export interface TensorEntry {
  readonly name: string;
  readonly shape: readonly number[];
  readonly dtype: 'F32' | 'BF16' | 'F16' | 'I32' | 'I64';
  /** F32: Float32Array, BF16 and F16: Uint16Array of bit patterns, I32: Int32Array, I64: BigInt64Array. */
  readonly data: TensorData | (() => TensorData | Promise<TensorData>);
}

export type TensorData = Float32Array | Uint16Array | Int32Array | BigInt64Array;

/** The limit of the reference implementation: a longer header is an attack or a mistake. */
const MAX_HEADER_BYTES = 100_000_000;
/** One read or write call moves at most this much: system calls stop short of 2 GiB, and 16 MiB already runs at disk speed. */
const CHUNK_BYTES = 16 << 20;

function bad(message: string, cause?: unknown): DuokvError {
  return new DuokvError('ERR_CHECKPOINT', message, cause === undefined ? undefined : { cause });
}

function isPlainObject(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

function isCount(value: unknown): value is number {
  return Number.isSafeInteger(value) && (value as number) >= 0;
}

/** The product of `shape`, or undefined where it leaves the range of exact integers. */
function elementCount(shape: readonly number[]): number | undefined {
  // A zero anywhere makes the product zero, even where the other factors overflow on the way.
  if (shape.includes(0)) return 0;
  let count = 1;
  for (const extent of shape) {
    count *= extent;
    if (!Number.isSafeInteger(count)) return undefined;
  }
  return count;
}

function parseTensorInfo(path: string, name: string, entry: unknown, dataBytes: number): TensorInfo {
  const where = `${path}: tensor ${JSON.stringify(name)}`;
  if (!isPlainObject(entry)) throw bad(`${where}: its header entry is not an object`);
  const { dtype, shape, data_offsets: offsets, ...rest } = entry;
  const unknown = Object.keys(rest)[0];
  if (unknown !== undefined)
    throw bad(`${where}: unknown key ${JSON.stringify(unknown)} in its header entry`);
  if (typeof dtype !== 'string' || !Object.hasOwn(BYTES_PER_ELEMENT, dtype)) {
    throw bad(`${where}: unknown dtype ${JSON.stringify(dtype)}`);
  }
  if (!Array.isArray(shape) || !shape.every(isCount)) {
    throw bad(`${where}: shape ${JSON.stringify(shape)} is not a list of non-negative integers`);
  }
  if (!Array.isArray(offsets) || offsets.length !== 2 || !offsets.every(isCount)) {
    throw bad(`${where}: data_offsets ${JSON.stringify(offsets)} is not a pair of non-negative integers`);
  }
  const [begin, end] = offsets as [number, number];
  if (begin > end || end > dataBytes) {
    throw bad(`${where}: data_offsets [${begin}, ${end}] do not lie within the ${dataBytes} bytes of data`);
  }
  const length = elementCount(shape);
  const bytes = length === undefined ? undefined : length * BYTES_PER_ELEMENT[dtype as SafetensorsDtype];
  if (length === undefined || bytes !== end - begin) {
    const needed = bytes === undefined ? 'more bytes than can be counted' : `${bytes} bytes`;
    throw bad(`${where}: ${dtype} [${shape.join(', ')}] needs ${needed}, data_offsets give ${end - begin}`);
  }
  return { dtype: dtype as SafetensorsDtype, shape, length, begin, end };
}

/** The tensors tile the data: none overlaps another, and no byte is left over (which could hide a second payload). */
function checkTiling(path: string, tensors: ReadonlyMap<string, TensorInfo>, dataBytes: number): void {
  const inOrder = [...tensors].sort(([, a], [, b]) => a.begin - b.begin || a.end - b.end);
  let covered = 0;
  for (const [name, { begin, end }] of inOrder) {
    if (begin !== covered) {
      const fault = begin < covered ? 'overlaps the tensor before it' : 'leaves a hole before it';
      throw bad(
        `${path}: tensor ${JSON.stringify(name)}: begins at byte ${begin} and ${fault}, which ends at ${covered}`,
      );
    }
    covered = end;
  }
  if (covered !== dataBytes)
    throw bad(`${path}: tensors end at byte ${covered}, but the file has ${dataBytes} bytes of data`);
}

function parseHeader(path: string, text: string, dataBytes: number) {
  let header: unknown;
  try {
    header = JSON.parse(text);
  } catch (error) {
    throw bad(`${path}: the header is not JSON: ${(error as Error).message}`, error);
  }
  if (!isPlainObject(header)) throw bad(`${path}: the header is not a JSON object`);
  const metadata: Record<string, string> = {};
  const tensors = new Map<string, TensorInfo>();
  for (const [name, entry] of Object.entries(header)) {
    if (name !== '__metadata__') {
      tensors.set(name, parseTensorInfo(path, name, entry, dataBytes));
      continue;
    }
    if (!isPlainObject(entry)) throw bad(`${path}: __metadata__ is not an object`);
    for (const [key, value] of Object.entries(entry)) {
      if (typeof value !== 'string')
        throw bad(`${path}: __metadata__ key ${JSON.stringify(key)} is not a string`);
      Object.defineProperty(metadata, key, { value, enumerable: true });
    }
  }
  checkTiling(path, tensors, dataBytes);
  return { metadata, tensors };
}

async function readFully(
  handle: FileHandle,
  path: string,
  target: Uint8Array,
  position: number,
): Promise<void> {
  let done = 0;
  while (done < target.byteLength) {
    const length = Math.min(CHUNK_BYTES, target.byteLength - done);
    const { bytesRead } = await handle.read(target, done, length, position + done);
    if (bytesRead === 0) {
      throw bad(
        `${path}: ends at byte ${position + done}, ${target.byteLength - done} bytes before it should`,
      );
    }
    done += bytesRead;
  }
}

/** BF16 bit patterns to FP32: BF16 is the upper half of an FP32. */
export function bf16ToFloat32(bits: Uint16Array, target: Float32Array): void {
  const words = new Uint32Array(target.buffer, target.byteOffset, target.length);
  for (let i = 0; i < bits.length; i++) words[i] = bits[i] << 16;
}

/** FP32 to BF16 bit patterns, rounding to nearest even. A NaN stays a (quiet) NaN of the same sign. */
export function float32ToBf16(values: Float32Array, target: Uint16Array): void {
  const words = new Uint32Array(values.buffer, values.byteOffset, values.length);
  for (let i = 0; i < words.length; i++) {
    const word = words[i];
    const nan = (word & 0x7fffffff) > 0x7f800000;
    target[i] = nan ? (word >>> 16) | 0x40 : (word + 0x7fff + ((word >>> 16) & 1)) >>> 16;
  }
}

/** F16 bit patterns (1 sign, 5 exponent, 10 mantissa bits) to FP32, exactly. */
export function f16ToFloat32(bits: Uint16Array, target: Float32Array): void {
  for (let i = 0; i < bits.length; i++) {
    const word = bits[i];
    const sign = word & 0x8000 ? -1 : 1;
    const exponent = (word >>> 10) & 0x1f;
    const mantissa = word & 0x3ff;
    if (exponent === 0x1f) target[i] = mantissa === 0 ? sign * Infinity : NaN;
    else if (exponent === 0) target[i] = sign * mantissa * 2 ** -24;
    else target[i] = sign * (1024 + mantissa) * 2 ** (exponent - 25);
  }
}

/** One safetensors file, opened for lazy reads: `open` reads and validates the header only. */
export class SafetensorsFile implements TensorSource {
  readonly path: string;
  readonly metadata: Readonly<Record<string, string>>;
  readonly tensors: ReadonlyMap<string, TensorInfo>;
  readonly #handle: FileHandle;
  readonly #dataStart: number;

  private constructor(
    path: string,
    handle: FileHandle,
    dataStart: number,
    header: { metadata: Record<string, string>; tensors: Map<string, TensorInfo> },
  ) {
    this.path = path;
    this.#handle = handle;
    this.#dataStart = dataStart;
    this.metadata = header.metadata;
    this.tensors = header.tensors;
  }

  /** Errors: `ERR_CHECKPOINT` naming the file, the tensor and the numbers, where the file is absent or malformed. */
  static async open(path: string): Promise<SafetensorsFile> {
    let handle: FileHandle;
    try {
      handle = await open(path, 'r');
    } catch (error) {
      throw bad(`${path}: cannot be opened: ${(error as Error).message}`, error);
    }
    try {
      const status = await handle.stat();
      if (!status.isFile()) throw bad(`${path}: is not a file`);
      const { size } = status;
      if (size < 8)
        throw bad(`${path}: has ${size} bytes; a safetensors file begins with 8 bytes of header length`);
      const prefix = new Uint8Array(8);
      await readFully(handle, path, prefix, 0);
      const headerBytes = new DataView(prefix.buffer).getBigUint64(0, true);
      if (headerBytes > BigInt(MAX_HEADER_BYTES) || headerBytes > BigInt(size - 8)) {
        throw bad(
          `${path}: header length ${headerBytes} exceeds the limit of ${Math.min(MAX_HEADER_BYTES, size - 8)} bytes`,
        );
      }
      const dataStart = 8 + Number(headerBytes);
      const header = new Uint8Array(Number(headerBytes));
      await readFully(handle, path, header, 8);
      let text: string;
      try {
        text = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(header);
      } catch (error) {
        throw bad(`${path}: the header is not UTF-8`, error);
      }
      return new SafetensorsFile(path, handle, dataStart, parseHeader(path, text, size - dataStart));
    } catch (error) {
      await handle.close();
      throw error;
    }
  }

  #info(name: string, ...dtypes: SafetensorsDtype[]): TensorInfo {
    const info = this.tensors.get(name);
    if (info === undefined) throw bad(`${this.path}: has no tensor ${JSON.stringify(name)}`);
    if (!dtypes.includes(info.dtype)) {
      throw bad(
        `${this.path}: tensor ${JSON.stringify(name)}: is ${info.dtype}; expected ${dtypes.join(' or ')}`,
      );
    }
    return info;
  }

  #read(target: ArrayBufferView, info: TensorInfo, firstByte = 0): Promise<void> {
    const bytes = new Uint8Array(target.buffer, target.byteOffset, target.byteLength);
    return readFully(this.#handle, this.path, bytes, this.#dataStart + info.begin + firstByte);
  }

  async readFloat32(name: string): Promise<Float32Array> {
    const info = this.#info(name, 'F32', 'BF16', 'F16');
    const target = new Float32Array(info.length);
    if (info.dtype === 'F32') {
      await this.#read(target, info);
      return target;
    }
    const widen = info.dtype === 'BF16' ? bf16ToFloat32 : f16ToFloat32;
    const scratch = new Uint16Array(Math.min(info.length, CHUNK_BYTES / 2));
    for (let first = 0; first < info.length; first += scratch.length) {
      const bits = scratch.subarray(0, Math.min(scratch.length, info.length - first));
      await this.#read(bits, info, 2 * first);
      widen(bits, target.subarray(first, first + bits.length));
    }
    return target;
  }

  async readInt32(name: string): Promise<Int32Array> {
    const info = this.#info(name, 'I32');
    const target = new Int32Array(info.length);
    await this.#read(target, info);
    return target;
  }

  async readBigInt64(name: string): Promise<BigInt64Array> {
    const info = this.#info(name, 'I64');
    const target = new BigInt64Array(info.length);
    await this.#read(target, info);
    return target;
  }

  close(): Promise<void> {
    return this.#handle.close();
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }
}

/** The shards named by a `model.safetensors.index.json`, read as if they were one file. */
class ShardedSafetensors implements TensorSource {
  readonly tensors: ReadonlyMap<string, TensorInfo>;
  readonly #shards: readonly SafetensorsFile[];
  readonly #shardOf: ReadonlyMap<string, SafetensorsFile>;

  private constructor(shards: SafetensorsFile[], shardOf: Map<string, SafetensorsFile>) {
    this.#shards = shards;
    this.#shardOf = shardOf;
    this.tensors = new Map(
      [...shardOf].map(([name, shard]) => [name, shard.tensors.get(name) as TensorInfo]),
    );
  }

  static async open(indexPath: string): Promise<ShardedSafetensors> {
    let index: unknown;
    try {
      index = JSON.parse(await readFile(indexPath, 'utf8'));
    } catch (error) {
      throw bad(`${indexPath}: cannot be read as JSON: ${(error as Error).message}`, error);
    }
    const weightMap = isPlainObject(index) ? index.weight_map : undefined;
    if (!isPlainObject(weightMap)) throw bad(`${indexPath}: has no object "weight_map"`);
    const shards = new Map<string, SafetensorsFile>();
    const shardOf = new Map<string, SafetensorsFile>();
    try {
      for (const [name, file] of Object.entries(weightMap)) {
        // A shard lives beside its index: an index must not reach files elsewhere.
        if (
          typeof file !== 'string' ||
          file === '' ||
          file === '..' ||
          basename(file) !== file ||
          file.includes('\\')
        ) {
          throw bad(
            `${indexPath}: tensor ${JSON.stringify(name)}: ${JSON.stringify(file)} is not a file name`,
          );
        }
        let shard = shards.get(file);
        if (shard === undefined) {
          shard = await SafetensorsFile.open(join(dirname(indexPath), file));
          shards.set(file, shard);
        }
        if (!shard.tensors.has(name)) {
          throw bad(`${shard.path}: has no tensor ${JSON.stringify(name)}, which ${indexPath} places there`);
        }
        shardOf.set(name, shard);
      }
    } catch (error) {
      await Promise.all([...shards.values()].map((shard) => shard.close()));
      throw error;
    }
    return new ShardedSafetensors([...shards.values()], shardOf);
  }

  readFloat32(name: string): Promise<Float32Array> {
    const shard = this.#shardOf.get(name);
    if (shard === undefined) return Promise.reject(bad(`no shard has a tensor ${JSON.stringify(name)}`));
    return shard.readFloat32(name);
  }

  async close(): Promise<void> {
    await Promise.all(this.#shards.map((shard) => shard.close()));
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }
}

async function exists(path: string): Promise<boolean> {
  try {
    return (await stat(path)).isFile();
  } catch {
    return false;
  }
}

/**
 * The weights of a checkpoint directory: `model.safetensors`, or else the shards of `model.safetensors.index.json`.
 * Errors: `ERR_CHECKPOINT` where neither exists or one is malformed.
 */
export async function openCheckpointTensors(directory: string): Promise<TensorSource> {
  const single = join(directory, 'model.safetensors');
  if (await exists(single)) return SafetensorsFile.open(single);
  const index = join(directory, 'model.safetensors.index.json');
  if (await exists(index)) return ShardedSafetensors.open(index);
  throw bad(`${directory}: has neither model.safetensors nor model.safetensors.index.json`);
}

const ARRAY_OF_DTYPE = {
  F32: Float32Array,
  BF16: Uint16Array,
  F16: Uint16Array,
  I32: Int32Array,
  I64: BigInt64Array,
} as const;

function layOut(
  path: string,
  entries: readonly TensorEntry[],
): { entry: TensorEntry; length: number; begin: number; end: number }[] {
  // Wide elements first keeps every tensor aligned to its own element size, as the reference implementation does.
  const ordered = [...entries].sort((a, b) => BYTES_PER_ELEMENT[b.dtype] - BYTES_PER_ELEMENT[a.dtype]);
  const names = new Set(['__metadata__']);
  let offset = 0;
  return ordered.map((entry) => {
    if (names.has(entry.name)) {
      throw new DuokvError(
        'ERR_ARGUMENT',
        `${path}: tensor name ${JSON.stringify(entry.name)} is reserved or occurs twice`,
      );
    }
    names.add(entry.name);
    const length = entry.shape.every(isCount) ? elementCount(entry.shape) : undefined;
    if (length === undefined) {
      throw new DuokvError(
        'ERR_SHAPE',
        `${path}: tensor ${JSON.stringify(entry.name)}: shape [${entry.shape.join(', ')}]`,
      );
    }
    const begin = offset;
    offset += length * BYTES_PER_ELEMENT[entry.dtype];
    return { entry, length, begin, end: offset };
  });
}

async function writeFully(handle: FileHandle, bytes: Uint8Array): Promise<void> {
  let done = 0;
  while (done < bytes.byteLength) {
    const { bytesWritten } = await handle.write(bytes, done, Math.min(CHUNK_BYTES, bytes.byteLength - done));
    done += bytesWritten;
  }
}

/**
 * Writes a safetensors file through `replaceFile`, one tensor at a time.
 * Errors: `ERR_SHAPE` where an array does not have the product of its shape as length, `ERR_ARGUMENT` for a repeated
 * name or an array of another type; the file system's own errors pass through.
 */
export async function writeSafetensors(
  path: string,
  entries: readonly TensorEntry[],
  metadata: Readonly<Record<string, string>> = {},
): Promise<void> {
  const layout = layOut(path, entries);
  const header = new Map<string, unknown>(
    Object.keys(metadata).length > 0 ? [['__metadata__', metadata]] : [],
  );
  for (const { entry, begin, end } of layout) {
    header.set(entry.name, { dtype: entry.dtype, shape: entry.shape, data_offsets: [begin, end] });
  }
  // Spaces at the end are part of the format: they align the data to 8 bytes.
  const text = Buffer.from(JSON.stringify(Object.fromEntries(header)));
  const prefix = Buffer.alloc(8 + Math.ceil(text.length / 8) * 8, ' ');
  prefix.writeBigUInt64LE(BigInt(prefix.length - 8));
  prefix.set(text, 8);
  await replaceFile(path, async (handle) => {
    await writeFully(handle, prefix);
    for (const { entry, length } of layout) {
      const data = typeof entry.data === 'function' ? await entry.data() : entry.data;
      const where = `${path}: tensor ${JSON.stringify(entry.name)}`;
      if (!(data instanceof ARRAY_OF_DTYPE[entry.dtype])) {
        throw new DuokvError(
          'ERR_ARGUMENT',
          `${where}: ${entry.dtype} is written from a ${ARRAY_OF_DTYPE[entry.dtype].name}`,
        );
      }
      if (data.length !== length) {
        throw new DuokvError(
          'ERR_SHAPE',
          `${where}: has ${data.length} elements, shape [${entry.shape.join(', ')}] ${length}`,
        );
      }
      await writeFully(handle, new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
    }
  });
}
