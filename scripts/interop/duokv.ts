/*
 * The duokv side of the interoperability check; see README.md beside it.
 *
 *     duokv.ts write DIR     checkpoints of the plain grouped-query designs, and their logits
 *     duokv.ts check DIR     loads the Llama directory that Transformers wrote and compares logits
 */
import { readFile, writeFile } from 'node:fs/promises';
import { join } from 'node:path';

import { Model, openDevice, presets } from '../../lib/index.js';

const LIMIT = 1e-4;
const [command, directory] = process.argv.slice(2) as [string, string];
await using device = await openDevice({ backend: 'cpu' });

async function write(): Promise<void> {
  // Weights far from the initialisation, so that attention is far from uniform.
  const shapes = { hidden: 96, queryHeads: 6, headDim: 16, ffn: 160, vocab: 257 };
  const configs = {
    independent: presets.independentTiny({ ...shapes, kvHeads: 3 }),
    gqa2: presets.gqa2Tiny({ ...shapes, kvHeads: 2 }),
    'gqa2-ropescale4': presets.gqa2Tiny({
      ...shapes,
      kvHeads: 2,
      ropeScale: 4,
      ropeTheta: 2000,
      rmsNormEps: 1e-6,
    }),
  };
  for (const [name, config] of Object.entries(configs)) {
    using model = await Model.create(device, config, { seed: 5 });
    for (const { name: tensor, shape } of model.plan.parameters) {
      if (shape.length < 2) continue;
      await model.writeTensor(
        tensor,
        (await model.readTensor(tensor)).map((value) => value * 8),
      );
    }
    const path = join(directory, 'duokv', name);
    await model.save(path);
    const tokens = Int32Array.from({ length: 80 }, (_, i) => (i * i * 31 + 7 * i) % config.vocab);
    const logits = await model.logits({ tokens, rows: 2 });
    const rows = [Array.from(tokens.subarray(0, 40)), Array.from(tokens.subarray(40))];
    await writeFile(join(path, 'logits.json'), JSON.stringify({ tokens: rows, logits: Array.from(logits) }));
  }
}

async function check(): Promise<boolean> {
  const path = join(directory, 'llama');
  const expected = JSON.parse(await readFile(join(path, 'logits.json'), 'utf8')) as {
    tokens: number[][];
    logits: number[];
  };
  using model = await Model.load(device, path);
  const found = await model.logits({ tokens: expected.tokens.flat(), rows: expected.tokens.length });
  let difference = 0;
  let largest = 0;
  found.forEach((value, i) => {
    difference = Math.max(difference, Math.abs(value - (expected.logits[i] as number)));
    largest = Math.max(largest, Math.abs(value));
  });
  console.log(
    `llama: written by Transformers, read by duokv: largest difference ${difference.toExponential(2)} ` +
      `of logits up to ${largest.toFixed(2)}`,
  );
  return difference <= LIMIT;
}

if (command === 'write') await write();
else if (!(await check())) process.exitCode = 1;
