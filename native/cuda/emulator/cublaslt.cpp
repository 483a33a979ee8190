#include "cuda/emulator/cublaslt.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "cuda/emulator/device_state.h"

struct cublasLtContext {};
struct cublasLtMatmulDescOpaque {
  cublasOperation_t transpose_a = CUBLAS_OP_N, transpose_b = CUBLAS_OP_N;
};
struct cublasLtMatrixLayoutOpaque {
  cudaDataType_t type;
  uint64_t rows, columns;  // column-major
  int64_t leading_dimension;
};
struct cublasLtMatmulPreferenceOpaque {
  uint64_t workspace_bytes = 0;
  uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
  uint32_t alignment[4] = {256, 256, 256, 256};
};

namespace duokv::simt {
namespace {

constexpr uint64_t kAlgorithmMark = 0x64756f6b76;  // an algorithm that nobody chose has another first word
constexpr uint64_t kParts = 4;

// data: mark, parts of the depth, alignment of each of A to D
cublasLtMatmulAlgo_t make_algorithm(uint64_t parts, const uint32_t (&alignment)[4]) {
  return {{kAlgorithmMark, parts, alignment[0], alignment[1], alignment[2], alignment[3], 0, 0}};
}

cublasStatus_t refuse(cublasStatus_t status, const std::string& why) {
  std::fprintf(stderr, "simt: cublasLt: %s\n", why.c_str());
  return status;
}

size_t element_bytes(cudaDataType_t type) { return type == CUDA_R_32F ? 4 : 2; }

size_t layout_bytes(const cublasLtMatrixLayoutOpaque& layout) {
  return ((layout.columns - 1) * static_cast<uint64_t>(layout.leading_dimension) + layout.rows) *
         element_bytes(layout.type);
}

struct Extents {
  uint64_t m, n, k;
};

// Extents of the product, or m = 0 where the layouts do not fit together.
Extents extents(const cublasLtMatmulDescOpaque& operation, const cublasLtMatrixLayoutOpaque& a,
                const cublasLtMatrixLayoutOpaque& b, const cublasLtMatrixLayoutOpaque& c,
                const cublasLtMatrixLayoutOpaque& d) {
  const bool ta = operation.transpose_a == CUBLAS_OP_T, tb = operation.transpose_b == CUBLAS_OP_T;
  const Extents e = {ta ? a.columns : a.rows, tb ? b.rows : b.columns, ta ? a.rows : a.columns};
  const bool fits = (tb ? b.columns : b.rows) == e.k && d.rows == e.m && d.columns == e.n && c.rows == e.m &&
                    c.columns == e.n && a.type == b.type && c.type == d.type &&
                    (a.type == CUDA_R_16BF || d.type == CUDA_R_32F);
  return fits ? e : Extents{0, 0, 0};
}

size_t workspace_of(uint64_t parts, const Extents& e) { return parts > 1 ? parts * e.m * e.n * 4 : 0; }

float load(const void* matrix, cudaDataType_t type, uint64_t index) {
  if (type == CUDA_R_32F) return static_cast<const float*>(matrix)[index];
  return __bfloat162float(static_cast<const __nv_bfloat16*>(matrix)[index]);
}

// op(matrix) as vectors of the depth: [vectors, depth].
std::vector<float> gather(const void* matrix, const cublasLtMatrixLayoutOpaque& layout, bool depth_contiguous,
                          uint64_t vectors, uint64_t depth) {
  std::vector<float> values(vectors * depth);
  const auto ld = static_cast<uint64_t>(layout.leading_dimension);
  for (uint64_t v = 0; v < vectors; ++v) {
    for (uint64_t k = 0; k < depth; ++k)
      values[v * depth + k] = load(matrix, layout.type, depth_contiguous ? v * ld + k : k * ld + v);
  }
  return values;
}

// Every `column` of `layout` lies in live device memory, and was written where it is to be read.
std::string check_matrix(const char* name, const void* matrix, const cublasLtMatrixLayoutOpaque& layout,
                         bool read) {
  DeviceMemory& memory = device_memory();
  if (!memory.owns(matrix, layout_bytes(layout)))
    return std::string("cublasLtMatmul: ") + name + " leaves its allocation: it begins " +
           memory.describe(matrix);
  if (!read || !stores_are_tracked) return "";
  const size_t column_bytes = layout.rows * element_bytes(layout.type);
  for (uint64_t column = 0; column < layout.columns; ++column) {
    const char* begin = static_cast<const char*>(matrix) +
                        column * static_cast<uint64_t>(layout.leading_dimension) * element_bytes(layout.type);
    const size_t bad = memory.region.first_below(begin, column_bytes, ByteState::kInitialised);
    if (bad < column_bytes)
      return std::string("cublasLtMatmul reads bytes of ") + name + " that nobody wrote, " +
             memory.describe(begin + bad);
  }
  return "";
}

struct Call {
  cublasLtMatmulDescOpaque operation;
  cublasLtMatrixLayoutOpaque a_layout, b_layout, d_layout;
  Extents e;
  uint64_t parts;
  float alpha, beta;
  const void *a, *b;
  void* d;

