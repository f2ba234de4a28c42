// The layout of packed weights, for every kernel that reads them.
//
// In units, where every scale, or with HALVES every half, lies in one tile of 64 k: rows are padded to 16, k
// to 128. A unit is 16 rows by 128 k: two tiles of 64 k with 512 bytes of codes each, or 1024 where codes are
// bytes, then 128 bytes of scales; the units of a row group lie side by side. In a tile lane l of a warp owns
// bytes 16 l to 16 l + 15: row l / 4, then row l / 4 + 8; byte i of a row has k = 8 i + 2 (l % 4) in its low
// half and the k after it in the other, so that the codes of a lane are its part of operands of tensor cores.
// Codes that are bytes: the same of row l / 4, and 512 bytes behind it of row l / 4 + 8, where of four bytes
// the first and third have the k of what would be one byte, the second and fourth those of the next; and the
// four lanes of a row are turned (place_of), so that tensor cores can read the lines as they are. Words
// of scales: for every row of the upper eight, its own and that of the row 8 below, in the first tile, then
// in the second. What is padding has scale 0. Elsewhere: codes as they are stored, of two in a byte the first
// in the low half; scales f32 [n][k / group], then, with ZEROS, as many negatives of zero points, f32.
#include "levels.cuh"

struct Weight {
    u64 codes, scales;    // units start at `codes`
    u32 n, k, group, units; // units of a row group, 0 where there are none
};

// The byte with the code of (row, k).
__device__ __forceinline__ u8 *code_at(const Weight &w, u32 row, u32 k) {
    if (!w.units) return (u8 *)w.codes + ((u64)row * w.k + k) / (8 / CODE_BITS);
    u64 unit = (u64)(row >> 4) * w.units + (k >> 7);
    u8 *lane = (u8 *)w.codes + unit * UNIT + (k >> 6 & 1) * TILE_CODES + place_of((row & 7) * 4 + (k >> 1 & 3));
    u32 i = k >> 3 & 7;
    return CODE_BITS == 8 ? lane + (row & 8) * 64 + (i & 6) * 2 + (i & 1) + (k & 1) * 2 : lane + (row & 8) + i;
}
// The code there.
__device__ __forceinline__ u32 code_of(const u8 *at, u32 k) { return CODE_BITS == 8 ? *at : *at >> 4 * (k & 1) & 15; }
// Bytes from there to that of k + j, where k is a multiple of 8.
__device__ __forceinline__ int code_step(const Weight &w, u32 row, u32 j) {
    u32 turn = turn_of(row);
    if (CODE_BITS == 8) return w.units ? 16 * (int)((j / 2 ^ turn) - turn) + 2 * (j & 1) : j;
    return w.units ? 16 * (j / 2) : j / 2;
}
// The word with the scale of (row, k).
__device__ __forceinline__ u32 *scale_at(const Weight &w, u32 row, u32 k) {
    if (!w.units) return (u32 *)w.scales + (u64)row * (w.k / w.group) + k / w.group;
    u64 unit = (u64)(row >> 4) * w.units + (k >> 7);
    return (u32 *)(w.codes + unit * UNIT + SCALES_AT) + (row & 7) * 4 + (k >> 6 & 1) * 2 + (row >> 3 & 1);
}
// From there to that of its zero point, without units.
__device__ __forceinline__ u64 zeros_from(const Weight &w) { return (u64)w.n * (w.k / w.group); }

// What (row, k) and its neighbours under the same scale are multiplied by, and what is added to their levels.
struct Step {
    float scale, zero;
};
__device__ __forceinline__ Step step_of(const Weight &w, u32 row, u32 k) {
    const u32 *at = scale_at(w, row, k);
    if (SCALES == WHOLE) return {__uint_as_float(*at), 0};
    if (w.units) return {scale_in(*at, k >> 5 & 1), ZEROS ? __uint_as_float(*at & 0xffff0000u) : 0};
    return {__uint_as_float(*at), ZEROS ? __uint_as_float(at[zeros_from(w)]) : 0};
}
