// What products of packed weights with a few rows of x share: the instructions they use, the runs of units
// that warps stream through rings in shared memory, staging x, and sums over warps; for compute capability
// 8.0 on. What functions call `p` is the kernel's argument, with the fields of Gemv in the sources that
// include this one: w, x, norm, ldx, m, k, units, each, extra, gate_at, x_dtype, eps.
#include "convert.cuh"
#include "launch.cuh"
#include "unit.cuh"

enum { THREADS = 512, WARPS = THREADS / 32 };
enum { CHUNKS = 5 }; // of 8 elements of x that a thread asks for at once, where there are several rows and none is quantised

__device__ __forceinline__ u32 shared_at(const void *p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy16(u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ __forceinline__ void await() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }
// A cluster of blocks shares row groups and splits k.
__device__ __forceinline__ u32 rank_in_cluster() {
    u32 r = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %cluster_ctarank;" : "=r"(r));
#endif
    return r;
}
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ float of_rank(const float *p, u32 rank) {
    float v = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .u32 a; mapa.shared::cluster.u32 a, %1, %2; ld.shared::cluster.f32 %0, [a];}" : "=f"(v) : "r"(shared_at(p)), "r"(rank) : "memory");
#endif
    return v;
}
__device__ __forceinline__ void lds4(u32 (&v)[4], u32 at) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at));
}
__device__ __forceinline__ u32 lds1(u32 at) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}
__device__ __forceinline__ float silu(float g) { return __fdividef(g, 1.0f + __expf(-g)); }

// Eight elements: f32, 16-byte aligned, or 16 bits wide.
__device__ __forceinline__ void load8(const float *p, float (&v)[8]) {
    float4 a = *(const float4 *)p, b = *(const float4 *)(p + 4);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
__device__ __forceinline__ void widen8(uint4 a, u32 dtype, float (&v)[8]) {
    u32 h[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[2 * i] = dtype == BF16 ? from_bf16(h[i] & 0xffff) : from_f16(h[i] & 0xffff);
        v[2 * i + 1] = dtype == BF16 ? from_bf16(h[i] >> 16) : from_f16(h[i] >> 16);
    }
}

// The leading part of v in bf16; what is left stays in v, unless it is the `last`.
__device__ __forceinline__ void take_part(float (&v)[8], bool last, u32 (&h)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        h[i] = As<bf16>::pair(v[2 * i], v[2 * i + 1]);
        if (!last) {
            v[2 * i] -= from_bf16(h[i] & 0xffff);
            v[2 * i + 1] -= from_bf16(h[i] >> 16);
        }
    }
}

// A row of x and the team of threads that stages it: `rows`, a power of two, of `padded` elements each.
struct Row {
    u32 row, rows, padded;
    bool here;
};
// Rows of x, eight elements a thread and chunk: of k what this block has, `count` units from `begin` on. Norm
// and rounding to the type of x on the way. `start` is called when the kernel before is done, chunk(row, k,
// in, v) for every chunk, by whole warps; v is zero where no element is `in`. x and norm are 16-byte aligned,
// row by row. sums: 2 WARPS floats of shared memory.
template <int SPLIT, int AHEAD, class G, class Start, class Chunk>
__device__ __forceinline__ void stage_rows(const G &p, u32 begin, u32 count, float *sums, Start start, Chunk chunk) {
    u32 shift = p.m <= 1 ? 0 : p.m <= 2 ? 1 : p.m <= 4 ? 2 : p.m <= 8 ? 3 : 4, rows = 1 << shift, team = THREADS >> shift;
    u32 row = threadIdx.x / 32 >> (4 - shift), at = (threadIdx.x & (team - 1)) * 8, step = team * 8;
    u32 padded = count * 128, k_end = min(p.k - min(p.k, begin * 128), padded);
    bool here = row < p.m;
    u64 first = (u64)row * p.ldx + begin * 128;
    const float *norm = p.norm + begin * 128;
    float v[AHEAD][8], weight[AHEAD][8], inverse = 1.0f;
    auto load_norm = [&](u32 k) {
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
            if (here && k + j * step < k_end) load8(norm + k + j * step, weight[j]);
    };
    if (p.norm) load_norm(at);
    wait_for_previous();
    start();
    // Chunks of a row in flight together: one after another each would wait for the second cache.
    auto load = [&](u32 k, float (&to)[AHEAD][8]) {
        if (p.norm || p.x_dtype == F32) {
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
#pragma unroll
                for (int i = 0; i < 8; i++) to[j][i] = 0;
                if (here && k + j * step < k_end) load8((const float *)p.x + first + k + j * step, to[j]);
            }
            return;
        }
        uint4 halves[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            bool in = here && k + j * step < k_end;
            halves[j] = in ? *(const uint4 *)((const u16 *)p.x + first + k + j * step) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) widen8(halves[j], p.x_dtype, to[j]);
    };
    load(at, v);
    if (p.norm) {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
#pragma unroll
            for (int i = 0; i < 8; i++) sum = fmaf(v[j][i], v[j][i], sum);
#pragma unroll 1
        for (u32 k = at + AHEAD * step; k < k_end; k += AHEAD * step) {
            float u[AHEAD][8];
            load(k, u);
#pragma unroll
            for (int j = 0; j < AHEAD; j++)
#pragma unroll
                for (int i = 0; i < 8; i++) sum = fmaf(u[j][i], u[j][i], sum);
        }
#pragma unroll
        for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
        __syncthreads();
        const float *mates = sums + row * (team / 32);
        sum = 0;
        if (shift < 4) {
#pragma unroll
            for (u32 i = 0; i < WARPS; i += 2) {
                if (i < team / 32) sum += mates[i] + mates[i + 1];
            }
        } else {
            sum = mates[0];
        }
        if (SPLIT > 1) {
            if (at == 0) sums[WARPS + row] = sum;
            cluster_arrive();
            cluster_wait();
            sum = 0;
#pragma unroll
            for (u32 i = 0; i < SPLIT; i++) sum += of_rank(sums + WARPS + row, i);
        }
        inverse = rsqrtf(__fdividef(sum, (float)p.k) + p.eps);
    }
    Row of = {row, rows, padded, here};
    auto stage_chunk = [&](u32 k, float (&v)[8], const float (&weight)[8]) {
        bool in = here && k < k_end;
        if (in && p.norm) {
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = v[i] * inverse * weight[i];
            if (p.x_dtype == BF16) {
#pragma unroll
                for (int i = 0; i < 8; i++) v[i] = from_bf16(to_bf16(v[i]));
            } else if (p.x_dtype == F16) {
#pragma unroll
                for (int i = 0; i < 8; i++) v[i] = from_f16(to_f16(v[i]));
            }
        }
        chunk(of, k, in, v);
    };
