// Rows of activations quantised on the device, bit for bit as core/src/formats does.
#include "quantise.cuh"

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

// Rows to int8, a thread for 16 elements.
extern "C" __global__ void q4_int8(Matrix x, i8 *q, float *steps) {
    u32 block = blockIdx.x * 128 + threadIdx.x, row = blockIdx.y, groups = x.cols / 16;
    if (block >= groups) return;
    int own[16];
    float step = to_int8(Sixteen::of(x, row * x.ld + block * 16), own);
    for (u32 i = 0; i < 16; i++) q[(u64)row * x.cols + block * 16 + i] = (i8)own[i];
    steps[(u64)row * groups + block] = step;
}

// Rows to NVFP4 by one of the rules. Writes what a product needs (`q` doubled values, `steps` block scales)
// or what is stored (`codes`, `bytes`), whichever is not NULL. `global` is NULL or one float.
extern "C" __global__ void q4_nvfp4(Matrix x, u32 rule, u32 source, const float *global, i8 *q, float *steps, u8 *codes,
                                    u8 *bytes, u32 *bad) {
    u32 block = blockIdx.x * 128 + threadIdx.x, row = blockIdx.y, groups = x.cols / 16;
    if (block >= groups) return;
    Nvfp4 own = Nvfp4::of(Sixteen::of(x, row * x.ld + block * 16), rule, source, global);
    if (q)
        for (u32 i = 0; i < 16; i++) q[(u64)row * x.cols + block * 16 + i] = (i8)own.doubled(i);
    if (!own.fits && bad) atomicMin(bad, row);
    u64 at = (u64)row * groups + block;
    if (steps) steps[at] = own.scale;
    if (bytes) bytes[at] = own.byte;
    if (codes)
        for (u32 i = 0; i < 8; i++) codes[at * 8 + i] = (u8)(own.codes[i / 4] >> 8 * (i & 3));
}

// Rows to what FP8 keeps of them, in f32: a block of 128 threads for each `reach` columns, under one scale,
// which is `fixed` or, where that is 0, their amax / 448. NaN where an element is not finite.
extern "C" __global__ void q4_fp8(Matrix x, u32 reach, float fixed, float *out) {
    __shared__ u32 most[4];
    u32 first = blockIdx.x * reach, end = min(first + reach, x.cols), row = blockIdx.y, amax = 0;
    for (u32 c = first + threadIdx.x; c < end; c += 128)
        amax = max(amax, __float_as_uint(load(x, row * x.ld + c)) & 0x7fffffffu);
    for (int d = 16; d; d >>= 1) amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, d));
    if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = amax;
    __syncthreads();
    for (u32 i = 0; i < 4; i++) amax = max(amax, most[i]);
    bool fits = is_finite(__uint_as_float(amax));
    float scale = fixed != 0 ? fixed : __fdiv_rn(__uint_as_float(amax), 448.0f);
    for (u32 c = first + threadIdx.x; c < end; c += 128) {
        float v = load(x, row * x.ld + c), value = 0;
        if (scale != 0) {
            float code = e4m3_nearest(fminf(__fdiv_rn(fabsf(v), scale), 448.0f));
            value = __fmul_rn(v < 0 ? -code : code, scale);
        }
        out[(u64)row * x.cols + c] = fits ? value : __uint_as_float(0x7fc00000u);
    }
}

// Quantised rows as f32 values: fl(q * (step * factor * global)) with the factor applied first where it is
// exact.
extern "C" __global__ void q4_values(const i8 *q, const float *steps, const float *global, u32 convention, double factor,
                                     u32 rows, u32 cols, float *out) {
    u32 c = blockIdx.x * 256 + threadIdx.x, r = blockIdx.y;
    if (c >= cols || r >= rows) return;
    if (global) factor *= multiplier(convention, *global);
    double step = (double)steps[(u64)r * (cols / 16) + c / 16];
    out[(u64)r * cols + c] = (float)((double)q[(u64)r * cols + c] * step * factor);
}
