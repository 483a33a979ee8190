/*
 * What group.test.ts runs as several ranks: `program.ts MODE`. Prints JSON on rank 0, or throws.
 */
import assert from 'node:assert/strict';
import { existsSync } from 'node:fs';
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

import { DuokvError, type Group, joinGroup, Model, openDevice, Trainer } from '../../lib/index.js';
import { randomBatch, small, smallDesigns, testBackend } from '../api/support.js';
import { distanceOf, normOf } from '../reference/compare.js';

type Batch = ReturnType<typeof randomBatch>;

function rowsOf(batch: Batch, begin: number, end: number): Batch {
  const length = batch.tokens.length / batch.rows;
  const part = <T extends Int32Array | BigInt64Array>(array: T) =>
    array.slice(begin * length, end * length) as T;
  return {
    rows: end - begin,
    tokens: part(batch.tokens),
    targets: part(batch.targets),
    documentIds: part(batch.documentIds),
    targetDocumentIds: part(batch.targetDocumentIds),
  };
}

/** The error that `call` rejects with, as `code: message`. */
const failure = (call: Promise<unknown>): Promise<string> =>
  call.then(
    () => 'no error',
    (error: DuokvError) => `${error.code}: ${error.message}`,
  );

const openRank = (group: Group) =>
  testBackend === 'cuda'
    ? openDevice({ backend: `cuda:${group.localRank}` })
    : openDevice({ backend: 'cpu', threads: group.threads ?? 1 });

const modes: Record<string, (group: Group) => Promise<unknown>> = {
  /** Gradients of every design in small buckets: those of one rank, and the same bits everywhere. */
  async gradients(group) {
    await using device = await openRank(group);
    for (const [name, config] of Object.entries(smallDesigns)) {
      using model = await Model.create(device, config, { seed: 3 });
      using alone = model.trainer({ microbatch: 2 });
      // About the largest parameter: several buckets start while the backward pass runs.
      using together = model.trainer({ group, bucketBytes: 6000 });
      const rows = 2 * group.size + 1;
      const batch = randomBatch(config, rows, 13, 4);
      const share = (rank: number) => Math.floor((rows * rank) / group.size);
      for (let round = 0; round < 2; round++) {
        const expected = await alone.gradients(batch);
        const actual = await together.gradients(rowsOf(batch, share(group.rank), share(group.rank + 1)));
        assert.equal(actual.validTargets, expected.validTargets);
        assert.ok(Math.abs(actual.loss / expected.loss - 1) < 1e-12, name);
        assert.ok(Math.abs(actual.gradNorm / expected.gradNorm - 1) < 1e-6, name);
        for (const [parameter, gradient] of expected.gradients) {
          const found = actual.gradients.get(parameter) as Float32Array;
          const distance = distanceOf(found, gradient);
          const limit = 1e-5 * normOf(gradient) + 1e-7 * expected.gradNorm;
          assert.ok(distance <= limit, `${name} ${parameter}: distance ${distance}, limit ${limit}`);
          const all = await group.broadcast(Array.from(found));
          assert.deepEqual(Array.from(found), all, `${name} ${parameter} differs from rank 0's`);
        }
        assert.equal(actual.gradNorm, await group.broadcast(actual.gradNorm));
      }
    }
    return Object.keys(smallDesigns).length;
  },

  /** What a rank is refused, and what it may still do afterwards. */
  async refusals(group) {
    await using device = await openRank(group);
    const config = small();
    using model = await Model.create(device, config, { seed: 3 });
    using trainer = model.trainer({ group });
    const good = randomBatch(config, 2, 9, group.rank + 1);
    const bad = { ...good, tokens: good.tokens.map((token, i) => (i === 5 ? config.vocab : token)) };
    const results: Record<string, string> = {};
    results['batch'] = await failure(trainer.step(group.rank === 1 ? bad : good));
    assert.equal(trainer.update, 0);
    const first = await trainer.step(good);
    assert.deepEqual([first.update, first.tokens], [1, 36]);
    results['signal'] = await failure(trainer.step(good, { signal: new AbortController().signal }));
    using other = model.trainer({ group, clipNorm: group.rank === 1 ? 2 : 1 });
    results['options'] = await failure(other.step(good));
    const parameter = model.plan.parameters[0] as { name: string; elements: number };
    if (group.rank === 1)
      await model.writeTensor(parameter.name, new Float32Array(parameter.elements).fill(1));
    const folder = await group.broadcast(await mkdtemp(join(tmpdir(), 'duokv-group-')));
    results['save'] = await failure(trainer.save(join(folder, 'differs')));
    results['saved'] = String(existsSync(join(folder, 'differs')));
    if (group.rank === 1) await model.writeTensor(parameter.name, await rank0(group, model, parameter.name));
    else await rank0(group, model, parameter.name);
    await trainer.save(join(folder, 'equal'));
    await model.writeTensor(parameter.name, new Float32Array(parameter.elements).fill(group.rank));
    using drifted = model.trainer({ group });
    results['first step'] = await failure(drifted.step(good));
    const resumed = await Trainer.resume(device, join(folder, 'equal'), { group });
    assert.equal((await resumed.step(good)).update, 2);
    resumed.model.dispose();
    await group.barrier();
    await rm(folder, { recursive: true, force: true });
    const everywhere: Record<string, string>[] = [];
    for (let rank = 0; rank < group.size; rank++) everywhere.push(await group.broadcast(results, rank));
    return everywhere;
  },

  /** A rank that throws. */
  async throws(group) {
    await group.barrier();
    if (group.rank === 1) {
      group.fail('it has had enough');
      throw new Error('thrown on purpose');
    }
    return failure(group.sum([1]));
  },

  /** A rank that ends without a word. */
  async exits(group) {
    await group.barrier();
    if (group.rank === 1) process.exit(0);
    return failure(group.barrier());
  },

  /** Ranks that no MPI knows. */
  async meet(group) {
    const sum = await group.sum([group.rank + 1, 0.5]);
    const said = await group.broadcast(`rank ${group.rank}`, group.size - 1);
    await using device = await openRank(group);
    using model = await Model.create(device, small());
    using trainer = model.trainer({ group });
    return { sum, said, trains: await failure(trainer.step(randomBatch(small(), 1, 8))) };
  },
};

/** Rank 0's values of a tensor. */
async function rank0(group: Group, model: Model, name: string): Promise<Float32Array> {
  return Float32Array.from(await group.broadcast(Array.from(await model.readTensor(name))));
}

const group = await joinGroup();
const result = await modes[process.argv[2] as string]?.(group);
if (group.rank === 0) console.log(JSON.stringify(result));
await group.close().catch((error: unknown) => {
  if (!(error instanceof DuokvError)) throw error;
  process.exitCode = 1;
});
