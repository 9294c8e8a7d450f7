#include "tetri/pump.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <array>
#include <random>

#include "check.h"

using namespace tetri;

namespace {

struct Pair {
  Fd near, far;

  Pair() {
    std::array<int, 2> both{};
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, both.data()) == 0);
    near = Fd(both[0]);
    far = Fd(both[1]);
  }
  void write(const std::string& text) const {
    CHECK(::send(far.get(), text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()));
  }
  std::string read() const {
    std::string all(1 << 20, '\0');
    const ssize_t size = ::recv(far.get(), all.data(), all.size(), 0);
    all.resize(size < 0 ? 0 : static_cast<size_t>(size));
    return all;
  }
};

std::string chunk(const std::string& text) {
  std::array<char, 24> head{};
  std::snprintf(head.data(), head.size(), "%zx\r\n", text.size());
  return head.data() + text + "\r\n";
}

const std::string kEvent = "data: {\"created\":7,\"text\":\"a\",\"token_ids\":[12,3]}\n\n";

struct Case {
  Pair instance, client;
  Pump pump{{"data: [DONE]"}};
  FlowPtr flow;

  explicit Case(FlowRules rules = {})
      : flow(pump.begin(instance.near.get(), client.near.get(), std::move(rules))) {}
  std::vector<FlowPtr> turn() {
    size_t num_read = 0;
    return pump.turn(64, &num_read);
  }
};

}  // namespace

TEST(pump_moves_whole_events) {
  Case it;
  const std::string sent = chunk(kEvent);
  it.instance.write(sent.substr(0, 9));
  CHECK(it.turn().empty() && it.client.read().empty());
  it.instance.write(sent.substr(9) + sent + sent.substr(0, 2));
  CHECK(it.turn().empty());
  CHECK(it.client.read() == chunk(kEvent + kEvent));
  CHECK(it.flow->num_events() == 2 && it.flow->last_s() > 0 && it.flow->take_kept().empty());
  CHECK(it.flow->end() == sent.substr(0, 2) && it.flow->end().empty());
  it.instance.write(sent);
  CHECK(it.turn().empty() && it.client.read().empty());
}

TEST(pump_hides_ids_and_keeps_them) {
  FlowRules rules;
  rules.keeps = rules.hides_ids = true;
  rules.theirs = "\"created\":7,";
  rules.ours = "\"created\":1234,";
  Case it(rules);
  it.instance.write(chunk(kEvent));
  CHECK(it.turn().empty());
  CHECK(it.client.read() ==
        chunk("data: {\"created\":1234,\"text\":\"a\",\"token_ids\":null}\n\n"));
  CHECK(it.flow->take_kept() == "data: {\"created\":1234,\"text\":\"a\",\"token_ids\":[12,3]}\n\n");
}

TEST(pump_leaves_what_it_does_not_know) {
  const std::array<std::string, 8> strange = {"0\r\n\r\n",
                                              "zz\r\n",
                                              "fffffff\r\n",
                                              chunk("data: 1\n"),
                                              chunk("data: [DONE]\n\n"),
                                              "2\r\n\n\nxx",
                                              "fffffffffffffffffffff\r\n",
                                              "\r\n"};
  for (const std::string& bytes : strange) {
    Case it;
    it.instance.write(chunk(kEvent) + bytes + chunk(kEvent));
    const auto stopped = it.turn();
    CHECK(stopped.size() == 1 && stopped[0] == it.flow);
    CHECK(it.flow->state() == FlowState::kEnded);
    CHECK(it.client.read() == chunk(kEvent));
    CHECK(it.flow->end() == bytes + chunk(kEvent));
  }
}

TEST(pump_stops_with_either_connection) {
  Case lost;
  lost.instance.write(chunk(kEvent));
  lost.instance.far.reset();
  CHECK(lost.turn().size() == 1);
  CHECK(lost.client.read() == chunk(kEvent) && lost.flow->state() == FlowState::kEnded);
  Case gone;
  gone.client.far.reset();
  gone.instance.write(chunk(kEvent));
  CHECK(gone.turn().size() == 1);
  CHECK(gone.flow->state() == FlowState::kFull && gone.flow->take_unsent() == chunk(kEvent));
}

