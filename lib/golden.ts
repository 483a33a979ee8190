import { readdir, readFile, stat } from 'node:fs/promises';
import { basename, join } from 'node:path';

import type { TargetBatch } from './arguments.js';
import type { ModelConfig } from './config.js';
import { DuokvError } from './errors.js';
import type { Model } from './model.js';
import { SafetensorsFile } from './safetensors.js';
import type { Session } from './session.js';

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

/** What was compared: its worst deviation as a fraction of the tolerance, at most 1 where it is right. */
export interface QuantityResult {
  readonly quantity: string;
  readonly tolerance: string;
  readonly worst: number;
  /** Where the worst deviation is, and both values there. */
  readonly at: string;
  readonly passed: boolean;
}

export interface CaseResult {
  readonly name: string;
  readonly quantities: readonly QuantityResult[];
  /** The largest of the quantities. */
  readonly worst: number;
  readonly passed: boolean;
  readonly seconds: number;
}

const VALUE = 5e-5;
const MEAN_NLL = 1e-6;
const LOSS = 5e-6;
const GRADIENT_DISTANCE = 3e-5;
const ZERO_GRADIENT = 1e-7;
const GRADIENT_ELEMENT = 2e-5;
const GRADIENT_NORM = 1e-5;
const SETTLED_GRADIENT = 1e-6;
const SETTLED_PARAMETER = 1e-6;
const TRAINED_PARAMETER = 2e-6;
const TRAINED_SHARE = 0.999;
/** The deviation of what must be equal and is not, or is not a number: finite, so that JSON carries it. */
const MISMATCH = 1e9;
const bounded = (share: number) => (Number.isNaN(share) ? MISMATCH : Math.min(share, MISMATCH));

/** How far an FP32 engine may be from the FP64 values, by quantity. */
export const GOLDEN_TOLERANCES = {
  values: `${VALUE} + ${VALUE} |x|`,
  meanNll: `${MEAN_NLL} nats`,
  loss: `${LOSS} nats`,
  gradientDistance: `relative L2 ${GRADIENT_DISTANCE} per tensor; ${ZERO_GRADIENT} per element where the gradient is zero`,
  gradientElements: `${GRADIENT_ELEMENT} of the tensor's largest + ${ZERO_GRADIENT}`,
  gradientNorm: `relative ${GRADIENT_NORM}`,
  firstUpdate: `${SETTLED_PARAMETER} where the clipped gradient is at least ${SETTLED_GRADIENT}, else 2 lr`,
  threeUpdates: `${TRAINED_PARAMETER} for ${100 * TRAINED_SHARE} % of the elements, the sum of 2 lr for all`,
  learningRate: 'relative 1e-12',
  counts: 'equal',
} as const;

/** The recipe of the fixtures. */
const RECIPE = { lr: 3e-4, betas: [0.9, 0.95], eps: 1e-8, weightDecay: 0.1 } as const;
const CLIP_NORM = 1;

/** Collects the worst deviation of each quantity of a case. */
class Comparison {
  readonly #results = new Map<string, { tolerance: string; worst: number; at: string }>();

  add(quantity: string, tolerance: string, share: number, at: string): void {
    const worst = bounded(share);
    const known = this.#results.get(quantity);
    if (known === undefined || worst > known.worst) this.#results.set(quantity, { tolerance, worst, at });
  }

  count(quantity: string, actual: unknown, expected: unknown): void {
    const share = actual === expected ? 0 : MISMATCH;
    this.add(quantity, GOLDEN_TOLERANCES.counts, share, `${actual}, expected ${expected}`);
  }

  scalar(quantity: string, tolerance: string, actual: number, expected: number, limit: number): void {
    this.add(quantity, tolerance, Math.abs(actual - expected) / limit, `${actual}, expected ${expected}`);
  }

  /** Elementwise, with a limit for each element; the shapes are known, the number of elements is checked. */
  elements(
    quantity: string,
    tolerance: string,
    name: string,
    actual: Float32Array,
    expected: Float32Array,
    limit: (index: number) => number,
  ): void {
    if (actual.length !== expected.length) {
      const lengths = `${name}: ${actual.length} elements, expected ${expected.length}`;
      this.add(quantity, tolerance, MISMATCH, lengths);
      return;
    }
    let worst = -1;
    let at = 0;
    for (let i = 0; i < actual.length && !Number.isNaN(worst); i++) {
      const share = Math.abs(actual[i]! - expected[i]!) / limit(i);
      if (share > worst || Number.isNaN(share)) [worst, at] = [share, i];
    }
    this.add(quantity, tolerance, worst, `${name}[${at}] is ${actual[at]}, expected ${expected[at]}`);
  }

