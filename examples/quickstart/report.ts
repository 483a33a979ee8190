import { SingleBar } from 'cli-progress';
import type { Model, StepResult, TokenDocument } from 'duokv';

import type { QuickstartDesign } from './designs.js';

export const formatCount = (value: number): string => value.toLocaleString('en-US');

export function heading(text: string): void {
  console.log(`\n${text}\n${'─'.repeat(text.length)}`);
}

export function row(name: string, value: string): void {
  console.log(`${name.padEnd(24)}${value}`);
}

/** A progress bar with loss and speed, on a terminal only. */
export function openProgress(title: string, total: number) {
  const format = `${title} {bar} {value}/{total}  loss {loss}  {speed} tokens/s  ETA {eta_formatted}`;
  const bar = new SingleBar({ format, barsize: 24, hideCursor: true, clearOnComplete: true });
  bar.start(total, 0, { loss: '–', speed: '–' });
  return {
    update(done: number, { loss, tokens, seconds }: StepResult) {
      bar.update(done, {
        loss: loss.toFixed(3),
        speed: formatCount(Math.round(tokens / seconds)),
      });
    },
    stop: () => bar.stop(),
  };
}

/** Entropy of the distribution of single tokens, in nats: the loss of a model that knows frequencies and no context. */
export function unigramEntropy(documents: readonly TokenDocument[]): number {
  const counts = new Map<number, number>();
  let total = 0;
  for (const { tokens } of documents) {
    for (const token of tokens) counts.set(token, (counts.get(token) ?? 0) + 1);
    total += tokens.length;
  }
  let entropy = 0;
  for (const count of counts.values()) entropy -= (count / total) * Math.log(count / total);
  return entropy;
}

/** Prints the cache bytes of a session that holds `prompt`, summed from its tensors, beside the formula. */
export async function printCacheBytes(
  model: Model,
  prompt: Int32Array,
  { cacheFormula }: QuickstartDesign,
): Promise<void> {
  using session = model.session({ batch: 1, capacity: prompt.length });
  await session.prefill({ tokens: prompt });
  const counted = session.cache.bytes();
  const formula = cacheFormula(prompt.length);
  const total = Object.values(formula).reduce((sum, value) => sum + value);
  const bytes = (value: number) => formatCount(value).padStart(11);
  console.log();
  row('cache bytes', '    counted     formula');
  for (const part of ['lower', 'global', 'local', 'documentIds'] as const) {
    row(`  ${part}`, `${bytes(counted[part])} ${bytes(formula[part])}`);
  }
  row('  total', `${bytes(counted.total)} ${bytes(total)}`);
}
