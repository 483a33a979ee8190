import { readFile } from 'node:fs/promises';
import { dirname, join } from 'node:path';

import { show } from './arguments.js';
import { configFromLlama, type ModelConfig } from './config.js';
import { openCurrent, replaceFiles } from './directory.js';
import { DuokvError, type ErrorCode } from './errors.js';
import type { DesignPlan } from './native.js';
import { designPlan } from './plan.js';
import { replaceFile } from './replace-file.js';
import {
  openCheckpointTensors,
  SafetensorsFile,
  type TensorEntry,
  type TensorInfo,
  type TensorSource,
  writeSafetensors,
} from './safetensors.js';

/*
 * A checkpoint is a directory: config.json with the keys of a Hugging Face Llama config and a `duokv` block
 * that holds the ModelConfig, and model.safetensors under Hugging Face names. Where the plan is plain
 * grouped-query attention the directory is one of LlamaForCausalLM.
 */

const CONFIG_FILE = 'config.json';
const WEIGHTS_FILE = 'model.safetensors';

const bad = (message: string, cause?: unknown) =>
  new DuokvError('ERR_CHECKPOINT', message, cause === undefined ? undefined : { cause });

/** Files that make up a model's checkpoint: replaced as a whole, in whatever form they were. */
function belongsToModel(name: string): boolean {
  return name === CONFIG_FILE || /^model(-\d+-of-\d+)?\.safetensors(\.index\.json)?$/.test(name);
}

/**
 * Every layer projects K and V of its own from its own input and reads nothing else, and there is no
 * parameter beyond.
 */
export function isLlama(plan: DesignPlan): boolean {
  return plan.layers.every(({ layer, projects, reads, adapter }) => {
    const [projection] = projects;
    const [read] = reads;
    return (
      projects.length === 1 &&
      reads.length === 1 &&
      !adapter &&
      projection?.representation === layer &&
      read?.kBank === projection?.bank &&
      read?.vBank === projection?.bank &&
      read?.window === 0 &&
      !read.multiplicityBias
    );
  });
}

/**
 * `config.json` of a plan. A plan that is no Llama carries another model type, so that nothing else loads it
 * as one.
 */
function huggingFaceConfig(plan: DesignPlan): Record<string, unknown> {
  const { config } = plan;
  const llama = isLlama(plan);
  const ropeScale = config.ropeScale ?? 1;
  return {
    architectures: [llama ? 'LlamaForCausalLM' : 'DuokvForCausalLM'],
    model_type: llama ? 'llama' : 'duokv',
    vocab_size: config.vocab,
    hidden_size: config.hidden,
    intermediate_size: config.ffn,
    num_hidden_layers: config.lowerLayers + config.upperLayers,
    num_attention_heads: config.queryHeads,
    num_key_value_heads: config.kvHeads,
    head_dim: config.headDim,
    hidden_act: 'silu',
    rms_norm_eps: config.rmsNormEps,
    rope_theta: config.ropeTheta,
    rope_scaling: ropeScale === 1 ? null : { rope_type: 'linear', factor: ropeScale },
    // Not a limit of the model: what the paper trains on.
    max_position_embeddings: 2048 * ropeScale,
    attention_bias: false,
    mlp_bias: false,
    attention_dropout: 0,
    tie_word_embeddings: true,
    initializer_range: 0.02,
    torch_dtype: 'float32',
    use_cache: true,
    bos_token_id: null,
    eos_token_id: null,
    pad_token_id: null,
    duokv: config,
  };
}

/** Writes a JSON file crash-safely. */
export function writeJson(path: string, value: unknown): Promise<void> {
  return replaceFile(path, async (handle) => {
    await handle.writeFile(`${JSON.stringify(value, null, 2)}\n`);
  });
}

/**
 * The object in a JSON file, which may begin with a byte order mark. Errors: `code` where the file is absent or not a
 * JSON object.
 */
export async function readJson(
  path: string,
  code: ErrorCode = 'ERR_CHECKPOINT',
): Promise<Record<string, unknown>> {
  let value: unknown;
  try {
    value = JSON.parse((await readFile(path, 'utf8')).replace(/^\uFEFF/, ''));
  } catch (error) {
    throw new DuokvError(code, `${path}: ${(error as Error).message}`, { cause: error });
  }
  if (typeof value !== 'object' || value === null || Array.isArray(value))
    throw new DuokvError(code, `${path}: must be a JSON object, not ${show(value)}`);
  return value as Record<string, unknown>;
}

/**
 * The config of a checkpoint directory, from the `duokv` block of its config.json or from its Llama keys,
 * with every key that applies to it. Errors: `ERR_CHECKPOINT` naming the file and the key.
 */
export async function readCheckpointConfig(directory: string): Promise<ModelConfig> {
  return (await readCheckpointPlan(directory)).config;
}

function readCheckpointPlan(directory: string): Promise<DesignPlan> {
  return openCurrent(directory, CONFIG_FILE, async (path) => {
    const json = await readJson(path);
    const config = 'duokv' in json ? json['duokv'] : configFromLlama(json, path);
    try {
      return designPlan(config as ModelConfig);
    } catch (error) {
      throw bad(`${path}: ${(error as Error).message}`, error);
    }
  });
}

