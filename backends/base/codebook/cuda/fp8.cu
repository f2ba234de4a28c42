// The product for many rows of FP8 on FP8 tensor cores of sm_90a: y[m, n] = x[m, k] W[n, k]^T, both operands
// the bytes that are stored.
//
// wgmma with both operands in shared memory. Units hold lines of 64 of k as tensor cores take them, in an
// order of their own (layout.cuh), and x is rounded to bytes in the same order (codes.cu): nothing is
// decoded. FP8 tensor cores align what they add to the largest of it and keep 13 bits behind its first one; so
// sums of 128 of k, a slab, are taken out, multiplied by scales and added up in f32, while other warpgroups
// multiply. Blocks of a cluster have a part of k of one tile each and send each other their sums. With a gate,
// half of a warpgroup's lines are up rows. Definitions: TN, rows of x of a tile (64, 128 or 176); WGS,
// warpgroups that multiply, 64 rows of the weight each; SPLIT, blocks of a cluster; X_BLOCKS, 1 where x has
// scales for 128 of k.
//
// levels_fp8(x_map, y_map, lines_map, scales_map, scales, y, ldy, tokens, n, slabs, x_scales_ld, row_tiles, token_tiles, out,
//            aligned); also levels_fp8_gate
//   x_map: tensor map of bytes [tokens, 128 slabs], boxes of TN by 128, swizzled. y_map, if `aligned`: of y in bf16, boxes of 16
//   tokens by 64 (gates: 32), swizzled as wide; without a gate and with SPLIT of as many tokens as are kept. Of units, in 8-byte
//   words, lines_map: [slabs, 2, 1, row groups, 128], boxes of [1, 2, 1, 4, 128] (gates: [slabs, 2, 2, row groups / 2, 128],
//   [1, 2, 2, 2, 128]); scales_map: as much without the second axis, 16 for 128. scales: of x, f32[tokens], with X_BLOCKS
//   [slabs, x_scales_ld]; there is room for whole tiles. y: element type by out: 0 f32, 1 f32 to be added to, 2 bf16, 3 f16; ldy
//   in elements. aligned: y is bf16, its rows and its start are multiples of 16 bytes.
//   grid: at most as many blocks as are resident, with SPLIT a cluster a tile; block THREADS; dynamic shared memory as fp8.rs
//   says.
#include "convert.cuh"
#include "hopper.cuh"
#include "place.cuh"
#include "unit.cuh"

constexpr int PAIR = 1, THREADS = 128 * (WGS + 1);
constexpr int W_LINES = 64 * 128, W_SCALES = 4 * 128; // bytes of a slab for a warpgroup
constexpr int W_SLAB = WGS * W_LINES, X_SLAB = TN * 128,
              S_SLAB = WGS * W_SCALES + (X_BLOCKS ? (TN * 4 + 127) / 128 * 128 : 0);
constexpr int SLAB_BYTES = W_SLAB + X_SLAB + WGS * W_SCALES + (X_BLOCKS ? TN * 4 : 0);
constexpr int KEPT = TN / SPLIT; // tokens of a tile whose outputs a block writes
constexpr int PIECE = SPLIT > 1 ? 0 : 2048,
              PIECES = 2; // outputs of a warpgroup on their way to memory, PIECES times
constexpr int UPS = 16 * 32 * 4; // up sums of a warpgroup for 16 tokens
constexpr int RECEIVED = (SPLIT - 1) * 64 * WGS * KEPT * 4; // sums from the others of a cluster
constexpr int BESIDE = WGS * (PIECES * PIECE + UPS) + RECEIVED + 8;
constexpr int FITTING = (Q4_SHARED - BESIDE) / (W_SLAB + X_SLAB + S_SLAB + 16);
constexpr int STAGES = FITTING < 8 ? FITTING : 8;
#include "outputs.cuh"

// Rows of x by a slab.
DEVICE void copy_rows(u32 to, const Map *map, int k, int token, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
            "r"(to),
        "l"(map), "r"(k), "r"(token), "r"(barrier)
        : "memory");
}
// Lines of a warpgroup: of 64 of k, then of the next 64, those of the gate before up ones.
DEVICE void copy_lines(u32 to, const Map *map, int group, int slab, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {0, %2, 0, 0, %3}], [%4];" ::
            "r"(to),
        "l"(map), "r"(group), "r"(slab), "r"(barrier)
        : "memory");
}
// Their scales.
DEVICE void copy_scales(u32 to, const Map *map, int group, int slab, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {0, %2, 0, %3}], [%4];" ::
            "r"(to),
        "l"(map), "r"(group), "r"(slab), "r"(barrier)
        : "memory");
}
DEVICE void cluster_meets() {
    if (SPLIT > 1)
        asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;" ::
                         : "memory");
}

