#include "cpu/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "test/harness.h"

namespace {

using duokv::cpu::ThreadPool;
using duokv::test::expect;

DUOKV_TEST(every_chunk_runs_once) {
  for (int32_t threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    expect(pool.threads() == threads, "threads() is %d, expected %d", pool.threads(), threads);
    for (int64_t chunks : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<size_t>(chunks));
      std::atomic<int> strangers{0};
      pool.run(chunks, [&](int64_t chunk, int32_t worker) {
        ++runs[static_cast<size_t>(chunk)];
        if (worker < 0 || worker >= threads) ++strangers;
      });
      for (size_t i = 0; i < runs.size(); ++i) {
        expect(runs[i] == 1, "%d threads: chunk %zu ran %d times", threads, i, runs[i].load());
      }
      expect(strangers == 0, "%d chunks ran as a worker out of range", strangers.load());
    }
  }
}

DUOKV_TEST(every_neighbour_runs_once) {
  for (int32_t threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    for (int64_t chunks : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<size_t>(chunks));
      std::atomic<int> wrong{0}, ends{0}, firsts{0};
      std::vector<char> took_part(static_cast<size_t>(threads), 0);
      pool.run_neighbours(chunks, [&](const ThreadPool::Turn& turn) {
        const auto [chunk, next, worker, first] = turn;
        ++runs[static_cast<size_t>(chunk)];
        if (next == -1) ++ends;
        if (first) ++firsts;
        if (!first && !took_part[static_cast<size_t>(worker)]) ++wrong;
        took_part[static_cast<size_t>(worker)] = 1;
        if ((next != -1 && next != chunk + 1) || next >= chunks || worker < 0 || worker >= threads) ++wrong;
      });
      for (size_t i = 0; i < runs.size(); ++i)
        expect(runs[i] == 1, "%d threads: chunk %zu ran %d times", threads, i, runs[i].load());
      expect(wrong == 0, "%d of %d chunks had a wrong neighbour or worker", wrong.load(),
             static_cast<int>(chunks));
      const int64_t ranges = std::min<int64_t>(chunks, threads);
      expect(ends == ranges, "%d ranges ended, expected %d", ends.load(), static_cast<int>(ranges));
      expect(firsts <= ranges && (firsts > 0 || chunks == 0), "%d of %d threads began", firsts.load(),
             static_cast<int>(ranges));
    }
  }
}

// The chunk that waits is the first of a range: the thread of the other one must run the rest of it.
DUOKV_TEST(a_thread_helps_its_neighbour) {
  ThreadPool pool(2);
  std::atomic<int> ended{0};
  pool.run_neighbours(100, [&](const ThreadPool::Turn& turn) {
    while (turn.chunk == 0 && ended < 99) std::this_thread::yield();
    ++ended;
  });
  expect(ended == 100, "%d of 100 chunks ended", ended.load());
}

// Plain memory written by one job and read by the next, back to back and after the workers fell asleep: a
// missing barrier shows as a wrong sum, and under the thread sanitizer as a race.
DUOKV_TEST(jobs_see_each_other) {
  ThreadPool pool(4);
  std::vector<int64_t> values(64, 0);
  for (int round = 1; round <= 20000; ++round) {
    pool.run(64, [&](int64_t chunk, int32_t) { values[static_cast<size_t>(63 - chunk)] += chunk; });
    if (round % 4000 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  for (int64_t i = 0; i < 64; ++i) {
    const int64_t value = values[static_cast<size_t>(63 - i)];
    expect(value == 20000 * i, "slot %d holds %d, expected %d", static_cast<int>(63 - i),
           static_cast<int>(value), static_cast<int>(20000 * i));
  }
}

DUOKV_TEST(two_workers_take_part) {
  ThreadPool pool(2);
  std::atomic<int> arrived{0};
  // Each chunk waits for the other one, so one thread alone would never finish.
  pool.run(2, [&](int64_t, int32_t) {
    ++arrived;
    while (arrived < 2) std::this_thread::yield();
  });
  expect(arrived == 2, "%d chunks arrived", arrived.load());
}

DUOKV_TEST(exceptions_reach_the_caller) {
  const auto message_of = [](auto&& job) -> std::string {
    try {
      job();
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    return "";
  };
  for (int32_t threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    for (int round = 0; round < 200; ++round) {
      std::atomic<int64_t> started{0}, after{0};
      const auto fails = [&](int64_t chunk, const char* text) {
        ++started;
        if (chunk == 3) throw std::runtime_error(text);
      };
      std::string message =
          message_of([&] { pool.run(1000, [&](int64_t chunk, int32_t) { fails(chunk, "chunk three"); }); });
      expect(message == "chunk three", "%d threads: caught \"%s\"", threads, message.c_str());
      expect(started >= 4 && started <= 1000, "%d chunks started", static_cast<int>(started));
      pool.run(100, [&](int64_t, int32_t) { ++after; });
      expect(after == 100, "the next job ran %d of 100 chunks", static_cast<int>(after));

      message = message_of([&] {
        pool.run_neighbours(1000,
                            [&](const ThreadPool::Turn& turn) { fails(turn.chunk, "neighbour three"); });
      });
      expect(message == "neighbour three", "%d threads: caught \"%s\"", threads, message.c_str());
      after = 0;
      pool.run_neighbours(100, [&](const ThreadPool::Turn&) { ++after; });
      expect(after == 100, "the next job ran %d of 100 neighbours", static_cast<int>(after));
    }
  }
}

DUOKV_TEST(usable_cpus_is_positive) {
  const int32_t cpus = duokv::cpu::usable_cpus();
  expect(cpus >= 1 && cpus <= static_cast<int32_t>(std::thread::hardware_concurrency()),
         "usable_cpus() is %d", cpus);
}

DUOKV_TEST(no_threads_is_refused) {
  bool refused = false;
  try {
    ThreadPool pool(0);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  expect(refused, "a pool of 0 threads was made");
}

}  // namespace

int main(int argc, char** argv) { return duokv::test::run(argc, argv); }
