// KDTR reader in one header: C++17 and POSIX, no library. The format is defined in kdtree_nb/kdtr.py.
//
//   kdtree::KdtrFile file("data/goldens/tiny.kdtr");
//   const kdtree::KdtrTensor& tokens = file.tensor("read_config.tokens");
//   const int64_t* values = file.data<int64_t>("read_config.tokens");       // checks dtype, and the CRC-32 once
//
// The file is mapped, not read: pointers stay valid as long as the KdtrFile lives. Whatever is wrong with a file is a
// KdtrError that names the file, the tensor or part, what was expected and what came. A damaged or hostile file never
// crashes the reader, nor makes it use more memory than a small multiple of its header; but one that is cut short in
// place while it is open would, as with every mapped file. All members are safe to call from several threads at once.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <deque>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "KDTR data are little-endian and used where they lie");

namespace kdtree {

class KdtrError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// One row of the tensor table; `data` lies in the mapped file, aligned to 64 bytes; it is null where num_bytes is 0.
struct KdtrTensor {
  std::string name;
  std::string dtype;  // f64 f32 bf16 f16 i64 i32 i16 i8 u8 bool
  std::vector<int64_t> shape;
  int64_t offset_bytes = 0, num_bytes = 0;
  uint32_t crc32 = 0;
  const void* data = nullptr;

  int64_t num_elements() const {
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    return count;
  }
};

namespace kdtr_detail {

constexpr std::string_view kMagic("KDTR\r\n\x1a\n", 8);
constexpr uint32_t kVersion = 1;
constexpr uint64_t kPreambleBytes = 24, kMaxHeaderBytes = uint64_t{1} << 26;
constexpr int kMaxRank = 8, kMaxNesting = 64;
constexpr size_t kMaxIntegerDigits = 4300, kMaxShown = 200;

struct DtypeSize {
  std::string_view name;
  int64_t bytes;
};
constexpr DtypeSize kDtypes[] = {{"f64", 8}, {"f32", 4}, {"bf16", 2}, {"f16", 2}, {"i64", 8},
                                 {"i32", 4}, {"i16", 2}, {"i8", 1},   {"u8", 1},  {"bool", 1}};

inline int64_t dtype_bytes(std::string_view dtype) {
  for (const DtypeSize& known : kDtypes)
    if (known.name == dtype) return known.bytes;
  return 0;
}

inline uint64_t align64(uint64_t num_bytes) { return (num_bytes + 63) / 64 * 64; }

// Text for a message, cut between two characters if it is long.
inline std::string shown(std::string_view text) {
  if (text.size() <= kMaxShown) return std::string(text);
  size_t end = kMaxShown;
  while (end > 0 && (text[end] & 0xc0) == 0x80) --end;
  return std::string(text.substr(0, end)) + " …";
}

[[noreturn]] inline void fail(const std::string& path, const std::string& where, const std::string& field,
                              const std::string& expected, std::string_view got) {
  const std::string place = path + ": " + where + ": " + (field.empty() ? "" : field + ": ");
  throw KdtrError(place + "expected " + expected + ", got " + shown(got));
}

inline std::string place_of(std::string_view tensor) { return "tensor '" + shown(tensor) + "'"; }

inline std::string hex(uint32_t value) {
  std::string text = "0x";
  for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[value >> shift & 15];
  return text;
}

// CRC-32 as in zlib, 8 bytes at a time.
inline uint32_t crc32(const void* data, size_t num_bytes) {
  struct Tables {
    uint32_t of[8][256];
    Tables() {
      for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0xedb88320u : 0);
        of[0][byte] = crc;
      }
      for (int k = 1; k < 8; ++k)
        for (int byte = 0; byte < 256; ++byte) of[k][byte] = of[k - 1][byte] >> 8 ^ of[0][of[k - 1][byte] & 255];
    }
  };
  static const Tables tables;
  const auto& of = tables.of;
  const auto* p = static_cast<const unsigned char*>(data);
  uint32_t crc = 0xffffffffu;
  for (; num_bytes >= 8; num_bytes -= 8, p += 8) {
    uint32_t low, high;
    std::memcpy(&low, p, 4);
    std::memcpy(&high, p + 4, 4);
    low ^= crc;
    crc = of[7][low & 255] ^ of[6][low >> 8 & 255] ^ of[5][low >> 16 & 255] ^ of[4][low >> 24] ^  //
          of[3][high & 255] ^ of[2][high >> 8 & 255] ^ of[1][high >> 16 & 255] ^ of[0][high >> 24];
  }
  for (; num_bytes > 0; --num_bytes, ++p) crc = crc >> 8 ^ of[0][(crc ^ *p) & 255];
  return ~crc;
}

