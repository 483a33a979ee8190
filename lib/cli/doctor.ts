import { execFileSync } from 'node:child_process';
import { existsSync, readFileSync } from 'node:fs';
import os from 'node:os';
import { delimiter, join } from 'node:path';

import { Command } from 'commander';

import { DuokvError } from '../errors.js';
import { findLibraries } from '../libraries.js';
import { callNow } from '../native.js';
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

/** What starts ranks through MPI, and its version where it runs. */
function findLauncher() {
  const folders = (process.env.PATH ?? '').split(delimiter).filter((folder) => folder !== '');
  const path = folders.map((folder) => join(folder, 'mpirun')).find(existsSync) ?? null;
  let version: string | null = null;
  try {
    if (path !== null) version = execFileSync(path, ['--version'], { encoding: 'utf8' }).split('\n', 1)[0]!;
  } catch {
    // A launcher that does not run is named without a version.
  }
  return { path, version };
}

function describeLauncher({ path, version }: ReturnType<typeof findLauncher>): string {
  return path === null ? 'not found on the path' : `${path}${version ? ` (${version})` : ''}`;
}

function printFields(context: Context, fields: Record<string, string>): void {
  const width = Math.max(...Object.keys(fields).map((name) => name.length));
  for (const [name, value] of Object.entries(fields)) context.print(`${name.padEnd(width)}  ${value}`);
}

export function doctorCommand(): Command {
  const command = new Command('doctor')
    .description('Check that duokv works here: machine, instruction set, threads, memory, MPI, NCCL, backend')
    .addHelpText('after', '\nExample:\n  $ duokv doctor --json');
  withDevice(command);
  return defineAction<DeviceFlags, []>(command, async (context, options) => {
    const machine = {
      ...describeMachine(),
      features: cpuFeatures(),
      usableCores: os.availableParallelism(),
      mpirun: findLauncher(),
      distributed: callNow(findLibraries),
    };
    printFields(context, {
      duokv: `${machine.duokv}${machine.commit === null ? '' : ` (commit ${machine.commit.slice(0, 12)})`}, Node ${machine.node}`,
      machine: `${machine.platform}, Linux ${machine.release}`,
      CPU: `${machine.cpu}; ${machine.usableCores} of ${machine.cores} cores usable; ${machine.features.join(' ')}`,
      memory: `${formatMiB(machine.memory)} MiB`,
      MPI: machine.distributed.mpi.description,
      NCCL: machine.distributed.nccl.description,
      mpirun: describeLauncher(machine.mpirun),
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
