// Writes docs/cuda-kernels.md: what every kernel of the CUDA backend takes on each architecture, from what ptxas printed
// when scripts/cuda/build.sh compiled it and from how native/tools/cuda_launches.cu saw it launched.
//
//   node scripts/cuda/kernels.mjs [--check] [build folder]       default: build/cuda
//
// --check writes nothing. Either way it fails where a hot kernel spills or has arrays in local memory, where a kernel does
// not fit on an SM, and where one was not launched; --check also where the page is stale.

import { spawnSync } from 'node:child_process';
import fs from 'node:fs';
import path from 'node:path';
import { fileURLToPath } from 'node:url';

const root = path.dirname(path.dirname(path.dirname(fileURLToPath(import.meta.url))));
const page = path.join(root, 'docs', 'cuda-kernels.md');

/** Kernels that a training step or a decode step spends its time in: nothing of theirs may be in local memory. */
export const HOT = [
  'attention_mma_kernel',
  'attention_simt_kernel',
  'attention_decode_kernel',
  'key_gradients_kernel',
  'query_gradients_kernel',
  'fp32_product_kernel',
  'skinny_product_kernel',
];

/** Bytes of shared memory of an SM, when as much of its memory as can be is not spent on L1. */
const SHARED_PER_SM = { sm_80: 164 * 1024, sm_90a: 228 * 1024 };

/**
 * Blocks of a kernel that one SM holds at once. sm_80 and sm_90 alike have four partitions of 16,384 registers and 16 warps
 * each, give registers to warps in units of 256, hold 32 blocks, and give a block shared memory in units of 128 bytes, of
 * which 1 KiB is the system's (CUDA programming guide, "Compute capabilities"; cuda_occupancy.h).
 */
export function blocksPerSm({ architecture, registers, threads, shared, dynamic }) {
  const warps = Math.ceil(threads / 32);
  const registersPerWarp = Math.ceil((registers * 32) / 256) * 256;
  const warpsPerPartition = Math.min(16, Math.floor(16384 / registersPerWarp));
  const sharedPerBlock = Math.ceil((shared + dynamic + 1024) / 128) * 128;
  return Math.min(
    32,
    Math.floor((4 * warpsPerPartition) / warps),
    Math.floor(SHARED_PER_SM[architecture] / sharedPerBlock),
  );
}

/** Threads and bytes of dynamic shared memory by kernel, of its largest launch, from what cuda_launches printed. */
export function parseLaunches(text) {
  const launches = new Map();
  for (const line of text.trim().split('\n')) {
    const [symbol, ...numbers] = line.split(' ');
    const [threads, dynamic] = numbers.map(Number);
    const known = launches.get(symbol);
    if (known && (known.dynamic > dynamic || (known.dynamic === dynamic && known.threads >= threads)))
      continue;
    launches.set(symbol, { threads, dynamic });
  }
  return launches;
}

/** The kernels in one log of `ptxas -v`: mangled name, architecture, registers and bytes. */
export function parseLog(text) {
  const kernels = [];
  const count = (line, pattern) => Number(pattern.exec(line)?.[1] ?? 0);
  let kernel;
  for (const line of text.split('\n')) {
    const entry = /Compiling entry function '(\S+)' for '(\S+)'/.exec(line);
    if (entry) kernel = { symbol: entry[1], architecture: entry[2], local: 0, spills: 0 };
    else if (kernel && line.includes('bytes stack frame')) {
      kernel.local = count(line, /(\d+) bytes stack frame/);
      kernel.spills = count(line, /(\d+) bytes spill stores/) + count(line, /(\d+) bytes spill loads/);
    } else if (kernel && /Used \d+ registers/.test(line)) {
      kernel.registers = count(line, /Used (\d+) registers/);
      kernel.shared = count(line, /(\d+) bytes smem/);
      kernels.push(kernel);
      kernel = undefined;
    }
  }
  return kernels;
}

/** Hot kernels that keep something in local memory. */
export function faults(kernels) {
  return kernels.filter(
    ({ name, local, spills }) => HOT.some((hot) => name.includes(hot)) && local + spills > 0,
  );
}

