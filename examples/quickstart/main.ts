// The whole job in a few minutes on a CPU: train a small model with a shared global KV bank on real text, save it, load it,
// prefill by the exact suffix schedule and by the full one, decode, and count the cache; then the same for GQA4-CLA2.
//
//   npm run quickstart
//
// The text is the documentation of the npm packages installed beside duokv, one README a document, byte by byte.

import { relative } from 'node:path';
import { fileURLToPath } from 'node:url';

import {
  byteTokenizer,
  type Device,
  holdOut,
  Model,
  type ModelConfig,
  openDevice,
  readDocuments,
  saveTokenizer,
  scoringBatches,
  type TokenDocument,
  type TrainerOptions,
  tokenizeDocuments,
  WindowCorpus,
  windowOrder,
} from 'duokv';

import { compareRoutes } from './compare.js';
import { type QuickstartDesign, sharedGlobal, sharedPairs } from './designs.js';
import { formatCount, heading, openProgress, printCacheBytes, row, unigramEntropy } from './report.js';

const CONTEXT = 256;
const BATCH = 4;
const PROMPT = 1024;
const SEED = 17;
/** Training time of one model in seconds, and the fewest and most updates it is made of. */
const BUDGET = 30;
const FEWEST_UPDATES = 120;
const MOST_UPDATES = 320;

const root = fileURLToPath(new URL('../../', import.meta.url));
const tokenizer = byteTokenizer();

/** The READMEs below node_modules, tokenised. */
async function installedDocumentation(): Promise<TokenDocument[]> {
  async function* readmes() {
    for await (const document of readDocuments(`${root}node_modules`)) {
      if (/(^|\/)readme[^/]*\.md$/i.test(document.id)) yield document;
    }
  }
  const documents: TokenDocument[] = [];
  for await (const document of tokenizeDocuments(readmes(), tokenizer)) documents.push(document);
  return documents;
}

const trainerOptions = (updates: number): TrainerOptions => ({
  precision: 'fp32',
  optimizer: { lr: 2e-3 },
  schedule: { warmup: Math.ceil(updates / 10), total: updates },
  microbatch: BATCH,
});

/** As many updates as fit the budget here, from the time of a second step: the first one also allocates. */
async function chooseUpdates(device: Device, config: ModelConfig, corpus: WindowCorpus): Promise<number> {
  using model = await Model.create(device, config, { seed: SEED });
  using trainer = model.trainer(trainerOptions(MOST_UPDATES));
  const batch = corpus.batch(Array.from({ length: BATCH }, (_, window) => window));
  await trainer.step(batch);
  const { seconds } = await trainer.step(batch);
  return Math.min(MOST_UPDATES, Math.max(FEWEST_UPDATES, Math.floor(BUDGET / seconds)));
}

/** Trains a model of `config` from its seed and saves it; the checkpoint's directory. */
async function train(
  device: Device,
  config: ModelConfig,
  corpus: WindowCorpus,
  updates: number,
): Promise<string> {
  using model = await Model.create(device, config, { seed: SEED });
  using trainer = model.trainer(trainerOptions(updates));
  const order = windowOrder(corpus.windows, SEED);
  const progress = openProgress(config.design, updates);
  const began = performance.now();
  const losses: number[] = [];
  for (let update = 0; update < updates; update++) {
    const windows = order.subarray(update * BATCH, (update + 1) * BATCH);
    const step = await trainer.step(corpus.batch(windows));
    losses.push(step.loss);
    progress.update(update + 1, step);
  }
  progress.stop();
  const seconds = (performance.now() - began) / 1000;
  const tokens = updates * BATCH * CONTEXT;
  row('parameters', formatCount(model.parameterCount));
  row('training', `${updates} updates, ${formatCount(tokens)} tokens in ${seconds.toFixed(1)} s`);
  row('speed', `${formatCount(Math.round(tokens / seconds))} tokens/s`);
  const last = losses.slice(-10);
  const end = last.reduce((sum, loss) => sum + loss, 0) / last.length;
  row(
    'loss, nats per byte',
    `${losses[0]?.toFixed(3)} → ${end.toFixed(3)} (mean of the last ${last.length})`,
  );
  const directory = `${root}build/quickstart/${config.design}`;
  await model.save(directory);
  await saveTokenizer(directory, tokenizer);
  return directory;
}

/** Mean negative log-likelihood of documents that the model has not seen, in nats per byte. */
async function score(model: Model, documents: readonly TokenDocument[]): Promise<number> {
  let nll = 0;
  let targets = 0;
  for (const batch of scoringBatches(documents, CONTEXT, BATCH)) {
    const scored = await model.score(batch);
    nll += scored.totalNll;
    targets += scored.totalTargets;
  }
  return nll / targets;
}

/** Decodes a continuation of `prompt`, sampled. */
async function sample(model: Model, prompt: string): Promise<string> {
  const [encoded] = (await tokenizer.encode([prompt])) as [Int32Array];
  using session = model.session({ batch: 1, capacity: 512 });
  const decoder = tokenizer.decoder();
  let text = prompt;
  const tokens = session.generate({
    prompt: Int32Array.of(tokenizer.bos, ...encoded),
    maxTokens: 200,
    temperature: 0.7,
    topK: 40,
    seed: 1,
  });
  for await (const { token } of tokens) {
    if (token === tokenizer.eos) break;
    text += await decoder.push(token);
  }
  return text + (await decoder.end());
}

const documents = await installedDocumentation();
const { training, heldOut } = holdOut(documents, 0.05);
const corpus = new WindowCorpus(training, CONTEXT);
heading('Text: READMEs of the installed npm packages');
row('documents', `${training.length}, and ${heldOut.length} held out`);
row('training tokens', `${formatCount(corpus.tokens)} bytes with document ends`);
row('unigram entropy', `${unigramEntropy(training).toFixed(3)} nats per byte: the best without any context`);

// A prompt of text that the models have not seen: the longest held-out document.
const unseen = heldOut.reduce((a, b) => (b.tokens.length > a.tokens.length ? b : a));
if (unseen.tokens.length < PROMPT) throw new Error(`no held-out document has ${PROMPT} tokens`);
const prompt = unseen.tokens.slice(0, PROMPT);

await using device = await openDevice();
const { name, isa, threads } = device.info();
row('device', `${name}, ${isa}, ${threads} threads`);

const designs = [sharedGlobal(tokenizer.vocab), sharedPairs(tokenizer.vocab)];
const updates = await chooseUpdates(device, (designs[0] as QuickstartDesign).config, corpus);
for (const design of designs) {
  const { config } = design;
  heading(`${config.design}: ${config.lowerLayers} lower and ${config.upperLayers} upper layers`);
  const directory = await train(device, config, corpus, updates);
  using model = await Model.load(device, directory);
  row('saved and loaded', relative(root, directory));
  row('held out', `${(await score(model, heldOut)).toFixed(3)} nats per byte`);
  await compareRoutes(model, prompt);
  await printCacheBytes(model, prompt, design);
  const text = await sample(model, '## Installation\n\n');
  console.log(`\n${text.trimEnd().replaceAll(/^/gm, '  │ ')}`);
}
