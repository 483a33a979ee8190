import { type ParseArgsConfig, parseArgs } from 'node:util';

import { RecordFile } from '../lib/cli/record-file.js';

/** Ends the program: it was called wrongly. */
export function refuse(why: string): never {
  console.error(`bench: ${why}`);
  process.exit(2);
}

type Options = NonNullable<ParseArgsConfig['options']>;

/** The program's options. It ends after `--help` and where they are wrong. */
export function parseFlags<O extends Options>(
  options: O,
): ReturnType<typeof parseArgs<{ options: O }>>['values'] {
  if (process.argv.includes('--help')) {
    const flags = Object.entries(options).map(
      ([name, { type, default: value }]) =>
        `  --${name}${type === 'string' ? ` ${name.split('-').at(-1)?.toUpperCase()}` : ''}` +
        `${value ? `  (default ${value})` : ''}`,
    );
    console.log(['Options (docs/guides/benchmarks.md says what is measured):', ...flags].join('\n'));
    process.exit(0);
  }
  try {
    return parseArgs({ options }).values;
  } catch (error) {
    return refuse((error as Error).message);
  }
}

/** Where the record goes, if anywhere; the program ends where it could not be written. */
export async function openRecord(out: string | undefined): Promise<RecordFile | undefined> {
  return out === undefined ? undefined : RecordFile.open(out).catch((error: Error) => refuse(error.message));
}
