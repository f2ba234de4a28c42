// Products of packed NVFP4 weights with one to eight rows of x: y = x W^T, one node with its norm,
// quantisation, gate and sum. For compute capability 8.0 on.
//
// A block owns whole row groups, its warps equal runs of their units (16 rows x 128 k, 1152 contiguous
// bytes). Every warp streams its run through a ring of its own in shared memory; the ring is filled before
// the kernel waits for the one before it. Codes become A fragments of mma.m16n8k16 without leaving their
// lane: value * 2^-126 in bf16, which the tensor cores take as it is. One row of x (`one`): the eight columns
// of B are the eight scale blocks of a unit, so that the sums of blocks come out apart and are scaled in f32.
// Two to eight rows (`few`): the columns are the rows, the scales multiply A.
#include "codec.cuh"
#include "few.cuh"

enum { NATIVE = 1, INT8 = 2, NVFP4 = 3 };

struct Gemv {
    const u8 *w;
    const u64 *groups;        // per row group: f32 multiplier, then first row of y * 32 + rows
    const void *x;            // [m, k] of x_dtype; f32 with norm
    void *y;                  // [m, n]
    const float *norm;        // [k] or null
    const float *act_global;  // per-tensor scale of nvfp4 activations on the device, or null
    u64 ldx, ldy;             // elements
    u32 m, k, units;          // units of a row group
    u32 each, extra;          // row groups (pairs of them with gate) of a block, and how many blocks have one more
    u32 gate_at;              // row group of the first up row, 0 without gate
    u32 x_dtype, y_dtype, accumulate;
    u32 act, rule, convention; // convention of the scale of x: 0 none, 1 multiply, 2 divide
    float eps, global;
    u32 late;                 // 1: the next kernel may start when x is staged, not at once
};

__device__ __forceinline__ void copy8(u32 to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from));
}
__device__ __forceinline__ u32 times(u32 a, u32 b) { // bf16 pairs
    u32 d;
#if __CUDA_ARCH__ >= 900
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
    return d;
}
// Eight codes to four pairs of bf16, times 2^-126. Pairs 0 and 1 of two words are an A fragment with x as it
// lies, and so are 2 and 3.
__device__ __forceinline__ void decode(u32 w, u32 (&a)[4]) {
    const u32 m = 0x81C081C0u;
    a[0] = w & m;
    a[1] = (w << 3) & m;
    a[2] = ((w & 0x20072007u) * 68u) & m;
    a[3] = ((w >> 3) & 0x01C001C0u) | ((w << 1) & 0x80008000u);
}

__device__ __forceinline__ void from_f16_pair(u32 h, float &lo, float &hi) {
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(lo), "=f"(hi) : "r"(h));
}
__device__ __forceinline__ float rounded(u32 dtype, float v) {
    return dtype == BF16 ? from_bf16(to_bf16(v)) : dtype == F16 ? from_f16(to_f16(v)) : v;
}

// ---- quantisers of activations, to the bit those of the formats (docs/numerics.md) ----
enum { TORCHAO = 1, MODELOPT = 2, COMPRESSED_TENSORS = 3, TRANSFORMER_ENGINE = 4, RUNTIME = 5 };

// As e4m3_value; taking a sign off that is never there would cost instructions.
__device__ __forceinline__ float e4m3_positive(u32 byte) {
    u32 e = byte >> 3;
    return e ? __uint_as_float((e + 120) << 23 | (byte & 7) << 20) : (float)(byte & 7) * 0.001953125f;
}
__device__ __forceinline__ float clamped(float v, float lo, float hi) { return v < lo ? lo : v > hi ? hi : v; }