// Where the first byte lies that is not well-formed UTF-8, or npos.
inline size_t find_not_utf8(std::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  for (size_t i = 0; i < text.size();) {
    const unsigned lead = byte(i);
    const size_t length = lead < 0x80 ? 1 : lead >= 0xc2 && lead < 0xe0 ? 2 : lead >= 0xe0 && lead < 0xf0 ? 3
                          : lead >= 0xf0 && lead < 0xf5 ? 4 : 0;
    bool valid = length > 0;
    for (size_t k = 1; k < length; ++k) valid = valid && (byte(i + k) & 0xc0) == 0x80;
    const unsigned second = byte(i + 1);  // refuses what is too long, a surrogate, or beyond U+10FFFF
    valid = valid && !(lead == 0xe0 && second < 0xa0) && !(lead == 0xed && second > 0x9f) &&
            !(lead == 0xf0 && second < 0x90) && !(lead == 0xf4 && second > 0x8f);
    if (!valid) return i;
    i += length;
  }
  return std::string_view::npos;
}

// A place in JSON text. `check` refuses what is no JSON; the other members walk through text that has passed it.
class Json {
 public:
  Json(const std::string& path, std::string_view text) : path_(path), text_(text) { skip_space(); }

  // The whole text: one value, no key twice in an object, numbers finite, at most kMaxNesting levels.
  void check() {
    const size_t bad = find_not_utf8(text_);
    if (bad != std::string_view::npos) fail("", "JSON in UTF-8", "another byte at " + std::to_string(bad));
    value(0);
    skip_space();
    if (at_ < text_.size()) fail_syntax("the end");
  }

  bool is_object() const { return peek() == '{'; }
  bool is_array() const { return peek() == '['; }

  // Calls visit(key, text of the value) for each member of the object that the text is.
  template <class Visit>
  void members(Visit&& visit) {
    object(0, visit);
  }

  // Calls visit(text of the item) for each item of the array that the text is.
  template <class Visit>
  void items(Visit&& visit) {
    array(0, visit);
  }

  // The text of each value of an object with exactly these keys. False if it is none.
  bool fields(std::initializer_list<std::pair<std::string_view, std::string_view*>> wanted) {
    size_t num_members = 0, num_known = 0;
    if (!is_object()) return false;
    members([&](std::string_view key, std::string_view value) {
      ++num_members;
      for (const auto& [name, text] : wanted)
        if (name == key) *text = value, ++num_known;
    });
    return num_members == wanted.size() && num_known == wanted.size();
  }

