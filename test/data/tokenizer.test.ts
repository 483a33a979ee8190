import assert from 'node:assert/strict';
import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

import fc from 'fast-check';
import { Tokenizer as HuggingFaceTokenizer } from 'tokenizers';

import {
  byteTokenizer,
  huggingFaceTokenizer,
  loadCheckpointTokenizer,
  loadTokenizer,
  saveTokenizer,
  type Tokenizer,
} from '../../lib/data/tokenizer.js';
import { DuokvError } from '../../lib/errors.js';

/** A Llama-like vocabulary: byte fallback, "▁" for spaces, a leading space that is dropped again, three merges. */
function llamaLikeJson(): string {
  const pieces = ['<unk>', '<s>', '</s>'];
  for (let byte = 0; byte < 256; byte++) {
    pieces.push(`<0x${byte.toString(16).toUpperCase().padStart(2, '0')}>`);
  }
  pieces.push('▁', 'h', 'e', 'l', 'o', 'he', 'll', '▁he');
  return JSON.stringify({
    version: '1.0',
    truncation: { direction: 'Right', max_length: 4, strategy: 'LongestFirst', stride: 0 },
    padding: null,
    added_tokens: ['<unk>', '<s>', '</s>'].map((content, id) => ({
      id,
      content,
      single_word: false,
      lstrip: false,
      rstrip: false,
      normalized: false,
      special: true,
    })),
    normalizer: {
      type: 'Sequence',
      normalizers: [
        { type: 'Prepend', prepend: '▁' },
        { type: 'Replace', pattern: { String: ' ' }, content: '▁' },
      ],
    },
    pre_tokenizer: null,
    post_processor: {
      type: 'TemplateProcessing',
      single: [{ SpecialToken: { id: '<s>', type_id: 0 } }, { Sequence: { id: 'A', type_id: 0 } }],
      pair: [{ Sequence: { id: 'A', type_id: 0 } }, { Sequence: { id: 'B', type_id: 0 } }],
      special_tokens: { '<s>': { id: '<s>', ids: [1], tokens: ['<s>'] } },
    },
    decoder: {
      type: 'Sequence',
      decoders: [
        { type: 'Replace', pattern: { String: '▁' }, content: ' ' },
        { type: 'ByteFallback' },
        { type: 'Fuse' },
        { type: 'Strip', content: ' ', start: 1, stop: 0 },
      ],
    },
    model: {
      type: 'BPE',
      dropout: null,
      unk_token: '<unk>',
      continuing_subword_prefix: null,
      end_of_word_suffix: null,
      fuse_unk: true,
      byte_fallback: true,
      vocab: Object.fromEntries(pieces.map((piece, id) => [piece, id])),
      merges: ['h e', 'l l', '▁ he'],
    },
  });
}

/** A byte-level vocabulary with a piece that ends within a character: the first two bytes of 日. */
function byteLevelJson(): string {
  const parsed = JSON.parse(byteTokenizer().json);
  const spell = (byte: number) =>
    Object.entries(parsed.model.vocab as Record<string, number>).find(([, id]) => id === byte)?.[0] ?? '';
  const [first, second] = [0xe6, 0x97].map(spell) as [string, string];
  parsed.model.vocab[first + second] = 258;
  parsed.model.merges = [`${first} ${second}`];
  return JSON.stringify(parsed);
}

async function encode(tokenizer: Tokenizer, text: string): Promise<number[]> {
  return Array.from((await tokenizer.encode([text]))[0] as Int32Array);
}

async function decode(tokenizer: Tokenizer, ids: Iterable<number>): Promise<string> {
  const decoder = tokenizer.decoder();
  let text = '';
  for (const id of ids) text += await decoder.push(id);
  return text + (await decoder.end());
}

