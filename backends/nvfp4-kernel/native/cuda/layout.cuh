// The layout of packed NVFP4 weights, for every kernel that reads them.
//
// Rows are padded to 16 (each segment starts at a multiple of 16), k to 128. A unit is 16 rows by 128 k, 1152
// bytes: two tiles of 64 k with 512 bytes of codes each, then 128 bytes of scales; the units of a row group
// lie side by side. In a tile bytes 16 l to 16 l + 15 are four words of the rows l / 4 and l / 4 + 8, k from
// 16 (l % 4) on, a scale block of each. Word i has k = 2 i, 2 i + 1 of both rows, then k = 2 i + 8, 2 i + 9:
// what lane 4 (l / 4) + i of a warp has of an m x 16 operand of tensor cores, and in pairs of words lane l
// itself. Four bytes of scales belong to l: the two rows in the first tile, then in the second.
#include "types.cuh"

// First byte of the words of a block (16 of k) of a padded row; `slabs` is the padded k / 64, even.
__device__ __forceinline__ u64 q4_codes_at(u32 row, u32 block, u32 slabs) {
    u64 unit = (u64)(row >> 4) * (slabs >> 1) + (block >> 3);
    return unit * 1152 + (block >> 2 & 1) * 512 + ((row & 7) * 4 + (block & 3)) * 16;
}
// Of k in a block: its word, and the place of its code there.
__device__ __forceinline__ u32 q4_word(u32 k) { return k >> 1 & 3; }
__device__ __forceinline__ u32 q4_place(u32 row, u32 k) { return (k >> 1 & 4) + (row >> 2 & 2) + (k & 1); }

// Byte of the scale of that block, from the same base.
__device__ __forceinline__ u64 q4_scale_at(u32 row, u32 block, u32 slabs) {
    u64 unit = (u64)(row >> 4) * (slabs >> 1) + (block >> 3);
    return unit * 1152 + 1024 + ((row & 7) * 4 + (block & 3)) * 4 + (block >> 2 & 1) * 2 + (row >> 3 & 1);
}

// Scales are kept without subnormals: the top of an f16 whose exponent is never zero. An E4M3 zero is kept as
// the smallest scale with zero codes, so that products with it are zeros of the right sign.
__device__ __forceinline__ u8 q4_scale_of_e4m3(u8 byte) {
    u32 e = byte >> 3 & 15, m = byte & 7;
    if (e) return (u8)((e + 8) << 3 | m);
    if (!m) return 0x08;
    u32 up = __clz(m) - 28; // 1, 2 or 3 places to the implicit one
    return (u8)((9 - up) << 3 | (m << up & 7));
}

__device__ __forceinline__ float q4_scale(u8 byte) {
    return __uint_as_float(((u32)byte << 20) + 0x38000000u);
}

// Bits of a code in a word of eight: place 2 p + z has its magnitude and its sign in half z, so that one or
// two shifts and a mask bring pair p to bits 6 to 8 and 15 (bf16, value * 2^-126) or 9 to 11 and 15 (f16,
// value * 2^-14).
__device__ __forceinline__ u32 q4_magnitude_at(u32 place) { return (0x9036u >> 4 * (place >> 1) & 15) + 16 * (place & 1); }
__device__ __forceinline__ u32 q4_sign_at(u32 place) { return (0xEDCFu >> 4 * (place >> 1) & 15) + 16 * (place & 1); }

// Eight codes, that of place 0 in the lowest bits, to a word, and back.
__device__ __forceinline__ u32 q4_word_of(u32 codes) {
    u32 w = 0;
    for (u32 i = 0; i < 8; i++) w |= (codes >> 4 * i & 7) << q4_magnitude_at(i) | (codes >> 4 * i + 3 & 1) << q4_sign_at(i);
    return w;
}
__device__ __forceinline__ u32 q4_code(u32 word, u32 place) {
    return (word >> q4_magnitude_at(place) & 7) | (word >> q4_sign_at(place) & 1) << 3;
}