  values(quantity: string, name: string, actual: Float32Array, expected: Float32Array): void {
    const limit = (i: number) => VALUE + VALUE * Math.abs(expected[i]!);
    this.elements(quantity, GOLDEN_TOLERANCES.values, name, actual, expected, limit);
  }

  /** The same bits. `actual` may be missing. */
  bits(quantity: string, name: string, actual: Float32Array | undefined, expected: Float32Array): void {
    const different = expected.findIndex((value, i) => !Object.is(actual?.[i], value));
    const at = Math.max(different, 0);
    const values = `${name}[${at}] is ${actual?.[at]}, expected ${expected[at]}`;
    this.add(quantity, GOLDEN_TOLERANCES.counts, different < 0 ? 0 : MISMATCH, values);
  }

  results(): QuantityResult[] {
    return [...this.#results].map(([quantity, result]) => ({
      quantity,
      ...result,
      passed: result.worst <= 1,
    }));
  }
}

/** An object among the facts of a case, which come from a file. */
function section(golden: GoldenCase, key: string): Record<string, unknown> {
  const value = golden.facts[key];
  if (typeof value === 'object' && value !== null) return value as Record<string, unknown>;
  throw new DuokvError(
    'ERR_CHECKPOINT',
    `${golden.name}/expected.json: ${key} is ${JSON.stringify(value)}, not an object`,
  );
}

function fact(golden: GoldenCase, facts: Record<string, unknown>, key: string): number {
  const value = facts[key];
  if (typeof value === 'number') return value;
  throw new DuokvError(
    'ERR_CHECKPOINT',
    `${golden.name}/expected.json: ${key} is ${JSON.stringify(value)}, not a number`,
  );
}

function expectedValues(golden: GoldenCase, name: string): Float32Array {
  const tensor = golden.expected.get(name);
  if (tensor === undefined)
    throw new DuokvError('ERR_CHECKPOINT', `${golden.name}/expected.safetensors: has no ${name}`);
  return tensor.values;
}

function input<T>(golden: GoldenCase, inputs: ReadonlyMap<string, T>, name: string): T {
  const found = inputs.get(name);
  if (found === undefined)
    throw new DuokvError('ERR_CHECKPOINT', `${golden.name}/inputs.safetensors: has no ${name}`);
  return found;
}

/** The batch of a case: of a training case that of one update, its micro-batches one after the other. */
function batchOf(golden: GoldenCase, update = 0): TargetBatch {
  const length = golden.shape.at(-1)!;
  const rows = golden.shape.slice(-3, -1).reduce((product, extent) => product * extent, 1);
  const [first, end] = [update * rows * length, (update + 1) * rows * length];
  return {
    rows,
    tokens: input(golden, golden.tokens, 'tokens').slice(first, end),
    documentIds: input(golden, golden.documentIds, 'document_ids').slice(first, end),
    targets: input(golden, golden.tokens, 'targets').slice(first, end),
    targetDocumentIds: input(golden, golden.documentIds, 'target_document_ids').slice(first, end),
  };
}

async function checkScoring(golden: GoldenCase, model: Model, comparison: Comparison): Promise<void> {
  const { targets, targetDocumentIds, ...inputs } = batchOf(golden);
  comparison.values('logits', 'logits', await model.logits(inputs), expectedValues(golden, 'logits'));
  const score = await model.score({ ...inputs, targets, targetDocumentIds });
  comparison.values('nll', 'nll', score.tokenNll, expectedValues(golden, 'nll'));
  comparison.count('valid targets', score.totalTargets, fact(golden, golden.facts, 'valid_targets'));
  const mean = score.totalNll / score.totalTargets;
  comparison.scalar(
    'mean nll',
    GOLDEN_TOLERANCES.meanNll,
    mean,
    fact(golden, golden.facts, 'loss'),
    MEAN_NLL,
  );
}

