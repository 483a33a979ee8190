import { renameSync, writeFileSync } from 'node:fs';

/** Replaces a file in one step: a reader, or the next run, finds the old text or the new one. */
export function replaceFile(file: string, text: string): void {
  writeFileSync(`${file}.new`, text);
  renameSync(`${file}.new`, file);
}