// What the elements of a block are multiplied (or divided) by, and the value of its scale.
struct Step {
    float by, scale;
    bool divides, away;
};
__device__ __forceinline__ Step nvfp4_step(u32 rule, u32 convention, float g, u32 source, float am) {
    Step s;
    s.away = rule == RUNTIME;
    bool has = convention != 0;
    if (!has) g = 1.0f;
    u32 byte;
    if (rule == TORCHAO) {
        byte = e4m3_of(clamped(__fdiv_rn(__fdiv_rn(am, 6.0f), g), 0.015625f, 448.0f));
    } else if (rule == MODELOPT) {
        float t = __fdiv_rn(am, __fmul_rn(6.0f, g));
        t = am == 0.0f || t == 0.0f ? 1.0f : t;
        byte = e4m3_of(clamped(t, 0.001953125f, 448.0f));
    } else if (rule == COMPRESSED_TENSORS) {
        byte = e4m3_of(__fmul_rn(g, rounded(source, __fdiv_rn(am, 6.0f))));
        byte = byte ? byte : 0x20;
    } else if (rule == TRANSFORMER_ENGINE) {
        byte = e4m3_of(__fmul_rn(am, __fmul_rn(g, __fdiv_rn(1.0f, 6.0f))));
    } else {
        byte = e4m3_of(clamped(__fdiv_rn(__fdiv_rn(am, 6.0f), g), 1.0f / 65536.0f, 448.0f));
    }
    float v = e4m3_positive(byte);
    s.scale = v;
    s.divides = true;
    if (rule == TORCHAO) {
        s.by = __fdiv_rn(has ? __fdiv_rn(1.0f, g) : 1.0f, v);
        s.divides = false;
    } else if (rule == TRANSFORMER_ENGINE) {
        s.by = fminf(__fdiv_rn(1.0f, __fmul_rn(v, __fdiv_rn(1.0f, g))), 3.402823466e38f);
        s.divides = false;
    } else if (rule == RUNTIME) {
        s.by = __fmul_rn(__fadd_rn(v, 1e-12f), g);
    } else {
        s.by = !has ? v : convention == 1 ? __fmul_rn(v, g) : __fdiv_rn(v, g);
    }
    return s;
}
// Value of the nearest E2M1 number; NaN becomes zero.
__device__ __forceinline__ float e2m1_nearest(float y, bool away) {
    float a = fabsf(y), v;
    if (away) {
        v = a >= 5.0f ? 6.0f : a >= 3.5f ? 4.0f : a >= 2.5f ? 3.0f : a >= 1.75f ? 2.0f : a >= 1.25f ? 1.5f
          : a >= 0.75f ? 1.0f : a >= 0.25f ? 0.5f : 0.0f;
        return y < 0.0f ? -v : v;
    }
    v = a > 5.0f ? 6.0f : a >= 3.5f ? 4.0f : a > 2.5f ? 3.0f : a >= 1.75f ? 2.0f : a > 1.25f ? 1.5f
      : a >= 0.75f ? 1.0f : a > 0.25f ? 0.5f : 0.0f;
    return __uint_as_float(__float_as_uint(v) | (__float_as_uint(y) & 0x80000000u));
}
// Eight elements of a block whose other eight are in the neighbouring lane, as the values they stand for;
// with INT8 and `apart` the integers, and their scale in `scale`. A block with NaN or infinity becomes NaN.
__device__ __forceinline__ void quantised(const Gemv &p, float global, bool apart, float (&v)[8], float &scale) {
    u32 top = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) top = max(top, __float_as_uint(v[i]) & 0x7fffffffu);
    top = max(top, __shfl_xor_sync(~0u, top, 1));
    float am = __uint_as_float(top), nan = __uint_as_float(0x7fc00000u);
    bool bad = top >= 0x7f800000u;
    if (p.act == INT8) {
        float inverse = __fdiv_rn(127.0f, am);
        bool zero = !((__float_as_uint(inverse) & 0x7f800000u) != 0x7f800000u);
        scale = bad ? nan : zero ? 0.0f : __fdiv_rn(am, 127.0f);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float q = zero || bad ? 0.0f : rintf(__fmul_rn(v[i], inverse));
            v[i] = apart ? q : __fmul_rn(q, scale);
        }
        return;
    }
    Step s = nvfp4_step(p.rule, p.convention, global, p.x_dtype, bad ? 0.0f : am);
    if (bad) s.scale = nan;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float y = s.divides ? __fdiv_rn(v[i], s.by) : __fmul_rn(v[i], s.by);
        v[i] = __fmul_rn(e2m1_nearest(y, s.away), s.scale);
    }
}

