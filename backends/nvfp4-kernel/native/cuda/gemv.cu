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

struct Gemv {
    const u8 *w;
    const u64 *groups;        // per row group: f32 multiplier, then first row of y * 32 + rows
    const void *x;            // [m, k] of x_dtype; f32 with norm
    void *y;                  // [m, n]
    const float *norm;        // [k] or null
    const float *act_global;  // per-tensor scale of nvfp4 activations on the device, or null
    u64 ldx, ldy;             // elements
    u32 m, k, units, work;    // units of a row group; row groups, or pairs of them with gate
    u32 gate_at;              // row group of the first up row, 0 without gate
    u32 x_dtype, y_dtype, accumulate;
    u32 act, rule, convention, stages; // convention of the scale of x: 0 none, 1 multiply, 2 divide
    float eps, global;
    u32 ahead, trigger;       // units a warp asks into L2 beyond its ring; 1: let the next kernel start late
};

__device__ __forceinline__ u32 shared_at(const void *p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy16(u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
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
__device__ __forceinline__ void into_l2(const void *p, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes));
#endif
}
__device__ __forceinline__ void lds4(u32 (&v)[4], u32 at) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at));
}
// Keeps what v holds where the predicate is false.
__device__ __forceinline__ void lds4_if(u32 *v, u32 at, u32 yes) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];}"
                 : "+r"(v[0]), "+r"(v[1]), "+r"(v[2]), "+r"(v[3]) : "r"(at), "r"(yes));
}
__device__ __forceinline__ u32 lds1(u32 at) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
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
// Eight codes to four pairs of bf16, times 2^-126.
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
__device__ __forceinline__ u32 to_f16(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
__device__ __forceinline__ float rounded(u32 dtype, float v) {
    return dtype == BF16 ? from_bf16(to_bf16(v)) : dtype == F16 ? from_f16(to_f16(v)) : v;
}
__device__ __forceinline__ float silu(float g) { return __fdividef(g, 1.0f + __expf(-g)); }

// Eight elements from `at` on; element by element where the address allows no more.
__device__ __forceinline__ void load8(const void *x, u32 dtype, u64 at, bool aligned, float (&v)[8]) {
    if (dtype == F32) {
        const float *p = (const float *)x + at;
        if (aligned) {
            float4 a = *(const float4 *)p, b = *(const float4 *)(p + 4);
            v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = p[i];
        }
        return;
    }
    const u16 *p = (const u16 *)x + at;
    u32 h[4];
    if (aligned) {
        uint4 a = *(const uint4 *)p;
        h[0] = a.x, h[1] = a.y, h[2] = a.z, h[3] = a.w;
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) h[i] = p[2 * i] | (u32)p[2 * i + 1] << 16;
    }
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

// x of every row to shared memory, in as many bf16 parts as it takes, times 2^64 where `up`: [part][row][stride].
// `team` threads to a row. Norm, rounding to the type of x, and quantisation on the way.
template <int PARTS, bool APART>
__device__ __forceinline__ void stage(const Gemv &p, u16 *xs, float *xscale, float *sums, u32 stride, float up) {
    u32 rows = p.m <= 1 ? 1 : p.m <= 2 ? 2 : p.m <= 4 ? 4 : 8;
    u32 team = THREADS / rows, row = threadIdx.x / team, at = threadIdx.x % team * 8, step = team * 8;
    u32 padded = p.units * 128;
    u32 dtype = p.norm ? (u32)F32 : p.x_dtype;
    bool here = row < p.m;
    u64 first = (u64)row * p.ldx;
    u32 wide = dtype == F32 ? 4 : 2;
    bool aligned = (((u64)p.x | p.ldx * wide) & 15) == 0;
    float v[8], weight[8];
    bool mine = here && at < p.k;
    if (p.norm && mine) load8(p.norm, F32, at, ((u64)p.norm & 15) == 0, weight);
    wait_for_previous();
    float global = p.act_global ? *p.act_global : p.global;
    if (mine) load8(p.x, dtype, first + at, aligned, v);
    float inverse = 1.0f;
    if (p.norm) {
        float sum = 0;
        if (mine) {
#pragma unroll
            for (int i = 0; i < 8; i++) sum = fmaf(v[i], v[i], sum);
        }
        if (here) {
            for (u32 k = at + step; k < p.k; k += step) {
                float u[8];
                load8(p.x, dtype, first + k, aligned, u);
#pragma unroll
                for (int i = 0; i < 8; i++) sum = fmaf(u[i], u[i], sum);
            }
        }
#pragma unroll
        for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
        __syncthreads();
        u32 w0 = row * (team / 32);
        sum = 0;
        for (u32 i = 0; i < team / 32; i++) sum += sums[w0 + i];
        inverse = rsqrtf(sum / (float)p.k + p.eps);
    }
    for (u32 k0 = 0; k0 < padded; k0 += step) {
        u32 k = k0 + at;
        bool in = here && k < p.k;
        if (k0 && in) {
            load8(p.x, dtype, first + k, aligned, v);
            if (p.norm) load8(p.norm, F32, k, ((u64)p.norm & 15) == 0, weight);
        }
        if (!in) {
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = 0;
        } else if (p.norm) {
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = rounded(p.x_dtype, v[i] * inverse * weight[i]);
        }
        if (p.act != NATIVE) {
            float scale = 0;
            quantised(p, global, APART, v, scale);
            if (APART && in && !(k & 8)) xscale[k / 16] = scale;
        }
        if (APART && !in && k < padded && !(k & 8)) xscale[k / 16] = 0;
        if (k < padded && here) {
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] *= up;
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                u32 h[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    h[i] = to_bf16_pair(v[2 * i], v[2 * i + 1]);
                    v[2 * i] -= from_bf16(h[i] & 0xffff);
                    v[2 * i + 1] -= from_bf16(h[i] >> 16);
                }
                *(uint4 *)(xs + ((u64)part * rows + row) * stride + k) = make_uint4(h[0], h[1], h[2], h[3]);
            }
        }
    }
    __syncthreads();
}

