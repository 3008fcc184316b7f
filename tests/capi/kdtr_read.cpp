// Reads the KDTR files whose paths stand on the input, one a line, and says what each holds or why it is refused.
#include <iostream>
#include <string>

#include "capi/kdtr.h"

namespace {

std::string hex(std::string_view bytes) {
  std::string text;
  for (const unsigned char byte : bytes) text += "0123456789abcdef"[byte / 16], text += "0123456789abcdef"[byte % 16];
  return text;
}

// name:dtype:shape:CRC-32 of each tensor, then the metadata; texts in hexadecimal.
std::string content(const kdtree::KdtrFile& file) {
  std::string text;
  for (const kdtree::KdtrTensor& tensor : file.tensors()) {
    text += hex(tensor.name) + ":" + tensor.dtype + ":";
    for (const int64_t size : tensor.shape) text += std::to_string(size) + ",";
    const void* data = file.data(tensor.name);
    text += ":" + std::to_string(kdtree::kdtr_detail::crc32(data, static_cast<size_t>(tensor.num_bytes))) + " ";
  }
  file.verify();
  return text + hex(file.metadata_json());
}

}  // namespace

int main() {
  for (std::string path; std::getline(std::cin, path);) {
    try {
      const kdtree::KdtrFile file(path);
      const std::string found = content(file);
      std::cout << "ok " << found << std::endl;
    } catch (const kdtree::KdtrError& error) {
      std::cout << "refused " << hex(error.what()) << std::endl;
    }
  }
}
