// Groups of ranks, each a thread of this process: sums, broadcasts, and what the others learn when one fails;
// and the pieces in which gradients are summed.
#include <chrono>
#include <functional>
#include <thread>

#include "core/data_parallel.h"
#include "dist/collective.h"
#include "dist/hash.h"
#include "test/models.h"

namespace duokv::test {
namespace {

using dist::Collective;
using Clock = std::chrono::steady_clock;

// Runs `body` as every rank of a group; what each rank threw, empty where nothing.
std::vector<std::string> as_ranks(int size, const std::function<void(Collective&)>& body) {
  const int port = dist::Listener(0).port();
  std::vector<std::string> errors(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        body(*Collective::join_at("localhost", port, rank, size));
      } catch (const Error& error) {
        errors[static_cast<size_t>(rank)] = error.code + ": " + error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  return errors;
}

void expect_error(const std::vector<std::string>& errors, size_t rank, const std::string& part) {
  expect(errors[rank].find(part) != std::string::npos, "rank %zu: \"%s\", expected \"%s\"", rank,
         errors[rank].c_str(), part.c_str());
}

DUOKV_TEST(sums_and_broadcasts) {
  for (const int size : {1, 2, 5}) {
    std::vector<std::vector<double>> sums(static_cast<size_t>(size));
    const auto errors = as_ranks(size, [&](Collective& group) {
      const int rank = group.rank();
      for (int round = 0; round < 20; ++round) {
        // Doubles whose sum depends on the order in which they are added.
        std::vector<double> values(7, 1.0 / (3 + rank + round));
        group.sum(values.data(), 7);
        sums[static_cast<size_t>(rank)].push_back(values[6]);
        int64_t integers[2] = {rank, INT64_MAX - rank};
        group.sum(integers, 2);
        expect(integers[0] == size * (size - 1) / 2, "sum of ranks is %lld",
               static_cast<long long>(integers[0]));
        const int root = round % size;
        std::vector<char> bytes(rank == root ? static_cast<size_t>(100000 * (round % 3)) : 3,
                                static_cast<char>(rank));
        group.broadcast(bytes, root);
        expect(bytes == std::vector<char>(static_cast<size_t>(100000 * (round % 3)), static_cast<char>(root)),
               "broadcast of rank %d on rank %d", root, rank);
        expect(group.gather(10 + rank)[static_cast<size_t>(root)] == 10 + root, "gather");
      }
      group.close();
    });
    for (size_t rank = 0; rank < sums.size(); ++rank) {
      expect(errors[rank].empty(), "rank %zu: %s", rank, errors[rank].c_str());
      expect(sums[rank] == sums[0], "sums of rank %zu are not those of rank 0", rank);
    }
  }
}

DUOKV_TEST(neighbours_share_the_cpus_of_this_machine) {
  std::vector<int> local(3, -1);
  as_ranks(3, [&](Collective& group) {
    local[static_cast<size_t>(group.rank())] = group.local_rank();
    expect(group.sharing_cpus() == 3, "%d ranks share the CPUs", group.sharing_cpus());
    group.close();
  });
  expect(local == std::vector<int>({0, 1, 2}), "local ranks");
}

DUOKV_TEST(a_failure_reaches_all_ranks_with_its_reason) {
  for (const int failing : {0, 1, 2}) {
    const auto errors = as_ranks(3, [&](Collective& group) {
      group.barrier();
      if (group.rank() == failing) {
        group.fail("the disk is full");
        group.barrier();
      } else {
        // Two calls: rank 0 may be past the first when the news comes.
        group.barrier();
        group.barrier();
      }
    });
    for (size_t rank = 0; rank < 3; ++rank)
      expect_error(errors, rank,
                   "ERR_DISTRIBUTED: rank " + std::to_string(failing) + " failed: the disk is full");
  }
}

DUOKV_TEST(a_rank_that_leaves_early_is_named) {
  for (const int leaving : {0, 1, 2}) {
    const auto errors = as_ranks(3, [&](Collective& group) {
      group.barrier();
      if (group.rank() == leaving) return group.close();
      group.barrier();
    });
    for (size_t rank = 0; rank < 3; ++rank)
      expect_error(errors, rank, "rank " + std::to_string(leaving) + " left the group");
  }
}

DUOKV_TEST(calls_that_differ_are_refused) {
  const auto errors = as_ranks(2, [&](Collective& group) {
    double values[3] = {};
    std::vector<char> bytes(24);
    if (group.rank() == 0)
      group.sum(values, 3);
    else
      group.broadcast(bytes, 1);
  });
  for (size_t rank : {0u, 1u}) expect_error(errors, rank, "rank 1 makes a broadcast of 24 bytes");
}

DUOKV_TEST(a_waiting_call_stops_when_told_from_elsewhere) {
  const auto start = Clock::now();
  const auto errors = as_ranks(2, [&](Collective& group) {
    if (group.rank() == 0) {
      std::thread other([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        group.fail("told to");
      });
      struct Join {
        std::thread& thread;
        ~Join() { thread.join(); }
      } join{other};
      group.barrier();
    } else {
      while (true) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        group.check();
      }
    }
  });
  for (size_t rank : {0u, 1u}) expect_error(errors, rank, "rank 0 failed: told to");
  expect(Clock::now() - start < std::chrono::seconds(5), "it took more than 5 s");
}

DUOKV_TEST(hashes_tell_values_apart) {
  std::vector<float> values(1001, 1.0f);
  const auto hash = [&] { return dist::hash_bytes(values.data(), values.size() * sizeof(float)); };
  const int64_t equal = hash();
  expect(hash() == equal, "equal values have equal hashes");
  for (size_t i : {0u, 1u, 500u, 1000u}) {
    values[i] = std::nextafter(1.0f, 2.0f);
    expect(hash() != equal, "the last bit of value %zu", i);
    values[i] = 1.0f;
  }
  std::swap(values[3] = 2.0f, values[4] = 3.0f);
  const int64_t swapped = hash();
  std::swap(values[3], values[4]);
  expect(hash() != swapped, "order");
}

DUOKV_TEST(buckets_cover_the_gradients_once_in_the_order_of_the_backward_pass) {
  for (const ModelConfig& config : all_configs()) {
    const Plan plan = make_plan(config);
    for (const int64_t largest : {int64_t{1} << 40, int64_t{1000}, int64_t{77}, int64_t{1}}) {
      std::vector<int> covered(static_cast<size_t>(plan.arena_elements));
      int64_t layer = INT64_MAX;
      for (const GradientBucket& bucket : gradient_buckets(plan, largest)) {
        expect(bucket.elements >= 1 && bucket.elements <= largest, "%s: a bucket of %lld elements",
               describe(config).c_str(), static_cast<long long>(bucket.elements));
        expect(bucket.layer <= layer, "%s: buckets are out of order", describe(config).c_str());
        layer = bucket.layer;
        for (int64_t i = 0; i < bucket.elements; ++i) ++covered[static_cast<size_t>(bucket.offset + i)];
      }
      expect(std::count(covered.begin(), covered.end(), 1) == plan.arena_elements,
             "%s: not every element is in one bucket", describe(config).c_str());
    }
  }
}

}  // namespace
}  // namespace duokv::test

int main(int argc, char** argv) { return duokv::test::run(argc, argv); }
