import fc from 'fast-check';

import { DESIGNS, documentId, idsOf, randomModel, uniform } from '../reference/arbitraries.js';
import { assertNear } from '../reference/compare.js';
import { type Config, hasGlobalBank, illegality } from '../reference/config.js';
import { ReferenceRow } from '../reference/execution.js';
import { gradients } from '../reference/model.js';
import { assertGradients, engineModel, FP32, useDevice } from './engine.js';

/** The real window and head dimension over a narrow model. */
const SHAPE = {
  vocab: 29,
  hidden: 16,
  ffn: 24,
  lowerLayers: 1,
  queryHeads: 3,
  kvHeads: 1,
  headDim: 64,
  ropeTheta: 10000,
  ropeScale: 1,
  rmsNormEps: 1e-5,
};

const configs = fc
  .record({
    design: fc.constantFrom(
      ...DESIGNS,
      'local-history' as const,
      'local-history' as const,
      'local-history' as const,
    ),
    fusion: fc.constantFrom('joint' as const, 'separate' as const),
    localSource: fc.constantFrom('per-layer' as const, 'paired-input' as const, 'shared-kv' as const),
    provider: fc.constantFrom('boundary' as const, 'cross' as const),
    upperLayers: fc.integer({ min: 1, max: 2 }),
  })
  .map(
    (choice): Config => ({
      ...SHAPE,
      ...choice,
      window: choice.design === 'local-history' ? 128 : 1,
      ...(choice.design === 'repeated-current' && { historyWindow: 128 }),
      ...(choice.design === 'global-adapters' && { adapterRank: 8 }),
    }),
  )
  .filter((config) => illegality(config) === undefined);

/** Lengths of documents whose ends lie at edges of the kernels' tiles, or one position to either side. */
const documents = fc
  .uniqueArray(
    fc
      .record({
        edge: fc.constantFrom(16, 32, 48, 64, 96, 128, 144, 192, 256),
        side: fc.integer({ min: -1, max: 1 }),
      })
      .map(({ edge, side }) => edge + side),
    { minLength: 1, maxLength: 4 },
  )
  .map((ends) => ends.sort((a, b) => a - b).map((end, i) => end - (i === 0 ? 0 : ends[i - 1])));

function prompt(config: Config, lengths: number[], seed: number) {
  const next = uniform(seed);
  const documentIds = BigInt64Array.from(idsOf(lengths, 3));
  const draw = () => Int32Array.from(documentIds, () => Math.floor(next() * config.vocab));
  return { tokens: draw(), targets: draw(), documentIds };
}

describe('engine and reference: window 128, head dimension 64, documents that end at tile edges', () => {
  const device = useDevice();

  it('gives logits and gradients', async () => {
    await fc.assert(
      fc.asyncProperty(configs, documents, fc.nat(), async (config, lengths, seed) => {
        const reference = randomModel(config, seed);
        const { tokens, targets, documentIds } = prompt(config, lengths, seed);
        const batch = { rows: 1, tokens, documentIds, targets, targetDocumentIds: documentIds };
        const expected = gradients(reference, { ...batch, length: tokens.length });
        using model = await engineModel(device.current, reference);
        assertNear(await model.logits({ rows: 1, tokens, documentIds }), expected.logits, FP32, 'logits');
        using trainer = model.trainer({});
        const actual = await trainer.gradients(batch);
        assertGradients(actual.gradients, expected);
      }),
      { numRuns: 16 },
    );
  });

  it('prefills by every exact route and in chunks, and decodes past the window', async () => {
    await fc.assert(
      fc.asyncProperty(configs, documents, fc.nat(), fc.nat(), async (config, lengths, cut, seed) => {
        const reference = randomModel(config, seed);
        const { tokens, documentIds } = prompt(config, lengths, seed);
        const expected = new ReferenceRow(reference);
        const end = expected.prefill(tokens, documentIds, 'full');
        using model = await engineModel(device.current, reference);
        // One row for each route, and one for two chunks.
        const routes = hasGlobalBank(config)
          ? (['exact', 'full', 'uniform'] as const)
          : (['exact', 'full'] as const);
        const chunked = routes.length;
        using session = model.session({ batch: routes.length + 1, capacity: tokens.length + 8 });
        for (const [row, schedule] of routes.entries()) {
          const { logits } = await session.prefill({ tokens, documentIds, rows: [row], schedule });
          assertNear(logits, end, FP32, schedule);
        }
        const at = 1 + (cut % (tokens.length - 1));
        const parts = [
          { tokens: tokens.slice(0, at), documentIds: documentIds.slice(0, at) },
          { tokens: tokens.slice(at), documentIds: documentIds.slice(at) },
        ];
        await session.prefill({ ...parts[0], rows: [chunked] });
        assertNear((await session.prefill({ ...parts[1], rows: [chunked] })).logits, end, FP32, 'chunks');
        for (let step = 0; step < 6; step++) {
          const id = step < 3 ? documentIds[documentIds.length - 1] : documentId(lengths.length, 3);
          const token = tokens[step % tokens.length];
          const next = expected.decode(token, id);
          const all = Int32Array.from({ length: session.batch }, () => token);
          const { logits } = await session.decode({
            tokens: all,
            documentIds: new BigInt64Array(session.batch).fill(id),
          });
          for (let row = 0; row < session.batch; row++) {
            assertNear(
              logits.slice(row * config.vocab, (row + 1) * config.vocab),
              next,
              FP32,
              `step ${step}, row ${row}`,
            );
          }
        }
        for (const name of expected.names()) {
          for (let row = 0; row < session.batch; row++) {
            assertNear(
              await session.cache.read(name, row),
              expected.read(name),
              FP32,
              `${name} of row ${row}`,
            );
          }
        }
      }),
      { numRuns: 16 },
    );
  });
});
