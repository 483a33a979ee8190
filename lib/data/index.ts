export {
  holdOut,
  loadTokenDocuments,
  orderHash,
  scoringBatches,
  type TokenDocument,
  tokenizeDocuments,
  type WindowBatch,
  WindowCorpus,
  windowOrder,
} from './corpus.js';
export { readDocuments, type TextDocument } from './documents.js';
export {
  byteTokenizer,
  huggingFaceTokenizer,
  loadCheckpointTokenizer,
  loadTokenizer,
  saveTokenizer,
  type TokenDecoder,
  type Tokenizer,
} from './tokenizer.js';
