// Element types, conversions, reductions and programmatic dependent launch. Stands before every other file here.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

#define DEVICE static __device__ __forceinline__
#define MINUS_INFINITY __int_as_float(0xff800000)

DEVICE float widen(float x) { return x; }
DEVICE float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
DEVICE float widen(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

template <class T> struct As;
template <> struct As<float> {
    DEVICE float from(float x) { return x; }
};
template <> struct As<bf16> {
    DEVICE bf16 from(float x) {
        bf16 y;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
    // Two values in one word, `low` in the low half.
    DEVICE u32 pair(float low, float high) {
        u32 y;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
        return y;
    }
    // d += a b, 16 x 8 x 16.
    DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
};
template <> struct As<f16> {
    DEVICE f16 from(float x) {
        f16 y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
    DEVICE u32 pair(float low, float high) {
        u32 y;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
        return y;
    }
    DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
};

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

// The next kernel of the stream may start; it still waits for this one's end before it reads.
DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Everything the kernels before this one wrote is visible behind this.
DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE float two_to(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float warp_sum(float x) {
    for (int d = 16; d; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
    return x;
}
DEVICE float warp_max(float x) {
    for (int d = 16; d; d >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
    return x;
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
