// Matrix products by cuBLASLt: which algorithm computes one, and the call.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "cuda/cublaslt.h"
#include "ops/ops.h"

namespace duokv::cuda {

class Memory;

// c [rows, columns] = a [rows, depth] · b [depth, columns], row-major, with FP32 sums. A transposed operand
// is stored with its extents swapped.
struct Product {
  int64_t rows, columns, depth;
  const void* a;
  bool a_transposed;
  const void* b;
  bool b_transposed;
  ops::DType operands;
  void* c;
  ops::DType result;
  bool accumulate;  // c += a · b
  // The algorithm is chosen for so many rows: where products of different heights choose the same number, a
  // row's bits depend on neither the height nor the row's place in it.
  int64_t reference_rows;
  // Whether the sum over depth may be cut into parts, whose number and order the algorithm fixes. Then the
  // bits depend on the choice of algorithm, so on all extents.
  bool may_split_depth;
};

class Products {
 public:
  // Opens cuBLASLt and allocates the workspace, which every product on the device's stream uses in turn.
  explicit Products(Memory& memory);
  ~Products();
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

  void run(const Product& product, cudaStream_t stream);
  static int64_t workspace_bytes();

 private:
  struct Algorithm;
  using Key = std::array<int64_t, 9>;
  const Algorithm& choose(const Product& product);
  bool serves_any_height(const Product& product, cublasLtMatmulDesc_t operation,
                         const cublasLtMatmulAlgo_t& algorithm) const;

  const CublasLt& library_ = CublasLt::get();
  cublasLtHandle_t handle_ = nullptr;
  Memory& memory_;
  void* workspace_ = nullptr;
  std::map<Key, std::unique_ptr<Algorithm>> algorithms_;
};

// Rows that a product's algorithm is chosen for, from how many there are: few distinct numbers, each close.
int64_t reference_rows(int64_t rows);

}  // namespace duokv::cuda
