// Stands in for the CUDA runtime under launchers: a launch prints a line with the kernel's mangled name,
// threads a block and bytes of dynamic shared memory, and nothing else happens. A program linked with it
// needs no GPU.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

namespace {

std::map<const void*, std::string>& kernels() {
  static std::map<const void*, std::string> names;
  return names;
}

[[noreturn]] void unexpected(const char* call) {
  std::fprintf(stderr, "a launcher called %s, which this runtime lacks\n", call);
  std::exit(1);
}

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {
  kernels()[host] = name;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void**) {
  const dim3 block = config->blockDim;
  std::printf("%s %u %zu\n", kernels().at(kernel).c_str(), block.x * block.y * block.z,
              config->dynamicSmemBytes);
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
// Of an H100.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute != cudaDevAttrMultiProcessorCount) unexpected("cudaDeviceGetAttribute");
  *value = 132;
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t) { return cudaSuccess; }

// What nvcc's stubs of the kernels call, which are registered and never run.
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  unexpected("cudaLaunchKernel");
}
cudaError_t __cudaGetKernel(void*, const void*) { unexpected("__cudaGetKernel"); }
cudaError_t __cudaLaunchKernel(void*, dim3, dim3, void**, size_t, cudaStream_t) {
  unexpected("__cudaLaunchKernel");
}
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) {
  unexpected("__cudaPopCallConfiguration");
}

}  // extern "C"
