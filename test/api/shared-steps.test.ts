import assert from 'node:assert/strict';
import { setImmediate as immediate } from 'node:timers/promises';

import fc from 'fast-check';

import { SharedSteps } from '../../lib/shared-steps.js';

interface Call {
  readonly rows: number[];
  readonly tokens: number[];
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
  const steps = new SharedSteps(
    (called, tokens, signal) =>
      new Promise((resolve, reject) => {
        signal?.addEventListener('abort', () => reject(signal.reason as Error));
        calls.push({
          rows: called,
          tokens: [...tokens],
          end() {
            if (signal?.aborted) return;
            called.forEach((row, i) => {
              rows[row]?.push(tokens[i] as number);
            });
            resolve(Float32Array.from(called.flatMap((row, i) => [row, tokens[i] as number])));
          },
          fail: reject,
        });
      }),
  );
  return { rows, calls, steps };
}

describe('shared decode steps', () => {
  it('begins a lone step at once and joins those asked for meanwhile', async () => {
    const { calls, steps } = fakeSession(3);
    const first = steps.step(2, 5);
    assert.equal(calls.length, 1);
    const others = [steps.step(0, 6), steps.step(1, 7)];
    assert.equal(calls.length, 1);
    calls[0]?.end();
    assert.deepEqual([...(await first)], [2, 5]);
    // It comes back in the same turn, so the next step is of all three.
    const again = steps.step(2, 8);
    await turn();
    assert.deepEqual(calls[1]?.rows, [0, 1, 2]);
    calls[1]?.end();
    assert.deepEqual(
      (await Promise.all([...others, again])).map((logits) => [...logits]),
      [
        [0, 6],
        [1, 7],
        [2, 8],
      ],
    );
  });

  it('runs a step again without the rows that were aborted, which stay as they were', async () => {
    const { rows, calls, steps } = fakeSession(3);
    steps.step(0, 1);
    const leaving = new AbortController();
    const left = steps.step(1, 2, leaving.signal);
    const staying = steps.step(2, 3);
    calls[0]?.end();
    await turn();
    assert.deepEqual(calls[1]?.rows, [1, 2]);
    leaving.abort();
    await assert.rejects(left, { name: 'AbortError' });
    await turn();
    assert.deepEqual(calls[2]?.rows, [2]);
    calls[2]?.end();
    assert.deepEqual([...(await staying)], [2, 3]);
    assert.deepEqual(rows, [[1], [], [3]]);
  });

  it('gives each row its own error', async () => {
    const { calls, steps } = fakeSession(3);
    steps.step(0, 1);
    const bad = steps.step(1, 2);
    const good = steps.step(2, 3);
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
    assert.deepEqual([...(await good)], [2, 3]);
  });

  it('lets a call made later come later', async () => {
    const { calls, steps } = fakeSession(2);
    steps.step(0, 1);
    steps.step(1, 2);
    steps.flush();
    assert.deepEqual(
      calls.map((call) => call.rows),
      [[0], [1]],
    );
    for (const call of calls) call.end();
  });

  it('keeps every row in its own order, whoever aborts and whenever steps end', async () => {
    const script = fc.array(fc.record({ row: fc.nat(3), abort: fc.boolean(), end: fc.boolean() }), {
      maxLength: 40,
    });
    await fc.assert(
      fc.asyncProperty(script, async (actions) => {
        const { rows, calls, steps } = fakeSession(4);
        const expected: number[][] = rows.map(() => []);
        const settled: Promise<void>[] = [];
        let ended = 0;
        for (const [token, { row, abort, end }] of actions.entries()) {
          const controller = new AbortController();
          settled.push(
            steps.step(row, token, controller.signal).then(
              (logits) => {
                assert.deepEqual([...logits], [row, token]);
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
