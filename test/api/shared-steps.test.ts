import assert from 'node:assert/strict';
import { setImmediate as immediate } from 'node:timers/promises';

import fc from 'fast-check';

import { Lane } from '../../lib/lane.js';
import { SharedSteps } from '../../lib/shared-steps.js';

interface Step {
  readonly row: number;
  readonly token: number;
}

interface Call {
  readonly rows: number[];
  end(): void;
  fail(error: Error): void;
}

/** Until what an ended call set off has begun. */
async function turn(): Promise<void> {
  await immediate();
  await immediate();
}

/** Steps over rows that hold the tokens they were given; a call is committed by `end`. */
function fakeSession(rowCount: number) {
  const rows: number[][] = Array.from({ length: rowCount }, () => []);
  const calls: Call[] = [];
  const lane = new Lane();
  const shared = new SharedSteps<Step, Step>(
    (asked, signal) =>
      new Promise((resolve, reject) => {
        if (signal?.aborted) return reject(signal.reason as Error);
        signal?.addEventListener('abort', () => reject(signal.reason as Error));
        calls.push({
          rows: asked.map(({ row }) => row),
          end() {
            if (signal?.aborted) return;
            for (const { row, token } of asked) rows[row]?.push(token);
            resolve(asked);
          },
          fail: reject,
        });
      }),
    lane,
  );
  const step = (row: number, token: number, signal?: AbortSignal) => shared.step({ row, token }, signal);
  return { rows, calls, step, lane, flush: () => shared.flush() };
}

