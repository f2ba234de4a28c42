// The product for many rows of bf16 on sm_90a, with weights rounded to bf16: y[m, n] = x[m, k] W[n, k]^T with
// packed weights.
//
// wgmma with the weights as the first operand, from registers. A byte of codes becomes two values by one
// look-up in shared memory, bytes of E4M3 by shifts, and these the weights by one or two operations of
// bf16, the last of which rounds: within 1.41 * 2^-8 of a weight of NF4, 1.01 * 2^-8 of one of whole
// numbers or E4M3; E2M1 with powers of two is exact. Operands of a slab (64 of k) come about while the slab
// before it is multiplied. One warp brings weights, one x, by the tensor copy engine as it is. Four slabs
// are a round, in which places in the rings are known to the compiler: a fifth of a warp's instructions
// went into them. What of a round is beyond k is zero. Blocks of a cluster: in pairs each brings half of x
// for both; SPLIT of them have a part of k of one tile each and send each other their sums. Definitions:
// TN, rows of x of a tile (32, 64, 128, 176 or 256); WGS, warpgroups that multiply, 64 rows of the weight
// each; PAIR, 1 or 2 blocks that share rows of x; SPLIT, 1 or blocks that share k, one tile a cluster;
// PACKS, packed weights in flight, 128 of k each; ORDERED, whether warpgroups multiply one after another.
//
// levels_rounded(x_map, y_map, units, y, ldy, tokens, n, rounds, split_tiles, pairs, token_tiles, partial,
// flags, mark, out,
//             aligned); also levels_rounded_gate
//   x_map: tensor map of x, boxes of 64 by TN / PAIR, 128-byte swizzle. y_map, if `aligned`: of y in bf16, boxes of 128 bytes
//   (gates: 64) by as many tokens as a piece has, swizzled as wide. units: tensor map of packed weights, 8-byte words [row
//   groups, k / 128, 144], boxes of 4 WGS (of a gate: 2 WGS) by 1 by 144: units of 1152 bytes; of E4M3 [.., k / 64, 136], two of
//   136 a unit. y: element type by out: 0 f32,
//   1 f32 to be added to, 2 bf16, 3 f16; ldy in elements. rounds: of k, ROUND units each. aligned: y is bf16, its rows and its
//   start are multiples of 16 bytes. pairs: of tiles of ROWS rows, or tiles where PAIR is 1.
//   Workers are blocks or pairs of them. Tiles below split_tiles are cut into equal shares of k, one a worker (stream-K), the
//   others are dealt whole. With SPLIT, split_tiles is the number of tiles, and a worker has one share of one.
//   partial: f32[gridDim][ROWS * TN]; flags: u64[gridDim * WGS * READERS]; neither is used with SPLIT; mark: a number no other
//   launch has.
//   grid PAIR * min(multiprocessors / PAIR, work), every block resident, with SPLIT a cluster a tile; block THREADS; dynamic
//   shared memory SHARED bytes.
#include "convert.cuh"
#include "deal.cuh"
#include "hopper.cuh"
#include "levels.cuh"
#include "place.cuh"
#include "unit.cuh"

