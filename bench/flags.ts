import { type ParseArgsConfig, parseArgs } from 'node:util';

import { RecordFile } from '../lib/cli/record-file.js';

/** Ends the program: it was called wrongly. */
export function refuse(why: string): never {
  console.error(`bench: ${why}`);
  process.exit(2);
}

type Options = NonNullable<ParseArgsConfig['options']>;

export function parseFlags<O extends Options>(
  options: O,
): ReturnType<typeof parseArgs<{ options: O }>>['values'] {
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
