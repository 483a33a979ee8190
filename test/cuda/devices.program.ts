/*
 * What devices.test.ts runs in a process of its own, where the emulator has two cards of 96 MiB: prints what it found as
 * JSON.
 */
import { type Device, type DuokvError, Model, type ModelConfig, openDevice } from '../../lib/index.js';
import { randomTokens, sameBits, small } from '../api/support.js';

const config: ModelConfig = small({ headDim: 16 });
const used = (device: Device) => device.info().memory.used;
const failure = (call: Promise<unknown>): Promise<string> =>
  call.then(
    () => 'no error',
    (error: DuokvError) => `${error.code}: ${error.message}`,
  );

const zero = await openDevice({ backend: 'cuda:0' });
const one = await openDevice({ backend: 'cuda:1' });
const batch = { rows: 1, tokens: randomTokens(12, config.vocab) };

/** Logits of the same model on both, computed at the same time. */
const models = await Promise.all([zero, one].map((device) => Model.create(device, config, { seed: 5 })));
const logits = await Promise.all(models.map((model) => model.logits(batch)));
const before = [used(zero), used(one)];
using extra = await Model.create(one, config, { seed: 6 });
const grown = [used(zero) - before[0]!, used(one) - before[1]!];
const parameterBytes = extra.bytes;

/** The first card is filled with models of 4 MiB until no more fits; the second goes on meanwhile. */
const fill: Model[] = [];
let full = 'no error';
while (full === 'no error' && fill.length < 64) {
  full = await failure(
    Model.create(zero, { ...config, vocab: 1 << 14, hidden: 64 }).then((model) => fill.push(model)),
  );
}
const whileFull = await models[1]!.logits(batch);
using trainer = models[1]!.trainer();
const step = await trainer.step({ ...batch, targets: batch.tokens });
const stillThere = await models[0]!.logits(batch);

await zero.close();
const closed = await failure(models[0]!.logits(batch));
const afterwards = await extra.logits(batch);
const missing = await failure(openDevice({ backend: 'cuda:2' }));
await one.close();

console.log(
  JSON.stringify({
    same: sameBits(logits[0]!, logits[1]!),
    grown,
    parameterBytes,
    fitted: fill.length,
    full,
    sameWhileFull: sameBits(whileFull, logits[0]!),
    update: step.update,
    sameOnTheFullOne: sameBits(stillThere, logits[0]!),
    closed,
    afterwards: afterwards.length,
    missing,
  }),
);