describe('shared decode steps', () => {
  it('begins a lone step at once, and together what is asked for meanwhile or comes back with others', async () => {
    const { calls, step } = fakeSession(3);
    const first = step(2, 5);
    assert.equal(calls.length, 1);
    const others = [step(0, 6), step(1, 7)];
    await turn();
    assert.equal(calls.length, 1);
    calls[0]?.end();
    assert.deepEqual(await first, { row: 2, token: 5 });
    // It comes back in the same turn, so the next step is of all three.
    const again = step(2, 8);
    await turn();
    assert.deepEqual(calls[1]?.rows, [0, 1, 2]);
    calls[1]?.end();
    assert.deepEqual(await Promise.all([...others, again]), [
      { row: 0, token: 6 },
      { row: 1, token: 7 },
      { row: 2, token: 8 },
    ]);
    // So do all of them.
    const three = [step(1, 9), step(2, 10), step(0, 11)];
    await turn();
    assert.deepEqual(calls[2]?.rows, [1, 2, 0]);
    calls[2]?.end();
    await Promise.all(three);
    // What comes back alone is alone once, and begins at once from then on.
    const left = step(1, 12);
    await turn();
    assert.deepEqual(calls[3]?.rows, [1]);
    calls[3]?.end();
    await left;
    await turn();
    step(1, 13);
    assert.deepEqual(calls[4]?.rows, [1]);
  });

  it('has every caller in every step, however many microtasks each takes to come back', async () => {
    const count = 8;
    const { calls, step } = fakeSession(count);
    const loops = Array.from({ length: count }, async (_, row) => {
      for (let token = 0; token < 5; token++) {
        await step(row, token);
        for (let hop = 0; hop < row; hop++) await undefined;
      }
    });
    // The first to ask is alone once, and so one step ahead.
    for (const [i, rows] of [1, count, count, count, count, count - 1].entries()) {
      await turn();
      assert.equal(calls[i]?.rows.length, rows, `step ${i}`);
      calls[i]?.end();
    }
    await Promise.all(loops);
    assert.equal(calls.length, 6);
  });

  it('runs a step again without the rows that were aborted, which stay as they were', async () => {
    const { rows, calls, step } = fakeSession(3);
    step(0, 1);
    await turn();
    const leaving = new AbortController();
    const left = step(1, 2, leaving.signal);
    const staying = step(2, 3);
    calls[0]?.end();
    await turn();
    assert.deepEqual(calls[1]?.rows, [1, 2]);
    leaving.abort();
    await assert.rejects(left, { name: 'AbortError' });
    await turn();
    assert.deepEqual(calls[2]?.rows, [2]);
    calls[2]?.end();
    assert.deepEqual(await staying, { row: 2, token: 3 });
    assert.deepEqual(rows, [[1], [], [3]]);
  });

  it('gives each row its own error', async () => {
    const { calls, step } = fakeSession(3);
    step(0, 1);
    await turn();
    const bad = step(1, 2);
    const good = step(2, 3);
    calls[0]?.end();
    await turn();
    calls[1]?.fail(new Error('row 1 is full'));
    await turn();
    assert.deepEqual(
      calls.slice(2).map((call) => call.rows),
      [[1], [2]],
    );
    calls[2]?.fail(new Error('row 1 is full'));
    calls[3]?.end();
    await assert.rejects(bad, /row 1 is full/);
    assert.deepEqual(await good, { row: 2, token: 3 });
  });

  it('lets a call made later come later', async () => {
    const { calls, step, flush } = fakeSession(2);
    step(0, 1);
    flush();
    step(1, 2);
    flush();
    assert.deepEqual(
      calls.map((call) => call.rows),
      [[0], [1]],
    );
    for (const call of calls) call.end();
  });

  it('lets a call made meanwhile come after a step that runs again without a row', async () => {
    for (const failure of ['abort', 'error']) {
      const { rows, calls, step, lane } = fakeSession(3);
      const leaving = new AbortController();
      step(0, 0);
      const settled = Promise.allSettled([step(0, 1), step(1, 2, leaving.signal), step(2, 3)]);
      calls[0]?.end();
      await turn();
      let held: number[][] = [];
      const later = lane.run(async () => {
        held = rows.map((row) => [...row]);
      });
      if (failure === 'abort') leaving.abort();
      else calls[1]?.fail(new Error('row 1 is full'));
      await turn();
      for (const call of calls.slice(2)) {
        if (call.rows[0] === 1) call.fail(new Error('row 1 is full'));
        else call.end();
      }
      await later;
      assert.deepEqual(held, [[0, 1], [], [3]], failure);
      assert.deepEqual(
        (await settled).map(({ status }) => status),
        ['fulfilled', 'rejected', 'fulfilled'],
      );
    }
  });

  it('looks at a signal before a step that had to wait begins', async () => {
    const { rows, calls, step, lane } = fakeSession(3);
    const leaving = new AbortController();
    let free = () => {};
    const busy = lane.exclusive(
      () =>
        new Promise<void>((resolve) => {
          free = resolve;
        }),
    );
    const settled = Promise.allSettled([0, 1, 2].map((row) => step(row, row, leaving.signal)));
    await turn();
    assert.equal(calls.length, 0);
    leaving.abort();
    free();
    await busy;
    await turn();
    for (const call of calls) call.end();
    assert.ok((await settled).every(({ status }) => status === 'rejected'));
    assert.ok(rows.every((row) => row.length === 0));
  });

  it('has one listener a signal, however many steps run', async () => {
    const shared = new AbortController();
    const warnings: string[] = [];
    const warned = ({ name }: Error) => warnings.push(name);
    process.on('warning', warned);
    const sessions = Array.from({ length: 20 }, () => fakeSession(1));
    const steps = sessions.map(({ step }) => step(0, 1, shared.signal));
    await turn();
    for (const { calls } of sessions) calls[0]?.end();
    await Promise.all(steps);
    process.off('warning', warned);
    assert.deepEqual(warnings, []);
  });

  it('keeps every row in its own order, whoever aborts and whenever steps end', async () => {
    const script = fc.array(fc.record({ row: fc.nat(3), abort: fc.boolean(), end: fc.boolean() }), {
      maxLength: 40,
    });
    await fc.assert(
      fc.asyncProperty(script, async (actions) => {
        const { rows, calls, step } = fakeSession(4);
        const expected: number[][] = rows.map(() => []);
        const settled: Promise<void>[] = [];
        let ended = 0;
        for (const [token, { row, abort, end }] of actions.entries()) {
          const controller = new AbortController();
          settled.push(
            step(row, token, controller.signal).then(
              (result) => {
                assert.deepEqual(result, { row, token });
                expected[row]?.push(token);
              },
              (error: Error) => assert.equal(error.name, 'AbortError'),
            ),
          );
          if (abort) controller.abort();
          if (end && ended < calls.length) calls[ended++]?.end();
          if (token % 3 === 0) await turn();
        }
        for (let idle = 0; idle < 3; ) {
          if (ended < calls.length) {
            calls[ended++]?.end();
            idle = 0;
          } else idle++;
          await turn();
        }
        await Promise.all(settled);
        assert.deepEqual(rows, expected);
      }),
    );
  });
});
