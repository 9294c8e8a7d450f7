#include "tetri/frame.h"

namespace tetri {

namespace {

struct WireHeader {
  uint32_t magic;
  uint16_t version;
  uint16_t type;
  uint32_t length;
};
static_assert(sizeof(WireHeader) == kHeaderSize);

constexpr size_t kMaxTextBytes = 4096;

uint32_t longest_body(Type type) {
  switch (type) {
    case Type::kData:
      return kDataChunkBytes + uint32_t{kDataPrefixBytes + kDataSumBytes};
    case Type::kWelcome:
      return kMaxControlBytes + uint32_t{kMaxOffers * kMaxOfferBytes};
    case Type::kChallenge:
    case Type::kProof:
      return kProofBodyBytes;
    default:
      return kMaxControlBytes;
  }
}

std::string value_in(const Identity& identity, const std::string& key) {
  const auto found = identity.find(key);
  return found == identity.end() ? "absent" : found->second;
}

}  // namespace

Header parse_header(const uint8_t* bytes) {
  WireHeader header{};
  std::memcpy(&header, bytes, sizeof(header));
  if (header.magic != kMagic) throw FrameError("not a frame of this protocol");
  if (header.version != kVersion) {
    throw FrameError("a frame of protocol version " + std::to_string(header.version) +
                     ", and this side speaks " + std::to_string(kVersion) +
                     "; install the same vllm-tetri on both sides");
  }
  if (header.type < static_cast<uint16_t>(Type::kHello) ||
      header.type > static_cast<uint16_t>(Type::kProgress)) {
    throw FrameError("unknown frame type " + std::to_string(header.type));
  }
  const auto type = static_cast<Type>(header.type);
  const uint32_t limit = longest_body(type);
  if (header.length > limit) {
    throw FrameError("frame of " + std::to_string(header.length) + " bytes exceeds " +
                     std::to_string(limit));
  }
  return {type, header.length};
}

void write_header(uint8_t* bytes, Type type, uint32_t length) {
  const WireHeader header{kMagic, kVersion, static_cast<uint16_t>(type), length};
  std::memcpy(bytes, &header, sizeof(header));
}

void Encoder::operator()(const std::string& value) {
  (*this)(static_cast<uint32_t>(value.size()));
  text_ += value;
}

void Encoder::operator()(const Identity& value) {
  (*this)(static_cast<uint32_t>(value.size()));
  for (const auto& [key, text] : value) {
    (*this)(key);
    (*this)(text);
  }
}

void Decoder::operator()(std::string& value) {
  uint32_t length = 0;
  (*this)(length);
  value = std::string(cut(length));
}

void Decoder::operator()(Identity& value) {
  uint32_t count = 0;
  (*this)(count);
  value.clear();
  for (uint32_t index = 0; index < count; ++index) {  // ends early: every entry needs 8 bytes
    std::string key;
    (*this)(key);
    (*this)(value[key]);
  }
}

void Decoder::end() const {
  if (!rest_.empty()) throw FrameError(std::to_string(rest_.size()) + " bytes too many in a frame");
}

std::string_view Decoder::cut(size_t bytes) {
  if (bytes > rest_.size()) throw FrameError("a frame ends in the middle of a field");
  const std::string_view piece = rest_.substr(0, bytes);
  rest_.remove_prefix(bytes);
  return piece;
}

bool FrameParser::next(Frame* frame) {
  const size_t available = buffer_.size() - begin_;
  if (available >= kHeaderSize) {
    const Header header = parse_header(reinterpret_cast<const uint8_t*>(buffer_.data()) + begin_);
    if (header.type == Type::kData) throw FrameError("data on a control connection");
    if (available >= kHeaderSize + header.length) {
      *frame = {header.type, buffer_.substr(begin_ + kHeaderSize, header.length)};
      begin_ += kHeaderSize + header.length;
      return true;
    }
  }
  buffer_.erase(0, begin_);
  begin_ = 0;
  return false;
}

std::string printable(std::string_view text) {
  std::string shown(text.substr(0, kMaxTextBytes));
  for (char& letter : shown) {
    if (letter < ' ' || letter > '~') letter = '?';
  }
  return shown;
}

std::string identity_difference(const Identity& here, const Identity& there) {
  Identity keys = here;
  keys.insert(there.begin(), there.end());
  std::string text;
  for (const auto& entry : keys) {
    const std::string& key = entry.first;
    if (here.count(key) != 0 && there.count(key) != 0 && here.at(key) == there.at(key)) continue;
    text += (text.empty() ? "" : "; ") + key + ": here " + value_in(here, key) + ", there " +
            value_in(there, key);
  }
  return text;
}

}  // namespace tetri
