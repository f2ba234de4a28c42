// The product for many rows (prefill) on sm_90a: y[m, n] = x[m, k] W[n, k]^T with packed weights.
//
// wgmma with the weights as the first operand. A byte of codes becomes a pair of bf16 by one look-up in
// shared memory, of NF4 two, the leading and the trailing parts of two values; levels.cuh says why two
// parts are exact enough; bytes of E4M3 become pairs by shifts. The sums of a tile of 64 k have one scale a
// row: they come out apart and are added up in f32, times the scale, while the other warpgroup's products
// run. Scales of E2M1 are powers of two, which go into the operands. One warp brings weights and x into
// shared memory; x is in tiles (order.cu). Definition: TN, tokens of a tile (32, 64, 128 or 256).
//
// gemm(units, x, y, ldy, tokens, n, row_units, parts, split_tiles, row_tiles, token_tiles, partial, flags, out, aligned);
// also gemm_gate
//   units: packed weights, `row_units` units (16 rows x 128 k) a row group. x: as `order_*` wrote it, `parts`
//   summands side by side in k. y: element type by out: 0 f32, 1 f32 to be added to, 2 bf16, 3 f16; ldy in elements.
//   aligned: rows of y, their number and its start are multiples of 16 bytes.
//   row_tiles = ceil(groups / 8), with gates ceil(groups / 2 / 4); token_tiles = ceil(tokens / TN).
//   Tiles below split_tiles are cut into gridDim equal shares of k (stream-K), the others are dealt whole.
//   partial: f32[gridDim][128 * TN]; flags: u32[2 gridDim], zero before (`order_*` clears them) and after every launch.
//   grid min(multiprocessors, work), every block resident; block 384 (two consuming warpgroups, one that copies);
//   dynamic shared memory SHARED bytes.
#include "levels.cuh"
#include "convert.cuh"
#include "deal.cuh"
#include "hopper.cuh"
#include "unit.cuh"

DEVICE void barrier_arrive(u32 at) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at) : "memory"); }

constexpr int GROUPS = 8;                    // row groups of a tile
constexpr int SLAB = TN * 128;               // x of a tile by 64 of k
constexpr int STAGE = 2 * SLAB, WEIGHTS = GROUPS * UNIT;
constexpr int TABLE = TABLE_BYTES;
constexpr int PIECE = 9216;                  // outputs of one warpgroup on their way to memory
constexpr int ROOM = Q4_SHARED - TABLE - 2 * PIECE - 256;
static_assert(TN <= 128 || TN == 256, "a tile of x has whole blocks");
constexpr int STAGES = ROOM / (STAGE + WEIGHTS) < 10 ? ROOM / (STAGE + WEIGHTS) : 10;
constexpr int SHARED = STAGES * (STAGE + WEIGHTS) + TABLE + 2 * PIECE + 16 * STAGES;
constexpr int TOKENS16 = TN < 64 ? TN : 64;  // sent off at once, of 16 bits
constexpr int TOKENS32 = 32;                 // of 32 bits

using Plan = Shares<1, u64>;

// The operands of a slab: leading and trailing parts of four m64k16.
struct Operands {
    u32 lead[4][4];
#if LEVEL_PARTS == 2
    u32 trail[4][4];
#endif
    u32 scale[2]; // words of rows g and g + 8
};
// Scales of NF4 in the operands: with 256 tokens there are no registers for sums beside sums. They are cut in
// two then, within 2^-17 of the weight, and the tensor cores add up all of k.
#define FOLDED (LEVELS == E2M1 || TN == 256)
static_assert(!FOLDED || LEVELS == NF4 || LEVELS == E2M1, "products with scales of their own are not exact in bf16");
static_assert(!HALVES || FOLDED, "a sum has one scale");
// Eight codes of a row to four pairs: registers `R` and `R` + 2 of the products `J` and `J` + 1.
template <int J, int R> DEVICE void look_up(Operands &o, const u32 *w, u32 table, u32 copy) {
#if LEVELS == E4M3
    pairs_of(w[0], o.lead[J][R], o.lead[J][R + 2]), pairs_of(w[1], o.lead[J + 1][R], o.lead[J + 1][R + 2]);
#else
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 at = table + ((i == 0 ? *w << 7 : *w >> (8 * i - 7)) & 0x7f80u | copy);
        u32 &lead = o.lead[J + i / 2][R + i % 2 * 2];
#if LEVEL_PARTS == 2
        u32 &trail = o.trail[J + i / 2][R + i % 2 * 2];
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(lead), "=r"(trail) : "r"(at));
        if (FOLDED) {
            float scale = __uint_as_float(o.scale[R]);
            float low = __uint_as_float(lead) * scale, high = __uint_as_float(trail) * scale;
            lead = As<bf16>::pair(low, high);
            trail = As<bf16>::pair(low - __uint_as_float(lead << 16), high - __uint_as_float(lead & 0xffff0000u));
        }