#define CLUSTER (PAIR * SPLIT)
// A box of x, to both blocks where there are pairs: a bit each of those in the cluster.
DEVICE void copy_in(u32 to, const Map *map, int k, int token, u32 barrier, u16 blocks) {
    if (PAIR == 2)
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
            "l"(map), "r"(k), "r"(token), "r"(barrier), "h"(blocks)
            : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
            "l"(map), "r"(k), "r"(token), "r"(barrier)
            : "memory");
}
// Barriers are there; those who multiply wait for that.
DEVICE void ready() { asm volatile("bar.arrive 1, %0;" ::"n"(128 * WGS + 64) : "memory"); }
// Where there are clusters: all blocks have their barriers.
DEVICE void cluster_arrive() {
    if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
DEVICE void cluster_wait() {
    if (CLUSTER > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
constexpr int ROWS = 64 * WGS, GROUPS = 4 * WGS; // of a tile
constexpr int SLAB = TN * 128;   // bytes of x of a tile by 64 of k
constexpr int KEPT = TN / SPLIT; // tokens of a tile whose outputs a block writes
constexpr int PIECE = SPLIT > 1 ? 0 : TN > 64 ? 4096 : 2048; // outputs of one warpgroup on their way to memory, PIECES times
constexpr int PIECES = TN == 256 ? 3 : 2;
constexpr int PACK = GROUPS * UNIT;
// Where two pairs share k: the tokens whose outputs a block writes are the first ones of its tile, x lies so;
// and a sum has three bytes on its way to another block, but where all else is exact.
#define OF_TWO (SPLIT == 2 && PAIR == 2)
constexpr int SENT = OF_TWO && LEVELS != E2M1 ? 3 : 4;
// Bytes from an entry of the table to the next: a byte is an address where there is room.
constexpr int ENTRY = TN > 64 && TN < 256 && !(OF_TWO && SENT == 4) ? 256 : 128;
constexpr int TABLE = LEVELS == E4M3 ? 0 : 256 * ENTRY;
constexpr int RECEIVED = (SPLIT - 1) * ROWS * KEPT * SENT; // sums from the others of a cluster
constexpr int FITTING = (Q4_SHARED - 512 - PIECES * WGS * PIECE - PACKS * PACK - TABLE - RECEIVED) / SLAB;
constexpr int ROUND = 2; // units
constexpr int STAGES = (FITTING < 16 ? FITTING : 16) / (2 * ROUND) * (2 * ROUND);
static_assert(PACKS % ROUND == 0 && STAGES > 0, "rings hold rounds");
constexpr int SHARED = TABLE + STAGES * (SLAB + 16) + PIECES * WGS * PIECE + PACKS * (PACK + 16) + RECEIVED + 8;
static_assert(WGS * KEPT * 128 <= STAGES * SLAB, "outputs fit the ring");
constexpr bool WIDE = WGS * TN > 256; // so many sums that the copying warps give registers away
constexpr int THREADS = 128 * WGS + (WIDE ? 128 : 64);
using Plan = Shares<PAIR, u32>;

// Of a tile's scale: two codes' products with high + low, less zero points before, rounded once.
struct Scale {
    u32 high, low, word;
};
// A product of two bf16 is rounded once anyway.
#define HAS_LOW (SCALES == WHOLE || SCALES == HALVES_F16 || SCALES == ZEROS_F16)
DEVICE u32 times(u32 pair, const Scale &s) {
    u32 y;
    if (ZEROS) pair = less_zero(pair, s.word);
    if (HAS_LOW) asm("{.reg .b32 t; mul.rn.bf16x2 t, %1, %3; fma.rn.bf16x2 %0, %1, %2, t;}" : "=r"(y) : "r"(pair), "r"(s.high), "r"(s.low));
    else asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(pair), "r"(s.high));
    return y;
}
#if LEVELS == NF4
// bf16(level * UP), UP = 1.1888107612: within 2^-9.32 of the levels, the best factor.
#define ROUNDED_DOWN 0.84117674827575684f
#else
#define ROUNDED_DOWN 1.0f
#endif
DEVICE Scale scale_of(u32 word, bool second) {
    if (!HAS_LOW) return {__byte_perm(word, 0, second ? 0x3232 : 0x1010), 0, word};
    float s = scale_in(word, second) * ROUNDED_DOWN;
    u32 bits = __float_as_uint(s);
    float rest = s - __uint_as_float(bits & 0xffff0000u);
    return {__byte_perm(bits, 0, 0x3232), As<bf16>::pair(rest, rest), word};
}
// Operands of a slab: four m64k16.
struct Operands {
    u32 a[4][4];
};
#if LEVELS == E4M3
DEVICE void write_levels(u32, u32) {}
#else
// Bytes of the value of a code.
DEVICE u32 level(u32 code) {
#if LEVELS == NF4
    u32 low = code & 8 ? __byte_perm(0xce9644c2, 0x985c2b06, code & 7) : __byte_perm(0xf0205498, 0x00de61ad, code & 7);
    u32 high = code & 8 ? __byte_perm(0x3e3e3e3d, 0x3f3f3f3f, code & 7) : __byte_perm(0xbebfbfbf, 0x00bdbebe, code & 7);
    return __byte_perm(low, high, 0x7740) & 0xffff;
#else
    return __float_as_uint(value_of(code)) >> 16;
#endif
}
DEVICE void write_levels(u32 at, u32 thread) {
    if (thread >= 256) return;
    u32 v = level(thread & 15) | level(thread >> 4) << 16;
#pragma unroll
    for (u32 i = 0; i < 8; i++)
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at + thread * ENTRY + ((i + thread) & 7) * 16), "r"(v) : "memory");
}
#endif
struct Raw {
    u32 c[4 * OF_EIGHT], s[2];
};
DEVICE void fetch4(u32 *c, u32 at) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3]) : "r"(at) : "memory");
}
// Where a lane's scales and codes are: rows g and g + 8 of a group; with a gate, row g of half a group of
// gate and of up.
template <bool GATE> struct Lane {
    u32 codes_at, scales_at; // in a pack
    DEVICE Lane of(int w, int half, int lane) {
        u32 unit = GATE ? (half * 2 + (w >> 1)) * UNIT : (half * 4 + w) * UNIT, upper = GATE ? w & 1 : 0;
        Lane l = {unit + place_of(lane) + upper * (OF_EIGHT == 2 ? 512 : 8), unit + SCALES_AT + lane / 4 * 16 + upper * 4};
        asm volatile("" : "+r"(l.codes_at), "+r"(l.scales_at)); // or they are worked out again every time
        return l;
    }
    __device__ __forceinline__ void fetch(Raw &r, u32 pack, int s) const {
        u32 code = pack + codes_at + s * TILE_CODES, scale = pack + scales_at + s * 8;
        constexpr u32 UP = GROUPS / 2 * UNIT;
        if (GATE) {
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r.s[0]) : "r"(scale) : "memory");
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r.s[1]) : "r"(scale + UP) : "memory");
        } else {
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(r.s[0]), "=r"(r.s[1]) : "r"(scale) : "memory");
        }
        if (OF_EIGHT == 2) {
            fetch4(r.c, code), fetch4(r.c + 4 * (OF_EIGHT - 1), code + (GATE ? UP : 512));
        } else if (GATE) {
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(r.c[0]), "=r"(r.c[1]) : "r"(code) : "memory");
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(r.c[2]), "=r"(r.c[3]) : "r"(code + UP) : "memory");
        } else {
            fetch4(r.c, code);
        }
    }
};
// Levels of a slab in the places of operands, and what they are to be multiplied by: where weights go,
// products may still read.
struct Levels {
    u32 v[4][4];
    Scale one[HALVES + 1], two[HALVES + 1];
};
// Eight codes of a row to four pairs: registers R and R + 2 of the products J and J + 1. A byte is looked up:
// entry b of the table holds the levels of its low code, then of its high code, 32 times, so that no two
// lanes share a bank.
template <int J, int R> DEVICE void look_up(Levels &l, const u32 *words, u32 table, u32 copy) {
#if LEVELS == E4M3
    pairs_of(words[0], l.v[J][R], l.v[J][R + 2]), pairs_of(words[1], l.v[J + 1][R], l.v[J + 1][R + 2]);
#else
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 at, v, w = *words;
        if (ENTRY == 256) {
            asm volatile("{.reg .b32 at; prmt.b32 at, %1, %2, %4; add.u32 at, at, %3; ld.shared.u32 %0, [at];}" : "=r"(v) : "r"(w), "r"(copy), "r"(table), "r"(0x5504 + i * 16));
        } else {
            asm("lop3.b32 %0, %1, 0x7f80, %2, 0xea;" : "=r"(at) : "r"(i == 0 ? w << 7 : w >> (8 * i - 7)), "r"(copy));
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(table + at));
        }
        l.v[J + i / 2][R + i % 2 * 2] = v;
    }
