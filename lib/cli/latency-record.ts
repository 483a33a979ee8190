import { readFileSync } from 'node:fs';

import { show } from '../arguments.js';
import type { LatencyRecord } from './latency-campaign.js';
import { UsageError } from './run.js';

const LISTS = ['cells', 'contenders', 'loading', 'setUps', 'graphs', 'runs'] as const;

/** The record of a latency campaign. Errors: `UsageError`, with the file and what is wrong in it. */
export function readRecord(file: string): LatencyRecord {
  const refuse = (why: string): never => {
    throw new UsageError(`--resume ${file}: ${why}`);
  };
  const integer = (name: string, value: unknown, least: number, limit = Number.POSITIVE_INFINITY): void => {
    if (Number.isInteger(value) && (value as number) >= least && (value as number) < limit) return;
    const below = Number.isFinite(limit) ? ` and below ${limit}` : '';
    refuse(`${name} is ${show(value)}; it must be an integer from ${least}${below}`);
  };
  const parsed = (): LatencyRecord => {
    try {
      return JSON.parse(readFileSync(file, 'utf8')) as LatencyRecord;
    } catch (error) {
      return refuse(error instanceof Error ? error.message : String(error));
    }
  };
  const record = parsed();
  if (record?.campaign !== 'latency') refuse('it is no record of `duokv bench latency`');
  for (const name of LISTS) {
    if (!Array.isArray(record[name])) refuse(`${name} is ${show(record[name])}; it must be a list`);
  }
  integer('blocks', record.blocks, 1);
  integer('seeds', record.seeds, 1);
  integer('warmups', record.warmups, 0);
  record.cells.forEach((cell, i) => {
    integer(`cells[${i}].batch`, cell?.batch, 1);
    integer(`cells[${i}].prompt`, cell?.prompt, 1);
    if (!Array.isArray(cell.steps) || cell.steps.length === 0) refuse(`cells[${i}].steps has none`);
    for (const [j, steps] of cell.steps.entries()) integer(`cells[${i}].steps[${j}]`, steps, 1);
  });
  record.runs.forEach((run, i) => {
    integer(`runs[${i}].cell`, run?.cell, 0, record.cells.length);
    integer(`runs[${i}].seed`, run.seed, 0, record.seeds);
    integer(`runs[${i}].block`, run.block, 0, record.blocks);
    const { timings } = run;
    const contenders = record.contenders.length;
    if (!Array.isArray(timings) || timings.length !== contenders) {
      refuse(`runs[${i}].timings must have one for each of ${contenders} contenders`);
    }
    const times = (record.cells[run.cell]?.steps.at(-1) ?? 0) + 1;
    timings.forEach((timing, j) => {
      integer(`runs[${i}].timings[${j}].contender`, timing?.contender, 0, contenders);
      const whole =
        Array.isArray(timing.ms) &&
        timing.ms.length === times &&
        timing.ms.every((ms) => Number.isFinite(ms));
      if (!whole) refuse(`runs[${i}].timings[${j}].ms must have ${times} numbers`);
    });
  });
  return record;
}