  // What a checked string literal without its quotes stands for, in UTF-8 (a lone surrogate as its three bytes).
  static std::string decoded(std::string_view literal) {
    std::string out;
    out.reserve(literal.size());
    for (size_t i = 0; i < literal.size(); ++i) {
      if (literal[i] != '\\') {
        out += literal[i];
        continue;
      }
      const char c = literal[++i];
      if (c != 'u') {
        constexpr std::string_view kFrom = "bfnrt", kTo = "\b\f\n\r\t";
        const size_t known = kFrom.find(c);
        out += known == std::string_view::npos ? c : kTo[known];
        continue;
      }
      uint32_t code = hex4(literal, i + 1);
      i += 4;
      const bool is_pair = code >= 0xd800 && code < 0xdc00 && literal.substr(i + 1, 2) == "\\u";
      const uint32_t low = is_pair ? hex4(literal, i + 3) : 0;
      if (low >= 0xdc00 && low < 0xe000) code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00), i += 6;
      append_utf8(out, code);
    }
    return out;
  }

 private:
  static bool is_digit(char c) { return c >= '0' && c <= '9'; }
  static int hex_digit(char c) {
    return is_digit(c) ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
  }
  static uint32_t hex4(std::string_view text, size_t at) {
    uint32_t code = 0;
    for (size_t i = at; i < at + 4; ++i) code = code * 16 + static_cast<uint32_t>(hex_digit(text[i]));
    return code;
  }
  static void append_utf8(std::string& out, uint32_t code) {
    const auto tail = [&](int shift) { out += static_cast<char>(0x80 | (code >> shift & 0x3f)); };
    if (code < 0x80) return out.push_back(static_cast<char>(code));
    if (code < 0x800) return out.push_back(static_cast<char>(0xc0 | code >> 6)), tail(0);
    if (code < 0x10000) return out.push_back(static_cast<char>(0xe0 | code >> 12)), tail(6), tail(0);
    out.push_back(static_cast<char>(0xf0 | code >> 18)), tail(12), tail(6), tail(0);
  }

  [[noreturn]] void fail(const char* field, const std::string& expected, std::string_view got) const {
    kdtr_detail::fail(path_, "header", field, expected, got);
  }

  [[noreturn]] void fail_syntax(const char* expected) const {
    const auto byte = static_cast<unsigned char>(peek());
    const std::string place = at_ >= text_.size()             ? "the end"
                              : byte > 0x20 && byte < 0x7f ? std::string("'") + peek() + "'"
                                                              : "the byte " + hex(byte).substr(8);
    fail("", std::string("JSON in UTF-8 with ") + expected, place + " at byte " + std::to_string(at_));
  }

  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  void skip_space() {
    while (at_ < text_.size() && std::strchr(" \t\n\r", text_[at_]) && text_[at_] != '\0') ++at_;
  }

  bool next(char wanted) {
    skip_space();
    if (peek() != wanted) return false;
    ++at_;
    return true;
  }

  // Checks the next value, which lies in `depth` others. Its text, as it is written.
  std::string_view value(int depth) {
    skip_space();
    const size_t begin = at_;
    check_value(depth);
    return text_.substr(begin, at_ - begin);
  }

  void check_value(int depth) {
    const char c = peek();
    if (c == '{' || c == '[') {
      if (depth == kMaxNesting) fail("nesting", "at most " + std::to_string(kMaxNesting) + " levels", "more");
      return c == '{' ? object(depth + 1, [](auto...) {}) : array(depth + 1, [](auto...) {});
    }
    if (c == '"') return check_string();
    for (const std::string_view word : {"true", "false", "null"})
      if (text_.substr(at_, word.size()) == word) return void(at_ += word.size());
    for (const std::string_view word : {"NaN", "Infinity", "-Infinity"})
      if (text_.substr(at_, word.size()) == word) fail("number", "a finite value", word);
    check_number();
  }

  template <class Visit>
  void array(int depth, Visit&& visit) {
    ++at_;
    if (next(']')) return;
    do visit(value(depth));
    while (next(','));
    if (!next(']')) fail_syntax("',' or ']'");
  }

  template <class Visit>
  void object(int depth, Visit&& visit) {
    std::vector<std::string_view> keys;
    std::deque<std::string> with_escapes;  // those that are not written as they read
    ++at_;
    if (next('}')) return;
    do {
      skip_space();
      if (peek() != '"') fail_syntax("a key in quotes");
      const size_t begin = at_ + 1;
      check_string();
      const std::string_view literal = text_.substr(begin, at_ - begin - 1);
      if (literal.find('\\') == std::string_view::npos) keys.push_back(literal);
      else keys.push_back(with_escapes.emplace_back(decoded(literal)));
      if (!next(':')) fail_syntax("':'");
      visit(keys.back(), value(depth));
    } while (next(','));
    if (!next('}')) fail_syntax("',' or '}'");
    std::sort(keys.begin(), keys.end());
    const auto twice = std::adjacent_find(keys.begin(), keys.end());
    if (twice == keys.end()) return;
    kdtr_detail::fail(path_, "tensor or key '" + shown(*twice) + "'", "name", "each name once", "a duplicate");
  }

  void check_string() {
    for (++at_; at_ < text_.size() && text_[at_] != '"'; ++at_) {
      if (static_cast<unsigned char>(text_[at_]) < 0x20) fail_syntax("no control character in a string");
      if (text_[at_] != '\\') continue;
      ++at_;
      if (peek() == 'u') {
        for (int i = 0; i < 4; ++i)
          if (++at_, hex_digit(peek()) < 0) fail_syntax("four hexadecimal digits");
      } else if (peek() == '\0' || !std::strchr("\"\\/bfnrt", peek())) {
        fail_syntax("an escape");
      }
    }
    if (at_ >= text_.size()) fail_syntax("a closing quote");
    ++at_;
  }

  size_t check_digits() {
    const size_t begin = at_;
    while (is_digit(peek())) ++at_;
    if (at_ == begin) fail_syntax("a value");
    return at_ - begin;
  }

  void check_number() {
    const size_t begin = at_;
    if (peek() == '-') ++at_;
    const size_t first = at_;
    if (peek() == '0') ++at_;
    else check_digits();
    const size_t num_digits = at_ - first;
    bool is_integer = true;
    if (peek() == '.') ++at_, check_digits(), is_integer = false;
    if (peek() == 'e' || peek() == 'E') {
      ++at_, is_integer = false;
      if (peek() == '+' || peek() == '-') ++at_;
      check_digits();
    }
    const std::string_view number = text_.substr(first, at_ - first);
    if (is_integer && num_digits > kMaxIntegerDigits)
      fail("", "JSON with integers of at most 4300 digits", std::to_string(num_digits) + " digits");
    if (!is_integer && overflows(number)) fail("number", "a finite value", text_.substr(begin, at_ - begin));
  }

  // Whether a number without its sign is infinite as a double.
  static bool overflows(std::string_view number) {
    double value = 0;
    if (std::from_chars(number.data(), number.data() + number.size(), value).ec != std::errc::result_out_of_range)
      return false;
    const size_t mark = std::min(number.find_first_of("eE"), number.size());
    const size_t point = std::min(number.find('.'), mark);
    const size_t lead = number.find_first_not_of("0.");  // too large, or so small that it is 0?
    int64_t exponent = 0;
    for (const char c : number.substr(std::min(mark + 1, number.size())))
      if (is_digit(c)) exponent = std::min<int64_t>(exponent * 10 + (c - '0'), int64_t{1} << 40);
    if (number.find('-', mark) != std::string_view::npos) exponent = -exponent;
    return exponent + static_cast<int64_t>(point) - static_cast<int64_t>(lead) > 0;
  }

  const std::string& path_;
  std::string_view text_;
  size_t at_ = 0;
};

