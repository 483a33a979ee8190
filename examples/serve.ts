// A small serving process: one model, one session, a row of it for each request at a time. Requests that decode at the
// same time share their steps: the session reads the weights once for all of them.
//
//   npx tsx examples/serve.ts runs/docs/checkpoint
//   curl -N localhost:8080/generate -d '{ "prompt": "## Usage", "maxTokens": 100, "temperature": 0.8 }'
//   curl localhost:8080/status
//
// PORT, SLOTS and CAPACITY change the defaults. Ctrl-C stops taking requests, finishes those it has, and exits.

import { once } from 'node:events';
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http';

import { DuokvError, loadCheckpointTokenizer, Model, openDevice } from 'duokv';

const [directory] = process.argv.slice(2);
if (directory === undefined) {
  console.error('usage: tsx examples/serve.ts CHECKPOINT');
  process.exit(2);
}
const port = Number(process.env['PORT'] ?? 8080);
const slots = Number(process.env['SLOTS'] ?? 4);
const capacity = Number(process.env['CAPACITY'] ?? 2048);
const MAX_BODY_BYTES = 1 << 20;

const tokenizer = await loadCheckpointTokenizer(directory);
const device = await openDevice();
const model = await Model.load(device, directory);
const session = model.session({ batch: slots, capacity });
await session.ready;

/** Rows that no request holds, and the requests that wait for one, first come first served. */
const freeRows = Array.from({ length: slots }, (_, row) => row);
const waiting: ((row: number) => void)[] = [];

async function withRow(work: (row: number) => Promise<void>): Promise<void> {
  const row = freeRows.pop() ?? (await new Promise<number>((resolve) => waiting.push(resolve)));
  try {
    await work(row);
  } finally {
    // Other rows go on decoding: a reset touches this one only.
    await session.reset([row]);
    const next = waiting.shift();
    if (next === undefined) freeRows.push(row);
    else next(row);
  }
}

interface GenerateRequest {
  prompt: string;
  maxTokens?: number;
  temperature?: number;
  topK?: number;
  topP?: number;
  seed?: number;
}

async function readRequest(request: IncomingMessage): Promise<GenerateRequest> {
  const chunks: Buffer[] = [];
  let bytes = 0;
  for await (const chunk of request as AsyncIterable<Buffer>) {
    bytes += chunk.length;
    if (bytes > MAX_BODY_BYTES)
      throw new DuokvError('ERR_ARGUMENT', `the body is longer than ${MAX_BODY_BYTES} bytes`);
    chunks.push(chunk);
  }
  let body: unknown;
  try {
    body = JSON.parse(Buffer.concat(chunks).toString('utf8'));
  } catch (error) {
    throw new DuokvError('ERR_ARGUMENT', `the body is not JSON: ${(error as Error).message}`);
  }
  if (typeof (body as GenerateRequest | null)?.prompt !== 'string') {
    throw new DuokvError('ERR_ARGUMENT', 'prompt must be a string');
  }
  return body as GenerateRequest;
}

/** Streams the continuation as plain text. A client that goes away aborts its request at the next layer. */
async function generate(request: IncomingMessage, response: ServerResponse): Promise<void> {
  const { prompt, maxTokens = 128, ...sampling } = await readRequest(request);
  const [encoded] = (await tokenizer.encode([prompt])) as [Int32Array];
  const tokens = Int32Array.of(tokenizer.bos, ...encoded);
  const gone = new AbortController();
  response.on('close', () => gone.abort());
  await withRow(async (row) => {
    const decoder = tokenizer.decoder();
    for (const token of tokens) await decoder.push(token);
    for await (const { token } of session.generate({
      ...sampling,
      prompt: tokens,
      maxTokens,
      row,
      signal: gone.signal,
    })) {
      if (!response.headersSent) response.writeHead(200, { 'content-type': 'text/plain; charset=utf-8' });
      if (token === tokenizer.eos) break;
      response.write(await decoder.push(token));
    }
    response.end(`${await decoder.end()}\n`);
  });
}

function status(response: ServerResponse): void {
  const active = slots - freeRows.length;
  const body = { slots, active, waiting: waiting.length, cacheBytes: session.cache.bytes() };
  response.writeHead(200, { 'content-type': 'application/json' }).end(`${JSON.stringify(body)}\n`);
}

function fail(response: ServerResponse, error: unknown): void {
  if ((error as Error).name === 'AbortError') return;
  const { code = 'ERR_INTERNAL', message } = error as { code?: string; message: string };
  if (response.headersSent) response.destroy();
  else {
    response.writeHead(error instanceof DuokvError ? 400 : 500, { 'content-type': 'application/json' });
    response.end(`${JSON.stringify({ code, message })}\n`);
  }
}

const server = createServer((request, response) => {
  const route = `${request.method} ${request.url}`;
  if (route === 'POST /generate')
    generate(request, response).catch((error: unknown) => fail(response, error));
  else if (route === 'GET /status') status(response);
  else response.writeHead(404).end();
});
server.listen(port);
await once(server, 'listening');
console.log(`serving ${directory} on http://localhost:${port}, ${slots} slots of ${capacity} tokens`);

for (const signal of ['SIGINT', 'SIGTERM'] as const) {
  process.once(signal, () => {
    // Idle connections close at once, busy ones when their response ends; then nothing keeps the process alive.
    server.close(() => {
      device.close().catch((error: unknown) => {
        console.error(error);
        process.exitCode = 1;
      });
    });
  });
}
