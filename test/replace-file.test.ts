import assert from 'node:assert/strict';
import { mkdtemp, readdir, readFile, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

import { RecordFile } from '../lib/cli/record-file.js';
import { checkReplaceable, replaceFile } from '../lib/replace-file.js';

describe('replacing a file', () => {
  let directory: string;
  let path: string;
  beforeEach(async () => {
    directory = await mkdtemp(join(tmpdir(), 'duokv-replace-'));
    path = join(directory, 'record');
    await writeFile(path, 'old');
  });
  afterEach(() => rm(directory, { recursive: true }));

  it('leaves the old text until the new one is whole', async () => {
    let seen: string[] = [];
    await replaceFile(path, async (handle) => {
      await handle.write('new');
      seen = await readdir(directory);
      assert.equal(await readFile(path, 'utf8'), 'old');
    });
    assert.equal(seen.length, 2);
    assert.equal(await readFile(path, 'utf8'), 'new');
    assert.deepEqual(await readdir(directory), ['record']);
  });

  it('keeps the old text, and leaves nothing else, where writing fails', async () => {
    const full = replaceFile(path, async (handle) => {
      await handle.write('half');
      throw new Error('disk full');
    });
    await assert.rejects(full, /disk full/);
    assert.equal(await readFile(path, 'utf8'), 'old');
    assert.deepEqual(await readdir(directory), ['record']);
  });

  it('can be tried beforehand', async () => {
    await checkReplaceable(path);
    await checkReplaceable(join(directory, 'new'));
    assert.deepEqual(await readdir(directory), ['record']);
    assert.equal(await readFile(path, 'utf8'), 'old');
    await assert.rejects(checkReplaceable(directory), /not a regular file/);
    await assert.rejects(checkReplaceable('/dev/null'), /not a regular file/);
    await assert.rejects(checkReplaceable(join(directory, 'none', 'new')), { code: 'ENOENT' });
    await assert.rejects(checkReplaceable(join(path, 'new')), { code: 'ENOTDIR' });
  });

  it('says of a record what is left where it cannot be written', async () => {
    const folder = join(directory, 'records');
    const fresh = await RecordFile.open(join(folder, 'record.json'));
    await rm(folder, { recursive: true });
    await assert.rejects(fresh.keep('{}'), /record\.json: ENOENT.*; nothing was kept$/);
    const older = await RecordFile.open(join(folder, 'record.json'));
    await older.keep('{}');
    await rm(folder, { recursive: true });
    await assert.rejects(older.keep('{}'), /record\.json: ENOENT.*; it holds what was kept before$/);
  });
});
