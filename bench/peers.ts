// What a user would pick instead, timed in the same rounds: a PyTorch script and llama.cpp through node-llama-cpp.
//
// The scripts are given by path. PyTorch's prints { ms_median } for `SCRIPT prefill|decode|train --design … --dtype
// f32|bf16 --n … --batch … --threads … --route … --reps …`. llama.cpp's is a module that imports node-llama-cpp and
// prints { prefill_ms, decode_ms_per_token } for `SCRIPT MODEL.gguf`, once a repetition; the models are written by
// `GGUF_SCRIPT DESIGN f32|bf16 OUT`.

import { copyFileSync, existsSync, mkdirSync } from 'node:fs';
import { basename, join } from 'node:path';
import { fileURLToPath } from 'node:url';

import type { Job } from './jobs.js';
import { run } from './processes.js';
import type { Result, What } from './record.js';

export type PeerType = 'f32' | 'bf16';

const folder = fileURLToPath(new URL('../build/peers/', import.meta.url));

export interface TorchPeer {
  python: string;
  script: string;
  threads: number;
  limitSeconds: number;
}

export function torchJob(peer: TorchPeer, what: Omit<What, 'engine'> & { precision: PeerType }): Job {
  const { precision, measure, design, route, batch, length } = what;
  return {
    name: ['PyTorch', precision, measure, length].join(' '),
    async run(signal) {
      const args = [peer.script, measure, '--design', design, '--dtype', precision, '--reps', '1'];
      args.push('--n', String(length), '--batch', String(batch), '--threads', String(peer.threads));
      if (route !== null) args.push('--route', route);
      const limitSeconds = peer.limitSeconds;
      const { lines, peakBytes, stopped } = await run(peer.python, args, { limitSeconds, signal });
      const result: Result = { engine: 'PyTorch', ...what, ms: [], peakBytes };
      // A repetition to warm up and one that counts had not both ended.
      if (stopped === 'limit') return [{ ...result, atLeastMs: (limitSeconds * 1000) / 2 }];
      return [{ ...result, ms: [JSON.parse(lines.at(-1) as string).ms_median as number] }];
    },
  };
}

export interface LlamaPeer {
  python: string;
  script: string;
  ggufScript: string;
  limitSeconds: number;
}

/** Installs node-llama-cpp and the gguf package under build/peers/ and writes the models there, once. */
export async function prepareLlama(peer: LlamaPeer, design: string): Promise<Record<PeerType, string>> {
  mkdirSync(folder, { recursive: true });
  if (!existsSync(join(folder, 'node_modules/node-llama-cpp'))) {
    const packages = ['node-llama-cpp', '--ignore-scripts', '--no-audit', '--no-fund'];
    await run('npm', ['install', '--prefix', folder, ...packages]);
  }
  const python = join(folder, 'python');
  if (!existsSync(python)) {
    // PyTorch and NumPy are the caller's own; of what else gguf names it uses these.
    const packages = ['gguf', 'pyyaml', 'tqdm'];
    await run(peer.python, ['-m', 'pip', 'install', '--quiet', '--no-deps', '--target', python, ...packages]);
  }
  copyFileSync(peer.script, join(folder, basename(peer.script)));
  const file = (type: PeerType) => join(folder, `${design}-${type}.gguf`);
  for (const type of ['f32', 'bf16'] as const) {
    if (existsSync(file(type))) continue;
    await run(peer.python, [peer.ggufScript, design, type, file(type)], { env: { PYTHONPATH: python } });
  }
  return { f32: file('f32'), bf16: file('bf16') };
}

/** Prefill and decode of one model. The first repetition warms up, where the limit leaves time for another. */
export function llamaJob(
  peer: LlamaPeer,
  model: string,
  what: Omit<What, 'engine' | 'measure' | 'route'>,
): Job {
  return {
    name: ['llama.cpp', what.precision].join(' '),
    async run(signal) {
      const { limitSeconds, script } = peer;
      const { lines, peakBytes } = await run(process.execPath, [join(folder, basename(script)), model], {
        limitSeconds,
        enough: (printed) => printed.filter((line) => line.startsWith('{')).length >= 3,
        signal,
      });
      const own = { engine: 'llama.cpp', ...what, route: null, peakBytes } as const;
      const printed = lines.filter((line) => line.startsWith('{')).map((line) => JSON.parse(line));
      if (printed.length === 0)
        return [{ ...own, measure: 'prefill', ms: [], atLeastMs: limitSeconds * 1000 }];
      const counted = printed.length > 1 ? printed.slice(1) : printed;
      const times = (key: string) => counted.map((entry) => entry[key] as number);
      return [
        { ...own, measure: 'prefill', ms: times('prefill_ms') },
        { ...own, measure: 'decode', ms: times('decode_ms_per_token') },
      ];
    },
  };
}
