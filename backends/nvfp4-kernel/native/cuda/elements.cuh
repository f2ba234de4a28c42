// Element types of x and of decoded weights, for the product of many rows.
#include "convert.cuh"

template <class T> struct Codes;
template <> struct Codes<bf16> {
    static constexpr float UNDO = 256.f; // pair * scale is the weight times 2^-8
    // A pair times one half of b.
    DEVICE u32 times_low(u32 a, u32 b) {
        u32 y;
        asm volatile("{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {l, l}; mul.rn.bf16x2 %0, %1, s;}" : "=r"(y) : "r"(a), "r"(b));
        return y;
    }
    DEVICE u32 times_high(u32 a, u32 b) {
        u32 y;
        asm volatile("{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {h, h}; mul.rn.bf16x2 %0, %1, s;}" : "=r"(y) : "r"(a), "r"(b));
        return y;
    }
    // The four pairs of a word times 2^-126.
    DEVICE void pairs(u32 w, u32 (&p)[4]) {
        constexpr u32 M = 0x81C081C0;
        p[0] = w & M;
        p[1] = w << 3 & M;
        p[2] = (w & 0x20072007) * 68 & M;
        p[3] = (w >> 3 & 0x01C001C0) | (w << 1 & 0x80008000);
    }
    // Scale bytes by a selector of byte_perm, times 2^118.
    DEVICE u32 expand(u32 word, u32 selector) { return __byte_perm(word, 0, selector) * 16 + 0x73007300; }
    // A pair alone: the magnitudes of pair t are in place after a rotation to the left by byte t.
    static constexpr u32 ROTATE = 0x1D060300, MAGNITUDE = 0x01C001C0;
};
template <> struct Codes<f16> {
    static constexpr float UNDO = 128.f;
    // A pair times one half of b.
    DEVICE u32 times_low(u32 a, u32 b) {
        u32 y;
        asm volatile("{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {l, l}; mul.rn.f16x2 %0, %1, s;}" : "=r"(y) : "r"(a), "r"(b));
        return y;
    }
    DEVICE u32 times_high(u32 a, u32 b) {
        u32 y;
        asm volatile("{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {h, h}; mul.rn.f16x2 %0, %1, s;}" : "=r"(y) : "r"(a), "r"(b));
        return y;
    }
    // Values times 2^-14.
    DEVICE void pairs(u32 w, u32 (&p)[4]) {
        constexpr u32 S = 0x80008000, M = 0x0E000E00;
        p[0] = (w << 3 & M) | (w & S);
        p[1] = (w << 6 & M) | (w << 3 & S);
        p[2] = (w & 0x20072007) * 516 & 0x8E008E00;
        p[3] = (w & M) | (w << 1 & S);
    }
    // Times 2^7.
    DEVICE u32 expand(u32 word, u32 selector) { return __byte_perm(word, 0, selector) * 128 + 0x1C001C00; }
    static constexpr u32 ROTATE = 0x00090603, MAGNITUDE = 0x0E000E00;
};
