// Packed weights as kernels of few rows and of many read them.
#ifndef CODE_BITS
#define CODE_BITS 4
#endif
// Words of codes that are eight of them.
#define OF_EIGHT (CODE_BITS / 4)

// Bytes of 16 rows by 64 k of codes, and of a unit, 16 rows by 128 k: two of those, then scales.
constexpr int TILE_CODES = 128 * CODE_BITS, SCALES_AT = 2 * TILE_CODES, UNIT = SCALES_AT + 128;
