// The layout of packed NVFP4 weights, for every kernel that reads them. Header-free: NVRTC and nvcc both take it.
//
// Rows are padded to 16 (each segment starts at a multiple of 16), k to 64. A tile is 16 rows by 64 k: 512 bytes of codes
// and 64 of scales. Lane l of a warp owns bytes 16 l to 16 l + 15: row l / 4, then row l / 4 + 8, k from 16 (l % 4) on;
// eight bytes are one scale block. In a word of eight codes nibble i < 4 is k = 2 i, nibble i + 4 is k = 2 i + 1.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;

// First byte of the codes of a block (16 of k) of a padded row; `slabs` is the padded k / 64.
__device__ __forceinline__ u64 q4_codes_at(u32 row, u32 block, u32 slabs) {
    u64 tile = (u64)(row >> 4) * slabs + (block >> 2);
    return tile * 512 + ((row & 7) * 4 + (block & 3)) * 16 + (row & 8);
}

// Byte of the scale of that block.
__device__ __forceinline__ u64 q4_scale_at(u32 row, u32 block, u32 slabs) {
    u64 tile = (u64)(row >> 4) * slabs + (block >> 2);
    return tile * 64 + (row & 15) * 4 + (block & 3);
}

// Scales are kept without subnormals: the top of an f16 whose exponent is never zero. An E4M3 zero is kept as the smallest
// scale with zero codes, so that products with it are zeros of the right sign.
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

// Eight codes in the order of k to the order of a word, and back.
__device__ __forceinline__ u32 q4_word_of(u32 codes) {
    u32 w = 0;
    for (u32 i = 0; i < 4; i++) w |= (codes >> 8 * i & 15) << 4 * i | (codes >> 8 * i + 4 & 15) << 4 * (i + 4);
    return w;
}
__device__ __forceinline__ u32 q4_code(u32 word, u32 k) {
    return word >> 4 * (k / 2 + (k & 1) * 4) & 15;
}

// Twice the value of an E2M1 code: 0 1 2 3 4 6 8 12.
__device__ __forceinline__ int q4_doubled(u32 code) {
    int v = (int)(0xC8643210u >> 4 * (code & 7) & 15);
    return code & 8 ? -v : v;
}
