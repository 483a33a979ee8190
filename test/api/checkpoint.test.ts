import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import {
  chmod,
  copyFile,
  mkdir,
  readdir,
  readFile,
  rename,
  rm,
  stat,
  symlink,
  truncate,
  writeFile,
} from 'node:fs/promises';
import { hostname } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';

import {
  type Device,
  DuokvError,
  designPlan,
  Model,
  type ModelConfig,
  openDevice,
  presets,
} from '../../lib/index.js';
import { float32ToBf16, SafetensorsFile, type TensorEntry, writeSafetensors } from '../../lib/safetensors.js';
import {
  randomTokens,
  rejectsWith,
  SMALL,
  sameBits,
  small,
  smallDesigns,
  temporaryDirectory,
} from './support.js';

const readConfig = async (directory: string) =>
  JSON.parse(await readFile(join(directory, 'config.json'), 'utf8'));

async function parametersOf(model: Model): Promise<Map<string, Float32Array>> {
  const names = model.plan.parameters.map(({ name }) => name);
  return new Map(await Promise.all(names.map(async (name) => [name, await model.readTensor(name)] as const)));
}

async function assertSameParameters(a: Model, b: Model): Promise<void> {
  assert.deepEqual(a.config, b.config);
  const [left, right] = [await parametersOf(a), await parametersOf(b)];
  for (const [name, values] of left) assert.ok(sameBits(values, right.get(name) as Float32Array), name);
}

