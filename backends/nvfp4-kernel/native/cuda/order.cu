// x for gemm.cu where it cannot be read as it is.
//
// order_T_U(x T[rows, k], ld, k, out U[rows, parts * padded], padded, weight f32[k] or null, eps);
// order_f32_parts: three bf16
//   grid rows, block 256. Optional norm: x/rms(x)*weight rounded to U. padded: a multiple of 8; zeros from k on.
// order_nvfp4(x[rows, k], rule, source, global f32 or null, out, padded): code * scale, exact in bf16
// order_int8, order_int8_parts(x[rows, k], out, padded): q * step as two bf16, or as three
//   grid rows by groups of 16 over QUANTISERS, block QUANTISERS; padded: a multiple of 16
#include "launch.cuh"
#include "quantise.cuh"

enum { QUANTISERS = 64 };

// PARTS 1: rounded to U (exact where it was one). PARTS 2: two bf16 that add up to f32 within 2^-18 of it.
// PARTS 3: f32 cut into three bf16 that add up to it exactly.
template <class U, int PARTS> DEVICE void cut_pair(float low, float high, u32 (&cut)[PARTS]) {
    if constexpr (PARTS < 3) {
        cut[0] = As<U>::pair(low, high);
        if constexpr (PARTS == 2)
            cut[1] = As<U>::pair(low - from_bf16(cut[0] & 0xffff), high - from_bf16(cut[0] >> 16));
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

// The product of each of sixteen whole numbers and a scale, from `at` of a row on; of four bits both are exact.
template <int PARTS> DEVICE void put16(const int (&q)[16], float scale, u8 *row, int at, int padded) {
#pragma unroll
    for (int j = 0; j < 16; j += 8) {
        float f[8];
#pragma unroll
        for (int i = 0; i < 8; i++) f[i] = (float)q[j + i] * scale;
        put8<bf16, PARTS>(f, row, at + j, padded);
    }
}

template <int PARTS> DEVICE void order_int8_of(const Matrix &x, u8 *out, int padded) {
    let_next_start();
    wait_for_previous();
    int at = (blockIdx.y * QUANTISERS + threadIdx.x) * 16, q[16] = {};
    if (at >= padded) return;
    float step = at < x.cols ? to_int8(Sixteen::of(x, blockIdx.x * x.ld + at), q) : 0.f;
    put16<PARTS>(q, step, out + (u64)blockIdx.x * padded * PARTS * 2, at, padded);
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

extern "C" __global__ void __launch_bounds__(QUANTISERS)
    order_nvfp4(Matrix x, u32 rule, u32 source, const float *global, u8 *out, int padded) {
    let_next_start();
    wait_for_previous();
    int at = (blockIdx.y * QUANTISERS + threadIdx.x) * 16, q[16] = {};
    if (at >= padded) return;
    float scale = 0.f;
    if (at < x.cols) {
        Nvfp4 own = Nvfp4::of(Sixteen::of(x, blockIdx.x * x.ld + at), rule, source, global);
#pragma unroll
        for (int i = 0; i < 16; i++) q[i] = own.doubled(i);
        scale = own.scale * 0.5f;
    }
    put16<1>(q, scale, out + (u64)blockIdx.x * padded * 2, at, padded);
}
extern "C" __global__ void __launch_bounds__(QUANTISERS) order_int8(Matrix x, u8 *out, int padded) {
    order_int8_of<2>(x, out, padded);
}
extern "C" __global__ void __launch_bounds__(QUANTISERS) order_int8_parts(Matrix x, u8 *out, int padded) {
    order_int8_of<3>(x, out, padded);
}