// The count that a JSON number is: an integer from 0 up to below 2^63. False for everything else.
inline bool read_count(std::string_view number, int64_t* out) {
  if (number == "-0") number = "0";
  const char* end = number.data() + number.size();
  const auto parsed = std::from_chars(number.data(), end, *out);
  return parsed.ec == std::errc() && parsed.ptr == end && *out >= 0;
}

// a * b where that is below 2^63.
inline bool multiply(int64_t a, int64_t b, int64_t* out) {
  if (b != 0 && a > INT64_MAX / b) return false;
  *out = a * b;
  return true;
}

class Mapping {
 public:
  explicit Mapping(const std::string& path) {
    const auto fail = [&](const std::string& got) {
      kdtr_detail::fail(path, "file", "", "a readable, non-empty KDTR file", got);
    };
    struct stat status;
    if (path.find('\0') != std::string::npos) fail("a name with a NUL");
    if (stat(path.c_str(), &status) != 0) fail(std::strerror(errno));
    if (!S_ISREG(status.st_mode)) fail("a folder or device");  // before opening: a pipe would block
    const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) fail(std::strerror(errno));
    if (fstat(descriptor, &status) != 0 || status.st_size == 0) close(descriptor), fail("an empty file");
    size_ = static_cast<size_t>(status.st_size);
    void* data = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, descriptor, 0);
    const int error = errno;
    close(descriptor);
    if (data == MAP_FAILED) fail(std::strerror(error));
    data_ = static_cast<const char*>(data);
  }
  ~Mapping() { munmap(const_cast<char*>(data_), size_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::string_view bytes() const { return {data_, size_}; }

 private:
  const char* data_ = nullptr;
  size_t size_ = 0;
};

template <class T>
constexpr std::string_view dtype_of();
template <> constexpr std::string_view dtype_of<double>() { return "f64"; }
template <> constexpr std::string_view dtype_of<float>() { return "f32"; }
template <> constexpr std::string_view dtype_of<int64_t>() { return "i64"; }
template <> constexpr std::string_view dtype_of<int32_t>() { return "i32"; }
template <> constexpr std::string_view dtype_of<int16_t>() { return "i16"; }
template <> constexpr std::string_view dtype_of<int8_t>() { return "i8"; }
template <> constexpr std::string_view dtype_of<uint8_t>() { return "u8"; }
template <> constexpr std::string_view dtype_of<bool>() { return "bool"; }

}  // namespace kdtr_detail