/** Loss and gradient norm of an update, beside the `facts` of expected.json. */
function checkLoss(
  golden: GoldenCase,
  facts: Record<string, unknown>,
  result: { loss: number; gradNorm: number; validTargets: number },
  comparison: Comparison,
): void {
  const norm = fact(golden, facts, 'grad_norm');
  comparison.count('valid targets', result.validTargets, fact(golden, facts, 'valid_targets'));
  comparison.scalar('loss', GOLDEN_TOLERANCES.loss, result.loss, fact(golden, facts, 'loss'), LOSS);
  comparison.scalar(
    'gradient norm',
    GOLDEN_TOLERANCES.gradientNorm,
    result.gradNorm,
    norm,
    GRADIENT_NORM * norm,
  );
}

function checkGradient(
  name: string,
  actual: Float32Array,
  expected: Float32Array,
  comparison: Comparison,
): void {
  let largest = 0;
  let squares = 0;
  let distance = 0;
  for (let i = 0; i < expected.length; i++) {
    largest = Math.max(largest, Math.abs(expected[i]!));
    squares += expected[i]! ** 2;
    distance += (actual[i]! - expected[i]!) ** 2;
  }
  const quantity = 'gradients';
  const tolerance = GOLDEN_TOLERANCES.gradientDistance;
  if (squares === 0) comparison.elements(quantity, tolerance, name, actual, expected, () => ZERO_GRADIENT);
  else {
    const relative = Math.sqrt(distance / squares);
    comparison.add(
      quantity,
      tolerance,
      relative / GRADIENT_DISTANCE,
      `${name}: relative L2 ${relative.toExponential(2)}`,
    );
  }
  const limit = GRADIENT_ELEMENT * largest + ZERO_GRADIENT;
  comparison.elements(
    'gradient elements',
    GOLDEN_TOLERANCES.gradientElements,
    name,
    actual,
    expected,
    () => limit,
  );
}

/** Gradients, again with activations recomputed, and the parameters after one update. Leaves the model updated. */
async function checkUpdate(golden: GoldenCase, model: Model, comparison: Comparison): Promise<void> {
  const batch = batchOf(golden);
  const options = { optimizer: RECIPE, clipNorm: CLIP_NORM, microbatch: batch.rows };
  using trainer = model.trainer(options);
  const { gradients, ...result } = await trainer.gradients(batch);
  checkLoss(golden, golden.facts, result, comparison);
  using recomputing = model.trainer({ ...options, recompute: true });
  const recomputed = (await recomputing.gradients(batch)).gradients;
  for (const [name, gradient] of gradients) {
    comparison.bits('recomputed gradients', name, recomputed.get(name), gradient);
  }
  for (const { name } of model.plan.parameters) {
    const gradient = gradients.get(name) ?? new Float32Array();
    checkGradient(name, gradient, expectedValues(golden, `grad.${name}`), comparison);
  }
  await trainer.step(batch);
  const clip = fact(golden, golden.facts, 'clip_coefficient');
  for (const { name } of model.plan.parameters) {
    const expected = golden.expected.get(`adamw1.${name}`);
    if (expected === undefined) continue;
    const gradient = expectedValues(golden, `grad.${name}`);
    const settled = (i: number) => clip * Math.abs(gradient[i]!) >= SETTLED_GRADIENT;
    const limit = (i: number) => (settled(i) ? SETTLED_PARAMETER : 2 * RECIPE.lr);
    const actual = await model.readTensor(name);
    comparison.elements('adamw1', GOLDEN_TOLERANCES.firstUpdate, name, actual, expected.values, limit);
  }
}

/** Every stored tensor is expected, every expected one stored, and their values agree. `part` restricts both. */
async function checkCache(
  golden: GoldenCase,
  session: Session,
  quantity: string,
  prefix: string,
  comparison: Comparison,
  part = '',
): Promise<void> {
  const stored = session.cache.names().filter((name) => name !== 'documentIds' && name.startsWith(part));
  const expected = [...golden.expected.keys()].filter((name) => name.startsWith(prefix));
  const names = expected.map((name) => name.slice(prefix.length));
  comparison.count('cache tensors', stored.toSorted().join(' '), names.toSorted().join(' '));
  for (const name of stored) {
    if (!names.includes(name)) continue;
    comparison.values(quantity, name, await session.cache.read(name), expectedValues(golden, prefix + name));
  }
}

