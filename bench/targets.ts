// The table of targets from a campaign's record.

import { presetConfig } from '../lib/cli/model-config.js';
import { median, pairedRatio } from '../lib/cli/statistics.js';
import { cacheBytes, countFlops, designPlan } from '../lib/plan.js';
import { MAIN, PLAIN, PROMPT, RIVAL, SHORT, WINDOW } from './jobs.js';
import { type CampaignRecord, type Result, sameWhat, type What } from './record.js';

export interface TargetRow {
  name: string;
  target: string;
  measured: string;
  verdict: 'met' | 'missed' | 'not measured';
  /** How close to the machine's ceiling, and what stands between. */
  note: string;
}

const config = (design: string) => presetConfig(`${design}-126m`);

export const time = (ms: number) =>
  ms >= 1000
    ? `${(ms / 1000).toFixed(2)} s`
    : ms >= 1
      ? `${ms.toFixed(1)} ms`
      : `${(ms * 1000).toFixed(0)} µs`;
const percent = (share: number) => `${(100 * share).toFixed(0)} %`;

/** FLOPs of a prefill in which every layer computes every position; the head sees only the last. */
export function fullPrefillFlops(design: string, length: number): number {
  const { projections, ffn, attention, head } = countFlops(config(design), { documentLengths: [length] });
  return projections + ffn + attention + head / length;
}

const weightBytes = (design: string, precision: string) =>
  designPlan(config(design)).parameterCount * (precision.startsWith('bf16') ? 2 : 4);

/** Bytes that one decode step of one row must read: every weight once, and the cache. */
export function decodeBytes(design: string, precision: string, length: number): number {
  const stored = { positions: length, precision: precision === 'bf16' ? 'bf16' : 'fp32' } as const;
  return weightBytes(design, precision) + cacheBytes(config(design), stored).total;
}

/** Bytes that the layers of one decode step read: every weight once, and for each row every bank once a layer. */
export function decodeTraffic(design: string, precision: string, length: number, batch: number): number {
  const { kvHeads, headDim } = config(design);
  const entry = 2 * kvHeads * headDim * (precision === 'bf16' ? 2 : 4);
  const reads = designPlan(config(design)).layers.flatMap((layer) => layer.reads);
  const entries = reads.reduce(
    (sum, { window }) => sum + (window === 0 ? length : Math.min(window, length)),
    0,
  );
  return weightBytes(design, precision) + batch * entries * entry;
}

/** The best sample of arithmetic, as what a busy moment takes away is no ceiling, and the median of reading. */
export function ceilings(record: CampaignRecord): { flops: number; bytes: number } {
  const { gflops, gbytes } = record.ceilings;
  return { flops: Math.max(...gflops) * 1e9, bytes: median(gbytes) * 1e9 };
}

