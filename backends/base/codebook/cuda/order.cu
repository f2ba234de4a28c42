// x to tiles for gemm.cu.
//
// levels_order_T(x T[rows, k], ld, k, row_units, out, weight f32[k] or null, eps, rounding, flags, flag_count),
// T f32, f16 or bf16
//   grid (rows, any), block 256. Optional norm: x/rms(x)*weight rounded to `rounding` (1 f32, 2 f16, 3 bf16). PARTS bf16 that add up
//   to x: one for bf16, two for f16, three for f32. out: blocks of 128 tokens x 64 k, 16384 bytes each, index
//   (token / 128) * (2 row_units * parts) + slab; 128-byte lines of a token, 16-byte pieces in the order
//   piece ^ (token % 8).
#include "convert.cuh"
#include "launch.cuh"

// The first parts are cut off, not rounded, so that none becomes infinite; the last is rounded, exact where x
// has that few bits.
template <int PARTS> DEVICE void cut_pair(float low, float high, u32 (&cut)[PARTS]) {
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        if (p == PARTS - 1) {
            cut[p] = As<bf16>::pair(low, high);
            break;
        }
        u32 l = __float_as_uint(low) & 0xffff0000, h = __float_as_uint(high) & 0xffff0000;
        // A NaN whose payload is cut off stays one.
        if (low != low) l = 0x7fc00000;
        if (high != high) h = 0x7fc00000;
        cut[p] = l >> 16 | h;
        low = (l & 0x7f800000) == 0x7f800000 ? 0.f : low - __uint_as_float(l);
        high = (h & 0x7f800000) == 0x7f800000 ? 0.f : high - __uint_as_float(h);
    }
}

template <class T, int PARTS>
DEVICE void order(
    const T *x, u64 ld, int k, int row_units, u8 *out, const float *weight, float eps, u32 rounding, u32 *flags, int flag_count) {
    __shared__ float room[8];
    let_next_start();
    wait_for_previous();
    if (blockIdx.x + blockIdx.y == 0)
        for (int i = threadIdx.x; i < flag_count; i += 256) flags[i] = 0;
    int token = blockIdx.x, slabs = 2 * row_units;
    const T *row = x + (u64)token * ld;
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
    u8 *base = out + (u64)(token / 128) * slabs * PARTS * 16384 + token % 128 * 128;
    bool vector = ((u64)row & (4 * sizeof(T) - 1)) == 0;
    for (int e = blockIdx.y * 256 + threadIdx.x; e < slabs * 4; e += gridDim.y * 256) {
        int slab = e >> 2, j = e & 3;
        u32 v[PARTS][2][4];
#pragma unroll
        for (int t = 0; t < 4; t++) {
            int at = slab * 64 + 16 * j + 4 * t;
            T raw[4];
            float f[4];
            if (vector && at + 4 <= k) {
                if (sizeof(T) == 4) *(uint4 *)raw = *(const uint4 *)(row + at);
                else *(uint2 *)raw = *(const uint2 *)(row + at);
#pragma unroll
                for (int i = 0; i < 4; i++) f[i] = widen(raw[i]);
            } else {
#pragma unroll
                for (int i = 0; i < 4; i++) f[i] = at + i < k ? widen(row[at + i]) : 0.f;
            }
            if (weight) {
#pragma unroll
                for (int i = 0; i < 4; i++) f[i] = at + i < k ? f[i] * factor * weight[at + i] : 0.f;
                if (rounding == F16) {
#pragma unroll
                    for (int i = 0; i < 4; i++) f[i] = widen(f16{(u16)As<f16>::pair(f[i], 0.f)});
                }
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                u32 cut[PARTS];
                cut_pair<PARTS>(f[2 * h], f[2 * h + 1], cut);
#pragma unroll
                for (int p = 0; p < PARTS; p++) v[p][t / 2][t % 2 * 2 + h] = cut[p];
            }
        }
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                *(uint4 *)(base + (u64)(p * slabs + slab) * 16384 + ((2 * j + h) ^ (token & 7)) * 16) =
                    make_uint4(v[p][h][0], v[p][h][1], v[p][h][2], v[p][h][3]);
    }
}

#define ORDER(NAME, T, PARTS) \
    extern "C" __global__ void __launch_bounds__(256) NAME( \
        const T *x, u64 ld, int k, int row_units, u8 *out, const float *weight, float eps, u32 rounding, u32 *flags, \
        int flag_count) { \
        order<T, PARTS>(x, ld, k, row_units, out, weight, eps, rounding, flags, flag_count); \
    }
ORDER(levels_order_bf16, bf16, 1)
ORDER(levels_order_f16, f16, 2)
ORDER(levels_order_f32, float, 3)
// Normed rows, which are f32, by the type they are rounded to.
ORDER(levels_order_normed_bf16, float, 1)
ORDER(levels_order_normed_f16, float, 2)
