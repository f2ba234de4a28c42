// Packed weights as kernels of few rows and of many read them.
#include "types.cuh"
#ifndef CODE_BITS
#define CODE_BITS 4
#endif
// Words of codes that are eight of them.
#define OF_EIGHT (CODE_BITS / 4)

// Bytes of 16 rows by 64 k of codes, and of a unit, 16 rows by 128 k: two of those, then scales.
constexpr int TILE_CODES = 128 * CODE_BITS, SCALES_AT = 2 * TILE_CODES, UNIT = SCALES_AT + 128;

// How far the four lanes of a row are turned among their places: bytes lie as tensor cores take lines of 64.
DEVICE u32 turn_of(u32 row) { return CODE_BITS == 8 ? row >> 1 & 3 : 0; }
// Where a lane's 16 bytes are, of eight rows by 64 k of bytes, or 16 rows of codes of four bits.
DEVICE u32 place_of(u32 lane) { return (lane ^ turn_of(lane / 4)) * 16; }