__device__ __forceinline__ void put(const Gemv &p, u64 at, float v) {
    if (p.y_dtype == F32) {
        float *y = (float *)p.y + at;
        *y = p.accumulate ? *y + v : v;
    } else {
        ((u16 *)p.y)[at] = p.y_dtype == BF16 ? to_bf16(v) : to_f16(v);
    }
}

// What a warp streams: units [from, to) of the block's, the block's groups being [first, first + count) and, with gate, as
// many from gate_at + first on.
struct Run {
    u32 first, count, total, from, to, split;
};
__device__ __forceinline__ Run run_of(const Gemv &p, u32 warp) {
    Run r;
    r.first = (u32)((u64)p.work * blockIdx.x / gridDim.x);
    r.count = (u32)((u64)p.work * (blockIdx.x + 1) / gridDim.x) - r.first;
    r.split = r.count * p.units;
    r.total = p.gate_at ? 2 * r.split : r.split;
    r.from = r.total * warp / WARPS;
    r.to = r.total * (warp + 1) / WARPS;
    return r;
}
__device__ __forceinline__ const u8 *unit_at(const Gemv &p, const Run &r, u32 u) {
    u64 at = (u64)r.first * p.units + u;
    if (u >= r.split) at += (u64)(p.gate_at - r.count) * p.units;
    return p.w + at * UNIT;
}
__device__ __forceinline__ void fetch(const u8 *from, u32 to, u32 lane) {
    copy16(to + lane * 16, from + lane * 16);
    copy16(to + 512 + lane * 16, from + 512 + lane * 16);
    if (lane < 8) copy16(to + 1024 + lane * 16, from + 1024 + lane * 16);
}

