// Plain kernels for every shape, type and activation format: what the fast ones do not take, and preparation. One warp sums
// an output over blocks of 16, so that neither the number of rows nor their addresses can change a bit.

enum { F32 = 1, F16 = 2, BF16 = 3 };
enum { MULTIPLY = 1, DIVIDE = 2 };
enum { TORCHAO = 1, MODELOPT = 2, COMPRESSED_TENSORS = 3, TRANSFORMER_ENGINE = 4, RUNTIME = 5 };

// Row segments: where the rows of each lie, and its per-tensor scale.
struct Span {
    u32 end;   // first row behind it
    u32 skip;  // padding rows before it
    u32 convention;
    float global;
};
struct Weight {
    const u8 *codes, *scales;
    const Span *spans;
    u32 n, k, slabs, unused;
};
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

__device__ __forceinline__ Span span_of(const Weight &w, u32 row) {
    u32 i = 0;
    while (row >= w.spans[i].end) i++;
    return w.spans[i];
}
__device__ __forceinline__ double multiplier(u32 convention, float g) {
    return convention == MULTIPLY ? (double)g : convention == DIVIDE ? 1.0 / (double)g : 1.0;
}
__device__ __forceinline__ float effective(const Span &s, float scale) {
    return s.convention == MULTIPLY ? __fmul_rn(scale, s.global)
         : s.convention == DIVIDE   ? __fdiv_rn(scale, s.global)
                                    : scale;
}
// An element of the decoded matrix, by the definition of the format.
__device__ __forceinline__ float decoded(u32 code, u8 scale, float step) {
    float v = scale == 0x08 ? 0.0f : __fmul_rn(0.5f * (float)q4_doubled(code & 7), step);
    return __uint_as_float(__float_as_uint(v) | (code & 8) << 28);
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

// Raw codes and scales of one segment to the packed layout, padding included. A thread per block of 16; `bad` gets the
// first block whose scale is NaN or negative, counted over the segment.
extern "C" __global__ void q4_pack(const u8 *codes, const u8 *scales, u32 is_tiled, u32 rows, u32 groups, u32 first,
                                   u32 slabs, u8 *out_codes, u8 *out_scales, u64 *bad) {
    u32 block = blockIdx.x * 32 + threadIdx.x, row = blockIdx.y * 8 + threadIdx.y;
    if (block >= slabs * 4) return;
    u32 lo = 0, hi = 0;
    u8 scale = 0;
    if (row < rows && block < groups) {
        const u16 *c = (const u16 *)(codes + ((u64)row * groups + block) * 8);
        lo = c[0] | (u32)c[1] << 16;
        hi = c[2] | (u32)c[3] << 16;
        u64 at = (u64)row * groups + block;
        if (is_tiled) {
            u64 tile = (u64)(row >> 7) * ((groups + 3) / 4) + (block >> 2);
            at = tile * 512 + (row & 31) * 16 + ((row >> 5) & 3) * 4 + (block & 3);
        }
        scale = scales[at];
        if (scale >= 0x7f) atomicMin(bad, (u64)row * groups + block);
    }
    u32 keep = scale ? 0xffffffffu : 0x88888888u; // a zero scale keeps the signs of its zeros
    u64 to = q4_codes_at(first + row, block, slabs);
    *(u32 *)(out_codes + to) = q4_word_of(lo & keep);
    *(u32 *)(out_codes + to + 4) = q4_word_of(hi & keep);
    out_scales[q4_scale_at(first + row, block, slabs)] = q4_scale_of_e4m3(scale);
}

// The whole decoded matrix: a thread per element.
extern "C" __global__ void q4_dequantize(Weight w, Matrix out) {
    u32 k = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y + blockIdx.z * 32768;
    if (k >= w.k || row >= w.n) return;
    Span s = span_of(w, row);
    u32 at = row + s.skip, block = k / 16;
    u32 word = *(const u32 *)(w.codes + q4_codes_at(at, block, w.slabs) + (k / 8 & 1) * 4);
    u8 scale = w.scales[q4_scale_at(at, block, w.slabs)];
    store(out, row * out.ld + k, decoded(q4_code(word, k & 7), scale, effective(s, q4_scale(scale))));
}

// dx = dy W with the decoded weight: 32 columns a block, 16 partial sums over n each, added in order.
extern "C" __global__ void q4_backward(Weight w, Matrix dy, Matrix dx) {
    __shared__ float sums[16][33];
    u32 k = blockIdx.x * 32 + threadIdx.x, m = blockIdx.y, block = k / 16;
    float sum = 0;
    if (k < w.k) {
        for (u32 row = threadIdx.y; row < w.n; row += 16) {
            Span s = span_of(w, row);
            u32 at = row + s.skip;
            u32 word = *(const u32 *)(w.codes + q4_codes_at(at, block, w.slabs) + (k / 8 & 1) * 4);
            u8 scale = w.scales[q4_scale_at(at, block, w.slabs)];
            sum = fmaf(load(dy, m * dy.ld + row), decoded(q4_code(word, k & 7), scale, effective(s, q4_scale(scale))), sum);
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && k < w.k) {
        for (u32 i = 1; i < 16; i++) sum += sums[i][threadIdx.x];
        store(dx, m * dx.ld + k, sum);
    }
}

__device__ __forceinline__ float warp_sum(float v) {
    for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(0xffffffffu, v, d);
    return v;
}

// y = x W^T with x as it is: a warp per column of y and four of its rows.
extern "C" __global__ void q4_forward_float(Weight w, Matrix x, Matrix y) {
    u32 row = blockIdx.x * 8 + threadIdx.y, lane = threadIdx.x, m = blockIdx.y * 4;
    if (row >= w.n) return;
    Span s = span_of(w, row);
    u32 at = row + s.skip, count = min(4, y.rows - m);
    float sum[4] = {0, 0, 0, 0};
    for (u32 block = lane; block < w.k / 16; block += 32) {
        u64 from = q4_codes_at(at, block, w.slabs);
        float scale = q4_scale(w.scales[q4_scale_at(at, block, w.slabs)]) * 0.5f;
        for (u32 half = 0; half < 2; half++) {
            u32 word = *(const u32 *)(w.codes + from + 4 * half);
            for (u32 i = 0; i < 8; i++) {
                u32 code = q4_code(word, i);
                float v = (float)q4_doubled(code) * scale;
                if (code == 8) v = -0.0f;
                for (u32 r = 0; r < 4; r++)
                    if (r < count) sum[r] = fmaf(load(x, (m + r) * x.ld + block * 16 + half * 8 + i), v, sum[r]);
            }
        }
    }
    double factor = multiplier(s.convention, s.global);
    for (u32 r = 0; r < count; r++) {
        float total = warp_sum(sum[r]);
        if (lane == 0) store(y, (m + r) * y.ld + row, (float)((double)total * factor));
    }
}

// y = q W^T with quantised rows: `q` [m][k] integers, `steps` [m][k / 16], NaN where a row cannot be quantised.
// `act_global` is NULL or the per-tensor scale of the rows.
extern "C" __global__ void q4_forward_int(Weight w, const i8 *q, const float *steps, const float *act_global,
                                          u32 act_convention, double factor, Matrix y) {
    u32 row = blockIdx.x * 8 + threadIdx.y, lane = threadIdx.x, m = blockIdx.y * 4;
    if (row >= w.n) return;
    Span s = span_of(w, row);
    u32 at = row + s.skip, count = min(4, y.rows - m), groups = w.k / 16;
    float sum[4] = {0, 0, 0, 0};
    for (u32 block = lane; block < groups; block += 32) {
        u64 from = q4_codes_at(at, block, w.slabs);
        float scale = q4_scale(w.scales[q4_scale_at(at, block, w.slabs)]);
        u32 words[2] = {*(const u32 *)(w.codes + from), *(const u32 *)(w.codes + from + 4)};
        for (u32 r = 0; r < count; r++) {
            const i8 *x = q + (u64)(m + r) * w.k + block * 16;
            int dot = 0;
            for (u32 i = 0; i < 16; i++) dot += q4_doubled(q4_code(words[i / 8], i & 7)) * x[i];
            sum[r] = fmaf((float)dot * scale, steps[(u64)(m + r) * groups + block], sum[r]);
        }
    }
    factor *= multiplier(s.convention, s.global);
    if (act_global) factor *= multiplier(act_convention, *act_global);
    for (u32 r = 0; r < count; r++) {
        float total = warp_sum(sum[r]);
        if (lane == 0) store(y, (m + r) * y.ld + row, (float)((double)total * factor));
    }
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
        if (q) q[(u64)row * x.cols + block * 16 + i] = (i8)q4_doubled(code);
    }
    if (!fits && bad) atomicMin(bad, row);
    u64 at = (u64)row * groups + block;
    if (steps) steps[at] = fits ? s : __uint_as_float(0x7fc00000u);
    if (bytes) bytes[at] = byte;
    if (codes)
        for (u32 i = 0; i < 8; i++) codes[at * 8 + i] = (u8)(packed[i / 4] >> 8 * (i & 3));
}

// Stored NVFP4 rows to what a product needs.
extern "C" __global__ void q4_expand(const u8 *codes, const u8 *scales, u32 is_tiled, u32 groups, i8 *q, float *steps,
                                     u64 *bad) {
    u32 block = blockIdx.x * 128 + threadIdx.x, row = blockIdx.y;
    if (block >= groups) return;
    u64 at = (u64)row * groups + block, from = at;
    if (is_tiled) {
        u64 tile = (u64)(row >> 7) * ((groups + 3) / 4) + (block >> 2);
        from = tile * 512 + (row & 31) * 16 + ((row >> 5) & 3) * 4 + (block & 3);
    }
    u8 scale = scales[from];
    if (scale >= 0x7f) atomicMin(bad, at);
    steps[at] = e4m3_value(scale);
    for (u32 i = 0; i < 8; i++) {
        u8 c = codes[at * 8 + i];
        q[at * 16 + 2 * i] = (i8)q4_doubled(c & 15);
        q[at * 16 + 2 * i + 1] = (i8)q4_doubled(c >> 4);
    }
}