export function targetRows(record: CampaignRecord): TargetRow[] {
  const peak = ceilings(record);
  const find = (what: Partial<What>): Result | undefined =>
    record.results.find((result) => sameWhat(result, { batch: 1, ...what }));
  const rows: TargetRow[] = [];

  /** `better` says whether the measured ratio is good enough. */
  const row = (
    name: string,
    target: string,
    ratio: number | undefined,
    meets: (ratio: number) => boolean,
    detail: string,
    note = '',
    bound = '',
  ) => {
    const known = ratio !== undefined && Number.isFinite(ratio);
    rows.push({
      name,
      target,
      measured: known ? `${bound}${ratio.toFixed(2)}x${detail === '' ? '' : ` (${detail})`}` : '–',
      verdict: known ? (meets(ratio) ? 'met' : 'missed') : 'not measured',
      note,
    });
  };

  const against = (name: string, least: number, own: Partial<What>, peer: Partial<What>, note: string) => {
    const ours = find({ engine: 'duokv', ...own });
    const theirs = find(peer);
    const ourMs = ours && median(ours.ms);
    const isBound = theirs !== undefined && theirs.ms.length === 0;
    const theirMs = isBound ? theirs.atLeastMs : theirs && median(theirs.ms);
    const ratio = ourMs === undefined || theirMs === undefined ? undefined : theirMs / ourMs;
    const detail =
      ratio === undefined
        ? ''
        : `${time(ourMs as number)} against ${isBound ? 'more than ' : ''}${time(theirMs as number)}`;
    row(name, `≥ ${least}x`, ratio, (value) => value >= least, detail, note, isBound ? '> ' : '');
  };

  const decodeNote = (precision: string, length: number) => {
    const [few, many] = [1, 8].map((rows) => decodeTraffic(MAIN, precision, length, rows)) as [
      number,
      number,
    ];
    const megabytes = (bytes: number) => `${Math.round(bytes / 1e6)} MB`;
    const pairs = { causalPairs: length, windowPairs: Math.min(config(MAIN).window ?? length, length) };
    const arithmetic = (countFlops(config(MAIN), { tokens: 8, ...pairs }).forward / peak.flops) * 1000;
    return (
      `the layers read ${megabytes(many)} against ${megabytes(few)}: ${(many / few).toFixed(2)}x; ` +
      `8 rows' arithmetic takes ${time(arithmetic)} at the FP32 peak`
    );
  };

  const precisions = [
    { own: 'fp32', peer: 'f32', label: 'FP32', prefill: 1.2, decode: 2.9, llama: 1.6, train: 1.7 },
    { own: 'bf16', peer: 'bf16', label: 'BF16', prefill: 1.55, decode: 4.5, llama: 2, train: 2 },
  ];
  const share = (flops: number, result: Result | undefined) =>
    result === undefined
      ? ''
      : `${percent(flops / (median(result.ms) / 1000) / peak.flops)} of the FP32 peak`;

  for (const { own: precision, peer, label, prefill } of precisions) {
    const what = { precision, measure: 'prefill', design: MAIN, route: 'exact', length: PROMPT } as const;
    const full = find({ ...what, engine: 'duokv', route: 'full' });
    const note = `\`full\` runs at ${share(fullPrefillFlops(MAIN, PROMPT), full)}`;
    const torch = { ...what, engine: 'PyTorch', precision: peer } as const;
    against(`exact prefill 1 x 1,792, ${label}, PyTorch`, prefill, what, torch, full ? note : '');
  }
  for (const { own: precision, peer, label, decode } of precisions) {
    const what = { precision, measure: 'decode', design: MAIN, length: PROMPT } as const;
    const ours = find({ ...what, engine: 'duokv' });
    const rate = ours && decodeBytes(MAIN, precision, PROMPT) / (median(ours.ms) / 1000);
    const note = rate === undefined ? '' : `reads ${(rate / 1e9).toFixed(1)} GB/s`;
    against(
      `decode step at 1,792, ${label}, PyTorch`,
      decode,
      what,
      { ...what, engine: 'PyTorch', precision: peer },
      note,
    );
    // What else uses the memory changes its rate within seconds.
    const bandwidth = rate && rate / 1e9 / median(ours?.readGbytes ?? record.ceilings.gbytes);
    rows.push({
      name: `decode step at 1,792, ${label}, read bandwidth`,
      target: '≥ 85 %',
      measured: bandwidth === undefined ? '–' : percent(bandwidth),
      verdict: bandwidth === undefined ? 'not measured' : bandwidth >= 0.85 ? 'met' : 'missed',
      note,
    });
  }
  for (const { own: precision, peer, label, llama } of precisions) {
    const what = { precision, measure: 'decode', design: PLAIN, length: PROMPT } as const;
    const theirs = { ...what, engine: 'llama.cpp', precision: peer } as const;
    against(`decode step GQA4 at 1,792, ${label}, llama.cpp`, llama, what, theirs, '');
  }
  for (const { own: precision, peer, label, train } of precisions) {
    const what = { precision, measure: 'train', design: MAIN, length: WINDOW } as const;
    const ours = find({ ...what, engine: 'duokv' });
    const flops = countFlops(config(MAIN), { window: WINDOW }).training;
    const theirs = { ...what, engine: 'PyTorch', precision: peer } as const;
    against(`training step of 2,048 tokens, ${label}, PyTorch`, train, what, theirs, share(flops, ours));
  }
  for (const { own: precision, label } of precisions) {
    const what = { engine: 'duokv', precision, measure: 'prefill', design: MAIN, length: PROMPT } as const;
    against(
      `exact against full prefill 1 x 1,792, ${label}`,
      1.45,
      { ...what, route: 'exact' },
      { ...what, route: 'full' },
      '',
    );
  }
  for (const { own: precision, label } of precisions) {
    const what = { engine: 'duokv', precision, measure: 'request', length: PROMPT } as const;
    const ours = find({ ...what, design: MAIN });
    const theirs = find({ ...what, design: RIVAL });
    row(
      `request of 1,792 + 128, history against GQA4–CLA2, ${label}`,
      '≤ 1.00x',
      ours && theirs && pairedRatio(ours.ms, theirs.ms),
      (ratio) => ratio <= 1,
      ours && theirs ? `${time(median(ours.ms))} against ${time(median(theirs.ms))}` : '',
    );
  }
  for (const { own: precision, label } of precisions) {
    for (const length of [PROMPT, SHORT]) {
      const what = { engine: 'duokv', precision, measure: 'decode', design: MAIN, length } as const;
      const one = find(what);
      const eight = find({ ...what, batch: 8 });
      row(
        `decode of 8 rows against 1 at ${length.toLocaleString('en')}, ${label}`,
        '≤ 1.6x',
        one && eight && median(eight.ms) / median(one.ms),
        (ratio) => ratio <= 1.6,
        one && eight ? `${time(median(eight.ms))} against ${time(median(one.ms))}` : '',
        decodeNote(precision, length),
      );
    }
  }
  for (const { own: precision, label } of precisions) {
    for (const [measure, route, long] of [
      ['prefill', 'full', PROMPT],
      ['train', null, WINDOW],
    ] as const) {
      const flops = (length: number) =>
        measure === 'train'
          ? countFlops(config(MAIN), { window: length }).training
          : fullPrefillFlops(MAIN, length);
      const perFlop = (length: number) => {
        const result = find({ engine: 'duokv', precision, measure, design: MAIN, route, length });
        return result && median(result.ms) / flops(length);
      };
      const [few, many] = [perFlop(SHORT), perFlop(long)];
      row(
        `${measure === 'train' ? 'training' : '`full` prefill'}, time per FLOP at ${long.toLocaleString('en')} against ${SHORT}, ${label}`,
        '≤ 1.05x',
        few === undefined || many === undefined ? undefined : many / few,
        (ratio) => ratio <= 1.05,
        '',
        'FLOPs of products and of visible pairs',
      );
    }
  }
  return rows;
}