// Sums of `parts` floats for (group v of the block, row i, column c) over the warps that had a share.
template <int COLS> __device__ __forceinline__ float summed(const Gemv &p, const Run &r, const float *part, u32 v, u32 e) {
    u32 wa = ((v * p.units + 1) * WARPS - 1) / r.total, wb = ((v + 1) * p.units * WARPS - 1) / r.total;
    float sum = 0;
    for (u32 w = wa; w <= wb; w++) sum += part[(v + w) * (16 * COLS) + e];
    return sum;
}
template <int COLS> __device__ __forceinline__ void finish(const Gemv &p, const Run &r, const float *part, float factor) {
    for (u32 i = threadIdx.x; i < r.count * 16 * COLS; i += THREADS) {
        // Rows vary fastest, as they do in y.
        u32 row = i % 16, col = i / 16 % COLS, v = i / (16 * COLS), e = row * COLS + col;
        if (col >= p.m) continue;
        u64 g = p.groups[r.first + v];
        u32 place = (u32)(g >> 32);
        if (row >= (place & 31)) continue;
        float sum = summed<COLS>(p, r, part, v, e) * (__uint_as_float((u32)g) * factor);
        if (p.gate_at) {
            u64 h = p.groups[p.gate_at + r.first + v];
            float up = summed<COLS>(p, r, part, v + r.count, e) * (__uint_as_float((u32)h) * factor);
            sum = silu(sum) * up;
        }
        put(p, col * p.ldy + (place >> 5) + row, sum);
    }
}
// The factor of the activations' per-tensor scale.
__device__ __forceinline__ float act_factor(const Gemv &p) {
    if (p.act != NVFP4 || p.convention == 0) return 1.0f;
    float g = p.act_global ? *p.act_global : p.global;
    return p.convention == 1 ? g : 1.0f / g;
}

