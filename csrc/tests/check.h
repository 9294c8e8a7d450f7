// The few lines of a test framework that these tests need.
#pragma once

#include <chrono>
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace tetri::test {

using Tests = std::vector<std::pair<std::string, std::function<void()>>>;

inline Tests& all() {
  static Tests tests;
  return tests;
}

struct Registration {
  Registration(const char* name, std::function<void()> body) {
    all().emplace_back(name, std::move(body));
  }
};

inline void check(bool holds, const char* what, const char* file, int line) {
  if (holds) return;
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

/// Waits until a condition holds, at most half a minute.
template <typename Condition>
void eventually(Condition condition) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point deadline = Clock::now() + std::chrono::seconds(30);
  while (!condition()) {
    check(Clock::now() < deadline, "not in 30 s", __FILE__, __LINE__);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace tetri::test

#define TEST(name)                                                       \
  static void name();                                                    \
  static const ::tetri::test::Registration register_##name{#name, name}; \
  static void name()

#define CHECK(what) ::tetri::test::check(static_cast<bool>(what), #what, __FILE__, __LINE__)

#define CHECK_THROWS(what, error)                           \
  do {                                                      \
    bool threw = false;                                     \
    try {                                                   \
      what;                                                 \
    } catch (const error&) {                                \
      threw = true;                                         \
    }                                                       \
    ::tetri::test::check(threw, #what, __FILE__, __LINE__); \
  } while (false)