// ---- sums that bf16 and scaled products cannot hold ---- An element of x of 2^62 and more overflows on the
// way, and where a whole row is tiny its last bits go under. No model has either, but a product is what it
// says: such sums are taken again, in f64, by one thread each.
__device__ __forceinline__ float element(const Gemv &p, u32 col, u32 k) {
    u64 at = col * p.ldx + k;
    if (p.norm || p.x_dtype == F32) return ((const float *)p.x)[at];
    u32 h = ((const u16 *)p.x)[at];
    return p.x_dtype == BF16 ? from_bf16(h) : from_f16(h);
}
// Whether a row of x has no element that is not tiny, asked only where a sum is small: the first element
// mostly tells.
__device__ __forceinline__ bool is_tiny(const Gemv &p, u32 col) {
#pragma unroll 1
    for (u32 k = 0; k < p.k; k++) {
        float x = fabsf(element(p, col, k));
        // A norm divides by the root mean square, which is no million: 2^-20, else 2^-40.
        if (p.norm ? x * fabsf(p.norm[k]) >= 9.536743164e-7f : x >= 9.094947018e-13f) return false;
    }
    return true;
}
// Whether a sum, or with gate that of the up row, is none, or small as only sums of tiny rows are.
__device__ __forceinline__ bool is_lost(const Gemv &p, float sum, float up, float small, u32 col) {
    float low = fabsf(sum), high = low;
    if (p.gate_at) low = fminf(low, fabsf(up)), high += fabsf(up);
    if (low >= small && high <= 3.402823466e38f) return false;
    return !(high <= 3.402823466e38f) || is_tiny(p, col);
}
// The product of row `row` of a row group with row `col` of x, with gate that of its up row behind it.
__device__ __forceinline__ float taken_again(const Gemv &p, u32 group, u32 row, u32 col) {
    double square = 0, inverse = 0;
    if (p.norm) {
#pragma unroll 1
        for (u32 k = 0; k < p.k; k++) square += (double)element(p, col, k) * element(p, col, k);
        inverse = rsqrt(square / p.k + p.eps);
    }
    float y = 0;
#pragma unroll 1
    for (u32 g = group; ; g += p.gate_at) {
        double sum = 0;
#pragma unroll 1
        for (u32 k = 0; k < p.k; k++) {
            u32 block = k / 16, lane = (row & 7) * 4 + (block & 3), place = (k >> 1 & 4) + (row >> 2 & 2) + (k & 1), pairs[4];
            const u8 *unit = p.w + ((u64)g * p.units + block / 8) * UNIT;
            decode(((const u32 *)(unit + (block >> 2 & 1) * 512 + lane * 16))[k >> 1 & 3], pairs);
            u32 low = place & 2 ? pairs[1] : pairs[0], high = place & 2 ? pairs[3] : pairs[2];
            double code = from_bf16((place & 4 ? high : low) >> 16 * (place & 1) & 0xffff);
            u32 scale = unit[1024 + lane * 4 + (block >> 2 & 1) * 2 + (row >> 3)];
            double x = element(p, col, k);
            if (p.norm) x = rounded(p.x_dtype, (float)(x * inverse * p.norm[k]));
            sum += x * (code * __uint_as_float((scale << 20) + 0x38000000u));
        }
        float v = (float)(sum * 85070591730234615865843651857942052864.0 * __uint_as_float((u32)p.groups[g])); // 2^126
        if (!p.gate_at) return v;
        if (g != group) return silu(y) * v;
        y = v;
    }
}

// x of every row to shared memory, in as many bf16 parts as it takes, times `up`: [part][row][stride];
// quantised on the way.
template <bool QUANTISE, int PARTS, bool APART, int SPLIT, int AHEAD>
__device__ __forceinline__ void stage(const Gemv &p, u32 begin, u32 count, u16 *xs, float *xscale, float *sums, u32 stride, float up) {
    float global = 1.0f;
    auto start = [&] { global = QUANTISE ? p.act_global ? *p.act_global : p.global : 1.0f; };
    auto chunk = [&](const Row &of, u32 k, bool in, float (&v)[8]) {
        if (QUANTISE) {
            float scale = 0;
            quantised(p, global, APART, v, scale);
            if (APART && k < of.padded && !(k & 8)) xscale[k / 16] = in ? scale : 0.0f;
        }
        if (k >= of.padded || !of.here) return;
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] *= up;
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            u32 h[4];
            take_part(v, part + 1 == PARTS, h);
            *(uint4 *)(xs + (part * of.rows + of.row) * stride + k) = make_uint4(h[0], h[1], h[2], h[3]);
        }
    };
    stage_rows<SPLIT, AHEAD>(p, begin, count, sums, start, chunk);
}