TEST(pump_stops_for_a_slow_client) {
  Case it;
  std::string got;
  size_t num_sent = 0;
  while (it.turn().empty()) {
    it.instance.write(chunk(kEvent));
    ++num_sent;
  }
  CHECK(it.flow->state() == FlowState::kFull);
  for (std::string some = it.client.read(); !some.empty(); some = it.client.read()) got += some;
  got += it.flow->take_unsent();
  CHECK(it.flow->num_events() == num_sent && it.flow->end().empty());
  size_t at = 0;
  for (size_t index = 0; index < num_sent; ++index, at += chunk(kEvent).size()) {
    CHECK(got.compare(at, chunk(kEvent).size(), chunk(kEvent)) == 0);
  }
  CHECK(at == got.size());
}

TEST(pump_keeps_so_much) {
  FlowRules rules;
  rules.keeps = true;
  Case it(rules);
  std::string kept;
  while (it.turn().empty()) {
    it.instance.write(chunk(kEvent));
    kept += kEvent;
    it.client.read();
  }
  CHECK(it.flow->state() == FlowState::kKept && it.flow->take_kept() == kept);
  CHECK(it.flow->state() == FlowState::kOpen && it.client.read() == chunk(kEvent));
  it.instance.write(chunk(kEvent));
  CHECK(it.turn().empty() && it.client.read() == chunk(kEvent));
  CHECK(kept.size() > 1 << 16 && kept.size() < 1 << 17);
}

TEST(pump_takes_any_bytes) {
  std::mt19937 dice(1);
  for (int turn = 0; turn < 5000; ++turn) {
    FlowRules rules;
    rules.keeps = rules.hides_ids = rules.drops_empty = true;
    Case it(rules);
    std::string bytes = chunk(kEvent) + chunk(kEvent);
    for (unsigned flips = dice() % 6; flips > 0; --flips) {
      bytes[dice() % bytes.size()] = static_cast<char>(dice());
    }
    const size_t cut = dice() % bytes.size();
    it.instance.write(bytes.substr(0, cut));
    bool is_over = !it.turn().empty();
    it.instance.write(bytes.substr(cut));
    is_over = is_over || !it.turn().empty();
    CHECK(is_over == (it.flow->state() != FlowState::kOpen));
  }
}

TEST(pump_may_end_before_its_flows) {
  Pair instance, client;
  FlowPtr flow;
  {
    Pump pump({});
    flow = pump.begin(instance.near.get(), client.near.get(), {});
    instance.write("5");
    size_t num_read = 0;
    CHECK(pump.turn(64, &num_read).empty() && num_read == 1);
  }
  CHECK(flow->state() == FlowState::kEnded);
}

TEST(pump_hides_only_lists_of_numbers) {
  const std::string ids = "{\"prompt_token_ids\":[1],\"token_ids\":[]}";
  CHECK(hide_ids(ids, false, false) == "{\"prompt_token_ids\":[1],\"token_ids\":null}");
  CHECK(hide_ids(ids + ids, true, false) ==
        "{\"prompt_token_ids\":null,\"token_ids\":null}"
        "{\"prompt_token_ids\":[1],\"token_ids\":null}");
  const std::string text =
      "{\"text\":\"\\\"token_ids\\\":[1]\",\"token_ids\":[\"1\"],\"token_ids\":[1";
  CHECK(hide_ids(text, true, true) == text);
}

TEST(pump_drops_events_that_hold_only_ids) {
  const std::string empty =
      "data: {\"delta\":{},\"logprobs\":null,\"finish_reason\":null,\"token_ids\":[1]}\n\n";
  const std::string other = "data: {\"delta\":{},\"finish_reason\":\"stop\"}\n\n";
  CHECK(hide_ids(empty + other + empty, false, true) == other);
  CHECK(hide_ids(empty, false, false) != "");
  const std::string two_lines = "event: x\n" + empty;
  CHECK(!hide_ids(two_lines, false, true).empty());
}
