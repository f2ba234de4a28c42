// Products of packed NVFP4 weights with one to eight rows of x: y = x W^T, one node with its norm, quantisation, gate and sum.
// Header-free: NVRTC and nvcc both take it, for compute capability 8.0 on.
//
// A block owns whole row groups, its warps equal runs of their units (16 rows x 128 k, 1152 contiguous bytes). Every warp
// streams its run through a ring of its own in shared memory; the ring is filled before the kernel waits for the one before
// it. Codes become A fragments of mma.m16n8k16 without leaving their lane: value * 2^-126 in bf16, which the tensor cores
// take as it is. One row of x (`one`): the eight columns of B are the eight scale blocks of a unit, so that the sums of
// blocks come out apart and are scaled in f32. Two to eight rows (`few`): the columns are the rows, the scales multiply A.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

enum { F32 = 1, F16 = 2, BF16 = 3 };
enum { NATIVE = 1, INT8 = 2, NVFP4 = 3 };
enum { UNIT = 1152, THREADS = 512, WARPS = THREADS / 32 };
enum { CHUNKS = 5 }; // of 8 elements of x that a thread asks for at once, where there are several rows and none is quantised

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

__device__ __forceinline__ u32 shared_at(const void *p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy16(u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}
__device__ __forceinline__ void copy8(u32 to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ __forceinline__ void await() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }
__device__ __forceinline__ void next_may_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// A cluster of blocks shares row groups and splits k.
__device__ __forceinline__ u32 rank_in_cluster() {
    u32 r = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %cluster_ctarank;" : "=r"(r));
#endif
    return r;
}
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ float of_rank(const float *p, u32 rank) {
    float v = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .u32 a; mapa.shared::cluster.u32 a, %1, %2; ld.shared::cluster.f32 %0, [a];}" : "=f"(v) : "r"(shared_at(p)), "r"(rank) : "memory");
#endif
    return v;
}
__device__ __forceinline__ void lds4(u32 (&v)[4], u32 at) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at));
}
__device__ __forceinline__ u32 lds1(u32 at) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
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
// Eight codes to four pairs of bf16, times 2^-126. Pairs 0 and 1 of two words are an A fragment with x as it lies, and so are 2 and 3.
__device__ __forceinline__ void decode(u32 w, u32 (&a)[4]) {
    const u32 m = 0x81C081C0u;
    a[0] = w & m;
    a[1] = (w << 3) & m;
    a[2] = ((w & 0x20072007u) * 68u) & m;
    a[3] = ((w >> 3) & 0x01C001C0u) | ((w << 1) & 0x80008000u);
}

