import assert from 'node:assert/strict';
import { createHash } from 'node:crypto';
import { Readable } from 'node:stream';

import fc from 'fast-check';

import {
  holdOut,
  orderHash,
  scoringBatches,
  type TokenDocument,
  tokenizeDocuments,
  WindowCorpus,
  windowOrder,
} from '../../lib/data/corpus.js';
import { byteTokenizer } from '../../lib/data/tokenizer.js';
import { DuokvError } from '../../lib/errors.js';

function document(id: string, ...tokens: number[]): TokenDocument {
  return { id, tokens: Int32Array.from(tokens) };
}

const documentsOfAnyLength = fc
  .array(fc.integer({ min: 2, max: 40 }), { minLength: 1, maxLength: 12 })
  .map((lengths) => {
    let token = 0;
    return lengths.map((length, index) => document(`d${index}`, ...Array.from({ length }, () => token++)));
  });

describe('corpus', () => {
  it('wraps documents in BOS and EOS, drops empty ones and keeps the order', async () => {
    const texts = ['ab', '', 'c', ...Array.from({ length: 9 }, (_, i) => String(i).repeat(300_000))];
    const empty: string[] = [];
    const documents: TokenDocument[] = await Readable.from(
      tokenizeDocuments(
        texts.map((text, id) => ({ id: String(id), text })),
        byteTokenizer(),
        ({ id }) => empty.push(id),
      ),
    ).toArray();
    assert.deepEqual(empty, ['1']);
    assert.deepEqual(
      documents.map(({ id }) => id),
      ['0', '2', '3', '4', '5', '6', '7', '8', '9', '10', '11'],
    );
    assert.deepEqual(Array.from(documents[0]?.tokens ?? []), [256, 97, 98, 257]);
    assert.ok(documents.every(({ tokens }) => tokens[0] === 256 && tokens.at(-1) === 257));
    assert.equal(documents[10]?.tokens.length, 300_002);
  });

  it('cuts windows that share their boundary token and drops the tail', () => {
    const corpus = new WindowCorpus([document('a', 10, 11, 12), document('b', 20, 21, 22, 23, 24, 25)], 3);
    assert.deepEqual(
      [corpus.windows, corpus.tokens, corpus.droppedTokens, corpus.validTargets],
      [2, 9, 2, 5],
    );
    const batch = corpus.batch([1, 0]);
    assert.equal(batch.rows, 2);
    assert.deepEqual(Array.from(batch.tokens), [20, 21, 22, 10, 11, 12]);
    assert.deepEqual(Array.from(batch.targets), [21, 22, 23, 11, 12, 20]);
    assert.deepEqual(Array.from(batch.documentIds), [1n, 1n, 1n, 0n, 0n, 0n]);
    assert.deepEqual(Array.from(batch.targetDocumentIds), [1n, 1n, 1n, 0n, 0n, 1n]);
  });

  it('counts valid targets as the batches have them, and every window covers the stream once', () => {
    fc.assert(
      fc.property(documentsOfAnyLength, fc.integer({ min: 1, max: 9 }), (documents, context) => {
        const total = documents.reduce((sum, { tokens }) => sum + tokens.length, 0);
        fc.pre(total > context);
        const corpus = new WindowCorpus(documents, context);
        const batch = corpus.batch(Array.from({ length: corpus.windows }, (_, window) => window));
        const used = total - corpus.droppedTokens;
        assert.ok(corpus.droppedTokens < context);
        assert.deepEqual(
          Array.from(batch.tokens),
          Array.from({ length: used - 1 }, (_, i) => i),
        );
        assert.deepEqual(
          Array.from(batch.targets),
          Array.from({ length: used - 1 }, (_, i) => i + 1),
        );
        const valid = batch.documentIds.filter((id, i) => id === batch.targetDocumentIds[i]).length;
        assert.equal(corpus.validTargets, valid);
      }),
    );
  });

  it('has a hash of the tokens and of where documents begin', () => {
    const hash = (...documents: TokenDocument[]) => new WindowCorpus(documents, 2).hash();
    const original = hash(document('a', 1, 2, 3), document('b', 4));
    assert.equal(hash(document('other name', 1, 2, 3), document('b', 4)), original);
    assert.notEqual(hash(document('a', 1, 2), document('b', 3, 4)), original);
    assert.notEqual(hash(document('a', 1, 2, 3), document('b', 5)), original);
  });

  it('refuses text that does not fill a window, and windows that do not exist', () => {
    const documents = [document('a', 1, 2, 3)];
    assert.throws(() => new WindowCorpus(documents, 3), /the text has 3 tokens in 1 documents.*needs 4/);
    assert.throws(() => new WindowCorpus([], 3), DuokvError);
    assert.throws(() => new WindowCorpus(documents, 0), /context: must be a positive integer, got 0/);
    assert.throws(() => new WindowCorpus(documents, 2).batch([0, 1]), /windows\[1\]: 1 is outside \[0, 1\)/);
  });

  it('refuses counts that are none, before it yields anything', () => {
    const refuses = (call: () => unknown, message: RegExp) =>
      assert.throws(call, (error) => {
        assert.ok(error instanceof DuokvError && error.code === 'ERR_ARGUMENT', String(error));
        assert.match(error.message, message);
        return true;
      });
    const documents = [document('a', 1, 2, 3)];
    for (const bad of [0, -1, 1.5, Number.NaN]) {
      refuses(() => scoringBatches(documents, bad, 4), /^context /);
      refuses(() => scoringBatches(documents, 4, bad), /^rows /);
    }
    for (const bad of [-1, 1.5, Number.NaN]) {
      refuses(() => windowOrder(bad, 17), /^windows /);
      refuses(() => windowOrder(4, 17, bad), /^epoch /);
    }
    refuses(() => windowOrder(4, Number.NaN), /^seed /);
  });

  it('orders windows by the hash of seed, pass and window: a permutation of its own for each', () => {
    const order = windowOrder(200, 17);
    assert.deepEqual(
      Array.from(order).sort((a, b) => a - b),
      Array.from({ length: 200 }, (_, i) => i),
    );
    const reference = Array.from({ length: 200 }, (_, i) => i)
      .map((i) => ({ i, key: createHash('sha256').update(`17:0:${i}`).digest('hex').slice(0, 12) }))
      .sort((a, b) => (a.key < b.key ? -1 : 1))
      .map(({ i }) => i);
    assert.deepEqual(Array.from(order), reference);
    const hashes = [
      windowOrder(200, 17),
      windowOrder(200, 17n),
      windowOrder(200, 18),
      windowOrder(200, 17, 1),
    ].map(orderHash);
    assert.equal(hashes[0], hashes[1]);
    assert.equal(new Set(hashes).size, 3);
    assert.match(hashes[0] as string, /^[0-9a-f]{64}$/);
  });

  it('holds out the same documents whatever else is read, at least one of two', () => {
    const documents = Array.from({ length: 50 }, (_, i) => document(`file-${i}`, 1, 2));
    const { training, heldOut } = holdOut(documents, 0.1);
    assert.equal(heldOut.length, 5);
    assert.equal(training.length, 45);
    const reversed = holdOut([...documents].reverse(), 0.1);
    assert.deepEqual(new Set(reversed.heldOut.map(({ id }) => id)), new Set(heldOut.map(({ id }) => id)));
    assert.equal(holdOut(documents.slice(0, 2), 0.01).heldOut.length, 1);
    assert.equal(holdOut(documents.slice(0, 1), 0.5).heldOut.length, 0);
    assert.equal(holdOut(documents, 0).heldOut.length, 0);
    assert.throws(() => holdOut(documents, 1), /fraction: must lie in \[0, 1\), got 1/);
  });

  it('scores every target once, with rows that do not depend on neighbouring documents', () => {
    fc.assert(
      fc.property(
        documentsOfAnyLength,
        fc.integer({ min: 1, max: 17 }),
        fc.integer({ min: 1, max: 4 }),
        (documents, context, rows) => {
          const scored = documents.map(({ tokens }) => Array.from(tokens, () => 0));
          for (const batch of scoringBatches(documents, context, rows)) {
            assert.ok(batch.rows >= 1 && batch.rows <= rows);
            assert.equal(batch.tokens.length, batch.rows * context);
            for (let i = 0; i < batch.tokens.length; i++) {
              const id = Number(batch.documentIds[i]);
              if (batch.targetDocumentIds[i] !== batch.documentIds[i]) {
                assert.equal(id, -1);
                continue;
              }
              const { tokens } = documents[id] as TokenDocument;
              const position = tokens.indexOf(batch.tokens[i] as number);
              assert.equal(tokens[position + 1], batch.targets[i]);
              (scored[id] as number[])[position + 1]! += 1;
              // A document's pieces begin at multiples of the context, never where a neighbour happens to end.
              const startsPiece = i % context === 0 || batch.documentIds[i - 1] !== batch.documentIds[i];
              assert.equal(startsPiece, position % context === 0);
            }
          }
          for (const counts of scored) assert.deepEqual(counts, [0, ...Array(counts.length - 1).fill(1)]);
        },
      ),
    );
  });
});