#pragma unroll 1
    for (u32 k0 = at; k0 < padded + at; k0 += AHEAD * step) {
        if (k0 != at) {
            load(k0, v);
            if (p.norm) load_norm(k0);
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) stage_chunk(k0 + j * step, v[j], weight[j]);
    }
}

// What a warp streams: units [from, to) of the block's, `per` of them at most. The block's groups are [first,
// first + count) and, with gate, as many from gate_at + first on; of each it has `units` units from `begin`
// on.
struct Run {
    u32 first, count, begin, units, per, from, to;
};
// a / b for a * b < 2^20: the quotient is never near enough to an integer for the rounding to matter.
__device__ __forceinline__ u32 divided(u32 a, float inverse_of_b) { return (u32)(((float)a + 0.5f) * inverse_of_b); }
template <int SPLIT, class G> __device__ __forceinline__ Run run_of(const G &p, u32 warp) {
    Run r;
    u32 b = blockIdx.x / SPLIT, rank = SPLIT > 1 ? rank_in_cluster() : 0;
    r.first = b * p.each + min(b, p.extra);
    r.count = p.each + (b < p.extra);
    r.begin = p.units * rank / SPLIT;
    r.units = p.units * (rank + 1) / SPLIT - r.begin;
    u32 total = (p.gate_at ? 2 : 1) * r.count * r.units;
    r.per = max((total + WARPS - 1) / WARPS, 1u);
    r.from = min(warp * r.per, total);
    r.to = min(r.from + r.per, total);
    return r;
}
// The source of a warp's ring: the next unit for this lane, how many are left, how many before the up rows
// begin, and with SPLIT how many of the group at hand.
struct Feed {
    const u8 *next;
    u32 left, straight, jump, group;
};
template <int SPLIT, class G> __device__ __forceinline__ Feed feed_of(const G &p, const Run &r, u32 lane) {
    Feed f;
    u32 split = r.count * r.units;
    f.jump = (p.gate_at - r.count) * p.units;
    f.left = r.to - r.from;
    f.straight = r.from < split ? split - r.from : ~0u;
    u32 v = SPLIT > 1 ? divided(r.from, __frcp_rn((float)r.units)) : 0;
    u64 at = (u64)r.first * p.units + r.begin + r.from + v * (p.units - r.units);
    f.group = r.units - (r.from - v * r.units);
    if (r.from >= split) at += f.jump;
    f.next = p.w + at * UNIT + lane * 16;
    return f;
}
// The next unit to the slot at `to`; nothing behind the end.
template <int SPLIT, class G> __device__ __forceinline__ void fetch(const G &p, const Run &r, Feed &f, u32 to, u32 lane) {
    // So many lanes at a time, for the fewest copies.
    constexpr u32 LANES = UNIT == 1152 ? 24 : 32, STEP = LANES * 16;
    if (f.left && lane < LANES) {
#pragma unroll
        for (u32 at = 0; at < UNIT; at += STEP)
            if (at + STEP <= UNIT || lane < (UNIT - at) / 16) copy16(to + at, f.next + at);
    }
    if (f.left) f.left--;
    f.next += UNIT;
    if (SPLIT > 1 && --f.group == 0) f.group = r.units, f.next += (p.units - r.units) * UNIT;
    if (--f.straight == 0) f.next += (u64)f.jump * UNIT;
    commit();
}

// MATES threads sum an element over the warps that had a share of its group.
template <int COLS, int MATES> __device__ __forceinline__ float summed(const Run &r, const float *part, u32 v, u32 e) {
    float inverse = __frcp_rn((float)r.per);
    u32 wa = divided(v * r.units, inverse), wb = divided((v + 1) * r.units - 1, inverse);
    float sum = 0;
#pragma unroll 1
    for (u32 w = wa + threadIdx.x % MATES; w <= wb; w += MATES) sum += part[(v + w) * (16 * COLS) + e];
#pragma unroll
    for (int d = 1; d < MATES; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
    return sum;
}
template <int SPLIT> __device__ __forceinline__ float over_ranks(const float *sums) {
    float sum = 0;
#pragma unroll
    for (u32 i = 0; i < SPLIT; i++) sum += of_rank(sums, i);
    return sum;
}
