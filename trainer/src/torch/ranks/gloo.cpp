// c10d's store and its process group over Gloo, as bytes in and out: what ranks meet and talk through. The wheel
// has c10d's headers and none of Gloo's, which ProcessGroupGloo.hpp includes. So the group is declared here with
// what is public of it in libtorch 2.11, made by its own constructor in libtorch_cpu, and used through its base.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/headeronly/version.h>

#include <cstring>

static_assert(TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR == 11, "compare what is declared below");

namespace gloo::transport {
class Device;
}

namespace c10d {
class ProcessGroupGloo : public Backend {
 public:
  struct Options : public Backend::Options {
    static c10::intrusive_ptr<Options> create_default(std::chrono::milliseconds timeout);
    std::vector<std::shared_ptr<::gloo::transport::Device>> devices;
    int threads;
  };
  // Also keeps this file from having a table of virtual functions of its own.
  ~ProcessGroupGloo() override;
  ProcessGroupGloo(const c10::intrusive_ptr<Store>&, int rank, int size, c10::intrusive_ptr<Options>);
  static std::shared_ptr<::gloo::transport::Device> createDeviceForInterface(const std::string&, bool lazy);

 private:
  // More than the members that the constructor fills.
  char rest_[8192];
};
}  // namespace c10d

namespace {
using Store = c10::intrusive_ptr<c10d::Store>;
using Group = c10::intrusive_ptr<c10d::Backend>;
using Work = c10::intrusive_ptr<c10d::Work>;

// What was thrown, for the caller: zero-terminated, cut to the room there is.
struct Text {
  char* to;
  size_t len;
};

template <class F>
auto guarded(Text text, F&& f) -> decltype(f()) {
  try {
    return f();
  } catch (const std::exception& e) {
    std::strncpy(text.to, e.what(), text.len - 1);
  } catch (...) {
    std::strncpy(text.to, "unknown", text.len - 1);
  }
  return {};
}

at::Tensor bytes(void* p, int64_t len) {
  return at::from_blob(p, {len}, at::kByte);
}
}  // namespace

extern "C" void* q4_store_open(const char* host, uint16_t port, bool serves, int64_t timeout_ms, Text text) {
  return guarded(text, [&]() -> void* {
    c10d::TCPStoreOptions o;
    o.port = port;
    o.isServer = serves;
    o.waitWorkers = false;
    o.timeout = std::chrono::milliseconds(timeout_ms);
    return new Store(c10::make_intrusive<c10d::TCPStore>(host, o));
  });
}

extern "C" void* q4_store_within(void* store, const char* prefix, Text text) {
  return guarded(text, [&]() -> void* {
    return new Store(c10::make_intrusive<c10d::PrefixStore>(prefix, *static_cast<Store*>(store)));
  });
}

extern "C" uint16_t q4_store_port(void* store) {
  const auto* tcp = dynamic_cast<c10d::TCPStore*>(static_cast<Store*>(store)->get());
  return tcp ? tcp->getPort() : 0;
}

extern "C" bool q4_store_set(void* store, const char* key, const uint8_t* value, size_t len, Text text) {
  return guarded(text, [&] {
    (*static_cast<Store*>(store))->set(key, std::vector<uint8_t>(value, value + len));
    return true;
  });
}

// Waits until somebody has set it; no more than `len` bytes come.
extern "C" bool q4_store_get(void* store, const char* key, uint8_t* value, size_t len, Text text) {
  return guarded(text, [&] {
    const auto found = (*static_cast<Store*>(store))->get(key);
    std::memcpy(value, found.data(), std::min(len, found.size()));
    return true;
  });
}

// 1: somebody has set it; 0: nobody; -1: the store cannot be asked.
extern "C" int q4_store_check(void* store, const char* key) {
  try {
    return (*static_cast<Store*>(store))->check({key});
  } catch (...) {
    return -1;
  }
}

extern "C" void q4_store_drop(void* store) {
  delete static_cast<Store*>(store);
}

// The patience is that of connecting and of every message: what connections are made with, receivers keep.
extern "C" void* q4_gloo_open(
    void* store, int rank, int size, int64_t timeout_ms, const char* interface, Text text) {
  return guarded(text, [&]() -> void* {
    auto o = c10d::ProcessGroupGloo::Options::create_default(std::chrono::milliseconds(timeout_ms));
    if (interface) {
      o->devices = {c10d::ProcessGroupGloo::createDeviceForInterface(interface, false)};
    }
    return new Group(c10::make_intrusive<c10d::ProcessGroupGloo>(*static_cast<Store*>(store), rank, size, o));
  });
}

// Sends `give[i]` bytes to rank i, one behind the other, and receives `take[i]` bytes from it.
extern "C" void* q4_gloo_all_to_all(
    void* group,
    uint8_t* out,
    const int64_t* take,
    uint8_t* in,
    const int64_t* give,
    size_t size,
    Text text) {
  return guarded(text, [&]() -> void* {
    std::vector<int64_t> takes(take, take + size), gives(give, give + size);
    int64_t outs = 0, ins = 0;
    for (size_t i = 0; i < size; ++i) outs += takes[i], ins += gives[i];
    auto to = bytes(out, outs), from = bytes(in, ins);
    return new Work((*static_cast<Group*>(group))->alltoall_base(to, from, takes, gives));
  });
}

// `len` bytes of every rank, in their order.
extern "C" void* q4_gloo_all_gather(
    void* group, uint8_t* out, uint8_t* in, size_t len, size_t size, Text text) {
  return guarded(text, [&]() -> void* {
    std::vector<std::vector<at::Tensor>> outs(1);
    for (size_t i = 0; i < size; ++i) outs[0].push_back(bytes(out + i * len, len));
    std::vector<at::Tensor> ins{bytes(in, len)};
    return new Work((*static_cast<Group*>(group))->allgather(outs, ins));
  });
}

extern "C" void* q4_gloo_send(void* group, uint8_t* in, size_t len, int to, Text text) {
  return guarded(text, [&]() -> void* {
    std::vector<at::Tensor> ins{bytes(in, len)};
    return new Work((*static_cast<Group*>(group))->send(ins, to, 0));
  });
}

extern "C" void* q4_gloo_recv(void* group, uint8_t* out, size_t len, int from, Text text) {
  return guarded(text, [&]() -> void* {
    std::vector<at::Tensor> outs{bytes(out, len)};
    return new Work((*static_cast<Group*>(group))->recv(outs, from, 0));
  });
}

// Waits until the memory is whole or may be used again; 0 milliseconds: as long as connections are made with.
extern "C" bool q4_work_wait(void* work, int64_t timeout_ms, Text text) {
  const std::unique_ptr<Work> held(static_cast<Work*>(work));
  return guarded(text, [&] { return (*held)->wait(std::chrono::milliseconds(timeout_ms)); });
}
