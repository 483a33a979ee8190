import { stat } from 'node:fs/promises';

import type { Command } from 'commander';

import { readCheckpointConfig, readJson } from '../checkpoint.js';
import { DuokvError } from '../errors.js';
import { designPlan, type ModelConfig } from '../plan.js';
import { presets } from '../presets.js';
import { collectSetting } from './options.js';
import { UsageError } from './run.js';
import { findCheckpoint } from './run-folder.js';

type Settings = Readonly<Record<string, string | number>>;

export interface ConfigOptions {
  preset?: string;
  config?: string;
  set?: Settings;
}

/** --set, which changes keys of a config. */
export function withSettings(command: Command): Command {
  return command.option(
    '--set <key=value>',
    'change a key of the config, for example fusion=separate (repeatable)',
    collectSetting,
  );
}

/** --preset or --config, with --set. */
export function withConfig(command: Command): Command {
  command
    .option('--preset <name>', `the model: ${presetNames.join(', ')}`)
    .option('--config <file>', 'the model as a .json file of config keys');
  return withSettings(command);
}

/** `localHistory126M` and `local-history-126m` name the same preset. */
const plain = (name: string) => name.replaceAll(/[^A-Za-z0-9]/g, '').toLowerCase();

/** The presets as the command line spells them: `gqa4Cla2_126M` is `gqa4-cla2-126m`. */
export const presetNames = Object.keys(presets).map((name) =>
  name.replaceAll(/_|(?<=[a-z])(?=[A-Z]|\d+M)|(?<=\d)(?=[A-Z][a-z])/g, '-').toLowerCase(),
);

const findPreset = (name: string) => Object.entries(presets).find(([key]) => plain(key) === plain(name))?.[1];

/** Errors: `UsageError` for an unknown name, listing the known ones; `ERR_CONFIG` for settings it cannot have. */
export function presetConfig(name: string, settings: Settings = {}): ModelConfig {
  const make = findPreset(name);
  if (make === undefined) {
    throw new UsageError(`preset ${JSON.stringify(name)} is none of ${presetNames.join(', ')}`);
  }
  return make(settings as Partial<ModelConfig>);
}

/** Those of `routes` that a preset has: `uniform` takes a global bank. Errors: `UsageError` where none is left. */
export function possibleRoutes<Route extends string>(preset: string, routes: readonly Route[]): Route[] {
  const { hasGlobalBank } = designPlan(presetConfig(preset));
  const possible = routes.filter((route) => route !== 'uniform' || hasGlobalBank);
  if (possible.length === 0) throw new UsageError(`--routes uniform: ${preset} has no global bank`);
  return possible;
}

async function configFile(path: string, settings: Settings): Promise<ModelConfig> {
  return { ...(await readJson(path, 'ERR_CONFIG')), ...settings } as unknown as ModelConfig;
}

/** The config that `--preset` or `--config` names, for a tokenizer of `vocab` ids. Errors: `ERR_CONFIG`, `UsageError`. */
export async function configFromOptions(options: ConfigOptions, vocab: number): Promise<ModelConfig> {
  const { preset, config: path, set = {} } = options;
  if ((preset === undefined) === (path === undefined)) {
    throw new UsageError('name the model with either --preset or --config');
  }
  const config =
    preset !== undefined ? presetConfig(preset, { vocab, ...set }) : await configFile(path as string, set);
  if (config.vocab < vocab) {
    throw new DuokvError('ERR_CONFIG', `vocab is ${config.vocab}; the tokenizer has ${vocab} ids`);
  }
  return config;
}

/** The config of a preset, of a .json file, of a checkpoint directory or of a training run's folder. Errors: as above. */
export async function resolveConfig(source: string, settings: Settings = {}): Promise<ModelConfig> {
  const status = await stat(source).catch(() => undefined);
  if (status === undefined) {
    if (findPreset(source) !== undefined) return presetConfig(source, settings);
    throw new UsageError(
      `${JSON.stringify(source)} is no file, no directory and none of the presets ${presetNames.join(', ')}`,
    );
  }
  if (status.isFile()) return configFile(source, settings);
  return { ...(await readCheckpointConfig(await findCheckpoint(source))), ...settings };
}
