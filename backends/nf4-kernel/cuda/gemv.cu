// Products of packed NF4 weights with one to sixteen rows of x: y = x W^T, one node with its norm, gate and sum.
// Header-free: NVRTC and nvcc both take it, for compute capability 8.0 on. The design is that of the NVFP4 kernels.
//
// A block owns whole row groups, its warps equal runs of their units (16 rows x 128 k, 1152 contiguous bytes, see layout.cu).
// Every warp streams its run through a ring of its own in shared memory; the ring is filled before the kernel waits for the
// one before it. A byte of codes becomes two pairs of bf16 by one look-up of eight bytes: the leading and the trailing parts
// of both values. A fragments of mma.m16n8k16 come about without leaving their lane; columns of B are rows of x. A scale
// covers a tile of 64 k, so it is applied in f32 to the sums of a tile.
// Needs layout.cu and table.cu before it.
enum { F32 = 1, F16 = 2, BF16 = 3 };
enum { UNIT = 1152, THREADS = 512, WARPS = THREADS / 32, STAGES = 3, TABLE = TABLE_BYTES };
enum { CHUNKS = 5 }; // of 8 elements of x that a thread asks for at once, where there are several rows

struct Gemv {
    const u8 *w;
    const void *x;            // [m, k] of x_dtype; f32 with norm
    void *y;                  // [m, n]
    const float *norm;        // [k] or null
    u64 ldx, ldy;             // elements
    u32 m, n, k, units;       // units of a row group
    u32 each, extra;          // row groups (pairs of them with gate) of a block, and how many blocks have one more
    u32 gate_at;              // row group of the first up row, 0 without gate
    u32 x_dtype, y_dtype, accumulate;
    float eps;
    u32 unused;
};

__device__ __forceinline__ u32 shared_at(const void *p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy16(u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ __forceinline__ void await() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }
__device__ __forceinline__ void next_may_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
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
// Four 8 x 8 matrices; lane i has the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(u32 (&v)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at));
}
__device__ __forceinline__ u32 lds1(u32 at) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Eight codes to four pairs of leading parts (even places) and of trailing ones (odd); `copy` picks the lane's copy of the table.
__device__ __forceinline__ void decode(u32 w, u32 table, u32 copy, u32 (&a)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 at = table + ((i == 0 ? w << 7 : w >> (8 * i - 7)) & 0x7f80u | copy);
        asm("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(a[2 * i]), "=r"(a[2 * i + 1]) : "r"(at));
    }
}

// The same without the table: bytes of PARTS_OF are picked from registers. Slower alone, but by pipes that are idle while
// the table is read: a quarter of the codes so is 3 to 8 % faster than none.
__device__ __forceinline__ void select(u32 w, u32 (&a)[8]) {
    u32 m = w & 0x77777777u, s = (w >> 1 & 0x44444444u) | 0x32103210u;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        u32 p[4];
        p[0] = __byte_perm(__byte_perm(0x083570ac, 0x00fb7fc4, m), __byte_perm(0xe9aa5edb, 0xac794218, m), s);
        p[1] = __byte_perm(__byte_perm(0xbfbfbfbf, 0x00bdbebe, m), __byte_perm(0x3e3e3e3d, 0x3f3f3f3f, m), s);
        p[2] = __byte_perm(__byte_perm(0xd3268823, 0x008990ed, m), __byte_perm(0x2c391a52, 0x2321d0ec, m), s);
        p[3] = __byte_perm(__byte_perm(0xb93939bb, 0x00b739b8, m), __byte_perm(0xb9bab939, 0x3b3ab9b9, m), s);
        a[4 * h] = __byte_perm(p[0], p[1], 0x5140), a[4 * h + 2] = __byte_perm(p[0], p[1], 0x7362);
        a[4 * h + 1] = __byte_perm(p[2], p[3], 0x5140), a[4 * h + 3] = __byte_perm(p[2], p[3], 0x7362);
        m >>= 16, s >>= 16;
    }
}

