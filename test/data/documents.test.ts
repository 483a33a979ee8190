import assert from 'node:assert/strict';
import { mkdir, mkdtemp, rm, symlink, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Readable } from 'node:stream';
import { gzipSync } from 'node:zlib';

import { readDocuments, type TextDocument } from '../../lib/data/documents.js';
import { DuokvError } from '../../lib/errors.js';

async function collect(path: string): Promise<TextDocument[]> {
  return Readable.from(readDocuments(path)).toArray();
}

describe('documents', () => {
  let directory: string;
  beforeEach(async () => {
    directory = await mkdtemp(join(tmpdir(), 'duokv-documents-'));
  });
  afterEach(() => rm(directory, { recursive: true }));

  async function rejectsData(path: string, message: RegExp): Promise<void> {
    await assert.rejects(collect(path), (error) => {
      assert.ok(error instanceof DuokvError, String(error));
      assert.equal(error.code, 'ERR_DATA');
      assert.match(error.message, message);
      assert.ok(error.message.startsWith(path), error.message);
      return true;
    });
  }

  async function write(name: string, content: string | Buffer): Promise<string> {
    const path = join(directory, name);
    await writeFile(path, content);
    return path;
  }

  it('reads the text files below a folder in the order of their relative paths', async () => {
    await mkdir(join(directory, 'b', 'deep'), { recursive: true });
    await mkdir(join(directory, 'a.md'));
    await write('z.txt', 'last');
    await write('b/deep/README.MD', 'ünïcode €');
    await write('b/notes.txt', '');
    await write('b/skip.json', '{}');
    await write('Z.txt', 'upper case sorts first');
    assert.deepEqual(await collect(directory), [
      { id: 'Z.txt', text: 'upper case sorts first' },
      { id: 'b/deep/README.MD', text: 'ünïcode €' },
      { id: 'b/notes.txt', text: '' },
      { id: 'z.txt', text: 'last' },
    ]);
  });

  it('follows links to files and folders, reads each file once and no circle', async () => {
    const folder = join(directory, 'text');
    await mkdir(join(folder, 'sub'), { recursive: true });
    await mkdir(join(directory, 'outside'));
    await write('text/own.txt', 'own');
    await write('text/sub/deep.md', 'deep');
    await write('outside/far.txt', 'far');
    await write('alone', 'alone');
    await symlink(join(directory, 'alone'), join(folder, 'link.txt'));
    await symlink(join(directory, 'outside'), join(folder, 'a'));
    await symlink(join(directory, 'outside'), join(folder, 'b'));
    await symlink(join(folder, 'own.txt'), join(folder, 'another.txt'));
    await symlink(folder, join(folder, 'sub', 'circle'));
    await symlink(join(directory, 'nowhere'), join(folder, 'no-text'));
    const expected = [
      { id: 'a/far.txt', text: 'far' },
      { id: 'link.txt', text: 'alone' },
      { id: 'own.txt', text: 'own' },
      { id: 'sub/deep.md', text: 'deep' },
    ];
    assert.deepEqual(await collect(folder), expected);
    const link = join(directory, 'link');
    await symlink(folder, link);
    assert.deepEqual(await collect(link), expected);
    await symlink(join(directory, 'nowhere'), join(folder, 'broken.txt'));
    await rejectsData(folder, /broken\.txt: does not exist$/);
  });

  it('reads a single file of any name, without its byte order mark', async () => {
    const path = await write('book', Buffer.from('\ufeffOnce upon a time'));
    assert.deepEqual(await collect(path), [{ id: 'book', text: 'Once upon a time' }]);
  });

  it('reads JSONL records, ids given or by line, with any line ends', async () => {
    const path = await write(
      'a.jsonl',
      '{"text":"one","id":"x"}\r\n\n{"text":"two","id":7,"url":"ignored"}\n{"text":"three"}',
    );
    assert.deepEqual(await collect(path), [
      { id: 'x', text: 'one' },
      { id: '7', text: 'two' },
      { id: 'a.jsonl:4', text: 'three' },
    ]);
  });

  it('reads compressed JSONL and lines longer than a stream chunk', async () => {
    const texts = Array.from({ length: 40 }, (_, i) => 'é'.repeat(i * 7001));
    const path = await write(
      'long.jsonl.gz',
      gzipSync(texts.map((text) => JSON.stringify({ text })).join('\n')),
    );
    assert.deepEqual(
      (await collect(path)).map(({ text }) => text),
      texts,
    );
  });

  it('names the file, the line and the fault', async () => {
    await rejectsData(join(directory, 'absent'), /does not exist$/);
    await rejectsData(directory, /no \.txt or \.md file/);
    await rejectsData(await write('empty.jsonl', '\n\n'), /no records/);
    await rejectsData(await write('broken.jsonl', '{"text":"ok"}\n{"text":\n'), /line 2 is not JSON/);
    await rejectsData(await write('array.jsonl', '[1]\n'), /line 1 is not a JSON object/);
    await rejectsData(
      await write('no-text.jsonl', '{"text":null}\n'),
      /line 1: "text" must be a string, got null/,
    );
    await rejectsData(await write('bad-id.jsonl', '{"text":"a","id":[1]}\n'), /line 1: "id" must be/);
    const invalid = Buffer.concat([
      Buffer.from('fine\n€\n'),
      Buffer.from([0x61, 0xc3, 0x28]),
      Buffer.from('\nfine'),
    ]);
    await rejectsData(await write('invalid.txt', invalid), /line 3 is not valid UTF-8$/);
    const record = Buffer.concat([
      Buffer.from('{"text":"a"}\n{"text":"'),
      Buffer.from([0xff]),
      Buffer.from('"}\n'),
    ]);
    await rejectsData(await write('invalid.jsonl', record), /line 2 is not valid UTF-8$/);
    const whole = gzipSync('{"text":"a"}\n'.repeat(1000));
    await rejectsData(await write('cut.jsonl.gz', whole.subarray(0, whole.length - 20)), /cannot be read/);
  });
});