// Outputs of a warpgroup whose first two warps have sums of gate rows and the others those of the up rows, in
// the same places; 16 tokens at a time, for which up sums go through `ups`.
DEVICE void put_gated(float *d, const Target &to, u32 base, u32 ups, int token, int row, int lane, int w,
                      int me, int own, u32 &turn) {
    using P = Piece<true>;
    u32 mine = ups + (me & 63) * 16;
#pragma unroll
    for (int i = 0; i < KEPT / 2; i += 8) {
        float *s = d + i;
        u32 at = base + turn * 1024;
        if (me == 0) piece_left();
        if (w >= 2) {
#pragma unroll
            for (int j = 0; j < 8; j += 4)
                asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(mine + j * 256), "f"(s[j]),
                             "f"(s[j + 1]), "f"(s[j + 2]), "f"(s[j + 3])
                             : "memory");
        }
        meet(own, 128);
        if (w < 2) {
            float up[8];
#pragma unroll
            for (int j = 0; j < 8; j += 4)
                asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                             : "=f"(up[j]), "=f"(up[j + 1]), "=f"(up[j + 2]), "=f"(up[j + 3])
                             : "r"(mine + j * 256)
                             : "memory");
#pragma unroll
            for (int j = 0; j < 8; j++) s[j] = __fdividef(s[j], 1.f + __expf(-s[j])) * up[j];
            if (!to.aligned) {
                write_any<false, 16>(s, to, token + i * 2, row, lane, w);
            } else {
                int matrix = lane >> 3;
                store4(P::at(at, 8 * (matrix >> 1) + (lane & 7), 16 * w + (matrix & 1) * 8),
                       As<bf16>::pair(s[0], s[1]), As<bf16>::pair(s[2], s[3]), As<bf16>::pair(s[4], s[5]),
                       As<bf16>::pair(s[6], s[7]));
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            }
        }
        meet(own, 128);
        if (me == 0 && to.aligned) {
            copy_out(at, to.map, row, token + i * 2);
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
        turn = turn + 1 == PIECES ? 0 : turn + 1;
    }
}

