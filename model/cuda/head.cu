// The dense (usually tied) head: logits f32[rows, vocab] = x[rows, width] table[vocab, width]^T.
#include "elements.cuh"

// head_T_N(table T[vocab, width], x T[rows, width], out f32[rows, vocab], vocab, width, rows), T bf16 or f16,
// N 1, 2, 4, 8
//   grid (ceil(vocab / 128), ceil(rows / (8 N))), block 256; width % 8 == 0. Take the least N with 8 N >= rows, else 8.
//   A warp owns 16 rows of the table as the first operand of m16n8k16, straight from memory; x is staged in 32 KiB.
template <class T, int N> DEVICE void head(const T *table, const T *x, float *out, int vocab, int width, int rows) {
    constexpr int CHUNK = 2048 / N;
    // Lines of 16 bytes, spread so that eight rows of one column meet no bank twice.
    __shared__ uint4 staged[8 * N][CHUNK / 8];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int first = blockIdx.x * 128 + warp * 16, row = blockIdx.y * 8 * N;
    const uint4 *low = (const uint4 *)(table + (u64)min(first + g, vocab - 1) * width);
    const uint4 *high = (const uint4 *)(table + (u64)min(first + g + 8, vocab - 1) * width);
    const uint4 zero = make_uint4(0, 0, 0, 0);
    constexpr int AHEAD = 4;
    int lines = width / 8;
    let_next_start();
    float sum[N][4] = {};
    uint4 a[AHEAD], b[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        a[i] = 4 * i + t < lines ? __ldcs(low + 4 * i + t) : zero;
        b[i] = 4 * i + t < lines ? __ldcs(high + 4 * i + t) : zero;
    }
    wait_for_previous();
    for (int from = 0; from < lines; from += CHUNK / 8) {
        __syncthreads();
        for (int e = threadIdx.x; e < 8 * N * (CHUNK / 8); e += 256) {
            int n = e / (CHUNK / 8), i = e % (CHUNK / 8);
            bool real = row + n < rows && from + i < lines;
            staged[n][i ^ (n & 7)] = real ? ((const uint4 *)(x + (u64)(row + n) * width))[from + i] : zero;
        }
        __syncthreads();
        int end = min(lines - from, CHUNK / 8);
        for (int s = 0; s < end; s += 4 * AHEAD) {
            uint4 next_a[AHEAD], next_b[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                int at = from + s + 4 * AHEAD + 4 * i + t;
                next_a[i] = at < lines ? __ldcs(low + at) : zero;
                next_b[i] = at < lines ? __ldcs(high + at) : zero;
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (s + 4 * i < end) {
#pragma unroll
                    for (int n = 0; n < N; n++) {
                        uint4 y = staged[8 * n + g][(s + 4 * i + t) ^ g];
                        As<T>::mma(sum[n], a[i].x, b[i].x, a[i].y, b[i].y, y.x, y.y);
                        As<T>::mma(sum[n], a[i].z, b[i].z, a[i].w, b[i].w, y.z, y.w);
                    }
                }
                a[i] = next_a[i];
                b[i] = next_b[i];
            }
        }
    }
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int token = row + 8 * n + 2 * t + (i & 1), at = first + g + (i >> 1) * 8;
            if (token < rows && at < vocab) out[(u64)token * vocab + at] = sum[n][i];
        }
}

// head_exact_T(table T[vocab, width], x f32[rows, width], out f32[rows, vocab], vocab, width), T f32, bf16 or
// f16
//   grid (ceil(vocab / 8), rows), block 256, any width. f32 products: a warp adds one row.
template <class T> DEVICE void head_exact(const T *table, const float *x, float *out, int vocab, int width) {
    int row = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    let_next_start();
    wait_for_previous();
    if (row >= vocab) return;
    const T *w = table + (u64)row * width;
    const float *y = x + (u64)blockIdx.y * width;
    float sum = 0.f;
#pragma unroll 8
    for (int i = lane; i < width; i += 32) sum += widen(w[i]) * y[i];
    sum = warp_sum(sum);
    if (lane == 0) out[(u64)blockIdx.y * vocab + row] = sum;
}

#define HEAD(T, M, N) \
    extern "C" __global__ void __launch_bounds__(256) head_##M##_##N(const T *table, const T *x, float *out, int vocab, int width, int rows) { \
        head<T, N>(table, x, out, vocab, width, rows); \
    }
#define HEADS(T, M) HEAD(T, M, 1) HEAD(T, M, 2) HEAD(T, M, 4) HEAD(T, M, 8)
HEADS(bf16, bf16)
HEADS(f16, f16)

#define EXACT(T, M) \
    extern "C" __global__ void __launch_bounds__(256) head_exact_##M(const T *table, const float *x, float *out, int vocab, int width) { \
        head_exact<T>(table, x, out, vocab, width); \
    }
EXACT(float, f32)
EXACT(bf16, bf16)
EXACT(f16, f16)
