import { readdir, readFile, stat } from 'node:fs/promises';
import { basename, join } from 'node:path';

import { DuokvError } from './errors.js';
import { SafetensorsFile } from './safetensors.js';

/** A tensor of expected values, computed in FP64 and stored as FP32. */
export interface GoldenTensor {
  readonly shape: readonly number[];
  readonly values: Float32Array;
}

/** The files of one golden case: weights and inputs, and what a correct engine makes of them. */
export interface GoldenCase {
  readonly name: string;
  /** As the file has it; creating the model validates it. */
  readonly config: Record<string, unknown>;
  readonly weights: ReadonlyMap<string, Float32Array>;
  /** I32 tensors: `tokens`, `targets`, `decode_tokens`. */
  readonly tokens: ReadonlyMap<string, Int32Array>;
  /** I64 tensors: `document_ids`, `target_document_ids`, `decode_document_ids`. */
  readonly documentIds: ReadonlyMap<string, BigInt64Array>;
  /** Shape of `tokens`: [rows, length], or [updates, micro-batches, rows, length] of a training case. */
  readonly shape: readonly number[];
  readonly expected: ReadonlyMap<string, GoldenTensor>;
  /** The scalars of `expected.json`. */
  readonly facts: Record<string, unknown>;
}

const CASE_FILES = [
  'config.json',
  'weights.safetensors',
  'inputs.safetensors',
  'expected.json',
  'expected.safetensors',
];

async function isCase(directory: string): Promise<boolean> {
  const found = await Promise.all(
    CASE_FILES.map((file) =>
      stat(join(directory, file)).then(
        (status) => status.isFile(),
        () => false,
      ),
    ),
  );
  return found.every(Boolean);
}

/**
 * Directories of the golden cases under `directory`, in alphabetical order: the directory itself, or its subdirectories.
 * Errors: `ERR_ARGUMENT` where there is none.
 */
export async function findGoldenCases(directory: string): Promise<string[]> {
  if (await isCase(directory)) return [directory];
  const entries = await readdir(directory, { withFileTypes: true }).catch(() => []);
  const candidates = entries
    .filter((entry) => entry.isDirectory())
    .map((entry) => join(directory, entry.name));
  const cases: string[] = [];
  for (const candidate of candidates.sort()) if (await isCase(candidate)) cases.push(candidate);
  if (cases.length === 0) {
    throw new DuokvError(
      'ERR_ARGUMENT',
      `${directory}: has no golden case (a folder with ${CASE_FILES.join(', ')})`,
    );
  }
  return cases;
}

async function readJson(path: string): Promise<Record<string, unknown>> {
  try {
    return JSON.parse(await readFile(path, 'utf8'));
  } catch (error) {
    throw new DuokvError('ERR_CHECKPOINT', `${path}: ${(error as Error).message}`, { cause: error });
  }
}

/** Errors: `ERR_CHECKPOINT` where a file is malformed. */
export async function readGoldenCase(directory: string): Promise<GoldenCase> {
  const weights = new Map<string, Float32Array>();
  const tokens = new Map<string, Int32Array>();
  const documentIds = new Map<string, BigInt64Array>();
  const expected = new Map<string, GoldenTensor>();
  await using weightFile = await SafetensorsFile.open(join(directory, 'weights.safetensors'));
  for (const name of weightFile.tensors.keys()) weights.set(name, await weightFile.readFloat32(name));
  await using inputFile = await SafetensorsFile.open(join(directory, 'inputs.safetensors'));
  for (const [name, { dtype }] of inputFile.tensors) {
    if (dtype === 'I32') tokens.set(name, await inputFile.readInt32(name));
    else documentIds.set(name, await inputFile.readBigInt64(name));
  }
  const shape = inputFile.tensors.get('tokens')?.shape;
  if (shape === undefined)
    throw new DuokvError('ERR_CHECKPOINT', `${inputFile.path}: has no tensor "tokens"`);
  await using expectedFile = await SafetensorsFile.open(join(directory, 'expected.safetensors'));
  for (const [name, info] of expectedFile.tensors) {
    expected.set(name, { shape: info.shape, values: await expectedFile.readFloat32(name) });
  }
  const config = await readJson(join(directory, 'config.json'));
  const facts = await readJson(join(directory, 'expected.json'));
  return { name: basename(directory), config, weights, tokens, documentIds, shape, expected, facts };
}
