// Trains a model through the API: a folder of text in, a checkpoint out.
//
//   npx tsx examples/train.ts docs/ runs/example
//
// `duokv train` does the same with checkpoints, evaluation and resuming around it.

import {
  byteTokenizer,
  holdOut,
  loadTokenDocuments,
  Model,
  openDevice,
  presets,
  saveTokenizer,
  scoringBatches,
  WindowCorpus,
  windowOrder,
} from 'duokv';

const [text, directory] = process.argv.slice(2);
if (text === undefined || directory === undefined) {
  console.error('usage: tsx examples/train.ts TEXT CHECKPOINT');
  process.exit(2);
}

const seed = 17;
const context = 256;
const batch = 4;
const precision = 'fp32';

const tokenizer = byteTokenizer();
const { documents } = await loadTokenDocuments(text, tokenizer);
const { training, heldOut } = holdOut(documents, 0.1);
const corpus = new WindowCorpus(training, context);
const order = windowOrder(corpus.windows, seed);
const updates = Math.floor(corpus.windows / batch);

await using device = await openDevice();
using model = await Model.create(device, presets.localHistoryTiny({ vocab: tokenizer.vocab }), { seed });
using trainer = model.trainer({
  precision,
  optimizer: { lr: 2e-3 },
  schedule: { warmup: Math.ceil(updates / 10), total: updates },
  microbatch: batch,
});
console.log(`${model.parameterCount} parameters, ${corpus.tokens} tokens, ${updates} updates`);

for (let update = 0; update < updates; update++) {
  const step = await trainer.step(corpus.batch(order.subarray(update * batch, (update + 1) * batch)));
  if (step.update % 10 === 0 || step.update === updates) {
    const speed = Math.round(step.tokens / step.seconds);
    console.log(`update ${step.update}: loss ${step.loss.toFixed(4)}, ${speed} tokens/s`);
  }
}

let nll = 0;
let targets = 0;
for (const scoring of scoringBatches(heldOut, context, batch)) {
  const scored = await model.score(scoring, { precision });
  nll += scored.totalNll;
  targets += scored.totalTargets;
}
if (targets > 0) console.log(`held out: ${(nll / targets).toFixed(4)} nats per byte`);

await model.save(directory);
await saveTokenizer(directory, tokenizer);
console.log(`saved ${directory}; try: npx duokv generate ${directory} --prompt 'The '`);
