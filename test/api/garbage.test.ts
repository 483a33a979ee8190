import assert from 'node:assert/strict';

import fc from 'fast-check';

import { type Device, DuokvError, Model, openDevice, type Session, type Trainer } from '../../lib/index.js';
import { randomBatch, randomTokens, sameBits, small } from './support.js';

describe('garbage', () => {
  const config = small();
  const { vocab } = config;
  let device: Device;
  let model: Model;
  let trainer: Trainer;
  let session: Session;
  let reference: Float32Array;
  const probe = () => model.logits({ tokens: randomTokens(12, vocab), rows: 2 });
  const batch = () => randomBatch(config, 2, 4);
  const ids = (...values: number[]) => BigInt64Array.from(values, BigInt);

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

  /** Anything, with the shapes that look most like something. */
  const garbage = fc.oneof(
    fc.anything({ withBigInt: true, withTypedArray: true, withSparseArray: true, withNullPrototype: true }),
    fc.int32Array({ maxLength: 12 }),
    fc.bigInt64Array({ maxLength: 12 }),
    fc.float32Array({ maxLength: 12 }),
    fc.array(fc.integer({ min: -3, max: 70 }), { maxLength: 12 }),
    fc.constantFrom(Symbol('x'), () => 1, new Proxy({}, {}), -0, 2 ** 53, Number.POSITIVE_INFINITY),
  );

  /** Whatever happens, it is an error of ours or of the language, never a crash. */
  async function survives(call: () => unknown): Promise<void> {
    try {
      await call();
    } catch (error) {
      const known = error instanceof DuokvError || error instanceof TypeError;
      assert.ok(known, `${(error as Error)?.stack ?? String(error)}`);
      assert.notEqual((error as DuokvError).code, 'ERR_INTERNAL', (error as Error).message);
    }
  }

  const replaceOne = (template: () => object) =>
    fc
      .tuple(fc.constantFrom(...Object.keys(template())), garbage)
      .map(([key, value]) => ({ ...template(), [key]: value }));

  const targets: [string, fc.Arbitrary<unknown>, (value: never) => unknown][] = [
    [
      'config',
      fc.oneof(
        garbage,
        replaceOne(() => ({ ...config })),
      ),
      (value) => Model.create(device, value).then((made) => made.dispose()),
    ],
    ['batch', fc.oneof(garbage, replaceOne(batch)), (value) => trainer.gradients(value)],
    ['scored batch', fc.oneof(garbage, replaceOne(batch)), (value) => model.score(value)],
    ['logits options', garbage, (value) => model.logits({ tokens: [1], rows: 1 }, value)],
    ['tensor name', garbage, (value) => model.readTensor(value)],
    ['tensor values', garbage, (value) => model.writeTensor('model.embed_tokens.weight', value)],
    [
      'trainer options',
      fc.oneof(
        garbage,
        replaceOne(() => ({ precision: 'fp32', optimizer: {}, schedule: {}, clipNorm: 1, microbatch: 1 })),
      ),
      (value) => model.trainer(value).dispose(),
    ],
    ['session precision', garbage, (value) => model.session({ capacity: 4, precision: value }).dispose()],
    ['cache name', garbage, (value) => session.cache.read(value)],
    ['cache row', garbage, (value) => session.cache.read('layer.0.k', value)],
    ['device options', garbage, (value) => openDevice(value).then((opened) => opened.close())],
  ];
  for (const [name, arbitrary, call] of targets) {
    it(`as ${name}`, () =>
      fc.assert(
        fc.asyncProperty(arbitrary, (value) => survives(() => call(value as never))),
        { numRuns: 60 },
      ));
  }

  it('in a session, which stays usable', async () => {
    using scratch = model.session({ batch: 2, capacity: 16 });
    const prefill = () => ({
      tokens: randomTokens(4, vocab),
      documentIds: ids(1, 1, 1, 1),
      rows: [0, 1],
      schedule: 'exact',
    });
    const decode = () => ({ tokens: randomTokens(2, vocab), documentIds: ids(1, 1), rows: [0, 1] });
    await fc.assert(
      fc.asyncProperty(
        fc.oneof(garbage, replaceOne(prefill)),
        fc.oneof(garbage, replaceOne(decode)),
        async (first, second) => {
          await survives(() => scratch.prefill(first as never));
          await survives(() => scratch.decode(second as never));
        },
      ),
      { numRuns: 100 },
    );
    await scratch.reset();
    await scratch.prefill({ tokens: randomTokens(4, vocab) });
    assert.deepEqual(scratch.lengths, [2, 2]);
  });
});