class KdtrFile {
 public:
  explicit KdtrFile(const std::string& path) : path_(path), map_(path) {
    const std::string_view header = find_header();
    kdtr_detail::Json(path_, header).check();
    read_header(header);
    check_places();
    verified_ = std::make_unique<std::atomic<bool>[]>(tensors_.size());
  }
  KdtrFile(const KdtrFile&) = delete;
  KdtrFile& operator=(const KdtrFile&) = delete;

  const std::string& path() const { return path_; }

  // The metadata object as it is written: JSON in UTF-8 that has been checked.
  std::string_view metadata_json() const { return metadata_; }

  // In the order of the header.
  const std::vector<KdtrTensor>& tensors() const { return tensors_; }

  bool contains(const std::string& name) const { return index_.count(name) > 0; }

  // The row of the table, whose data nobody has compared with their CRC-32 yet.
  const KdtrTensor& tensor(const std::string& name) const { return tensors_[find(name)]; }

  // The data of a tensor, of any dtype. The first call for a name checks its CRC-32.
  const void* data(const std::string& name) const {
    const size_t i = find(name);
    if (!verified_[i]) verify(i);
    return tensors_[i].data;
  }

  // The same, for one dtype; bf16 and f16 have none of their own here: use data(name).
  template <class T>
  const T* data(const std::string& name) const {
    const std::string_view dtype = kdtr_detail::dtype_of<T>();
    if (tensor(name).dtype != dtype) fail(kdtr_detail::place_of(name), "dtype", std::string(dtype), tensor(name).dtype);
    return static_cast<const T*>(data(name));
  }

  // Checks the CRC-32 of every tensor, also of those checked before.
  void verify() const {
    for (size_t i = 0; i < tensors_.size(); ++i) verify(i);
  }

 private:
  [[noreturn]] void fail(const std::string& where, const std::string& field, const std::string& expected,
                         std::string_view got) const {
    kdtr_detail::fail(path_, where, field, expected, got);
  }

  template <class T>
  T number_at(size_t offset) const {
    T value;
    std::memcpy(&value, map_.bytes().data() + offset, sizeof value);
    return value;
  }