#endif
}
DEVICE Levels levels_of(const Raw &r, u32 table, u32 copy) {
    Levels l;
    u32 one = r.s[0], two = r.s[1];
    asm volatile("" : "+r"(one), "+r"(two)); // or it waits for scales as soon as they are fetched
#pragma unroll
    for (int i = 0; i <= HALVES; i++) l.one[i] = scale_of(one, i), l.two[i] = scale_of(two, i);
    const u32 *one_row = r.c, *the_other = r.c + 2 * OF_EIGHT;
    look_up<0, 0>(l, one_row, table, copy), look_up<0, 1>(l, the_other, table, copy);
    look_up<2, 0>(l, one_row + OF_EIGHT, table, copy), look_up<2, 1>(l, the_other + OF_EIGHT, table, copy);
    return l;
}
DEVICE void scale(Operands &o, const Levels &l) {
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int r = 0; r < 4; r++) {
            int half = HALVES * (j / 2);
            o.a[j][r] = times(l.v[j][r], r & 1 ? l.two[half] : l.one[half]);
        }
}

#include "outputs.cuh"

// Of the last tile only the pieces of turn `mine` of `share`.
template <bool GATE>
DEVICE void put_shared(float *d, const Target &to, u32 last, int token, int row, int lane, int w, int me, int own, int mine, int share) {
    using P = Piece<GATE>;
    constexpr int COUNT = KEPT / P::COUNT;
    bool by_hand = !to.aligned;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        if (i % share != mine) continue;
        float *s = d + i * (P::COUNT / 2);
        if (GATE) gate<P::COUNT / 2>(s);
        if (by_hand) write_any<GATE, P::COUNT>(s, to, token + i * P::COUNT, row, lane, w);
        else fill<GATE>(s, last + i * P::BYTES, lane, w);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    meet(own, 128);
    if (me || by_hand) return;
#pragma unroll 1
    for (int i = mine; i < COUNT; i += share) copy_out(last + i * P::BYTES, to.map, row, token + i * P::COUNT);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Flags of a launch: of each warpgroup, for up to READERS that wait for it. What is raised is the launch's
// own mark, and who has seen it takes it away, so that whatever was there before does no harm.
constexpr int READERS = 8;
DEVICE u64 *flag_at(u64 *flags, u32 block, int half, int reader) { return flags + (block * WGS + half) * READERS + reader; }
DEVICE void raise(u64 *flag, u64 mark) { asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(mark) : "memory"); }
DEVICE void await(u64 *flag, u64 mark) {
    u64 seen = ~mark;
    while (seen != mark) asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(flag) : "memory");
    *flag = 0;
}
// Where `share` neighbours have a part of k of one tile each: every one adds up some of its tokens. Whether
// there are any.
template <bool GATE> DEVICE bool add_share(float (&d)[SUMS], int me, int own, int half, float *partial, u64 *flags, u64 mark, int mine, int share) {
    constexpr int TURNS = TN / TOGETHER<GATE>, EACH = TOGETHER<GATE> / 8;
    int readers = min(share, TURNS);
    float4 *here = (float4 *)(partial + (u64)blockIdx.x * ROWS * TN) + threadIdx.x;
    asm volatile("" : "+l"(here)); // one address, not one of each store
#pragma unroll
    for (int i = 0; i < SUMS / 4; i++)
        if (i / EACH % share != mine) __stcg(here + i * 128 * WGS, make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]));
    meet(own, 128);
    u32 first = blockIdx.x - mine * PAIR;
    if (me < readers && me != mine) raise(flag_at(flags, blockIdx.x, half, me), mark);
    if (mine >= readers) return false;
    if (me < share && me != mine) await(flag_at(flags, first + me * PAIR, half, mine), mark);
    meet(own, 128);
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        if (turn % share != mine) continue;
#pragma unroll(TN == 256 ? 2 : 4)
        for (int j = 1; j < share; j++) {
            int c = mine + j < share ? mine + j : mine + j - share;
            const float4 *from = (const float4 *)(partial + (u64)(first + c * PAIR) * ROWS * TN) + threadIdx.x + turn * EACH * 128 * WGS;
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                float4 v = __ldcg(from + i * 128 * WGS);
                float *to = d + (turn * EACH + i) * 4;
                to[0] += v.x, to[1] += v.y, to[2] += v.z, to[3] += v.w;
            }
        }
    }
    return true;
}

