import { type Command, CommanderError } from 'commander';

import { DuokvError } from '../errors.js';

/** What a command's handler is given beside its own arguments. */
export interface Context {
  /** Aborted by Ctrl-C and by SIGTERM. */
  readonly signal: AbortSignal;
  readonly json: boolean;
  /** Text for people on stdout, nothing under --json. */
  print(text: string): void;
}

/** The signal that ended a command early; its exit code is 128 plus the signal's number, as in shells. */
const SIGNAL_EXIT_CODES = { SIGINT: 130, SIGTERM: 143 } as const;

/** 0 success, 1 failure, 2 usage. */
const FAILURE = 1;
const USAGE = 2;

/** A wrong combination of options, as opposed to a failure while working: exit code 2. */
export class UsageError extends Error {}

/** One line for people: `duokv: ERR_CODE: what is wrong`. */
function reportError(error: unknown): void {
  const { code, message } = error as { code?: unknown; message?: unknown };
  const text = String(message ?? error);
  // The system's own errors name their code.
  const prefix = typeof code === 'string' && !text.includes(code) ? `${code}: ` : '';
  process.stderr.write(`duokv: ${prefix}${text}\n`);
  // A stack helps with what nobody raised on purpose.
  if (!(error instanceof DuokvError) && !(error instanceof UsageError) && error instanceof Error) {
    if (error.stack !== undefined && typeof code !== 'string') process.stderr.write(`${error.stack}\n`);
  }
}

/** `value` as a line of JSON; int64 values become decimal strings, which no parser rounds. */
export function toJson(value: unknown): string {
  return JSON.stringify(value, (_, entry: unknown) => (typeof entry === 'bigint' ? String(entry) : entry));
}

/**
 * Makes `handler` the action of `command`: adds --json, connects signals, prints the returned value as the one JSON
 * document under --json (nothing if there is none), and turns errors into a line on stderr and an exit code.
 */
export function defineAction<Options extends object, Arguments extends unknown[]>(
  command: Command,
  handler: (context: Context, options: Options, ...args: Arguments) => Promise<unknown>,
): Command {
  return command
    .option('--json', 'print one JSON document on stdout, and nothing else')
    .action(async (...received: unknown[]) => {
      // Commander appends the options and the command to the declared arguments.
      const options = received.at(-2) as Options & { json?: boolean };
      const args = received.slice(0, -2) as Arguments;
      const json = options.json === true;
      const controller = new AbortController();
      let caught: keyof typeof SIGNAL_EXIT_CODES | undefined;
      const onSignal = (name: NodeJS.Signals) => {
        // A second signal means now.
        if (caught !== undefined) process.exit(SIGNAL_EXIT_CODES[caught]);
        caught = name as keyof typeof SIGNAL_EXIT_CODES;
        controller.abort();
      };
      for (const name of Object.keys(SIGNAL_EXIT_CODES)) process.on(name, onSignal);
      const context: Context = {
        signal: controller.signal,
        json,
        print: (text) => void (json || process.stdout.write(`${text}\n`)),
      };
      try {
        const value = await handler(context, options, ...args);
        if (json && value !== undefined) process.stdout.write(`${toJson(value)}\n`);
      } catch (error) {
        if (!(caught !== undefined && (error as Error).name === 'AbortError')) {
          reportError(error);
          process.exitCode = error instanceof UsageError ? USAGE : FAILURE;
        }
      } finally {
        for (const name of Object.keys(SIGNAL_EXIT_CODES)) process.off(name, onSignal);
      }
      if (caught !== undefined) process.exitCode = SIGNAL_EXIT_CODES[caught];
    });
}

/** Parses the arguments and runs the chosen command. Usage errors exit with 2. */
export async function runProgram(program: Command, argv: readonly string[]): Promise<void> {
  // A reader that has seen enough (`duokv inspect … | head`) is no error.
  process.stdout.on('error', (error: NodeJS.ErrnoException) => {
    if (error.code === 'EPIPE') process.exit();
    reportError(Object.assign(new Error(`stdout: ${error.message}`), { code: error.code }));
    process.exit(FAILURE);
  });
  const family = (command: Command): Command[] => [command, ...command.commands.flatMap(family)];
  for (const command of family(program)) {
    command.exitOverride().configureOutput({
      outputError: (text, write) =>
        write(
          `${text
            .replace(/^error: /, 'duokv: ')
            .trimEnd()
            .replaceAll('\n', ' ')}\n`,
        ),
    });
  }
  try {
    await program.parseAsync(argv);
  } catch (error) {
    if (!(error instanceof CommanderError)) throw error;
    process.exitCode = error.exitCode === 0 ? 0 : USAGE;
  }
}