  // Checks what comes before the JSON text, and returns it.
  std::string_view find_header() {
    using namespace kdtr_detail;
    const std::string_view all = map_.bytes();
    const auto at_least = [](uint64_t size) {
      return "at least " + std::to_string(size) + " bytes (the file may be truncated)";
    };
    if (all.size() < kPreambleBytes) fail("file", "size", at_least(kPreambleBytes), std::to_string(all.size()));
    if (all.substr(0, 8) != kMagic) fail("file", "magic", "the bytes 4b 44 54 52 0d 0a 1a 0a", "others");
    const uint32_t version = number_at<uint32_t>(8), crc = number_at<uint32_t>(12);
    if (version != kVersion)
      fail("file", "version", std::to_string(kVersion),
           std::to_string(version) + (version > kVersion ? " (written by a newer kdtree_nb: update)" : ""));
    const uint64_t num_bytes = number_at<uint64_t>(16), limit = std::min(all.size() - kPreambleBytes, kMaxHeaderBytes);
    if (num_bytes > limit)
      fail("header", "length", "at most " + std::to_string(limit) + " bytes (the file may be truncated)",
           std::to_string(num_bytes));
    const uint32_t found = kdtr_detail::crc32(all.data() + 16, 8 + num_bytes);
    if (found != crc) fail("header", "CRC-32", hex(crc), hex(found));
    data_begin_ = align64(kPreambleBytes + num_bytes);
    if (data_begin_ > all.size()) fail("file", "size", at_least(data_begin_), std::to_string(all.size()));
    return all.substr(kPreambleBytes, num_bytes);
  }

  void read_header(std::string_view header) {
    using kdtr_detail::Json;
    std::string_view tensors;
    if (!Json(path_, header).fields({{"metadata", &metadata_}, {"tensors", &tensors}}))
      fail("header", "JSON", "an object with the keys metadata and tensors", header);
    if (metadata_.front() != '{') fail("header", "metadata", "a JSON object", metadata_);
    if (tensors.front() != '{') fail("header", "tensors", "a JSON object", tensors);
    Json(path_, tensors).members([&](std::string_view name, std::string_view fields) { read_entry(name, fields); });
    for (size_t i = 0; i < tensors_.size(); ++i) index_.emplace(tensors_[i].name, i);
  }

  void read_entry(std::string_view name, std::string_view text) {
    const std::string where = kdtr_detail::place_of(name);
    if (name.empty()) fail(where, "name", "a non-empty string", "an empty one");
    std::string_view dtype, shape, offset, num_bytes, crc;
    if (!kdtr_detail::Json(path_, text).fields({{"dtype", &dtype}, {"shape", &shape}, {"offset", &offset},
                                                {"bytes", &num_bytes}, {"crc32", &crc}}))
      fail(where, "entry", "the keys dtype, shape, offset, bytes, crc32", text);
    KdtrTensor tensor;
    tensor.name = name;
    read_shape(where, dtype, shape, num_bytes, &tensor);
    if (!kdtr_detail::read_count(offset, &tensor.offset_bytes) || tensor.offset_bytes % 64 != 0)
      fail(where, "offset", "a non-negative multiple of 64", offset);
    int64_t value = 0;
    if (!kdtr_detail::read_count(crc, &value) || value > int64_t{UINT32_MAX})
      fail(where, "crc32", "an integer below 2^32", crc);
    tensor.crc32 = static_cast<uint32_t>(value);
    tensors_.push_back(std::move(tensor));
  }

  void read_shape(const std::string& where, std::string_view dtype, std::string_view shape, std::string_view num_bytes,
                  KdtrTensor* tensor) const {
    using namespace kdtr_detail;
    tensor->dtype = dtype.front() == '"' ? Json::decoded(dtype.substr(1, dtype.size() - 2)) : "";
    const int64_t item_bytes = dtype_bytes(tensor->dtype);
    if (item_bytes == 0) fail(where, "dtype", "one of f64 f32 bf16 f16 i64 i32 i16 i8 u8 bool", dtype);
    Json sizes(path_, shape);
    bool valid = sizes.is_array();
    if (valid)
      sizes.items([&](std::string_view item) {
        int64_t size = 0;
        valid = valid && tensor->shape.size() < kMaxRank && read_count(item, &size);
        if (valid) tensor->shape.push_back(size);
      });
    if (!valid) fail(where, "shape", "at most 8 non-negative integers", shape);
    int64_t capacity = item_bytes, wanted = item_bytes, got = 0;
    for (const int64_t size : tensor->shape)
      if (!multiply(capacity, std::max<int64_t>(size, 1), &capacity))
        fail(where, "shape", "fewer than 2^63 bytes", shape);
    for (const int64_t size : tensor->shape) wanted *= size;
    if (!read_count(num_bytes, &got) || got != wanted)
      fail(where, "bytes", std::to_string(wanted) + " for shape " + shown(shape) + " of " + tensor->dtype, num_bytes);
    tensor->num_bytes = got;
  }

