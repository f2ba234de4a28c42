// x for gemm.cu where it cannot be read as it is.
//
// order_T_U(x T[rows, k], ld, k, out U[rows, parts * padded], padded, weight f32[k] or null, eps);
// order_f32_parts: three bf16
// order_codes, order_codes_parts (q i8[rows, k], steps f32[rows, k / 16], k, out, padded, factor):
//   q * (step * factor), rounded to bf16 (exact for 4-bit codes) or as three bf16
//   grid rows, block 256. Optional norm: x/rms(x)*weight rounded to U. padded: a multiple of 8; zeros from k on.
#include "convert.cuh"
#include "launch.cuh"

// PARTS 1: rounded to U (exact where it was one). PARTS 3: f32 cut into three bf16 that add up to it exactly.
template <class U, int PARTS> DEVICE void cut_pair(float low, float high, u32 (&cut)[PARTS]) {
    if constexpr (PARTS == 1) {
        cut[0] = As<U>::pair(low, high);
    } else {
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            u32 l = __float_as_uint(low) & 0xffff0000, h = __float_as_uint(high) & 0xffff0000;
            // A NaN whose payload is cut off stays one.
            if (low != low) l = 0x7fc00000;
            if (high != high) h = 0x7fc00000;
            cut[p] = l >> 16 | h;
            low = (l & 0x7f800000) == 0x7f800000 ? 0.f : low - __uint_as_float(l);
            high = (h & 0x7f800000) == 0x7f800000 ? 0.f : high - __uint_as_float(h);
        }
    }
}

template <class U, int PARTS> DEVICE void put8(const float (&f)[8], u8 *row, int at, int padded) {
    u32 v[PARTS][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 cut[PARTS];
        cut_pair<U, PARTS>(f[2 * i], f[2 * i + 1], cut);
#pragma unroll
        for (int p = 0; p < PARTS; p++) v[p][i] = cut[p];
    }
#pragma unroll
    for (int p = 0; p < PARTS; p++) *(uint4 *)(row + (u64)(p * padded + at) * 2) = make_uint4(v[p][0], v[p][1], v[p][2], v[p][3]);
}

template <class T, class U, int PARTS>
DEVICE void order(
    const T *x, u64 ld, int k, u8 *out, int padded, const float *weight, float eps) {
    __shared__ float room[8];
    let_next_start();
    wait_for_previous();
    u64 token = blockIdx.x;
    const T *row = x + token * ld;
    float factor = 1.f;
    if (weight) {
        float sum = 0.f;
        for (int i = threadIdx.x; i < k; i += 256) sum += widen(row[i]) * widen(row[i]);
        for (int s = 16; s; s >>= 1) sum += __shfl_xor_sync(~0u, sum, s);
        if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = sum;
        __syncthreads();
        sum = 0.f;
        for (int i = 0; i < 8; i++) sum += room[i];
        factor = rsqrtf(sum / (float)k + eps);
    }
    bool vector = ((u64)row & 15) == 0;
    for (int at = threadIdx.x * 8; at < padded; at += 256 * 8) {
        float f[8];
        if (vector && at + 8 <= k) {
            T raw[8];
#pragma unroll
            for (int i = 0; i < sizeof(T) / 2; i++) ((uint4 *)raw)[i] = ((const uint4 *)(row + at))[i];
#pragma unroll
            for (int i = 0; i < 8; i++) f[i] = widen(raw[i]);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) f[i] = at + i < k ? widen(row[at + i]) : 0.f;
        }
        if (weight) {
#pragma unroll
            for (int i = 0; i < 8; i++) f[i] = at + i < k ? f[i] * factor * weight[at + i] : 0.f;
        }
        put8<U, PARTS>(f, out + token * padded * PARTS * 2, at, padded);
    }
}

template <int PARTS>
DEVICE void order_quantised(const i8 *q, const float *steps, int k, u8 *out, int padded, float factor) {
    let_next_start();
    wait_for_previous();
    u64 token = blockIdx.x;
    for (int at = threadIdx.x * 8; at < padded; at += 256 * 8) {
        float f[8], step = at < k ? steps[token * (k / 16) + at / 16] * factor : 0.f;
#pragma unroll
        for (int i = 0; i < 8; i++) f[i] = at < k ? (float)q[token * k + at + i] * step : 0.f;
        put8<bf16, PARTS>(f, out + token * padded * PARTS * 2, at, padded);
    }
}

#define ORDER(NAME, T, U, PARTS) \
    extern "C" __global__ void __launch_bounds__(256) NAME( \
        const T *x, u64 ld, int k, u8 *out, int padded, const float *weight, float eps) { \
        order<T, U, PARTS>(x, ld, k, out, padded, weight, eps); \
    }
ORDER(order_bf16, bf16, bf16, 1)
ORDER(order_f16, f16, f16, 1)
ORDER(order_f32_bf16, float, bf16, 1)
ORDER(order_f32_f16, float, f16, 1)
ORDER(order_f32_parts, float, bf16, 3)

#define ORDER_CODES(NAME, PARTS) \
    extern "C" __global__ void __launch_bounds__(256) NAME( \
        const i8 *q, const float *steps, int k, u8 *out, int padded, float factor) { \
        order_quantised<PARTS>(q, steps, k, out, padded, factor); \
    }
ORDER_CODES(order_codes, 1)
ORDER_CODES(order_codes_parts, 3)