// The table entries of the block's groups, part of the first group of copies.
__device__ __forceinline__ void fetch_places(const Gemv &p, const Run &r, u64 *places) {
    for (u32 i = threadIdx.x; i < r.count; i += THREADS) {
        copy8(shared_at(places + i), p.groups + r.first + i);
        if (p.gate_at) copy8(shared_at(places + r.count + i), p.groups + p.gate_at + r.first + i);
    }
}

// The i-th element of y of the block; rows vary fastest, as they do in y.
template <int COLS> struct Element {
    u32 row, col, v;
    bool there;
    u64 at;
    float multiplier;
    __device__ __forceinline__ Element(const Gemv &p, const Run &r, const u64 *places, u32 i) {
        row = i % 16, col = i / 16 % COLS, v = min(i / (16 * COLS), r.count - 1);
        u64 g = places[v];
        u32 place = (u32)(g >> 32);
        there = i < r.count * (16 * COLS) && col < p.m && row < (place & 31);
        at = col * p.ldy + (place >> 5) + row;
        multiplier = __uint_as_float((u32)g);
    }
};
// `whole`: room for the block's sums, with SPLIT.
template <int COLS, int MATES, int SPLIT, bool AGAIN>
__device__ __forceinline__ void finish(const Gemv &p, const Run &r, const float *part, float *whole, const u64 *places, float small, float factor,
                                       float old) {
    u32 all = r.count * 16 * COLS, start = 0, step = THREADS / MATES;
    if (SPLIT > 1) {
        u32 both = p.gate_at ? 2 * all : all;
#pragma unroll 1
        for (u32 first = 0; first < both; first += step) {
            u32 i = min(first + threadIdx.x / MATES, both - 1);
            float sum = r.units ? summed<COLS, MATES>(r, part, i / (16 * COLS), i % (16 * COLS)) : 0.0f;
            if (threadIdx.x % MATES == 0) whole[i] = sum;
        }
        cluster_arrive();
        cluster_wait();
        step = THREADS;
        start = rank_in_cluster() * step;
    }
#pragma unroll 1
    for (u32 first = start; first < all; first += step * SPLIT) {
        Element<COLS> y(p, r, places, first + threadIdx.x / (SPLIT > 1 ? 1 : MATES));
        u32 e = y.row * COLS + y.col;
        float sum = SPLIT > 1 ? over_ranks<SPLIT>(whole + y.v * (16 * COLS) + e) : summed<COLS, MATES>(r, part, y.v, e);
        u32 v = y.v + r.count;
        float up = 0.0f;
        if (p.gate_at) up = SPLIT > 1 ? over_ranks<SPLIT>(whole + v * (16 * COLS) + e) : summed<COLS, MATES>(r, part, v, e);
        if (!y.there || (SPLIT == 1 && threadIdx.x % MATES)) continue;
        if (AGAIN && is_lost(p, sum, up, small, y.col)) {
            sum = taken_again(p, r.first + y.v, y.row, y.col);
        } else {
            sum *= y.multiplier * factor;
            if (p.gate_at) sum = silu(sum) * (up * (__uint_as_float((u32)places[v]) * factor));
        }
        if (p.y_dtype == F32) {
            float *to = (float *)p.y + y.at;
            *to = p.accumulate ? (first == start ? old : *to) + sum : sum;
        } else {
            ((u16 *)p.y)[y.at] = p.y_dtype == BF16 ? to_bf16(sum) : to_f16(sum);
        }
    }
    if (SPLIT > 1) {
        cluster_arrive(); // the others may still be reading this block's sums
        cluster_wait();
    }
}
// What y holds where this thread will add first.
template <int COLS, int MATES, int SPLIT> __device__ __forceinline__ float old_y(const Gemv &p, const Run &r, const u64 *places) {
    if (!p.accumulate) return 0.0f;
    Element<COLS> y(p, r, places, SPLIT > 1 ? rank_in_cluster() * THREADS + threadIdx.x : threadIdx.x / MATES);
    return y.there ? ((const float *)p.y)[y.at] : 0.0f;
}
// The factor of the activations' per-tensor scale.
template <bool QUANTISE> __device__ __forceinline__ float act_factor(const Gemv &p) {
    if (!QUANTISE || p.act != NVFP4 || p.convention == 0) return 1.0f;
    float g = p.act_global ? *p.act_global : p.global;
    return p.convention == 1 ? g : 1.0f / g;
}

