// Products by cuBLASLt against FP64: operands, layouts, accumulation, and rows that do not depend on height.
#include <cmath>
#include <string>

#include "cuda/device.h"
#include "cuda/product.h"
#include "cuda/test/harness.h"

using namespace duokv;
using namespace duokv::cuda;
using namespace duokv::cuda::test;

namespace {

struct Shape {
  int64_t rows, columns, depth;
};

// Row-major values, in both types.
struct Operand {
  Operand(int64_t height, int64_t width, uint64_t stream, bool rounded)
      : values(normals(static_cast<size_t>(height * width), stream)),
        fp32(upload_values(rounded)),
        bf16s(bits) {}
  const std::vector<float>& upload_values(bool rounded) {
    for (float& value : values) {
      const bf16 half = __float2bfloat16_rn(value);
      if (rounded) value = __bfloat162float(half);
      bits.push_back(half);
    }
    return values;
  }
  std::vector<float> values;
  std::vector<bf16> bits;
  Array<float> fp32;
  Array<bf16> bf16s;
};

float to_float(float value) { return value; }
float to_float(bf16 value) { return __bfloat162float(value); }

template <class Result>
void check_product(ops::Device& device, const std::string& what, Shape shape, bool a_transposed,
                   bool b_transposed, ops::DType operands, bool accumulate, bool may_split_depth) {
  const auto [m, n, k] = shape;
  const bool rounded = operands == ops::DType::BF16;
  const Operand a(a_transposed ? k : m, a_transposed ? m : k, 1, rounded),
      b(b_transposed ? n : k, b_transposed ? k : n, 2, rounded);
  std::vector<Result> before;
  for (const float value : normals(static_cast<size_t>(m * n), 3)) {
    if constexpr (sizeof(Result) == 2) {
      before.push_back(__float2bfloat16_rn(value));
    } else {
      before.push_back(value);
    }
  }
  std::vector<double> reference(before.size());
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = accumulate ? to_float(before[static_cast<size_t>(i * n + j)]) : 0;
      for (int64_t x = 0; x < k; ++x)
        sum += double{a.values[static_cast<size_t>(a_transposed ? x * m + i : i * k + x)]} *
               b.values[static_cast<size_t>(b_transposed ? j * k + x : x * n + j)];
      reference[static_cast<size_t>(i * n + j)] = sum;
    }
  }
  const Array<Result> c(before);
  const void* a_data = rounded ? static_cast<const void*>(a.bf16s.data()) : a.fp32.data();
  const void* b_data = rounded ? static_cast<const void*>(b.bf16s.data()) : b.fp32.data();
  stream().synchronize();
  device.products.run({.rows = m,
                       .columns = n,
                       .depth = k,
                       .a = a_data,
                       .a_transposed = a_transposed,
                       .b = b_data,
                       .b_transposed = b_transposed,
                       .operands = operands,
                       .c = c.data(),
                       .result = sizeof(Result) == 2 ? ops::DType::BF16 : ops::DType::F32,
                       .accumulate = accumulate,
                       .reference_rows = may_split_depth ? m : reference_rows(m),
                       .may_split_depth = may_split_depth},
                      device.stream);
  cuda::test::check(cudaStreamSynchronize(device.stream), "product");
  std::vector<float> got;
  for (const Result value : c.get()) got.push_back(to_float(value));
  expect_relative(what, got, reference, sizeof(Result) == 2 ? 4e-3 : 1e-6);
}

}  // namespace

DUOKV_CASE(layouts_types_and_accumulation) {
  ops::Device device(0, false);
  for (const Shape shape : {Shape{1, 1, 1}, Shape{5, 7, 3}, Shape{33, 48, 64}, Shape{130, 17, 24}}) {
    for (const bool accumulate : {false, true}) {
      for (const ops::DType operands : {ops::DType::F32, ops::DType::BF16}) {
        const std::string what = std::to_string(shape.rows) + " x " + std::to_string(shape.columns) + " x " +
                                 std::to_string(shape.depth) +
                                 (operands == ops::DType::F32 ? " FP32" : " BF16") +
                                 (accumulate ? " accumulated" : "");
        check_product<float>(device, what + " forward", shape, false, true, operands, accumulate, false);
        check_product<float>(device, what + " dx", shape, false, false, operands, accumulate, false);
        check_product<float>(device, what + " dw", shape, true, false, operands, accumulate, true);
        if (operands == ops::DType::BF16)
          check_product<bf16>(device, what + " to BF16", shape, false, true, operands, accumulate, false);
      }
    }
  }
}

DUOKV_CASE(rows_do_not_depend_on_height_or_place) {
  constexpr int64_t kColumns = 96, kDepth = 160, kHeight = 70;
  const Operand x(kHeight, kDepth, 4, false), w(kColumns, kDepth, 5, false);
  const Array<float> y(kHeight * kColumns);
  stream().synchronize();
  ops::Device device(0, false);
  const auto run = [&](int64_t first, int64_t rows) {
    device.products.run({.rows = rows,
                         .columns = kColumns,
                         .depth = kDepth,
                         .a = x.fp32.data() + first * kDepth,
                         .a_transposed = false,
                         .b = w.fp32.data(),
                         .b_transposed = true,
                         .operands = ops::DType::F32,
                         .c = y.data() + first * kColumns,
                         .result = ops::DType::F32,
                         .accumulate = false,
                         .reference_rows = reference_rows(17),
                         .may_split_depth = false},
                        device.stream);
    cuda::test::check(cudaStreamSynchronize(device.stream), "product");
    return y.get();
  };
  const std::vector<float> all = run(0, kHeight);
  for (const auto& [first, rows] : {std::pair{0L, 1L}, {3L, 1L}, {5L, 17L}, {kHeight - 2, 2L}})
    expect_equal("rows " + std::to_string(first) + " and on", run(first, rows), all);
}

DUOKV_CASE(reference_rows_are_few_and_close) {
  expect(reference_rows(1) == 16 && reference_rows(16) == 16 && reference_rows(17) == 32, "small heights");
  expect(reference_rows(129) == 256 && reference_rows(1792) == 1792, "multiples of a tile");
  expect(reference_rows(int64_t{1} << 40) == 1 << 15, "the most");
}

DUOKV_MAIN
