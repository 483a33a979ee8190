// The GPU's part of docs/performance.md, from what scripts/gpu/run.sh left in bench/records/gpu/.

import { existsSync, readFileSync } from 'node:fs';

import { table } from './markdown.js';

const records = new URL('records/gpu/', import.meta.url);

type Row = Record<string, unknown> & { median: number };
interface StageRecord {
  facts: Record<string, string>;
  runs: Record<string, Record<string, unknown>>;
}

function read(stage: string): StageRecord | undefined {
  const file = new URL(`${stage}.json`, records);
  if (!existsSync(file)) return undefined;
  const record = JSON.parse(readFileSync(file, 'utf8')) as StageRecord;
  if (record.facts['dryRun'] !== undefined)
    throw new Error(`bench/records/gpu/${stage}.json comes from a dry run, which measures nothing`);
  return record;
}

const rowsOf = (record: StageRecord | undefined, run: string, section = run) =>
  (record?.runs[run]?.[section] ?? []) as Row[];

const ms = (value: number | undefined) =>
  value === undefined ? '–' : value < 0.1 ? `${(1000 * value).toFixed(1)} µs` : `${value.toPrecision(4)} ms`;
const count = (value: unknown) => Number(value).toLocaleString('en', { maximumFractionDigits: 0 });
const mode = (row: Row) => `${row['precision']}${row['graphs'] === true ? ', graphs' : ''}`;
const unique = (values: unknown[]) => [...new Set(values.map(String))];

/** One line per `label`, one column per precision, without and with graphs. */
function byMode(rows: Row[], head: string, label: (row: Row) => string): string[] {
  const modes = unique(rows.map(mode));
  return table(
    [head, ...modes],
    unique(rows.map(label)).map((name) => [
      name,
      ...modes.map((m) => ms(rows.find((row) => label(row) === name && mode(row) === m)?.median)),
    ]),
  );
}

function sessions(bench: StageRecord | undefined): string[] {
  const prefill = rowsOf(bench, 'prefill');
  const decode = rowsOf(bench, 'decode');
  const request = rowsOf(bench, 'request');
  const lines: string[] = [];
  if (prefill.length > 0)
    lines.push(
      '### Prefill',
      '',
      ...byMode(
        prefill,
        'route, batch x prompt',
        (r) => `\`${r['route']}\`, ${r['batch']} x ${count(r['length'])}`,
      ),
    );
  if (decode.length > 0)
    lines.push(
      '### Decode step',
      '',
      ...byMode(decode, 'batch, stored positions', (r) => `${r['batch']}, ${count(r['length'])}`),
    );
  if (request.length > 0)
    lines.push(
      '### A request',
      '',
      ...byMode(
        request,
        'design, prompt + steps',
        (r) => `\`${r['design']}\`, ${count(r['length'])} + ${r['steps']}`,
      ),
    );
  return lines;
}

function training(bench: StageRecord | undefined, peer: Row[]): string[] {
  const rows = rowsOf(bench, 'train');
  if (rows.length === 0) return [];
  const body = rows.map((row) => {
    const dtype = String(row['precision']).startsWith('bf16') ? 'bf16' : 'fp32';
    const other =
      row['shape'] === '126m'
        ? peer.find((p) => p['measure'] === 'train' && p['precision'] === dtype)
        : undefined;
    return [
      String(row['shape']),
      `\`${row['precision']}\``,
      count(row['tokensPerSecond']),
      Number(row['tflops']).toFixed(1),
      String(row['microbatch']),
      other === undefined ? '–' : count(other['tokensPerSecond']),
      other === undefined
        ? '–'
        : `${(Number(row['tokensPerSecond']) / Number(other['tokensPerSecond'])).toFixed(2)}x`,
    ];
  });
  const { rows: batch, length } = rows[0] as Row;
  return [
    `### Training, ${batch} x ${count(length)} tokens a step`,
    '',
    ...table(
      ['shape', 'precision', 'tokens/s', 'TFLOP/s', 'microbatch', 'PyTorch tokens/s', 'faster by'],
      body,
    ),
  ];
}

/** The fastest way that either has, whatever its graphs and attention. */
function inference(bench: StageRecord | undefined, peer: Row[]): string[] {
  const own = [
    ...rowsOf(bench, 'prefill').map((row): Row => ({ ...row, measure: 'prefill' })),
    ...rowsOf(bench, 'decode').map((row): Row => ({ ...row, measure: 'decode' })),
  ];
  const key = (row: Row) => [row['measure'], row['route'] ?? '', row['batch'], row['length']].join(' ');
  const best = (rows: Row[], like: Row, precision: (name: string) => boolean) =>
    rows
      .filter((row) => key(row) === key(like) && precision(String(row['precision'])))
      .map(({ median }) => median)
      .sort((a, b) => a - b)[0];
  const others = peer.filter((row) => row['measure'] !== 'train');
  const body = unique(others.map((row) => `${key(row)}/${row['precision']}`)).map((name) => {
    const like = others.find((row) => `${key(row)}/${row['precision']}` === name) as Row;
    const dtype = String(like['precision']);
    const theirs = best(others, like, (p) => p === dtype);
    const ours = best(own, like, (p) => p === dtype);
    const route = like['route'] === undefined ? '' : `, \`${like['route']}\``;
    return [
      `${like['measure']}${route}, ${like['batch']} x ${count(like['length'])}`,
      `\`${dtype}\``,
      ms(ours),
      ms(theirs),
      ours === undefined || theirs === undefined ? '–' : `${(theirs / ours).toFixed(2)}x`,
    ];
  });
  return body.length === 0
    ? []
    : [
        '### Beside PyTorch, the fastest of each',
        '',
        ...table(['what', 'precision', 'duokv', 'PyTorch', 'faster by'], body),
      ];
}

