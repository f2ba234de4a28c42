// What surrounds a dense product on the device: copies into the shape cuBLASLt gets and out of it, and a
// plain product for what it does not take.
#include "rows.cuh"

// A dense copy [n][ld] of f32, f16 or bf16; a row is multiplied by its scale, a power of two.
struct Dense {
    u64 values, ld;
    const float *scales;
    u32 n, k, dtype, unused;
};

__device__ __forceinline__ float weight(const Dense &w, u32 row, u32 k) {
    u64 at = row * w.ld + k;
    if (w.dtype == F32) return ((const float *)w.values)[at];
    u16 h = ((const u16 *)w.values)[at];
    return w.dtype == F16 ? __fmul_rn(from_f16(h), w.scales[row]) : from_bf16(h);
}

// x to contiguous rows of `cols` elements, zero from x.cols on.
extern "C" __global__ void dense_in(Matrix x, Matrix to) {
    u32 c = blockIdx.x * 256 + threadIdx.x, r = blockIdx.y;
    if (c < to.cols) store(to, r * to.ld + c, c < x.cols ? load(x, r * x.ld + c) : 0.0f);
}

// f32 sums to y, scaled per column.
extern "C" __global__ void dense_out(Matrix sums, const float *scales, Matrix y) {
    u32 c = blockIdx.x * 256 + threadIdx.x, r = blockIdx.y;
    if (c < y.cols) store(y, r * y.ld + c, __fmul_rn(((const float *)sums.data)[r * sums.ld + c], scales ? scales[c] : 1.0f));
}

extern "C" __global__ void dense_decode(Dense w, Matrix out) {
    u32 k = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y + blockIdx.z * 32768;
    if (k < w.k && row < w.n) store(out, row * out.ld + k, weight(w, row, k));
}

// y = x W^T: a warp per output column, four rows of x.
extern "C" __global__ void dense_forward(Dense w, Matrix x, Matrix y) {
    u32 row = blockIdx.x * 8 + threadIdx.y, lane = threadIdx.x, m = blockIdx.y * 4;
    if (row >= w.n) return;
    u32 count = min(4, y.rows - m);
    float sum[4] = {0, 0, 0, 0};
    for (u32 k = lane; k < w.k; k += 32) {
        float v = weight(w, row, k);
        for (u32 r = 0; r < 4; r++)
            if (r < count) sum[r] = fmaf(load(x, (m + r) * x.ld + k), v, sum[r]);
    }
    for (u32 r = 0; r < count; r++) {
        float total = warp_sum(sum[r]);
        if (lane == 0) store(y, (m + r) * y.ld + row, total);
    }
}

// dx = dy W: 32 columns a block, 16 partial sums over n each, added in order.
extern "C" __global__ void dense_backward(Dense w, Matrix dy, Matrix dx) {
    __shared__ float sums[16][33];
    u32 k = blockIdx.x * 32 + threadIdx.x, m = blockIdx.y;
    float sum = 0;
    if (k < w.k)
        for (u32 row = threadIdx.y; row < w.n; row += 16) sum = fmaf(load(dy, m * dy.ld + row), weight(w, row, k), sum);
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && k < w.k) {
        for (u32 i = 1; i < 16; i++) sum += sums[i][threadIdx.x];
        store(dx, m * dx.ld + k, sum);
    }
}
