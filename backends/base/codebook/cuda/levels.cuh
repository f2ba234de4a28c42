// What codes and scales of packed weights are: what the kernels are compiled for, `Coding` of cuda.rs.
//
// LEVELS: those of NF4; whole numbers, -8 to 7, or 0 to 15 where there are zero points; E2M1; or E4M3, whose
// codes are bytes (CODE_BITS of unit.cuh). All but NF4's are exact in bf16. NF4's times UP are the sums of
// two bf16 within 2^-20.79 (of all UP in [1, 2), about the best), 9.2 units of 2^-24. Products with bf16 x
// have 16 bits and are exact in the tensor cores, whose sums end after 64 of k; what is left of the bound's
// K/16 + 32 units, at least 23 + K/16, is for additions. f16 x is two bf16, f32 x three, exactly.
//
// SCALES, of a row in a tile of 64 k, 32 bits in all: WHOLE, an f32; HALVES, two of 16 bits for 32 k each;
// ZEROS, one of 16 bits and, above it, the negative of a zero point in bf16, which is taken off the level.
#include "codec.cuh"
#include "convert.cuh"
#include "unit.cuh"

#define NF4 0
#define INT4 1
#define E2M1 2
#define E4M3 3
#define WHOLE 0
#define HALVES_F16 1
#define HALVES_BF16 2
#define ZEROS_F16 3
#define ZEROS_BF16 4
#ifndef LEVELS
#define LEVELS NF4
#define SCALES WHOLE
#endif
#define HALVES (SCALES == HALVES_F16 || SCALES == HALVES_BF16)
#define ZEROS (SCALES == ZEROS_F16 || SCALES == ZEROS_BF16)
#if (LEVELS == E4M3) != (CODE_BITS == 8)
#error "need as many bits as codes have"
#endif
// In the tensor cores a level is a sum of so many bf16.
#define LEVEL_PARTS (LEVELS == NF4 ? 2 : 1)

#if LEVELS == NF4
__device__ const float VALUES[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
#define DOWN 0.742811501f // 1 / UP, UP = 1.34623659
// UP times the codebook: leading parts in the low halves, trailing parts in the high ones.
__device__ const u32 PARTS_OF[16] = {0xbb23bfac, 0x3988bf70, 0x3926bf35, 0xb9d3bf08, 0xb8edbec4, 0x3990be7f, 0xb789bdfb, 0x00000000,
                                     0x39523ddb, 0xb91a3e5e, 0xba393eaa, 0xb92c3ee9, 0xb9ec3f18, 0xb9d03f42, 0x3a213f79, 0x3b233fac};
#else
#define DOWN 1.0f
// Of a level that bf16 holds.
DEVICE float value_of(u32 code) {
#if LEVELS == E4M3
    return e4m3_value(code & 0x7f) * (code & 0x80 ? -1.0f : 1.0f);
#elif LEVELS == INT4
    return (float)((int)code - (ZEROS ? 0 : 8));
#else
    u32 low = __byte_perm(0xc0800000, 0xc0804000, code & 7), high = __byte_perm(0x3f3f3f00, 0x40404040, code & 7);
    return __uint_as_float((code & 8) << 28 | (high & 0xff) << 24 | (low & 0xff) << 16);
#endif
}
#endif

// The scale of a tile's word, of its second half where it has two.
DEVICE float scale_in(u32 word, bool second) {
    if (SCALES == WHOLE) return __uint_as_float(word);
    u32 half = HALVES && second ? word >> 16 : word & 0xffff;
    return SCALES == HALVES_F16 || SCALES == ZEROS_F16 ? from_f16(half) : from_bf16(half);
}
// bf16 pairs less a zero point, of which the upper half of a tile's word is the negative.
DEVICE u32 less_zero(u32 pair, u32 word) {
    u32 y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(pair), "r"(0x3f803f80), "r"(__byte_perm(word, 0, 0x3232)));
    return y;
}

#if LEVELS == E4M3
// Four bytes of codes, the first two in the even places, to two pairs of bf16. Bits of E4M3 in their places
// are 2^-120 of its value, also where it is subnormal.
DEVICE u32 risen(u32 bits) {
    u32 y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(bits), "r"(0x7b807b80), "r"(0x80008000));
    return y;
}
DEVICE void pairs_of(u32 w, u32 &first, u32 &second) {
    first = risen(w << 8 & 0x80008000 | w << 4 & 0x07f007f0);
    second = risen(w & 0x80008000 | w >> 4 & 0x07f007f0);
}
enum { TABLE_BYTES = 0 };
DEVICE u32 copy_of(u32) { return 0; }
DEVICE void write_table(u32, u32, u32) {}
#else
// A table in shared memory, by a byte of codes: an entry every 128 bytes, of eight bytes sixteen times, or of
// four 32 times, so that lanes read without conflicts.
enum { TABLE_BYTES = 32768, COPY = LEVEL_PARTS * 4 };
DEVICE u32 copy_of(u32 lane) { return lane % (32 / LEVEL_PARTS) * COPY; } // where a lane's copy begins in an entry

DEVICE void write_half(u32 at, u32 half, u32 first, u32 second) {
#pragma unroll
    for (u32 i = 0; i < 4; i++)
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %1, %2};" ::"r"(at + half * 64 + (i + half / 2 & 3) * 16), "r"(first), "r"(second) : "memory");
}
// Pairs of the low code of a byte, then of its high code; of NF4 the leading parts, then the trailing ones.
DEVICE void write_table(u32 at, u32 thread, u32 threads) {
    for (u32 half = thread; half < 512; half += threads) {
        u32 b = half / 2;
#if LEVELS == NF4
        u32 low = PARTS_OF[b & 15], high = PARTS_OF[b >> 4];
        write_half(at, half, __byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
#else
        u32 pair = __byte_perm(__float_as_uint(value_of(b & 15)), __float_as_uint(value_of(b >> 4)), 0x7632);
        write_half(at, half, pair, pair);
#endif
    }
}
#endif
#if LEVELS == NF4
// The same of the values themselves.
DEVICE void write_values(u32 at, u32 thread, u32 threads) {
    for (u32 half = thread; half < 512; half += threads)
        write_half(at, half, __float_as_uint(VALUES[half / 2 & 15]), __float_as_uint(VALUES[half / 32]));
}
#endif
