import { Presets, SingleBar } from 'cli-progress';
import Table from 'cli-table3';

/** A table for a terminal of any width: a rule under the header, two spaces between columns. `right`: columns of numbers. */
export function formatTable(header: string[], rows: string[][], right: number[] = []): string {
  const table = new Table({
    head: header,
    colAligns: header.map((_, column) => (right.includes(column) ? 'right' : 'left')),
    style: { head: [], border: [], 'padding-left': 0, 'padding-right': 1 },
    chars: {
      top: '',
      'top-mid': '',
      'top-left': '',
      'top-right': '',
      bottom: '',
      'bottom-mid': '',
      'bottom-left': '',
      'bottom-right': '',
      left: '',
      'left-mid': '',
      mid: '',
      'mid-mid': '',
      right: '',
      'right-mid': '',
      middle: ' ',
    },
  });
  table.push(...rows);
  const lines = table
    .toString()
    .split('\n')
    .map((line) => line.trimEnd());
  const width = Math.max(...lines.map((line) => line.length));
  return [lines[0], '─'.repeat(width), ...lines.slice(1)].join('\n');
}

export const formatCount = (value: number): string => value.toLocaleString('en-US');

export const formatMiB = (bytes: number): string => (bytes / 2 ** 20).toFixed(3);

/** A number of operations with a metric prefix: 1.26 TFLOP. */
export function formatFlops(flops: number): string {
  const prefixes = ['', 'k', 'M', 'G', 'T', 'P', 'E'];
  let exponent = 0;
  while (flops >= 1000 && exponent < prefixes.length - 1) {
    flops /= 1000;
    exponent++;
  }
  return `${flops.toPrecision(4)} ${prefixes[exponent]}FLOP`;
}

export function formatSeconds(seconds: number): string {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  const pad = (value: number) => String(value).padStart(2, '0');
  const hours = Math.floor(whole / 3600);
  return `${hours > 0 ? `${hours}:` : ''}${pad(Math.floor(whole / 60) % 60)}:${pad(whole % 60)}`;
}

export interface Progress {
  update(done: number, detail?: string): void;
}

/** Milliseconds between the lines of a log: short work leaves none, a day's some hundreds. */
const LOG_INTERVAL = 60_000;

/** Progress for a log: a line a minute at most. */
function logProgress(title: string, total: number, write: (line: string) => void): Progress {
  let last = performance.now();
  return {
    update(done, detail = '') {
      const now = performance.now();
      if (now - last < LOG_INTERVAL) return;
      last = now;
      write(`${title} ${done}/${total}  ${detail}`.trimEnd());
    },
  };
}

/** Runs `work` under a progress bar on stderr, or with a line a minute where stderr is not a terminal. */
export async function withProgress<T>(
  title: string,
  total: number,
  work: (progress: Progress) => Promise<T>,
): Promise<T> {
  if (!process.stderr.isTTY) {
    return work(logProgress(title, total, (line) => void process.stderr.write(`${line}\n`)));
  }
  const bar = new SingleBar(
    {
      format: `${title} {bar} {value}/{total}  {detail}  ETA {eta_formatted}`,
      barsize: 24,
      hideCursor: true,
      // Signals are ours: a command saves its work before it ends.
      gracefulExit: false,
      stream: process.stderr,
    },
    Presets.shades_classic,
  );
  bar.start(total, 0, { detail: '' });
  try {
    return await work({ update: (done, detail = '') => bar.update(done, { detail }) });
  } finally {
    bar.stop();
  }
}
