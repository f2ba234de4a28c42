// Rows of activations on the device, loaded and stored as every float type; for every backend's plain
// kernels.
#include "convert.cuh"
#include "sums.cuh"

enum { MULTIPLY = 1, DIVIDE = 2 };

struct Matrix {
    u64 data, ld;
    u32 rows, cols, dtype, unused;
};

__device__ __forceinline__ float load(const Matrix &m, u64 at) {
    if (m.dtype == F32) return ((const float *)m.data)[at];
    u16 h = ((const u16 *)m.data)[at];
    return m.dtype == F16 ? from_f16(h) : from_bf16(h);
}
__device__ __forceinline__ void store(const Matrix &m, u64 at, float v) {
    if (m.dtype == F32) ((float *)m.data)[at] = v;
    else ((u16 *)m.data)[at] = m.dtype == F16 ? to_f16(v) : to_bf16(v);
}
__device__ __forceinline__ float rounded_to(u32 dtype, float v) {
    return dtype == F16 ? from_f16(to_f16(v)) : dtype == BF16 ? from_bf16(to_bf16(v)) : v;
}
__device__ __forceinline__ bool is_finite(float v) { return (__float_as_uint(v) & 0x7f800000u) != 0x7f800000u; }

__device__ __forceinline__ double multiplier(u32 convention, float g) {
    return convention == MULTIPLY ? (double)g : convention == DIVIDE ? 1.0 / (double)g : 1.0;
}