async function checkDocumentIds(
  golden: GoldenCase,
  session: Session,
  steps: number,
  comparison: Comparison,
): Promise<void> {
  const prompt = input(golden, golden.documentIds, 'document_ids');
  const decoded = input(golden, golden.documentIds, 'decode_document_ids');
  const [length, perRow] = [prompt.length / session.batch, decoded.length / session.batch];
  const expected = Array.from({ length: session.batch }, (_, row) => [
    ...prompt.subarray(row * length, (row + 1) * length),
    ...decoded.subarray(row * perRow, row * perRow + steps),
  ]);
  const actual = await session.cache.read('documentIds');
  comparison.count('document ids', actual.join(' '), expected.flat().join(' '));
}

function checkBytes(golden: GoldenCase, session: Session, key: string, comparison: Comparison): void {
  const facts = section(golden, key);
  const { lower, global, local, documentIds, total } = session.cache.bytes();
  const expected = ['kv', 'document_ids', 'total'].map((part) => fact(golden, facts, part));
  comparison.count(
    'cache bytes',
    [lower + global + local, documentIds, total].join(' + '),
    expected.join(' + '),
  );
}

/** Nine teacher-forced steps after an exact prefill. */
async function checkDecode(golden: GoldenCase, session: Session, comparison: Comparison): Promise<void> {
  const steps = fact(golden, golden.facts, 'decode_steps');
  const { vocab } = session.model.config;
  const tokens = input(golden, golden.tokens, 'decode_tokens');
  const ids = input(golden, golden.documentIds, 'decode_document_ids');
  const expected = expectedValues(golden, 'decode_logits');
  for (let step = 0; step < steps; step++) {
    const rows = Array.from({ length: session.batch }, (_, row) => row * steps + step);
    const { logits } = await session.decode({
      tokens: Int32Array.from(rows, (i) => tokens[i]!),
      documentIds: BigInt64Array.from(rows, (i) => ids[i]!),
    });
    rows.forEach((at, row) => {
      const [actual, wanted] = [logits.subarray(row * vocab), expected.subarray(at * vocab)];
      comparison.values(
        'decode logits',
        `row ${row}, step ${step}: logits`,
        actual.slice(0, vocab),
        wanted.slice(0, vocab),
      );
    });
  }
  await checkCache(golden, session, 'decoded cache', 'decoded.cache.', comparison);
  await checkDocumentIds(golden, session, steps, comparison);
  checkBytes(golden, session, 'cache_bytes_fp32_after_decode', comparison);
}

/** Prefill by every route that the design has, decode after the exact one, and the approximate route. */
async function checkSessions(golden: GoldenCase, model: Model, comparison: Comparison): Promise<void> {
  const { rows: batch, tokens, documentIds } = batchOf(golden);
  const length = golden.shape.at(-1)!;
  const prompt = { tokens, documentIds: documentIds! };
  const capacity = length + fact(golden, golden.facts, 'decode_steps');
  const positions = section(golden, 'upper_positions') as Record<string, Record<string, unknown> | undefined>;
  for (const schedule of ['exact', 'full', 'uniform'] as const) {
    const counts = positions[schedule];
    if (counts === undefined) continue;
    using session = model.session({ batch, capacity });
    const result = await session.prefill({ ...prompt, schedule });
    comparison.values(
      `${schedule} logits`,
      'logits',
      result.logits,
      expectedValues(golden, 'prefill_logits'),
    );
    await checkCache(golden, session, `${schedule} cache`, 'cache.', comparison);
    await checkDocumentIds(golden, session, 0, comparison);
    const { kvInput, queryOutput } = result.positions;
    const expected = ['kv_input_positions', 'query_output_positions'].map((key) => fact(golden, counts, key));
    comparison.count('positions', [kvInput, queryOutput].join(' and '), expected.join(' and '));
    comparison.count('exactness', result.exact, true);
    checkBytes(golden, session, 'cache_bytes_fp32', comparison);
    if (schedule === 'exact') await checkDecode(golden, session, comparison);
  }
  const approximate = golden.facts['approximate_R'];
  if (typeof approximate !== 'number') return;
  using session = model.session({ batch, capacity });
  const { logits, exact } = await session.prefill({ ...prompt, schedule: { approximate } });
  comparison.count('exactness', exact, false);
  const expected = expectedValues(golden, 'approximate.prefill_logits');
  comparison.values('approximate logits', 'logits', logits, expected);
  await checkCache(golden, session, 'approximate cache', 'approximate.cache.', comparison, 'local.');
}

