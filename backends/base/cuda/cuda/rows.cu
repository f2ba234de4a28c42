// Rows of activations on the device: loading and storing every float type, and the quantisers, bit for bit those of
// core/src/formats. Header-free; shared by every backend's kernels.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;

enum { F32 = 1, F16 = 2, BF16 = 3 };
enum { MULTIPLY = 1, DIVIDE = 2 };
enum { TORCHAO = 1, MODELOPT = 2, COMPRESSED_TENSORS = 3, TRANSFORMER_ENGINE = 4, RUNTIME = 5 };

struct Matrix {
    u64 data, ld;
    u32 rows, cols, dtype, unused;
};

__device__ __forceinline__ float from_f16(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
__device__ __forceinline__ u16 to_f16(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
__device__ __forceinline__ float from_bf16(u16 h) { return __uint_as_float((u32)h << 16); }
__device__ __forceinline__ u16 to_bf16(float f) {
    u16 h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
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
__device__ __forceinline__ float warp_sum(float v) {
    for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(0xffffffffu, v, d);
    return v;
}
__device__ __forceinline__ int doubled_e2m1(u32 code) {
    int v = (int)(0xC8643210u >> 4 * (code & 7) & 15);
    return code & 8 ? -v : v;
}
__device__ __forceinline__ float e4m3_value(u8 byte) {
    u32 e = byte >> 3 & 15, m = byte & 7;
    return e ? __uint_as_float((e + 120) << 23 | m << 20) : (float)m * 0.001953125f;
}
__device__ __forceinline__ u8 e4m3_of(float x) { // x >= 0 and not NaN
    if (x < 0.015625f) return (u8)__float2int_rn(__fmul_rn(x, 512.0f));
    u32 bits = __float_as_uint(x), rounded = (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;
    u32 byte = rounded - (120 << 3);
    return (u8)(byte < 0x7e ? byte : 0x7e);
}

// The largest magnitude of x as bits of a float; NaN is larger than everything. `out` starts at 0.
extern "C" __global__ void q4_amax(Matrix x, u32 *out) {
    u32 best = 0;
    for (u32 c = threadIdx.x; c < x.cols; c += 256) {
        u32 bits = __float_as_uint(load(x, blockIdx.x * x.ld + c)) & 0x7fffffffu;
        best = max(best, bits);
    }
    for (int d = 16; d; d >>= 1) best = max(best, __shfl_xor_sync(0xffffffffu, best, d));
    if (threadIdx.x % 32 == 0) atomicMax(out, best);
}

// The per-tensor scale for that magnitude, in place; NaN where there is none.
extern "C" __global__ void q4_global(u32 *amax, u32 rule, u32 source) {
    float a = __uint_as_float(*amax), g;
    if (rule == COMPRESSED_TENSORS) {
        float tiny = source == F16 ? 6.103515625e-05f : 1.17549435e-38f;
        float inverse = rounded_to(source, __fdiv_rn(1.0f, fmaxf(a, tiny)));
        g = rounded_to(source, __fmul_rn(inverse, 2688.0f));
        if (!is_finite(g)) g = 1.0f;
    } else if (rule == TRANSFORMER_ENGINE) {
        g = a == 0 ? 1.0f : fminf(__fdiv_rn(2688.0f, a), 3.402823466e38f);
    } else {
        g = __fdiv_rn(a, 2688.0f);
        if (g == 0) g = 1.0f;
    }
    *amax = is_finite(a) ? __float_as_uint(g) : 0x7fc00000u;
}

// Rows to int8: per 16, step = amax / 127. A thread per block.
extern "C" __global__ void q4_int8(Matrix x, i8 *q, float *steps) {
    u32 block = blockIdx.x * 128 + threadIdx.x, row = blockIdx.y, groups = x.cols / 16;
    if (block >= groups) return;
    float v[16], amax = 0;
    bool fits = true;
    for (u32 i = 0; i < 16; i++) {
        v[i] = load(x, row * x.ld + block * 16 + i);
        fits &= is_finite(v[i]);
        amax = fmaxf(amax, fabsf(v[i]));
    }
    float inverse = __fdiv_rn(127.0f, amax);
    bool empty = !is_finite(inverse);
    for (u32 i = 0; i < 16; i++)
        q[(u64)row * x.cols + block * 16 + i] = fits && !empty ? (i8)__float2int_rn(__fmul_rn(v[i], inverse)) : (i8)0;
    steps[(u64)row * groups + block] = !fits ? __uint_as_float(0x7fc00000u) : empty ? 0.0f : __fdiv_rn(amax, 127.0f);
}

__device__ __forceinline__ u32 e2m1_even(float y) {
    float a = fabsf(y);
    u32 m = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
    return m | (__float_as_uint(y) >> 28 & 8);
}
__device__ __forceinline__ u32 e2m1_away(float y) {
    float a = fabsf(y);
    u32 m = (a >= 0.25f) + (a >= 0.75f) + (a >= 1.25f) + (a >= 1.75f) + (a >= 2.5f) + (a >= 3.5f) + (a >= 5.0f);
    return m | (y < 0 ? 8u : 0u);
}

// Rows to NVFP4 by one of the rules. Writes what a product needs (`q` doubled values, `steps` block scales) or what is
// stored (`codes`, `bytes`), whichever is not NULL. `global` is NULL or one float.
extern "C" __global__ void q4_nvfp4(Matrix x, u32 rule, u32 source, const float *global, i8 *q, float *steps, u8 *codes,
                                    u8 *bytes, u32 *bad) {
    u32 block = blockIdx.x * 128 + threadIdx.x, row = blockIdx.y, groups = x.cols / 16;
    if (block >= groups) return;
    float v[16], amax = 0;
    bool fits = true;
    for (u32 i = 0; i < 16; i++) {
        v[i] = load(x, row * x.ld + block * 16 + i);
        fits &= is_finite(v[i]);
        amax = fmaxf(amax, fabsf(v[i]));
    }
    float g = global ? *global : 1.0f;
    fits &= is_finite(g);
    u8 byte;
    if (rule == TORCHAO) {
        byte = e4m3_of(fminf(fmaxf(__fdiv_rn(__fdiv_rn(amax, 6.0f), g), 0.015625f), 448.0f));
    } else if (rule == MODELOPT) {
        float t = __fdiv_rn(amax, __fmul_rn(6.0f, g));
        if (amax == 0 || t == 0) t = 1.0f;
        byte = e4m3_of(fminf(fmaxf(t, 0.001953125f), 448.0f));
    } else if (rule == COMPRESSED_TENSORS) {
        byte = e4m3_of(__fmul_rn(g, rounded_to(source, __fdiv_rn(amax, 6.0f))));
        if (byte == 0) byte = 0x20;
    } else if (rule == TRANSFORMER_ENGINE) {
        byte = e4m3_of(__fmul_rn(amax, __fmul_rn(g, 1.0f / 6.0f)));
    } else {
        byte = e4m3_of(fminf(fmaxf(__fdiv_rn(__fdiv_rn(amax, 6.0f), g), 1.52587890625e-05f), 448.0f));
    }
    float s = e4m3_value(byte), step = 1;
    bool divides = false;
    if (rule == TORCHAO) {
        step = global ? __fdiv_rn(__fdiv_rn(1.0f, g), s) : __fdiv_rn(1.0f, s);
    } else if (rule == MODELOPT || rule == COMPRESSED_TENSORS) {
        divides = true;
        step = !global ? s : rule == MODELOPT ? __fmul_rn(s, g) : __fdiv_rn(s, g);
    } else if (rule == TRANSFORMER_ENGINE) {
        step = fminf(__fdiv_rn(1.0f, __fmul_rn(s, __fdiv_rn(1.0f, g))), 3.402823466e38f);
    } else {
        divides = true;
        step = __fmul_rn(__fadd_rn(s, 1e-12f), g);
    }
    u32 packed[2] = {0, 0};
    for (u32 i = 0; i < 16; i++) {
        float y = divides ? __fdiv_rn(v[i], step) : __fmul_rn(v[i], step);
        u32 code = rule == RUNTIME ? e2m1_away(y) : e2m1_even(y);
        if (!fits) code = 0;
        packed[i / 8] |= code << 4 * (i & 7);
        if (q) q[(u64)row * x.cols + block * 16 + i] = (i8)doubled_e2m1(code);
    }
    if (!fits && bad) atomicMin(bad, row);
    u64 at = (u64)row * groups + block;
    if (steps) steps[at] = fits ? s : __uint_as_float(0x7fc00000u);
    if (bytes) bytes[at] = byte;
    if (codes)
        for (u32 i = 0; i < 8; i++) codes[at * 8 + i] = (u8)(packed[i / 4] >> 8 * (i & 3));
}


// Quantised rows as f32 values: fl(q * (step * factor * global)) with the factor applied first where it is exact.
extern "C" __global__ void q4_values(const i8 *q, const float *steps, const float *global, u32 convention, double factor,
                                     u32 rows, u32 cols, float *out) {
    u32 c = blockIdx.x * 256 + threadIdx.x, r = blockIdx.y;
    if (c >= cols || r >= rows) return;
    if (global) factor *= multiplier(convention, *global);
    double step = (double)steps[(u64)r * (cols / 16) + c / 16];
    out[(u64)r * cols + c] = (float)((double)q[(u64)r * cols + c] * step * factor);
}
