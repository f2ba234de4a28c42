// The layout of packed NF4 weights, for every kernel that reads them.
//
// Where an absmax covers whole tiles of 64 k: rows are padded to 16, k to 128. A unit is 16 rows by 128 k,
// 1152 bytes: two tiles of 64 k with 512 bytes of codes each, then 128 bytes of scales; the units of a row
// group lie side by side. In a tile lane l of a warp owns bytes 16 l to 16 l + 15: row l / 4, then row l / 4
// + 8; byte i of a row has k = 8 i + 2 (l % 4) in its low half and the k after it in the other, so that the
// codes of a lane are its part of operands of tensor cores. Scales (f32): for every row of the upper eight,
// its own and that of the row 8 below, in the first tile, then in the second. What is padding has scale 0.
// Elsewhere (`group` below 64): codes [n][k / 8] words, the first code in the lowest nibble; scales [n][k /
// group].
#include "types.cuh"

struct Weight {
    u64 codes, scales;    // units start at `codes`
    u32 n, k, group, units; // units of a row group, 0 where there are none
};

// The byte with the code of (row, k).
__device__ __forceinline__ const u8 *code_at(const Weight &w, u32 row, u32 k) {
    if (!w.units) return (const u8 *)w.codes + ((u64)row * w.k + k) / 2;
    u64 unit = (u64)(row >> 4) * w.units + (k >> 7);
    return (const u8 *)w.codes + unit * 1152 + (k >> 6 & 1) * 512 + ((row & 7) * 4 + (k >> 1 & 3)) * 16 + (row & 8) + (k >> 3 & 7);
}
// Bytes from that of k to that of k + 2, where k is a multiple of 8.
__device__ __forceinline__ u32 code_step(const Weight &w) { return w.units ? 16 : 1; }
// The scale of (row, k).
__device__ __forceinline__ float *scale_at(const Weight &w, u32 row, u32 k) {
    if (!w.units) return (float *)w.scales + (u64)row * (w.k / w.group) + k / w.group;
    u64 unit = (u64)(row >> 4) * w.units + (k >> 7);
    return (float *)(w.codes + unit * 1152 + 1024) + (row & 7) * 4 + (k >> 6 & 1) * 2 + (row >> 3 & 1);
}
