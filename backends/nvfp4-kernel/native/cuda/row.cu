// The product with one row of x that is one part of bf16. Its arithmetic is that of gemv.cu.
//
// Codes go from memory to registers, AHEAD units of a warp in flight, the first of them before the kernel
// waits for the one before it. What is left in the loop is decoding, which the integer units bound: a copy to
// shared memory first would cost as many instructions again as the loop can afford. Loads of a multiprocessor
// come back in the order they were asked for, and more than some 50 KB of them keep warps waiting to ask: x
// comes when the units before it have come, and AHEAD is a compromise. BLOCK: threads of a block.
#include "gemv.cu"
#include "row.cuh"

// One row of x to shared memory as stage() does, in one part.
template <int BLOCK, bool QUANTISE, bool APART>
__device__ __forceinline__ void stage_one(const Gemv &p, u16 *xs, float *xscale, float *sums) {
    const float up = 18446744073709551616.0f;
    float global = 1.0f;
    auto start = [&] { global = QUANTISE ? p.act_global ? *p.act_global : p.global : 1.0f; };
    auto normed = [&](u32 k, bool in, bool there, float (&e)[8]) {
#pragma unroll
        for (int i = 0; i < 8; i++) e[i] = in ? QUANTISE ? rounded(p.x_dtype, e[i]) : e[i] : 0.0f;
        if (QUANTISE) {
            float scale = 0;
            quantised(p, global, APART, e, scale);
            if (APART && there && !(k & 8)) xscale[k / 16] = in ? scale : 0.0f;
        }
        if (there) {
            // 2^64 is exact in bf16, so it comes after the rounding.
            u32 h[4];
#pragma unroll
            for (int i = 0; i < 4; i++) h[i] = As<bf16>::pair(e[2 * i] * up, e[2 * i + 1] * up);
            *(uint4 *)(xs + k) = make_uint4(h[0], h[1], h[2], h[3]);
        }
    };
    auto plain = [&](u32 k, bool in, bool there, u32 (&h)[4]) {
        if (!QUANTISE) {
#pragma unroll
            for (int i = 0; i < 4; i++) h[i] = times(h[i], 0x5f805f80u);
        } else {
            float e[8], scale = 0;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (p.x_dtype == BF16) e[2 * i] = from_bf16(h[i] & 0xffff), e[2 * i + 1] = from_bf16(h[i] >> 16);
                else from_f16_pair(h[i], e[2 * i], e[2 * i + 1]);
            }
            quantised(p, global, APART, e, scale);
            if (APART && there && !(k & 8)) xscale[k / 16] = in ? scale : 0.0f;
#pragma unroll
            for (int i = 0; i < 4; i++) h[i] = As<bf16>::pair(e[2 * i] * up, e[2 * i + 1] * up);
        }
        if (there) *(uint4 *)(xs + k) = make_uint4(h[0], h[1], h[2], h[3]);
    };
    stage_row<BLOCK, 4>(p, sums, start, normed, plain);
}

// A unit in registers: lane l's 16 bytes of both tiles, its four scales.
struct Unit {
    u32 c0[4], c1[4], scales;
};
__device__ __forceinline__ void load_unit(Unit &u, const u8 *codes, const u8 *scales) {
    load16(u.c0, codes);
    load16(u.c1, codes + 512);
    load4(u.scales, scales);
}
// `holds`: the lane has values of B, in a column of its own for each scale block.
template <bool APART> __device__ __forceinline__ void times_x(const Unit &u, bool holds, u32 xat, u32 sat, u32 (&b)[16], float &low, float &high) {
    float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
    if (holds) {
        lds4((u32(&)[4])b[0], xat);
        lds4((u32(&)[4])b[4], xat + 16);
        lds4((u32(&)[4])b[8], xat + 128);
        lds4((u32(&)[4])b[12], xat + 144);
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        u32 a0[4], a1[4], a2[4], a3[4];
        decode(u.c0[i], a0);
        decode(u.c0[i + 1], a1);
        decode(u.c1[i], a2);
        decode(u.c1[i + 1], a3);
        As<bf16>::mma(even, a0[0], a0[1], a1[0], a1[1], b[i], b[i + 1]);
        As<bf16>::mma(odd, a2[0], a2[1], a3[0], a3[1], b[8 + i], b[9 + i]);
        As<bf16>::mma(even, a0[2], a0[3], a1[2], a1[3], b[4 + i], b[5 + i]);
        As<bf16>::mma(odd, a2[2], a2[3], a3[2], a3[3], b[12 + i], b[13 + i]);
    }
    float f0, f1, f2, f3;
    from_f16_pair((u.scales & 0x00ff00ffu) << 7, f0, f2);
    from_f16_pair((u.scales >> 1) & 0x7f807f80u, f1, f3);
    if (APART) {
        float x0 = __uint_as_float(lds1(sat)), x1 = __uint_as_float(lds1(sat + 16));
        f0 *= x0, f1 *= x0, f2 *= x1, f3 *= x1;
    }
    low = fmaf(even[0], f0, low);
    high = fmaf(even[2], f1, high);
    low = fmaf(odd[0], f2, low);
    high = fmaf(odd[2], f3, high);
}

