import assert from 'node:assert/strict';
import { type ChildProcess, spawn } from 'node:child_process';
import { mkdir, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';

/** The built command; `npm test` builds it first. */
export const MAIN = fileURLToPath(new URL('../../dist/cli/main.js', import.meta.url));

export interface Outcome {
  code: number | null;
  signal: NodeJS.Signals | null;
  stdout: string;
  stderr: string;
}

export function start(
  args: readonly string[],
  stdin: string | Uint8Array = '',
): { child: ChildProcess; outcome: Promise<Outcome> } {
  const child = spawn(process.execPath, [MAIN, ...args], { stdio: ['pipe', 'pipe', 'pipe'] });
  let stdout = '';
  let stderr = '';
  child.stdout.setEncoding('utf8').on('data', (text: string) => {
    stdout += text;
  });
  child.stderr.setEncoding('utf8').on('data', (text: string) => {
    stderr += text;
  });
  child.stdin.on('error', () => {});
  child.stdin.end(stdin);
  const outcome = new Promise<Outcome>((resolve, reject) => {
    child.on('error', reject);
    child.on('close', (code, signal) => resolve({ code, signal, stdout, stderr }));
  });
  return { child, outcome };
}

export function duokv(args: readonly string[], stdin: string | Uint8Array = ''): Promise<Outcome> {
  return start(args, stdin).outcome;
}

/** Runs a command that must succeed under --json; its one document. */
export async function duokvJson<T>(args: readonly string[], stdin = ''): Promise<T> {
  const { code, stdout, stderr } = await duokv([...args, '--json'], stdin);
  assert.equal(stderr, '');
  assert.equal(code, 0);
  assert.equal(stdout.trimEnd().split('\n').length, 1, 'one line of JSON');
  return JSON.parse(stdout) as T;
}

/** Runs a command that must fail with one line on stderr and nothing on stdout. */
export async function duokvFails(
  args: readonly string[],
  code: number,
  message: RegExp,
  stdin: string | Uint8Array = '',
): Promise<void> {
  const outcome = await duokv(args, stdin);
  assert.match(outcome.stderr, message);
  assert.equal(outcome.stderr.trimEnd().split('\n').length, 1, outcome.stderr);
  assert.match(outcome.stderr, /^duokv: /);
  assert.equal(outcome.stdout, '');
  assert.equal(outcome.code, code);
}

/** A folder of small documents with words that repeat, so that there is something to learn; its path. */
export async function writeDocuments(directory: string, count = 12): Promise<string> {
  const path = join(directory, 'documents');
  await mkdir(path);
  const words = ['bank', 'layer', 'window', 'prefix', 'shared', 'global', 'local', 'query'];
  for (let i = 0; i < count; i++) {
    const text = Array.from({ length: 90 + 7 * i }, (_, j) => words[(i * j + (j >> 2)) % words.length]).join(
      ' ',
    );
    await writeFile(join(path, `${String(i).padStart(2, '0')}.txt`), `${text}.\n`);
  }
  return path;
}
