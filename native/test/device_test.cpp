#include <string>

#include "test/harness.h"

namespace {

using namespace duokv;
using namespace duokv::test;

int64_t memory_used(ops::Device* device) {
  ops::DeviceInfo info;
  check(table().info(device, &info));
  return info.memory_used;
}

void expect_message(const char* part) {
  const std::string message = table().last_error();
  expect(message.find(part) != std::string::npos, "\"%s\" does not name %s", message.c_str(), part);
}

DUOKV_TEST(info_names_the_machine) {
  OpenDevice device(3);
  ops::DeviceInfo info;
  check(table().info(device, &info));
  std::printf("    %s; %s; %s; %s; %lld bytes\n", info.name, info.isa, info.libraries, info.attention,
              static_cast<long long>(info.memory_total));
  expect(info.threads == 3, "threads is %d, expected 3", info.threads);
  expect(info.name[0] && info.isa[0] && info.attention[0], "a field is empty");
  expect(std::strstr(info.libraries, "oneDNN") && std::strstr(info.libraries, "Highway"), "libraries: %s",
         info.libraries);
  expect(info.memory_total > (int64_t{1} << 28), "memory_total is %lld",
         static_cast<long long>(info.memory_total));
}

DUOKV_TEST(allocations_are_counted_and_aligned) {
  OpenDevice device(1);
  const int64_t sizes[] = {0, 1, 63, 64, 65, 4096, 5 << 20};
  std::vector<void*> blocks;
  int64_t sum = 0;
  for (int64_t bytes : sizes) {
    void* memory = nullptr;
    check(table().allocate(device, bytes, &memory));
    expect(memory && reinterpret_cast<uintptr_t>(memory) % 64 == 0, "%lld bytes at %p",
           static_cast<long long>(bytes), memory);
    check(table().zero(device, memory, bytes));
    blocks.push_back(memory);
    sum += bytes;
    expect(memory_used(device) == sum, "memory_used is %lld, expected %lld",
           static_cast<long long>(memory_used(device)), static_cast<long long>(sum));
  }
  for (void* memory : blocks) table().release(device, memory);
  table().release(device, nullptr);
  expect(memory_used(device) == 0, "memory_used is %lld after release",
         static_cast<long long>(memory_used(device)));
}

DUOKV_TEST(impossible_allocations_fail_with_a_reason) {
  OpenDevice device(1);
  void* memory = &memory;
  for (int64_t bytes : {int64_t{1} << 50, INT64_MAX}) {
    expect_status(table().allocate(device, bytes, &memory), ops::kOutOfMemory,
                  std::to_string(bytes) + " bytes");
    expect_message(std::to_string(bytes).c_str());
    expect(memory == nullptr, "a failed allocation set the pointer");
  }
  expect_status(table().allocate(device, -1, &memory), ops::kInvalid, "-1 bytes");
  expect_message("-1");
  expect(memory_used(device) == 0, "a failed allocation was counted");
}

DUOKV_TEST(copies_move_every_byte) {
  Rng rng(3);
  for (int64_t count : {1, 1000, (1 << 20) + 17}) {
    const std::vector<float> host = rng.normals(count);
    Array<float> a(device(), host), b(device(), count);
    check(table().copy(device(), b.data(), a.data(), count * 4));
    expect_bitwise("copy", b.get(), host);
    check(table().zero(device(), a.data(), count * 4));
    expect_bitwise("zero", a.get(), std::vector<float>(host.size(), 0.0f));
  }
}

DUOKV_TEST(bad_arguments_are_refused) {
  ops::Device* opened = nullptr;
  expect_status(table().open("", -1, &opened), ops::kInvalid, "-1 threads");
  expect_message("-1");
  expect_status(table().open("", 1 << 20, &opened), ops::kInvalid, "2^20 threads");
  expect_status(table().open("1", 1, &opened), ops::kInvalid, "an option");
  expect(opened == nullptr, "a failed open set the device");
  float value[4] = {};
  expect_status(table().copy(device(), nullptr, value, 4), ops::kInvalid, "null destination");
  expect_status(table().copy(device(), value, value, -4), ops::kInvalid, "negative size");
  expect_status(table().copy(device(), value + 1, value, 8), ops::kInvalid, "overlap");
  expect_status(table().zero(device(), nullptr, 4), ops::kInvalid, "null to zero");
  expect_status(table().copy(device(), nullptr, nullptr, 0), ops::kOk, "nothing to copy");
}

}  // namespace

int main(int argc, char** argv) { return duokv::test::run(argc, argv); }
