// How tensor cores see NF4: a byte of codes becomes two pairs of bf16 by one look-up of eight bytes in shared
// memory, the leading parts of both values and the trailing ones.
//
// Exactness: the codebook times UP is the sum of two bf16 within 2^-20.79 of it (of all UP in [1, 2), about
// the best), 9.2 units of 2^-24. Products with bf16 x have 16 bits and are exact in the tensor cores, whose
// sums end after 64 of k; what is left of the bound's K/16 + 32 units, at least 23 + K/16, is for additions.
// f16 x is two bf16, f32 x three, exactly.
#include "types.cuh"

#define DOWN 0.742811501f // 1 / UP, UP = 1.34623659
// UP times the codebook: leading parts in the low halves, trailing parts in the high ones.
__device__ const u32 PARTS_OF[16] = {0xbb23bfac, 0x3988bf70, 0x3926bf35, 0xb9d3bf08, 0xb8edbec4, 0x3990be7f, 0xb789bdfb, 0x00000000,
                                     0x39523ddb, 0xb91a3e5e, 0xba393eaa, 0xb92c3ee9, 0xb9ec3f18, 0xb9d03f42, 0x3a213f79, 0x3b233fac};
enum { TABLE_BYTES = 32768 }; // 256 entries of 8 bytes, sixteen copies: half a warp reads without conflicts

__device__ const float VALUES[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

__device__ __forceinline__ void write_half(u32 at, u32 half, u32 first, u32 second) {
#pragma unroll
    for (u32 i = 0; i < 4; i++)
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %1, %2};" ::"r"(at + half * 64 + (i + half / 2 & 3) * 16), "r"(first), "r"(second) : "memory");
}
// The table to shared memory: entry b has the low code of byte b, then its high code.
__device__ __forceinline__ void write_table(u32 at, u32 thread, u32 threads) {
    for (u32 half = thread; half < 512; half += threads) {
        u32 b = half / 2, low = PARTS_OF[b & 15], high = PARTS_OF[b >> 4];
        write_half(at, half, __byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
    }
}
// The same of the values themselves.
__device__ __forceinline__ void write_values(u32 at, u32 thread, u32 threads) {
    for (u32 half = thread; half < 512; half += threads)
        write_half(at, half, __float_as_uint(VALUES[half / 2 & 15]), __float_as_uint(VALUES[half / 32]));
}