  Fault run() const {
    for (const std::string& problem :
         {check_matrix("A", a, a_layout, true), check_matrix("B", b, b_layout, true),
          check_matrix("C", d, d_layout, beta != 0)}) {
      if (!problem.empty()) return {FaultCode::kIllegalAddress, problem};
    }
    const std::vector<float> left = gather(a, a_layout, operation.transpose_a == CUBLAS_OP_T, e.m, e.k);
    const std::vector<float> right = gather(b, b_layout, operation.transpose_b == CUBLAS_OP_N, e.n, e.k);
    const uint64_t part = (e.k + parts - 1) / parts;
    for (uint64_t j = 0; j < e.n; ++j) {
      for (uint64_t i = 0; i < e.m; ++i) {
        float sum = 0;
        for (uint64_t begin = 0; begin < e.k; begin += part)
          sum += dot(&left[i * e.k], &right[j * e.k], begin, std::min(e.k, begin + part));
        store(i, j, alpha * sum);
      }
      device_memory().region.mark(element(0, j), e.m * element_bytes(d_layout.type), ByteState::kInitialised);
    }
    return {};
  }

 private:
  // Eight running sums, which the compiler can keep in a vector.
  static float dot(const float* x, const float* y, uint64_t begin, uint64_t end) {
    float sums[8] = {};
    uint64_t k = begin;
    for (; k + 8 <= end; k += 8) {
      for (int lane = 0; lane < 8; ++lane) sums[lane] += x[k + lane] * y[k + lane];
    }
    for (; k < end; ++k) sums[0] += x[k] * y[k];
    float sum = 0;
    for (const float lane : sums) sum += lane;
    return sum;
  }
  char* element(uint64_t i, uint64_t j) const {
    return static_cast<char*>(d) +
           (j * static_cast<uint64_t>(d_layout.leading_dimension) + i) * element_bytes(d_layout.type);
  }
  void store(uint64_t i, uint64_t j, float value) const {
    char* to = element(i, j);
    if (beta != 0) value += beta * load(to, d_layout.type, 0);
    if (d_layout.type == CUDA_R_32F) {
      raw_copy(to, &value, sizeof value);
    } else {
      const __nv_bfloat16 rounded = __float2bfloat16_rn(value);
      raw_copy(to, &rounded, sizeof rounded);
    }
  }
};

template <class T>
cublasStatus_t get(const void* value, size_t bytes, T& field) {
  if (!value || bytes != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&field, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

void* cublaslt_symbol(const char* name) {
#define DUOKV_SYMBOL(function) \
  if (std::string_view(name) == #function) return reinterpret_cast<void*>(&function);
  DUOKV_SYMBOL(cublasLtCreate)
  DUOKV_SYMBOL(cublasLtDestroy)
  DUOKV_SYMBOL(cublasLtGetVersion)
  DUOKV_SYMBOL(cublasLtGetStatusString)
  DUOKV_SYMBOL(cublasLtMatmulDescCreate)
  DUOKV_SYMBOL(cublasLtMatmulDescDestroy)
  DUOKV_SYMBOL(cublasLtMatmulDescSetAttribute)
  DUOKV_SYMBOL(cublasLtMatrixLayoutCreate)
  DUOKV_SYMBOL(cublasLtMatrixLayoutDestroy)
  DUOKV_SYMBOL(cublasLtMatmulPreferenceCreate)
  DUOKV_SYMBOL(cublasLtMatmulPreferenceDestroy)
  DUOKV_SYMBOL(cublasLtMatmulPreferenceSetAttribute)
  DUOKV_SYMBOL(cublasLtMatmulAlgoGetHeuristic)
  DUOKV_SYMBOL(cublasLtMatmulAlgoConfigGetAttribute)
  DUOKV_SYMBOL(cublasLtMatmulAlgoCheck)
  DUOKV_SYMBOL(cublasLtMatmul)
#undef DUOKV_SYMBOL
  return nullptr;
}

}  // namespace duokv::simt

using namespace duokv::simt;

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = new cublasLtContext;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}
size_t cublasLtGetVersion() { return 0; }
const char* cublasLtGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED:
      return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
  }
  return "unknown";
}

// ---------------------------------------------------------------- descriptors

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* descriptor, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  if (compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
  *descriptor = new cublasLtMatmulDescOpaque;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t descriptor) {
  delete descriptor;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t descriptor,
                                              cublasLtMatmulDescAttributes_t attribute, const void* value,
                                              size_t bytes) {
  return get(value, bytes,
             attribute == CUBLASLT_MATMUL_DESC_TRANSA ? descriptor->transpose_a : descriptor->transpose_b);
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType_t type, uint64_t rows,
                                          uint64_t columns, int64_t leading_dimension) {
  if (rows == 0 || columns == 0 || leading_dimension < static_cast<int64_t>(rows))
    return refuse(CUBLAS_STATUS_INVALID_VALUE, "a matrix of " + std::to_string(rows) + " x " +
                                                   std::to_string(columns) + " with leading dimension " +
                                                   std::to_string(leading_dimension));
  *layout = new cublasLtMatrixLayoutOpaque{type, rows, columns, leading_dimension};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = new cublasLtMatmulPreferenceOpaque;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t bytes) {
  if (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES)
    return get(value, bytes, preference->workspace_bytes);
  if (attribute == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK)
    return get(value, bytes, preference->reductions);
  return get(value, bytes, preference->alignment[attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES]);
}

// ---------------------------------------------------------------- algorithms and the product

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t descriptor,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t results[], int* found) {
  *found = 0;
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  const Extents e = extents(*descriptor, *a, *b, *c, *d);
  if (e.m == 0 || requested < 1)
    return refuse(CUBLAS_STATUS_INVALID_VALUE, "the matrices of a product do not fit together");
  for (const uint64_t parts : {kParts, uint64_t{1}}) {
    const size_t workspace = workspace_of(parts, e);
    if (parts > 1 && !(preference->reductions & CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)) continue;
    if (workspace > preference->workspace_bytes || *found == requested) continue;
    results[(*found)++] = {
        make_algorithm(parts, preference->alignment), workspace, CUBLAS_STATUS_SUCCESS, 1, {}};
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algorithm,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute,
                                                    void* value, size_t bytes, size_t* written) {
  const uint64_t parts = algorithm->data[1];
  uint32_t field = static_cast<uint32_t>(parts);
  if (attribute == CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME)
    field = parts > 1 ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : CUBLASLT_REDUCTION_SCHEME_NONE;
  if (bytes != sizeof field) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(value, &field, bytes);
  *written = bytes;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t descriptor,
                                       cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t* algorithm,
                                       cublasLtMatmulHeuristicResult_t* result) {
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  const Extents e = extents(*descriptor, *a, *b, *c, *d);
  if (e.m == 0 || !algorithm || algorithm->data[0] != kAlgorithmMark)
    return refuse(CUBLAS_STATUS_INVALID_VALUE,
                  "a product without an algorithm, or of matrices that do not fit");
  result->workspaceSize = workspace_of(algorithm->data[1], e);
  result->state = CUBLAS_STATUS_SUCCESS;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t descriptor, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t c_layout, void* d, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t* algorithm, void* workspace, size_t workspace_bytes,
                              cudaStream_t stream) {
  const std::lock_guard lock(device().mutex);
  if (!a || !b || !d || c != d) return refuse(CUBLAS_STATUS_INVALID_VALUE, "a null matrix, or C is not D");
  cublasLtMatmulHeuristicResult_t needs;
  if (const cublasStatus_t status = cublasLtMatmulAlgoCheck(handle, descriptor, a_layout, b_layout, c_layout,
                                                            d_layout, algorithm, &needs);
      status != CUBLAS_STATUS_SUCCESS)
    return status;
  const void* matrices[] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) {
    if (reinterpret_cast<uintptr_t>(matrices[i]) % algorithm->data[2 + i] != 0)
      return refuse(CUBLAS_STATUS_INVALID_VALUE, std::string("matrix ") + "ABCD"[i] + " is not aligned to " +
                                                     std::to_string(algorithm->data[2 + i]) +
                                                     " bytes, as its algorithm needs");
  }
  if (needs.workspaceSize > workspace_bytes ||
      (workspace_bytes > 0 && !device_memory().owns(workspace, workspace_bytes)))
    return refuse(CUBLAS_STATUS_INVALID_VALUE, "a workspace of " + std::to_string(workspace_bytes) +
                                                   " bytes where " + std::to_string(needs.workspaceSize) +
                                                   " are needed");
  const Call call = {*descriptor,
                     *a_layout,
                     *b_layout,
                     *d_layout,
                     extents(*descriptor, *a_layout, *b_layout, *c_layout, *d_layout),
                     algorithm->data[1],
                     *static_cast<const float*>(alpha),
                     *static_cast<const float*>(beta),
                     a,
                     b,
                     d};
  const cudaError_t error =
      submit(stream, {OperationKind::kKernel, reinterpret_cast<const void*>(&cublasLtMatmul),
                      cudaMemcpyDefault, [call] { return call.run(); }});
  return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}
