// KDTR files for C: kdtr.h behind functions that return a status.
#include "kdtr.h"

#include <algorithm>
#include <new>

#include "error.h"

struct kdtree_kdtr {
  explicit kdtree_kdtr(const char* path) : file(path), metadata(file.metadata_json()) {}

  const kdtree::KdtrFile file;
  const std::string metadata;
};

namespace {

using kdtree::capi::fail;

// Calls f, and turns what it throws into a status.
template <class F>
kdtree_status guarded(F&& f) {
  try {
    f();
    return KDTREE_OK;
  } catch (const kdtree::KdtrError& error) {
    return fail(KDTREE_BAD_FILE, "%s", error.what());
  } catch (const std::bad_alloc&) {
    return fail(KDTREE_OUT_OF_MEMORY, "kdtr: expected memory for a file's header, got none");
  }
}

kdtree_status check_pointer(const char* op, const char* name, const void* pointer) {
  if (pointer != nullptr) return KDTREE_OK;
  return fail(KDTREE_INVALID_ARGUMENT, "%s: %s: expected an address, got NULL", op, name);
}

void describe(const kdtree::KdtrFile& file, const kdtree::KdtrTensor& tensor, kdtree_kdtr_tensor* out) {
  *out = {tensor.name.c_str(), tensor.dtype.c_str(), file.data(tensor.name), tensor.num_bytes,
          static_cast<int32_t>(tensor.shape.size()), {}};
  std::copy(tensor.shape.begin(), tensor.shape.end(), out->shape);
}

}  // namespace

extern "C" {

kdtree_status kdtree_kdtr_open(const char* path, kdtree_kdtr** out) {
  if (const kdtree_status status = check_pointer("kdtr_open", "path", path)) return status;
  if (const kdtree_status status = check_pointer("kdtr_open", "out", out)) return status;
  *out = nullptr;
  return guarded([&] { *out = new kdtree_kdtr(path); });
}

void kdtree_kdtr_close(kdtree_kdtr* file) { delete file; }

int64_t kdtree_kdtr_num_tensors(const kdtree_kdtr* file) {
  return file == nullptr ? 0 : static_cast<int64_t>(file->file.tensors().size());
}

const char* kdtree_kdtr_metadata(const kdtree_kdtr* file) { return file == nullptr ? "" : file->metadata.c_str(); }

kdtree_status kdtree_kdtr_get(const kdtree_kdtr* file, int64_t index, kdtree_kdtr_tensor* out) {
  const char* op = "kdtr_get";
  if (const kdtree_status status = check_pointer(op, "file", file)) return status;
  if (const kdtree_status status = check_pointer(op, "out", out)) return status;
  const int64_t count = kdtree_kdtr_num_tensors(file);
  if (index < 0 || index >= count)
    return fail(KDTREE_INVALID_ARGUMENT, "%s: index: expected 0 to below %lld, got %lld", op,
                static_cast<long long>(count), static_cast<long long>(index));
  return guarded([&] { describe(file->file, file->file.tensors()[static_cast<size_t>(index)], out); });
}

kdtree_status kdtree_kdtr_find(const kdtree_kdtr* file, const char* name, kdtree_kdtr_tensor* out) {
  const char* op = "kdtr_find";
  if (const kdtree_status status = check_pointer(op, "file", file)) return status;
  if (const kdtree_status status = check_pointer(op, "name", name)) return status;
  if (const kdtree_status status = check_pointer(op, "out", out)) return status;
  return guarded([&] { describe(file->file, file->file.tensor(name), out); });
}

}  // extern "C"
