#include <algorithm>
#include <bit>
#include <string>
#include <type_traits>

#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/product.h"

namespace duokv::cuda {
namespace {

// What NVIDIA recommends for Hopper; less elsewhere.
constexpr size_t kWorkspaceBytes = size_t{32} << 20;
constexpr int kCandidates = 32;
constexpr int64_t kMostReferenceRows = 1 << 15;

cudaDataType_t data_type(ops::DType type) { return type == ops::DType::F32 ? CUDA_R_32F : CUDA_R_16BF; }
int64_t element_bytes(ops::DType type) { return type == ops::DType::F32 ? 4 : 2; }

// The alignment that an algorithm may rely on in every row of a matrix: 16 bytes, or an element's.
uint32_t alignment(const void* matrix, int64_t row, ops::DType type) {
  const int64_t bytes = element_bytes(type);
  return reinterpret_cast<uintptr_t>(matrix) % 16 == 0 && row * bytes % 16 == 0
             ? 16
             : static_cast<uint32_t>(bytes);
}

// Descriptors of the library's that free themselves.
template <class T>
using Owned = std::unique_ptr<std::remove_pointer_t<T>, cublasStatus_t (*)(T)>;

struct Layouts {
  Owned<cublasLtMatrixLayout_t> a, b, c;
};

// Row-major matrices are their transposes in cuBLASLt's column-major eyes, so c' [columns, rows] = b' · a'.
Layouts layouts(const CublasLt& library, const Product& p, int64_t rows) {
  const auto make = [&](ops::DType type, int64_t contiguous, int64_t lines) {
    cublasLtMatrixLayout_t layout = nullptr;
    library.check(
        library.cublasLtMatrixLayoutCreate(&layout, data_type(type), static_cast<uint64_t>(contiguous),
                                           static_cast<uint64_t>(lines), contiguous),
        "a matrix of a product");
    return Owned<cublasLtMatrixLayout_t>(layout, library.cublasLtMatrixLayoutDestroy);
  };
  return {make(p.operands, p.b_transposed ? p.depth : p.columns, p.b_transposed ? p.columns : p.depth),
          make(p.operands, p.a_transposed ? rows : p.depth, p.a_transposed ? p.depth : rows),
          make(p.result, p.columns, rows)};
}

}  // namespace

struct Products::Algorithm {
  Owned<cublasLtMatmulDesc_t> operation;
  cublasLtMatmulAlgo_t algorithm;
};

Products::Products(Memory& memory) : memory_(memory) {
  library_.check(library_.cublasLtCreate(&handle_), "cublasLtCreate");
  try {
    workspace_ = memory_.allocate(kWorkspaceBytes, "workspace of products");
  } catch (...) {
    library_.cublasLtDestroy(handle_);
    throw;
  }
}

Products::~Products() {
  memory_.release(workspace_);
  algorithms_.clear();
  library_.cublasLtDestroy(handle_);
}

const Products::Algorithm& Products::choose(const Product& p) {
  const uint32_t aligned[] = {alignment(p.b, p.b_transposed ? p.depth : p.columns, p.operands),
                              alignment(p.a, p.a_transposed ? p.rows : p.depth, p.operands),
                              alignment(p.c, p.columns, p.result)};
  const Key key = {p.columns,
                   p.depth,
                   p.reference_rows,
                   p.a_transposed + 2 * p.b_transposed + 4 * p.may_split_depth,
                   static_cast<int64_t>(p.operands),
                   static_cast<int64_t>(p.result),
                   aligned[0],
                   aligned[1],
                   aligned[2]};
  if (const auto found = algorithms_.find(key); found != algorithms_.end()) return *found->second;

  cublasLtMatmulDesc_t operation = nullptr;
  library_.check(library_.cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F),
                 "cublasLtMatmulDescCreate");
  auto chosen = std::make_unique<Algorithm>(Algorithm{{operation, library_.cublasLtMatmulDescDestroy}, {}});
  const cublasOperation_t transpose_a = p.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
                          transpose_b = p.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  const auto describe = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    library_.check(library_.cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof value),
                   "cublasLtMatmulDescSetAttribute");
  };
  describe(CUBLASLT_MATMUL_DESC_TRANSA, transpose_a);
  describe(CUBLASLT_MATMUL_DESC_TRANSB, transpose_b);

  cublasLtMatmulPreference_t raw_preference = nullptr;
  library_.check(library_.cublasLtMatmulPreferenceCreate(&raw_preference), "cublasLtMatmulPreferenceCreate");
  const Owned<cublasLtMatmulPreference_t> preference(raw_preference,
                                                     library_.cublasLtMatmulPreferenceDestroy);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    library_.check(
        library_.cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof value),
        "cublasLtMatmulPreferenceSetAttribute");
  };
  // Parts summed in a step of their own; in place, the order would be the scheduler's to keep.
  const uint32_t reductions =
      p.may_split_depth ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE
                        : CUBLASLT_REDUCTION_SCHEME_NONE;
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{kWorkspaceBytes});
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, aligned[0]);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, aligned[1]);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, aligned[2]);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, aligned[2]);

  // The library's favourite for a few rows may serve those alone; one for more rows then serves these too.
  for (int64_t rows = p.reference_rows; rows <= std::max(kMostReferenceRows, p.reference_rows); rows *= 4) {
    const Layouts reference = layouts(library_, p, rows);
    cublasLtMatmulHeuristicResult_t results[kCandidates] = {};
    int found = 0;
    // It reports what it does not support as an error.
    if (library_.cublasLtMatmulAlgoGetHeuristic(handle_, operation, reference.a.get(), reference.b.get(),
                                                reference.c.get(), reference.c.get(), preference.get(),
                                                kCandidates, results, &found) != CUBLAS_STATUS_SUCCESS)
      continue;
    for (int i = 0; i < found; ++i) {
      if (results[i].state != CUBLAS_STATUS_SUCCESS) continue;
      if (!p.may_split_depth && !serves_any_height(p, operation, results[i].algo)) continue;
      chosen->algorithm = results[i].algo;
      return *(algorithms_[key] = std::move(chosen));
    }
    if (p.may_split_depth) break;  // its extents are fixed
  }
  throw std::runtime_error("cuBLASLt has no algorithm for a product of " + std::to_string(p.reference_rows) +
                           " x " + std::to_string(p.depth) + " by " + std::to_string(p.depth) + " x " +
                           std::to_string(p.columns));
}