template <bool AGAIN>
__device__ __forceinline__ void put(const Gemv &p, const Part &r, const float *sums, u64 place, u64 up_place, float factor, float old, u32 i) {
    u32 row = i % 16, v = min(i / 16, r.count - 1), where = (u32)(place >> 32);
    float sum = summed(p, r, sums, v, row, 0), up = p.gate_at ? summed(p, r, sums, v, row, 1) : 0.0f;
    if (i >= r.count * 16 || row >= (where & 31) || threadIdx.x % MATES) return;
    if (AGAIN && is_lost(p, sum, up, 5.293955920e-23f, 0)) { // 2^(-12 - 62)
        sum = taken_again(p, r.first + v, row, 0);
    } else {
        sum *= __uint_as_float((u32)place) * factor;
        if (p.gate_at) sum = silu(sum) * (up * (__uint_as_float((u32)up_place) * factor));
    }
    u64 at = (where >> 5) + row;
    if (p.y_dtype == F32) ((float *)p.y)[at] = p.accumulate ? old + sum : sum;
    else ((u16 *)p.y)[at] = p.y_dtype == BF16 ? to_bf16(sum) : to_f16(sum);
}

// Shared memory: x, its scales (APART), sums of the norm, partial sums.
template <int BLOCK, bool QUANTISE, bool APART, int AHEAD> __device__ __forceinline__ void row(const Gemv &p) {
    extern __shared__ __align__(128) u8 memory[];
    // Told to the compiler to be the same in all lanes.
    u32 lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    let_next_start();
    Part r = part_of<BLOCK>(p, warp);
    u16 *xs = (u16 *)memory;
    float *xscale = (float *)(xs + p.units * 128 + 8), *norms = xscale + (APART ? p.units * 8 : 0), *sums = norms + BLOCK / 32;
    u32 half = warp >= r.warps, left = r.to - r.from;
    int ahead = left;
    const u8 *codes = p.w + ((u64)((half ? p.gate_at : 0) + r.first) * p.units + r.from) * UNIT, *scales = codes + 1024 + lane * 4;
    codes += lane * 16;
    Unit units[AHEAD];
    auto next = [&](Unit &u) {
        if (ahead > 0) load_unit(u, codes, scales);
        codes += UNIT, scales += UNIT, ahead--;
    };
#pragma unroll
    for (int j = 0; j < AHEAD; j++) next(units[j]);
    u64 place = 0, up_place = 0;
    if (r.count) {
        u32 g = r.first + min(threadIdx.x / MATES / 16, r.count - 1);
        place = p.groups[g];
        up_place = p.groups[p.gate_at + g];
    }
    u32 b[16]; // column 2 t of B is x of block t, the other columns stay zero
#pragma unroll
    for (int i = 0; i < 16; i++) b[i] = 0;

    stage_one<BLOCK, QUANTISE, APART>(p, xs, xscale, norms);
    float old = 0;
    u32 i = threadIdx.x / MATES, where = (u32)(place >> 32);
    if (p.accumulate && i < r.count * 16 && i % 16 < (where & 31)) old = ((const float *)p.y)[(where >> 5) + i % 16];
    __syncthreads();

    u32 t = lane % 4, n = lane / 4, v = divided(r.from, __fdividef(1.0f, (float)p.units)), at = r.from - v * p.units;
    u32 xfirst = shared_at(xs) + t * 32, sfirst = shared_at(xscale) + t * 4, xat = xfirst + at * 256, sat = sfirst + at * 32;
    float *to = sums + (v + half * r.count + warp) * 16 + n, low = 0, high = 0;
    // Units up to the end of a row group, and those behind it.
    u32 run = min(p.units - at, left);
    left -= run;
    if (run) while (true) {
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            times_x<APART>(units[j], n == 2 * t, xat, sat, b, low, high);
            next(units[j]);
            xat += 256, sat += 32;
            if (!--run) {
                low += __shfl_xor_sync(~0u, low, 1);
                high += __shfl_xor_sync(~0u, high, 1);
                low += __shfl_xor_sync(~0u, low, 2);
                high += __shfl_xor_sync(~0u, high, 2);
                if (t == 0) to[0] = low, to[8] = high;
                if (!left) goto summed_up;
                to += 16, low = high = 0, xat = xfirst, sat = sfirst;
                run = min(p.units, left), left -= run;
            }
        }
    }
summed_up:
    __syncthreads();
    float factor = 4611686018427387904.0f * act_factor<QUANTISE>(p); // 2^(126 - 64)
    if (r.count) put<!QUANTISE>(p, r, sums, place, up_place, factor, old, i);
    for (i += BLOCK / MATES; i - threadIdx.x / MATES < r.count * 16; i += BLOCK / MATES) {
        u32 g = min(i / 16, r.count - 1);
        u64 here = p.groups[r.first + g], up = p.groups[p.gate_at + r.first + g];
        where = (u32)(here >> 32);
        bool there = p.accumulate && i < r.count * 16 && i % 16 < (where & 31);
        put<!QUANTISE>(p, r, sums, here, up, factor, there ? ((const float *)p.y)[(where >> 5) + i % 16] : 0.0f, i);
    }
}
#define ROW(name, BLOCK, ...) \
    extern "C" __global__ void __launch_bounds__(BLOCK, 1) name(const __grid_constant__ Gemv p) { row<BLOCK, __VA_ARGS__>(p); }
#if HAS(0)
// Fewer warps with more registers, for blocks of few units.
ROW(q4_row, 512, false, false, 3)
ROW(q4_row_narrow, 384, false, false, 5)
#endif
#if HAS(3)
ROW(q4_row_int8, 512, true, true, 3)
#endif
#if HAS(4)
ROW(q4_row_nvfp4, 512, true, false, 3)
#endif
