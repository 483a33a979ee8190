import { existsSync, readFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';

import type { GoldenCase } from '../../lib/golden.js';
import type { Model } from './block.js';
import type { Config } from './config.js';
import type { Precision } from './math.js';
import type { Batch } from './model.js';

const repository = dirname(dirname(dirname(fileURLToPath(import.meta.url))));

/**
 * The folder of `golden/`, `tables.json` and `initialisation.json`: DUOKV_FIXTURES, or the complete set beside the
 * repository where there is one, or the subset in the repository.
 */
export function fixturesDirectory(): string {
  if (process.env.DUOKV_FIXTURES !== undefined) return process.env.DUOKV_FIXTURES;
  const complete = join(dirname(repository), 'shared', 'fixtures');
  return existsSync(complete) ? complete : join(repository, 'test', 'fixtures');
}

export function modelOf(golden: GoldenCase, precision: Precision = 'exact'): Model {
  const weights = new Map([...golden.weights].map(([name, values]) => [name, Float64Array.from(values)]));
  return { config: golden.config as unknown as Config, weights, precision };
}

/** The batch of a case; of a training case, that of one update, its micro-batches one after the other. */
export function batchOf(golden: GoldenCase, update = 0): Batch {
  const length = golden.shape.at(-1)!;
  const rows = golden.shape.slice(-3, -1).reduce((a, b) => a * b, 1);
  const part = <T extends Int32Array | BigInt64Array>(array: T) =>
    array.slice(update * rows * length, (update + 1) * rows * length) as T;
  return {
    rows,
    length,
    tokens: part(golden.tokens.get('tokens')!),
    documentIds: part(golden.documentIds.get('document_ids')!),
    targets: part(golden.tokens.get('targets')!),
    targetDocumentIds: part(golden.documentIds.get('target_document_ids')!),
  };
}

interface Positions {
  kv_input_positions: number;
  query_output_positions: number;
}

/** tables.json: what each design comes to at the paper's shapes. */
export interface Tables {
  designs: {
    design: Config['design'];
    fusion?: Config['fusion'];
    localSource?: Config['localSource'];
    provider?: Config['provider'];
    parameters_126m: number;
    parameters_305m?: number;
    positions_126m: ({ N: number } & Record<'exact' | 'full' | 'uniform', Positions>)[];
    cache_126m: {
      N: number;
      B: number;
      kv_bytes_fp32: number;
      document_id_bytes: number;
      total_bytes_fp32: number;
    }[];
  }[];
  learning_rates: { peak: number; warmup: number; total: number; points: [number, number][] }[];
}

export function readTables(): Tables {
  return JSON.parse(readFileSync(join(fixturesDirectory(), 'tables.json'), 'utf8'));
}
