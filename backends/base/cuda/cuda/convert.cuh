// Floats of 16 bits: as bits, and as types.
#include "types.cuh"

DEVICE float from_bf16(u32 h) { return __uint_as_float(h << 16); }
DEVICE u32 to_bf16(float f) {
    u16 h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
DEVICE float from_f16(u32 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)h));
    return f;
}
DEVICE u32 to_f16(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

struct bf16 { u16 bits; };
struct f16 { u16 bits; };
DEVICE float widen(float x) { return x; }
DEVICE float widen(bf16 x) { return from_bf16(x.bits); }
DEVICE float widen(f16 x) { return from_f16(x.bits); }

// from: the nearest value. pair: two of them in one word, `low` in the low half. mma: d += a b, 16 x 8 x 16.
template <class T> struct As;
template <> struct As<float> {
    DEVICE float from(float x) { return x; }
};
template <> struct As<bf16> {
    DEVICE bf16 from(float x) { return {(u16)to_bf16(x)}; }
    DEVICE u32 pair(float low, float high) {
        u32 y;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
        return y;
    }
    DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
};
template <> struct As<f16> {
    DEVICE f16 from(float x) { return {(u16)to_f16(x)}; }
    DEVICE u32 pair(float low, float high) {
        u32 y;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
        return y;
    }
    DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
};