// One unit of a warp's run against one row of x: the scaled sums of rows n and n + 8 over the lane's block.
template <int PARTS, bool APART>
__device__ __forceinline__ void one_unit(u32 slot, u32 lane, u32 xat, u32 part, u32 sat, u32 (&b)[16], float &low, float &high) {
    u32 c0[4], c1[4];
    lds4(c0, slot);
    lds4(c1, slot + 512);
    u32 scales = lds1(slot + 1024 - lane * 12);
    float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
#pragma unroll
    for (int q = 0; q < PARTS; q++) {
        if (lane / 4 == 2 * (lane % 4)) {
            u32 from = xat + q * part;
            lds4((u32(&)[4])b[0], from);
            lds4((u32(&)[4])b[4], from + 16);
            lds4((u32(&)[4])b[8], from + 128);
            lds4((u32(&)[4])b[12], from + 144);
        }
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            u32 a0[4], a1[4], a2[4], a3[4];
            decode(c0[i], a0);
            decode(c0[i + 1], a1);
            decode(c1[i], a2);
            decode(c1[i + 1], a3);
            As<bf16>::mma(even, a0[0], a0[1], a1[0], a1[1], b[i], b[i + 1]);
            As<bf16>::mma(odd, a2[0], a2[1], a3[0], a3[1], b[8 + i], b[9 + i]);
            As<bf16>::mma(even, a0[2], a0[3], a1[2], a1[3], b[4 + i], b[5 + i]);
            As<bf16>::mma(odd, a2[2], a2[3], a3[2], a3[3], b[12 + i], b[13 + i]);
        }
    }
    float f0, f1, f2, f3;
    from_f16_pair(__byte_perm(scales, 0, 0x1404) >> 1, f0, f1);
    from_f16_pair(__byte_perm(scales, 0, 0x3424) >> 1, f2, f3);
    if (APART) {
        float x0 = __uint_as_float(lds1(sat)), x1 = __uint_as_float(lds1(sat + 16));
        f0 *= x0, f1 *= x0, f2 *= x1, f3 *= x1;
    }
    low = fmaf(even[0], f0, low);
    high = fmaf(even[2], f1, high);
    low = fmaf(odd[0], f2, low);
    high = fmaf(odd[2], f3, high);
}

// Shared memory: rings, then x, then the scales of x (APART), sums of the norm, table entries, partial sums,
// whole sums (SPLIT).
template <bool QUANTISE, int PARTS, bool APART, int STAGES, int SPLIT> __device__ __forceinline__ void one_row(const Gemv &p) {
    extern __shared__ __align__(128) u8 memory[];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (!(p.late & 1)) let_next_start();
    Run r = run_of<SPLIT>(p, warp);
    u32 slice = (p.units + SPLIT - 1) / SPLIT, stride = slice * 128 + 8, groups = p.gate_at ? 2 * r.count : r.count;
    u16 *xs = (u16 *)(memory + WARPS * STAGES * UNIT);
    float *xscale = (float *)(xs + PARTS * stride);
    float *sums = xscale + (APART ? slice * 8 : 0);
    u64 *places = (u64 *)(sums + 2 * WARPS);
    float *part = (float *)(places + groups), *whole = part + (groups + 1 + WARPS) * 16;

    fetch_places(p, r, places);
    Feed f = feed_of<SPLIT>(p, r, lane);
    u32 ring = shared_at(memory) + warp * (STAGES * UNIT) + lane * 16, slot = ring;
#pragma unroll 1
    for (u32 i = 0; i < STAGES; i++) fetch<SPLIT>(p, r, f, ring + i * UNIT, lane);
    u32 b[16]; // column 2 t of B is x of block t, the other columns stay zero
#pragma unroll
    for (int i = 0; i < 16; i++) b[i] = 0;
    u32 t = lane % 4, n = lane / 4;

    stage<QUANTISE, PARTS, APART, SPLIT, 1>(p, r.begin, r.units, xs, xscale, sums, stride, 18446744073709551616.0f);
    if (p.late & 1) let_next_start();
    await<STAGES - 1>();
    __syncthreads(); // x and places are there
    float old = old_y<1, 4, SPLIT>(p, r, places);

    u32 v = divided(r.from, __frcp_rn((float)r.units)), at = r.from - v * r.units, left = r.to - r.from;
    float *to = part + (v + warp) * 16 + n;
    while (left) {
        u32 run = min(left, r.units - at);
        u32 xat = shared_at(xs) + t * 32 + at * 256, sat = shared_at(xscale) + t * 4 + at * 32;
        left -= run;
        at = 0;
        float low = 0, high = 0;
#pragma unroll 1
        do {
            await<STAGES - 1>();
            __syncwarp();
            one_unit<PARTS, APART>(slot, lane, xat, stride * 2, sat, b, low, high);
            xat += 256;
            sat += 32;
            __syncwarp(); // every lane has read the slot
            fetch<SPLIT>(p, r, f, slot, lane);
            slot = slot + UNIT == ring + STAGES * UNIT ? ring : slot + UNIT;
        } while (--run);
        low += __shfl_xor_sync(~0u, low, 1);
        high += __shfl_xor_sync(~0u, high, 1);
        low += __shfl_xor_sync(~0u, low, 2);
        high += __shfl_xor_sync(~0u, high, 2);
        if (t == 0) to[0] = low, to[8] = high;
        to += 16;
    }
    __syncthreads();
    // 2^(-12 - 62) and 2^(126 - 64)
    finish<1, 4, SPLIT, !QUANTISE>(p, r, part, whole, places, 5.293955920e-23f, 4611686018427387904.0f * act_factor<QUANTISE>(p), old);
}

