// A small test harness for operations. A test program is one file: cases declared with DUOKV_TEST and
//   int main(int argc, char** argv) { return duokv::test::run(argc, argv); }
// Arguments select the cases whose name contains one of them; DUOKV_SEED changes the random values. Every
// comparison prints its worst element, passed or not, so that a log shows how much of a tolerance is used.
// The exit code is 1 on failure.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "cpu/cpu.h"
#include "ops/ops.h"
#include "test/non_finite.h"

namespace duokv::test {

struct Case {
  const char* name;
  void (*body)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Registration {
  Registration(const char* name, void (*body)()) { cases().push_back({name, body}); }
};

#define DUOKV_TEST(name)                                                   \
  static void name();                                                      \
  static const ::duokv::test::Registration registered_##name(#name, name); \
  static void name()

// How many random cases to try: a tenth under a sanitizer, which slows the kernels 10 to 50 times.
inline int trials(int count) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return std::max(1, count / 10);
#else
  return count;
#endif
}

inline int& failures() {
  static int count = 0;
  return count;
}

// A failed expectation is counted and the case goes on.
__attribute__((format(printf, 2, 3))) inline bool expect(bool condition, const char* format, ...) {
  if (condition) return true;
  ++failures();
  std::va_list args;
  va_start(args, format);
  std::printf("    FAILED ");
  std::vprintf(format, args);
  std::printf("\n");
  va_end(args);
  return false;
}

// |got - ref| <= absolute + relative * |ref| for every element.
template <class Ref>
bool expect_close(const std::string& what, const std::vector<float>& got, const std::vector<Ref>& ref,
                  double absolute, double relative) {
  if (!expect(got.size() == ref.size(), "%s: %zu values, expected %zu", what.c_str(), got.size(), ref.size()))
    return false;
  double worst = -1;
  size_t at = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double expected = static_cast<double>(ref[i]);
    const double error = std::abs(got[i] - expected), limit = absolute + relative * std::abs(expected);
    // Equal infinities agree; a NaN on either side never does.
    double share = error / std::max(limit, std::numeric_limits<double>::min());
    if (got[i] == expected) share = 0;
    if (std::isnan(share)) share = std::numeric_limits<double>::infinity();
    if (share > worst) worst = share, at = i;
  }
  if (got.empty()) return true;
  std::printf("    %-44s worst at %zu: got %.9g, expected %.9g, %.3g of the limit\n", what.c_str(), at,
              got[at], static_cast<double>(ref[at]), worst);
  return expect(worst <= 1, "%s: element %zu is past abs %g + rel %g", what.c_str(), at, absolute, relative);
}

// ||got - ref|| <= limit * ||ref||, or <= `zero` where the reference is zero.
template <class Ref>
bool expect_relative_l2(const std::string& what, const std::vector<float>& got, const std::vector<Ref>& ref,
                        double limit, double zero = 1e-7) {
  if (!expect(got.size() == ref.size(), "%s: %zu values, expected %zu", what.c_str(), got.size(), ref.size()))
    return false;
  double error = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double expected = static_cast<double>(ref[i]);
    error += (got[i] - expected) * (got[i] - expected);
    norm += expected * expected;
  }
  error = std::sqrt(error), norm = std::sqrt(norm);
  const double measured = norm > 0 ? error / norm : error, bound = norm > 0 ? limit : zero;
  std::printf("    %-44s %s L2 error %.3g, limit %.3g\n", what.c_str(), norm > 0 ? "relative" : "absolute",
              measured, bound);
  return expect(measured <= bound, "%s: L2 error %g is past %g", what.c_str(), measured, bound);
}

template <class T>
bool expect_bitwise(const std::string& what, const std::vector<T>& got, const std::vector<T>& ref) {
  if (!expect(got.size() == ref.size(), "%s: %zu values, expected %zu", what.c_str(), got.size(), ref.size()))
    return false;
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::memcmp(&got[i], &ref[i], sizeof(T)) == 0) continue;
    return expect(false, "%s: element %zu of %zu differs in its bits: %.9g and %.9g", what.c_str(), i,
                  got.size(), static_cast<double>(got[i]), static_cast<double>(ref[i]));
  }
  return true;
}

// The elements that are not finite are those of `where`, which ascends.
inline bool expect_non_finite_at(const std::string& what, const std::vector<float>& got,
                                 const std::vector<size_t>& where) {
  const std::string wrong = wrong_non_finite(got, where);
  return expect(wrong.empty(), "%s: %s", what.c_str(), wrong.c_str());
}

