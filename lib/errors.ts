/**
 * Stable error codes. Scripts may switch on them; messages may change.
 *
 * | code | meaning |
 * | --- | --- |
 * | `ERR_ARGUMENT` | an argument has the wrong type, or is not one of the values listed for it |
 * | `ERR_CONFIG` | a model configuration that describes no legal model, or a route that the design does not have |
 * | `ERR_SHAPE` | array lengths that disagree with each other or with the model |
 * | `ERR_TOKEN_RANGE` | a token outside `[0, vocab)` |
 * | `ERR_DOCUMENT_IDS` | a document id that recurs in its row after another document began |
 * | `ERR_NO_TARGETS` | a training or scoring batch without a single valid target |
 * | `ERR_TENSOR_NAME` | a name that no parameter of the model, or no tensor of the cache, has |
 * | `ERR_NOT_FINITE` | an update whose loss or gradient, or logits to draw a token from, that are infinite or not numbers; nothing has changed |
 * | `ERR_CAPACITY` | more positions than the session was opened for |
 * | `ERR_DATA` | text that cannot be read or is too little: no documents, an invalid JSON line, invalid UTF-8; a damaged file of a training run |
 * | `ERR_CHECKPOINT` | a checkpoint that is malformed, incomplete or of another model, or that the file system does not let be written |
 * | `ERR_DEVICE_MEMORY` | the device cannot hold what was asked for |
 * | `ERR_DEVICE_UNAVAILABLE` | the requested backend is not built, not installed, or has no device |
 * | `ERR_DISTRIBUTED` | ranks that cannot find each other, or that differ; another rank has failed, which the message names |
 * | `ERR_STATE` | the object is in a state in which this call makes no sense, for example a paused session |
 * | `ERR_DISPOSED` | the object, or one it depends on, was disposed |
 * | `ERR_INTERNAL` | a broken invariant: please report it |
 */
export type ErrorCode =
  | 'ERR_ARGUMENT'
  | 'ERR_CONFIG'
  | 'ERR_SHAPE'
  | 'ERR_TOKEN_RANGE'
  | 'ERR_DOCUMENT_IDS'
  | 'ERR_NO_TARGETS'
  | 'ERR_TENSOR_NAME'
  | 'ERR_NOT_FINITE'
  | 'ERR_CAPACITY'
  | 'ERR_DATA'
  | 'ERR_CHECKPOINT'
  | 'ERR_DEVICE_MEMORY'
  | 'ERR_DEVICE_UNAVAILABLE'
  | 'ERR_DISTRIBUTED'
  | 'ERR_STATE'
  | 'ERR_DISPOSED'
  | 'ERR_INTERNAL';

/** Every error that duokv raises on purpose. The message names the argument, the index, the limit and the value. */
export class DuokvError extends Error {
  readonly code: ErrorCode;

  constructor(code: ErrorCode, message: string, options?: ErrorOptions) {
    super(message, options);
    this.name = 'DuokvError';
    this.code = code;
  }
}
