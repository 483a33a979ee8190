import { type NativeFinding, native } from './native.js';

/** A library that ranks need to train together, as it was found here. */
export interface FoundLibrary {
  readonly found: boolean;
  /** Such as `Open MPI v4.1.4`, `NCCL 2.27.3`; null where none was found. */
  readonly version: string | null;
  /** The file; null where none was found, and of the emulator's own. */
  readonly path: string | null;
  /** In a line: version and file, or what cannot be done without it, where it was looked for, and what would help. */
  readonly description: string;
}

function describe(finding: NativeFinding, without: string): FoundLibrary {
  const { found, version, path, why } = finding;
  if (!found) {
    const reasons = why.replace(/:\n */, ': ').replaceAll(/\n */g, '; ');
    return { found, version: null, path: null, description: `not found, so ${without}: ${reasons}` };
  }
  return {
    found,
    version,
    path: path === '' ? null : path,
    description: path === '' ? version : `${version} (${path})`,
  };
}

/** MPI and NCCL, looked for where joining a group and opening its trainers look for them. */
export function findLibraries(): { readonly mpi: FoundLibrary; readonly nccl: FoundLibrary } {
  const { mpi, nccl } = native.findLibraries();
  return {
    mpi: describe(mpi, 'mpirun and srun start no ranks, and ranks on CPUs cannot sum their gradients'),
    nccl: describe(nccl, 'ranks on GPUs cannot sum their gradients'),
  };
}
