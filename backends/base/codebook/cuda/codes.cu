// x for fp8.cu: rows rounded to E4M3 as q4_fp8 (rows.cu) rounds them, the bytes of 64 of k in the order of
// units (layout.cuh), so that k and k meet.
//
// levels_codes(x, by_blocks, fixed, codes u8[rows, padded], padded, scales, ld)
//   by_blocks: a scale for 128 of k, scales f32[padded / 128, ld]; else for a row, f32[rows], of which each is `fixed` where that
//   is not 0. padded: k, a multiple of 64, up to a multiple of 128. grid rows, block 256.
#include "launch.cuh"
#include "rows.cuh"

enum { CODERS = 256, STEP = 8 * CODERS };

// Eight elements side by side: of 16 bits, 16-byte aligned, as they are, others in f32.
template <bool HALVES> struct Eight {
    u32 w[HALVES ? 4 : 8];
    DEVICE Eight of(const Matrix &x, u64 at, bool there) {
        Eight e;
        if (HALVES) {
            uint4 v = there ? *(const uint4 *)((const u16 *)x.data + at) : make_uint4(0, 0, 0, 0);
            e.w[0] = v.x, e.w[1] = v.y, e.w[2] = v.z, e.w[3] = v.w;
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++)
                e.w[i % (HALVES ? 4 : 8)] = there ? __float_as_uint(load(x, at + i)) : 0;
        }
        return e;
    }
    // The largest magnitude, as bits that order as magnitudes do: of pairs where elements have 16.
    __device__ __forceinline__ u32 top(u32 most) const {
#pragma unroll
        for (int i = 0; i < (HALVES ? 4 : 8); i++) {
            if (HALVES)
                asm("max.u16x2 %0, %1, %2;" : "=r"(most) : "r"(most), "r"(w[i] & 0x7fff7fffu));
            else
                most = max(most, w[i] & 0x7fffffffu);
        }
        return most;
    }
    // That of two.
    DEVICE u32 larger(u32 a, u32 b) {
        if (HALVES)
            asm("max.u16x2 %0, %1, %2;" : "=r"(a) : "r"(a), "r"(b));
        else
            a = max(a, b);
        return a;
    }
    // As a float.
    DEVICE float magnitude(u32 top, u32 dtype) {
        if (!HALVES) return __uint_as_float(top);
        u32 h = max(top >> 16, top & 0xffff);
        return dtype == BF16 ? from_bf16(h) : from_f16(h);
    }
    __device__ __forceinline__ void widen(u32 dtype, float (&v)[8]) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 h = w[i];
            if (!HALVES)
                v[2 * i] = __uint_as_float(w[2 * i % (HALVES ? 4 : 8)]),
                      v[2 * i + 1] = __uint_as_float(w[(2 * i + 1) % (HALVES ? 4 : 8)]);
            else if (dtype == BF16)
                v[2 * i] = from_bf16(h & 0xffff), v[2 * i + 1] = from_bf16(h >> 16);
            else
                v[2 * i] = from_f16(h & 0xffff), v[2 * i + 1] = from_f16(h >> 16);
        }
    }
};