// A block's slabs in order: those of k from `from` to `to`, of every tile from the first on, `workers` apart.
struct Slabs {
    int first, workers, row_tiles, token_tiles, from, to;
    u32 empty;
    // bring(stage, place, slab) where there is room.
    template <class Bring> __device__ __forceinline__ void each(Bring bring) const {
        u32 stage = 0, phase = 1;
        for (int tile = first; tile < row_tiles * token_tiles; tile += workers) {
            Place place = Place::of(tile, row_tiles, token_tiles);
            for (int slab = from; slab < to; slab++) {
                barrier_wait(empty + 8 * stage, phase);
                bring(stage, place, slab);
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
        }
    }
};

template <bool GATE>
DEVICE void multiply(const Map *x_map, const Map *y_map, const Map *lines_map, const Map *scales_map,
                     const float *scales, u64 y, u64 ldy, int tokens, int n, int slabs, int x_scales_ld,
                     int row_tiles, int token_tiles, int out, int aligned) {
    extern __shared__ __align__(1024) u8 room[];
    u32 ws = shared_address(room), xs = ws + STAGES * W_SLAB, store = xs + STAGES * X_SLAB;
    u32 ups = store + WGS * PIECES * PIECE, received = ups + WGS * UPS, ss = received + RECEIVED,
        full = ss + STAGES * S_SLAB, empty = full + 8 * STAGES, all_received = empty + 8 * STAGES;
    int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, part = blockIdx.x % SPLIT;
    int workers = gridDim.x / SPLIT, first = blockIdx.x / SPLIT, count = row_tiles * token_tiles;
    let_next_start();
    if (threadIdx.x == 128 * WGS) {
        if (ws & 1023) asm volatile("trap;");
        expect_map(lines_map), expect_map(scales_map), expect_map(x_map);
        for (int i = 0; i < STAGES; i++) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, 4 * WGS);
        barrier_init(all_received, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    cluster_meets();
    int from = slabs * part / SPLIT, to = slabs * (part + 1) / SPLIT;
    if (warp >= 4 * WGS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(WGS == 3 ? 32 : 40));
        // A warp each for lines of the weight, their scales and rows of x: asking takes time.
        int role = warp - 4 * WGS;
        Slabs slabs_of = {first, workers, row_tiles, token_tiles, from, to, empty};
        auto group_of = [&](int row_tile, int i) { return (row_tile * WGS + i) * (GATE ? 2 : 4); };
        if (lane) {
        } else if (role == 0) {
            if (SPLIT > 1) barrier_expect(all_received, RECEIVED);
            slabs_of.each([&](u32 stage, const Place &place, int slab) {
                u32 barrier = full + 8 * stage;
                barrier_expect(barrier, SLAB_BYTES);
#pragma unroll
                for (int i = 0; i < WGS; i++)
                    copy_lines(ws + stage * W_SLAB + i * W_LINES, lines_map, group_of(place.pair, i), slab,
                               barrier);
            });
        } else if (role == 1) {
            slabs_of.each([&](u32 stage, const Place &place, int slab) {
                u32 barrier = full + 8 * stage;
#pragma unroll
                for (int i = 0; i < WGS; i++)
                    copy_scales(ss + stage * S_SLAB + i * W_SCALES, scales_map, group_of(place.pair, i), slab,
                                barrier);
            });
        } else if (role == 2) {
            wait_for_previous();
            slabs_of.each([&](u32 stage, const Place &place, int slab) {
                u32 barrier = full + 8 * stage;
                copy_rows(xs + stage * X_SLAB, x_map, slab * 128, place.token, barrier);
                if (X_BLOCKS)
                    copy_bytes(ss + stage * S_SLAB + WGS * W_SCALES,
                               scales + (u64)slab * x_scales_ld + place.token, TN * 4, barrier);
            });
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WGS == 3 ? 160 : 232));
        int half = warp >> 2, w = warp & 3, me = threadIdx.x & 127, own = 2 + half, t = lane & 3;
        Target target = {y_map, y, ldy, tokens, GATE ? n / 2 : n, out, aligned};
        u32 base = store + half * PIECES * PIECE, turn = 0, stage = 0, phase = 0;
        u32 scale_at = ss + half * W_SCALES + w * 128 + (lane >> 2) * 16;
        wait_for_previous();
        for (int tile = first; tile < count; tile += workers) {
            Place place = Place::of(tile, row_tiles, token_tiles);
            int token = place.token;
            float sums[SUMS], d[SUMS];
#pragma unroll
            for (int i = 0; i < SUMS; i++) sums[i] = 0;
#pragma unroll 1
            for (int slab = from; slab < to; slab++) {
                barrier_wait(full + 8 * stage, phase);
                u64 a = narrow_tile_at(ws + stage * W_SLAB + half * W_LINES),
                    b = tile_at(xs + stage * X_SLAB);
                open_products();
                product_e4m3(d, a, b, 0);
                product_e4m3(d, a + 2, b + 2, 1);
                product_e4m3(d, a + (64 * 64 >> 4), b + 4, 1);
                product_e4m3(d, a + (64 * 64 >> 4) + 2, b + 6, 1);
                close_products();
                // Of rows g and g + 8.
                float2 scale;
                asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                             : "=f"(scale.x), "=f"(scale.y)
                             : "r"(scale_at + stage * S_SLAB)
                             : "memory");
                finish_products(d);
                if (X_BLOCKS) {
                    u32 from = ss + stage * S_SLAB + WGS * W_SCALES + t * 8;
#pragma unroll
                    for (int i = 0; i < SUMS; i += 4) {
                        float one, two;
                        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                                     : "=f"(one), "=f"(two)
                                     : "r"(from + i * 8)
                                     : "memory");
                        sums[i] = fmaf(d[i], scale.x * one, sums[i]),
                        sums[i + 1] = fmaf(d[i + 1], scale.x * two, sums[i + 1]);
                        sums[i + 2] = fmaf(d[i + 2], scale.y * one, sums[i + 2]),
                                 sums[i + 3] = fmaf(d[i + 3], scale.y * two, sums[i + 3]);
                    }
                }
                __syncwarp();
                barrier_arrive_if(empty + 8 * stage, lane == 0);
                if (!X_BLOCKS) {
#pragma unroll
                    for (int i = 0; i < SUMS; i++) sums[i] = fmaf(d[i], i & 2 ? scale.y : scale.x, sums[i]);
                }
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
#if SPLIT > 1
            exchange(sums, received, all_received, part, 0);
            meet(1, 128 * WGS); // x is not needed any more
            token += part * KEPT;
#endif
            if (!X_BLOCKS) {
#pragma unroll
                for (int i = 0; i < KEPT / 2; i += 4) {
                    float2 s = *(const float2 *)(scales + token + i * 2 + 2 * t);
                    sums[i] *= s.x, sums[i + 1] *= s.y, sums[i + 2] *= s.x, sums[i + 3] *= s.y;
                }
            }
            int row = (place.pair * WGS + half) * (GATE ? 32 : 64);
            // With SPLIT there is room for all in the ring of x.
            if (GATE)
                put_gated(sums, target, SPLIT > 1 ? xs + half * 2048 : base, ups + half * UPS, token, row,
                          lane, w, me, own, turn);
            else
                put_all<false>(sums, target, base, SPLIT > 1 ? xs + half * (KEPT * 128) : 0, token, row, lane,
                               w, me, own, turn);
        }
        if (me == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        __syncwarp();
    }
    cluster_meets(); // others may still be told of places here
}

#if SPLIT > 1
#define IN_CLUSTERS __cluster_dims__(SPLIT, 1, 1)
#else
#define IN_CLUSTERS
#endif
#define GEMM(NAME, GATE) \
    extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 1) \
        NAME(const __grid_constant__ Map x_map, const __grid_constant__ Map y_map, \
             const __grid_constant__ Map lines_map, const __grid_constant__ Map scales_map, \
             const float *scales, u64 y, u64 ldy, int tokens, int n, int slabs, int x_scales_ld, \
             int row_tiles, int token_tiles, int out, int aligned) { \
        multiply<GATE>(&x_map, &y_map, &lines_map, &scales_map, scales, y, ldy, tokens, n, slabs, \
                       x_scales_ld, row_tiles, token_tiles, out, aligned); \
    }
GEMM(levels_fp8, false)
GEMM(levels_fp8_gate, true)
