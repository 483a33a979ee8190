#include "cpu/onednn_product.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <dnnl.hpp>
#include <string>

#include "ops/rounding.h"

namespace duokv::cpu {
namespace {

using dnnl::memory;

// Rows of one primitive. Fixed, so that results do not depend on the number of threads.
constexpr int64_t kBlockRows = 256;

const dnnl::engine& engine() {
  static const dnnl::engine cpu(dnnl::engine::kind::cpu, 0);
  return cpu;
}

// oneDNN's own OpenMP threads would compete with the pool's. The setting belongs to the calling thread.
void use_one_openmp_thread() {
  thread_local const bool done = (omp_set_num_threads(1), true);
  static_cast<void>(done);
}

memory::desc describe(const OneDnnMatrix& matrix, int64_t rows, int64_t columns, memory::data_type type) {
  const memory::dims strides =
      matrix.transposed ? memory::dims{1, matrix.stride} : memory::dims{matrix.stride, 1};
  return memory::desc({rows, columns}, type, strides);
}

// The primitive for `rows` rows of a product.
dnnl::matmul::primitive_desc plan(const OneDnnProduct& p, int64_t rows) {
  use_one_openmp_thread();
  const auto type = p.operands == ops::DType::BF16 ? memory::data_type::bf16 : memory::data_type::f32;
  const memory::desc a = describe(p.a, rows, p.k, type), b = describe(p.b, p.k, p.n, type);
  const memory::desc c({rows, p.n}, memory::data_type::f32, memory::dims{p.n, 1});
  dnnl::primitive_attr attributes;
  // In the default mode, concurrent executions of one primitive share its scratchpad and corrupt each other.
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (p.accumulate) {
    dnnl::post_ops sum;
    sum.append_sum(1.0f);
    attributes.set_post_ops(sum);
  }
#if DNNL_VERSION_MAJOR >= 3
  return {engine(), a, b, c, attributes};
#else
  return {dnnl::matmul::desc(a, b, c), attributes, engine()};
#endif
}

bool is_reference(const dnnl::matmul::primitive_desc& plan) {
  return std::strncmp(plan.impl_info_str(), "ref", 3) == 0;
}

bool has_isa(dnnl::cpu_isa wanted) {
  const auto bits = static_cast<unsigned>(wanted);
  return (static_cast<unsigned>(dnnl::get_effective_cpu_isa()) & bits) == bits;
}

}  // namespace

bool onednn_has_native_bf16() {
  static const bool native = [] {
    if (!has_isa(dnnl::cpu_isa::avx512_core_bf16)) return false;
    const int64_t size = 256;
    for (bool a_transposed : {false, true}) {
      for (bool b_transposed : {false, true}) {
        const OneDnnMatrix a{nullptr, size, a_transposed}, b{nullptr, size, b_transposed};
        try {
          if (is_reference(plan({size, size, size, a, b, ops::DType::BF16, nullptr, true}, size)))
            return false;
        } catch (const dnnl::error&) {
          return false;
        }
      }
    }
    return true;
  }();
  return native;
}

bool onednn_has_amx() {
  static const bool amx = has_isa(dnnl::cpu_isa::avx512_core_amx);
  return amx;
}

void onednn_product(ops::Device& device, const OneDnnProduct& p) {
  struct Primitive {
    dnnl::matmul::primitive_desc plan;
    dnnl::matmul matmul;
    memory::desc a, b, c, scratchpad;
  };
  const auto make = [&](int64_t rows) {
    const auto made = plan(p, rows);
    if (is_reference(made)) {
      throw std::runtime_error(std::string("oneDNN has no fast product for this layout: ") +
                               made.impl_info_str());
    }
    return Primitive{made,
                     dnnl::matmul(made),
                     made.src_desc(),
                     made.weights_desc(),
                     made.dst_desc(),
                     made.scratchpad_desc()};
  };
  const int64_t blocks = ceil_div(p.m, kBlockRows);
  const int64_t last_rows = p.m - (blocks - 1) * kBlockRows;
  const Primitive last = make(last_rows), whole = blocks > 1 ? make(kBlockRows) : last;
  const int64_t element = p.operands == ops::DType::BF16 ? 2 : 4;
  for (const Primitive* primitive : {&last, &whole})
    device.reserve_workers<char>(static_cast<int64_t>(primitive->scratchpad.get_size()));
  device.pool.run(blocks, [&](int64_t block, int32_t worker) {
    use_one_openmp_thread();
    thread_local dnnl::stream stream(engine());
    const Primitive& primitive = block + 1 == blocks ? last : whole;
    const int64_t row = block * kBlockRows;
    // oneDNN takes no pointers to const; it only reads the sources.
    auto* a = const_cast<char*>(static_cast<const char*>(p.a.data)) +
              row * (p.a.transposed ? 1 : p.a.stride) * element;
    auto* scratchpad = device.worker_scratch[static_cast<size_t>(worker)].take<char>(
        static_cast<int64_t>(primitive.scratchpad.get_size()));
    primitive.matmul.execute(stream,
                             {{DNNL_ARG_SRC, memory(primitive.a, engine(), a)},
                              {DNNL_ARG_WEIGHTS, memory(primitive.b, engine(), const_cast<void*>(p.b.data))},
                              {DNNL_ARG_DST, memory(primitive.c, engine(), p.c + row * p.n)},
                              {DNNL_ARG_SCRATCHPAD, memory(primitive.scratchpad, engine(), scratchpad)}});
    stream.wait();
  });
}

}  // namespace duokv::cpu
