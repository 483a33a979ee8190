import { randomBytes } from 'node:crypto';
import { copyFile, link, mkdir, open, readdir, realpath, rename, rm, stat } from 'node:fs/promises';
import { basename, dirname, join, resolve } from 'node:path';

import { DuokvError } from './errors.js';
import { callNow, native } from './native.js';

async function sync(directory: string): Promise<void> {
  const handle = await open(directory, 'r');
  try {
    await handle.sync();
  } finally {
    await handle.close();
  }
}

/** The directory behind symbolic links, or null where there is nothing yet. */
async function existing(path: string): Promise<string | null> {
  const target = await realpath(path).catch(() => null);
  if (target === null) return null;
  if (!(await stat(target)).isDirectory())
    throw new DuokvError('ERR_ARGUMENT', `${path} exists and is not a directory`);
  return target;
}

/** Swaps two directories: atomically where the file system can, else by way of a third name. */
async function exchange(a: string, b: string): Promise<void> {
  if (callNow(() => native.exchangePaths(a, b))) return;
  const aside = `${a}.old`;
  await rename(b, aside);
  try {
    await rename(a, b);
  } catch (error) {
    await rename(aside, b);
    throw error;
  }
  await rename(aside, a);
}

/**
 * Replaces the directory `path` by one that `write` fills: a temporary sibling, flushed to the disk and then
 * put in its place at once, so a crash or a full disk leaves the old directory as it was. Files of the old
 * one that `belongs` does not claim are kept.
 */
export async function replaceDirectory(
  path: string,
  belongs: (name: string) => boolean,
  write: (directory: string) => Promise<void>,
): Promise<void> {
  const old = await existing(path);
  const target = old ?? resolve(path);
  const parent = dirname(target);
  await mkdir(parent, { recursive: true });
  const staging = join(parent, `.${basename(target)}.${randomBytes(6).toString('hex')}.tmp`);
  await mkdir(staging);
  try {
    await write(staging);
    const fresh = new Set(await readdir(staging));
    const kept =
      old === null
        ? []
        : (await readdir(old, { withFileTypes: true })).filter(
            ({ name }) => !fresh.has(name) && !belongs(name),
          );
    for (const entry of kept.filter((candidate) => candidate.isFile())) {
      const from = join(target, entry.name);
      const to = join(staging, entry.name);
      // A second name for the same file costs nothing; not every file system has them.
      await link(from, to).catch(() => copyFile(from, to));
    }
    await sync(staging);
    if (old === null) {
      await rename(staging, target);
    } else {
      await exchange(staging, target);
      for (const entry of kept.filter((candidate) => !candidate.isFile())) {
        await rename(join(staging, entry.name), join(target, entry.name));
      }
    }
    await sync(parent);
  } finally {
    await rm(staging, { recursive: true, force: true });
  }
}
