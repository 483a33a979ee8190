import assert from 'node:assert/strict';
import { mkdtemp, open, readdir, readFile, rm, truncate, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

import fc from 'fast-check';

import { DuokvError } from '../lib/errors.js';
import {
  bf16ToFloat32,
  f16ToFloat32,
  float32ToBf16,
  openCheckpointTensors,
  SafetensorsFile,
  type TensorEntry,
  writeSafetensors,
} from '../lib/safetensors.js';

/** A file of the given header (an object, or raw text) followed by `dataBytes` zero bytes. */
function container(header: unknown, dataBytes: number): Buffer {
  const text = Buffer.from(typeof header === 'string' ? header : JSON.stringify(header));
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(text.length));
  return Buffer.concat([length, text, Buffer.alloc(dataBytes)]);
}

describe('safetensors', () => {
  let directory: string;
  before(async () => {
    directory = await mkdtemp(join(tmpdir(), 'duokv-safetensors-'));
  });
  after(() => rm(directory, { recursive: true }));

  async function rejectsCheckpoint(
    promise: Promise<unknown>,
    ...fragments: (string | RegExp)[]
  ): Promise<void> {
    await assert.rejects(promise, (error) => {
      assert.ok(error instanceof DuokvError, String(error));
      assert.equal(error.code, 'ERR_CHECKPOINT');
      for (const fragment of fragments) {
        assert.ok(
          typeof fragment === 'string' ? error.message.includes(fragment) : fragment.test(error.message),
          error.message,
        );
      }
      return true;
    });
  }

  it('reads back what it wrote, for every dtype, shape and name', async () => {
    const shape = fc.array(fc.integer({ min: 0, max: 5 }), { maxLength: 4 });
    const entry = fc
      .record({
        name: fc.string({ unit: 'binary' }),
        shape,
        dtype: fc.constantFrom('F32', 'BF16', 'F16', 'I32', 'I64'),
      })
      .filter(({ name }) => name !== '__metadata__')
      .chain(({ name, shape, dtype }) => {
        const size = {
          minLength: shape.reduce((a, b) => a * b, 1),
          maxLength: shape.reduce((a, b) => a * b, 1),
        };
        const data =
          dtype === 'F32'
            ? fc.float32Array(size)
            : dtype === 'I32'
              ? fc.int32Array(size)
              : dtype === 'I64'
                ? fc.bigInt64Array(size)
                : fc.uint16Array(size);
        return data.map((data): TensorEntry => ({ name, shape, dtype, data }));
      });
    const entries = fc.uniqueArray(entry, { selector: ({ name }) => name, maxLength: 6 });
    const metadata = fc.dictionary(fc.string(), fc.string());
    const path = join(directory, 'round-trip.safetensors');
    await fc.assert(
      fc.asyncProperty(entries, metadata, async (entries, metadata) => {
        await writeSafetensors(path, entries, metadata);
        await using file = await SafetensorsFile.open(path);
        assert.deepEqual({ ...file.metadata }, { ...metadata });
        assert.deepEqual([...file.tensors.keys()].sort(), entries.map(({ name }) => name).sort());
        for (const { name, shape, dtype, data } of entries) {
          assert.deepEqual(file.tensors.get(name)?.shape, shape);
          if (dtype === 'I32') assert.deepEqual(await file.readInt32(name), data);
          else if (dtype === 'I64') assert.deepEqual(await file.readBigInt64(name), data);
          else {
            const expected = new Float32Array((data as Uint16Array).length);
            if (dtype === 'F32') expected.set(data as Float32Array);
            if (dtype === 'BF16') bf16ToFloat32(data as Uint16Array, expected);
            if (dtype === 'F16') f16ToFloat32(data as Uint16Array, expected);
            assert.deepEqual(await file.readFloat32(name), expected);
          }
        }
      }),
      { numRuns: 40 },
    );
  });

  it('widens every BF16 and F16 bit pattern exactly, and rounds FP32 to the nearest BF16, ties to even', () => {
    const bits = Uint16Array.from({ length: 0x10000 }, (_, i) => i);
    const wide = new Float32Array(bits.length);
    bf16ToFloat32(bits, wide);
    const view = new DataView(new ArrayBuffer(4));
    for (const b of bits) {
      view.setUint32(0, b * 0x10000);
      assert.ok(Object.is(wide[b], view.getFloat32(0)), `BF16 ${b}`);
    }
    const back = new Uint16Array(bits.length);
    float32ToBf16(wide, back);
    // A signalling NaN may become quiet; everything else is its own nearest BF16.
    for (const b of bits)
      assert.ok(back[b] === b || (Number.isNaN(wide[b]) && back[b] === (b | 0x40)), `BF16 ${b}`);

    const neighbours = Float32Array.of(
      1,
      1 + 2 ** -8,
      1 + 2 ** -8 + 2 ** -20,
      1 + 3 * 2 ** -8,
      -(1 + 2 ** -8),
      3.4e38,
      1e-40,
    );
    const rounded = new Uint16Array(neighbours.length);
    float32ToBf16(neighbours, rounded);
    const widened = new Float32Array(neighbours.length);
    bf16ToFloat32(rounded, widened);
    assert.deepEqual([...widened.subarray(0, 6)], [1, 1, 1 + 2 ** -7, 1 + 2 ** -6, -1, Infinity]);
    assert.ok(Math.abs(widened[6] - 1e-40) <= 2 ** -134);

    f16ToFloat32(bits, wide);
    const known: [number, number][] = [
      [0x0001, 2 ** -24],
      [0x03ff, 1023 * 2 ** -24],
      [0x0400, 2 ** -14],
      [0x3c00, 1],
      [0x3555, 1365 * 2 ** -12],
      [0x7bff, 65504],
      [0x7c00, Infinity],
      [0xfc00, -Infinity],
      [0xc000, -2],
      [0x7e00, NaN],
      [0x8000, -0],
    ];
    for (const [b, value] of known) assert.ok(Object.is(wide[b], value), `F16 ${b.toString(16)}: ${wide[b]}`);
    for (let b = 1; b < 0x7c00; b++) assert.ok(wide[b] > wide[b - 1], `F16 ${b} is not increasing`);
  });

  it('rejects a malformed header, and names the file, the tensor and the numbers', async () => {
    const path = join(directory, 'malformed.safetensors');
    const good = { dtype: 'F32', shape: [2, 3], data_offsets: [0, 24] };
    const cases: [string | object, number, ...(string | RegExp)[]][] = [
      ['', 0, 'JSON'],
      ['[]', 0, 'not a JSON object'],
      ['{"a":', 0, 'not JSON'],
      [{ a: 3 }, 0, '"a"', 'not an object'],
      [{ a: { ...good, dtype: 'F31' } }, 24, '"a"', '"F31"'],
      [{ a: { ...good, dtype: 'toString' } }, 24, '"a"', '"toString"'],
      [{ a: { ...good, shape: [2, -3] } }, 24, '"a"', '[2,-3]'],
      [{ a: { ...good, shape: [2, 1.5] } }, 24, '"a"', '[2,1.5]'],
      [{ a: { ...good, shape: '2' } }, 24, '"a"', 'shape'],
      [{ a: { ...good, shape: [2 ** 40, 2 ** 40] } }, 24, '"a"', '24'],
      [{ a: { ...good, data_offsets: [0] } }, 24, '"a"', 'data_offsets'],
      [{ a: { ...good, data_offsets: [0, 28] } }, 24, '"a"', '[0, 28]', '24 bytes'],
      [{ a: { ...good, data_offsets: [24, 0] } }, 24, '"a"', '[24, 0]'],
      [{ a: { ...good, data_offsets: [0, 20] } }, 20, '"a"', '24 bytes', '20'],
      [{ a: { ...good, extra: 1 } }, 24, '"a"', '"extra"'],
      [{ a: good, b: { ...good, data_offsets: [20, 44] } }, 44, '"b"', 'overlaps', '20'],
      [{ a: good, b: { ...good, data_offsets: [32, 56] } }, 56, '"b"', 'hole', '32'],
      [{ a: good }, 28, '24', '28'],
      [{ a: good }, 12, '"a"', '12'],
      [{ __metadata__: { a: 1 } }, 0, '__metadata__'],
      [{ __metadata__: 'text' }, 0, '__metadata__'],
    ];
    for (const [header, dataBytes, ...fragments] of cases) {
      await writeFile(path, container(header, dataBytes));
      await rejectsCheckpoint(SafetensorsFile.open(path), path, ...fragments);
    }
    await writeFile(path, Buffer.from([1, 2, 3]));
    await rejectsCheckpoint(SafetensorsFile.open(path), path, '3 bytes');
    await writeFile(path, Buffer.from([255, 255, 255, 255, 255, 255, 255, 255, 123, 125]));
    await rejectsCheckpoint(SafetensorsFile.open(path), path, '18446744073709551615', '2 bytes');
    await writeFile(path, Buffer.concat([container('{}', 0).subarray(0, 8), Buffer.from([0xff, 0xfe])]));
    await rejectsCheckpoint(SafetensorsFile.open(path), path, 'UTF-8');
    await rejectsCheckpoint(SafetensorsFile.open(join(directory, 'absent')), 'absent', 'ENOENT');
    await rejectsCheckpoint(SafetensorsFile.open(directory), directory, 'not a file');
  });

  it('survives any corruption of a valid file: it opens, or fails with ERR_CHECKPOINT', async () => {
    const path = join(directory, 'corrupted.safetensors');
    const entries: TensorEntry[] = [
      { name: 'weight', shape: [3, 4], dtype: 'F32', data: new Float32Array(12) },
      { name: 'ids', shape: [5], dtype: 'I64', data: new BigInt64Array(5) },
    ];
    await writeSafetensors(path, entries, { format: 'pt' });
    const valid = await readFile(path);
    const headerEnd = valid.length - 88;
    const edit = fc.record({ at: fc.nat(headerEnd - 1), byte: fc.nat(255) });
    await fc.assert(
      fc.asyncProperty(
        fc.array(edit, { minLength: 1, maxLength: 3 }),
        fc.nat(valid.length),
        async (edits, keep) => {
          const bytes = Buffer.from(valid);
          for (const { at, byte } of edits) bytes[at] = byte;
          await writeFile(path, bytes.subarray(0, keep % 3 === 0 ? keep : bytes.length));
          try {
            const file = await SafetensorsFile.open(path);
            await file.close();
          } catch (error) {
            assert.ok(error instanceof DuokvError && error.code === 'ERR_CHECKPOINT', String(error));
          }
        },
      ),
      { numRuns: 150 },
    );
  });

  it('refuses an absent tensor, another dtype, and a file cut short after it was opened', async () => {
    const path = join(directory, 'reads.safetensors');
    await writeSafetensors(path, [
      { name: 'ids', shape: [4], dtype: 'I64', data: BigInt64Array.of(1n, 2n, -3n, 2n ** 63n - 1n) },
      { name: 'w', shape: [2], dtype: 'F32', data: Float32Array.of(1, 2) },
    ]);
    await using file = await SafetensorsFile.open(path);
    await rejectsCheckpoint(file.readFloat32('v'), path, '"v"');
    await rejectsCheckpoint(file.readFloat32('ids'), path, '"ids"', 'I64', 'F32');
    await truncate(path, (await readFile(path)).length - 4);
    await rejectsCheckpoint(file.readFloat32('w'), path, /ends at byte \d+, 4 bytes/);
  });

  it('reads tensors that lie beyond 4 GiB, in chunks', async () => {
    // A sparse file: 5 GiB of zeros that occupy no disk blocks, with two tensors at its end.
    const path = join(directory, 'big.safetensors');
    const gap = 5 * 2 ** 30;
    const values = new Float32Array(5_000_000).map((_, i) => i);
    const bits = new Uint16Array(9_000_000).map((_, i) => i & 0x7f7f);
    const end = gap + values.byteLength + bits.byteLength;
    const header = container(
      {
        gap: { dtype: 'U8', shape: [gap], data_offsets: [0, gap] },
        f32: { dtype: 'F32', shape: [values.length], data_offsets: [gap, gap + values.byteLength] },
        bf16: { dtype: 'BF16', shape: [bits.length], data_offsets: [gap + values.byteLength, end] },
      },
      0,
    );
    const handle = await open(path, 'w');
    await handle.write(header);
    await handle.write(new Uint8Array(values.buffer), 0, values.byteLength, header.length + gap);
    await handle.write(
      new Uint8Array(bits.buffer),
      0,
      bits.byteLength,
      header.length + gap + values.byteLength,
    );
    await handle.close();
    await using file = await SafetensorsFile.open(path);
    assert.ok(Buffer.from((await file.readFloat32('f32')).buffer).equals(Buffer.from(values.buffer)));
    const expected = new Float32Array(bits.length);
    bf16ToFloat32(bits, expected);
    assert.ok(Buffer.from((await file.readFloat32('bf16')).buffer).equals(Buffer.from(expected.buffer)));
    await rm(path);
  });

  it('reads a checkpoint of one file or of shards', async () => {
    const checkpoint = await mkdtemp(join(directory, 'checkpoint-'));
    await rejectsCheckpoint(openCheckpointTensors(checkpoint), checkpoint, 'model.safetensors.index.json');
    const index = join(checkpoint, 'model.safetensors.index.json');
    const shard = (i: number) => `model-0000${i}-of-00002.safetensors`;
    for (const i of [1, 2]) {
      const data = Float32Array.of(i, 10 * i);
      await writeSafetensors(join(checkpoint, shard(i)), [{ name: `t${i}`, shape: [2], dtype: 'F32', data }]);
    }
    const writeIndex = (weightMap: unknown) => writeFile(index, JSON.stringify({ weight_map: weightMap }));
    await writeIndex({ t1: shard(1), t2: shard(2) });
    {
      await using source = await openCheckpointTensors(checkpoint);
      assert.deepEqual([...source.tensors.keys()], ['t1', 't2']);
      assert.deepEqual(await source.readFloat32('t1'), Float32Array.of(1, 10));
      assert.deepEqual(await source.readFloat32('t2'), Float32Array.of(2, 20));
      await rejectsCheckpoint(source.readFloat32('t3'), '"t3"');
    }
    await writeIndex({ t1: shard(2) });
    await rejectsCheckpoint(openCheckpointTensors(checkpoint), shard(2), '"t1"');
    await writeIndex({ t1: '../elsewhere.safetensors' });
    await rejectsCheckpoint(openCheckpointTensors(checkpoint), index, '"t1"', 'elsewhere');
    await writeIndex({ t1: 'model-00003-of-00002.safetensors' });
    await rejectsCheckpoint(openCheckpointTensors(checkpoint), 'model-00003-of-00002');
    await writeIndex(['t1']);
    await rejectsCheckpoint(openCheckpointTensors(checkpoint), 'weight_map');
    await writeFile(index, '{');
    await rejectsCheckpoint(openCheckpointTensors(checkpoint), index, 'JSON');

    const data = Float32Array.of(7);
    await writeSafetensors(join(checkpoint, 'model.safetensors'), [
      { name: 'single', shape: [], dtype: 'F32', data },
    ]);
    await using source = await openCheckpointTensors(checkpoint);
    assert.deepEqual(await source.readFloat32('single'), data);
  });

  it('keeps the old file, and leaves nothing else, when writing fails', async () => {
    const place = await mkdtemp(join(directory, 'replace-'));
    const path = join(place, 'model.safetensors');
    const entry = (data: TensorEntry['data']): TensorEntry => ({ name: 'w', shape: [2], dtype: 'F32', data });
    await writeSafetensors(path, [entry(Float32Array.of(1, 2))]);
    const before = await readFile(path);
    const broken = () => Promise.reject(new Error('device lost'));
    await assert.rejects(
      writeSafetensors(path, [entry(Float32Array.of(3, 4)), { ...entry(broken), name: 'v' }]),
      /device lost/,
    );
    await assert.rejects(writeSafetensors(path, [entry(Float32Array.of(3))]), { code: 'ERR_SHAPE' });
    await assert.rejects(writeSafetensors(path, [entry(Int32Array.of(3, 4))]), { code: 'ERR_ARGUMENT' });
    await assert.rejects(
      writeSafetensors(path, [entry(Float32Array.of(3, 4)), entry(Float32Array.of(3, 4))]),
      { code: 'ERR_ARGUMENT' },
    );
    assert.deepEqual(await readFile(path), before);
    assert.deepEqual(await readdir(place), ['model.safetensors']);
  });

  it('aligns every tensor to its element size', async () => {
    const path = join(directory, 'aligned.safetensors');
    await writeSafetensors(path, [
      { name: 'half', shape: [3], dtype: 'BF16', data: new Uint16Array(3) },
      { name: 'single', shape: [3], dtype: 'F32', data: new Float32Array(3) },
      { name: 'ids', shape: [1], dtype: 'I64', data: new BigInt64Array(1) },
    ]);
    await using file = await SafetensorsFile.open(path);
    const start = Number((await readFile(path)).readBigUInt64LE()) + 8;
    for (const [name, size] of [
      ['ids', 8],
      ['single', 4],
      ['half', 2],
    ] as const) {
      assert.equal((start + (file.tensors.get(name)?.begin ?? 1)) % size, 0, name);
    }
  });
});