// Shared memory: rings, then x, then the scales of x (APART), then partial sums.
template <int PARTS, bool APART, int STAGES> __device__ __forceinline__ void one_row(const Gemv &p) {
    extern __shared__ __align__(128) u8 memory[];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 stride = p.units * 128 + 8;
    u16 *xs = (u16 *)(memory + WARPS * STAGES * UNIT);
    float *xscale = (float *)(xs + PARTS * stride);
    float *sums = xscale + (APART ? p.units * 8 : 0);
    float *part = sums + WARPS;

    if (!p.trigger) next_may_start();
    Run r = run_of(p, warp);
    u32 ring = shared_at(memory) + warp * (STAGES * UNIT);
#pragma unroll
    for (u32 i = 0; i < STAGES; i++) {
        if (r.from + i < r.to) fetch(unit_at(p, r, r.from + i), ring + i * UNIT, lane);
        commit();
    }
    if (p.ahead && lane == 0) {
        u32 a = r.from + STAGES, b = min(r.to, a + p.ahead);
        if (a < b && (b <= r.split || a >= r.split)) into_l2(unit_at(p, r, a), (b - a) * UNIT);
        else if (a < b) {
            into_l2(unit_at(p, r, a), (r.split - a) * UNIT);
            into_l2(unit_at(p, r, r.split), (b - r.split) * UNIT);
        }
    }
    stage<PARTS, APART>(p, xs, xscale, sums, stride, 18446744073709551616.0f);
    if (p.trigger) next_may_start();

    u32 t = lane % 4, n = lane / 4;
    u32 even = n == 2 * t, odd = n == 2 * t + 1;
    u32 xat = shared_at(xs) + t * 32, scale_at = shared_at(xscale) + t * 4;
    u32 b[16];
#pragma unroll
    for (int i = 0; i < 16; i++) b[i] = 0;
    float low = 0, high = 0; // rows n and n + 8
    u32 v = r.from / p.units, at = r.from % p.units, slot = 0;
    for (u32 u = r.from; u < r.to; u++) {
        await<STAGES - 1>();
        __syncwarp();
        u32 base = ring + slot * UNIT;
        u32 c0[4], c1[4];
        lds4(c0, base + lane * 16);
        lds4(c1, base + 512 + lane * 16);
        u32 scales = lds1(base + 1024 + lane * 4);
        float acc[4] = {0, 0, 0, 0};
        u32 a0[2][4], a1[2][4];
#pragma unroll
        for (int q = 0; q < PARTS; q++) {
            u32 from = xat + q * stride * 2 + at * 256;
            lds4_if(b, from, even);
            lds4_if(b + 4, from + 16, even);
            lds4_if(b + 8, from + 128, odd);
            lds4_if(b + 12, from + 144, odd);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                decode(c0[h], a0[h]);
                decode(c0[2 + h], a1[h]);
                mma(acc, a0[h][0], a1[h][0], a0[h][1], a1[h][1], b[4 * h], b[4 * h + 1]);
                mma(acc, a0[h][2], a1[h][2], a0[h][3], a1[h][3], b[4 * h + 2], b[4 * h + 3]);
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                decode(c1[h], a0[h]);
                decode(c1[2 + h], a1[h]);
                mma(acc, a0[h][0], a1[h][0], a0[h][1], a1[h][1], b[8 + 4 * h], b[8 + 4 * h + 1]);
                mma(acc, a0[h][2], a1[h][2], a0[h][3], a1[h][3], b[8 + 4 * h + 2], b[8 + 4 * h + 3]);
            }
        }
        __syncwarp(); // every lane has read the slot
        if (u + STAGES < r.to) fetch(unit_at(p, r, u + STAGES), base, lane);
        commit();
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        u32 s = __byte_perm(scales, 0, 0x1404) >> 1, s2 = __byte_perm(scales, 0, 0x3424) >> 1;
        float f0 = from_f16(s & 0xffff), f1 = from_f16(s >> 16), f2 = from_f16(s2 & 0xffff), f3 = from_f16(s2 >> 16);
        if (APART) {
            float sx0 = __uint_as_float(lds1(scale_at + at * 32)), sx1 = __uint_as_float(lds1(scale_at + at * 32 + 16));
            f0 *= sx0, f1 *= sx0, f2 *= sx1, f3 *= sx1;
        }
        low = fmaf(acc[0], f0, low);
        high = fmaf(acc[2], f1, high);
        low = fmaf(acc[1], f2, low);
        high = fmaf(acc[3], f3, high);
        if (++at == p.units || u + 1 == r.to) {
            low += __shfl_xor_sync(~0u, low, 1);
            high += __shfl_xor_sync(~0u, high, 1);
            low += __shfl_xor_sync(~0u, low, 2);
            high += __shfl_xor_sync(~0u, high, 2);
            if (t == 0) {
                part[(v + warp) * 16 + n] = low;
                part[(v + warp) * 16 + n + 8] = high;
            }
            low = high = 0;
            at = 0, v++;
        }
    }
    __syncthreads();
    finish<1>(p, r, part, 4611686018427387904.0f * act_factor(p)); // 2^(126 - 64)
}

