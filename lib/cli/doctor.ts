import { execFileSync } from 'node:child_process';
import { existsSync, readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import os from 'node:os';
import { delimiter, dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';

import { Command } from 'commander';

import { DuokvError } from '../errors.js';
import { type DeviceFlags, openChosenDevice, withDevice } from './options.js';
import { formatMiB } from './output.js';
import { type Context, defineAction } from './run.js';
import { describeMachine } from './version.js';

/** Instruction sets that decide how fast the CPU backend is, as /proc/cpuinfo spells them. */
const FEATURES = ['avx2', 'fma', 'avx512f', 'avx512_bf16', 'amx_bf16', 'asimd', 'sve', 'bf16'];

function cpuFeatures(): string[] {
  let text: string;
  try {
    text = readFileSync('/proc/cpuinfo', 'utf8');
  } catch {
    return [];
  }
  const flags = new Set(/^(?:flags|Features)\s*:(.*)$/m.exec(text)?.[1]?.trim().split(/\s+/));
  return FEATURES.filter((feature) => flags.has(feature));
}

/** What several ranks on the CPU need: the library that the build makes where it finds MPI, and a launcher. */
function findMpi() {
  const { path } = createRequire(import.meta.url)('node-gyp-build') as { path: (root: string) => string };
  const addon = path(fileURLToPath(new URL('../..', import.meta.url)));
  const found = (file: string) => (existsSync(file) ? file : null);
  const folders = (process.env.PATH ?? '').split(delimiter).filter((folder) => folder !== '');
  const launcher = folders.map((folder) => join(folder, 'mpirun')).find(existsSync) ?? null;
  let version: string | null = null;
  try {
    if (launcher !== null)
      version = execFileSync(launcher, ['--version'], { encoding: 'utf8' }).split('\n', 1)[0]!;
  } catch {
    // A launcher that does not run is named without a version.
  }
  return { library: found(join(dirname(addon), 'duokv_mpi.so')), launcher, version };
}

function describeMpi({ library, launcher, version }: ReturnType<typeof findMpi>): string {
  const how = launcher === null ? 'no mpirun on the path' : `${launcher}${version ? ` (${version})` : ''}`;
  return `${library ?? 'duokv is built without it (Debian: libopenmpi-dev)'}; ${how}`;
}

function printFields(context: Context, fields: Record<string, string>): void {
  const width = Math.max(...Object.keys(fields).map((name) => name.length));
  for (const [name, value] of Object.entries(fields)) context.print(`${name.padEnd(width)}  ${value}`);
}

export function doctorCommand(): Command {
  const command = new Command('doctor')
    .description('Check that duokv works here: machine, instruction set, threads, memory, MPI, backend')
    .addHelpText('after', '\nExample:\n  $ duokv doctor --json');
  withDevice(command);
  return defineAction<DeviceFlags, []>(command, async (context, options) => {
    const machine = {
      ...describeMachine(),
      features: cpuFeatures(),
      usableCores: os.availableParallelism(),
      mpi: findMpi(),
    };
    printFields(context, {
      duokv: `${machine.duokv}${machine.commit === null ? '' : ` (commit ${machine.commit.slice(0, 12)})`}, Node ${machine.node}`,
      machine: `${machine.platform}, Linux ${machine.release}`,
      CPU: `${machine.cpu}; ${machine.usableCores} of ${machine.cores} cores usable; ${machine.features.join(' ')}`,
      memory: `${formatMiB(machine.memory)} MiB`,
      MPI: describeMpi(machine.mpi),
    });
    try {
      await using device = await openChosenDevice(options);
      const info = device.info();
      printFields(context, {
        backend: `${info.backend}: ${info.name} (${info.reason})`,
        ISA: info.isa,
        threads: String(info.threads),
        libraries: info.libraries.join('; '),
        'device memory': `${formatMiB(info.memory.used)} of ${formatMiB(info.memory.total)} MiB used`,
      });
      for (const { backend, why } of info.fallbacks) context.print(`not used: ${backend}: ${why}`);
      return { ok: true, machine, device: info };
    } catch (error) {
      if (!(error instanceof DuokvError) || !context.json) throw error;
      process.exitCode = 1;
      return { ok: false, machine, error: { code: error.code, message: error.message } };
    }
  });
}
