import assert from 'node:assert/strict';
import type { ChildProcess } from 'node:child_process';
import { readFile } from 'node:fs/promises';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';

export interface Update {
  update: number;
  loss: number;
  gradNorm: number;
  validTargets: number;
  tokens: number;
}

export async function updates(run: string): Promise<Update[]> {
  const text = await readFile(join(run, 'metrics.jsonl'), 'utf8');
  const records = text
    .trimEnd()
    .split('\n')
    .map((line) => JSON.parse(line) as Update & { heldOut?: unknown });
  return records.filter(({ heldOut }) => heldOut === undefined);
}

const orderHash = async (run: string): Promise<string> =>
  (JSON.parse(await readFile(join(run, 'run.json'), 'utf8')) as { data: { orderHash: string } }).data
    .orderHash;

/** The same updates of the same windows, to what the order of additions leaves open. */
export async function assertSameRun(actual: string, expected: string, count: number): Promise<void> {
  assert.equal(await orderHash(actual), await orderHash(expected));
  const [a, b] = [await updates(actual), await updates(expected)];
  assert.equal(a.length, count);
  assert.equal(b.length, count);
  for (const [i, { update, validTargets, tokens, loss }] of a.entries()) {
    const other = b[i] as Update;
    assert.deepEqual(
      { update, validTargets, tokens },
      { update: i + 1, validTargets: other.validTargets, tokens: other.tokens },
    );
    const difference = Math.abs(loss - other.loss) / other.loss;
    assert.ok(difference <= 1e-5, `update ${update}: loss ${loss}, expected ${other.loss}`);
  }
}

/** Waits until the run in folder `run`, of process `child`, has done `count` updates. */
export async function waitForUpdates(run: string, count: number, child: ChildProcess): Promise<void> {
  while (child.exitCode === null) {
    const text = await readFile(join(run, 'metrics.jsonl'), 'utf8').catch(() => '');
    if (text.split('\n').length > count) return;
    await sleep(5);
  }
  assert.fail(`the run ended before update ${count}`);
}
