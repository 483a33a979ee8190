// Harness of the CUDA tests, which run on the emulator or, compiled by nvcc, on a GPU. A test program
// declares cases with DUOKV_CASE and ends in DUOKV_MAIN. On the emulator each case runs under several seeds
// (DUOKV_SIMT_SEEDS of them, 3 by default, from DUOKV_SIMT_FIRST_SEED, 1 by default). Arguments select the
// cases whose name contains one of them. With --expect-failure the program succeeds at the first failure:
// that is how mutants are run.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/primitives.cuh"
#include "test/non_finite.h"

namespace duokv::cuda::test {

struct Case {
  const char* name;
  void (*body)();
};

inline std::vector<Case> cases;
inline int failures = 0;
inline bool quiet = false;  // a mutant is run, and its first failure ends the program
struct Found {};            // what a failure of a mutant throws
inline uint64_t current_seed = 0;
inline int accepted_races = 0;  // reports of ThreadSanitizer that a case wanted

struct Registration {
  Registration(const char* name, void (*body)()) { cases.push_back({name, body}); }
};

#define DUOKV_CASE(name)                                                         \
  static void name();                                                            \
  static const ::duokv::cuda::test::Registration registered_##name(#name, name); \
  static void name()

#ifdef __CUDACC__
inline int races() { return 0; }
#else
inline int races() { return simt::tsan::reports() - accepted_races; }
#endif

__attribute__((format(printf, 2, 3))) inline bool expect(bool condition, const char* format, ...) {
  if (quiet && (!condition || races() > 0)) throw Found{};
  if (condition) return true;
  ++failures;
  std::va_list arguments;
  va_start(arguments, format);
  std::printf("    FAILED (seed %llu) ", static_cast<unsigned long long>(current_seed));
  std::vprintf(format, arguments);
  std::printf("\n");
  va_end(arguments);
  return false;
}

// Ends the case on an error of the runtime.
inline void check(cudaError_t error, const char* what = "") {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(error) + ": " +
                           cudaGetErrorString(error));
}

class Stream {
 public:
  Stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream"); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }
  void synchronize() const { check(cudaStreamSynchronize(stream_), "synchronize"); }

 private:
  cudaStream_t stream_ = nullptr;
};

inline Stream& stream() {
  static Stream shared;
  return shared;
}

// Device memory of exactly `count` elements.
template <class T>
class Array {
 public:
  explicit Array(size_t count) : count_(count) {
    check(cudaMalloc(&memory_, count * sizeof(T)), "cudaMalloc");
  }
  explicit Array(const std::vector<T>& host) : Array(host.size()) { put(host); }
  ~Array() { cudaFree(memory_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  T* data() const { return memory_; }
  void put(const std::vector<T>& host) {
    check(cudaMemcpyAsync(memory_, host.data(), count_ * sizeof(T), cudaMemcpyHostToDevice, stream()),
          "upload");
  }
  std::vector<T> get() const {
    std::vector<T> host(count_);
    check(cudaMemcpyAsync(host.data(), memory_, count_ * sizeof(T), cudaMemcpyDeviceToHost, stream()),
          "download");
    stream().synchronize();
    return host;
  }

 private:
  T* memory_ = nullptr;
  size_t count_;
};

// Values do not depend on the scheduling seed, so that results can be compared between seeds.
inline std::vector<float> normals(size_t count, uint64_t stream, float scale = 1) {
  std::mt19937_64 engine(stream);
  std::normal_distribution<float> distribution(0, scale);
  std::vector<float> values(count);
  for (float& value : values) value = distribution(engine);
  return values;
}

// ||got - reference|| / ||reference|| <= limit; NaN fails.
inline bool expect_relative(const std::string& what, const std::vector<float>& got,
                            const std::vector<double>& reference, double limit) {
  if (!expect(got.size() == reference.size(), "%s: %zu values, expected %zu", what.c_str(), got.size(),
              reference.size()))
    return false;
  double error = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += (got[i] - reference[i]) * (got[i] - reference[i]);
    norm += reference[i] * reference[i];
  }
  const double relative = norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
  return expect(relative <= limit, "%s: relative error %.3g, the limit is %.3g", what.c_str(), relative,
                limit);
}

inline double printable(double x) { return x; }
inline double printable(bf16 x) { return static_cast<double>(__bfloat162float(x)); }

template <class T>
bool expect_equal(const std::string& what, const std::vector<T>& got, const std::vector<T>& reference) {
  if (!expect(got.size() == reference.size(), "%s: %zu values, expected %zu", what.c_str(), got.size(),
              reference.size()))
    return false;
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::memcmp(&got[i], &reference[i], sizeof(T)) == 0) continue;
    return expect(false, "%s: element %zu differs: %.9g and %.9g", what.c_str(), i, printable(got[i]),
                  printable(reference[i]));
  }
  return true;
}