/** Three updates of two micro-batches each, with clipping, schedule and moments. Leaves the model updated. */
async function checkThreeUpdates(
  golden: GoldenCase,
  model: Model,
  recompute: boolean,
  comparison: Comparison,
): Promise<void> {
  const updates = Object.values(section(golden, 'updates')) as Record<string, unknown>[];
  const facts = section(golden, 'schedule');
  const [peak, warmup, total, finalFraction] = ['peak', 'warmup', 'total', 'final_fraction'].map((key) =>
    fact(golden, facts, key),
  ) as [number, number, number, number];
  using trainer = model.trainer({
    optimizer: { ...RECIPE, lr: peak },
    schedule: { warmup, total, finalFraction },
    clipNorm: CLIP_NORM,
    microbatch: golden.shape.at(-2)!,
    recompute,
  });
  let farthest = 0;
  for (const [index, expected] of updates.entries()) {
    const result = await trainer.step(batchOf(golden, index));
    const rate = fact(golden, expected, 'lr');
    checkLoss(golden, expected, result, comparison);
    comparison.scalar(
      'learning rate',
      GOLDEN_TOLERANCES.learningRate,
      result.learningRate,
      rate,
      1e-12 * rate,
    );
    farthest += 2 * rate;
    const distances: number[] = [];
    for (const { name } of model.plan.parameters) {
      const actual = await model.readTensor(name);
      const values = expectedValues(golden, `update${index + 1}.${name}`);
      for (const [i, value] of values.entries()) {
        distances.push(bounded(Math.abs(actual[i]! - value)));
      }
    }
    distances.sort((a, b) => a - b);
    const [most, all] = [distances[Math.ceil(TRAINED_SHARE * distances.length) - 1]!, distances.at(-1)!];
    const share = Math.max(most / TRAINED_PARAMETER, all / farthest);
    const at = `update ${index + 1}: ${100 * TRAINED_SHARE} % within ${most}, all within ${all}`;
    comparison.add('parameters after updates', GOLDEN_TOLERANCES.threeUpdates, share, at);
  }
}

async function writeWeights({ weights }: GoldenCase, model: Model): Promise<void> {
  for (const [name, values] of weights) await model.writeTensor(name, values);
}

/**
 * Runs a golden case in `fp32` and compares everything that it has: logits, cross-entropies, gradients, an update, prefill by
 * every route, decoding, caches, counts and bytes; of a training case three updates. Gradients and updates are computed again
 * with activations recomputed, which must give the same bits. `createModel` makes a model of a config on the device to
 * qualify; it is disposed at the end.
 * Errors: those of the engine, and `ERR_CHECKPOINT` where the case lacks something.
 *
 * @example
 * const golden = await readGoldenCase('test/fixtures/golden/gqa2');
 * const { worst, quantities } = await qualifyGoldenCase(golden, (config) => Model.create(device, config));
 */
export async function qualifyGoldenCase(
  golden: GoldenCase,
  createModel: (config: ModelConfig) => Promise<Model>,
): Promise<CaseResult> {
  const started = performance.now();
  const comparison = new Comparison();
  // What the file says is checked by the engine like any other config.
  const config = golden.config as unknown as ModelConfig;
  using model = await createModel(config);
  const names = model.plan.parameters.map(({ name }) => name);
  comparison.count(
    'parameter names',
    names.toSorted().join(' '),
    [...golden.weights.keys()].toSorted().join(' '),
  );
  await writeWeights(golden, model);
  if (golden.facts['updates'] !== undefined) {
    await checkThreeUpdates(golden, model, false, comparison);
    using recomputed = await createModel(config);
    await writeWeights(golden, recomputed);
    await checkThreeUpdates(golden, recomputed, true, comparison);
    for (const name of names) {
      const [actual, expected] = [await recomputed.readTensor(name), await model.readTensor(name)];
      comparison.bits('recomputed parameters', name, actual, expected);
    }
  } else {
    comparison.count('parameters', model.parameterCount, fact(golden, golden.facts, 'parameters'));
    await checkScoring(golden, model, comparison);
    await checkSessions(golden, model, comparison);
    await checkUpdate(golden, model, comparison);
  }
  const quantities = comparison.results();
  const worst = quantities.reduce((largest, result) => Math.max(largest, result.worst), 0);
  const seconds = (performance.now() - started) / 1000;
  return { name: golden.name, quantities, worst, passed: worst <= 1, seconds };
}
