// Pieces of the report's Markdown.

/** Lines of a table and an empty one after it; none where it has no rows. */
export function table(header: string[], rows: string[][]): string[] {
  if (rows.length === 0) return [];
  const line = (cells: string[]) => `| ${cells.join(' | ')} |`;
  return [line(header), line(header.map(() => '---')), ...rows.map(line), ''];
}

export function machineLine(machine: Record<string, unknown>): string {
  const isa = machine['isa'] === undefined ? '' : `${machine['isa']}, `;
  return (
    `${machine['cpu']}, ${isa}${machine['threads']} threads, Node ${machine['node']}, ` +
    `commit \`${String(machine['commit']).replace(/^(\w{12})\w+/, '$1')}\``
  );
}
