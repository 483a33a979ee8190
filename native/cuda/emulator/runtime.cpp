#include "cuda/emulator/runtime.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cuda/emulator/device_state.h"
#include "cuda/emulator/tensor_core.h"

namespace duokv::simt {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;

size_t shared_memory_optin() { return architecture() == Architecture::kSm80 ? 163 * 1024 : 227 * 1024; }

bool is_pinned(const void* pointer, size_t bytes) {
  const auto& pinned = device().pinned;
  auto next = pinned.upper_bound(const_cast<char*>(static_cast<const char*>(pointer)));
  if (next == pinned.begin()) return false;
  --next;
  return static_cast<const char*>(pointer) + bytes <= next->first + next->second;
}

Fault copy_bytes(char* destination, const char* source, size_t bytes, cudaMemcpyKind kind) {
  DeviceMemory& memory = device_memory();
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  if (from_device && !memory.owns(source, bytes))
    return {FaultCode::kIllegalAddress, "copy from memory " + memory.describe(source)};
  if (to_device && !memory.owns(destination, bytes))
    return {FaultCode::kIllegalAddress, "copy to memory " + memory.describe(destination)};
  if (kind == cudaMemcpyDeviceToHost && stores_are_tracked) {
    const size_t bad = memory.region.first_below(source, bytes, ByteState::kInitialised);
    if (bad < bytes)
      return {FaultCode::kLaunchFailure,
              "copy to the host of bytes nobody wrote, " + memory.describe(source + bad)};
  }
  if (kind == cudaMemcpyHostToDevice) memory.region.mark(destination, bytes, ByteState::kInitialised);
  if (kind == cudaMemcpyDeviceToDevice) {
    for (size_t i = 0; i < bytes; ++i)
      memory.region.mark(destination + i, 1, memory.region.state(source + i));
  }
  raw_copy(destination, source, bytes);
  return {};
}

}  // namespace

Device& device(int ordinal) {
  static const auto devices = [] {
    std::vector<std::unique_ptr<Device>> all;
    for (int i = 0; i < device_count(); ++i) all.push_back(std::make_unique<Device>(i));
    return all;
  }();
  return *devices[static_cast<size_t>(ordinal)];
}

Device& device() { return device(current_device); }

DeviceMemory& device_memory() { return device().memory; }

cudaError_t fail(cudaError_t error, const std::string& why) {
  std::fprintf(stderr, "simt: %s: %s\n", cudaGetErrorName(error), why.c_str());
  return last_error = error;
}

void record_fault(const Fault& fault) {
  std::fprintf(stderr, "simt: %s\n", fault.message.c_str());
  Device& d = device();
  if (d.fault.code == FaultCode::kNone) d.fault = fault;
  for (CUstream_st* stream : d.streams) stream->queue.clear();
}

cudaError_t check_context() {
  const FaultCode code = device().fault.code;
  return code == FaultCode::kNone ? cudaSuccess : last_error = static_cast<cudaError_t>(code);
}

cudaError_t check_no_capture(const char* call) {
  if (const cudaError_t error = check_context(); error != cudaSuccess) return error;
  cudaError_t result = cudaSuccess;
  for (const auto& capture : device().captures) {
    const bool concerned =
        capture->mode == cudaStreamCaptureModeGlobal ||
        (capture->mode == cudaStreamCaptureModeThreadLocal && capture->thread == std::this_thread::get_id());
    if (!concerned) continue;
    result = invalidate(*capture, cudaErrorStreamCaptureUnsupported,
                        std::string(call) + " while a stream is being captured");
  }
  return result;
}

cudaError_t check_stream(cudaStream_t stream, const char* call) {
  if (const cudaError_t error = check_context(); error != cudaSuccess) return error;
  if (stream && !device().streams.contains(stream))
    return fail(cudaErrorInvalidResourceHandle, std::string(call) + ": no such stream");
  if (stream) return cudaSuccess;
  cudaError_t result = cudaSuccess;
  for (const auto& capture : device().captures)
    result = invalidate(*capture, cudaErrorStreamCaptureImplicit,
                        std::string(call) + " on the legacy stream during a capture");
  return result;
}