// ---- the device under test

inline const ops::OpTable& table() { return cpu::op_table(); }

inline bool expect_status(ops::Status status, ops::Status expected, const std::string& what) {
  return expect(status == expected, "%s: status %d, expected %d (%s)", what.c_str(), static_cast<int>(status),
                static_cast<int>(expected), status == ops::kOk ? "" : table().last_error());
}

// Ends the case when the operation failed.
inline void check(ops::Status status) {
  if (status != ops::kOk) throw std::runtime_error(table().last_error());
}

class OpenDevice {
 public:
  explicit OpenDevice(int32_t threads = 0) { check(table().open("", threads, &device_)); }
  ~OpenDevice() { table().close(device_); }
  OpenDevice(const OpenDevice&) = delete;
  OpenDevice& operator=(const OpenDevice&) = delete;
  operator ops::Device*() const { return device_; }

 private:
  ops::Device* device_ = nullptr;
};

// The device most cases share, with the default number of threads.
inline ops::Device* device() {
  static OpenDevice shared;
  return shared;
}

// Device memory of exactly `count` elements, so that a sanitizer sees the first one past the end.
template <class T>
class Array {
 public:
  Array(ops::Device* device, int64_t count) : device_(device), count_(count) {
    void* memory = nullptr;
    check(table().allocate(device, std::max<int64_t>(bytes(), 1), &memory));
    memory_ = static_cast<T*>(memory);
  }
  Array(ops::Device* device, const std::vector<T>& host) : Array(device, static_cast<int64_t>(host.size())) {
    put(host);
  }
  ~Array() { table().release(device_, memory_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  T* data() const { return memory_; }
  int64_t size() const { return count_; }
  void put(const std::vector<T>& host) {
    if (static_cast<int64_t>(host.size()) != count_) throw std::runtime_error("Array::put: another size");
    if (count_ > 0) check(table().upload(device_, memory_, host.data(), bytes()));
  }
  std::vector<T> get() const {
    std::vector<T> host(static_cast<size_t>(count_));
    if (count_ > 0) check(table().download(device_, host.data(), memory_, bytes()));
    return host;
  }

 private:
  int64_t bytes() const { return count_ * static_cast<int64_t>(sizeof(T)); }
  ops::Device* device_;
  int64_t count_;
  T* memory_ = nullptr;
};

// ---- values

inline uint64_t seed() {
  const char* text = std::getenv("DUOKV_SEED");
  if (!text) return 1;
  char* end = nullptr;
  const uint64_t value = std::strtoull(text, &end, 10);
  if (*text < '0' || *text > '9' || *end != 0) {
    std::fprintf(stderr, "DUOKV_SEED is \"%s\"; it must be an integer of at least 0\n", text);
    std::exit(2);
  }
  return value;
}

class Rng {
 public:
  explicit Rng(uint64_t stream = 0) : engine_(seed() * 0x9E3779B97F4A7C15ULL + stream) {}
  float normal(float scale = 1) { return scale * std::normal_distribution<float>()(engine_); }
  float uniform(float low, float high) { return std::uniform_real_distribution<float>(low, high)(engine_); }
  int32_t integer(int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(engine_);
  }  // inclusive
  std::vector<float> normals(int64_t count, float scale = 1) {
    std::vector<float> values(static_cast<size_t>(count));
    std::normal_distribution<float> distribution;
    for (float& value : values) value = scale * distribution(engine_);
    return values;
  }

 private:
  std::mt19937_64 engine_;
};

// x rounded to BF16, nearest even. x is finite.
inline float to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline std::vector<float> to_bf16(std::vector<float> values) {
  for (float& value : values) value = to_bf16(value);
  return values;
}

// ---- running

inline int run(int argc, char** argv) {
  int passed = 0, failed = 0;
  for (const Case& test : cases()) {
    bool selected = argc < 2;
    for (int i = 1; i < argc; ++i) selected = selected || std::strstr(test.name, argv[i]);
    if (!selected) continue;
    std::printf("%s\n", test.name);
    const int before = failures();
    try {
      test.body();
    } catch (const std::exception& error) {
      expect(false, "threw: %s", error.what());
    }
    failures() == before ? ++passed : ++failed;
    std::fflush(stdout);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed > 0 || passed == 0;
}

}  // namespace duokv::test
