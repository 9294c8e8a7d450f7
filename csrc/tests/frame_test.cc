#include "tetri/frame.h"

#include <random>

#include "check.h"

using namespace tetri;

namespace {

Frame only_frame(const std::string& bytes) {
  FrameParser parser;
  parser.feed(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  Frame frame;
  CHECK(parser.next(&frame));
  CHECK(parser.empty());
  return frame;
}

Hello hello() {
  Hello message;
  message.identity = {{"model", "tiny"}, {"block_size", "16"}};
  message.rank = 1;
  message.num_ranks = 2;
  message.boot_id = "boot";
  return message;
}

}  // namespace

TEST(frame_round_trip) {
  const auto read = decode<Hello>(only_frame(encode(hello())));
  CHECK(read.identity == hello().identity);
  CHECK(read.rank == 1 && read.num_ranks == 2 && read.boot_id == "boot");
  CHECK_THROWS(decode<Open>(only_frame(encode(hello()))), FrameError);
}

TEST(frame_parser_takes_bytes_one_by_one) {
  const std::string bytes = encode(hello()) + encode(Done{7, 8});
  FrameParser parser;
  Frame frame;
  int frames = 0;
  for (const char byte : bytes) {
    parser.feed(reinterpret_cast<const uint8_t*>(&byte), 1);
    while (parser.next(&frame)) ++frames;
  }
  CHECK(frames == 2);
  CHECK(decode<Done>(frame).total_bytes == 8);
}

TEST(frame_truncated_anywhere_is_an_error) {
  const Frame whole = only_frame(encode(hello()));
  for (size_t length = 0; length < whole.body.size(); ++length) {
    const Frame part{whole.type, whole.body.substr(0, length)};
    CHECK_THROWS(decode<Hello>(part), FrameError);
  }
  CHECK_THROWS(decode<Hello>(Frame{whole.type, whole.body + "x"}), FrameError);
}

TEST(frame_random_bytes_never_do_more_than_throw) {
  std::mt19937 dice(1);
  const std::string good = encode(hello());
  for (int turn = 0; turn < 20000; ++turn) {
    std::string bytes = good;
    for (unsigned flips = 1 + dice() % 8; flips > 0; --flips) {
      bytes[dice() % bytes.size()] = static_cast<char>(dice());
    }
    FrameParser parser;
    parser.feed(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
    try {
      Frame frame;
      while (parser.next(&frame)) decode<Hello>(frame);
    } catch (const FrameError&) {
    }
  }
}

TEST(frame_of_another_version_is_recognised) {
  std::string bytes = encode(Done{1, 2});
  bytes[4] = 9;
  CHECK_THROWS(parse_header(reinterpret_cast<const uint8_t*>(bytes.data())), FrameError);
}

TEST(identity_difference_names_every_key) {
  CHECK(identity_difference({{"a", "1"}}, {{"a", "1"}}).empty());
  CHECK(identity_difference({{"a", "1"}, {"b", "2"}}, {{"a", "3"}, {"c", "4"}}) ==
        "a: here 1, there 3; b: here 2, there absent; c: here absent, there 4");
}
