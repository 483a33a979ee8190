import { availableParallelism } from 'node:os';

import { checkInteger, checkOptions, show } from './arguments.js';
import { DuokvError } from './errors.js';
import { type FoundLibrary, findLibraries } from './libraries.js';
import { callEngine, callNow, type NativeDevice, native } from './native.js';

export type BackendName = 'auto' | 'cpu' | 'cuda' | `cuda:${number}`;

export interface DeviceOptions {
  /** `auto` (default) takes the fastest backend that works here; `cuda:1` is the second card. */
  readonly backend?: BackendName;
  /** CPU threads; by default as many as the process may use (affinity and cgroup quota). */
  readonly threads?: number;
}

export interface DeviceInfo {
  readonly backend: 'cpu' | 'cuda';
  /** The processor or card. */
  readonly name: string;
  /** Why this backend was taken. */
  readonly reason: string;
  /** The instruction set or compute capability in use. */
  readonly isa: string;
  readonly threads: number;
  /** Bytes: what the device has, what may still be allocated, what this object holds, and the most it has held. */
  readonly memory: {
    readonly total: number;
    readonly free: number;
    readonly used: number;
    readonly peak: number;
  };
  /** Names and versions. */
  readonly libraries: readonly string[];
  /** What several ranks need: MPI to start them and to sum gradients on CPUs, NCCL to sum them on GPUs. */
  readonly distributed: { readonly mpi: FoundLibrary; readonly nccl: FoundLibrary };
  /** How attention products run under a TF32x3 policy. */
  readonly attention: string;
  /** Backends that were tried first, and what kept them from being used. */
  readonly fallbacks: readonly { readonly backend: string; readonly why: string }[];
}

/**
 * A backend's device with its engine thread: models, trainers and sessions live on one, and what they do runs
 * there in the order in which it was called. Opened by `openDevice`.
 */
export class Device implements AsyncDisposable {
  /** @internal */
  readonly native: NativeDevice;
  readonly #selection: Pick<DeviceInfo, 'backend' | 'reason' | 'fallbacks'>;
  #distributed: DeviceInfo['distributed'] | undefined;
  #closed: Promise<void> | undefined;

  /** @internal */
  constructor(device: NativeDevice, selection: Pick<DeviceInfo, 'backend' | 'reason' | 'fallbacks'>) {
    this.native = device;
    this.#selection = selection;
  }

  /**
   * The device and how it was chosen; memory as the last call left it. Errors: `ERR_DISPOSED`.
   *
   * @example
   * const { backend, reason, memory } = device.info();
   */
  info(): DeviceInfo {
    const { name, isa, threads, attention, libraries, ...memory } = callNow(() => this.native.info());
    this.#distributed ??= callNow(findLibraries);
    return {
      ...this.#selection,
      name,
      isa,
      threads,
      memory: {
        total: memory.memoryTotal,
        free: memory.memoryFree,
        used: memory.memoryUsed,
        peak: memory.memoryPeak,
      },
      libraries: libraries.split('; '),
      distributed: this.#distributed,
      attention,
    };
  }

  /**
   * Disposes everything on the device and stops its thread: calls in the queue reject with `ERR_DISPOSED`,
   * the running one at its next check. Resolves when memory is free. Idempotent.
   */
  close(): Promise<void> {
    this.#closed ??= callEngine(() => this.native.close());
    return this.#closed;
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }
}

/**
 * Opens a device. `auto` takes the first GPU, else the CPU, and says why in `info().fallbacks`. The CUDA backend
 * is a library beside the addon; the environment variable `DUOKV_CUDA_LIBRARY` names another, and
 * `DUOKV_CUDA=emulator` takes the one that runs its kernels on the CPU, slowly, for tests. Errors:
 * `ERR_DEVICE_UNAVAILABLE` where the requested backend is not built or finds no device, `ERR_DEVICE_MEMORY` where the
 * device's memory is taken, `ERR_ARGUMENT`.
 *
 * @example
 * await using device = await openDevice({ backend: 'cpu', threads: 4 });
 */
export async function openDevice(options: DeviceOptions = {}): Promise<Device> {
  checkOptions(options, 'options', ['backend', 'threads']);
  const { backend = 'auto', threads = 0 } = options;
  if (options.threads !== undefined)
    checkInteger(threads, 'threads', 1, Math.max(1024, 4 * availableParallelism()));
  if (typeof backend !== 'string' || !/^(auto|cpu|cuda(:\d{1,4})?)$/.test(backend)) {
    throw new DuokvError(
      'ERR_ARGUMENT',
      `backend is ${show(backend)}; it must be one of auto, cpu, cuda, cuda:N`,
    );
  }
  const open = (name: 'cpu' | 'cuda') =>
    callEngine(() =>
      native.openDevice(name, threads, name === 'cpu' ? undefined : /\d+$/.exec(backend)?.[0]),
    );
  if (backend !== 'auto') {
    const name = backend === 'cpu' ? 'cpu' : 'cuda';
    try {
      return new Device(await open(name), { backend: name, reason: 'requested', fallbacks: [] });
    } catch (error) {
      if (!cannotOpen(error)) throw error;
      throw new DuokvError(error.code, `backend '${backend}': ${error.message}`, { cause: error });
    }
  }
  let why: string;
  try {
    return new Device(await open('cuda'), {
      backend: 'cuda',
      reason: 'auto: CUDA is available',
      fallbacks: [],
    });
  } catch (error) {
    if (!cannotOpen(error)) throw error;
    why = error.message;
  }
  return new Device(await open('cpu'), {
    backend: 'cpu',
    reason: 'auto: no other backend is available',
    fallbacks: [{ backend: 'cuda', why }],
  });
}

/** @internal Whether `auto` goes on without this device: there is none, or its memory is taken. */
export const cannotOpen = (error: unknown): error is DuokvError =>
  error instanceof DuokvError &&
  (error.code === 'ERR_DEVICE_UNAVAILABLE' || error.code === 'ERR_DEVICE_MEMORY');