cudaError_t set_function_attribute(const void* function, cudaFuncAttribute attribute, int value) {
  const std::lock_guard lock(device().mutex);
  if (const cudaError_t error = check_context(); error != cudaSuccess) return error;
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize)
    return fail(cudaErrorInvalidValue, "unknown function attribute");
  if (value < 0 || static_cast<size_t>(value) > shared_memory_optin()) {
    return fail(cudaErrorInvalidValue, "dynamic shared memory of " + std::to_string(value) +
                                           " bytes: the limit is " + std::to_string(shared_memory_optin()));
  }
  device().dynamic_shared_limits[function] = value;
  return cudaSuccess;
}

cudaError_t enqueue_kernel(const void* function, const char* name, dim3 grid, dim3 block,
                           size_t dynamic_shared, cudaStream_t stream, void (*invoke)(void*),
                           const void* packed, size_t packed_bytes) {
  const std::lock_guard lock(device().mutex);
  if (const cudaError_t error = check_stream(stream, name); error != cudaSuccess) return error;
  const std::string kernel(name);
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > kMaxThreads || block.z > 64)
    return fail(cudaErrorInvalidConfiguration,
                kernel + ": " + std::to_string(threads) + " threads in a block, expected 1 to 1024");
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7FFFFFFF || grid.y > 65535 || grid.z > 65535)
    return fail(cudaErrorInvalidConfiguration, kernel + ": grid " + std::to_string(grid.x) + " x " +
                                                   std::to_string(grid.y) + " x " + std::to_string(grid.z) +
                                                   " is out of range");
  if (packed_bytes > 4096) return fail(cudaErrorInvalidValue, kernel + ": more than 4 KiB of parameters");
  const auto raised = device().dynamic_shared_limits.find(function);
  const size_t limit = raised == device().dynamic_shared_limits.end()
                           ? kStaticSharedLimit
                           : std::max<size_t>(kStaticSharedLimit, static_cast<size_t>(raised->second));
  if (dynamic_shared > limit) {
    return fail(cudaErrorInvalidValue, kernel + ": " + std::to_string(dynamic_shared) +
                                           " bytes of dynamic shared memory, the limit is " +
                                           std::to_string(limit) +
                                           " (cudaFuncAttributeMaxDynamicSharedMemorySize raises it)");
  }
  const size_t shared_limit = limit > kStaticSharedLimit ? shared_memory_optin() : kStaticSharedLimit;
  std::vector<unsigned char> parameters(packed_bytes);
  std::memcpy(parameters.data(), packed, packed_bytes);
  const auto run = [=, parameters = std::move(parameters)]() mutable {
    return run_kernel(
        {name, grid, block, dynamic_shared, shared_limit, invoke, parameters.data(), packed_bytes});
  };
  return submit(stream, {OperationKind::kKernel, function, cudaMemcpyDefault, run});
}

void reset_device() {
  const std::lock_guard lock(Device::mutex);
  for (int i = 0; i < device_count(); ++i) {
    Device& d = device(i);
    for (CUstream_st* stream : d.streams) {
      stream->queue.clear();
      stream->capture = nullptr;
    }
    d.captures.clear();
    d.fault = {};
    d.memory.reset();
  }
  last_error = cudaSuccess;
  current_device = 0;
}

const char* last_report() { return device().fault.message.c_str(); }
void set_device_memory(size_t bytes) { device_memory().capacity = bytes; }

}  // namespace duokv::simt

using namespace duokv::simt;

// ---------------------------------------------------------------- device and errors

cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return cudaSuccess;
}
static cudaError_t check_device(int index) {
  if (index >= 0 && index < device_count()) return cudaSuccess;
  return fail(cudaErrorInvalidDevice,
              "device " + std::to_string(index) + " of " + std::to_string(device_count()) + " emulated ones");
}
cudaError_t cudaSetDevice(int index) {
  const cudaError_t error = check_device(index);
  if (error == cudaSuccess) current_device = index;
  return error;
}
cudaError_t cudaGetDevice(int* index) {
  *index = current_device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int index) {
  if (const cudaError_t error = check_device(index); error != cudaSuccess) return error;
  const bool sm80 = architecture() == Architecture::kSm80;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = kMaxThreads;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = kStaticSharedLimit;
      break;
    case cudaDevAttrWarpSize:
      *value = kWarpSize;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = sm80 ? 108 : 132;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = sm80 ? 8 : 9;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(shared_memory_optin());
      break;
  }
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int index) {
  if (const cudaError_t error = check_device(index); error != cudaSuccess) return error;
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "SIMT emulator");
  properties->totalGlobalMem = device(index).memory.capacity;
  cudaDeviceGetAttribute(&properties->major, cudaDevAttrComputeCapabilityMajor, index);
  cudaDeviceGetAttribute(&properties->minor, cudaDevAttrComputeCapabilityMinor, index);
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 0;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = device().fault.code == FaultCode::kNone ? cudaSuccess : error;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }

const char* cudaGetErrorName(cudaError_t error) {
#define DUOKV_ERROR_NAME(name) \
  case name:                   \
    return #name;
  switch (error) {
    DUOKV_ERROR_NAME(cudaSuccess)
    DUOKV_ERROR_NAME(cudaErrorInvalidValue)
    DUOKV_ERROR_NAME(cudaErrorMemoryAllocation)
    DUOKV_ERROR_NAME(cudaErrorInvalidConfiguration)
    DUOKV_ERROR_NAME(cudaErrorInvalidMemcpyDirection)
    DUOKV_ERROR_NAME(cudaErrorInsufficientDriver)
    DUOKV_ERROR_NAME(cudaErrorNoDevice)
    DUOKV_ERROR_NAME(cudaErrorInvalidDevice)
    DUOKV_ERROR_NAME(cudaErrorInvalidResourceHandle)
    DUOKV_ERROR_NAME(cudaErrorIllegalState)
    DUOKV_ERROR_NAME(cudaErrorNotReady)
    DUOKV_ERROR_NAME(cudaErrorIllegalAddress)
    DUOKV_ERROR_NAME(cudaErrorMisalignedAddress)
    DUOKV_ERROR_NAME(cudaErrorLaunchFailure)
    DUOKV_ERROR_NAME(cudaErrorStreamCaptureUnsupported)
    DUOKV_ERROR_NAME(cudaErrorStreamCaptureInvalidated)
    DUOKV_ERROR_NAME(cudaErrorStreamCaptureMerge)
    DUOKV_ERROR_NAME(cudaErrorStreamCaptureUnmatched)
    DUOKV_ERROR_NAME(cudaErrorStreamCaptureUnjoined)
    DUOKV_ERROR_NAME(cudaErrorStreamCaptureImplicit)
    DUOKV_ERROR_NAME(cudaErrorCapturedEvent)
    DUOKV_ERROR_NAME(cudaErrorGraphExecUpdateFailure)
  }
#undef DUOKV_ERROR_NAME
  return "cudaErrorUnknown";
}

const char* cudaGetErrorString(cudaError_t error) {
  const bool sticky =
      error != cudaSuccess && static_cast<int>(error) == static_cast<int>(device().fault.code);
  return sticky ? last_report() : cudaGetErrorName(error);
}

// ---------------------------------------------------------------- memory

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  const std::lock_guard lock(device().mutex);
  if (const cudaError_t error = check_no_capture("cudaMalloc"); error != cudaSuccess) return error;
  *memory = nullptr;
  if (bytes == 0) return cudaSuccess;
  *memory = device_memory().allocate(bytes);
  return *memory ? cudaSuccess
                 : fail(cudaErrorMemoryAllocation, "cudaMalloc of " + std::to_string(bytes) + " bytes");
}