#else
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(lead) : "r"(at));
        if (FOLDED) asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(lead) : "r"(__byte_perm(o.scale[R], 0, J ? 0x3232 : 0x1010)));
        if (ZEROS) lead = less_zero(lead, o.scale[R]);
#endif
    }
#endif
}
// Codes and scales of tile `s` of the unit at `unit`.
DEVICE void fetch(Operands &o, u32 (&c)[4 * OF_EIGHT], u32 unit, int s, int lane) {
#pragma unroll
    for (int i = 0; i < 4 * OF_EIGHT; i += 4)
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(c[i]), "=r"(c[i + 1]), "=r"(c[i + 2]), "=r"(c[i + 3]) : "r"(unit + s * TILE_CODES + i * 128 + place_of(lane)) : "memory");
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(o.scale[0]), "=r"(o.scale[1]) : "r"(unit + SCALES_AT + lane / 4 * 16 + s * 8) : "memory");
}
// The `I`th quarter of the operands.
template <int I> DEVICE void decode(Operands &o, const u32 (&c)[4 * OF_EIGHT], u32 table, int lane) {
    look_up<I / 2 * 2, I % 2>(o, c + (I / 2 + I % 2 * 2) * OF_EIGHT, table, copy_of(lane));
}

enum { OUT_F32, OUT_ADD, OUT_BF16, OUT_F16 };

// Where a tile of outputs goes.
struct Target {
    u64 y, ldy;
    int tokens, rows, out, aligned; // rows: columns of y
};

// `count` tokens from `token` on, 64 rows from `row` on, lie in shared memory `pitch` bytes a token.
DEVICE void write_out(const Target &to, u32 buffer, int pitch, int token, int count, int row, int me, int barrier) {
    int size = to.out >= OUT_BF16 ? 2 : 4;
    count = min(count, to.tokens - token);
    meet(barrier, 128);
    int width = min(64, to.rows - row);
    if (to.aligned) {
        int each = 16 / size, line = 64 / each; // pieces of a token
        for (int e = me; e < count * line; e += 128) {
            int i = e / line, r = e % line * each;
            if (r >= width) continue;
            uint4 v;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(buffer + i * pitch + r * size));
            uint4 *at = (uint4 *)(to.y + ((u64)(token + i) * to.ldy + row + r) * size);
            if (to.out == OUT_ADD) {
                float4 old = *(const float4 *)at;
                *(float4 *)at = make_float4(old.x + __uint_as_float(v.x), old.y + __uint_as_float(v.y), old.z + __uint_as_float(v.z), old.w + __uint_as_float(v.w));
            } else {
                *at = v;
            }
        }
    } else {
        for (int e = me; e < count * 64; e += 128) {
            int i = e / 64, r = e % 64;
            if (r >= width) continue;
            u64 at = (u64)(token + i) * to.ldy + row + r;
            u32 from = buffer + i * pitch + r * size;
            if (size == 2) {
                u16 v;
                asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from));
                ((u16 *)to.y)[at] = v;
            } else {
                float v;
                asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(from));
                if (to.out == OUT_ADD) v += ((float *)to.y)[at];
                ((float *)to.y)[at] = v;
            }
        }
    }
    meet(barrier, 128);
}

