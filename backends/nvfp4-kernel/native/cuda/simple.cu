// Plain kernels for every shape, type and activation format: what the fast ones do not take, and preparation.
// One warp sums an output over blocks of 16, so that neither the number of rows nor their addresses can
// change a bit.
#include "codec.cuh"
#include "layout.cuh"
#include "spans.cuh"

struct Weight {
    const u8 *codes, *scales;
    const Span *spans;
    u32 n, k, slabs, unused;
};
// An element of the decoded matrix, by the definition of the format.
__device__ __forceinline__ float decoded(u32 code, u8 scale, float step) {
    float v = scale == 0x08 ? 0.0f : __fmul_rn(0.5f * (float)doubled_e2m1(code & 7), step);
    return __uint_as_float(__float_as_uint(v) | (code & 8) << 28);
}
// Raw codes and scales of one segment to the packed layout, padding included. A thread per block of 16 of rows r and r + 8;
// `bad` gets the first block whose scale is NaN or negative, counted over the segment.
extern "C" __global__ void q4_pack(const u8 *codes, const u8 *scales, u32 is_tiled, u32 rows, u32 groups, u32 first,
                                   u32 slabs, u8 *out_codes, u8 *out_scales, u64 *bad) {
    u32 block = blockIdx.x * 32 + threadIdx.x, upper = blockIdx.y * 16 + threadIdx.y;
    if (block >= slabs * 4) return;
    u32 pairs[2][8]; // of both rows, by k / 2
    for (u32 half = 0; half < 2; half++) {
        u32 row = upper + 8 * half;
        u8 scale = 0;
        bool inside = row < rows && block < groups;
        u64 at = (u64)row * groups + block;
        const u8 *c = codes + at * 8;
        if (is_tiled) {
            u64 tile = (u64)(row >> 7) * ((groups + 3) / 4) + (block >> 2);
            at = tile * 512 + (row & 31) * 16 + ((row >> 5) & 3) * 4 + (block & 3);
        }
        if (inside) {
            scale = scales[at];
            if (scale >= 0x7f) atomicMin(bad, (u64)row * groups + block);
        }
        u32 keep = scale ? 0xff : 0x88; // a zero scale keeps the signs of its zeros
        for (u32 i = 0; i < 8; i++) pairs[half][i] = inside ? c[i] & keep : 0;
        out_scales[q4_scale_at(first + row, block, slabs)] = q4_scale_of_e4m3(scale);
    }
    u32 *to = (u32 *)(out_codes + q4_codes_at(first + upper, block, slabs));
    for (u32 i = 0; i < 4; i++)
        to[i] = q4_word_of(pairs[0][i] | pairs[1][i] << 8 | pairs[0][i + 4] << 16 | pairs[1][i + 4] << 24);
}
__device__ __forceinline__ u32 packed_code(const Weight &w, u32 at, u32 k) {
    const u32 *words = (const u32 *)(w.codes + q4_codes_at(at, k / 16, w.slabs));
    return q4_code(words[q4_word(k)], q4_place(at, k));
}

// The whole decoded matrix: a thread per element.
extern "C" __global__ void q4_dequantize(Weight w, Matrix out) {
    u32 k = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y + blockIdx.z * 32768;
    if (k >= w.k || row >= w.n) return;
    Span s = span_of(w, row);
    u32 at = row + s.skip, block = k / 16;
    u8 scale = w.scales[q4_scale_at(at, block, w.slabs)];
    store(out, row * out.ld + k, decoded(packed_code(w, at, k), scale, effective(s, q4_scale(scale))));
}

// dx = dy W with the decoded weight: 32 columns a block, 16 partial sums over n each, added in order.
extern "C" __global__ void q4_backward(Weight w, Matrix dy, Matrix dx) {
    __shared__ float sums[16][33];
    u32 k = blockIdx.x * 32 + threadIdx.x, m = blockIdx.y, block = k / 16;
    float sum = 0;
    if (k < w.k) {
        for (u32 row = threadIdx.y; row < w.n; row += 16) {
            Span s = span_of(w, row);
            u32 at = row + s.skip;
            u8 scale = w.scales[q4_scale_at(at, block, w.slabs)];
            sum = fmaf(load(dy, m * dy.ld + row), decoded(packed_code(w, at, k), scale, effective(s, q4_scale(scale))), sum);
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && k < w.k) {
        for (u32 i = 1; i < 16; i++) sum += sums[i][threadIdx.x];
        store(dx, m * dx.ld + k, sum);
    }
}

// y = x W^T with x as it is: a warp per column of y and four of its rows.
extern "C" __global__ void q4_forward_float(Weight w, Matrix x, Matrix y) {
    u32 row = blockIdx.x * 8 + threadIdx.y, lane = threadIdx.x, m = blockIdx.y * 4;
    if (row >= w.n) return;
    Span s = span_of(w, row);
    u32 at = row + s.skip, count = min(4, y.rows - m);
    float sum[4] = {0, 0, 0, 0};
    for (u32 block = lane; block < w.k / 16; block += 32) {
        const u32 *words = (const u32 *)(w.codes + q4_codes_at(at, block, w.slabs));
        float scale = q4_scale(w.scales[q4_scale_at(at, block, w.slabs)]) * 0.5f;
        for (u32 i = 0; i < 16; i++) {
            u32 code = q4_code(words[q4_word(i)], q4_place(at, i));
            float v = (float)doubled_e2m1(code) * scale;
            if (code == 8) v = -0.0f;
            for (u32 r = 0; r < 4; r++)
                if (r < count) sum[r] = fmaf(load(x, (m + r) * x.ld + block * 16 + i), v, sum[r]);
        }
    }
    double factor = multiplier(s.convention, s.global);
    for (u32 r = 0; r < count; r++) {
        float total = warp_sum(sum[r]);
        if (lane == 0) store(y, (m + r) * y.ld + row, (float)((double)total * factor));
    }
}

// y = q W^T with quantised rows: `q` [m][k] integers, `steps` [m][k / 16], NaN where a row cannot be
// quantised. `act_global` is NULL or the per-tensor scale of the rows.
extern "C" __global__ void q4_forward_int(Weight w, const i8 *q, const float *steps, const float *act_global,
                                          u32 act_convention, double factor, Matrix y) {
    u32 row = blockIdx.x * 8 + threadIdx.y, lane = threadIdx.x, m = blockIdx.y * 4;
    if (row >= w.n) return;
    Span s = span_of(w, row);
    u32 at = row + s.skip, count = min(4, y.rows - m), groups = w.k / 16;
    float sum[4] = {0, 0, 0, 0};
    for (u32 block = lane; block < groups; block += 32) {
        const u32 *words = (const u32 *)(w.codes + q4_codes_at(at, block, w.slabs));
        float scale = q4_scale(w.scales[q4_scale_at(at, block, w.slabs)]);
        for (u32 r = 0; r < count; r++) {
            const i8 *x = q + (u64)(m + r) * w.k + block * 16;
            int dot = 0;
            for (u32 i = 0; i < 16; i++) dot += doubled_e2m1(q4_code(words[q4_word(i)], q4_place(at, i))) * x[i];
            sum[r] = fmaf((float)dot * scale, steps[(u64)(m + r) * groups + block], sum[r]);
        }
    }
    factor *= multiplier(s.convention, s.global);
    if (act_global) factor *= multiplier(act_convention, *act_global);
    for (u32 r = 0; r < count; r++) {
        float total = warp_sum(sum[r]);
        if (lane == 0) store(y, (m + r) * y.ld + row, (float)((double)total * factor));
    }
}
