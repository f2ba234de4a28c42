// Operands of FP4 tensor cores, and what comes after the product. One thread does one thing and no thread
// waits for another, so that a compiler for CPUs takes these kernels as well.
//
// A matrix is padded to whole tiles of scales. Codes: rows of 8 bytes per block of 16, low nibble first, no
// gaps. Scales: E4M3 in tiles of 128 rows by 4 blocks, 512 bytes each, the tiles of 128 rows side by side.
// Padding is zero.
#include "codec.cuh"
#include "spans.cuh"

// Byte of the scale of a block; `groups` blocks a row, a multiple of 4.
__device__ __forceinline__ u64 q4_tiled(u32 row, u32 block, u32 groups) {
    u64 tile = (u64)(row >> 7) * (groups >> 2) + (block >> 2);
    return tile * 512 + (row & 31) * 16 + (row >> 5 & 3) * 4 + (block & 3);
}

// Stored rows of one segment behind `first` rows of others, to zeroed memory. `bad` gets the first block
// whose scale is NaN or negative, counted over these rows.
extern "C" __global__ void q4_fp4_pack(const u64 *codes, const u8 *scales, u32 is_tiled, u32 rows, u32 groups, u64 *bad,
                                       u32 first, u32 out_groups, u64 *out_codes, u8 *out_scales) {
    u32 block = blockIdx.x * 32 + threadIdx.x, row = blockIdx.y * 8 + threadIdx.y;
    if (block >= groups || row >= rows) return;
    u64 at = (u64)row * groups + block;
    u8 scale = scales[is_tiled ? q4_tiled(row, block, (groups + 3) & ~3u) : at];
    if (scale >= 0x7f) atomicMin(bad, at);
    out_codes[(u64)(first + row) * out_groups + block] = codes[at];
    out_scales[q4_tiled(first + row, block, out_groups)] = scale;
}

// What a row segment's sums are multiplied with: m * 2^e, 1 <= m < 2, so that no product of scales leaves the
// range of f32 before the result does.
struct Factor {
    float m;
    int e;
};

// Quantised rows, as q4_nvfp4 stores them, to an operand: `code_rows` of codes, scales of the rows up to the
// next multiple of 128. Sets bad[row] where a row cannot be quantised. Also computes the factors of the
// segments of W.
extern "C" __global__ void q4_fp4_operand(const u64 *codes, const u8 *scales, const float *steps, u32 rows, u32 groups,
                                          u32 code_rows, u32 out_groups, u64 *out_codes, u8 *out_scales, u32 *bad,
                                          const Span *spans, u32 span_count, const float *act_global, u32 act_convention,
                                          Factor *factors) {
    u32 block = blockIdx.x * 32 + threadIdx.x, row = blockIdx.y * 8 + threadIdx.y;
    if (block >= out_groups) return;
    bool inside = row < rows && block < groups;
    u64 at = (u64)row * groups + block, to = (u64)row * out_groups + block;
    if (row < code_rows) out_codes[to] = inside ? codes[at] : 0;
    u8 scale = inside ? scales[at] : 0;
    if (inside && !is_finite(steps[at])) bad[row] = 1, scale = 0;
    out_scales[q4_tiled(row, block, out_groups)] = scale;
    if (row) return;
    for (u32 i = block; i < span_count; i += out_groups) {
        double f = multiplier(spans[i].convention, spans[i].global);
        if (act_global) f *= multiplier(act_convention, *act_global);
        int e = f > 0 && f <= 1e300 ? ilogb(f) : 0; // else NaN
        factors[i].m = (float)scalbn(f, -e), factors[i].e = e;
    }
}

// f32 sums, `ld` a row, to y.
extern "C" __global__ void q4_fp4_finish(const float *sums, u64 ld, const u32 *bad, const Span *spans, const Factor *factors,
                                         Matrix y) {
    u32 column = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
    if (column >= y.cols) return;
    u32 i = 0;
    while (column >= spans[i].end) i++;
    float v = scalbnf(sums[row * ld + column] * factors[i].m, factors[i].e);
    store(y, row * y.ld + column, bad[row] ? __uint_as_float(0x7fc00000u) : v);
}

struct Fp4 {
    const u8 *codes, *scales;
    const Span *spans;
    u32 n, k, groups, span_count;
};
// An element of the decoded matrix, by the definition of the format.
__device__ __forceinline__ float element(const Fp4 &w, const Span &s, u32 row, u32 k) {
    u32 code = w.codes[(u64)row * w.groups * 8 + k / 2] >> 4 * (k & 1) & 15;
    float v = __fmul_rn(0.5f * (float)doubled_e2m1(code & 7), effective(s, e4m3_value(w.scales[q4_tiled(row, k / 16, w.groups)])));
    return __uint_as_float(__float_as_uint(v) | (code & 8) << 28);
}

// The whole decoded matrix: a thread per element.
extern "C" __global__ void q4_fp4_dequantize(Fp4 w, Matrix out) {
    u32 k = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y + blockIdx.z * 32768;
    if (k >= w.k || row >= w.n) return;
    store(out, row * out.ld + k, element(w, span_of(w, row), row, k));
}

// dx = dy W with the decoded weight: a thread per element.
extern "C" __global__ void q4_fp4_backward(Fp4 w, Matrix dy, Matrix dx) {
    u32 k = blockIdx.x * 128 + threadIdx.x, m = blockIdx.y, row = 0;
    if (k >= w.k) return;
    float sum = 0;
    for (const Span *s = w.spans; row < w.n; s++)
        for (; row < s->end; row++) sum = fmaf(load(dy, m * dy.ld + row), element(w, *s, row, k), sum);
    store(dx, m * dx.ld + k, sum);
}