// Sums of one thread to shared memory: `line` is its warp's first row. COUNT tokens from `first` on.
template <int COUNT> DEVICE void put16(const float *d, int first, u32 buffer, int pitch, int line, int lane, bool half) {
#pragma unroll
    for (int n = 0; n < COUNT / 8; n += 2) {
        const float *s = d + (first / 8 + n) * 4;
        u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float low = s[(i >> 1) * 4 + (i & 1) * 2], high = s[(i >> 1) * 4 + (i & 1) * 2 + 1];
            v[i] = half ? As<f16>::pair(low, high) : As<bf16>::pair(low, high);
        }
        int matrix = lane >> 3;
        store4(buffer + (8 * (n + (matrix >> 1)) + (lane & 7)) * pitch + (line + (matrix & 1) * 8) * 2, v[0], v[1], v[2], v[3]);
    }
}
template <int COUNT> DEVICE void put32(const float *d, int first, u32 buffer, int pitch, int line, int g, int t) {
#pragma unroll
    for (int n = 0; n < COUNT / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(buffer + (8 * n + 2 * t + (i & 1)) * pitch + (line + g + (i >> 1) * 8) * 4),
                         "f"(d[(first / 8 + n) * 4 + i])
                         : "memory");
}

template <bool GATE>
DEVICE void multiply(
    const u8 *units, const u8 *x, u64 y, u64 ldy, int tokens, int n, int row_units, int parts, int split_tiles,
    int row_tiles, int token_tiles, float *partial, u32 *flags, int out, int aligned) {
    extern __shared__ u8 room[];
    u32 ring = shared_address(room), weights = ring + STAGES * STAGE, table = weights + STAGES * WEIGHTS, buffer = table + TABLE;
    u32 full = buffer + 2 * PIECE, empty = full + 8 * STAGES;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        if (ring & 1023) asm volatile("trap;");
        for (int i = 0; i < STAGES; i++) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
#if LEVELS == NF4 && FOLDED
    write_values(table, threadIdx.x, 384);
#else
    write_table(table, threadIdx.x, 384);
#endif
    __syncthreads();
    let_next_start();
    int all = row_units * parts, groups = (n + 15) / 16;
    Plan plan = Plan::start(all, split_tiles, row_tiles * token_tiles);
    Work work;
    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp > 8) return;
        constexpr u32 BYTES = STAGE + WEIGHTS;
        // Eight lanes bring weights, one brings x.
        auto bring_weights = [&](int tile, int u, u32 stage) {
            if (lane == 0) barrier_expect(full + 8 * stage, BYTES);
            __syncwarp();
            if (lane >= GROUPS) return;
            int row_tile = tile / token_tiles;
            int group = GATE ? lane / 4 * (groups / 2) + min(row_tile * 4 + lane % 4, groups / 2 - 1) : min(row_tile * 8 + lane, groups - 1);
            copy_bytes(weights + stage * WEIGHTS + lane * UNIT, units + ((u64)group * row_units + u % row_units) * UNIT, UNIT, full + 8 * stage);
        };
        auto bring_x = [&](int tile, int u, u32 stage) {
            constexpr int BLOCKS = TN > 128 ? TN / 128 : 1, BYTES = SLAB / BLOCKS;
            if (lane >= 2 * BLOCKS) return;
            // Past the last rows of x its last block stands in, for products that are not stored.
            int token = tile % token_tiles * TN, block = min(token / 128 + lane / 2, (tokens - 1) / 128), s = lane % 2;
            const u8 *from = x + ((u64)block * (2 * all) + 2 * u + s) * 16384 + token % 128 * 128;
            copy_bytes(ring + stage * STAGE + s * SLAB + lane / 2 * BYTES, from, BYTES, full + 8 * stage);
        };
        // Weights do not depend on what ran before.
        Plan ahead = plan;
        Work w;
        u32 early = 0;
        while (early < STAGES && ahead.take(w))
            for (int u = w.from; u < w.to && early < STAGES; u++, early++) bring_weights(w.tile, u, early);
        wait_for_previous();
        u32 slot = 0;
        while (plan.take(w))
            for (int u = w.from; u < w.to; u++, slot++) {
                u32 stage = slot % STAGES;
                if (slot >= STAGES) barrier_wait(empty + 8 * stage, (slot / STAGES - 1) & 1);
                if (slot >= early) bring_weights(w.tile, u, stage);
                bring_x(w.tile, u, stage);
            }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    int half = warp >> 2, w = warp & 3, g = lane >> 2, t = lane & 3, me = threadIdx.x & 127, own = 2 + half;
    Target target = {y, ldy, tokens, GATE ? n / 2 : n, out, aligned};
    u32 piece = buffer + half * PIECE, mine = weights + warp * UNIT, slot = 0;
    wait_for_previous();
    while (plan.take(work)) {
        int row_tile = work.tile / token_tiles, token = work.tile % token_tiles * TN;
        float d[SUMS], apart[FOLDED ? 1 : SUMS];
        float (&sums)[SUMS] = *(float (*)[SUMS])(FOLDED ? d : apart);
        int add = 0;
        if (!FOLDED) {
#pragma unroll
            for (int i = 0; i < SUMS; i++) sums[i] = 0.f;
        }
        Operands o[2];
        barrier_wait(full + 8 * (slot % STAGES), (slot / STAGES) & 1);
        u32 c[4 * OF_EIGHT];
        fetch(o[0], c, mine + slot % STAGES * WEIGHTS, 0, lane);
        decode<0>(o[0], c, table, lane), decode<1>(o[0], c, table, lane), decode<2>(o[0], c, table, lane), decode<3>(o[0], c, table, lane);
        for (int u = work.from; u < work.to; u++, slot++) {
            u32 stage = slot % STAGES;
#pragma unroll
            for (int s = 0; s < 2; s++) {
                u64 b = (u64)((ring + stage * STAGE + s * SLAB) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
                // The operands of the slab after this one come about between the products: an issued product
                // holds its warp until the one before it has started.
                Operands &now = o[s], &next = o[s ^ 1];
                u32 then = stage;
                if (s == 1 && u + 1 < work.to) {
                    then = (slot + 1) % STAGES;
                    barrier_wait(full + 8 * then, ((slot + 1) / STAGES) & 1);
                }
                fetch(next, c, mine + then * WEIGHTS, s ^ 1, lane);
#if LEVEL_PARTS == 2
                open_products();
                product_bf16(d, now.lead[0], b, add);
                add = FOLDED;
                open_products();
                product_bf16(d, now.trail[0], b, 1);
                decode<0>(next, c, table, lane);
                open_products();
                product_bf16(d, now.lead[1], b + 2, 1);
                decode<1>(next, c, table, lane);
                open_products();
                product_bf16(d, now.trail[1], b + 2, 1);
                decode<2>(next, c, table, lane);
                open_products();
                product_bf16(d, now.lead[2], b + 4, 1);
                decode<3>(next, c, table, lane);
                open_products();
                product_bf16(d, now.trail[2], b + 4, 1);
                open_products();
                product_bf16(d, now.lead[3], b + 6, 1);
                open_products();
                product_bf16(d, now.trail[3], b + 6, 1);
#else
                open_products();
                product_bf16(d, now.lead[0], b, add);
                add = FOLDED;
                decode<0>(next, c, table, lane);
                open_products();
                product_bf16(d, now.lead[1], b + 2, 1);
                decode<1>(next, c, table, lane);
                open_products();
                product_bf16(d, now.lead[2], b + 4, 1);
                decode<2>(next, c, table, lane);
                open_products();
                product_bf16(d, now.lead[3], b + 6, 1);
                decode<3>(next, c, table, lane);
#endif
                close_products();
                finish_products(d);
                if (s == 1 && lane == 0) barrier_arrive(empty + 8 * stage);
                if (!FOLDED) {
                    float low = scale_in(now.scale[0], 0), high = scale_in(now.scale[1], 0);
#pragma unroll
                    for (int i = 0; i < SUMS; i++) sums[i] = fmaf(d[i], i & 2 ? high : low, sums[i]);
                }
            }
        }

        if (work.from > 0) {
            float4 *at = (float4 *)(partial + (u64)blockIdx.x * 128 * TN) + threadIdx.x;
#pragma unroll
            for (int i = 0; i < SUMS / 4; i++) __stcg(at + i * 256, make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
            meet(own, 128);
            if (me == 0) asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flags + 2 * blockIdx.x + half) : "memory");
            continue;
        }
        if (work.to < all) {
            u64 total = (u64)all * split_tiles;
            for (u32 c = blockIdx.x + 1; c < gridDim.x && total * c / gridDim.x < (u64)all * (work.tile + 1); c++) {
                if (total * c / gridDim.x == total * (c + 1) / gridDim.x) continue;
                if (me == 0) {
                    u32 ready = 0;
                    while (!ready) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(ready) : "l"(flags + 2 * c + half) : "memory");
                    flags[2 * c + half] = 0;
                }
                meet(own, 128);
                const float4 *at = (const float4 *)(partial + (u64)c * 128 * TN) + threadIdx.x;
#pragma unroll
                for (int i = 0; i < SUMS / 4; i++) {
                    float4 v = __ldcg(at + i * 256);
                    sums[4 * i] += v.x, sums[4 * i + 1] += v.y, sums[4 * i + 2] += v.z, sums[4 * i + 3] += v.w;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < SUMS; i++) sums[i] *= FOLDED ? 1.f : DOWN;

        if (GATE) {
            // `up` goes to the warpgroup of `gate`, 32 values a thread at a time.
#pragma unroll
            for (int round = 0; round < (SUMS + 31) / 32; round++) {
                meet(1, 256);
                if (half == 1) {
#pragma unroll
                    for (int e = 32 * round; e < 32 * (round + 1) && e < SUMS; e++)
                        asm volatile("st.shared.f32 [%0], %1;" ::"r"(buffer + ((e % 32) * 128 + me) * 4), "f"(sums[e]) : "memory");
                }
                meet(1, 256);
                if (half == 0) {
#pragma unroll
                    for (int e = 32 * round; e < 32 * (round + 1) && e < SUMS; e++) {
                        float up, gate = sums[e];
                        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(up) : "r"(buffer + ((e % 32) * 128 + me) * 4));
                        sums[e] = __fdividef(gate, 1.f + __expf(-gate)) * up;
                    }
                }
            }
            if (half == 1) continue;
            meet(own, 128); // all have read what lies where outputs go
        }
        int row = GATE ? row_tile * 64 : row_tile * 128 + half * 64;
        if (out >= OUT_BF16) {
            constexpr int PITCH = (64 + 8) * 2;
#pragma unroll
            for (int h = 0; h < TN / TOKENS16; h++) {
                put16<TOKENS16>(sums, h * TOKENS16, piece, PITCH, 16 * w, lane, out == OUT_F16);
                write_out(target, piece, PITCH, token + h * TOKENS16, TOKENS16, row, me, own);
            }
        } else {
            constexpr int PITCH = (64 + 4) * 4;
#pragma unroll
            for (int h = 0; h < TN / TOKENS32; h++) {
                put32<TOKENS32>(sums, h * TOKENS32, piece, PITCH, 16 * w, g, t);
                write_out(target, piece, PITCH, token + h * TOKENS32, TOKENS32, row, me, own);
            }
        }
    }
}

#define GEMM(NAME, GATE) \
    extern "C" __global__ void __launch_bounds__(384, 1) NAME( \
        const u8 *units, const u8 *x, u64 y, u64 ldy, int tokens, int n, int row_units, int parts, int split_tiles, \
        int row_tiles, int token_tiles, float *partial, u32 *flags, int out, int aligned) { \
        multiply<GATE>(units, x, y, ldy, tokens, n, row_units, parts, split_tiles, row_tiles, token_tiles, partial, \
                       flags, out, aligned); \
    }
GEMM(levels_gemm, false)
GEMM(levels_gemm_gate, true)
