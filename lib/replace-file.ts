import { randomBytes } from 'node:crypto';
import { type FileHandle, open, rename, stat, unlink } from 'node:fs/promises';
import { basename, dirname, join } from 'node:path';

/** Makes a rename or an unlink survive a power cut. */
export async function syncDirectory(directory: string): Promise<void> {
  const handle = await open(directory, 'r');
  try {
    await handle.sync();
  } finally {
    await handle.close();
  }
}

/** Calls `write` with a new file beside `path`, then `keep` with its name; the file is gone where either fails. */
async function withTemporary(
  path: string,
  write: (handle: FileHandle) => Promise<void>,
  keep: (temporary: string) => Promise<void>,
): Promise<void> {
  const temporary = join(dirname(path), `.${basename(path)}.${randomBytes(6).toString('hex')}.tmp`);
  const handle = await open(temporary, 'wx');
  try {
    try {
      await write(handle);
    } finally {
      await handle.close();
    }
    await keep(temporary);
  } catch (error) {
    await unlink(temporary).catch(() => {});
    throw error;
  }
}

/**
 * Calls `write` with a temporary file beside `path`, flushes it to the disk, and renames it to `path`. Until the rename
 * `path` keeps its old content, so a crash or a full disk loses nothing; on an error the temporary file is removed.
 */
export async function replaceFile(path: string, write: (handle: FileHandle) => Promise<void>): Promise<void> {
  await withTemporary(
    path,
    async (handle) => {
      await write(handle);
      await handle.sync();
    },
    (temporary) => rename(temporary, path),
  );
  await syncDirectory(dirname(path));
}

/** Errors: those that `replaceFile` would meet before it writes; and `path` is a device, or anything else but a file. */
export async function checkReplaceable(path: string): Promise<void> {
  const replaceable = await stat(path).then(
    (status) => status.isFile(),
    () => true,
  );
  if (!replaceable) throw new Error('it is not a regular file');
  await withTemporary(path, async () => {}, unlink);
}
