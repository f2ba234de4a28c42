// What the model's kernels share beside q4-cuda's files: neighbours at once, rows, and sums over a block.
#include "convert.cuh"
#include "launch.cuh"
#include "sums.cuh"

#define MINUS_INFINITY __int_as_float(0xff800000)

// Four neighbours, aligned to their size.
DEVICE void load4(const float *p, float (&x)[4]) {
    float4 v = *(const float4 *)p;
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}
template <class T> DEVICE void load4(const T *p, float (&x)[4]) {
    ushort4 v = *(const ushort4 *)p;
    x[0] = widen(T{v.x}), x[1] = widen(T{v.y}), x[2] = widen(T{v.z}), x[3] = widen(T{v.w});
}
DEVICE void store4(float *p, const float (&x)[4]) { *(float4 *)p = make_float4(x[0], x[1], x[2], x[3]); }
template <class T> DEVICE void store4(T *p, const float (&x)[4]) {
    *(uint2 *)p = make_uint2(As<T>::pair(x[0], x[1]), As<T>::pair(x[2], x[3]));
}
// A row, by `threads` threads that each have up to four loads on their way.
template <class T> DEVICE void widen_row(const T *from, float *to, int width, int thread, int threads) {
    if (width % 4 || (u64)from % (4 * sizeof(T)) || (u64)to % 16) {
        for (int i = thread; i < width; i += threads) to[i] = widen(from[i]);
        return;
    }
    for (int first = 4 * thread; first < width; first += 16 * threads) {
        float x[4][4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (first + 4 * j * threads < width) load4(from + first + 4 * j * threads, x[j]);
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (first + 4 * j * threads < width) store4(to + first + 4 * j * threads, x[j]);
    }
}

DEVICE float two_to(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The sum over the block in every thread. `room` holds 32 floats.
DEVICE float block_sum(float x, float *room) {
    int warps = (blockDim.x + 31) >> 5;
    x = warp_sum(x);
    if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = x;
    __syncthreads();
    x = (threadIdx.x & 31) < warps ? room[threadIdx.x & 31] : 0.f;
    x = warp_sum(x);
    __syncthreads();
    return x;
}
