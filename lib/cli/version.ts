import { execFileSync } from 'node:child_process';
import { existsSync, readFileSync } from 'node:fs';
import os from 'node:os';
import { fileURLToPath } from 'node:url';

const root = fileURLToPath(new URL('../../', import.meta.url));

export function packageVersion(): string {
  return (JSON.parse(readFileSync(`${root}package.json`, 'utf8')) as { version: string }).version;
}

/** The commit of a source checkout, with `-dirty` where tracked files differ from it; null for an installed package. */
export function sourceCommit(): string | null {
  if (!existsSync(`${root}.git`)) return null;
  const git = (...args: string[]) =>
    execFileSync('git', args, { cwd: root, encoding: 'utf8', stdio: ['ignore', 'pipe', 'ignore'] }).trim();
  try {
    const dirty = git('status', '--porcelain', '--untracked-files=no') !== '';
    return git('rev-parse', 'HEAD') + (dirty ? '-dirty' : '');
  } catch {
    return null;
  }
}

/** What a record of a measurement states about where it was made. Memory in bytes. */
export function describeMachine() {
  const cpus = os.cpus();
  return {
    platform: `${os.platform()}-${os.arch()}`,
    release: os.release(),
    cpu: cpus[0]?.model ?? 'unknown',
    cores: cpus.length,
    memory: os.totalmem(),
    node: process.versions.node,
    duokv: packageVersion(),
    commit: sourceCommit(),
  };
}
