import { checkInteger, checkOptions, show } from './arguments.js';
import { DuokvError } from './errors.js';
import { callEngine, callNow, type NativeGroup, native } from './native.js';

/** Where ranks meet that no MPI launcher started: rank 0 listens there. */
export interface GroupAddress {
  readonly host: string;
  readonly port: number;
  readonly rank: number;
  readonly size: number;
}

/** What a launcher says in the environment: where the ranks meet, or how many there are for MPI to find. */
type Launch = GroupAddress | { readonly size: number };

const integerIn = (environment: NodeJS.ProcessEnv, name: string): number | undefined => {
  const text = environment[name];
  return text !== undefined && /^\d{1,9}$/.test(text) ? Number(text) : undefined;
};

/** Variables by which a launcher tells a process how many were started: Open MPI, MPICH and its kin, `srun`. */
const MPI_SIZES = ['OMPI_COMM_WORLD_SIZE', 'PMI_SIZE', 'SLURM_STEP_NUM_TASKS'];

/** @internal */
export function readLaunch(environment: NodeJS.ProcessEnv): Launch {
  const size = integerIn(environment, 'WORLD_SIZE');
  const rank = integerIn(environment, 'RANK');
  const port = integerIn(environment, 'MASTER_PORT');
  const host = environment['MASTER_ADDR'];
  if (size !== undefined && rank !== undefined && port !== undefined && host !== undefined) {
    if (rank >= size) {
      throw new DuokvError(
        'ERR_DISTRIBUTED',
        `RANK is ${rank}; it must be below WORLD_SIZE, which is ${size}`,
      );
    }
    return { host, port, rank, size };
  }
  const mpiSize = Math.max(0, ...MPI_SIZES.map((name) => integerIn(environment, name) ?? 0));
  // Alone, every one of its ranks would train the whole batch and write the same files.
  if (mpiSize === 0 && environment['WORLD_SIZE'] !== undefined && size !== 1) {
    const known = { WORLD_SIZE: size, RANK: rank, MASTER_PORT: port, MASTER_ADDR: host };
    const name = Object.entries(known).find(([, value]) => value === undefined)?.[0] as string;
    const text = environment[name];
    throw new DuokvError(
      'ERR_DISTRIBUTED',
      `${name} is ${text === undefined ? 'not set' : show(text)}; a launch with WORLD_SIZE needs integers in WORLD_SIZE, RANK and MASTER_PORT, and a host in MASTER_ADDR`,
    );
  }
  return { size: Math.max(1, mpiSize) };
}

/**
 * The ranks of a data-parallel run: one process each, all running the same program. Made by `joinGroup`. Its methods but
 * `fail` are calls that every rank makes, in the same order; they reject with `ERR_DISTRIBUTED`, naming the rank, where
 * one has failed, has left or makes another call.
 */
export class Group implements AsyncDisposable {
  /** This process, from 0; rank 0 writes checkpoints and logs. */
  readonly rank: number;
  readonly size: number;
  /** Among the ranks on this machine. */
  readonly localRank: number;
  /** This rank's share of the CPUs; undefined in a group of one, which has them all. */
  readonly threads: number | undefined;
  /** Such as `2 ranks, Open MPI v4.1.4`. */
  readonly description: string;
  /** @internal Undefined: a group of one. */
  readonly native: NativeGroup | undefined;
  #closed: Promise<void> | undefined;

  /** @internal */
  constructor(group: NativeGroup | undefined) {
    this.native = group;
    this.rank = group?.rank ?? 0;
    this.size = group?.size ?? 1;
    this.localRank = group?.localRank ?? 0;
    this.threads = group?.threads;
    this.description = group?.description ?? '1 rank';
  }

  /**
   * Element by element, the sum over all ranks, added in the order of ranks in FP64: the same bits on every rank.
   *
   * @example
   * const [anyoneStopped] = await group.sum([signal.aborted ? 1 : 0]);
   */
  async sum(values: readonly number[]): Promise<number[]> {
    const group = this.native;
    if (group === undefined) return [...values];
    return Array.from(await callEngine(() => group.sum(Float64Array.from(values))));
  }

  /**
   * What rank `root` passes, on every rank, as JSON brings it across. The others' value is not used.
   *
   * @example
   * const settings = await group.broadcast(group.rank === 0 ? await readSettings() : undefined);
   */
  async broadcast<T>(value: T, root = 0): Promise<T> {
    checkInteger(root, 'root', 0, this.size - 1);
    const group = this.native;
    if (group === undefined) return value;
    const bytes = new TextEncoder().encode(this.rank === root ? JSON.stringify([value]) : '');
    const received = await callEngine(() => group.broadcast(bytes, root));
    return (JSON.parse(new TextDecoder().decode(received)) as [T])[0];
  }

  /** Waits until every rank is here. */
  async barrier(): Promise<void> {
    await this.sum([]);
  }

  /**
   * Tells the other ranks that this one cannot go on: what they wait in rejects with `ERR_DISTRIBUTED`, this rank and
   * `reason`. No call that every rank makes succeeds afterwards.
   */
  fail(reason: string): void {
    if (typeof reason !== 'string') {
      throw new DuokvError('ERR_ARGUMENT', `reason must be a string, not ${show(reason)}`);
    }
    callNow(() => this.native?.fail(reason));
  }

  /** Waits until every rank leaves; rejects where one fails instead. Idempotent. */
  close(): Promise<void> {
    this.#closed ??= callEngine(() => this.native?.close() ?? Promise.resolve());
    return this.#closed;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }
}

/**
 * Joins the ranks that a launcher started: `mpirun` and `srun` by MPI; others, `torchrun` among them, by `MASTER_ADDR`,
 * `MASTER_PORT`, `RANK` and `WORLD_SIZE`. A process started by none is a group of one. Once per process. Errors:
 * `ERR_DISTRIBUTED` where the ranks cannot find each other, or duokv was built without MPI.
 *
 * @example
 * await using group = await joinGroup();
 * await using device = await openDevice(group.threads === undefined ? {} : { threads: group.threads });
 * using trainer = model.trainer({ group });
 */
export async function joinGroup(options: { readonly address?: GroupAddress } = {}): Promise<Group> {
  checkOptions(options, 'options', ['address']);
  const launch = options.address ?? readLaunch(process.env);
  if (!('rank' in launch)) {
    if (launch.size === 1) return new Group(undefined);
    const group = new Group(await callEngine(() => native.joinGroup()));
    if (group.size > 1) return group;
    throw new DuokvError(
      'ERR_DISTRIBUTED',
      `the launcher started ${launch.size} processes, but each is alone to ${group.description.split(', ')[1]}: ` +
        'the launcher belongs to another MPI, or srun needs --mpi=pmix',
    );
  }
  checkOptions(launch, 'address', ['host', 'port', 'rank', 'size']);
  if (typeof launch.host !== 'string') {
    throw new DuokvError('ERR_ARGUMENT', `address.host must be a string, not ${show(launch.host)}`);
  }
  checkInteger(launch.size, 'address.size', 1, 65536);
  checkInteger(launch.rank, 'address.rank', 0, launch.size - 1);
  checkInteger(launch.port, 'address.port', 1, 65535);
  return new Group(launch.size === 1 ? undefined : await callEngine(() => native.joinGroup(launch)));
}
