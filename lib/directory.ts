import { randomBytes } from 'node:crypto';
import { realpathSync } from 'node:fs';
import { lstat, mkdir, readdir, rename, rm, rmdir, stat } from 'node:fs/promises';
import { hostname } from 'node:os';
import { basename, dirname, join, resolve } from 'node:path';

import { DuokvError } from './errors.js';
import { syncDirectory } from './replace-file.js';

/*
 * Several files of one directory, replaced as one. The directory itself stays: it may be a mount point, the
 * working directory of a process, or have a mode and an owner that matter.
 *
 *   1. The new files are written into a hidden folder inside the directory, `.duokv-save.*`, and flushed.
 *   2. That folder is renamed to `.duokv-commit`. This is the moment at which the new files count: a file in
 *      `.duokv-commit` stands for the file of its name beside it.
 *   3. The files are moved out, each over the old one, and the empty folder is removed.
 *
 * A crash before step 2 leaves the old files, a crash after it the new ones: `openCurrent` finds either without
 * writing anything, and the next save finishes step 3. Every part of step 3 may be done twice, or by two processes
 * at once, since it only ever moves what has been committed.
 */

const COMMIT = '.duokv-commit';
const STAGING = '.duokv-save.';

const codeOf = (error: unknown) => (error as NodeJS.ErrnoException).code ?? '';

/** Settles as `task`, with undefined in place of an error of one of these system codes. */
async function unless<T>(codes: readonly string[], task: Promise<T>): Promise<T | undefined> {
  try {
    return await task;
  } catch (error) {
    if (codes.includes(codeOf(error))) return undefined;
    throw error;
  }
}

/** Opens the file that stands for `name` now: the committed one, or the one in the directory. */
export async function openCurrent<T>(
  directory: string,
  name: string,
  open: (path: string) => Promise<T>,
): Promise<T> {
  const committed = join(directory, COMMIT, name);
  const isThere = async () => (await stat(committed).catch(() => undefined))?.isFile() ?? false;
  if (await isThere()) {
    try {
      return await open(committed);
    } catch (error) {
      // A save that runs in another process may just have moved it.
      if (await isThere()) throw error;
    }
  }
  return open(join(directory, name));
}

/** The path without links; what does not exist yet is left as it is. */
function canonical(path: string): string {
  try {
    return realpathSync(path);
  } catch (error) {
    const parent = dirname(path);
    if (codeOf(error) !== 'ENOENT' || parent === path) throw error;
    return join(canonical(parent), basename(path));
  }
}

/** The last save of each directory that this process saves into. */
const saves = new Map<string, Promise<void>>();

/** Runs `save` when the saves of the same directory before it have ended. */
async function inTurn(directory: string, save: () => Promise<void>): Promise<void> {
  const result = (saves.get(directory) ?? Promise.resolve()).then(save);
  const ended = result.catch(() => {});
  saves.set(directory, ended);
  try {
    await result;
  } finally {
    if (saves.get(directory) === ended) saves.delete(directory);
  }
}

/**
 * Creates the directory and those above it that are missing, and lists those in `created`, the deepest first. Node's recursive
 * `mkdir` never ends where a file system has no directories to give (/proc).
 */
export async function makeDirectories(directory: string, created: string[] = []): Promise<void> {
  const missing: string[] = [];
  for (let path = directory; (await unless(['ENOENT'], stat(path))) === undefined; path = dirname(path))
    missing.push(path);
  for (const path of missing.reverse()) {
    // Another process may have just made it.
    const made = await unless(
      ['EEXIST'],
      mkdir(path).then(() => true),
    );
    if (made) created.unshift(path);
  }
}

/** Step 3. */
async function finish(directory: string): Promise<void> {
  const commit = join(directory, COMMIT);
  const names = await unless(['ENOENT'], readdir(commit));
  if (names === undefined) return;
  for (const name of names) await unless(['ENOENT'], rename(join(commit, name), join(directory, name)));
  await syncDirectory(directory);
  await unless(['ENOENT', 'ENOTEMPTY', 'EEXIST'], rmdir(commit));
}

/** Step 2. Where the save of another process has just been committed, that one is finished first. */
async function commit(directory: string, staging: string): Promise<void> {
  for (;;) {
    await finish(directory);
    try {
      await rename(staging, join(directory, COMMIT));
      break;
    } catch (error) {
      if (!['ENOTEMPTY', 'EEXIST'].includes(codeOf(error))) throw error;
    }
  }
  await syncDirectory(directory);
}

/** Removes what saves of this machine that were killed have staged. */
async function removeAbandoned(directory: string): Promise<void> {
  const prefix = `${STAGING}${hostname()}.`;
  for (const name of await readdir(directory)) {
    if (!name.startsWith(prefix)) continue;
    const [pid] = name.slice(prefix.length).split('.');
    try {
      process.kill(Number(pid), 0);
    } catch (error) {
      if (codeOf(error) === 'ESRCH') await rm(join(directory, name), { recursive: true, force: true });
    }
  }
}

async function replaceFilesNow(
  directory: string,
  belongs: (name: string) => boolean,
  write: (staging: string) => Promise<void>,
): Promise<void> {
  const created: string[] = [];
  const staging = join(directory, `${STAGING}${hostname()}.${process.pid}.${randomBytes(6).toString('hex')}`);
  try {
    await makeDirectories(directory, created);
    await removeAbandoned(directory);
    await mkdir(staging);
    await write(staging);
    await syncDirectory(staging);
    const fresh = new Set(await readdir(staging));
    for (const name of fresh) {
      const path = join(directory, name);
      if ((await unless(['ENOENT'], lstat(path)))?.isDirectory())
        throw new DuokvError(
          'ERR_CHECKPOINT',
          `${path}: is a directory; a file of the checkpoint has this name`,
        );
    }
    await commit(directory, staging);
    await finish(directory);
    // The rest of another form of the same checkpoint: nothing reads it beside the new files.
    for (const name of await readdir(directory)) {
      if (belongs(name) && !fresh.has(name)) await rm(join(directory, name), { force: true });
    }
    await syncDirectory(directory);
    for (const path of created) await syncDirectory(dirname(path));
  } catch (error) {
    await rm(staging, { recursive: true, force: true }).catch(() => {});
    for (const path of created) await rmdir(path).catch(() => {});
    throw error;
  }
}

/**
 * Replaces files of the directory `path`, which is created where it is missing, by those that `write` puts into
 * the folder it is given: all of them or, in a crash or on a full disk, none. Files that `belongs` claims and
 * `write` did not write are removed, others stay. Saves of one process into one directory run one after another.
 *
 * Errors: `ERR_ARGUMENT` where `path` is not a directory; `ERR_CHECKPOINT` with the system's error as its cause.
 */
export async function replaceFiles(
  path: string,
  belongs: (name: string) => boolean,
  write: (staging: string) => Promise<void>,
): Promise<void> {
  try {
    const directory = canonical(resolve(path));
    await inTurn(directory, async () => {
      const found = await unless(['ENOENT'], stat(directory));
      if (found !== undefined && !found.isDirectory())
        throw new DuokvError('ERR_ARGUMENT', `${path} exists and is not a directory`);
      await replaceFilesNow(directory, belongs, write);
    });
  } catch (error) {
    if (!(error instanceof Error) || !('syscall' in error)) throw error;
    throw new DuokvError('ERR_CHECKPOINT', `${path}: cannot be saved: ${error.message}`, { cause: error });
  }
}
