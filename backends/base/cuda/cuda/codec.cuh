// E4M3 and E2M1, bit for bit those of core/src/formats.
#include "types.cuh"

template <class T> DEVICE float e4m3_value(T byte) { // without its sign
    u32 e = byte >> 3 & 15, m = byte & 7;
    return e ? __uint_as_float((e + 120) << 23 | m << 20) : (float)m * 0.001953125f;
}
DEVICE u32 e4m3_of(float x) { // x >= 0 and not NaN
    if (x < 0.015625f) return __float2int_rn(__fmul_rn(x, 512.0f));
    u32 bits = __float_as_uint(x), byte = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    return byte < 0x7e ? byte : 0x7e;
}
// The value of that code, for x of at most 448.
DEVICE float e4m3_nearest(float x) {
    u32 bits = __float_as_uint(x);
    float normal = __uint_as_float((bits + 0x7ffff + (bits >> 20 & 1)) & 0xfff00000u);
    return x < 0.015625f ? __fadd_rn(__fadd_rn(x, 24576.0f), -24576.0f) : normal; // whole 2^-9
}
// Twice the value of an E2M1 code: 0 1 2 3 4 6 8 12.
DEVICE int doubled_e2m1(u32 code) {
    int v = (int)(0xC8643210u >> 4 * (code & 7) & 15);
    return code & 8 ? -v : v;
}
// The code of a magnitude, ties to even.
DEVICE u32 e2m1_magnitude(float a) {
    return (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
}
