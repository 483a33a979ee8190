import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtemp, rm } from 'node:fs/promises';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';

import { writeDocuments } from './command.js';

const root = fileURLToPath(new URL('../../', import.meta.url));

function example(name: string, args: readonly string[], env: Record<string, string> = {}) {
  const child = spawn(process.execPath, ['--import', 'tsx', `examples/${name}`, ...args], {
    cwd: root,
    env: { ...process.env, ...env },
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  const output = { stdout: '', stderr: '' };
  for (const stream of ['stdout', 'stderr'] as const) {
    child[stream].setEncoding('utf8').on('data', (text: string) => {
      output[stream] += text;
    });
  }
  return { child, output, closed: once(child, 'close') as Promise<[number | null, NodeJS.Signals | null]> };
}

async function freePort(): Promise<number> {
  const server = createServer().listen(0);
  await once(server, 'listening');
  const { port } = server.address() as { port: number };
  server.close();
  return port;
}

describe('the examples', () => {
  let directory: string;
  let checkpoint: string;
  before(async () => {
    directory = await mkdtemp(join(tmpdir(), 'duokv-examples-'));
    checkpoint = join(directory, 'checkpoint');
  });
  after(() => rm(directory, { recursive: true }));

  it('train.ts makes a checkpoint, and serve.ts serves it until it is told to stop', async () => {
    const training = example('train.ts', [await writeDocuments(directory), checkpoint]);
    const [trained] = await training.closed;
    assert.equal(training.output.stderr, '');
    assert.equal(trained, 0);
    assert.match(training.output.stdout, /held out: \d\.\d+ nats per byte/);

    const port = await freePort();
    const url = `http://localhost:${port}`;
    const server = example('serve.ts', [checkpoint], { PORT: String(port), SLOTS: '2', CAPACITY: '128' });
    await once(server.child.stdout, 'data');
    const post = (body: object) => fetch(`${url}/generate`, { method: 'POST', body: JSON.stringify(body) });

    // More requests than slots: the third waits for a row, and equal requests get equal text on any row.
    const request = { prompt: 'bank ', maxTokens: 20, temperature: 0.8, seed: 4 };
    const answers = await Promise.all([post(request), post(request), post(request)]);
    const texts = await Promise.all(answers.map((answer) => answer.text()));
    assert.deepEqual(
      answers.map(({ status }) => status),
      [200, 200, 200],
    );
    assert.ok((texts[0] as string).length > 1);
    assert.deepEqual(texts, [texts[0], texts[0], texts[0]]);

    // Different requests at the same time share their decode steps, and each gets what it gets alone.
    const different = [
      { prompt: 'layer ', maxTokens: 100, temperature: 0.8, seed: 1 },
      { prompt: 'a window of the prefix ', maxTokens: 90, temperature: 0 },
    ];
    const textOf = async (body: object) => (await post(body)).text();
    const alone = [await textOf(different[0] as object), await textOf(different[1] as object)];
    assert.notEqual(alone[0], alone[1]);
    for (let round = 0; round < 3; round++) assert.deepEqual(await Promise.all(different.map(textOf)), alone);

    const refused = await post({ prompt: 'bank ', maxTokens: 500 });
    assert.equal(refused.status, 400);
    assert.equal(((await refused.json()) as { code: string }).code, 'ERR_CAPACITY');

    const last = await post({ prompt: 'bank ', maxTokens: 100, temperature: 0.8 });
    server.child.kill('SIGTERM');
    assert.ok((await last.text()).endsWith('\n'), 'the request under way is finished');
    const [code] = await server.closed;
    assert.equal(server.output.stderr, '');
    assert.equal(code, 0);
  });
});
