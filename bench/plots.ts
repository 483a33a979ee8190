// Plots as SVG files, drawn by Vega-Lite without a browser.

import { writeFileSync } from 'node:fs';

import { parse, View } from 'vega';
import { compile, type TopLevelSpec } from 'vega-lite';

export const plotFolder = new URL('../docs/plots/', import.meta.url);

/** Draws a plot into docs/plots/NAME.svg and returns the Markdown that shows it. */
export async function draw(name: string, title: string, spec: object): Promise<string> {
  const { spec: vega } = compile({
    $schema: 'https://vega.github.io/schema/vega-lite/v6.json',
    background: 'white',
    width: 480,
    height: 260,
    ...spec,
  } as TopLevelSpec);
  const svg = await new View(parse(vega), { renderer: 'none' }).toSVG();
  writeFileSync(new URL(`${name}.svg`, plotFolder), `${svg}\n`);
  return `![${title}](plots/${name}.svg)`;
}

const axis = (title: string) => ({ title, grid: true });

/** A line per `series` through points x, y; axes start at 0. */
export const lines = (
  values: { x: number; y: number; series: string }[],
  titles: { x: string; y: string },
): object => ({
  data: { values },
  mark: { type: 'line', point: true },
  encoding: {
    x: { field: 'x', type: 'quantitative', axis: axis(titles.x) },
    y: { field: 'y', type: 'quantitative', axis: axis(titles.y), scale: { zero: true } },
    color: { field: 'series', type: 'nominal', title: null, sort: null },
  },
});

/** A bar per label. */
export const bars = (values: { label: string; share: number; mode: string }[], title: string): object => ({
  data: { values },
  height: { step: 9 },
  mark: 'bar',
  encoding: {
    y: { field: 'label', type: 'nominal', title: null, sort: null },
    yOffset: { field: 'mode', type: 'nominal' },
    x: { field: 'share', type: 'quantitative', axis: { ...axis(title), format: '%' } },
    color: { field: 'mode', type: 'nominal', title: null },
  },
});