/** Names, at most five of them. */
function list(names: readonly string[]): string {
  const shown = names.slice(0, 5).map((name) => JSON.stringify(name));
  return names.length > 5 ? `${shown.join(', ')} and ${names.length - 5} more` : shown.join(', ');
}

/**
 * Tensors that some exporters add and that say nothing: constants, and the embedding under its second name.
 */
function isRedundant(name: string): boolean {
  return name === 'lm_head.weight' || name.endsWith('.rotary_emb.inv_freq');
}

function checkTensors(file: string, source: TensorSource, plan: DesignPlan): void {
  const missing = plan.parameters.filter(({ name }) => !source.tensors.has(name)).map(({ name }) => name);
  if (missing.length > 0)
    throw bad(`${file}: lacks ${missing.length} of ${plan.parameters.length} tensors: ${list(missing)}`);
  const expected = new Set(plan.parameters.map(({ name }) => name));
  const extra = [...source.tensors.keys()].filter((name) => !expected.has(name) && !isRedundant(name));
  if (extra.length > 0)
    throw bad(`${file}: has ${extra.length} tensors that the model does not have: ${list(extra)}`);
  for (const { name, shape } of plan.parameters) {
    const { shape: found, dtype } = source.tensors.get(name) as TensorInfo;
    if (found.length !== shape.length || found.some((extent, i) => extent !== shape[i])) {
      throw bad(
        `${file}: tensor ${JSON.stringify(name)}: shape [${found.join(', ')}], expected [${shape.join(', ')}]`,
      );
    }
    if (!['F32', 'BF16', 'F16'].includes(dtype))
      throw bad(`${file}: tensor ${JSON.stringify(name)}: is ${dtype}; expected F32 or BF16 or F16`);
  }
}

/** A tied output embedding may be stored twice, but not differently. */
async function checkHead(file: string, source: TensorSource, plan: DesignPlan): Promise<void> {
  const embedding = plan.parameters[0]?.name as string;
  if (!source.tensors.has('lm_head.weight')) return;
  const head = await source.readFloat32('lm_head.weight');
  const tied = await source.readFloat32(embedding);
  if (!Buffer.from(head.buffer).equals(Buffer.from(tied.buffer))) {
    throw bad(
      `${file}: tensor "lm_head.weight": differs from ${JSON.stringify(embedding)}; they must be one tensor`,
    );
  }
}

/** A checkpoint whose tensors can be read, each in the shape that the plan gives it. */
export interface OpenCheckpoint extends AsyncDisposable {
  readonly plan: DesignPlan;
  /** The file that names the tensors, for messages. */
  readonly file: string;
  /** Of model.safetensors; empty where the weights are in shards. */
  readonly metadata: Readonly<Record<string, string>>;
  /** A parameter, widened to FP32. */
  read(name: string): Promise<Float32Array>;
}

/**
 * Opens a checkpoint directory and checks names, shapes and types of its tensors, before anything is allocated
 * for them. Errors: `ERR_CHECKPOINT` naming the file, the tensor, the expected and the found shape.
 */
export async function openCheckpoint(directory: string): Promise<OpenCheckpoint> {
  const plan = await readCheckpointPlan(directory);
  const source = await openCurrent(directory, WEIGHTS_FILE, (path) => openCheckpointTensors(dirname(path)));
  const single = source instanceof SafetensorsFile;
  const file = single ? source.path : join(directory, `${WEIGHTS_FILE}.index.json`);
  try {
    checkTensors(file, source, plan);
    await checkHead(file, source, plan);
  } catch (error) {
    await source.close();
    throw error;
  }
  return {
    plan,
    file,
    metadata: single ? source.metadata : {},
    read: (name) => source.readFloat32(name),
    [Symbol.asyncDispose]: () => source.close(),
  };
}

/**
 * Writes a checkpoint directory crash-safely: until all of it is written the old files are in force. `alongside`
 * adds files of its own, whose names `belongs` claims.
 */
export async function writeCheckpoint(
  directory: string,
  plan: DesignPlan,
  read: (name: string) => Promise<Float32Array>,
  alongside?: {
    readonly metadata: Readonly<Record<string, string>>;
    belongs(name: string): boolean;
    write(staging: string): Promise<void>;
  },
): Promise<void> {
  const entries: TensorEntry[] = plan.parameters.map(({ name, shape }) => ({
    name,
    shape,
    dtype: 'F32',
    data: () => read(name),
  }));
  const belongs = (name: string) => belongsToModel(name) || (alongside?.belongs(name) ?? false);
  await replaceFiles(directory, belongs, async (staging) => {
    await writeJson(join(staging, CONFIG_FILE), huggingFaceConfig(plan));
    // Transformers refuses a file that does not say so.
    await writeSafetensors(join(staging, WEIGHTS_FILE), entries, { format: 'pt', ...alongside?.metadata });
    await alongside?.write(staging);
  });
}