// Two to eight rows.
template <int PARTS, int STAGES> __device__ __forceinline__ void few_rows(const Gemv &p) {
    extern __shared__ __align__(128) u8 memory[];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 stride = p.units * 128 + 8;
    u32 rows = p.m <= 1 ? 1 : p.m <= 2 ? 2 : p.m <= 4 ? 4 : 8;
    u16 *xs = (u16 *)(memory + WARPS * STAGES * UNIT);
    float *sums = (float *)(xs + PARTS * rows * stride);
    float *part = sums + WARPS;

    if (!p.trigger) next_may_start();
    Run r = run_of(p, warp);
    u32 ring = shared_at(memory) + warp * (STAGES * UNIT);
#pragma unroll
    for (u32 i = 0; i < STAGES; i++) {
        if (r.from + i < r.to) fetch(unit_at(p, r, r.from + i), ring + i * UNIT, lane);
        commit();
    }
    if (p.ahead && lane == 0) {
        u32 a = r.from + STAGES, b = min(r.to, a + p.ahead);
        if (a < b && (b <= r.split || a >= r.split)) into_l2(unit_at(p, r, a), (b - a) * UNIT);
        else if (a < b) {
            into_l2(unit_at(p, r, a), (r.split - a) * UNIT);
            into_l2(unit_at(p, r, r.split), (b - r.split) * UNIT);
        }
    }
    stage<PARTS, false>(p, xs, nullptr, sums, stride, 1.0f);
    if (p.trigger) next_may_start();

    u32 t = lane % 4, n = lane / 4;
    // Columns without a row of x repeat the last one that has; they are never stored.
    u32 xat = shared_at(xs) + (n < rows ? n : rows - 1) * stride * 2 + t * 32;
    float acc[4] = {0, 0, 0, 0};
    u32 v = r.from / p.units, at = r.from % p.units, slot = 0;
    for (u32 u = r.from; u < r.to; u++) {
        await<STAGES - 1>();
        __syncwarp();
        u32 base = ring + slot * UNIT;
        u32 scales = lds1(base + 1024 + lane * 4);
        u32 c[2][4];
        lds4(c[0], base + lane * 16);
        lds4(c[1], base + 512 + lane * 16);
        __syncwarp(); // every lane has read the slot
        if (u + STAGES < r.to) fetch(unit_at(p, r, u + STAGES), base, lane);
        commit();
        slot = slot + 1 == STAGES ? 0 : slot + 1;
#pragma unroll
        for (int s = 0; s < 2; s++) {
            u32 f0 = __byte_perm(scales, 0, s ? 0x4242 : 0x4040) * 16u + 0x73007300u;
            u32 f1 = __byte_perm(scales, 0, s ? 0x4343 : 0x4141) * 16u + 0x73007300u;
            u32 b[PARTS][2][4];
#pragma unroll
            for (int q = 0; q < PARTS; q++) {
                u32 from = xat + q * rows * stride * 2 + at * 256 + s * 128;
                lds4(b[q][0], from);
                lds4(b[q][1], from + 16);
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                u32 a0[4], a1[4];
                decode(c[s][h], a0);
                decode(c[s][2 + h], a1);
#pragma unroll
                for (int i = 0; i < 4; i++) a0[i] = times(a0[i], f0), a1[i] = times(a1[i], f1);
#pragma unroll
                for (int q = 0; q < PARTS; q++) {
                    mma(acc, a0[0], a1[0], a0[1], a1[1], b[q][h][0], b[q][h][1]);
                    mma(acc, a0[2], a1[2], a0[3], a1[3], b[q][h][2], b[q][h][3]);
                }
            }
        }
        if (++at == p.units || u + 1 == r.to) {
            float *to = part + (v + warp) * 128;
            to[n * 8 + 2 * t] = acc[0], to[n * 8 + 2 * t + 1] = acc[1];
            to[(n + 8) * 8 + 2 * t] = acc[2], to[(n + 8) * 8 + 2 * t + 1] = acc[3];
#pragma unroll
            for (int i = 0; i < 4; i++) acc[i] = 0;
            at = 0, v++;
        }
    }
    __syncthreads();
    finish<8>(p, r, part, 256.0f * act_factor(p)); // 2^(126 - 118)
}

#ifndef Q4_STAGES
#define Q4_STAGES 5
#endif
#define ONE(name, parts, apart, stages) \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) name(const __grid_constant__ Gemv p) { one_row<parts, apart, stages>(p); }
#define FEW(name, parts, stages) \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ Gemv p) { few_rows<parts, stages>(p); }
ONE(q4_gemv_one, 1, false, Q4_STAGES)
ONE(q4_gemv_one_int8, 1, true, Q4_STAGES)
ONE(q4_gemv_one_f16, 2, false, Q4_STAGES)
ONE(q4_gemv_one_f32, 3, false, Q4_STAGES)
FEW(q4_gemv_few, 1, 4)
FEW(q4_gemv_few_f16, 2, 4)
FEW(q4_gemv_few_f32, 3, 4)