using duokv::test::kNonFinite;

// The elements that are not finite are those of `where`, which ascends.
inline bool expect_non_finite_at(const std::string& what, const std::vector<float>& got,
                                 const std::vector<size_t>& where) {
  const std::string wrong = duokv::test::wrong_non_finite(got, where);
  return expect(wrong.empty(), "%s: %s", what.c_str(), wrong.c_str());
}

#ifdef __CUDACC__
inline void start_seed(uint64_t seed) { current_seed = seed; }
template <class F>
void for_each_architecture(F body) {
  body();
}
#else
inline void start_seed(uint64_t seed) {
  current_seed = seed;
  simt::reset_device();
  simt::set_seed(seed);
}
// Runs `body` on every kind of tensor core there is to run on.
template <class F>
void for_each_architecture(F body) {
  for (const simt::Architecture architecture : {simt::Architecture::kSm80, simt::Architecture::kSm90}) {
    simt::set_architecture(architecture);
    body();
  }
}
#endif

// Choices 0, 1 and 2: all of them on a GPU, one per seed on the emulator, where three would take too long.
template <class F>
void for_each_choice(F body) {
  for (size_t i = 0; i < 3; ++i) {
    if (!kEmulated || current_seed % 3 == i) body(i);
  }
}

inline void run_case(const Case& test, uint64_t seed) {
  start_seed(seed);
  const int races_before = races();
  try {
    test.body();
  } catch (const std::exception& error) {
    expect(false, "%s", error.what());
  }
  const int found = races() - races_before;
  expect(found == 0, "%d data races", found);
}

// One seed after another, since most mutants need one but not the first case.
inline int expect_failure(const std::vector<Case>& selected, uint64_t first, uint64_t seeds) {
  quiet = true;
  for (uint64_t seed = first; seed < first + seeds; ++seed) {
    for (const Case& test : selected) {
      try {
        run_case(test, seed);
      } catch (const Found&) {
        std::printf("found by %s under seed %llu\n", test.name, static_cast<unsigned long long>(seed));
        std::fflush(stdout);
        std::_Exit(0);  // objects on the device may be in any state
      }
    }
  }
  std::printf("not found by %zu cases under %llu seeds\n", selected.size(),
              static_cast<unsigned long long>(seeds));
  return 1;
}

inline int run(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  bool mutant = false, filtered = false;
  std::vector<Case> selected;
  for (const std::string& argument : arguments) {
    argument == "--expect-failure" ? mutant = true : filtered = true;
  }
  for (const Case& test : cases) {
    bool wanted = !filtered;
    for (const std::string& argument : arguments) wanted = wanted || std::strstr(test.name, argument.c_str());
    if (wanted) selected.push_back(test);
  }
  const auto number = [](const char* name, uint64_t otherwise) {
    const char* text = std::getenv(name);
    return text ? std::strtoull(text, nullptr, 10) : otherwise;
  };
  const uint64_t first = number("DUOKV_SIMT_FIRST_SEED", 1),
                 seeds = kEmulated ? number("DUOKV_SIMT_SEEDS", 3) : 1;
  if (mutant) return expect_failure(selected, first, seeds);
  int passed = 0, failed = 0;
  for (const Case& test : selected) {
    const int before = failures;
    for (uint64_t seed = first; seed < first + seeds; ++seed) run_case(test, seed);
    std::printf("%s %s\n", failures == before ? "ok    " : "FAILED", test.name);
    std::fflush(stdout);
    failures == before ? ++passed : ++failed;
  }
  std::printf("%d passed, %d failed, %llu seeds\n", passed, failed, static_cast<unsigned long long>(seeds));
  return failed > 0 || passed == 0;
}

}  // namespace duokv::cuda::test

#define DUOKV_MAIN \
  int main(int argc, char** argv) { return ::duokv::cuda::test::run(argc, argv); }
