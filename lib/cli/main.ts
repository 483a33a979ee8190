#!/usr/bin/env node
import { Command } from 'commander';

import { benchCommand } from './bench.js';
import { doctorCommand } from './doctor.js';
import { generateCommand } from './generate.js';
import { inspectCommand } from './inspect.js';
import { qualifyCommand } from './qualify.js';
import { runProgram } from './run.js';
import { scoreCommand } from './score.js';
import { trainCommand } from './train.js';
import { packageVersion } from './version.js';

const program = new Command('duokv')
  .description('Train and serve transformers whose upper layers share one global KV bank')
  .version(packageVersion())
  // Options belong to the command that they follow: `bench` and `bench latency` share names.
  .enablePositionalOptions()
  .addCommand(doctorCommand())
  .addCommand(inspectCommand())
  .addCommand(trainCommand())
  .addCommand(generateCommand())
  .addCommand(scoreCommand())
  .addCommand(qualifyCommand())
  .addCommand(benchCommand());

await runProgram(program, process.argv);