__device__ __forceinline__ float from_bf16(u32 h) { return __uint_as_float(h << 16); }
__device__ __forceinline__ u32 to_bf16(float f) {
    u16 h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
__device__ __forceinline__ u32 to_bf16_pair(float lo, float hi) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    return d;
}
__device__ __forceinline__ float from_f16(u32 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)h));
    return f;
}
__device__ __forceinline__ u32 to_f16(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
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

// x of every row to shared memory, in as many bf16 parts as it takes: [part][row][stride]; a team of threads to a row. With one
// row the 16 of every 64 that a lane multiplies lie side by side (k = 8 i + 2 t + b at 16 t + 2 i + b), since only four lanes
// read; with more, matrices are loaded from rows in the order of k. Of k only what this block has, `count` units from `begin` on. Norm and rounding to the type of x on the way. x and norm are
// 16-byte aligned, row by row.
template <int PARTS, int COLS, int SPLIT, int AHEAD>
__device__ __forceinline__ void stage(const Gemv &p, u32 begin, u32 count, u16 *xs, float *sums, u32 stride) {
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
        if (k < padded && here) {
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                u32 h[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    h[i] = to_bf16_pair(v[2 * i], v[2 * i + 1]);
                    if (part + 1 < PARTS) {
                        v[2 * i] -= from_bf16(h[i] & 0xffff);
                        v[2 * i + 1] -= from_bf16(h[i] >> 16);
                    }
                }
                if (COLS > 1) {
                    *(uint4 *)(xs + (part * rows + row) * stride + k) = make_uint4(h[0], h[1], h[2], h[3]);
                    continue;
                }
                // Neighbouring slabs begin with different pairs, so that their stores meet in no bank.
                u32 turn = k >> 6 & 3, to = shared_at(xs) + ((part * rows + row) * stride + (k & ~63u)) * 2 + (k >> 3 & 7) * 4;
                if (turn & 1) {
                    u32 first = h[0];
                    h[0] = h[1], h[1] = h[2], h[2] = h[3], h[3] = first;
                }
#pragma unroll
                for (u32 i = 0; i < 4; i++)
                    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + ((i + turn) & 3) * 32), "r"(turn & 2 ? h[i ^ 2] : h[i]) : "memory");
            }
        }
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

