import { block, documentsOf, type Model, projectKv, readsOf } from './block.js';
import { bankLayer, hasGlobalBank, isUpper, kvInputLayer, projectsKv } from './config.js';
import { type Schedule, suffixes } from './counts.js';
import { type Bank, bf16 } from './math.js';
import { embed, head } from './model.js';

function concatenate(a: Float64Array, b: Float64Array): Float64Array {
  const joined = new Float64Array(a.length + b.length);
  joined.set(a);
  joined.set(b, a.length);
  return joined;
}

/** One row's complete cache. */
export class ReferenceRow {
  readonly #model: Model;
  readonly #banks = new Map<string, Bank>();
  #documentIds: bigint[] = [];

  constructor(model: Model) {
    this.#model = model;
  }

  get length(): number {
    return this.#documentIds.length;
  }

  get documentIds(): BigInt64Array {
    return BigInt64Array.from(this.#documentIds);
  }

  /** Names of the stored tensors: `layer.0.k`, `global.v`, `local.8.k`, ... */
  names(): string[] {
    return [...this.#banks.keys()].flatMap((name) => [`${name}.k`, `${name}.v`]);
  }

  /** [entries, kvHeads, headDim], oldest first. */
  read(name: string): Float64Array {
    const bank = this.#banks.get(name.slice(0, -2))!;
    return name.endsWith('.k') ? bank.k : bank.v;
  }

  /** The stored bank followed by `added`. Entries that the route left out between the two are lost. */
  #append(name: string, added: Bank): Bank {
    const stored = this.#banks.get(name);
    const end = stored === undefined ? 0 : stored.first + stored.k.length / this.#width;
    let bank =
      this.#model.precision === 'bf16' ? { ...added, k: added.k.map(bf16), v: added.v.map(bf16) } : added;
    if (stored !== undefined && end === added.first) {
      bank = {
        k: concatenate(stored.k, bank.k),
        v: concatenate(stored.v, bank.v),
        first: stored.first,
      };
    }
    this.#banks.set(name, bank);
    return bank;
  }

  get #width(): number {
    return this.#model.config.kvHeads * this.#model.config.headDim;
  }

  #bankName(layer: number): string {
    const c = this.#model.config;
    return isUpper(c, layer) && hasGlobalBank(c) ? `local.${layer}` : `layer.${layer}`;
  }

  /** Appends tokens by a route; returns the logits [V] of the last one. */
  prefill(tokens: ArrayLike<number>, documentIds: ArrayLike<bigint>, schedule: Schedule): Float64Array {
    const c = this.#model.config;
    const n = tokens.length;
    const start = this.length;
    this.#documentIds.push(...Array.from(documentIds));
    const row = documentsOf(this.#documentIds);
    const end = start + n;
    // Representations of the last positions only; which ones follows from their length.
    const last = (x: Float64Array, count: number) => x.subarray(x.length - count * c.hidden);
    const inputs: Float64Array[] = [];
    let global: Bank | undefined;
    let x = embed(this.#model, tokens);
    suffixes(c, n, schedule).forEach(({ kvInput, queryOutput }, layer) => {
      if (layer === c.lowerLayers && hasGlobalBank(c)) {
        if (c.provider === 'boundary') {
          global = this.#append('global', projectKv(this.#model, 'global', x, start, row));
        } else {
          const v = this.#banks.get('layer.0')!.v;
          global = { k: this.#banks.get(`layer.${c.lowerLayers - 1}`)!.k, v, first: 0 };
        }
      }
      inputs.push(x);
      if (projectsKv(c, layer)) {
        const input = last(inputs[kvInputLayer(c, layer)], kvInput);
        this.#append(this.#bankName(layer), projectKv(this.#model, layer, input, end - kvInput, row));
      }
      const source = bankLayer(c, layer);
      const own = source === undefined ? undefined : this.#banks.get(this.#bankName(source))!;
      const first = end - queryOutput;
      const reads = readsOf(c, layer, own, global, row.positions.subarray(first, end));
      x = block(this.#model, layer, last(x, queryOutput), first, row, reads).out;
    });
    this.#trimLocalBanks();
    return head(this.#model, last(x, 1));
  }

  /** One step: the same as appending a prompt of one token, for which all routes coincide. */
  decode(token: number, documentId: bigint): Float64Array {
    return this.prefill([token], [documentId], 'full');
  }

  #trimLocalBanks(): void {
    for (const [name, bank] of this.#banks) {
      if (!name.startsWith('local.')) continue;
      const excess = Math.max(0, bank.k.length / this.#width - this.#model.config.window);
      this.#banks.set(name, {
        k: bank.k.slice(excess * this.#width),
        v: bank.v.slice(excess * this.#width),
        first: bank.first + excess,
      });
    }
  }
}