describe('tokenizer', () => {
  let directory: string;
  beforeEach(async () => {
    directory = await mkdtemp(join(tmpdir(), 'duokv-tokenizer-'));
  });
  afterEach(() => rm(directory, { recursive: true }));

  it('byte-level: ids are the bytes of UTF-8, then BOS and EOS', async () => {
    const tokenizer = byteTokenizer();
    assert.deepEqual([tokenizer.vocab, tokenizer.bos, tokenizer.eos], [258, 256, 257]);
    assert.deepEqual(await encode(tokenizer, 'é<|bos|>'), Array.from(Buffer.from('é<|bos|>')));
  });

  it('byte-level: its tokenizer.json gives the same ids through the tokenizers package', async () => {
    const parsed = JSON.parse(byteTokenizer().json) as Record<string, unknown>;
    const reference = HuggingFaceTokenizer.fromString(JSON.stringify({ ...parsed, added_tokens: [] }));
    await fc.assert(
      fc.asyncProperty(fc.string({ unit: 'binary' }), async (text) => {
        assert.deepEqual((await reference.encode(text)).getIds(), await encode(byteTokenizer(), text));
      }),
    );
    const special = await HuggingFaceTokenizer.fromString(byteTokenizer().json).encode('<|bos|>a<|eos|>');
    assert.deepEqual(special.getIds(), [256, 97, 257]);
  });

  it('streams every text back unchanged, complete characters only', async () => {
    const llama = huggingFaceTokenizer(llamaLikeJson(), { path: 'test' });
    const cases: [Tokenizer, (text: string) => string][] = [
      [byteTokenizer(), (text) => text],
      [huggingFaceTokenizer(byteLevelJson(), { path: 'test' }), (text) => text],
      // SentencePiece writes a space as "▁", so that a "▁" of the text is one.
      [llama, (text) => text.replaceAll('▁', ' ')],
    ];
    const texts = fc.string({
      unit: fc.oneof(
        { weight: 4, arbitrary: fc.string({ unit: 'grapheme', minLength: 1, maxLength: 1 }) },
        { weight: 1, arbitrary: fc.constantFrom(' ', '▁', '\ufffd', '\ufeff', '\n', 'he', '<s>') },
      ),
    });
    // A U+FFFD of the text is a character like any other.
    const replaced = fc
      .tuple(fc.nat(20), fc.constantFrom('', 'é', '日本', '😀!', ' he'))
      .map(([count, rest]) => '\ufffd'.repeat(count) + rest);
    assert.deepEqual(await encode(cases[1][0], '日'), [258, 0xa5]);
    for (const [tokenizer, comesBack] of cases) {
      await fc.assert(
        fc.asyncProperty(fc.oneof({ weight: 3, arbitrary: texts }, replaced), async (text) => {
          const expected = comesBack(text);
          const decoder = tokenizer.decoder();
          let streamed = '';
          for (const id of [tokenizer.bos, ...(await encode(tokenizer, text)), tokenizer.eos]) {
            streamed += await decoder.push(id);
            assert.ok(
              expected.startsWith(streamed),
              `${JSON.stringify(streamed)} of ${JSON.stringify(expected)}`,
            );
          }
          assert.equal(streamed + (await decoder.end()), expected);
        }),
        { numRuns: 100 },
      );
    }
  });

  it('gives U+FFFD for bytes that are no character, however many follow each other', async () => {
    const llama = huggingFaceTokenizer(llamaLikeJson(), { path: 'test' });
    assert.match(await decode(llama, Array(100).fill(3 + 0x80)), /^\ufffd+$/);
    assert.match(await decode(byteTokenizer(), [0x61, 0x80, 0x62, 0xe2, 0x82]), /^a\ufffdb\ufffd$/);
  });

  it('keeps control strings of a document as text and adds nothing of its own', async () => {
    const tokenizer = huggingFaceTokenizer(llamaLikeJson(), { path: 'test' });
    assert.deepEqual([tokenizer.vocab, tokenizer.bos, tokenizer.eos], [267, 1, 2]);
    assert.deepEqual(await encode(tokenizer, 'hello'), [266, 265, 263]);
    const ids = await encode(tokenizer, '</s> hello<s>');
    assert.ok(!ids.includes(tokenizer.bos) && !ids.includes(tokenizer.eos), ids.join());
    assert.equal(await decode(tokenizer, ids), '</s> hello<s>');
  });

  it('is stored with a checkpoint and read back, byte-level and with named tokens', async () => {
    await saveTokenizer(join(directory, 'bytes'), byteTokenizer());
    assert.deepEqual(await encode(await loadCheckpointTokenizer(join(directory, 'bytes')), 'ab'), [97, 98]);

    await writeFile(join(directory, 'tokenizer.json'), llamaLikeJson());
    const tokenizer = await loadTokenizer(join(directory, 'tokenizer.json'), { bos: '<unk>', eos: 'll' });
    assert.deepEqual([tokenizer.bos, tokenizer.eos], [0, 265]);
    await saveTokenizer(join(directory, 'llama'), tokenizer);
    const stored = await loadCheckpointTokenizer(join(directory, 'llama'));
    assert.deepEqual([stored.vocab, stored.bos, stored.eos, stored.json], [267, 0, 265, llamaLikeJson()]);
  });

  it('names the file and what is missing', async () => {
    const path = join(directory, 'tokenizer.json');
    const rejectsData = (promise: Promise<unknown>, message: RegExp) =>
      assert.rejects(promise, (error) => {
        assert.ok(error instanceof DuokvError && error.code === 'ERR_DATA', String(error));
        assert.match(error.message, message);
        assert.ok(error.message.startsWith(directory), error.message);
        return true;
      });
    await rejectsData(loadCheckpointTokenizer(directory), /ENOENT/);
    await writeFile(path, '{"model": 3');
    await rejectsData(loadTokenizer(path), /not a tokenizer\.json/);
    await writeFile(path, 'null');
    await rejectsData(loadTokenizer(path), /not a tokenizer\.json/);
    await writeFile(path, llamaLikeJson());
    await rejectsData(loadTokenizer(path, { bos: '<begin>' }), /no token "<begin>".*--bos/);
  });
});