__device__ __forceinline__ float from_bf16(u32 h) { return __uint_as_float(h << 16); }
__device__ __forceinline__ u32 to_bf16(float f) {
    u16 h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
__device__ __forceinline__ u32 to_bf16_pair(float lo, float hi) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    return d;
}
__device__ __forceinline__ float from_f16(u32 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)h));
    return f;
}
__device__ __forceinline__ void from_f16_pair(u32 h, float &lo, float &hi) {
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(lo), "=f"(hi) : "r"(h));
}
__device__ __forceinline__ u32 to_f16(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
__device__ __forceinline__ float rounded(u32 dtype, float v) {
    return dtype == BF16 ? from_bf16(to_bf16(v)) : dtype == F16 ? from_f16(to_f16(v)) : v;
}
__device__ __forceinline__ float silu(float g) { return __fdividef(g, 1.0f + __expf(-g)); }

// Eight elements: f32, 16-byte aligned, or 16 bits wide.
__device__ __forceinline__ void load8(const float *p, float (&v)[8]) {
    float4 a = *(const float4 *)p, b = *(const float4 *)(p + 4);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
__device__ __forceinline__ void widen8(uint4 a, u32 dtype, float (&v)[8]) {
    u32 h[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[2 * i] = dtype == BF16 ? from_bf16(h[i] & 0xffff) : from_f16(h[i] & 0xffff);
        v[2 * i + 1] = dtype == BF16 ? from_bf16(h[i] >> 16) : from_f16(h[i] >> 16);
    }
}

// ---- quantisers of activations, to the bit those of the formats (docs/numerics.md) ----
enum { TORCHAO = 1, MODELOPT = 2, COMPRESSED_TENSORS = 3, TRANSFORMER_ENGINE = 4, RUNTIME = 5 };

__device__ __forceinline__ float e4m3_value(u32 byte) { // without sign
    u32 e = byte >> 3;
    return e ? __uint_as_float((e + 120) << 23 | (byte & 7) << 20) : (float)(byte & 7) * 0.001953125f;
}
__device__ __forceinline__ u32 e4m3_of(float x) { // x >= 0 and not NaN
    if (x < 0.015625f) return __float2int_rn(__fmul_rn(x, 512.0f));
    u32 bits = __float_as_uint(x), byte = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    return byte < 0x7e ? byte : 0x7e;
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
    float v = e4m3_value(byte);
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
// Eight elements of a block whose other eight are in the neighbouring lane, as the values they stand for; with INT8 and
// `apart` the integers, and their scale in `scale`. A block with NaN or infinity becomes NaN.
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

// x of every row to shared memory, in as many bf16 parts as it takes, times `up`: [part][row][stride]; a team of threads
// to a row. Of k only what this block has, `count` units from `begin` on. Norm, rounding to the type of x, and quantisation on the way. x and norm are 16-byte aligned, row by row.
template <bool QUANTISE, int PARTS, bool APART, int SPLIT, int AHEAD>
__device__ __forceinline__ void stage(const Gemv &p, u32 begin, u32 count, u16 *xs, float *xscale, float *sums, u32 stride, float up) {
    u32 shift = p.m <= 1 ? 0 : p.m <= 2 ? 1 : p.m <= 4 ? 2 : p.m <= 8 ? 3 : 4, rows = 1 << shift, team = THREADS >> shift;
    u32 row = threadIdx.x / 32 >> (4 - shift), at = (threadIdx.x & (team - 1)) * 8, step = team * 8;
    u32 padded = count * 128, k_end = min(p.k - min(p.k, begin * 128), padded);
    bool here = row < p.m;
    u64 first = (u64)row * p.ldx + begin * 128;
    const float *norm = p.norm + begin * 128;
    float v[AHEAD][8], weight[AHEAD][8], inverse = 1.0f;
    auto load_norm = [&](u32 k) {
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
            if (here && k + j * step < k_end) load8(norm + k + j * step, weight[j]);
    };
    if (p.norm) load_norm(at);
    wait_for_previous();
    float global = QUANTISE ? p.act_global ? *p.act_global : p.global : 1.0f;
    // Chunks of a row in flight together: one after another each would wait for the second cache.
    auto load = [&](u32 k, float (&to)[AHEAD][8]) {
        if (p.norm || p.x_dtype == F32) {
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
#pragma unroll
                for (int i = 0; i < 8; i++) to[j][i] = 0;
                if (here && k + j * step < k_end) load8((const float *)p.x + first + k + j * step, to[j]);
            }
            return;
        }
        uint4 halves[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            bool in = here && k + j * step < k_end;
            halves[j] = in ? *(const uint4 *)((const u16 *)p.x + first + k + j * step) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) widen8(halves[j], p.x_dtype, to[j]);
    };
    load(at, v);
    if (p.norm) {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
#pragma unroll
            for (int i = 0; i < 8; i++) sum = fmaf(v[j][i], v[j][i], sum);
#pragma unroll 1
        for (u32 k = at + AHEAD * step; k < k_end; k += AHEAD * step) {
            float u[AHEAD][8];
            load(k, u);
#pragma unroll
            for (int j = 0; j < AHEAD; j++)
#pragma unroll
                for (int i = 0; i < 8; i++) sum = fmaf(u[j][i], u[j][i], sum);
        }
#pragma unroll
        for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
        __syncthreads();
        const float *mates = sums + row * (team / 32);
        sum = 0;
        if (shift < 4) {
#pragma unroll
            for (u32 i = 0; i < WARPS; i += 2) {
                if (i < team / 32) sum += mates[i] + mates[i + 1];
            }
        } else {
            sum = mates[0];
        }
        if (SPLIT > 1) {
            if (at == 0) sums[WARPS + row] = sum;
            cluster_arrive();
            cluster_wait();
            sum = 0;
#pragma unroll
            for (u32 i = 0; i < SPLIT; i++) sum += of_rank(sums + WARPS + row, i);
        }
        inverse = rsqrtf(__fdividef(sum, (float)p.k) + p.eps);
    }
    auto stage_chunk = [&](u32 k, float (&v)[8], const float (&weight)[8]) {
        bool in = here && k < k_end;
        if (in && p.norm) {
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = v[i] * inverse * weight[i];
            if (p.x_dtype == BF16) {
#pragma unroll
                for (int i = 0; i < 8; i++) v[i] = from_bf16(to_bf16(v[i]));
            } else if (p.x_dtype == F16) {
#pragma unroll
                for (int i = 0; i < 8; i++) v[i] = from_f16(to_f16(v[i]));
            }
        }
        if (QUANTISE) {
            float scale = 0;
            quantised(p, global, APART, v, scale);
            if (APART && k < padded && !(k & 8)) xscale[k / 16] = in ? scale : 0.0f;
        }
        if (k < padded && here) {
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] *= up;
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                u32 h[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    h[i] = to_bf16_pair(v[2 * i], v[2 * i + 1]);
                    if (part + 1 < PARTS) {
                        v[2 * i] -= from_bf16(h[i] & 0xffff);
                        v[2 * i + 1] -= from_bf16(h[i] >> 16);
                    }
                }
                *(uint4 *)(xs + (part * rows + row) * stride + k) = make_uint4(h[0], h[1], h[2], h[3]);
            }
        }
    };
#pragma unroll 1
    for (u32 k0 = at; k0 < padded + at; k0 += AHEAD * step) {
        if (k0 != at) {
            load(k0, v);
            if (p.norm) load_norm(k0);
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) stage_chunk(k0 + j * step, v[j], weight[j]);
    }
}

