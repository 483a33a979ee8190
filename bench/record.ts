// What a targets campaign leaves in bench/records/.

export type Engine = 'duokv' | 'PyTorch' | 'llama.cpp';
export type Measure = 'prefill' | 'decode' | 'request' | 'train';

/** What was timed: a decode step, a request of prefill and `STEPS.request` steps, or a training step of one row. */
export interface What {
  engine: Engine;
  /** A precision policy of duokv, or the peer's dtype. */
  precision: string;
  measure: Measure;
  /** Design of the 126M shape. */
  design: string;
  /** Prefill route; null for decode and training. */
  route: string | null;
  batch: number;
  /** Tokens of the prompt, or of the training window. */
  length: number;
}

export interface Result extends What {
  /** Every time measured, milliseconds. */
  ms: number[];
  /** Largest resident memory of the process, bytes. */
  peakBytes: number;
  /** duokv's decode steps: the rate of reading memory between them, GB/s, for every time. */
  readGbytes?: number[];
  /** A peer that had not ended when its time was up: each of its repetitions takes at least this, milliseconds. */
  atLeastMs?: number;
}

/** Samples of both ceilings: FP32 multiply-adds that stay in registers, and reading memory. */
export interface CeilingSamples {
  gflops: number[];
  gbytes: number[];
}

export interface CampaignRecord {
  campaign: 'targets';
  command: string;
  date: string;
  machine: Record<string, unknown>;
  /** Decode steps in one timing. */
  steps: { decode: number; request: number };
  ceilings: CeilingSamples;
  results: Result[];
  /** Jobs that are done, as `round name`, so that a campaign can be resumed. */
  completed: string[];
}

const FIELDS = ['engine', 'precision', 'measure', 'design', 'route', 'batch', 'length'] as const;

export const sameWhat = (a: What, b: Partial<What>): boolean =>
  FIELDS.every((field) => b[field] === undefined || a[field] === b[field]);

/** One operation: rates of its median time, ceilings sampled between its calls. */
export interface OperationTimes {
  operation: string;
  mode: string;
  gflops: number;
  gbytes: number;
  ceiling_gflops: number;
  ceiling_gbytes: number;
  /** The roofline's time over the median: 1 is all that the machine can do. */
  share: number;
  /** Every time measured, milliseconds. */
  ms: number[];
}

export interface OperationsRecord {
  campaign: 'operations';
  command: string;
  date: string;
  machine: Record<string, unknown>;
  operations: OperationTimes[];
}
