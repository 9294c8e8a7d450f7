#include "check.h"

int main() {
  int failed = 0;
  for (const auto& [name, body] : tetri::test::all()) {
    try {
      body();
      std::printf("ok    %s\n", name.c_str());
    } catch (const std::exception& error) {
      std::printf("FAIL  %s: %s\n", name.c_str(), error.what());
      ++failed;
    }
    std::fflush(stdout);
  }
  return failed == 0 ? 0 : 1;
}