// Where two blocks have half of k of one tile each: each adds up half of the tokens, which come first in `d`.
DEVICE void exchange_two(float (&d)[SUMS], u32 received, u32 barrier, int part, int rank) {
    u32 other = (1 - part) * PAIR + rank;
#if LEVELS == E2M1
    constexpr int KEEPS = SUMS / 2, BYTES = 128 * WGS * 16; // of four sums of all threads
    u32 at = received + threadIdx.x * 16, to = address_in(at, other), signal = address_in(barrier, other);
#pragma unroll
    for (int i = 0; i < KEEPS; i += 4) send4(to + i / 4 * BYTES, signal, d + KEEPS + i);
    barrier_wait_cluster(barrier, 0);
#pragma unroll
    for (int i = 0; i < KEEPS; i += 4) {
        float v[4];
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(at + i / 4 * BYTES) : "memory");
#pragma unroll
        for (int j = 0; j < 4; j++) d[i + j] += v[j];
    }
#else
    using Sent = Short<SUMS / 2, 128 * WGS>;
    Sent::send_all(d + SUMS / 2, address_in(received, other), address_in(barrier, other), threadIdx.x);
    barrier_wait_cluster(barrier, 0);
    Sent::add_all(d, received, threadIdx.x);
#endif
}
template <bool GATE>
DEVICE void multiply(
    const Map *x_map, const Map *y_map, const Map *units, u64 y, u64 ldy, int tokens, int n, int rounds, int split_tiles,
    int pairs, int token_tiles, float *partial, u64 *flags, u64 mark, int out, int aligned) {
    extern __shared__ __align__(1024) u8 room[];
    u32 xs = shared_address(room), store = xs + STAGES * SLAB, received = store + PIECES * WGS * PIECE, packs = received + RECEIVED;
    u32 table = packs + PACKS * PACK, full = table + TABLE, empty = full + 8 * STAGES, packed = empty + 8 * STAGES, decoded = packed + 8 * PACKS;
    u32 all_received = decoded + 8 * PACKS;
    int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, rank = PAIR == 2 ? blockIdx.x & 1 : 0, part = blockIdx.x / PAIR % SPLIT;
    let_next_start();
    int group_count = (n + 15) / 16;
    Plan plan = Plan::start(rounds, split_tiles, pairs * token_tiles);
    Work work = {0, 0, 0};
    // Every worker has one part of one tile.
    u32 workers = gridDim.x / PAIR;
    bool even = split_tiles == pairs * token_tiles && split_tiles > 0 && workers % split_tiles == 0 && workers / split_tiles <= READERS;
    int share = SPLIT == 1 && even ? workers / split_tiles : 1;
    if (warp >= 4 * WGS) {
        if (WIDE) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(WGS == 3 ? 32 : 40));
        if (warp == 4 * WGS) {
            // Weights do not depend on what ran before, nor on other blocks.
            if (lane == 0) {
                expect_map(units);
                for (int i = 0; i < PACKS; i++) barrier_init(packed + 8 * i, 1), barrier_init(decoded + 8 * i, 4 * WGS);
                asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            }
            __syncwarp();
            ready();
            cluster_arrive();
            u32 slot = 0, phase = 1;
            bool first = true;
            while (plan.take(work)) {
                int group = (Place::of(work.tile, pairs, token_tiles).pair * PAIR + rank) * (GATE ? GROUPS / 2 : GROUPS);
#pragma unroll 1
                for (int u = ROUND * work.from; u < ROUND * work.to; u++) {
                    if (!first) barrier_wait(decoded + 8 * slot, phase);
                    if (lane == 0) {
                        u32 to = packs + slot * PACK;
                        barrier_expect(packed + 8 * slot, PACK);
                        copy_units(to, units, u, group, packed + 8 * slot);
                        if (GATE) copy_units(to + PACK / 2, units, u, group + group_count / 2, packed + 8 * slot);
                    }
                    __syncwarp();
                    if (++slot == PACKS) slot = 0, phase ^= 1, first = false;
                }
            }
            cluster_wait();
        } else if (warp == 4 * WGS + 1) {
            if (lane == 0) {
                expect_map(x_map);
                if (xs & 1023) asm volatile("trap;");
                for (int i = 0; i < STAGES; i++) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, 4 * WGS * PAIR);
                barrier_init(all_received, 1);
                asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
                if (SPLIT > 1) barrier_expect(all_received, RECEIVED);
            }
            __syncwarp();
            ready();
            cluster_arrive();
            bool some = plan.take(work);
            Place place = Place::of(work.tile, pairs, token_tiles);
            cluster_wait();
            wait_for_previous();
            u32 stage = 0, phase = 1;
            bool first = true;
            while (some) {
                int token = place.token + (OF_TWO ? rank ^ part : rank) * (TN / 2);
#pragma unroll 1
                for (int s = 2 * ROUND * work.from; s < 2 * ROUND * work.to; s++) {
                    if (!first) barrier_wait(empty + 8 * stage, phase);
                    if (lane == 0) {
                        barrier_expect(full + 8 * stage, SLAB);
                        copy_in(xs + stage * SLAB + rank * (SLAB / 2), x_map, s * 64, token, full + 8 * stage, 3 << part * PAIR);
                    }
                    __syncwarp();
                    if (++stage == STAGES) stage = 0, phase ^= 1, first = false;
                }
                some = plan.take(work), place = Place::of(work.tile, pairs, token_tiles);
            }
        } else {
            cluster_arrive(), cluster_wait();
        }
    } else {
        if (WIDE) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WGS == 3 ? 160 : 232));
        cluster_arrive();
        write_levels(table, threadIdx.x);
        meet(1, 128 * WGS + 64);
        int half = warp >> 2, w = warp & 3, me = threadIdx.x & 127, own = 2 + half;
        Target target = {y_map, y, ldy, tokens, GATE ? n / 2 : n, out, aligned};
        u32 base = store + half * PIECES * PIECE;
        u32 turn = 0;
        int left = plan.total(); // rounds after the one at hand
        u32 copy = __shfl_sync(~0u, lane * 4, lane); // a lane's copy of the table; else the compiler asks for the lane every time
        constexpr bool AHEAD = ORDERED; // x is waited for long before a warpgroup's turn
        u64 tile = tile_at(xs);
        // A round's places in the rings.
        u32 stage = 0, x_phase = 0, slot = 0, pack_phase = 0;
        auto next_x = [&]() {
            if (STAGES == 2 * ROUND || (stage += 2 * ROUND) == STAGES) stage = 0, x_phase ^= 1;
        };
        auto next_packs = [&]() {
            if (PACKS == ROUND || (slot += ROUND) == PACKS) slot = 0, pack_phase ^= 1;
        };
        // A place that nothing comes to again is left without a word: a block that is sent to may be gone.
        u32 empty_there = PAIR == 2 ? address_in(empty, part * PAIR + (lane & 1)) : empty;
        u32 refills = copy < 4 * PAIR ? max(2 * ROUND * left - STAGES, 0) : 0, slabs = ~0u;
        auto leave = [&](u32 stage) { barrier_arrive_there(empty_there + 8 * stage, slabs++ < refills); }; // none before the first
        Lane<GATE> at = Lane<GATE>::of(w, half, lane);
        float d[SUMS];
        Operands o[2];
        Raw raw;
