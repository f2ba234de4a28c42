// Products of packed weights with one to sixteen rows of x: y = x W^T, one node with its norm, gate and sum.
// For compute capability 8.0 on. The design is that of the NVFP4 kernels. One row of bf16 is for row.cu.
//
// A block owns whole row groups, its warps equal runs of their units (16 rows x 128 k, contiguous bytes, see
// layout.cuh). Every warp streams its run through a ring of its own in shared memory; the ring is filled
// before the kernel waits for the one before it. A byte of codes becomes two pairs of bf16 by one look-up of
// eight bytes: the leading and the trailing parts of both values; four bytes of E4M3 become two pairs by
// shifts. A fragments of mma.m16n8k16 come about
// without leaving their lane; columns of B are rows of x. A scale covers a tile of 64 k, so it is applied in
// f32 to the sums of a tile.
#include "few.cuh"
#include "levels.cuh"

enum { STAGES = 3, TABLE = TABLE_BYTES };

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
    float fixed;              // of row.cu, where it rounds x: the scale of x, or how it comes about
};

// Four 8 x 8 matrices; lane i has the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(u32 (&v)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at));
}
// Eight codes to four pairs of bf16, of NF4 of leading parts (even places) and of trailing ones (odd); `copy`
// is that of the lane.
#if LEVELS == E4M3
__device__ __forceinline__ void decode(const u32 *w, u32, u32, u32 (&a)[4]) { pairs_of(w[0], a[0], a[1]), pairs_of(w[1], a[2], a[3]); }
#else
__device__ __forceinline__ u32 entry_at(u32 w, int i, u32 table, u32 copy) {
    return table + ((i == 0 ? w << 7 : w >> (8 * i - 7)) & 0x7f80u | copy);
}
__device__ __forceinline__ void decode(const u32 *w, u32 table, u32 copy, u32 (&a)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        asm("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(a[2 * i]), "=r"(a[2 * i + 1]) : "r"(entry_at(*w, i, table, copy)));
}
__device__ __forceinline__ void decode(const u32 *w, u32 table, u32 copy, u32 (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) asm("ld.shared.u32 %0, [%1];" : "=r"(a[i]) : "r"(entry_at(*w, i, table, copy)));
}
#endif

#if LEVELS == NF4
// The same without the table: bytes of PARTS_OF are picked from registers. Slower alone, but by pipes that
// are idle while the table is read: a quarter of the codes so is 3 to 8 % faster than none.
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
#endif

// x of every row to shared memory, in as many bf16 parts as it takes: [part][row][stride]; a team of threads
// to a row. With one row the 16 of every 64 that a lane multiplies lie side by side (k = 8 i + 2 t + b at 16
// t + 2 i + b), since only four lanes read; with more, matrices are loaded from rows in the order of k.
template <int PARTS, int COLS, int SPLIT>
__device__ __forceinline__ void stage(const Gemv &p, u32 begin, u32 count, u16 *xs, float *sums, u32 stride) {
    auto chunk = [&](const Row &of, u32 k, bool, float (&v)[8]) {
        if (k >= of.padded || !of.here) return;
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            u32 h[4];
            take_part(v, part + 1 == PARTS, h);
            u32 line = (part * of.rows + of.row) * stride;
            if (COLS > 1) {
                *(uint4 *)(xs + line + k) = make_uint4(h[0], h[1], h[2], h[3]);
                continue;
            }
            // Neighbouring slabs begin with different pairs, so that their stores meet in no bank.
            u32 turn = k >> 6 & 3, to = shared_at(xs) + (line + (k & ~63u)) * 2 + (k >> 3 & 7) * 4;
            if (turn & 1) {
                u32 first = h[0];
                h[0] = h[1], h[1] = h[2], h[2] = h[3], h[3] = first;
            }
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + ((i + turn) & 3) * 32), "r"(turn & 2 ? h[i ^ 2] : h[i]) : "memory");
        }
    };
    stage_rows<SPLIT, COLS == 1 ? 1 : CHUNKS>(p, begin, count, sums, [] {}, chunk);
}

