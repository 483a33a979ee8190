import assert from 'node:assert/strict';
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';

const root = fileURLToPath(new URL('../', import.meta.url));
const pages = [
  'README.md',
  ...readdirSync(join(root, 'docs'), { recursive: true, encoding: 'utf8' })
    .filter((name) => name.endsWith('.md'))
    .map((name) => join('docs', name)),
];
const text = (file: string) => readFileSync(join(root, file), 'utf8');

describe('the documentation', () => {
  it('links only to files that exist', () => {
    const broken = pages.flatMap((page) =>
      [...text(page).matchAll(/\]\((?!https?:|#)([^)#\s]+)/g)]
        .map(([, target]) => target as string)
        .filter((target) => !existsSync(join(root, dirname(page), target)))
        .map((target) => `${page}: ${target}`),
    );
    assert.deepEqual(broken, []);
  });

  it('names only npm scripts that exist', () => {
    const { scripts } = JSON.parse(text('package.json'));
    const unknown = pages.flatMap((page) =>
      [...text(page).matchAll(/npm run ([\w:]+)/g)]
        .map(([, script]) => script as string)
        .filter((script) => !(script in scripts))
        .map((script) => `${page}: npm run ${script}`),
    );
    assert.deepEqual(unknown, []);
  });

  it('has the table of error codes that the source has', () => {
    const codes = (file: string) => text(file).match(/\| `ERR_\w+` \| .* \|/g);
    assert.deepEqual(codes('docs/errors.md'), codes('lib/errors.ts'));
  });
});
