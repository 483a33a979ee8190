import { existsSync, readFileSync } from 'node:fs';

import { checkInteger, show } from '../arguments.js';
import type { LatencyRecord } from './latency-campaign.js';
import { UsageError } from './run.js';

const LISTS = ['cells', 'contenders', 'loading', 'setUps', 'graphs', 'runs'] as const;

const refuse = (why: string): never => {
  throw new UsageError(why);
};

function check(record: LatencyRecord): void {
  if (record?.campaign !== 'latency') refuse('it is no record of `duokv bench latency`');
  for (const name of LISTS) {
    if (!Array.isArray(record[name])) refuse(`${name} is ${show(record[name])}; it must be a list`);
  }
  const { blocks, seeds, warmups, cells, contenders, runs } = record;
  checkInteger(blocks, 'blocks', 1);
  checkInteger(seeds, 'seeds', 1);
  checkInteger(warmups, 'warmups', 0);
  cells.forEach((cell, i) => {
    checkInteger(cell?.batch, `cells[${i}].batch`, 1);
    checkInteger(cell.prompt, `cells[${i}].prompt`, 1);
    if (!Array.isArray(cell.steps) || cell.steps.length === 0) refuse(`cells[${i}].steps has none`);
    for (const [j, steps] of cell.steps.entries()) checkInteger(steps, `cells[${i}].steps[${j}]`, 1);
  });
  runs.forEach((run, i) => {
    checkInteger(run?.cell, `runs[${i}].cell`, 0, cells.length - 1);
    checkInteger(run.seed, `runs[${i}].seed`, 0, seeds - 1);
    checkInteger(run.block, `runs[${i}].block`, 0, blocks - 1);
    const { timings } = run;
    if (!Array.isArray(timings) || timings.length !== contenders.length) {
      refuse(`runs[${i}].timings must have one for each of ${contenders.length} contenders`);
    }
    const times = (cells[run.cell]?.steps.at(-1) ?? 0) + 1;
    timings.forEach(({ contender, ms }, j) => {
      checkInteger(contender, `runs[${i}].timings[${j}].contender`, 0, contenders.length - 1);
      const whole = Array.isArray(ms) && ms.length === times && ms.every((time) => Number.isFinite(time));
      if (!whole) refuse(`runs[${i}].timings[${j}].ms must have ${times} numbers`);
    });
  });
}

/** The record of a latency campaign. Errors: `UsageError`, with the file and what is wrong in it. */
export function readRecord(file: string): LatencyRecord {
  try {
    if (!existsSync(file)) refuse('there is no such record');
    const record = JSON.parse(readFileSync(file, 'utf8')) as LatencyRecord;
    check(record);
    return record;
  } catch (error) {
    throw new UsageError(`--resume ${file}: ${(error as Error).message}`);
  }
}