#if ORDERED
        if (half == WGS - 1) asm volatile("bar.arrive 6, 256;" ::: "memory");
#endif
        if (left) {
            barrier_wait(packed, 0);
            at.fetch(raw, packs, 0);
            scale(o[0], levels_of(raw, table, copy));
            at.fetch(raw, packs, 1);
        }
        cluster_wait();
        wait_for_previous();
        if (AHEAD) barrier_wait(full, left ? 0 : 1);
        while (plan.take(work)) {
            Place place = Place::of(work.tile, pairs, token_tiles);
            int add = 0;
            for (int round = work.from; round < work.to; round++) {
                left--;
#pragma unroll
                for (int i = 0; i < 2 * ROUND; i++) {
                    constexpr int LAST = 2 * ROUND - 1;
                    int s = i & 1, next = i < LAST ? i + 1 : 0, next_unit = i < LAST - 1 ? i / 2 + 1 : 0;
                    if (!AHEAD) barrier_wait(full + 8 * (stage + i), x_phase);
                    u64 b = STAGES == 2 * ROUND ? tile + (i * SLAB >> 4) : tile_at(xs + (stage + i) * SLAB);
#if ORDERED
                    meet(6 + half, 256);
#endif
                    open_products();
                    product_bf16(d, o[s].a[0], b, add);
                    product_bf16(d, o[s].a[1], b + 2, 1);
                    product_bf16(d, o[s].a[2], b + 4, 1);
                    product_bf16(d, o[s].a[3], b + 6, 1);
                    close_products();
#if ORDERED
                    asm volatile("bar.arrive %0, 256;" ::"r"(half + 1 == WGS ? 6 : 7 + half) : "memory");
#endif
                    // Levels of the slab after this one while it is multiplied, and the end of the one before it, where weights go;
                    // then codes of the one after that. What does not come any more is not waited for: the phase before is over.
                    Levels levels = levels_of(raw, table, copy);
                    wait_products<1>();
                    leave(i > 0 ? stage + i - 1 : (stage > 0 ? stage : STAGES) - 1);
                    add = 1;
                    if (s == 0) {
                        // The unit's codes have been looked up, so they are in registers: an arrival does not
                        // wait for loads.
                        __syncwarp();
                        barrier_arrive_there(decoded + 8 * (slot + i / 2), copy == 0);
                        if (next_unit == 0) next_packs();
                        barrier_wait(packed + 8 * (slot + next_unit), i < LAST - 1 || left ? pack_phase : pack_phase ^ 1);
                    }
                    at.fetch(raw, packs + (slot + next_unit) * PACK, s);
                    scale(o[s ^ 1], levels);
                    if (next == 0) next_x();
                    if (AHEAD) barrier_wait(full + 8 * (stage + next), i < LAST || left ? x_phase : x_phase ^ 1);
                }
            }
            finish_products(d);

            int row_tile = place.pair * PAIR + rank;
            int row = GATE ? (row_tile * (GROUPS / 2) + half * 2) * 16 : (row_tile * GROUPS + half * 4) * 16;
            // Where all outputs fit when x is not needed any more.
            u32 last = xs + half * (KEPT * 128);
#if SPLIT > 1
#if OF_TWO
            exchange_two(d, received, all_received, part, rank);
#else
            exchange(d, received, all_received, part, rank);
#endif
            meet(1, 128 * WGS);
            int token = place.token + part * KEPT;
            put_all<GATE>(d, target, base, last, token, row, lane, w, me, own, turn);
#else
            if (left) last = 0;
            else meet(1, 128 * WGS);
            int mine = share > 1 ? (int)(blockIdx.x / PAIR) % share : 0;
            if (share > 1) {
                if (!add_share<GATE>(d, me, own, half, partial, flags, mark, mine, share)) continue;
            } else if (work.from > 0) {
                float4 *to = (float4 *)(partial + (u64)blockIdx.x * ROWS * TN) + threadIdx.x;
#pragma unroll
                for (int i = 0; i < SUMS / 4; i++) __stcg(to + i * 128 * WGS, make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]));
                meet(own, 128);
                if (me == 0) raise(flag_at(flags, blockIdx.x, half, 0), mark);
                continue;
            } else if (work.to < rounds) {
                // Workers that begin below the tile's end.
                u32 sum = (u32)rounds * split_tiles, end = ((u32)rounds * (work.tile + 1) * workers + sum - 1) / sum;
                for (u32 other = blockIdx.x + PAIR; other < end * PAIR; other += PAIR) {
                    if (me == 0) await(flag_at(flags, other, half, 0), mark);
                    meet(own, 128);
                    const float4 *from = (const float4 *)(partial + (u64)other * ROWS * TN) + threadIdx.x;
                    asm volatile("" : "+l"(from)); // one address, not one of every load kept from round to round
#pragma unroll
                    for (int i = 0; i < SUMS / 4; i++) {
                        float4 v = __ldcg(from + i * 128 * WGS);
                        d[4 * i] += v.x, d[4 * i + 1] += v.y, d[4 * i + 2] += v.z, d[4 * i + 3] += v.w;
                    }
                }
            }
            if (share > 1) put_shared<GATE>(d, target, last, place.token, row, lane, w, me, own, mine, share);
            else put_all<GATE>(d, target, base, last, place.token, row, lane, w, me, own, turn);
#endif
        }
        if (me == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        __syncwarp();
    }
}

#if PAIR * SPLIT > 1
#define IN_CLUSTERS __cluster_dims__(PAIR * SPLIT, 1, 1)
#else
#define IN_CLUSTERS
#endif
#define GEMM(NAME, GATE) \
    extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 1) NAME( \
        const __grid_constant__ Map x_map, const __grid_constant__ Map y_map, const __grid_constant__ Map units, u64 y, u64 ldy, int tokens, int n, \
        int rounds, int split_tiles, int pairs, int token_tiles, float *partial, u64 *flags, u64 mark, int out, int aligned) { \
        multiply<GATE>(&x_map, &y_map, &units, y, ldy, tokens, n, rounds, split_tiles, pairs, token_tiles, partial, flags, mark, out, \
                       aligned); \
    }
GEMM(levels_rounded, false)
GEMM(levels_rounded_gate, true)
