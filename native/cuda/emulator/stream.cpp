// Streams and events: the queues, and the order in which they advance.
#include <algorithm>
#include <chrono>

#include "cuda/emulator/device_state.h"

namespace duokv::simt {
namespace {

bool runnable(const CUstream_st& stream) {
  if (stream.queue.empty()) return false;
  const CUstream_st::Item& head = stream.queue.front();
  if (head.ready && !head.ready()) return false;
  return !head.wait || head.wait->completed >= head.generation;
}

void run_head(CUstream_st& stream) {
  CUstream_st::Item item = std::move(stream.queue.front());
  stream.queue.pop_front();
  if (item.record) item.record->completed = std::max(item.record->completed, item.generation);
  if (!item.run) return;
  if (const Fault fault = item.run(); fault.code != FaultCode::kNone) record_fault(fault);
}

// Runs one unit of work of a random stream. False when nothing can run.
bool progress() {
  std::vector<CUstream_st*> ready;
  for (CUstream_st* stream : device().streams) {
    if (runnable(*stream)) ready.push_back(stream);
  }
  if (ready.empty()) return false;
  run_head(*ready[next_random() % ready.size()]);
  return true;
}

// Runs one unit of work, or waits a moment where all that is left waits for other processes. False when there
// is no work: an event is recorded before anything can wait for it, so nothing waits for anything else.
bool advance() {
  if (progress()) return true;
  const auto& streams = device().streams;
  if (std::all_of(streams.begin(), streams.end(), [](CUstream_st* s) { return s->queue.empty(); }))
    return false;
  std::this_thread::sleep_for(std::chrono::microseconds(50));
  return true;
}

void drain(const CUstream_st& stream) {
  while (!stream.queue.empty() && advance()) {
  }
}

void drain_blocking_streams() {
  for (CUstream_st* stream : std::vector<CUstream_st*>(device().streams.begin(), device().streams.end())) {
    if (stream->blocking) drain(*stream);
  }
}

}  // namespace

cudaError_t finish_synchronise() {
  if (device().fault.code == FaultCode::kNone) {
    if (const std::string report = device_memory().check_guards(); !report.empty())
      record_fault({FaultCode::kIllegalAddress, report});
  }
  return check_context();
}

cudaError_t enqueue(cudaStream_t stream, CUstream_st::Item item) {
  CUstream_st& s = stream ? *stream : device().legacy_stream;
  if (!stream) drain_blocking_streams();
  s.queue.push_back(std::move(item));
  if (!stream) {
    while (!s.queue.empty()) {
      if (runnable(s)) {
        run_head(s);
      } else if (!advance()) {
        break;
      }
    }
    return check_context();
  }
  // The device may be quick, or not.
  while (next_random() % 2 == 0 && progress()) {
  }
  return cudaSuccess;
}

cudaError_t submit(cudaStream_t stream, Operation operation) {
  if (stream && stream->capture) {
    if (stream->capture->invalidated)
      return fail(cudaErrorStreamCaptureInvalidated, "the capture was already invalidated");
    capture_operation(*stream, std::move(operation));
    return cudaSuccess;
  }
  CUstream_st::Item item;
  item.run = std::move(operation.run);
  return enqueue(stream, std::move(item));
}

}  // namespace duokv::simt

using namespace duokv::simt;

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  const std::lock_guard lock(device().mutex);
  if (const cudaError_t error = check_context(); error != cudaSuccess) return error;
  *stream = new CUstream_st;
  (*stream)->blocking = !(flags & cudaStreamNonBlocking);
  device().streams.insert(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const std::lock_guard lock(device().mutex);
  if (!stream || !device().streams.contains(stream))
    return fail(cudaErrorInvalidResourceHandle, "cudaStreamDestroy: no such stream");
  drain(*stream);
  device().streams.erase(stream);
  delete stream;
  return check_context();
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const std::lock_guard lock(device().mutex);
  if (const cudaError_t error = check_stream(stream, "cudaStreamSynchronize"); error != cudaSuccess)
    return error;
  if (stream && stream->capture)
    return invalidate(*stream->capture, cudaErrorStreamCaptureUnsupported,
                      "cudaStreamSynchronize of a stream that is being captured");
  stream ? drain(*stream) : drain_blocking_streams();
  return finish_synchronise();
}