// Whether the algorithm sums over the whole depth in one go and takes any number of rows.
bool Products::serves_any_height(const Product& p, cublasLtMatmulDesc_t operation,
                                 const cublasLtMatmulAlgo_t& algorithm) const {
  const auto attribute = [&](cublasLtMatmulAlgoConfigAttributes_t name) {
    uint32_t value = 0;
    size_t written = 0;
    library_.check(
        library_.cublasLtMatmulAlgoConfigGetAttribute(&algorithm, name, &value, sizeof value, &written),
        "cublasLtMatmulAlgoConfigGetAttribute");
    return value;
  };
  if (attribute(CUBLASLT_ALGO_CONFIG_SPLITK_NUM) > 1 ||
      attribute(CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) != CUBLASLT_REDUCTION_SCHEME_NONE)
    return false;
  const int64_t most = (int64_t{1} << 31) / std::max(p.columns, p.depth);  // elements of a matrix
  for (const int64_t rows : {int64_t{1}, p.reference_rows + 1, 8 * p.reference_rows}) {
    if (rows > std::max<int64_t>(most, 1)) continue;
    const Layouts tried = layouts(library_, p, rows);
    cublasLtMatmulHeuristicResult_t result = {};
    const cublasStatus_t status = library_.cublasLtMatmulAlgoCheck(
        handle_, operation, tried.a.get(), tried.b.get(), tried.c.get(), tried.c.get(), &algorithm, &result);
    if (status != CUBLAS_STATUS_SUCCESS || result.workspaceSize > kWorkspaceBytes) return false;
  }
  return true;
}

int64_t Products::workspace_bytes() { return kWorkspaceBytes; }

void Products::run(const Product& p, cudaStream_t stream) {
  if (only_plans(stream)) return;
  const Algorithm& chosen = choose(p);
  const Layouts matrices = layouts(library_, p, p.rows);
  const float alpha = 1, beta = p.accumulate ? 1.0f : 0.0f;
  library_.check(
      library_.cublasLtMatmul(handle_, chosen.operation.get(), &alpha, p.b, matrices.a.get(), p.a,
                              matrices.b.get(), &beta, p.c, matrices.c.get(), p.c, matrices.c.get(),
                              &chosen.algorithm, workspace_, kWorkspaceBytes, stream),
      "cublasLtMatmul");
}

int64_t reference_rows(int64_t rows) {
  constexpr int64_t kTile = 128;
  if (rows <= kTile)
    return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(rows, 16))));
  return std::min(kMostReferenceRows, ceil_div(rows, kTile) * kTile);
}

}  // namespace duokv::cuda
