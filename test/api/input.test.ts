import assert from 'node:assert/strict';

import { type Device, Model, openDevice, presets, type Session, type Trainer } from '../../lib/index.js';
import { randomBatch, randomTokens, rejectsWith, SMALL, sameBits, small } from './support.js';

/* Each bad argument gives an error that names it and its numbers, changes nothing, and leaves the process alive. */

describe('bad input', () => {
  const config = small();
  const { vocab } = config;
  let device: Device;
  let model: Model;
  let trainer: Trainer;
  let session: Session;
  let reference: Float32Array;
  const probe = () => model.logits({ tokens: randomTokens(12, vocab), rows: 2 });

  before('opens a device', async () => {
    device = await openDevice({ backend: 'cpu' });
    model = await Model.create(device, config, { seed: 3 });
    trainer = model.trainer();
    session = model.session({ batch: 2, capacity: 16 });
    await session.prefill({ tokens: randomTokens(10, vocab) });
    reference = await probe();
  });
  after('nothing has changed', async () => {
    assert.ok(sameBits(await probe(), reference));
    assert.equal(trainer.update, 0);
    assert.deepEqual(session.lengths, [5, 5]);
    await device.close();
  });

  const ids = (...values: number[]) => BigInt64Array.from(values, BigInt);
  const batch = () => randomBatch(config, 2, 4);

  describe('batches', () => {
    const cases: [string, () => object, string, RegExp][] = [
      ['empty batch', () => ({ ...batch(), tokens: new Int32Array() }), 'ERR_SHAPE', /tokens is empty/],
      [
        'no rows',
        () => ({ ...batch(), rows: 0 }),
        'ERR_ARGUMENT',
        /rows is 0; it must be an integer of at least 1/,
      ],
      ['fractional rows', () => ({ ...batch(), rows: 1.5 }), 'ERR_ARGUMENT', /rows is 1\.5/],
      [
        'rows that do not divide',
        () => ({ ...batch(), rows: 3 }),
        'ERR_SHAPE',
        /8 elements, which do not make 3 rows/,
      ],
      [
        'token above the vocabulary',
        () => ({ ...batch(), tokens: Int32Array.of(0, 1, 2, 61, 4, 5, 6, 7) }),
        'ERR_TOKEN_RANGE',
        /tokens\[3\]: token 61 is outside \[0, 61\)/,
      ],
      [
        'negative token',
        () => ({ ...batch(), tokens: Int32Array.of(0, 1, 2, -1, 4, 5, 6, 7) }),
        'ERR_TOKEN_RANGE',
        /tokens\[3\]: token -1/,
      ],
      [
        'NaN token',
        () => ({ ...batch(), tokens: [0, 1, Number.NaN, 3, 4, 5, 6, 7] }),
        'ERR_TOKEN_RANGE',
        /tokens\[2\]: token NaN is not an integer/,
      ],
      [
        'fractional token',
        () => ({ ...batch(), tokens: [0, 1, 2.5, 3, 4, 5, 6, 7] }),
        'ERR_TOKEN_RANGE',
        /tokens\[2\]: token 2\.5/,
      ],
      [
        'text token',
        () => ({ ...batch(), tokens: ['0', 1, 2, 3, 4, 5, 6, 7] }),
        'ERR_TOKEN_RANGE',
        /tokens\[0\]: token "0"/,
      ],
      [
        'wrong typed array',
        () => ({ ...batch(), tokens: new Float32Array(8) }),
        'ERR_ARGUMENT',
        /tokens must be an Int32Array, not a Float32Array/,
      ],
      [
        'unsigned typed array',
        () => ({ ...batch(), tokens: new Uint32Array(8) }),
        'ERR_ARGUMENT',
        /not a Uint32Array/,
      ],
      [
        'shared memory',
        () => ({ ...batch(), tokens: new Int32Array(new SharedArrayBuffer(32)) }),
        'ERR_ARGUMENT',
        /SharedArrayBuffer/,
      ],
      [
        'target above the vocabulary',
        () => ({ ...batch(), targets: new Int32Array(8).fill(99) }),
        'ERR_TOKEN_RANGE',
        /targets\[0\]: token 99/,
      ],
      [
        'missing targets',
        () => ({ ...batch(), targets: undefined }),
        'ERR_ARGUMENT',
        /targets must be an Int32Array, not undefined/,
      ],
      [
        'too few targets',
        () => ({ ...batch(), targets: new Int32Array(7) }),
        'ERR_SHAPE',
        /targets has 7 elements, expected 8/,
      ],
      [
        'too many ids',
        () => ({ ...batch(), documentIds: new BigInt64Array(9) }),
        'ERR_SHAPE',
        /documentIds has 9 elements, expected 8/,
      ],
      [
        'ids as numbers',
        () => ({ ...batch(), documentIds: new Int32Array(8) }),
        'ERR_ARGUMENT',
        /documentIds must be a BigInt64Array, not a Int32Array/,
      ],
      [
        'unsigned ids',
        () => ({ ...batch(), documentIds: new BigUint64Array(8) }),
        'ERR_ARGUMENT',
        /not a BigUint64Array/,
      ],
      [
        'ids without target ids',
        () => ({ ...batch(), targetDocumentIds: undefined }),
        'ERR_ARGUMENT',
        /belong together/,
      ],
      [
        'id that recurs',
        () => ({ ...batch(), documentIds: ids(5, 5, 5, 5, 7, -2, 7, 7) }),
        'ERR_DOCUMENT_IDS',
        /id 7 recurs in row 1 at position 2/,
      ],
      [
        'no valid target',
        () => ({ ...batch(), targetDocumentIds: ids(91, 92, 93, 94, 95, 96, 97, 98) }),
        'ERR_NO_TARGETS',
        /none of the 8 targets is valid/,
      ],
      ['unknown key', () => ({ ...batch(), target: 1 }), 'ERR_ARGUMENT', /batch has an unknown key "target"/],
    ];
    for (const [name, make, code, message] of cases) {
      it(`${name}: ${code}`, async () => {
        const bad = make() as ReturnType<typeof batch>;
        await rejectsWith(code as 'ERR_SHAPE', message, () => trainer.step(bad));
        await rejectsWith(code as 'ERR_SHAPE', message, () => trainer.gradients(bad));
        await rejectsWith(code as 'ERR_SHAPE', message, () => model.score(bad));
      });
    }

    it('takes ids in any order and of any size, compared as int64', async () => {
      const documentIds = BigInt64Array.of(
        2n ** 62n,
        2n ** 62n,
        -(2n ** 63n),
        1n,
        2n ** 32n + 1n,
        0n,
        2n ** 32n,
        -1n,
      );
      const { documents, totalTargets } = await model.score({
        ...batch(),
        documentIds,
        targetDocumentIds: documentIds,
      });
      assert.equal(totalTargets, 8);
      assert.deepEqual(
        documents.map(({ row, id, targets }) => [row, id, targets]),
        [
          [0, 2n ** 62n, 2],
          [0, -(2n ** 63n), 1],
          [0, 1n, 1],
          [1, 2n ** 32n + 1n, 1],
          [1, 0n, 1],
          [1, 2n ** 32n, 1],
          [1, -1n, 1],
        ],
      );
    });

    it('takes plain arrays of tokens, and reads its arrays when called', async () => {
      const tokens = randomTokens(8, vocab);
      const expected = await model.logits({ tokens: tokens.slice(), rows: 2 });
      assert.ok(sameBits(await model.logits({ tokens: Array.from(tokens), rows: 2 }), expected));
      const pending = model.logits({ tokens, rows: 2 });
      structuredClone(tokens, { transfer: [tokens.buffer as ArrayBuffer] });
      assert.ok(sameBits(await pending, expected));
      await rejectsWith('ERR_SHAPE', /tokens is empty/, () => model.logits({ tokens, rows: 1 }));
      // Node has resizable buffers; the type library of this language version does not.
      const resizable = Reflect.construct(ArrayBuffer, [32, { maxByteLength: 64 }]) as ArrayBuffer & {
        resize(bytes: number): void;
      };
      const view = new Int32Array(resizable);
      resizable.resize(0);
      await rejectsWith('ERR_SHAPE', /tokens is empty/, () => model.logits({ tokens: view, rows: 1 }));
    });
  });

  describe('sessions', () => {
    const tokens = (count: number) => randomTokens(count, vocab);
    const cases: [string, () => unknown, string, RegExp][] = [
      [
        'zero-length prompt',
        () => session.prefill({ tokens: new Int32Array() }),
        'ERR_SHAPE',
        /the prompt of row 0 is empty/,
      ],
      [
        'one empty prompt of several',
        () => session.prefill({ tokens: [tokens(2), []] }),
        'ERR_SHAPE',
        /the prompt of row 1 is empty/,
      ],
      [
        'prompt over capacity',
        () => session.prefill({ tokens: tokens(34) }),
        'ERR_CAPACITY',
        /row 0 gets 17 tokens; the session's capacity is 16/,
      ],
      [
        'prompt over what is left',
        () => session.prefill({ tokens: tokens(12), rows: [1] }),
        'ERR_CAPACITY',
        /row 1 .*5.*12.*16/,
      ],
      [
        'prompts for other rows',
        () => session.prefill({ tokens: [tokens(2)] }),
        'ERR_SHAPE',
        /tokens has 1 elements, expected 2/,
      ],
      [
        'odd split',
        () => session.prefill({ tokens: tokens(3) }),
        'ERR_SHAPE',
        /3 elements, which do not make 2 rows/,
      ],
      [
        'token out of range',
        () => session.prefill({ tokens: [tokens(2), Int32Array.of(1, 61)] }),
        'ERR_TOKEN_RANGE',
        /tokens\[1\]\[1\]: token 61 is outside \[0, 61\)/,
      ],
      [
        'rows twice',
        () => session.prefill({ tokens: tokens(2), rows: [1, 1] }),
        'ERR_SHAPE',
        /rows\[1\]: row 1 is named twice/,
      ],
      [
        'detached tokens',
        () => {
          const detached = tokens(3);
          structuredClone(detached, { transfer: [detached.buffer as ArrayBuffer] });
          return session.prefill({ tokens: detached, rows: [1] });
        },
        'ERR_SHAPE',
        /the prompt of row 1 is empty, or its buffer is detached/,
      ],
      [
        'row outside',
        () => session.prefill({ tokens: tokens(2), rows: [2] }),
        'ERR_ARGUMENT',
        /rows\[0\] is 2; it must be an integer between 0 and 1/,
      ],
      ['no rows', () => session.prefill({ tokens: tokens(2), rows: [] }), 'ERR_SHAPE', /rows is empty/],
      ['fractional row', () => session.reset([0.5]), 'ERR_ARGUMENT', /rows\[0\] is 0\.5/],
      [
        'ids of another length',
        () => session.prefill({ tokens: tokens(4), documentIds: ids(1, 2, 3) }),
        'ERR_SHAPE',
        /documentIds has 3 elements, expected 4/,
      ],
      [
        'flat ids for listed tokens',
        () => session.prefill({ tokens: [tokens(1), tokens(2)], documentIds: ids(1, 2, 3) }),
        'ERR_ARGUMENT',
        /documentIds must be an array of BigInt64Arrays/,
      ],
      [
        'id that recurs',
        () => session.prefill({ tokens: tokens(3), documentIds: ids(8, 9, 8), rows: [1] }),
        'ERR_DOCUMENT_IDS',
        /id 8 recurs in row 1 at position 7/,
      ],
      [
        'unknown schedule',
        () => session.prefill({ tokens: tokens(4), schedule: 'fast' as 'full' }),
        'ERR_ARGUMENT',
        /schedule is "fast"/,
      ],
      [
        'approximate nothing',
        () => session.prefill({ tokens: tokens(4), schedule: { approximate: 0 } }),
        'ERR_ARGUMENT',
        /schedule\.approximate is 0/,
      ],
      [
        'unknown schedule key',
        () => session.prefill({ tokens: tokens(4), schedule: { aproximate: 2 } as never }),
        'ERR_ARGUMENT',
        /"aproximate"/,
      ],
      [
        'unknown input key',
        () => session.prefill({ tokens: tokens(4), documents: 1 } as never),
        'ERR_ARGUMENT',
        /"documents"/,
      ],
      [
        'decode of too few tokens',
        () => session.decode({ tokens: tokens(1) }),
        'ERR_SHAPE',
        /tokens has 1 elements, expected 2/,
      ],
      [
        'decode out of range',
        () => session.decode({ tokens: Int32Array.of(1, -5) }),
        'ERR_TOKEN_RANGE',
        /tokens\[1\]: token -5/,
      ],
      [
        'decode with wrong ids',
        () => session.decode({ tokens: tokens(2), documentIds: [1, 2] as never }),
        'ERR_ARGUMENT',
        /documentIds must be a BigInt64Array, not an array/,
      ],
      [
        'unknown cache tensor',
        () => session.cache.read('layer.9.k'),
        'ERR_TENSOR_NAME',
        /no tensor "layer\.9\.k"; it has layer\.0\.k/,
      ],
      [
        'cache row outside',
        () => session.cache.read('layer.0.k', 2),
        'ERR_ARGUMENT',
        /row is 2; it must be an integer between 0 and 1/,
      ],
      [
        'empty generation prompt',
        () => session.generate({ prompt: [], maxTokens: 2 }),
        'ERR_SHAPE',
        /prompt is empty/,
      ],
      [
        'generation over capacity',
        () => session.generate({ prompt: [1], maxTokens: 17 }),
        'ERR_CAPACITY',
        /need 17 positions; the session's capacity is 16/,
      ],
      [
        'negative temperature',
        () => session.generate({ prompt: [1], maxTokens: 2, temperature: -1 }),
        'ERR_ARGUMENT',
        /temperature is -1/,
      ],
      [
        'topP zero',
        () => session.generate({ prompt: [1], maxTokens: 2, topP: 0 }),
        'ERR_ARGUMENT',
        /topP is 0/,
      ],
      [
        'no capacity',
        () => model.session({} as never),
        'ERR_ARGUMENT',
        /capacity is undefined; it must be an integer/,
      ],
      ['batch zero', () => model.session({ batch: 0, capacity: 4 }), 'ERR_ARGUMENT', /batch is 0/],
      [
        'unknown precision',
        () => model.session({ capacity: 4, precision: 'fp16' as 'fp32' }),
        'ERR_ARGUMENT',
        /precision is "fp16"; it must be one of fp32, /,
      ],
      [
        'unknown session option',
        () => model.session({ capacity: 4, size: 3 } as never),
        'ERR_ARGUMENT',
        /unknown key "size"; known keys: batch, /,
      ],
    ];
    for (const [name, call, code, message] of cases) {
      it(`${name}: ${code}`, () => rejectsWith(code as 'ERR_SHAPE', message, call));
    }

    it('an id of an earlier call that recurs: ERR_DOCUMENT_IDS', async () => {
      using other = model.session({ capacity: 8 });
      await other.prefill({ tokens: tokens(3), documentIds: ids(4, 4, 5) });
      await rejectsWith('ERR_DOCUMENT_IDS', /id 4 recurs in row 0 at position 3/, () =>
        other.prefill({ tokens: tokens(2), documentIds: ids(4, 6) }),
      );
      await rejectsWith('ERR_DOCUMENT_IDS', /id 4 recurs in row 0 at position 3/, () =>
        other.decode({ tokens: tokens(1), documentIds: ids(4) }),
      );
      assert.deepEqual(other.lengths, [3]);
      await other.decode({ tokens: tokens(1), documentIds: ids(5) });
    });

    it('a schedule that the design does not have: ERR_CONFIG', async () => {
      using plain = await Model.create(device, presets.independentTiny(SMALL));
      using other = plain.session({ capacity: 8 });
      for (const schedule of ['uniform', { approximate: 3 }] as const) {
        await rejectsWith('ERR_CONFIG', /needs a design with a global bank/, () =>
          other.prefill({ tokens: tokens(4), schedule }),
        );
      }
    });

    it('more memory than there is: ERR_DEVICE_MEMORY', async () => {
      using other = model.session({ batch: 2 ** 20, capacity: 2 ** 31 - 2 });
      await rejectsWith('ERR_DEVICE_MEMORY', /bytes/, () => other.ready);
      await rejectsWith('ERR_DEVICE_MEMORY', /bytes/, () => other.reset());
    });
  });

  describe('models, trainers and devices', () => {
    const cases: [string, () => unknown, string, RegExp][] = [
      [
        'unknown tensor',
        () => model.readTensor('lm_head.weight'),
        'ERR_TENSOR_NAME',
        /no tensor "lm_head\.weight"/,
      ],
      [
        'tensor of another size',
        () => model.writeTensor('model.norm.weight', new Float32Array(25)),
        'ERR_SHAPE',
        /values has 25 elements, tensor "model\.norm\.weight" has 24/,
      ],
      [
        'tensor of doubles',
        () => model.writeTensor('model.norm.weight', new Float64Array(24) as never),
        'ERR_ARGUMENT',
        /values must be a Float32Array, not a Float64Array/,
      ],
      ['negative seed', () => Model.create(device, config, { seed: -1 }), 'ERR_ARGUMENT', /seed is -1/],
      ['fractional seed', () => Model.create(device, config, { seed: 0.5 }), 'ERR_ARGUMENT', /seed is 0\.5/],
      [
        'unknown create option',
        () => Model.create(device, config, { sede: 1 } as never),
        'ERR_ARGUMENT',
        /unknown key "sede"/,
      ],
      [
        'no device',
        () => Model.create({} as never, config),
        'ERR_ARGUMENT',
        /device must be a Device, not a Object/,
      ],
      [
        'unknown precision',
        () => model.logits({ tokens: [1], rows: 1 }, { precision: 'tf32' as never }),
        'ERR_ARGUMENT',
        /precision is "tf32"/,
      ],
      [
        'no signal',
        () => model.logits({ tokens: [1], rows: 1 }, { signal: {} as never }),
        'ERR_ARGUMENT',
        /signal must be an AbortSignal/,
      ],
      [
        'unknown trainer option',
        () => model.trainer({ optimiser: {} } as never),
        'ERR_ARGUMENT',
        /unknown key "optimiser"/,
      ],
      [
        'unknown optimiser key',
        () => model.trainer({ optimizer: { learningRate: 1 } } as never),
        'ERR_ARGUMENT',
        /optimizer has an unknown key "learningRate"; known keys: lr, /,
      ],
      [
        'beta of one',
        () => model.trainer({ optimizer: { betas: [0.9, 1] } }),
        'ERR_ARGUMENT',
        /optimizer\.betas\[1\] is 1/,
      ],
      [
        'NaN rate',
        () => model.trainer({ optimizer: { lr: Number.NaN } }),
        'ERR_ARGUMENT',
        /optimizer\.lr is NaN/,
      ],
      [
        'warmup beyond the end',
        () => model.trainer({ schedule: { warmup: 5, total: 4 } }),
        'ERR_ARGUMENT',
        /schedule\.warmup is 5; it must be at most schedule\.total, which is 4/,
      ],
      ['microbatch zero', () => model.trainer({ microbatch: 0 }), 'ERR_ARGUMENT', /microbatch is 0/],
      [
        'unknown backend',
        () => openDevice({ backend: 'gpu' as never }),
        'ERR_ARGUMENT',
        /backend is "gpu"; it must be one of auto, cpu, cuda, cuda:N/,
      ],
      [
        'no such card',
        () => openDevice({ backend: 'cuda:9999' }),
        'ERR_DEVICE_UNAVAILABLE',
        /backend 'cuda:9999'/,
      ],
      ['no threads', () => openDevice({ threads: 0 }), 'ERR_ARGUMENT', /threads is 0/],
      [
        'unknown device option',
        () => openDevice({ device: 0 } as never),
        'ERR_ARGUMENT',
        /unknown key "device"/,
      ],
      ['no directory', () => model.save(undefined as never), 'ERR_ARGUMENT', /directory is undefined/],
    ];
    for (const [name, call, code, message] of cases) {
      it(`${name}: ${code}`, () => rejectsWith(code as 'ERR_SHAPE', message, call));
    }
  });
});
