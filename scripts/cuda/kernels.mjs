// Writes docs/cuda-kernels.md: what every kernel of the CUDA backend takes on each architecture, from what ptxas printed
// when scripts/cuda/build.sh compiled it.
//
//   node scripts/cuda/kernels.mjs [--check] [build folder]       default: build/cuda
//
// --check writes nothing and fails where the page is stale, or where a hot kernel spills or has arrays in local memory.

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

/**
 * Warps of a kernel that one SM holds at once, as far as registers decide: sm_80 and sm_90 alike have four partitions of
 * 16,384 registers, give them to warps in units of 256, and hold 16 warps in each (CUDA programming guide, "Compute
 * capabilities").
 */
export function warpsPerSm(registers) {
  const perWarp = Math.ceil((registers * 32) / 256) * 256;
  return 4 * Math.min(16, Math.floor(16384 / Math.max(perWarp, 1)));
}

/** The kernels in one log of `ptxas -v`: mangled name, architecture, registers and bytes. */
export function parseLog(text) {
  const kernels = [];
  const count = (line, pattern) => Number(pattern.exec(line)?.[1] ?? 0);
  let kernel;
  for (const line of text.split('\n')) {
    const entry = /Compiling entry function '(\S+)' for '(\S+)'/.exec(line);
    if (entry) kernel = { symbol: entry[1], architecture: entry[2], stack: 0, spills: 0 };
    else if (kernel && line.includes('bytes stack frame')) {
      kernel.stack = count(line, /(\d+) bytes stack frame/);
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
    ({ name, stack, spills }) => HOT.some((hot) => name.includes(hot)) && stack + spills > 0,
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
  const rows = kernels.map((k) => {
    const warps = warpsPerSm(k.registers);
    return [
      k.file,
      `\`${k.name}\``,
      k.architecture,
      k.registers,
      k.shared,
      k.stack,
      k.spills,
      warps,
      `${(100 * warps) / 64}%`,
    ];
  });
  const line = (cells) => `| ${cells.join(' | ')} |`;
  return `# Kernels of the CUDA backend

What ptxas (CUDA 13.0) gave each kernel: registers a thread, bytes of static shared memory, of local memory (stack frame) and
of spills. The last columns say how many warps of it the registers let one SM hold, and which part that is of the 64 that it
has room for; shared memory asked for at the launch can make it fewer. \`node scripts/cuda/kernels.mjs\` makes this page after
\`scripts/cuda/build.sh\`; \`.ci/run cuda\` fails where it is stale, and where one of these has anything in local memory:
${HOT.map((name) => `\`${name}\``).join(', ')}.

${line(['file', 'kernel', 'architecture', 'registers', 'shared', 'local', 'spills', 'warps/SM', 'of 64'])}
${line(['---', '---', '---', '---:', '---:', '---:', '---:', '---:', '---:'])}
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
  addNames(kernels);
  const order = ({ file, name, architecture }) => `${file} ${name} ${architecture}`;
  kernels.sort((a, b) => (order(a) < order(b) ? -1 : 1));
  const wrong = faults(kernels);
  for (const k of wrong)
    console.error(`${k.name} (${k.architecture}): ${k.stack} bytes of stack, ${k.spills} of spills`);
  const missing = HOT.filter((hot) => !kernels.some(({ name }) => name.includes(hot)));
  for (const name of missing) console.error(`there is no kernel ${name}, which is listed as hot`);
  const text = render(kernels);
  const stale = !fs.existsSync(page) || fs.readFileSync(page, 'utf8') !== text;
  if (!check) fs.writeFileSync(page, text);
  else if (stale) console.error('docs/cuda-kernels.md is stale: run node scripts/cuda/kernels.mjs');
  console.log(`${kernels.length} kernels, ${kernels.filter(({ spills }) => spills > 0).length} with spills`);
  return wrong.length + missing.length > 0 || (check && stale) ? 1 : 0;
}

if (process.argv[1] === fileURLToPath(import.meta.url)) process.exitCode = main(process.argv.slice(2));
