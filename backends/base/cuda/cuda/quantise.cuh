// What int8 and NVFP4 keep of sixteen elements of a row under one scale, bit for bit as core/src/formats does.
#include "codec.cuh"
#include "rows.cuh"

enum { TORCHAO = 1, MODELOPT = 2, COMPRESSED_TENSORS = 3, TRANSFORMER_ENGINE = 4, RUNTIME = 5 };

struct Sixteen {
    float v[16], amax;
    bool fits; // whether all are finite
    // From element `at` on.
    DEVICE Sixteen of(const Matrix &x, u64 at) {
        Sixteen e;
        const u16 *from = (const u16 *)x.data + at;
        if (x.dtype != F32 && ((u64)from & 15) == 0) {
            struct alignas(16) Eight { u32 w[4]; };
            Eight both[2] = {((const Eight *)from)[0], ((const Eight *)from)[1]};
#pragma unroll
            for (int i = 0; i < 16; i++) {
                u16 h = both[i / 8].w[i / 2 % 4] >> 16 * (i % 2);
                e.v[i] = x.dtype == F16 ? from_f16(h) : from_bf16(h);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 16; i++) e.v[i] = load(x, at + i);
        }
        e.amax = 0, e.fits = true;
#pragma unroll
        for (int i = 0; i < 16; i++) e.fits &= is_finite(e.v[i]), e.amax = fmaxf(e.amax, fabsf(e.v[i]));
        return e;
    }
};

// int8 under a step of amax / 127, which is NaN where an element is not finite.
DEVICE float to_int8(const Sixteen &x, int (&q)[16]) {
    float inverse = __fdiv_rn(127.0f, x.amax);
    bool empty = !is_finite(inverse);
#pragma unroll
    for (int i = 0; i < 16; i++) q[i] = x.fits && !empty ? __float2int_rn(__fmul_rn(x.v[i], inverse)) : 0;
    return !x.fits ? __uint_as_float(0x7fc00000u) : empty ? 0.0f : __fdiv_rn(x.amax, 127.0f);
}

DEVICE u32 e2m1_even(float y) { return e2m1_magnitude(fabsf(y)) | (__float_as_uint(y) >> 28 & 8); }
DEVICE u32 e2m1_away(float y) {
    float a = fabsf(y);
    u32 m = (a >= 0.25f) + (a >= 0.75f) + (a >= 1.25f) + (a >= 1.75f) + (a >= 2.5f) + (a >= 3.5f) + (a >= 5.0f);
    return m | (y < 0 ? 8u : 0u);
}

// NVFP4 by one of the rules; codes are zero, and the scale is NaN, where an element is not finite.
struct Nvfp4 {
    u32 codes[2];
    u8 byte;
    float scale; // what the byte says
    bool fits;
    DEVICE Nvfp4 of(const Sixteen &x, u32 rule, u32 source, const float *global) {
        Nvfp4 y;
        float g = global ? *global : 1.0f, amax = x.amax;
        y.fits = x.fits && is_finite(g);
        if (rule == TORCHAO) {
            y.byte = e4m3_of(fminf(fmaxf(__fdiv_rn(__fdiv_rn(amax, 6.0f), g), 0.015625f), 448.0f));
        } else if (rule == MODELOPT) {
            float t = __fdiv_rn(amax, __fmul_rn(6.0f, g));
            if (amax == 0 || t == 0) t = 1.0f;
            y.byte = e4m3_of(fminf(fmaxf(t, 0.001953125f), 448.0f));
        } else if (rule == COMPRESSED_TENSORS) {
            y.byte = e4m3_of(__fmul_rn(g, rounded_to(source, __fdiv_rn(amax, 6.0f))));
            if (y.byte == 0) y.byte = 0x20;
        } else if (rule == TRANSFORMER_ENGINE) {
            y.byte = e4m3_of(__fmul_rn(amax, __fmul_rn(g, 1.0f / 6.0f)));
        } else {
            y.byte = e4m3_of(fminf(fmaxf(__fdiv_rn(__fdiv_rn(amax, 6.0f), g), 1.52587890625e-05f), 448.0f));
        }
        float s = e4m3_value(y.byte), step = 1;
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
        y.codes[0] = y.codes[1] = 0;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float q = divides ? __fdiv_rn(x.v[i], step) : __fmul_rn(x.v[i], step);
            u32 code = rule == RUNTIME ? e2m1_away(q) : e2m1_even(q);
            y.codes[i / 8] |= (y.fits ? code : 0) << 4 * (i & 7);
        }
        y.scale = y.fits ? s : __uint_as_float(0x7fc00000u);
        return y;
    }
    // Twice the value of code i.
    __device__ __forceinline__ int doubled(int i) const { return doubled_e2m1(codes[i / 8] >> 4 * (i & 7) & 15); }
};
