// Runs what a campaign measures, each in a process of its own.

import { spawn } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';

export interface Ended {
  /** Lines of stdout. */
  lines: string[];
  /** Largest resident memory, bytes (VmHWM, read while it runs). */
  peakBytes: number;
  /** Stopped because `limitSeconds` had passed, or because `enough` lines were there. */
  stopped: 'limit' | 'enough' | null;
}

export interface RunOptions {
  cwd?: string;
  env?: NodeJS.ProcessEnv;
  limitSeconds?: number;
  /** Whether the lines so far are all that is wanted. */
  enough?: (lines: string[]) => boolean;
  signal?: AbortSignal;
}

/** Runs a command to its end, or to its limit. Rejects where it fails by itself. */
export async function run(command: string, args: string[], options: RunOptions = {}): Promise<Ended> {
  const { cwd, env, limitSeconds, enough, signal } = options;
  signal?.throwIfAborted();
  const child = spawn(command, args, {
    cwd,
    env: { ...process.env, ...env },
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  let text = '';
  let peakBytes = 0;
  let stopped: Ended['stopped'] = null;
  const lines = () => text.split('\n').filter((line) => line.trim() !== '');
  const stop = (why: Ended['stopped']) => {
    stopped ??= why;
    child.kill('SIGKILL');
  };
  child.stdout.on('data', (chunk: Buffer) => {
    text += chunk.toString();
    if (enough?.(lines())) stop('enough');
  });
  const watch = setInterval(() => {
    try {
      const status = readFileSync(`/proc/${child.pid}/status`, 'utf8');
      peakBytes = Math.max(peakBytes, Number(/VmHWM:\s+(\d+)/.exec(status)?.[1] ?? 0) * 1024);
    } catch {
      // The process has ended; its last reading stands.
    }
  }, 20);
  const timer = limitSeconds === undefined ? undefined : setTimeout(() => stop('limit'), limitSeconds * 1000);
  const onAbort = () => child.kill('SIGKILL');
  signal?.addEventListener('abort', onAbort);
  try {
    const code = await new Promise<number | null>((resolve, reject) => {
      child.on('error', reject);
      child.on('close', resolve);
    });
    signal?.throwIfAborted();
    if (stopped === null && code !== 0) {
      const said = lines().slice(-20).join('\n');
      throw new Error(`${command} ${args.join(' ')} ended with ${code}\n${said}`);
    }
  } finally {
    clearInterval(watch);
    clearTimeout(timer);
    signal?.removeEventListener('abort', onAbort);
  }
  return { lines: lines(), peakBytes, stopped };
}

const native = fileURLToPath(new URL('../build/cmake', import.meta.url));

/** Builds a program of native/bench; its path. */
export async function buildProgram(name: string): Promise<string> {
  await run('cmake', ['--build', native, '--target', name]);
  return join(native, name);
}