DEVICE bool fits(float magnitude) { return magnitude < __uint_as_float(0x7f800000u); }
// The nearest codes, ties to even, of what lies beyond 448 that one.
DEVICE u32 codes_of(float low, float high) {
    u16 y;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
    return y;
}
// Codes of quotients. A product with the inverse, rounded, is within two units of the last place of the
// quotient: where those with a little less and a little more have one code, it is that of the quotient.
struct Scale {
    float by, less, more;
    bool slow; // the inverse is no normal number
    DEVICE Scale of(float by) {
        float inverse = __frcp_rn(by);
        return {by, inverse * 0.9999995f, inverse * 1.0000005f, !(by > 2.4e-38f && by < 4e37f)};
    }
};
DEVICE void codes_over(const float (&v)[8], const Scale &s, u32 (&pairs)[4]) {
    u32 doubt = s.slow;
#pragma unroll
    for (int t = 0; t < 4; t++) {
        pairs[t] = codes_of(v[2 * t] * s.less, v[2 * t + 1] * s.less);
        doubt |= pairs[t] ^ codes_of(v[2 * t] * s.more, v[2 * t + 1] * s.more);
    }
    if (!doubt) return;
#pragma unroll
    for (int t = 0; t < 4; t++)
        pairs[t] = s.by == 0 ? 0 : codes_of(__fdiv_rn(v[2 * t], s.by), __fdiv_rn(v[2 * t + 1], s.by));
}
// Codes of eight elements from k on, of which all are NaN unless what shares their scale `fits`.
DEVICE void put(const float (&v)[8], bool fits, const Scale &s, u8 *row, u32 k, u32 padded) {
    u32 pairs[4];
    codes_over(v, s, pairs);
    // In a unit's row the lanes 0 and 1 have their bytes by this thread, 2 and 3 by the next, or the other way
    // about: what the other has of one's own two.
    bool odd = threadIdx.x & 1;
    u32 early = pairs[0] | pairs[1] << 16, late = pairs[2] | pairs[3] << 16;
    u32 got = __shfl_xor_sync(~0u, odd ? early : late, 1), even_ones = odd ? got : early,
        odd_ones = odd ? late : got;
    if (k >= padded) return;
    u8 *to = row + k / 64 * 64 + (odd ? 32 : 0) + k / 16 % 4 * 4;
    *(u32 *)to = fits ? __byte_perm(even_ones, odd_ones, 0x5140) : 0x7f7f7f7fu;
    *(u32 *)(to + 16) = fits ? __byte_perm(even_ones, odd_ones, 0x7362) : 0x7f7f7f7fu;
}

template <bool HALVES>
DEVICE void coded(const Matrix &x, bool by_blocks, float fixed, u8 *codes, u32 padded, float *scales,
                  u32 ld) {
    using E = Eight<HALVES>;
    __shared__ u32 tops[CODERS / 32];
    u64 row = blockIdx.x, first = row * x.ld;
    u32 at = 8 * threadIdx.x, most = 0;
    float whole = 0;
    if (!by_blocks && fixed == 0) {
#pragma unroll 4
        for (u32 k = at; k < x.cols; k += STEP) most = E::of(x, first + k, true).top(most);
        for (int d = 16; d; d >>= 1) most = E::larger(most, __shfl_xor_sync(~0u, most, d));
        if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = most;
        __syncthreads();
        for (int i = 0; i < CODERS / 32; i++) most = E::larger(most, tops[i]);
        whole = E::magnitude(most, x.dtype);
        fixed = __fdiv_rn(whole, 448.0f);
    }
    Scale s = Scale::of(fixed);
    if (!by_blocks && threadIdx.x == 0) scales[row] = fixed;
#pragma unroll 1
    for (u32 k = at; k < padded + at; k += STEP) { // by whole warps
        E e = E::of(x, first + k, k < x.cols);
        float v[8];
        u32 own = e.top(0);
        if (by_blocks) { // of 16 threads
            for (int d = 1; d < 16; d *= 2) own = E::larger(own, __shfl_xor_sync(~0u, own, d));
            s = Scale::of(__fdiv_rn(E::magnitude(own, x.dtype), 448.0f));
            if (threadIdx.x % 16 == 0 && k < padded) scales[(u64)(k / 128) * ld + row] = s.by;
        }
        e.widen(x.dtype, v);
        put(v, fits(whole) && fits(E::magnitude(own, x.dtype)), s, codes + row * padded, k, padded);
    }
}

extern "C" __global__ void __launch_bounds__(CODERS)
    levels_codes(Matrix x, u32 by_blocks, float fixed, u8 *codes, u32 padded, float *scales, u32 ld) {
    let_next_start();
    wait_for_previous();
    bool aligned = ((x.data | x.ld * 2) & 15) == 0;
    if (x.dtype != F32 && aligned)
        coded<true>(x, by_blocks, fixed, codes, padded, scales, ld);
    else
        coded<false>(x, by_blocks, fixed, codes, padded, scales, ld);
}
