// What a campaign leaves in bench/records/.

export type Measure = 'prefill' | 'decode' | 'train';

export interface Result {
  engine: 'duokv' | 'PyTorch';
  /** A precision policy of duokv, or the peer's dtype. */
  precision: string;
  measure: Measure;
  /** Prefill route; null for decode (per step) and a training step. */
  route: string | null;
  /** Every time measured, milliseconds. */
  ms: number[];
  /** Largest resident memory of the process, bytes. */
  peakBytes: number;
}

export interface CampaignRecord {
  campaign: '126m';
  command: string;
  date: string;
  machine: Record<string, unknown>;
  shape: { design: string; batch: number; prompt: number; window: number; steps: number };
  results: Result[];
}

export function median(values: readonly number[]): number {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 === 1
    ? (sorted[middle] as number)
    : ((sorted[middle - 1] as number) + (sorted[middle] as number)) / 2;
}
