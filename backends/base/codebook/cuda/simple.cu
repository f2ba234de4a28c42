// What happens to packed weights in either layout, for every shape, stride, alignment and type: packing,
// decoding, gradients, and a product for what the fast kernels leave.
#include "layout.cuh"
#include "rows.cuh"

DEVICE float level_of(u32 code) {
#if LEVELS == NF4
    return VALUES[code];
#else
    return value_of(code);
#endif
}

// Raw codes of `rows` rows, flat over their elements, and the words of their scales, [rows][k / 64] with
// units, else [rows][k / group] with, maybe, zero points beside them, to rows `first` on of a weight.
extern "C" __global__ void levels_pack(const u8 *codes, const u32 *scales, const u32 *zeros, u32 high_first, u32 rows, u32 first,
                                       Weight w) {
    u32 k = (blockIdx.x * 128 + threadIdx.x) * 8, row = blockIdx.y + blockIdx.z * 32768, each = w.units ? 64 : w.group;
    if (row >= rows || k >= w.k) return;
    constexpr u32 EACH = 8 / CODE_BITS; // codes of a byte
    const u8 *c = codes + ((u64)row * w.k + k) / EACH;
    u8 *to = code_at(w, first + row, k);
    for (u32 i = 0; i < 8 / EACH; i++) to[code_step(w, first + row, i * EACH)] = EACH == 2 && high_first ? (u8)(c[i] << 4 | c[i] >> 4) : c[i];
    if (k % each) return;
    u64 from = (u64)row * (w.k / each) + k / each;
    u32 *at = scale_at(w, first + row, k);
    *at = scales[from];
    if (zeros) at[zeros_from(w)] = zeros[from];
}

__device__ __forceinline__ float value(const Weight &w, u32 row, u32 k) {
    Step s = step_of(w, row, k);
    float level = level_of(code_of(code_at(w, row, k), k));
    return __fmul_rn(ZEROS ? level + s.zero : level, s.scale);
}

extern "C" __global__ void levels_dequantize(Weight w, Matrix out) {
    u32 k = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y + blockIdx.z * 32768;
    if (k < w.k && row < w.n) store(out, row * out.ld + k, value(w, row, k));
}

// dx = dy W: 32 columns a block, 16 partial sums over n each, added in order.
extern "C" __global__ void levels_backward(Weight w, Matrix dy, Matrix dx) {
    __shared__ float sums[16][33];
    u32 k = blockIdx.x * 32 + threadIdx.x, m = blockIdx.y;
    float sum = 0;
    if (k < w.k)
        for (u32 row = threadIdx.y; row < w.n; row += 16) sum = fmaf(load(dy, m * dy.ld + row), value(w, row, k), sum);
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && k < w.k) {
        for (u32 i = 1; i < 16; i++) sum += sums[i][threadIdx.x];
        store(dx, m * dx.ld + k, sum);
    }
}

// Eight elements of x from an even place on.
__device__ __forceinline__ void load8(const Matrix &x, u64 at, float *v) {
    if (x.dtype == F32) {
        const float *p = (const float *)x.data + at;
        if (((u64)p & 15) == 0) {
            float4 a = ((const float4 *)p)[0], b = ((const float4 *)p)[1];
            v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
        } else {
            for (u32 i = 0; i < 8; i++) v[i] = p[i];
        }
        return;
    }
    const u16 *p = (const u16 *)x.data + at;
    u16 h[8];
    if (((u64)p & 15) == 0) *(uint4 *)h = *(const uint4 *)p;
    else
        for (u32 i = 0; i < 8; i++) h[i] = p[i];
    for (u32 i = 0; i < 8; i++) v[i] = x.dtype == F16 ? from_f16(h[i]) : from_bf16(h[i]);
}

// What eight codes from k on, a multiple of 8, are worth: of four bits by a table for each lane, 16 values by
// 32 lanes, so that no two lanes share a bank.
#if CODE_BITS == 8
enum { LEVELS_KEPT = 1 };
__device__ __forceinline__ void levels8(const Weight &w, u32 row, u32 k, const float *, u32, float *v) {
    const u8 *c = code_at(w, row, k);
    for (u32 j = 0; j < 8; j++) v[j] = value_of(c[code_step(w, row, j)]);
}
#else
enum { LEVELS_KEPT = 16 * 32 };
__device__ __forceinline__ void levels8(const Weight &w, u32 row, u32 k, const float *table, u32 lane, float *v) {
    const u8 *c = code_at(w, row, k);
    for (u32 j = 0; j < 8; j++) v[j] = table[code_of(c + code_step(w, row, j), j) * 32 + lane];
}
#endif

// y = x W^T: a warp per row of the weight, up to ROWS rows of x. A lane takes eight codes and scales their
// sum once.
enum { ROWS = 8 };
extern "C" __global__ void __launch_bounds__(256) levels_forward(Weight w, Matrix x, Matrix y) {
    __shared__ float table[LEVELS_KEPT];
    u32 lane = threadIdx.x, row = blockIdx.x * 8 + threadIdx.y, m = blockIdx.y * ROWS;
    if (CODE_BITS == 4) {
        for (u32 i = threadIdx.y * 32 + lane; i < 512; i += 256) table[i] = level_of(i / 32);
        __syncthreads();
    }
    if (row >= w.n) return;
    u32 count = min((u32)ROWS, y.rows - m);
    float sum[ROWS];
    for (u32 r = 0; r < ROWS; r++) sum[r] = 0;
    for (u32 k = lane * 8; k < w.k; k += 256) {
        float v[8];
        Step s = step_of(w, row, k);
        levels8(w, row, k, table, lane, v);
        for (u32 j = 0; j < 8; j++) v[j] = ZEROS ? v[j] + s.zero : v[j];
        for (u32 r = 0; r < ROWS; r++) {
            if (r >= count) break;
            float in[8], part = 0;
            load8(x, (m + r) * x.ld + k, in);
            for (u32 j = 0; j < 8; j++) part = fmaf(in[j], v[j], part);
            sum[r] = fmaf(part, s.scale, sum[r]);
        }
    }
    for (u32 r = 0; r < ROWS; r++) {
        if (r >= count) break;
        float total = warp_sum(sum[r]);
        if (lane == 0) store(y, (m + r) * y.ld + row, total);
    }
}