cudaError_t cudaDeviceSynchronize() {
  const std::lock_guard lock(device().mutex);
  if (const cudaError_t error = check_no_capture("cudaDeviceSynchronize"); error != cudaSuccess) return error;
  while (advance()) {
  }
  return finish_synchronise();
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const std::lock_guard lock(device().mutex);
  if (const cudaError_t error = check_stream(stream, "cudaStreamQuery"); error != cudaSuccess) return error;
  if (stream && stream->capture)
    return invalidate(*stream->capture, cudaErrorStreamCaptureUnsupported,
                      "cudaStreamQuery of a stream that is being captured");
  progress();
  return stream && !stream->queue.empty() ? cudaErrorNotReady : check_context();
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  const std::lock_guard lock(device().mutex);
  if (const cudaError_t error = check_stream(stream, "cudaLaunchHostFunc"); error != cudaSuccess)
    return error;
  return submit(stream, {OperationKind::kHost, reinterpret_cast<const void*>(function), cudaMemcpyDefault,
                         [=]() -> Fault {
                           function(argument);
                           return {};
                         }});
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  const std::lock_guard lock(device().mutex);
  if (const cudaError_t error = check_context(); error != cudaSuccess) return error;
  const auto created = std::make_shared<CUevent_st>();
  *event = created.get();
  device().events[*event] = created;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const std::lock_guard lock(device().mutex);
  return device().events.erase(event)
             ? cudaSuccess
             : fail(cudaErrorInvalidResourceHandle, "cudaEventDestroy: no such event");
}

static cudaError_t check_event(cudaEvent_t event, const char* call) {
  if (!device().events.contains(event))
    return fail(cudaErrorInvalidResourceHandle, std::string(call) + ": no such event");
  return check_context();
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const std::lock_guard lock(device().mutex);
  if (const cudaError_t error = check_event(event, "cudaEventRecord"); error != cudaSuccess) return error;
  if (const cudaError_t error = check_stream(stream, "cudaEventRecord"); error != cudaSuccess) return error;
  event->capture = stream ? stream->capture : nullptr;
  if (event->capture) {
    event->captured_after = stream->tail;
    return cudaSuccess;
  }
  CUstream_st::Item item;
  item.record = device().events[event];
  item.generation = ++event->recorded;
  return enqueue(stream, std::move(item));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const std::lock_guard lock(device().mutex);
  if (const cudaError_t error = check_event(event, "cudaStreamWaitEvent"); error != cudaSuccess) return error;
  if (const cudaError_t error = check_stream(stream, "cudaStreamWaitEvent"); error != cudaSuccess)
    return error;
  if (event->capture) {  // the stream joins the capture
    if (!stream)
      return invalidate(*event->capture, cudaErrorStreamCaptureImplicit,
                        "the legacy stream waits for a captured event");
    if (stream->capture && stream->capture != event->capture)
      return invalidate(*stream->capture, cudaErrorStreamCaptureMerge, "an event of one capture in another");
    stream->capture = event->capture;
    std::set<size_t> merged(stream->tail.begin(), stream->tail.end());
    merged.insert(event->captured_after.begin(), event->captured_after.end());
    stream->tail.assign(merged.begin(), merged.end());
    return cudaSuccess;
  }
  if (stream && stream->capture)
    return invalidate(*stream->capture, cudaErrorStreamCaptureUnsupported,
                      "a captured stream waits for an event outside its capture");
  if (event->recorded == 0) return cudaSuccess;
  CUstream_st::Item item;
  item.wait = device().events[event];
  item.generation = event->recorded;
  return enqueue(stream, std::move(item));
}

static cudaError_t check_event_outside_capture(cudaEvent_t event, const char* call) {
  if (const cudaError_t error = check_event(event, call); error != cudaSuccess) return error;
  if (event->capture)
    return invalidate(*event->capture, cudaErrorCapturedEvent, std::string(call) + " of a captured event");
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const std::lock_guard lock(device().mutex);
  if (const cudaError_t error = check_event_outside_capture(event, "cudaEventSynchronize");
      error != cudaSuccess)
    return error;
  while (event->completed < event->recorded && advance()) {
  }
  return finish_synchronise();
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const std::lock_guard lock(device().mutex);
  if (const cudaError_t error = check_event_outside_capture(event, "cudaEventQuery"); error != cudaSuccess)
    return error;
  progress();
  return event->completed < event->recorded ? cudaErrorNotReady : check_context();
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  const std::lock_guard lock(device().mutex);
  for (const cudaEvent_t event : {start, end}) {
    if (const cudaError_t error = check_event_outside_capture(event, "cudaEventElapsedTime");
        error != cudaSuccess)
      return error;
    if (event->recorded == 0)
      return fail(cudaErrorInvalidResourceHandle, "cudaEventElapsedTime: the event was never recorded");
    if (event->completed < event->recorded) return cudaErrorNotReady;
  }
  *milliseconds = 0;
  return cudaSuccess;
}