// The i-th element of y of the block; rows vary fastest, as they do in y.
template <int COLS> struct Element {
    u32 row, col, v;
    bool there;
    u64 at;
    template <class R> __device__ __forceinline__ Element(const Gemv &p, const R &r, u32 i) {
        row = i % 16, col = i / 16 % COLS, v = min(i / (16 * COLS), r.count - 1);
        u32 place = (r.first + v) * 16 + row;
        there = i < r.count * (16 * COLS) && col < p.m && place < (p.gate_at ? p.n / 2 : p.n);
        at = col * p.ldy + place;
    }
};
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
// Shared memory: the table, rings, then x, sums of the norm, partial sums, whole sums (SPLIT). COLS: 1, or 8
// a tile.
template <int PARTS, int COLS, int SPLIT> __device__ __forceinline__ void multiply(const Gemv &p) {
    extern __shared__ __align__(128) u8 memory[];
    enum { TILES = (COLS + 7) / 8 };
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    let_next_start();
    Run r = run_of<SPLIT>(p, warp);
    u32 slice = (p.units + SPLIT - 1) / SPLIT, stride = slice * 128 + 8, groups = p.gate_at ? 2 * r.count : r.count;
    u32 rows = p.m <= 1 ? 1 : p.m <= 2 ? 2 : p.m <= 4 ? 4 : p.m <= 8 ? 8 : 16;
    u16 *xs = (u16 *)(memory + TABLE + WARPS * STAGES * UNIT);
    float *sums = (float *)(xs + PARTS * rows * stride);
    float *part = sums + 2 * WARPS, *whole = part + (groups + 1 + WARPS) * 16 * COLS;

    Feed f = feed_of<SPLIT>(p, r, lane);
    u32 table = shared_at(memory), ring = table + TABLE + warp * (STAGES * UNIT) + lane * 16, slot = ring, copy = copy_of(lane);
#pragma unroll 1
    for (u32 i = 0; i < STAGES; i++) fetch<SPLIT>(p, r, f, ring + i * UNIT, lane);
    write_table(table, threadIdx.x, THREADS);
    u32 t = lane % 4, n = lane / 4;
    stage<PARTS, COLS, SPLIT>(p, r.begin, r.units, xs, sums, stride);
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
            u32 scale[4], words[2 * OF_EIGHT][4]; // scales of rows n and n + 8 in the first tile, then in the second
            lds4(scale, slot + SCALES_AT - lane * 16 + n * 16);
#pragma unroll
            for (int i = 0; i < 2 * OF_EIGHT; i++) lds4(words[i], slot - lane * 16 + place_of(lane) + 512 * i);
            __syncwarp(); // every lane has read the slot
            fetch<SPLIT>(p, r, f, slot, lane);
            slot = slot + UNIT == ring + STAGES * UNIT ? ring : slot + UNIT;
#pragma unroll
            for (int s = 0; s < 2; s++) {
#if LEVEL_PARTS == 2
                // Of the sixteen rows of A, eight are leading parts and eight the trailing parts of the same
                // rows of the weight: what a look-up returns then lies as the product wants it.
                float upper[TILES][4], lower[TILES][4];
#pragma unroll
                for (int j = 0; j < TILES; j++)
#pragma unroll
                    for (int i = 0; i < 4; i++) upper[j][i] = lower[j][i] = 0;
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    u32 a0[8], a1[8];
                    if (COLS <= 8 && PARTS == 1 && s == h) select(words[s][h], a0);
                    else decode(&words[s][h], table, copy, a0);
                    decode(&words[s][2 + h], table, copy, a1);
#pragma unroll
                    for (int q = 0; q < PARTS; q++) {
#pragma unroll
                        for (int j = 0; j < TILES; j++) {
                            u32 from = xat + (q * rows + 8 * j) * stride * 2 + s * 128;
                            if (COLS > 1) load_matrices(b[j], from + h * 64);
                            else if (n == 0) lds4(b[j], from + h * 16);
                            As<bf16>::mma(upper[j], a0[0], a0[1], a0[2], a0[3], b[j][0], b[j][1]);
                            As<bf16>::mma(lower[j], a1[0], a1[1], a1[2], a1[3], b[j][0], b[j][1]);
                            As<bf16>::mma(upper[j], a0[4], a0[5], a0[6], a0[7], b[j][2], b[j][3]);
                            As<bf16>::mma(lower[j], a1[4], a1[5], a1[6], a1[7], b[j][2], b[j][3]);
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
#else
                float sums[TILES][4];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    u32 a0[4], a1[4]; // of rows n and n + 8
                    // Of row n, then of row n + 8, two times eight codes.
                    decode(&words[OF_EIGHT * s][OF_EIGHT * h], table, copy, a0);
                    decode(&words[OF_EIGHT * s + OF_EIGHT - 1][OF_EIGHT == 2 ? 2 * h : 2 + h], table, copy, a1);
                    if (ZEROS) {
#pragma unroll
                        for (int i = 0; i < 4; i++) a0[i] = less_zero(a0[i], scale[2 * s]), a1[i] = less_zero(a1[i], scale[2 * s + 1]);
                    }
                    if (HALVES || h == 0) {
#pragma unroll
                        for (int j = 0; j < TILES; j++) sums[j][0] = sums[j][1] = sums[j][2] = sums[j][3] = 0;
                    }
#pragma unroll
                    for (int q = 0; q < PARTS; q++) {
#pragma unroll
                        for (int j = 0; j < TILES; j++) {
                            u32 from = xat + (q * rows + 8 * j) * stride * 2 + s * 128;
                            if (COLS > 1) load_matrices(b[j], from + h * 64);
                            else if (n == 0) lds4(b[j], from + h * 16);
                            As<bf16>::mma(sums[j], a0[0], a1[0], a0[1], a1[1], b[j][0], b[j][1]);
                            As<bf16>::mma(sums[j], a0[2], a1[2], a0[3], a1[3], b[j][2], b[j][3]);
                        }
                    }
                    if (!HALVES && h == 0) continue;
                    float upper = scale_in(scale[2 * s], h), lower = scale_in(scale[2 * s + 1], h);
#pragma unroll
                    for (int j = 0; j < TILES; j++)
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            acc[j][i] = fmaf(sums[j][i], upper, acc[j][i]);
                            acc[j][2 + i] = fmaf(sums[j][2 + i], lower, acc[j][2 + i]);
                        }
                }
#endif
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

// With row.cu behind it, this text only lends it what stands above.
#ifndef Q4_ROW
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
GEMV(levels_gemv_bf16, 1)
GEMV(levels_gemv_f16, 2)
GEMV(levels_gemv_f32, 3)

// Rows of elements of `size` bytes, `ld` apart, to rows that lie close together.
extern "C" __global__ void levels_gemv_align(const u8 *from, u64 ld, u32 k, u32 size, u8 *to) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    u64 at = blockIdx.y * ld + i, out = (u64)blockIdx.y * k + i;
    let_next_start();
    wait_for_previous();
    if (i >= k) return;
    if (size == 4) ((u32 *)to)[out] = ((const u32 *)from)[at];
    else ((u16 *)to)[out] = ((const u16 *)from)[at];
}
#endif