cudaError_t cudaFree(void* memory) {
  const std::lock_guard lock(device().mutex);
  if (!memory) return check_context();
  if (const cudaError_t error = cudaDeviceSynchronize(); error != cudaSuccess) return error;
  const std::string report = device_memory().release(memory);
  return report.empty() ? cudaSuccess : fail(cudaErrorInvalidValue, "cudaFree: " + report);
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const std::lock_guard lock(device().mutex);
  *total = device_memory().capacity;
  *free = *total - device_memory().live();
  return check_context();
}

cudaError_t cudaMallocHost(void** memory, size_t bytes) {
  const std::lock_guard lock(device().mutex);
  if (const cudaError_t error = check_no_capture("cudaMallocHost"); error != cudaSuccess) return error;
  *memory = std::malloc(bytes ? bytes : 1);
  if (!*memory)
    return fail(cudaErrorMemoryAllocation, "cudaMallocHost of " + std::to_string(bytes) + " bytes");
  device().pinned[static_cast<char*>(*memory)] = bytes;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* memory) {
  const std::lock_guard lock(device().mutex);
  if (memory && device().pinned.erase(static_cast<char*>(memory)) == 0)
    return fail(cudaErrorInvalidValue, "cudaFreeHost: not from cudaMallocHost");
  std::free(memory);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* destination, const void* source, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  const std::lock_guard lock(device().mutex);
  if (const cudaError_t error = check_stream(stream, "cudaMemcpyAsync"); error != cudaSuccess) return error;
  if (bytes == 0) return cudaSuccess;
  const bool to_device = device_memory().region.contains(destination),
             from_device = device_memory().region.contains(source);
  const cudaMemcpyKind actual = static_cast<cudaMemcpyKind>((from_device ? 2 : 0) + (to_device ? 1 : 0));
  if (kind != cudaMemcpyDefault && kind != actual)
    return fail(cudaErrorInvalidMemcpyDirection, "cudaMemcpyAsync: a pointer is on the other side");
  auto* to = static_cast<char*>(destination);
  const auto* from = static_cast<const char*>(source);
  const void* host = to_device ? source : destination;
  const bool pageable = actual != cudaMemcpyDeviceToDevice && !is_pinned(host, bytes);
  if (pageable && stream && stream->capture) {
    return invalidate(
        *stream->capture, cudaErrorStreamCaptureUnsupported,
        "cudaMemcpyAsync of pageable memory in a capture: it would be read or written at every replay");
  }
  if (pageable && actual == cudaMemcpyHostToDevice) {  // staged before the call returns
    return submit(stream,
                  {OperationKind::kCopy, nullptr, actual, [to, staged = std::string(from, bytes), actual] {
                     return copy_bytes(to, staged.data(), staged.size(), actual);
                   }});
  }
  const cudaError_t error = submit(
      stream, {OperationKind::kCopy, nullptr, actual, [=] { return copy_bytes(to, from, bytes, actual); }});
  return error == cudaSuccess && pageable ? cudaStreamSynchronize(stream) : error;
}

cudaError_t cudaMemcpy(void* destination, const void* source, size_t bytes, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(destination, source, bytes, kind, nullptr);
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  const std::lock_guard lock(device().mutex);
  if (const cudaError_t error = check_stream(stream, "cudaMemsetAsync"); error != cudaSuccess) return error;
  if (bytes == 0) return cudaSuccess;
  if (!device_memory().region.contains(memory))
    return fail(cudaErrorInvalidValue, "cudaMemsetAsync: not device memory");
  return submit(stream, {OperationKind::kFill, nullptr, cudaMemcpyDefault, [=]() -> Fault {
                           DeviceMemory& d = device_memory();
                           if (!d.owns(memory, bytes))
                             return {FaultCode::kIllegalAddress, "fill of memory " + d.describe(memory)};
                           d.region.mark(memory, bytes, ByteState::kInitialised);
                           raw_fill(memory, static_cast<unsigned char>(value), bytes);
                           return {};
                         }});
}

cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
  return cudaMemsetAsync(memory, value, bytes, nullptr);
}
