import { DuokvError } from '../errors.js';
import { type Group, joinGroup } from '../group.js';
import type { Context } from './run.js';

/**
 * Runs `work` as one of the ranks that a launcher started, or alone. Only rank 0 prints, and only its result counts.
 * A rank that fails tells the others, so that each of them ends with an error.
 */
export async function asRank<T>(
  context: Context,
  work: (context: Context, group: Group) => Promise<T>,
): Promise<T | undefined> {
  const group = await joinGroup();
  try {
    const result = await work(group.rank === 0 ? context : { ...context, print() {} }, group);
    await group.close();
    return group.rank === 0 ? result : undefined;
  } catch (error) {
    const { message } = error as Error;
    group.fail(error instanceof DuokvError ? `${error.code}: ${message}` : message);
    throw error;
  }
}

/** Whether any rank has been asked to stop: a signal may reach one before the others. */
export async function stopRequested(group: Group, signal: AbortSignal): Promise<boolean> {
  const [requests] = await group.sum([signal.aborted ? 1 : 0]);
  return requests !== 0;
}