// What a warp streams: units [from, to) of the block's, `per` of them at most. The block's groups are [first, first + count)
// and, with gate, as many from gate_at + first on; of each it has `units` units from `begin` on.
struct Run {
    u32 first, count, begin, units, per, from, to;
};
// a / b for a * b < 2^20: the quotient is never near enough to an integer for the rounding to matter.
__device__ __forceinline__ u32 divided(u32 a, float inverse_of_b) { return (u32)(((float)a + 0.5f) * inverse_of_b); }
template <int SPLIT> __device__ __forceinline__ Run run_of(const Gemv &p, u32 warp) {
    Run r;
    u32 b = blockIdx.x / SPLIT, rank = SPLIT > 1 ? rank_in_cluster() : 0;
    r.first = b * p.each + min(b, p.extra);
    r.count = p.each + (b < p.extra);
    r.begin = p.units * rank / SPLIT;
    r.units = p.units * (rank + 1) / SPLIT - r.begin;
    u32 total = (p.gate_at ? 2 : 1) * r.count * r.units;
    r.per = max((total + WARPS - 1) / WARPS, 1u);
    r.from = min(warp * r.per, total);
    r.to = min(r.from + r.per, total);
    return r;
}
// The source of a warp's ring: the next unit for this lane, how many are left, how many before the up rows begin, and with
// SPLIT how many of the group at hand.
struct Feed {
    const u8 *next;
    u32 left, straight, jump, group;
};
template <int SPLIT> __device__ __forceinline__ Feed feed_of(const Gemv &p, const Run &r, u32 lane) {
    Feed f;
    u32 split = r.count * r.units;
    f.jump = (p.gate_at - r.count) * p.units;
    f.left = r.to - r.from;
    f.straight = r.from < split ? split - r.from : ~0u;
    u32 v = SPLIT > 1 ? divided(r.from, __frcp_rn((float)r.units)) : 0;
    u64 at = (u64)r.first * p.units + r.begin + r.from + v * (p.units - r.units);
    f.group = r.units - (r.from - v * r.units);
    if (r.from >= split) at += f.jump;
    f.next = p.w + at * UNIT + lane * 16;
    return f;
}
// The next unit to the slot at `to`, by 24 lanes; nothing behind the end.
template <int SPLIT> __device__ __forceinline__ void fetch(const Gemv &p, const Run &r, Feed &f, u32 to, u32 lane) {
    if (f.left && lane < 24) {
        copy16(to, f.next);
        copy16(to + 384, f.next + 384);
        copy16(to + 768, f.next + 768);
    }
    if (f.left) f.left--;
    f.next += UNIT;
    if (SPLIT > 1 && --f.group == 0) f.group = r.units, f.next += (p.units - r.units) * UNIT;
    if (--f.straight == 0) f.next += (u64)f.jump * UNIT;
    commit();
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
// MATES threads sum an element over the warps that had a share of its group.
template <int COLS, int MATES> __device__ __forceinline__ float summed(const Run &r, const float *part, u32 v, u32 e) {
    float inverse = __frcp_rn((float)r.per);
    u32 wa = divided(v * r.units, inverse), wb = divided((v + 1) * r.units - 1, inverse);
    float sum = 0;
#pragma unroll 1
    for (u32 w = wa + threadIdx.x % MATES; w <= wb; w += MATES) sum += part[(v + w) * (16 * COLS) + e];
#pragma unroll
    for (int d = 1; d < MATES; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
    return sum;
}
template <int SPLIT> __device__ __forceinline__ float over_ranks(const float *sums) {
    float sum = 0;
#pragma unroll
    for (u32 i = 0; i < SPLIT; i++) sum += of_rank(sums, i);
    return sum;
}
// `whole`: room for the block's sums, with SPLIT.
template <int COLS, int MATES, int SPLIT>
__device__ __forceinline__ void finish(const Gemv &p, const Run &r, const float *part, float *whole, const u64 *places, float factor,
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
        sum *= y.multiplier * factor;
        if (p.gate_at) {
            u32 v = y.v + r.count;
            float up = SPLIT > 1 ? over_ranks<SPLIT>(whole + v * (16 * COLS) + e) : summed<COLS, MATES>(r, part, v, e);
            sum = silu(sum) * (up * (__uint_as_float((u32)places[v]) * factor));
        }
        if (!y.there || (SPLIT == 1 && threadIdx.x % MATES)) continue;
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
            mma(even, a0[0], a0[1], a1[0], a1[1], b[i], b[i + 1]);
            mma(odd, a2[0], a2[1], a3[0], a3[1], b[8 + i], b[9 + i]);
            mma(even, a0[2], a0[3], a1[2], a1[3], b[4 + i], b[5 + i]);
            mma(odd, a2[2], a2[3], a3[2], a3[3], b[12 + i], b[13 + i]);
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

// Shared memory: rings, then x, then the scales of x (APART), sums of the norm, table entries, partial sums, whole sums (SPLIT).
template <bool QUANTISE, int PARTS, bool APART, int STAGES, int SPLIT> __device__ __forceinline__ void one_row(const Gemv &p) {
    extern __shared__ __align__(128) u8 memory[];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (!(p.late & 1)) next_may_start();
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
    if (p.late & 1) next_may_start();
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
    finish<1, 4, SPLIT>(p, r, part, whole, places, 4611686018427387904.0f * act_factor<QUANTISE>(p), old); // 2^(126 - 64)
}

// Two to 8 * TILES rows.
template <bool QUANTISE, int PARTS, int TILES, int STAGES, int SPLIT> __device__ __forceinline__ void few_rows(const Gemv &p) {
    extern __shared__ __align__(128) u8 memory[];
    enum { COLS = 8 * TILES };
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (!(p.late & 1)) next_may_start();
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
    if (p.late & 1) next_may_start();
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
                            mma(acc[j], a[0][h], a[0][h + 1], a[1][h], a[1][h + 1], b[0], b[1]);
                            mma(acc[j], a[2][h], a[2][h + 1], a[3][h], a[3][h + 1], b[2], b[3]);
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
    finish<COLS, 1, SPLIT>(p, r, part, whole, places, 256.0f * act_factor<QUANTISE>(p), old); // 2^(126 - 118)
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
    next_may_start();
    wait_for_previous();
    if (i >= k) return;
    if (size == 4) ((u32 *)to)[out] = ((const u32 *)from)[at];
    else ((u16 *)to)[out] = ((const u16 *)from)[at];
}
#endif