// Two to 8 * TILES rows.
template <bool QUANTISE, int PARTS, int TILES, int STAGES, int SPLIT> __device__ __forceinline__ void few_rows(const Gemv &p) {
    extern __shared__ __align__(128) u8 memory[];
    enum { COLS = 8 * TILES };
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (!(p.late & 1)) let_next_start();
    Run r = run_of<SPLIT>(p, warp);
    u32 slice = (p.units + SPLIT - 1) / SPLIT, stride = slice * 128 + 8, groups = p.gate_at ? 2 * r.count : r.count;
    u32 rows = p.m <= 1 ? 1 : p.m <= 2 ? 2 : p.m <= 4 ? 4 : p.m <= 8 ? 8 : 16;
    u16 *xs = (u16 *)(memory + WARPS * STAGES * UNIT);
    float *sums = (float *)(xs + PARTS * rows * stride);
    u64 *places = (u64 *)(sums + 2 * WARPS);
    float *part = (float *)(places + groups), *whole = part + (groups + 1 + WARPS) * 16 * COLS;

    fetch_places(p, r, places);
    Feed f = feed_of<SPLIT>(p, r, lane);
    u32 ring = shared_at(memory) + warp * (STAGES * UNIT) + lane * 16, slot = ring;
#pragma unroll 1
    for (u32 i = 0; i < STAGES; i++) fetch<SPLIT>(p, r, f, ring + i * UNIT, lane);
    u32 t = lane % 4, n = lane / 4;

    stage<QUANTISE, PARTS, false, SPLIT, QUANTISE ? 1 : CHUNKS>(p, r.begin, r.units, xs, nullptr, sums, stride, 1.0f);
    if (p.late & 1) let_next_start();
    await<STAGES - 1>();
    __syncthreads(); // x and places are there
    float old = old_y<COLS, 1, SPLIT>(p, r, places);

    u32 v = divided(r.from, __frcp_rn((float)r.units)), at = r.from - v * r.units, left = r.to - r.from;
    float *to = part + (v + warp) * (16 * COLS) + n * COLS + 2 * t;
    while (left) {
        u32 run = min(left, r.units - at);
        // Columns without a row of x repeat the last one that has; they are never stored.
        u32 xat = shared_at(xs) + min(n, rows - 1) * stride * 2 + t * 32 + at * 256;
        left -= run;
        at = 0;
        float acc[TILES][4];
#pragma unroll
        for (int j = 0; j < TILES; j++) acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0;
#pragma unroll 1
        do {
            await<STAGES - 1>();
            __syncwarp();
            u32 scales = lds1(slot + 1024 - lane * 12);
            u32 c[2][4];
            lds4(c[0], slot);
            lds4(c[1], slot + 512);
            __syncwarp(); // every lane has read the slot
            fetch<SPLIT>(p, r, f, slot, lane);
            slot = slot + UNIT == ring + STAGES * UNIT ? ring : slot + UNIT;
#pragma unroll
            for (int s = 0; s < 2; s++) {
                u32 f0 = __byte_perm(scales, 0, s ? 0x4242 : 0x4040) * 16u + 0x73007300u;
                u32 f1 = __byte_perm(scales, 0, s ? 0x4343 : 0x4141) * 16u + 0x73007300u;
                u32 a[4][4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    decode(c[s][i], a[i]);
                    a[i][0] = times(a[i][0], f0), a[i][2] = times(a[i][2], f0);
                    a[i][1] = times(a[i][1], f1), a[i][3] = times(a[i][3], f1);
                }
#pragma unroll
                for (int q = 0; q < PARTS; q++) {
#pragma unroll
                    for (int j = 0; j < TILES; j++) {
#pragma unroll
                        for (int h = 0; h < 4; h += 2) {
                            u32 b[4];
                            lds4(b, xat + (q * rows + 8 * j) * stride * 2 + s * 128 + h * 8);
                            As<bf16>::mma(acc[j], a[0][h], a[0][h + 1], a[1][h], a[1][h + 1], b[0], b[1]);
                            As<bf16>::mma(acc[j], a[2][h], a[2][h + 1], a[3][h], a[3][h + 1], b[2], b[3]);
                        }
                    }
                }
            }
            xat += 256;
        } while (--run);
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            to[8 * j] = acc[j][0], to[8 * j + 1] = acc[j][1];
            to[8 * COLS + 8 * j] = acc[j][2], to[8 * COLS + 8 * j + 1] = acc[j][3];
        }
        to += 16 * COLS;
    }
    __syncthreads();
    // 2^(-12 - 8) and 2^(126 - 118)
    finish<COLS, 1, SPLIT, !QUANTISE>(p, r, part, whole, places, 9.536743164e-7f, 256.0f * act_factor<QUANTISE>(p), old);
}