// What a warp streams: units [from, to) of the block's, `per` of them at most. The block's groups are [first, first + count)
// and, with gate, as many from gate_at + first on; of each it has `units` units from `begin` on.
struct Run {
    u32 first, count, begin, units, per, from, to;
};
// a / b for a * b < 2^20: the quotient is never near enough to an integer for the rounding to matter.
__device__ __forceinline__ u32 divided(u32 a, float inverse_of_b) { return (u32)(((float)a + 0.5f) * inverse_of_b); }
template <int SPLIT> __device__ __forceinline__ Run run_of(const Gemv &p, u32 warp) {
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
// The source of a warp's ring: the next unit for this lane, how many are left, how many before the up rows begin, and with
// SPLIT how many of the group at hand.
struct Feed {
    const u8 *next;
    u32 left, straight, jump, group;
};
template <int SPLIT> __device__ __forceinline__ Feed feed_of(const Gemv &p, const Run &r, u32 lane) {
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
// The next unit to the slot at `to`, by 24 lanes; nothing behind the end.
template <int SPLIT> __device__ __forceinline__ void fetch(const Gemv &p, const Run &r, Feed &f, u32 to, u32 lane) {
    if (f.left && lane < 24) {
        copy16(to, f.next);
        copy16(to + 384, f.next + 384);
        copy16(to + 768, f.next + 768);
    }
    if (f.left) f.left--;
    f.next += UNIT;
    if (SPLIT > 1 && --f.group == 0) f.group = r.units, f.next += (p.units - r.units) * UNIT;
    if (--f.straight == 0) f.next += (u64)f.jump * UNIT;
    commit();
}

// The i-th element of y of the block; rows vary fastest, as they do in y.
template <int COLS> struct Element {
    u32 row, col, v;
    bool there;
    u64 at;
    __device__ __forceinline__ Element(const Gemv &p, const Run &r, u32 i) {
        row = i % 16, col = i / 16 % COLS, v = min(i / (16 * COLS), r.count - 1);
        u32 place = (r.first + v) * 16 + row;
        there = i < r.count * (16 * COLS) && col < p.m && place < (p.gate_at ? p.n / 2 : p.n);
        at = col * p.ldy + place;
    }
};
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
// `whole`: room for the block's sums, with SPLIT.
template <int COLS, int MATES, int SPLIT>
__device__ __forceinline__ void finish(const Gemv &p, const Run &r, const float *part, float *whole, float old) {
    u32 all = r.count * 16 * COLS, start = 0, step = THREADS / MATES;
    if (SPLIT > 1) {
        u32 both = p.gate_at ? 2 * all : all;
#pragma unroll 1
        for (u32 first = 0; first < both; first += step) {
            u32 i = min(first + threadIdx.x / MATES, both - 1);
            float sum = r.units ? summed<COLS, MATES>(r, part, i / (16 * COLS), i % (16 * COLS)) : 0.0f;
            if (threadIdx.x % MATES == 0) whole[i] = sum;
        }
        cluster_arrive();
        cluster_wait();
        step = THREADS;
        start = rank_in_cluster() * step;
    }
#pragma unroll 1
    for (u32 first = start; first < all; first += step * SPLIT) {
        Element<COLS> y(p, r, first + threadIdx.x / (SPLIT > 1 ? 1 : MATES));
        u32 e = y.row * COLS + y.col;
        float sum = SPLIT > 1 ? over_ranks<SPLIT>(whole + y.v * (16 * COLS) + e) : summed<COLS, MATES>(r, part, y.v, e);
        sum *= DOWN;
        if (p.gate_at) {
            u32 v = y.v + r.count;
            float up = SPLIT > 1 ? over_ranks<SPLIT>(whole + v * (16 * COLS) + e) : summed<COLS, MATES>(r, part, v, e);
            sum = silu(sum) * (up * DOWN);
        }
        if (!y.there || (SPLIT == 1 && threadIdx.x % MATES)) continue;
        if (p.y_dtype == F32) {
            float *to = (float *)p.y + y.at;
            *to = p.accumulate ? (first == start ? old : *to) + sum : sum;
        } else {
            ((u16 *)p.y)[y.at] = p.y_dtype == BF16 ? to_bf16(sum) : to_f16(sum);
        }
    }
    if (SPLIT > 1) {
        cluster_arrive(); // the others may still be reading this block's sums
        cluster_wait();
    }
}
// What y holds where this thread will add first.
template <int COLS, int MATES, int SPLIT> __device__ __forceinline__ float old_y(const Gemv &p, const Run &r) {
    if (!p.accumulate) return 0.0f;
    Element<COLS> y(p, r, SPLIT > 1 ? rank_in_cluster() * THREADS + threadIdx.x : threadIdx.x / MATES);
    return y.there ? ((const float *)p.y)[y.at] : 0.0f;
}
// Shared memory: the table, rings, then x, sums of the norm, partial sums, whole sums (SPLIT). COLS: 1, or 8 a tile.
template <int PARTS, int COLS, int SPLIT> __device__ __forceinline__ void multiply(const Gemv &p) {
    extern __shared__ __align__(128) u8 memory[];
    enum { TILES = (COLS + 7) / 8 };
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    next_may_start();
    Run r = run_of<SPLIT>(p, warp);
    u32 slice = (p.units + SPLIT - 1) / SPLIT, stride = slice * 128 + 8, groups = p.gate_at ? 2 * r.count : r.count;
    u32 rows = p.m <= 1 ? 1 : p.m <= 2 ? 2 : p.m <= 4 ? 4 : p.m <= 8 ? 8 : 16;
    u16 *xs = (u16 *)(memory + TABLE + WARPS * STAGES * UNIT);
    float *sums = (float *)(xs + PARTS * rows * stride);
    float *part = sums + 2 * WARPS, *whole = part + (groups + 1 + WARPS) * 16 * COLS;

    Feed f = feed_of<SPLIT>(p, r, lane);
    u32 table = shared_at(memory), ring = table + TABLE + warp * (STAGES * UNIT) + lane * 16, slot = ring, copy = (lane & 15) * 8;
#pragma unroll 1
    for (u32 i = 0; i < STAGES; i++) fetch<SPLIT>(p, r, f, ring + i * UNIT, lane);
    write_table(table, threadIdx.x, THREADS);
    u32 t = lane % 4, n = lane / 4;
    stage<PARTS, COLS, SPLIT, COLS == 1 ? 1 : CHUNKS>(p, r.begin, r.units, xs, sums, stride);
    __syncthreads(); // x and the table are there
    float old = old_y<COLS, COLS == 1 ? 4 : 1, SPLIT>(p, r);

    u32 v = divided(r.from, __frcp_rn((float)r.units)), at = r.from - v * r.units, left = r.to - r.from;
    float *to = part + (v + warp) * (16 * COLS) + n * COLS + (COLS == 1 ? 0 : 2 * t);
    u32 b[TILES][4]; // of one row of x only the first column is not zero
#pragma unroll
    for (int j = 0; j < TILES; j++) b[j][0] = b[j][1] = b[j][2] = b[j][3] = 0;
    while (left) {
        u32 run = min(left, r.units - at);
        // Columns without a row of x repeat the last one that has; they are never stored.
        u32 xat = shared_at(xs) + at * 256;
        if (COLS == 1) xat += t * 32;
        else xat += min(lane & 7, rows - 1) * stride * 2 + lane / 8 * 16;
        left -= run;
        at = 0;
        float acc[TILES][4];
#pragma unroll
        for (int j = 0; j < TILES; j++) acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0;
#pragma unroll 1
        do {
            await<STAGES - 1>();
            __syncwarp();
            u32 scale[4], c[2][4]; // scales of rows n and n + 8 in the first tile, then in the second
            lds4(scale, slot + 1024 - lane * 16 + n * 16);
            lds4(c[0], slot);
            lds4(c[1], slot + 512);
            __syncwarp(); // every lane has read the slot
            fetch<SPLIT>(p, r, f, slot, lane);
            slot = slot + UNIT == ring + STAGES * UNIT ? ring : slot + UNIT;
#pragma unroll
            for (int s = 0; s < 2; s++) {
                // Of the sixteen rows of A, eight are leading parts and eight the trailing parts of the same rows of the weight: what
                // a look-up returns then lies as the product wants it.
                float upper[TILES][4], lower[TILES][4];
#pragma unroll
                for (int j = 0; j < TILES; j++)
#pragma unroll
                    for (int i = 0; i < 4; i++) upper[j][i] = lower[j][i] = 0;
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    u32 a0[8], a1[8];
                    if (COLS <= 8 && PARTS == 1 && s == h) select(c[s][h], a0);
                    else decode(c[s][h], table, copy, a0);
                    decode(c[s][2 + h], table, copy, a1);
#pragma unroll
                    for (int q = 0; q < PARTS; q++) {
#pragma unroll
                        for (int j = 0; j < TILES; j++) {
                            u32 from = xat + (q * rows + 8 * j) * stride * 2 + s * 128;
                            if (COLS > 1) load_matrices(b[j], from + h * 64);
                            else if (n == 0) lds4(b[j], from + h * 16);
                            mma(upper[j], a0[0], a0[1], a0[2], a0[3], b[j][0], b[j][1]);
                            mma(lower[j], a1[0], a1[1], a1[2], a1[3], b[j][0], b[j][1]);
                            mma(upper[j], a0[4], a0[5], a0[6], a0[7], b[j][2], b[j][3]);
                            mma(lower[j], a1[4], a1[5], a1[6], a1[7], b[j][2], b[j][3]);
                        }
                    }
                }
#pragma unroll
                for (int j = 0; j < TILES; j++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        acc[j][i] = fmaf(upper[j][i] + upper[j][2 + i], __uint_as_float(scale[2 * s]), acc[j][i]);
                        acc[j][2 + i] = fmaf(lower[j][i] + lower[j][2 + i], __uint_as_float(scale[2 * s + 1]), acc[j][2 + i]);
                    }
            }
            xat += 256;
        } while (--run);
        if (COLS == 1) {
            if (t == 0) to[0] = acc[0][0], to[8] = acc[0][2];
        } else {
#pragma unroll
            for (int j = 0; j < TILES; j++) {
                to[8 * j] = acc[j][0], to[8 * j + 1] = acc[j][1];
                to[8 * COLS + 8 * j] = acc[j][2], to[8 * COLS + 8 * j + 1] = acc[j][3];
            }
        }
        to += 16 * COLS;
    }
    __syncthreads();
    finish<COLS, COLS == 1 ? 4 : 1, SPLIT>(p, r, part, whole, old);
}

#if __CUDA_ARCH__ >= 900
#define CLUSTER(n) __cluster_dims__(n, 1, 1)
#else
#define CLUSTER(n)
#endif
#define GEMV(name, PARTS) \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name##_one(const __grid_constant__ Gemv p) { multiply<PARTS, 1, 1>(p); } \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name##_few(const __grid_constant__ Gemv p) { multiply<PARTS, 8, 1>(p); } \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name##_wide(const __grid_constant__ Gemv p) { multiply<PARTS, 16, 1>(p); } \
    extern "C" __global__ void CLUSTER(4) __launch_bounds__(THREADS, 1) name##_few_split(const __grid_constant__ Gemv p) { multiply<PARTS, 8, 4>(p); } \
    extern "C" __global__ void CLUSTER(4) __launch_bounds__(THREADS, 1) name##_wide_split(const __grid_constant__ Gemv p) { multiply<PARTS, 16, 4>(p); }
GEMV(nf4_gemv_bf16, 1)
GEMV(nf4_gemv_f16, 2)
GEMV(nf4_gemv_f32, 3)

// Rows of elements of `size` bytes, `ld` apart, to rows that lie close together.
extern "C" __global__ void nf4_gemv_align(const u8 *from, u64 ld, u32 k, u32 size, u8 *to) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    u64 at = blockIdx.y * ld + i, out = (u64)blockIdx.y * k + i;
    next_may_start();
    wait_for_previous();
    if (i >= k) return;
    if (size == 4) ((u32 *)to)[out] = ((const u32 *)from)[at];
    else ((u16 *)to)[out] = ((const u16 *)from)[at];
}