describe('checkpoints', () => {
  let device: Device;
  before(async () => {
    device = await openDevice({ backend: 'cpu' });
  });
  after(() => device.close());

  for (const [name, config] of Object.entries(smallDesigns)) {
    it(`round-trip ${name} bitwise`, async () => {
      await using directory = await temporaryDirectory();
      using model = await Model.create(device, config, { seed: 9 });
      const path = join(directory.path, 'deep', 'checkpoint');
      await model.save(path);
      assert.deepEqual(await readdir(path), ['config.json', 'model.safetensors']);
      assert.deepEqual(await readdir(join(directory.path, 'deep')), ['checkpoint']);
      using loaded = await Model.load(device, path);
      await assertSameParameters(model, loaded);
      assert.equal(loaded.parameterCount, designPlan(config).parameterCount);
    });
  }

  it('write the keys of a Llama config, and call a model a Llama exactly when it is one', async () => {
    await using directory = await temporaryDirectory();
    const llamas = new Set(['independent', 'gqa2']);
    for (const [name, config] of Object.entries(smallDesigns)) {
      using model = await Model.create(device, config);
      const path = join(directory.path, name);
      await model.save(path);
      const json = await readConfig(path);
      assert.equal(json.model_type, llamas.has(name) ? 'llama' : 'duokv', name);
      assert.deepEqual(
        json.architectures,
        [llamas.has(name) ? 'LlamaForCausalLM' : 'DuokvForCausalLM'],
        name,
      );
      assert.deepEqual(json.duokv, model.config, name);
    }
    const json = await readConfig(join(directory.path, 'gqa2'));
    const expected = {
      vocab_size: 61,
      hidden_size: 24,
      intermediate_size: 40,
      num_hidden_layers: 4,
      num_attention_heads: 4,
      num_key_value_heads: 1,
      head_dim: 8,
      hidden_act: 'silu',
      rms_norm_eps: 1e-5,
      rope_theta: 10000,
      rope_scaling: null,
      tie_word_embeddings: true,
      attention_bias: false,
      mlp_bias: false,
      torch_dtype: 'float32',
    };
    for (const [key, value] of Object.entries(expected)) assert.deepEqual(json[key], value, key);
    await using file = await SafetensorsFile.open(join(directory.path, 'gqa2', 'model.safetensors'));
    assert.equal(file.metadata['format'], 'pt');
    assert.deepEqual(file.tensors.get('model.layers.3.self_attn.k_proj.weight')?.shape, [8, 24]);
    assert.ok([...file.tensors.values()].every(({ dtype }) => dtype === 'F32'));
  });

  it('load a Llama directory without a duokv block, with its rotary parameters in either place', async () => {
    await using directory = await temporaryDirectory();
    const path = directory.path;
    using model = await Model.create(
      device,
      presets.gqa2Tiny({ ...SMALL, kvHeads: 1, ropeTheta: 5000, ropeScale: 4 }),
    );
    await model.save(join(path, 'gqa2'));
    const { duokv: _, ...json } = await readConfig(join(path, 'gqa2'));
    const tokens = { tokens: randomTokens(20, 61), rows: 1 };
    const logits = await model.logits(tokens);
    assert.deepEqual(json.rope_scaling, { rope_type: 'linear', factor: 4 });
    const { rope_theta, rope_scaling, ...rest } = json;
    for (const variant of [json, { ...rest, rope_parameters: { ...rope_scaling, rope_theta } }]) {
      await writeFile(join(path, 'gqa2', 'config.json'), JSON.stringify(variant));
      using loaded = await Model.load(device, join(path, 'gqa2'));
      assert.equal(loaded.config.design, 'independent');
      assert.equal(loaded.config.ropeScale, 4);
      assert.equal(loaded.config.ropeTheta, 5000);
      assert.ok(sameBits(await loaded.logits(tokens), logits));
    }
  });

  it('refuse a Llama of another kind, naming the key', async () => {
    await using directory = await temporaryDirectory();
    using model = await Model.create(device, smallDesigns['gqa2'] as ModelConfig);
    await model.save(directory.path);
    const { duokv: _, ...json } = await readConfig(directory.path);
    const cases: [object, RegExp][] = [
      [{ model_type: 'mistral' }, /config\.json: model_type is "mistral"/],
      [{ tie_word_embeddings: false }, /tie_word_embeddings is not true/],
      [{ attention_bias: true }, /attention_bias is true/],
      [{ hidden_act: 'gelu' }, /hidden_act is "gelu"/],
      [{ rope_scaling: { rope_type: 'llama3', factor: 8 } }, /rope_type is "llama3"/],
      [{ vocab_size: '61' }, /vocab_size is "61"; it must be a positive integer/],
      [{ num_key_value_heads: 3 }, /queryHeads is 4; it must be a multiple of kvHeads/],
      [{ duokv: { design: 'gqa3' } }, /design is 'gqa3'/],
      [{ duokv: { ...model.config, extra: 1 } }, /unknown config key 'extra'/],
      [{ duokv: null }, /config must be an object/],
    ];
    for (const [change, message] of cases) {
      await writeFile(join(directory.path, 'config.json'), JSON.stringify({ ...json, ...change }));
      await rejectsWith('ERR_CHECKPOINT', message, () => Model.load(device, directory.path));
    }
  });

  it('load BF16, F16 and sharded tensors', async () => {
    await using directory = await temporaryDirectory();
    using model = await Model.create(device, small(), { seed: 2 });
    // Values that both formats hold exactly.
    for (const [name, values] of await parametersOf(model)) {
      await model.writeTensor(
        name,
        values.map((value) => Math.round(value * 64) / 64),
      );
    }
    await model.save(directory.path);
    const parameters = await parametersOf(model);
    const entriesIn = (dtype: 'BF16' | 'F16'): TensorEntry[] =>
      model.plan.parameters.map(({ name, shape, elements }) => {
        const values = parameters.get(name) as Float32Array;
        const bits = new Uint16Array(elements);
        if (dtype === 'BF16') float32ToBf16(values, bits);
        else
          values.forEach((value, i) => {
            bits[i] = float16Bits(value);
          });
        return { name, shape, dtype, data: bits };
      });
    for (const dtype of ['BF16', 'F16'] as const) {
      await writeSafetensors(join(directory.path, 'model.safetensors'), entriesIn(dtype));
      using loaded = await Model.load(device, directory.path);
      await assertSameParameters(model, loaded);
    }
    const entries = entriesIn('BF16');
    const half = entries.length >> 1;
    const shards = ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors'] as const;
    await rm(join(directory.path, 'model.safetensors'));
    await writeSafetensors(join(directory.path, shards[0]), entries.slice(0, half));
    await writeSafetensors(join(directory.path, shards[1]), entries.slice(half));
    const weight_map = Object.fromEntries(
      entries.map(({ name }, i) => [name, i < half ? shards[0] : shards[1]]),
    );
    await writeFile(join(directory.path, 'model.safetensors.index.json'), JSON.stringify({ weight_map }));
    using sharded = await Model.load(device, directory.path);
    await assertSameParameters(model, sharded);
    // Saving replaces the shards: a checkpoint is never half of one and half of another.
    await sharded.save(directory.path);
    assert.deepEqual(await readdir(directory.path), ['config.json', 'model.safetensors']);
  });

  it('refuse malformed tensors, naming file, tensor, expected and found shape', async () => {
    await using directory = await temporaryDirectory();
    using model = await Model.create(device, small());
    await model.save(directory.path);
    const file = join(directory.path, 'model.safetensors');
    const parameters = await parametersOf(model);
    const entries = (): TensorEntry[] =>
      model.plan.parameters.map(({ name, shape }) => ({
        name,
        shape,
        dtype: 'F32',
        data: parameters.get(name) as Float32Array,
      }));
    const used = () => device.info().memory.used;
    const before = used();
    const check = async (message: RegExp) => {
      await rejectsWith('ERR_CHECKPOINT', message, () => Model.load(device, directory.path));
    };
    await writeSafetensors(
      file,
      entries().filter(({ name }) => name !== 'model.global_kv.norm.weight'),
    );
    await check(/model\.safetensors: lacks 1 of 41 tensors: "model\.global_kv\.norm\.weight"/);
    await writeSafetensors(file, [
      ...entries(),
      { name: 'model.extra.weight', shape: [1], dtype: 'F32', data: Float32Array.of(1) },
    ]);
    await check(/model\.safetensors: has 1 tensors that the model does not have: "model\.extra\.weight"/);
    await writeSafetensors(
      file,
      entries().map((entry) =>
        entry.name === 'model.layers.1.mlp.up_proj.weight' ? { ...entry, shape: [24, 40] } : entry,
      ),
    );
    await check(
      /model\.safetensors: tensor "model\.layers\.1\.mlp\.up_proj\.weight": shape \[24, 40\], expected \[40, 24\]/,
    );
    await writeSafetensors(
      file,
      entries().map((entry) =>
        entry.name === 'model.norm.weight' ? { ...entry, dtype: 'I32', data: new Int32Array(24) } : entry,
      ),
    );
    await check(/"model\.norm\.weight": is I32; expected F32 or BF16 or F16/);
    const head = parameters.get('model.embed_tokens.weight') as Float32Array;
    const withHead = (data: Float32Array): TensorEntry[] => [
      ...entries(),
      { name: 'lm_head.weight', shape: [61, 24], dtype: 'F32', data },
    ];
    await writeSafetensors(file, withHead(head.map((value) => value + 1)));
    await check(/"lm_head\.weight": differs from "model\.embed_tokens\.weight"/);
    await writeSafetensors(file, withHead(head));
    (await Model.load(device, directory.path)).dispose();
    await writeSafetensors(file, entries());
    await truncate(file, 5000);
    await check(/model\.safetensors: /);
    await writeFile(file, 'nonsense');
    await check(/model\.safetensors: /);
    await rm(file);
    await check(/has neither model\.safetensors nor/);
    await writeFile(join(directory.path, 'config.json'), '{');
    await check(/config\.json: /);
    await writeFile(join(directory.path, 'config.json'), '[]');
    await check(/config\.json: must be a JSON object/);
    await rejectsWith('ERR_CHECKPOINT', /absent.config\.json: ENOENT/, () =>
      Model.load(device, join(directory.path, 'absent')),
    );
    await model.readTensor('model.norm.weight');
    assert.equal(used(), before, 'a failed load leaves no memory behind');
  });

  it('keep other files of the directory, and follow a link to it', async () => {
    await using directory = await temporaryDirectory();
    using model = await Model.create(device, small());
    const path = join(directory.path, 'step-10');
    await mkdir(join(path, 'notes'), { recursive: true });
    await writeFile(join(path, 'tokenizer.json'), '{"kept": true}');
    await writeFile(join(path, 'notes', 'a.txt'), 'kept too');
    await symlink('step-10', join(directory.path, 'latest'));
    await model.save(join(directory.path, 'latest'));
    await model.save(join(directory.path, 'latest'));
    assert.deepEqual(await readdir(path), ['config.json', 'model.safetensors', 'notes', 'tokenizer.json']);
    assert.equal(await readFile(join(path, 'notes', 'a.txt'), 'utf8'), 'kept too');
    assert.deepEqual((await readdir(directory.path)).sort(), ['latest', 'step-10']);
    await writeFile(join(directory.path, 'file'), '');
    await rejectsWith('ERR_ARGUMENT', /exists and is not a directory/, () =>
      model.save(join(directory.path, 'file')),
    );
  });

  it('keep the old checkpoint where a save fails', async () => {
    await using directory = await temporaryDirectory();
    const path = join(directory.path, 'checkpoint');
    using model = await Model.create(device, small(), { seed: 1 });
    await model.save(path);
    const other = await Model.create(device, small(), { seed: 2 });
    const saving = other.save(path);
    other.dispose();
    await rejectsWith('ERR_DISPOSED', /the model was disposed/, () => saving);
    assert.deepEqual(await readdir(directory.path), ['checkpoint']);
    using loaded = await Model.load(device, path);
    await assertSameParameters(model, loaded);
  });

  it('save the model as it was when asked, while updates are called', async () => {
    await using directory = await temporaryDirectory();
    using model = await Model.create(device, small(), { seed: 1 });
    const before = await parametersOf(model);
    const ones = (name: string) => new Float32Array((before.get(name) as Float32Array).length).fill(1);
    const saving = model.save(directory.path);
    const writes = [...before.keys()].map((name) => model.writeTensor(name, ones(name)));
    const read = model.readTensor('model.norm.weight');
    await Promise.all([saving, ...writes]);
    assert.ok(sameBits(await read, ones('model.norm.weight')));
    using loaded = await Model.load(device, directory.path);
    for (const [name, values] of before) assert.ok(sameBits(await loaded.readTensor(name), values), name);
  });

  it('leave the directory itself in place, with its mode', async () => {
    await using directory = await temporaryDirectory();
    using model = await Model.create(device, small());
    await chmod(directory.path, 0o2770);
    const before = await stat(directory.path);
    const working = process.cwd();
    process.chdir(directory.path);
    try {
      await model.save('.');
      await model.save('.');
      assert.ok((await stat(process.cwd())).isDirectory());
      (await Model.load(device, '.')).dispose();
    } finally {
      process.chdir(working);
    }
    const { ino, mode, uid, gid } = await stat(directory.path);
    assert.deepEqual(
      { ino, mode, uid, gid },
      {
        ino: before.ino,
        mode: before.mode,
        uid: before.uid,
        gid: before.gid,
      },
    );
    assert.equal(mode & 0o7777, 0o2770);
    assert.deepEqual(await readdir(directory.path), ['config.json', 'model.safetensors']);
  });

  it('are the old or the new one after a crash in any step of a save', async () => {
    await using directory = await temporaryDirectory();
    const path = (name: string) => join(directory.path, name);
    using old = await Model.create(device, small(), { seed: 1 });
    // Of another shape, so that a mixture of two checkpoints cannot load.
    using fresh = await Model.create(device, small({ ffn: 48 }), { seed: 2 });
    using last = await Model.create(device, small(), { seed: 3 });
    await fresh.save(path('fresh'));
    const files = ['config.json', 'model.safetensors'];
    const steps: [string, string, readonly string[], Model][] = [
      ['staged', '.duokv-save.x', [], old],
      ['committed', '.duokv-commit', [], fresh],
      ['config moved', '.duokv-commit', ['config.json'], fresh],
      ['weights moved', '.duokv-commit', ['model.safetensors'], fresh],
      ['all moved', '.duokv-commit', files, fresh],
    ];
    for (const [step, folder, moved, expected] of steps) {
      await old.save(path(step));
      await mkdir(join(path(step), folder));
      for (const file of files) await copyFile(join(path('fresh'), file), join(path(step), folder, file));
      for (const file of moved) await rename(join(path(step), folder, file), join(path(step), file));
      const listing = () => readdir(path(step), { recursive: true });
      const before = await listing();
      const { mtimeMs } = await stat(path(step));
      using loaded = await Model.load(device, path(step));
      await assertSameParameters(expected, loaded);
      assert.deepEqual(await listing(), before, `${step}: loading changes nothing`);
      assert.equal((await stat(path(step))).mtimeMs, mtimeMs, `${step}: loading writes nothing`);
      await last.save(path(step));
      using again = await Model.load(device, path(step));
      await assertSameParameters(last, again);
      assert.deepEqual(
        (await readdir(path(step))).filter((name) => name !== '.duokv-save.x'),
        files,
      );
    }
  });

  it('are kept where a save fails over one that a crash left unfinished', async () => {
    await using directory = await temporaryDirectory();
    const path = join(directory.path, 'checkpoint');
    using model = await Model.create(device, small(), { seed: 1 });
    await model.save(path);
    await mkdir(join(path, '.duokv-commit'));
    await rename(join(path, 'config.json'), join(path, '.duokv-commit', 'config.json'));
    const other = await Model.create(device, small(), { seed: 2 });
    const saving = other.save(path);
    other.dispose();
    await rejectsWith('ERR_DISPOSED', /the model was disposed/, () => saving);
    using loaded = await Model.load(device, path);
    await assertSameParameters(model, loaded);
  });

  it('clear away what a killed save has staged, but nothing of a save that runs', async () => {
    await using directory = await temporaryDirectory();
    using model = await Model.create(device, small());
    const child = spawn(process.execPath, ['-e', '0']);
    await new Promise((resolve) => child.once('exit', resolve));
    const staged = (pid: number | undefined) => `.duokv-save.${hostname()}.${pid}.0`;
    for (const pid of [child.pid, process.pid])
      await mkdir(join(directory.path, staged(pid), 'a'), { recursive: true });
    await model.save(directory.path);
    assert.deepEqual(await readdir(directory.path), [
      staged(process.pid),
      'config.json',
      'model.safetensors',
    ]);
  });

  it('are saved one after another by one process, the last one asked for staying', async () => {
    await using directory = await temporaryDirectory();
    const path = join(directory.path, 'new', 'checkpoint');
    const models = await Promise.all(
      [1, 2, 3, 4].map((seed) => Model.create(device, small({ ffn: 40 + seed }), { seed })),
    );
    await Promise.all(models.map((model) => model.save(path)));
    assert.deepEqual(await readdir(path), ['config.json', 'model.safetensors']);
    using loaded = await Model.load(device, path);
    await assertSameParameters(models.at(-1) as Model, loaded);
    for (const model of models) model.dispose();
  });

  it('report what the file system refuses, and leave no directory behind', async () => {
    await using directory = await temporaryDirectory();
    using model = await Model.create(device, small());
    const file = join(directory.path, 'file');
    await writeFile(file, '');
    await symlink('loop', join(directory.path, 'loop'));
    await mkdir(join(directory.path, 'occupied', 'config.json'), { recursive: true });
    const cases: [string, string][] = [
      [join(file, 'checkpoint'), 'ENOTDIR'],
      [join(directory.path, 'new', 'x'.repeat(300)), 'ENAMETOOLONG'],
      [join(directory.path, 'loop'), 'ELOOP'],
    ];
    for (const [path, code] of cases) {
      await assert.rejects(model.save(path), (error) => {
        assert.ok(error instanceof DuokvError, `${error}`);
        assert.equal(error.code, 'ERR_CHECKPOINT');
        assert.ok(error.message.startsWith(`${path}: cannot be saved: ${code}`), error.message);
        assert.equal((error.cause as NodeJS.ErrnoException).code, code);
        return true;
      });
    }
    await rejectsWith('ERR_CHECKPOINT', /config\.json: is a directory/, () =>
      model.save(join(directory.path, 'occupied')),
    );
    const disposed = await Model.create(device, small());
    const saving = disposed.save(join(directory.path, 'deep', 'new'));
    disposed.dispose();
    await rejectsWith('ERR_DISPOSED', /the model was disposed/, () => saving);
    assert.deepEqual((await readdir(directory.path)).sort(), ['file', 'loop', 'occupied']);
    assert.deepEqual(await readdir(join(directory.path, 'occupied')), ['config.json']);
  });

  it('are checked against their config before memory is taken', async () => {
    await using directory = await temporaryDirectory();
    using model = await Model.create(device, small());
    await model.save(directory.path);
    const json = await readConfig(directory.path);
    // Some 1.6 TB of parameters.
    const duokv = { ...json.duokv, vocab: 2 ** 24, hidden: 24576 };
    await writeFile(join(directory.path, 'config.json'), JSON.stringify({ ...json, duokv }));
    await rejectsWith('ERR_CHECKPOINT', /"model\.embed_tokens\.weight": shape \[61, 24\], expected/, () =>
      Model.load(device, directory.path),
    );
  });

  it('are complete whenever the saving process is killed', async () => {
    await using directory = await temporaryDirectory();
    const path = join(directory.path, 'checkpoint');
    const program = fileURLToPath(new URL('program.ts', import.meta.url));
    for (const delay of [1, 3, 9, 17, 28, 40]) {
      const child = spawn(process.execPath, ['--import', 'tsx', program, 'save', path], {
        stdio: ['ignore', 'pipe', 'inherit'],
      });
      const exited = new Promise((resolve) => child.once('exit', resolve));
      await new Promise((resolve) => child.stdout.once('data', resolve));
      await sleep(delay);
      child.kill('SIGKILL');
      await exited;
      using loaded = await Model.load(device, path);
      const values = new Set<number>();
      for (const tensor of (await parametersOf(loaded)).values())
        for (const value of tensor) values.add(value);
      assert.equal(values.size, 1, `one save, not a mixture of ${values.size}`);
    }
  });
});

/** F16 bit pattern of a value that F16 holds exactly as a normal number, or of zero. */
function float16Bits(value: number): number {
  if (value === 0) return Object.is(value, -0) ? 0x8000 : 0;
  const exponent = Math.floor(Math.log2(Math.abs(value)));
  const mantissa = (Math.abs(value) / 2 ** exponent - 1) * 1024;
  assert.ok(Number.isInteger(mantissa) && exponent >= -14 && exponent <= 15, `${value}`);
  return (value < 0 ? 0x8000 : 0) | ((exponent + 15) << 10) | mantissa;
}