#ifndef Q4_STAGES
#define Q4_STAGES 3
#endif
#ifndef Q4_STAGES_FEW
#define Q4_STAGES_FEW 3
#endif
#if __CUDA_ARCH__ >= 900
#define CLUSTER(n) __cluster_dims__(n, 1, 1)
#else
#define CLUSTER(n)
#endif
#define ONE(name, ...) \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) name(const __grid_constant__ Gemv p) { one_row<__VA_ARGS__, Q4_STAGES, 1>(p); }
#define FEW(name, ...) \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ Gemv p) { few_rows<__VA_ARGS__, 1, Q4_STAGES_FEW, 1>(p); } \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name##_wide(const __grid_constant__ Gemv p) { few_rows<__VA_ARGS__, 2, Q4_STAGES_FEW, 1>(p); } \
    extern "C" __global__ void CLUSTER(4) __launch_bounds__(THREADS, 1) name##_split(const __grid_constant__ Gemv p) { few_rows<__VA_ARGS__, 2, Q4_STAGES_FEW, 4>(p); }
// What x is: each compiles alone, the number is its place among the launcher's families.
#ifndef Q4_FAMILY
#define Q4_FAMILY -1
#endif
#define HAS(n) (Q4_FAMILY < 0 || Q4_FAMILY == n)
// With row.cu behind it, this text only lends it what stands above.
#ifndef Q4_ROW
#if HAS(0)
ONE(q4_gemv_one, false, 1, false)
FEW(q4_gemv_few, false, 1)
#endif
#if HAS(1)
ONE(q4_gemv_one_f16, false, 2, false)
FEW(q4_gemv_few_f16, false, 2)
#endif
#if HAS(2)
ONE(q4_gemv_one_f32, false, 3, false)
FEW(q4_gemv_few_f32, false, 3)
#endif
#if HAS(3)
ONE(q4_gemv_one_int8, true, 1, true)
FEW(q4_gemv_few_int8, true, 3)
#endif
#if HAS(4)
ONE(q4_gemv_one_nvfp4, true, 1, false)
FEW(q4_gemv_few_nvfp4, true, 1)
#endif

// Rows of elements of `size` bytes, `ld` apart, to rows that lie close together.
extern "C" __global__ void q4_gemv_align(const u8 *from, u64 ld, u32 k, u32 size, u8 *to) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    u64 at = blockIdx.y * ld + i, out = (u64)blockIdx.y * k + i;
    let_next_start();
    wait_for_previous();
    if (i >= k) return;
    if (size == 4) ((u32 *)to)[out] = ((const u32 *)from)[at];
    else ((u16 *)to)[out] = ((const u16 *)from)[at];
}
#endif
