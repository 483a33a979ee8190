import { Command } from 'commander';

import { loadTokenDocuments, scoringBatches, type TokenDocument } from '../data/corpus.js';
import { loadCheckpointTokenizer } from '../data/tokenizer.js';
import { Model } from '../model.js';
import type { PrecisionName } from '../native.js';
import { type DeviceFlags, openChosenDevice, positiveInteger, withDevice, withPrecision } from './options.js';
import { formatCount, formatTable, withProgress } from './output.js';
import { defineAction } from './run.js';
import { findCheckpoint } from './run-folder.js';

export interface DocumentScore {
  readonly id: string;
  /** Sum over the document's targets, in nats. */
  readonly nll: number;
  readonly targets: number;
}

/** Scores every token of every document after its first; see `scoringBatches` for the windows. */
export async function scoreDocuments(
  model: Model,
  documents: readonly TokenDocument[],
  options: {
    context: number;
    rows: number;
    precision: PrecisionName;
    signal: AbortSignal;
    onProgress?: (targets: number) => void;
  },
): Promise<{ documents: DocumentScore[]; nll: number; targets: number }> {
  const { context, rows, precision, signal, onProgress } = options;
  const nll = new Float64Array(documents.length);
  const targets = new Float64Array(documents.length);
  let done = 0;
  for (const batch of scoringBatches(documents, context, rows)) {
    const scored = await model.score(batch, { precision, signal });
    for (const document of scored.documents) {
      // Padding is a document without targets.
      if (document.targets === 0) continue;
      nll[Number(document.id)]! += document.nll;
      targets[Number(document.id)]! += document.targets;
    }
    done += scored.totalTargets;
    onProgress?.(done);
  }
  return {
    documents: documents.map(({ id }, index) => ({
      id,
      nll: nll[index] as number,
      targets: targets[index] as number,
    })),
    nll: nll.reduce((sum, value) => sum + value, 0),
    targets: done,
  };
}

interface ScoreOptions extends DeviceFlags {
  context: number;
  batch: number;
  precision: PrecisionName;
}

export function scoreCommand(): Command {
  const command = new Command('score')
    .description('Score text: the negative log-likelihood of each document and of all, in nats')
    .argument('<checkpoint>', 'checkpoint directory, or the folder of a training run')
    .argument('<text>', 'folder of .txt and .md files, a .jsonl or .jsonl.gz file, or a single text file')
    .option(
      '--context <tokens>',
      'window length; longer documents restart their context',
      positiveInteger,
      1024,
    )
    .option('--batch <rows>', 'windows in one pass', positiveInteger, 4)
    .addHelpText('after', '\nExample:\n  $ duokv score runs/docs book.txt --context 2048');
  withPrecision(withDevice(command), 'fp32');
  return defineAction<ScoreOptions, [string, string]>(command, async (context, options, checkpoint, text) => {
    const directory = await findCheckpoint(checkpoint);
    const tokenizer = await loadCheckpointTokenizer(directory);
    const { documents, empty } = await loadTokenDocuments(text, tokenizer);
    await using device = await openChosenDevice(options);
    using model = await Model.load(device, directory);
    const total = documents.reduce((sum, { tokens }) => sum + tokens.length - 1, 0);
    const scored = await withProgress('scoring', total, (progress) =>
      scoreDocuments(model, documents, {
        context: options.context,
        rows: options.batch,
        precision: options.precision,
        signal: context.signal,
        onProgress: (targets) => progress.update(targets),
      }),
    );
    const meanNll = scored.nll / scored.targets;
    const row = ({ id, nll, targets }: DocumentScore) => [
      id,
      formatCount(targets),
      (nll / targets).toFixed(4),
      Math.exp(nll / targets).toFixed(2),
    ];
    context.print(
      formatTable(
        ['document', 'targets', 'NLL per target', 'perplexity'],
        [...scored.documents, { id: 'all', nll: scored.nll, targets: scored.targets }].map(row),
        [1, 2, 3],
      ),
    );
    return {
      checkpoint: directory,
      precision: options.precision,
      context: options.context,
      documents: scored.documents,
      emptyDocuments: empty,
      totalNll: scored.nll,
      totalTargets: scored.targets,
      meanNll,
      perplexity: Math.exp(meanNll),
    };
  });
}