/** Names as in the source, without namespaces and parameters. */
function addNames(kernels) {
  const result = spawnSync('c++filt', [], {
    input: kernels.map(({ symbol }) => symbol).join('\n'),
    encoding: 'utf8',
  });
  if (result.status !== 0) throw new Error('c++filt, of binutils, is needed');
  const names = result.stdout.trim().split('\n');
  kernels.forEach((kernel, i) => {
    kernel.name = names[i]
      .replace(/^void /, '')
      .replaceAll('(anonymous namespace)::', '')
      .replace(/_GLOBAL__N__\w+::/g, '')
      .replace(/\b(?:duokv|cuda|attention|ops|simt)::/g, '')
      .replace(/>?\(.*$/, (tail) => (tail.startsWith('>') ? '>' : ''))
      .replace(/\((?:int|bool)\)/g, '');
  });
}

function render(kernels) {
  const rows = kernels.map((k) => [
    k.file,
    `\`${k.name}\``,
    k.architecture,
    k.registers,
    k.threads,
    k.shared,
    k.dynamic,
    k.local,
    k.spills,
    k.blocks,
    (k.blocks * k.threads) / 32,
  ]);
  const line = (cells) => `| ${cells.join(' | ')} |`;
  const numbers = 'registers threads shared dynamic local spills blocks/SM warps/SM'.split(' ');
  return `# Kernels of the CUDA backend

What ptxas (CUDA 13.0) gave each kernel: registers a thread, bytes of static shared memory, of local memory (stack frame) and
of spills. How its launcher launches it at the 126M shapes: threads a block, and bytes of dynamic shared memory, of the
launch with the most. And, from these, how many blocks, and warps of the 64 there is room for, one SM holds at once.
\`node scripts/cuda/kernels.mjs\` makes this page after \`scripts/cuda/build.sh\`; \`.ci/run cuda\` fails where it is stale,
where a kernel does not fit on an SM, and where one of these has anything in local memory:
${HOT.map((name) => `\`${name}\``).join(', ')}.

${line(['file', 'kernel', 'architecture', ...numbers])}
${line(['---', '---', '---', ...numbers.map(() => '---:')])}
${rows.map(line).join('\n')}
`;
}

function main(args) {
  const check = args.includes('--check');
  const folder = args.find((arg) => !arg.startsWith('--')) ?? path.join(root, 'build', 'cuda');
  const logs = fs
    .readdirSync(folder)
    .filter((file) => file.endsWith('.o.log') && !file.endsWith('_test.o.log'))
    .filter((file) => fs.existsSync(path.join(root, 'native', 'cuda', file.replace('.o.log', '.cu'))));
  const kernels = logs.flatMap((file) =>
    parseLog(fs.readFileSync(path.join(folder, file), 'utf8')).map((kernel) => ({
      ...kernel,
      file: file.replace('.o.log', '.cu'),
    })),
  );
  if (kernels.length === 0) throw new Error(`no log of ptxas in ${folder}: run scripts/cuda/build.sh first`);
  const launches = parseLaunches(fs.readFileSync(path.join(folder, 'launches.txt'), 'utf8'));
  const unlaunched = kernels.filter(({ symbol }) => !launches.has(symbol));
  for (const { symbol } of unlaunched)
    console.error(`native/tools/cuda_launches.cu does not launch ${symbol}`);
  if (unlaunched.length > 0) return 1;
  addNames(kernels);
  for (const kernel of kernels) {
    Object.assign(kernel, launches.get(kernel.symbol));
    kernel.blocks = blocksPerSm(kernel);
  }
  const order = ({ file, name, architecture }) => `${file} ${name} ${architecture}`;
  kernels.sort((a, b) => (order(a) < order(b) ? -1 : 1));
  const wrong = faults(kernels);
  for (const k of wrong)
    console.error(`${k.name} (${k.architecture}): ${k.local} bytes of stack, ${k.spills} of spills`);
  const tooLarge = kernels.filter(({ blocks }) => blocks === 0);
  for (const k of tooLarge) console.error(`${k.name} (${k.architecture}) does not fit on an SM`);
  const missing = HOT.filter((hot) => !kernels.some(({ name }) => name.includes(hot)));
  for (const name of missing) console.error(`there is no kernel ${name}, which is listed as hot`);
  const text = render(kernels);
  const stale = !fs.existsSync(page) || fs.readFileSync(page, 'utf8') !== text;
  if (!check) fs.writeFileSync(page, text);
  else if (stale) console.error('docs/cuda-kernels.md is stale: run node scripts/cuda/kernels.mjs');
  console.log(`${kernels.length} kernels, ${kernels.filter(({ spills }) => spills > 0).length} with spills`);
  return wrong.length + tooLarge.length + missing.length > 0 || (check && stale) ? 1 : 0;
}

if (process.argv[1] === fileURLToPath(import.meta.url)) process.exitCode = main(process.argv.slice(2));
