import { Command } from 'commander';

import { decodeUtf8 } from '../data/documents.js';
import { loadCheckpointTokenizer } from '../data/tokenizer.js';
import { Model } from '../model.js';
import type { PrecisionName } from '../native.js';
import {
  type DeviceFlags,
  mass,
  nonNegativeInteger,
  nonNegativeNumber,
  openChosenDevice,
  positiveInteger,
  withDevice,
  withPrecision,
} from './options.js';
import { defineAction, UsageError } from './run.js';
import { findCheckpoint } from './run-folder.js';

interface GenerateOptions extends DeviceFlags {
  prompt?: string;
  maxTokens: number;
  temperature: number;
  topK?: number;
  topP?: number;
  seed: number;
  precision: PrecisionName;
}

async function readStdin(): Promise<string> {
  if (process.stdin.isTTY) throw new UsageError('no prompt: give --prompt, or text on stdin');
  const chunks: Buffer[] = [];
  for await (const chunk of process.stdin) chunks.push(chunk as Buffer);
  return decodeUtf8(Buffer.concat(chunks), 'stdin', 1);
}

export function generateCommand(): Command {
  const command = new Command('generate')
    .description('Continue a prompt with a trained model; the text streams to stdout')
    .argument('<checkpoint>', 'checkpoint directory, or the folder of a training run')
    .option('--prompt <text>', 'the prompt (default: stdin)')
    .option(
      '--max-tokens <count>',
      'stop after this many tokens, or at the end of the document',
      positiveInteger,
      256,
    )
    .option(
      '--temperature <t>',
      '0 takes the likeliest token, 1 samples the distribution as it is',
      nonNegativeNumber,
      0,
    )
    .option('--top-k <count>', 'sample among this many likeliest tokens', positiveInteger)
    .option('--top-p <mass>', 'sample among the likeliest tokens that hold this probability mass', mass)
    .option('--seed <integer>', 'seed of the sampling', nonNegativeInteger, 0)
    .addHelpText(
      'after',
      "\nExample:\n  $ duokv generate runs/docs --prompt '## Installation' --temperature 0.8 --top-p 0.95 --seed 7",
    );
  withPrecision(withDevice(command), 'fp32');
  return defineAction<GenerateOptions, [string]>(command, async (context, options, checkpoint) => {
    if (options.temperature === 0 && (options.topK ?? options.topP) !== undefined) {
      const option = options.topK === undefined ? '--top-p' : '--top-k';
      throw new UsageError(
        `${option} limits sampling, and temperature 0 does not sample: give --temperature`,
      );
    }
    const directory = await findCheckpoint(checkpoint);
    const tokenizer = await loadCheckpointTokenizer(directory);
    const text = options.prompt ?? (await readStdin());
    const [encoded] = (await tokenizer.encode([text])) as [Int32Array];
    const prompt = Int32Array.of(tokenizer.bos, ...encoded);
    await using device = await openChosenDevice(options);
    using model = await Model.load(device, directory);
    using session = model.session({
      batch: 1,
      capacity: prompt.length + options.maxTokens,
      precision: options.precision,
    });
    const decoder = tokenizer.decoder();
    // The decoder sees the prompt too: a piece may depend on what is before it.
    for (const token of prompt) await decoder.push(token);
    const write = (piece: string) => void (context.json || process.stdout.write(piece));
    const tokens: number[] = [];
    const logprobs: number[] = [];
    let completion = '';
    let stop: 'end-of-document' | 'max-tokens' = 'max-tokens';
    const began = performance.now();
    for await (const { token, logprob } of session.generate({
      prompt,
      maxTokens: options.maxTokens,
      temperature: options.temperature,
      ...(options.topK === undefined ? {} : { topK: options.topK }),
      ...(options.topP === undefined ? {} : { topP: options.topP }),
      seed: options.seed,
      signal: context.signal,
    })) {
      if (token === tokenizer.eos) {
        stop = 'end-of-document';
        break;
      }
      tokens.push(token);
      logprobs.push(logprob);
      const piece = await decoder.push(token);
      completion += piece;
      write(piece);
    }
    const rest = await decoder.end();
    completion += rest;
    write(`${rest}\n`);
    return {
      checkpoint: directory,
      precision: options.precision,
      prompt: text,
      promptTokens: prompt.length,
      text: completion,
      tokens,
      logprobs,
      stop,
      seconds: (performance.now() - began) / 1000,
    };
  });
}
