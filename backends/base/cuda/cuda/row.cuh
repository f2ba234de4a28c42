// What products of packed weights with one row of x share that keep codes in registers: staging the row with
// all loads in flight at once, the warps' shares of the units, sums over warps. For the kernels' argument `p`
// see few.cuh. BLOCK: threads of a block.
#include "few.cuh"

// Sixteen bytes of a weight, and four, to registers, past the first cache.
__device__ __forceinline__ void load16(u32 (&v)[4], const u8 *from) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(from));
}
__device__ __forceinline__ void load4(u32 &v, const u8 *from) {
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(from));
}

// One row of x, eight elements a thread and step: behind a norm to normed(k, in, there, e), as f32 that is not
// rounded yet, otherwise to plain(k, in, there, h), the bits that x has. The eight are two runs of four, GAP
// apart; k, a multiple of 8, is where they begin, or with GAP above 4 counts them: neighbours then share 2 GAP
// elements out. `there`: k is below the padded length; `in`: below p.k, a multiple of 2 GAP. `start` is called
// when the kernel before is done. MOST: loads of eight a thread; longer rows are for stage_rows().
template <int BLOCK, int GAP, class G, class Start, class Normed, class Plain>
__device__ __forceinline__ void stage_row(const G &p, float *sums, Start start, Normed normed, Plain plain) {
    const u32 padded = p.units * 128, at = threadIdx.x * 8;
    if (p.norm) {
        enum { MOST = (8191 + BLOCK * 8) / (BLOCK * 8) };
        const float4 none = make_float4(0, 0, 0, 0);
        float4 w[MOST][2], v[MOST][2];
#pragma unroll
        for (u32 j = 0; j < MOST; j++) {
            u32 k = at + j * BLOCK * 8, from = k;
            if constexpr (GAP > 4) from -= (k & 2 * GAP - 8) / 2;
            w[j][0] = k < p.k ? *(const float4 *)(p.norm + from) : none;
            w[j][1] = k < p.k ? *(const float4 *)(p.norm + from + GAP) : none;
        }
        wait_for_previous();
        start();
        float sum = 0;
#pragma unroll
        for (u32 j = 0; j < MOST; j++) {
            u32 k = at + j * BLOCK * 8, from = k;
            if constexpr (GAP > 4) from -= (k & 2 * GAP - 8) / 2;
            v[j][0] = k < p.k ? *(const float4 *)((const float *)p.x + from) : none;
            v[j][1] = k < p.k ? *(const float4 *)((const float *)p.x + from + GAP) : none;
            sum = fmaf(v[j][0].x, v[j][0].x, sum), sum = fmaf(v[j][0].y, v[j][0].y, sum);
            sum = fmaf(v[j][0].z, v[j][0].z, sum), sum = fmaf(v[j][0].w, v[j][0].w, sum);
            sum = fmaf(v[j][1].x, v[j][1].x, sum), sum = fmaf(v[j][1].y, v[j][1].y, sum);
            sum = fmaf(v[j][1].z, v[j][1].z, sum), sum = fmaf(v[j][1].w, v[j][1].w, sum);
        }
#pragma unroll
        for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
        __syncthreads();
        sum = 0;
#pragma unroll
        for (int i = 0; i < BLOCK / 32; i += 4) {
            float4 s = *(const float4 *)(sums + i);
            sum += (s.x + s.y) + (s.z + s.w);
        }
        float inverse = rsqrtf(__fdividef(sum, (float)p.k) + p.eps);
#pragma unroll
        for (u32 j = 0; j < MOST; j++) {
            u32 k = at + j * BLOCK * 8;
            if (j * BLOCK * 8 >= padded) break; // the same for all threads
            float e[8] = {v[j][0].x * inverse * w[j][0].x, v[j][0].y * inverse * w[j][0].y, v[j][0].z * inverse * w[j][0].z,
                          v[j][0].w * inverse * w[j][0].w, v[j][1].x * inverse * w[j][1].x, v[j][1].y * inverse * w[j][1].y,
                          v[j][1].z * inverse * w[j][1].z, v[j][1].w * inverse * w[j][1].w};
            normed(k, k < p.k, k < padded, e);
        }
        return;
    }
    enum { MOST = (16383 + BLOCK * 8) / (BLOCK * 8) };
    uint4 v[MOST];
    wait_for_previous();
#pragma unroll
    for (u32 j = 0; j < MOST; j++) {
        u32 k = at + j * BLOCK * 8;
        if constexpr (GAP == 4) {
            v[j] = k < p.k ? *(const uint4 *)((const u16 *)p.x + k) : make_uint4(0, 0, 0, 0);
        } else {
            uint2 a = make_uint2(0, 0), b = a;
            u32 from = k - (k & 2 * GAP - 8) / 2;
            if (k < p.k) a = *(const uint2 *)((const u16 *)p.x + from), b = *(const uint2 *)((const u16 *)p.x + from + GAP);
            v[j] = make_uint4(a.x, a.y, b.x, b.y);
        }
    }
    start();
#pragma unroll
    for (u32 j = 0; j < MOST; j++) {
        u32 k = at + j * BLOCK * 8;
        if (j * BLOCK * 8 >= padded) break;
        u32 h[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
        plain(k, k < p.k, k < padded, h);
    }
}

// The warps' shares of the block's row groups: with gate one half of the warps has the gate rows, the other
// the up rows.
struct Part {
    u32 first, count, per, from, to, warps;
};
template <int BLOCK, class G> __device__ __forceinline__ Part part_of(const G &p, u32 warp) {
    Part r;
    r.warps = p.gate_at ? BLOCK / 64 : BLOCK / 32;
    r.first = blockIdx.x * p.each + min(blockIdx.x, p.extra);
    r.count = p.each + (blockIdx.x < p.extra);
    u32 total = r.count * p.units;
    r.per = max((total + r.warps - 1) / r.warps, 1u);
    r.from = min((warp >= r.warps ? warp - r.warps : warp) * r.per, total);
    r.to = min(r.from + r.per, total);
    return r;
}

enum { MATES = 4 };
// The sum of a row of a group over the warps that had a share of it; MATES threads an element.
template <class G> __device__ __forceinline__ float summed(const G &p, const Part &r, const float *sums, u32 v, u32 row, u32 half) {
    float inverse = __fdividef(1.0f, (float)r.per);
    u32 from = divided(v * p.units, inverse), to = divided((v + 1) * p.units - 1, inverse), base = v + half * (r.count + r.warps);
    float sum = 0;
#pragma unroll 1
    for (u32 w = from + threadIdx.x % MATES; w <= to; w += MATES) sum += sums[(base + w) * 16 + row];
#pragma unroll
    for (int d = 1; d < MATES; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
    return sum;
}
