/** `count` tokens of an endless sequence that uses the whole vocabulary, from position `start` on. */
export const syntheticTokens = (count: number, vocab: number, start = 0): Int32Array =>
  Int32Array.from({ length: count }, (_, index) => ((start + index) * 7919 + 13) % vocab);
