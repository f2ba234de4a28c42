// x for rounded.cu where the copy engine cannot read it as it is.
//
// levels_rows(x bf16[rows, k], ld, k, out bf16[rows, k])
// levels_rows_normed(x f32[rows, k], ld, k, out bf16[rows, k], weight f32[k], eps): x/rms(x)*weight, rounded
//   k a multiple of 8; grid rows, block 256.
#include "convert.cuh"
#include "launch.cuh"

extern "C" __global__ void __launch_bounds__(256) levels_rows(const u16 *x, u64 ld, int k, u16 *out) {
    let_next_start();
    wait_for_previous();
    u64 row = blockIdx.x;
    for (int i = threadIdx.x; i < k; i += 256) out[row * k + i] = x[row * ld + i];
}

extern "C" __global__ void __launch_bounds__(256) levels_rows_normed(const float *x, u64 ld, int k, u16 *out, const float *weight, float eps) {
    __shared__ float room[8];
    let_next_start();
    wait_for_previous();
    const float *row = x + blockIdx.x * ld;
    bool vector = (((u64)row | (u64)weight) & 15) == 0;
    float sum = 0.f;
    if (vector) {
        for (int i = threadIdx.x * 4; i < k; i += 1024) {
            float4 v = *(const float4 *)(row + i);
            sum += v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w);
        }
    } else {
        for (int i = threadIdx.x; i < k; i += 256) sum += row[i] * row[i];
    }
    for (int s = 16; s; s >>= 1) sum += __shfl_xor_sync(~0u, sum, s);
    if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = sum;
    __syncthreads();
    sum = 0.f;
    for (int i = 0; i < 8; i++) sum += room[i];
    float factor = rsqrtf(sum / (float)k + eps);
    u32 *to = (u32 *)(out + (u64)blockIdx.x * k);
    for (int i = threadIdx.x * 4; i < k; i += 1024) {
        float v[4], w[4];
        if (vector) {
            *(float4 *)v = *(const float4 *)(row + i), *(float4 *)w = *(const float4 *)(weight + i);
        } else {
            for (int j = 0; j < 4; j++) v[j] = row[i + j], w[j] = weight[i + j];
        }
        *(uint2 *)(to + i / 2) = make_uint2(As<bf16>::pair(v[0] * factor * w[0], v[1] * factor * w[1]), As<bf16>::pair(v[2] * factor * w[2], v[3] * factor * w[3]));
    }
}