function kernels(record: StageRecord | undefined): string[] {
  const all = ['ceilings', 'linear', 'attention', 'rows'].flatMap((section) =>
    rowsOf(record, 'kernels', section),
  );
  const hidden = ['op', 'median', 'ms', 'flops', 'bytes', 'gflops', 'gbytes', 'recorded'];
  const body = all.map((row) => [
    String(row['op']),
    Object.entries(row)
      .filter(([name]) => !hidden.includes(name))
      .map(([name, value]) => (typeof value === 'string' ? value : `${name} ${value}`))
      .join(', '),
    ms(row.median),
    Number(row['flops']) > 0 ? (Number(row['gflops']) / 1000).toFixed(1) : '–',
    Number(row['bytes']) > 0 ? count(row['gbytes']) : '–',
  ]);
  return body.length === 0
    ? []
    : ['### Operations', '', ...table(['operation', 'shape', 'time', 'TFLOP/s', 'GB/s'], body)];
}

function correctness(): string[] {
  const lines: string[] = [];
  const golden = read('golden');
  for (const [name, run] of Object.entries(golden?.runs ?? {})) {
    const cases = (run['cases'] ?? []) as { worst: number; passed: boolean }[];
    const worst = Math.max(...cases.map((each) => each.worst));
    lines.push(
      `- golden cases, ${name}: ${cases.filter(({ passed }) => passed).length} of ${cases.length} pass, ` +
        `the worst at ${worst.toPrecision(3)} of its tolerance`,
    );
  }
  for (const stage of ['ops', 'sanitize']) {
    const runs = Object.values(read(stage)?.runs ?? {});
    if (runs.length === 0) continue;
    const passed = runs.filter((run) => run['exitCode'] === 0).length;
    const what = stage === 'ops' ? "kernels' tests" : "kernels' tests under compute-sanitizer";
    lines.push(`- ${what}: ${passed} of ${runs.length} programs pass`);
  }
  return lines.length === 0 ? [] : [...lines, ''];
}

/** What one H100 should do, in ms, and what the records say. */
function targets(bench: StageRecord | undefined): string[] {
  const prefill = rowsOf(bench, 'prefill');
  const decode = rowsOf(bench, 'decode');
  const wanted: [string, number, Row[], (row: Row) => boolean][] = [
    ...(
      [
        ['fp32', 6.5],
        ['bf16-tf32x3', 3.5],
        ['bf16', 1.5],
      ] as const
    ).map(([precision, target]): [string, number, Row[], (row: Row) => boolean] => [
      `\`exact\` prefill, 1 x 1,792, \`${precision}\`, graphs`,
      target,
      prefill,
      (r) =>
        r['precision'] === precision &&
        r['route'] === 'exact' &&
        r['length'] === 1792 &&
        r['graphs'] === true,
    ]),
    ['decode step, `fp32`, eager', 0.5, decode, (r) => r['precision'] === 'fp32' && r['graphs'] === false],
    ['decode step, `fp32`, graphs', 0.3, decode, (r) => r['precision'] === 'fp32' && r['graphs'] === true],
    ['decode step, `bf16`, graphs', 0.25, decode, (r) => r['precision'] === 'bf16' && r['graphs'] === true],
  ];
  const body = wanted.flatMap(([what, target, rows, like]) => {
    const row = rows.find((r) => r['batch'] === 1 && like(r));
    return row === undefined
      ? []
      : [[what, `${target} ms`, ms(row.median), `${(row.median / target).toFixed(1)}x`]];
  });
  return body.length === 0
    ? []
    : ['### Targets at batch 1', '', ...table(['what', 'target', 'measured', 'of the target'], body)];
}

const stages = ['build', 'ops', 'golden', 'sanitize', 'kernels', 'bench', 'peer'];

/** The commit of every record, with the stages it made where there are several. */
function commits(): string {
  const made = new Map<string, string[]>();
  for (const stage of stages) {
    const record = read(stage);
    if (record === undefined) continue;
    const commit = String(record.facts['commit']).replace(/^(\w{12})\w+/, '$1');
    made.set(commit, [...(made.get(commit) ?? []), stage]);
  }
  if (made.size === 1) return `commit \`${[...made.keys()][0]}\``;
  return [...made].map(([commit, names]) => `commit \`${commit}\` (${names.join(', ')})`).join(', ');
}

/** Lines of the page; none without records. */
export function gpuSections(): string[] {
  const bench = read('bench');
  const operations = read('kernels');
  const facts = (bench ?? operations ?? read('golden'))?.facts;
  if (facts === undefined) return [];
  const peer = rowsOf(read('peer'), 'torch', 'results');
  return [
    `## ${facts['card']}`,
    '',
    `Records in [\`bench/records/gpu/\`](../bench/records/gpu): driver ${facts['driver']}, ${commits()}. ` +
      (facts['note'] === undefined
        ? 'Made by [`scripts/gpu/run.sh`](gpu.md), which says how times are taken.'
        : '[`gpu.md`](gpu.md) says how times are taken.'),
    '',
    ...(facts['note'] === undefined ? [] : [facts['note'], '']),
    ...correctness(),
    ...targets(bench),
    ...inference(bench, peer),
    ...training(bench, peer),
    ...sessions(bench),
    ...kernels(operations),
  ];
}