  // Tensors lie one behind the other without overlap or gap, up to the end of the file. Sets their data.
  void check_places() {
    using kdtr_detail::align64;
    const uint64_t data_bytes = map_.bytes().size() - data_begin_;
    std::vector<KdtrTensor*> filled;
    for (KdtrTensor& tensor : tensors_)
      if (tensor.num_bytes > 0) filled.push_back(&tensor);
    std::sort(filled.begin(), filled.end(), [](const KdtrTensor* a, const KdtrTensor* b) {
      return a->offset_bytes != b->offset_bytes ? a->offset_bytes < b->offset_bytes
             : a->num_bytes != b->num_bytes     ? a->num_bytes < b->num_bytes
                                                : a->name < b->name;
    });
    uint64_t end = 0;
    std::string last = "the start";
    for (KdtrTensor* tensor : filled) {
      const std::string where = kdtr_detail::place_of(tensor->name);
      const uint64_t begin = static_cast<uint64_t>(tensor->offset_bytes);
      if (begin < end)
        fail(where, "offset", "no overlap with '" + last + "', which ends at " + std::to_string(end),
             std::to_string(begin));
      if (begin != align64(end))
        fail(where, "offset", std::to_string(align64(end)) + ", the first multiple of 64 after '" + last + "'",
             std::to_string(begin));
      end = begin + static_cast<uint64_t>(tensor->num_bytes), last = kdtr_detail::shown(tensor->name);
      if (end > data_bytes)
        fail(where, "end", "at most " + std::to_string(data_bytes) + " (the file may be truncated)",
             std::to_string(end));
      tensor->data = map_.bytes().data() + data_begin_ + begin;
    }
    if (end != data_bytes)
      fail("file", "data section", std::to_string(end) + " bytes, the end of the last tensor",
           std::to_string(data_bytes));
  }

  size_t find(const std::string& name) const {
    const auto found = index_.find(name);
    if (found == index_.end())
      fail(kdtr_detail::place_of(name), "name", "a tensor of this file",
           "none among its " + std::to_string(tensors_.size()));
    return found->second;
  }

  void verify(size_t i) const {
    const KdtrTensor& tensor = tensors_[i];
    const std::string where = kdtr_detail::place_of(tensor.name);
    const auto num_bytes = static_cast<size_t>(tensor.num_bytes);
    const uint32_t found = kdtr_detail::crc32(tensor.data, num_bytes);
    if (found != tensor.crc32)
      fail(where, "CRC-32", kdtr_detail::hex(tensor.crc32), kdtr_detail::hex(found) + ": data is damaged");
    const auto* bytes = static_cast<const unsigned char*>(tensor.data);
    if (tensor.dtype == "bool" && std::any_of(bytes, bytes + num_bytes, [](unsigned char byte) { return byte > 1; }))
      fail(where, "bool bytes", "0 or 1", "another value");
    verified_[i] = true;
  }

  std::string path_;
  kdtr_detail::Mapping map_;
  uint64_t data_begin_ = 0;
  std::string_view metadata_;
  std::vector<KdtrTensor> tensors_;
  std::unordered_map<std::string, size_t> index_;
  std::unique_ptr<std::atomic<bool>[]> verified_;
};

}  // namespace kdtree
