// What tch does not bind: the caching allocator's figures and the switch for deterministic kernels.
// Only c10 and ATen headers, so that it builds without CUDA; every function returns false where libtorch threw.
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>

#include <cstdint>

namespace {
template <class F>
bool guarded(F&& f) {
  try {
    f();
    return true;
  } catch (...) {
    return false;
  }
}
constexpr size_t kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
}  // namespace

// current, peak: bytes tensors hold; reserved, peak_reserved: bytes taken from the device; free and total of the device.
extern "C" bool q4_device_memory(int8_t device, int64_t out[6]) {
  return guarded([&] {
    const auto s = at::accelerator::getDeviceStats(device);
    out[0] = s.allocated_bytes[kAll].current;
    out[1] = s.allocated_bytes[kAll].peak;
    out[2] = s.reserved_bytes[kAll].current;
    out[3] = s.reserved_bytes[kAll].peak;
    const auto [free, total] = at::accelerator::getMemoryInfo(device);
    out[4] = free;
    out[5] = total;
  });
}

extern "C" bool q4_device_reset_peaks(int8_t device) {
  return guarded([&] { at::accelerator::resetPeakStats(device); });
}

extern "C" bool q4_device_synchronize(int8_t device) {
  return guarded([&] { at::accelerator::synchronizeDevice(device); });
}

extern "C" bool q4_deterministic(bool on) {
  return guarded([&] { at::globalContext().setDeterministicAlgorithms(on, /*warn_only=*/true); });
}
