// The product for many rows on sm_90a: y[m, n] = x[m, k] W[n, k]^T with packed NVFP4 weights.
//
// wgmma with the weight in registers: warpgroups of 64 rows each decode packed weights from shared memory
// into operands, ahead of the products, so that decoding runs beside the tensor cores. One warp has the copy
// engine bring TN rows of x by 64 of k (a slab), one packed weights. Blocks come in pairs (in a cluster) with
// the same rows of x, half of which each one loads for both: without that the second cache, not the tensor
// cores, is what a launch waits for. Where tiles are few, several pairs share the k of one: in a cluster of 2
// KS blocks, which send each other sums, or through memory. Definitions: TN, rows of x of a tile (32, 64,
// 128, 176 or 256); WGS, warpgroups of 64 rows of the weight of a tile (2 or 3); KS, pairs of a cluster (1, 2
// or 4); ELEMENT, bf16 or f16.
//
// gemm(x_map, units, groups u64[group_count], y, ldy, tokens, group_count, row_units, parts, whole, shares,
// pairs, token_tiles,
//      partial, flags, key, out, aligned, global, convention); also gemm_gate
//   x_map: tensor map of x, 16 bits, rows of row_units * 128 * parts (or fewer: the copy engine fills up with zeros), boxes
//   of 64 by TN / 2, 128-byte swizzle. units: tensor map of packed weights, 8-byte words [groups, row_units, 144], boxes of
//   4 WGS (of a gate: 2 WGS) by 1 by 144: units of 1152 bytes (16 rows x 128 k).
//   groups: {f32 multiplier, u32 first_row * 32 + rows}. parts: summands of x side by side in k. y: element type by out: 0 f32,
//   1 f32 to be added to, 2 bf16, 3 f16; ldy in elements. aligned: rows of y and its start are multiples of 16 bytes, all
//   groups but the last are full, and a multiple of eight rows is the last one's. pairs: of tiles of 64 WGS rows,
//   ceil(group_count / (8 WGS)). global: the per-tensor scale of x that multiplies (convention 1) or divides (2) the sums;
//   convention 0: none.
//   KS 1: pairs of tiles below `whole` are dealt whole; of each of the others `shares` pairs of blocks (at most 8) do a piece of k.
//   KS above 1: all are whole, and each has a cluster.
//   partial: f32[gridDim][64 * WGS * TN]; flags: u64[gridDim][8 * WGS], none of which is `key` before, nor after.
//   grid: KS 1: at most 2 (multiprocessors / 2), every block resident; block THREADS; dynamic shared memory SHARED bytes.
#include "deal.cuh"
#include "output.cuh"
#include "place.cuh"
#include "unit.cuh"

using Plan = Pieces<KS>;
constexpr int ROUND = 2; // units of 128 of k, in which places in the rings are known to the compiler
constexpr int PACK = 4 * WGS * UNIT; // packed weights of a tile's rows by 128 k
constexpr int STAGE = TN * 128;      // x by 64 of k
// Where sums are few, two sets of warpgroups take turns at the slabs of a tile.
constexpr int SETS = TN <= 64 ? 2 : 1;
constexpr int TOGETHER = SETS == 2 ? 2 : 4; // products of 16 of k that are issued at once, operands of as many are made meanwhile
constexpr int PACKS = WGS == 3 || TN > 128 ? 4 : 8;
constexpr int SLABS = 2 * ROUND / SETS; // of a round, that a set has
// Sums of the second set on their way to the first, and then outputs on theirs.
constexpr int MEETING = SETS == 2 ? WGS * 128 * SUMS * 4 : WGS * PIECE;
constexpr int BOX = 16; // tokens that one of those who share a tile through memory sums up at least
// Tokens of each of KS pieces of k in the end, and bytes of them that arrive from the others. Of two pieces
// each has its tokens first in its tile, x lies so.
constexpr int EACH = TN / KS, ARRIVING = (KS - 1) * EACH * 256 * WGS;
// What the others of those who share a tile through memory send comes to where x and packed weights were, and
// behind them.
DEVICE constexpr int gathered_bytes() {
    int most = 0;
    for (int count = 2; count <= 8; count++) {
        int boxes = TN / BOX, owners = count < boxes ? count : boxes, bytes = WGS * (count - 1) * ((boxes + owners - 1) / owners) * 256 * BOX;
        if (bytes > most) most = bytes;
    }
    return KS == 1 ? most : 0;
}
constexpr int FIXED = 8 * WGS + MEETING + ARRIVING + PACKS * (PACK + 16);
constexpr int FITTING = (Q4_SHARED - FIXED) / (STAGE + 16);
// Of one set as many as a round has: its places in the ring are constants then.
constexpr int MOST = SETS == 1 ? 2 * ROUND : 16, STAGES = (FITTING < MOST ? FITTING : MOST) / (2 * ROUND) * (2 * ROUND);
constexpr int RINGS = STAGES * STAGE + PACKS * PACK, ROOM = RINGS > gathered_bytes() ? RINGS : gathered_bytes();
constexpr int SHARED = FIXED + STAGES * (STAGE + 16) + ROOM - RINGS;
static_assert(PACKS % ROUND == 0 && STAGES > 0 && SHARED <= Q4_SHARED, "rings hold rounds");
constexpr int WORKERS = 4 * WGS * SETS; // warps that multiply
constexpr int THREADS = 32 * WORKERS + 128;
constexpr int REGISTERS = SETS == 2 ? 112 : WGS == 3 ? 160 : 232; // of a thread that multiplies
static_assert(SETS == 1 || WGS == 2, "four warpgroups fit the registers");

// What a lane decodes: its word of every 16 of k of a slab, which has rows g and g + 8 of its warp's 16; of
// gate and up it takes one row each.
template <class T, bool GATE> struct Weights {
    static constexpr int BOTH = GATE ? 2 : 1, UP = 2 * WGS * UNIT; // the rows of up follow those of gate
    u32 codes_at, scales_at;
    u32 select;          // of scales: the byte of a row of gate or up twice, else those of both rows
    u32 rotate[2], sign[2]; // of gate and up: what brings magnitudes and signs of a row's pairs into place
    u32 codes[TOGETHER][BOTH], scale[4][BOTH];

    // From tile `s` of a unit on.
    DEVICE Weights of(int warp, int lane, int s) {
        Weights o;
        int g = lane >> 2, t = lane & 3, upper = warp & 1;
        u32 unit = (GATE ? warp >> 1 : warp) * UNIT;
        o.codes_at = unit + s * 512 + g * 64 + t * 4, o.scales_at = unit + 1024 + g * 16;
        o.select = (GATE ? 0x4040 + upper * 0x101 : 0x4140) + s * 0x202;
#pragma unroll
        for (int i = 0; i < 2; i++) o.rotate[i] = Codes<T>::ROTATE >> 8 * (upper + 2 * i) & 31, o.sign[i] = 0x02040801 >> 8 * (upper + 2 * i) & 15;
        return o;
    }
    // Scales of a unit.
    __device__ __forceinline__ void fetch_scales(u32 pack) {
#pragma unroll
        for (int u = 0; u < BOTH; u++) {
            uint4 four = read4(pack + scales_at + u * UP);
            scale[0][u] = four.x, scale[1][u] = four.y, scale[2][u] = four.z, scale[3][u] = four.w;
        }
    }
    // Codes of sixteen values of k, the `b`th; `second`: of the tile of a unit after the one these are from.
    __device__ __forceinline__ void fetch(u32 pack, int b, bool second) {
#pragma unroll
        for (int u = 0; u < BOTH; u++) codes[b % TOGETHER][u] = read1(pack + codes_at + b * 16 + (second ? 512 : 0) + u * UP);
    }
    // What was fetched as the `b`th as operands.
    __device__ __forceinline__ void decode(int b, bool second, u32 (&to)[4]) const {
        const u32 (&word)[BOTH] = codes[b % TOGETHER];
        u32 byte = second ? select ^ 0x202 : select, one = Codes<T>::expand(scale[b][0], byte);
        if (GATE) {
            u32 two = Codes<T>::expand(scale[b][BOTH - 1], byte);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 w = word[i % BOTH];
                u32 pair = (__funnelshift_l(w, w, rotate[i / 2]) & Codes<T>::MAGNITUDE) | (w * sign[i / 2] & 0x80008000);
                to[i] = Codes<T>::times_low(pair, i % 2 ? two : one);
            }
        } else {
            u32 pair[4];
            Codes<T>::pairs(word[0], pair);
#pragma unroll
            for (int i = 0; i < 4; i++) to[i] = i % 2 ? Codes<T>::times_high(pair[i], one) : Codes<T>::times_low(pair[i], one);
        }
    }
};

DEVICE void product(bf16, float (&d)[SUMS], const u32 (&a)[4], u64 b) { product_bf16(d, a, b, 1); }
DEVICE void product(f16, float (&d)[SUMS], const u32 (&a)[4], u64 b) { product_f16(d, a, b, 1); }

DEVICE void write4(u32 at, float a, float b, float c, float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

DEVICE void add4(float *d, u32 at) {
    uint4 v = read4(at);
    d[0] += __uint_as_float(v.x), d[1] += __uint_as_float(v.y), d[2] += __uint_as_float(v.z), d[3] += __uint_as_float(v.w);
}

template <class T, bool GATE>
DEVICE void multiply(
    const Map *x_map, const Map *units, const u64 *groups, u64 y, u64 ldy, int tokens, int group_count, int row_units, int parts,
    int whole, int shares, int pairs, int token_tiles, float *partial, u64 *flags, u64 key, int out, int aligned, const float *global,
    int convention) {
    extern __shared__ __align__(1024) u8 memory[];
    u32 xs = shared_address(memory), packs = xs + STAGES * STAGE, meeting = xs + ROOM, arriving = meeting + MEETING;
    u32 full = arriving + ARRIVING, empty = full + 8 * STAGES, packed = empty + 8 * STAGES, decoded = packed + 8 * PACKS;
    u32 gathered = decoded + 8 * PACKS;
    int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, rank = blockIdx.x & 1, piece = blockIdx.x / 2 % KS;
    Plan plan = Plan::start((row_units * parts + ROUND - 1) / ROUND, whole, pairs * token_tiles, shares);
    if (threadIdx.x == 32 * WORKERS) {
        expect_map(x_map), expect_map(units);
        if (xs & 1023) asm volatile("trap;");
        for (int i = 0; i < STAGES; i++) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, 8 * WGS);
        for (int i = 0; i < PACKS; i++) barrier_init(packed + 8 * i, 1), barrier_init(decoded + 8 * i, WORKERS);
        for (int i = 0; i < WGS; i++) {
            barrier_init(gathered + 8 * i, 1);
            if (KS > 1) barrier_expect(gathered + 8 * i, ARRIVING / WGS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    meet_cluster();
    let_next_start();
    if (warp >= WORKERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        Work work = {};
        bool some = plan.take(work);
        Place place = Place::of(work.tile, pairs, token_tiles);
        if (warp == WORKERS) {
            // This block's half of the rows of x of one slab, to both.
            wait_for_previous();
            u32 stage = 0, round = 0;
            while (some) {
                int token = place.token + (KS == 2 ? rank ^ piece : rank) * (TN / 2);
                for (int slab = 2 * ROUND * work.from; slab < 2 * ROUND * work.to; slab++) {
                    if (round) barrier_wait(empty + 8 * stage, round - 1 & 1);
                    if (lane == 0) {
                        barrier_expect(full + 8 * stage, STAGE);
                        copy_in(xs + stage * STAGE + rank * (STAGE / 2), x_map, slab * 64, token, full + 8 * stage, 3 << 2 * piece);
                    }
                    if (++stage == STAGES) stage = 0, round++;
                }
                some = plan.take(work), place = Place::of(work.tile, pairs, token_tiles);
            }
        } else if (warp == WORKERS + 1) {
            // Weights do not depend on what ran before.
            u32 slot = 0, round = 0;
            while (some) {
                int group = (place.pair * 2 + rank) * (GATE ? 2 * WGS : 4 * WGS);
                for (int at = ROUND * work.from; at < ROUND * work.to; at++) {
                    if (round) barrier_wait(decoded + 8 * slot, round - 1 & 1);
                    if (lane == 0) {
                        u32 to = packs + slot * PACK, unit = parts == 1 ? at : at % row_units;
                        barrier_expect(packed + 8 * slot, PACK);
                        copy_units(to, units, unit, group, packed + 8 * slot);
                        if (GATE) copy_units(to + PACK / 2, units, unit, group + group_count / 2, packed + 8 * slot);
                    }
                    if (++slot == PACKS) slot = 0, round++;
                }
                some = plan.take(work), place = Place::of(work.tile, pairs, token_tiles);
            }
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
        int set = SETS == 2 ? warp / (4 * WGS) : 0, half = warp / 4 % WGS, w = warp & 3, me = threadIdx.x & 127;
        int own_groups = GATE ? group_count / 2 : group_count;
        Target target = {y, ldy, tokens, own_groups, 16 * (own_groups - 1) + (int)(groups[own_groups - 1] >> 32 & 31), out, aligned};
        bool again = false;
        int left = plan.total(); // rounds after the one at hand
        // A round's places in the rings.
        u32 stage = 0, phase = 0, slot = 0, turn = 0, full_of_set = full + 8 * set;
        u64 first_tile = tile_at(xs + set * STAGE);
        auto next_packs = [&]() {
            if (PACKS == ROUND || (slot += ROUND) == PACKS) slot = 0, turn ^= 1;
        };
        // A stage that is used again is left to whoever fills it: without those that are not, nothing is
        // under way to a block that ends.
        u32 alike = __shfl_sync(~0u, lane, lane); // the lane, which the compiler asks for every time else
        u32 empty_there = address_in(empty + 8 * set, 2 * piece + (lane & 1));
        u32 refills = alike < 2 ? max(2 * ROUND * left - STAGES, 0) / SETS : 0, slabs = ~0u;
        auto leave = [&](u32 stage) { barrier_arrive_there(empty_there + 8 * stage, slabs++ < refills); }; // none before the first
        float d[SUMS];
        u32 operands[2][TOGETHER][4];
        Weights<T, GATE> weights = Weights<T, GATE>::of(warp % (4 * WGS), lane, set);
        // From product `b` on of slab `i` of a round. What does not come any more is not waited for: the
        // phase before is over.
        auto fetch = [&](int b, int i, bool comes) {
            int unit = SETS == 1 ? i / 2 : i;
            u32 pack = packs + (slot + unit) * PACK;
            bool second = SETS == 1 && i % 2;
            if (b == 0 && !second) {
                barrier_wait(packed + 8 * (slot + unit), comes ? turn : turn ^ 1);
                weights.fetch_scales(pack);
            }
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) weights.fetch(pack, b + j, second);
        };
        auto decode = [&](int b, int i, u32 (&to)[TOGETHER][4]) {
            bool second = SETS == 1 && i % 2;
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) weights.decode(b + j, second, to[j]);
            if (b + TOGETHER < 4) return;
            if (SETS == 1 && !second) return;
            __syncwarp();
            barrier_arrive_if(decoded + 8 * (slot + (SETS == 1 ? i / 2 : i)), alike == 0);
        };
        fetch(0, 0, left), decode(0, 0, operands[0]);
        wait_for_previous();
        float of_x = convention == 0 ? 1.f : convention == 1 ? *global : 1.f / *global;
        Work work;
        while (plan.take(work)) {
            Place place = Place::of(work.tile, pairs, token_tiles);
#pragma unroll
            for (int i = 0; i < SUMS; i++) d[i] = 0.f;
            // The rows of a warp are of one group, or of one of each half. What becomes of them is asked for
            // before it is needed.
            int row_tile = place.pair * 2 + rank, group = (row_tile * WGS + half) * (GATE ? 2 : 4);
            int mine = min(group + (GATE ? w / 2 : w), own_groups - 1);
            u64 row_group = groups[mine], up_group = GATE ? groups[mine + own_groups] : 0;
            for (int round = work.from; round < work.to; round++) {
                left--;
#pragma unroll
                for (int i = 0; i < SLABS; i++) {
                    barrier_wait(full_of_set + 8 * (stage + SETS * i), phase);
                    u64 x = STAGES == 2 * ROUND ? first_tile + (SETS * i * STAGE >> 4) : tile_at(xs + (stage + set + SETS * i) * STAGE);
                    // Operands are made while the products before them run.
#pragma unroll
                    for (int b = 0; b < 4; b += TOGETHER) {
                        const int next = (b + TOGETHER) % 4, which = next > 0 ? i : (i + 1) % SLABS;
                        const int set_now = (TOGETHER == 4 ? i : b / TOGETHER) % 2;
                        if (next == 0 && which == 0) next_packs();
                        fetch(next, which, which > 0 || left > 0);
                        open_products();
#pragma unroll
                        for (int j = 0; j < TOGETHER; j++) product(T{}, d, operands[set_now][j], x + 2 * (b + j));
                        close_products();
                        wait_products<1>();
                        if (b == 0) leave(i > 0 ? stage + SETS * (i - 1) : (stage > 0 ? stage : STAGES) - SETS);
                        decode(next, which, operands[1 - set_now]);
                    }
                }
                if (STAGES == 2 * ROUND || (stage += 2 * ROUND) == STAGES) stage = 0, phase ^= 1;
            }
            finish_products(d);
            if (SETS == 2) {
                u32 at = meeting + half * (MEETING / WGS) + me * 16;
                if (set == 1) {
                    // Not before outputs have left from there.
                    if (again) meet(6 + half, 256);
                    again = true;
#pragma unroll
                    for (int i = 0; i < SUMS; i += 4) write4(at + i * 512, d[i], d[i + 1], d[i + 2], d[i + 3]);
                }
                meet(4 + half, 256);
                if (set == 1) continue;
#pragma unroll
                for (int i = 0; i < SUMS; i += 4) add4(d + i, at + i * 512);
            }

            int low = 0, high = TN, token = place.token;
            if (KS == 2) {
                // Each block of the cluster has half of the tokens in the end; the other sends it theirs.
                u32 here = arriving + half * (ARRIVING / WGS) + me * 16, barrier = gathered + 8 * half, other = 2 * (1 - piece) + rank;
                u32 there = address_in(here, other), arrived = address_in(barrier, other);
#pragma unroll
                for (int i = 0; i < SUMS / 2; i += 4) send4(there + i * 512, arrived, d + SUMS / 2 + i);
                barrier_wait(barrier, 0);
#pragma unroll
                for (int i = 0; i < SUMS / 2; i += 4) add4(d + i, here + i * 512);
                high = EACH, token += piece * EACH;
            } else if (KS > 1) {
                // Every block of the cluster has some of the tokens in the end; the others send it theirs.
                constexpr int PART = EACH / 8 * 2048;
                u32 to = arriving + half * (KS - 1) * PART + me * 16, barrier = gathered + 8 * half;
                low = piece * EACH, high = low + EACH;
#pragma unroll
                for (int q = 0; q < KS; q++) {
                    if (q == piece) continue;
                    u32 there = address_in(to + (piece - (piece > q)) * PART, 2 * q + rank), arrived = address_in(barrier, 2 * q + rank);
#pragma unroll
                    for (int i = 0; i < EACH / 8; i++) send4(there + i * 2048, arrived, d + 4 * (q * (EACH / 8) + i));
                }
                barrier_wait(barrier, 0);
#pragma unroll
                for (int q = 0; q < KS; q++) {
                    if (q != piece) continue;
#pragma unroll
                    for (int i = 0; i < (KS - 1) * EACH / 8; i++) add4(d + 4 * (q * (EACH / 8) + i % (EACH / 8)), to + i * 2048);
                }
            } else if (work.count > 1) {
                // Those who share a tile have some of its tokens each in the end.
                constexpr int BOXES = TN / BOX, BYTES = 256 * BOX; // of sums of a warpgroup's box
                int owners = min(work.count, BOXES), began = blockIdx.x - 2 * work.part;
                auto begin_of = [&](int part) { return part < owners ? BOXES * part / owners * BOX : TN; };
                low = begin_of(work.part), high = begin_of(work.part + 1);
                auto sums_of = [&](int block) { return (u8 *)partial + (u64)(WGS * block + half) * (BOXES * BYTES); };
                u64 *flag = flags + half * 8;
#pragma unroll
                for (int i = 0; i < SUMS / 4; i++)
                    if (8 * i < low || 8 * i >= high) __stcg((float4 *)sums_of(blockIdx.x) + i * 128 + me, make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]));
                meet(2 + half, 128);
                if (me < owners && me != work.part)
                    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag + blockIdx.x * (8 * WGS) + me), "l"(key) : "memory");
                if (low == high) continue;
                // What the others have of them comes to where x was, when all warpgroups are done with that.
                meet(1, 128 * WGS);
                u32 bytes = (high - low) / BOX * BYTES, room = xs + half * (work.count - 1) * bytes;
                if (me == 0) barrier_expect(gathered + 8 * half, bytes * (work.count - 1));
                if (me < 32) __syncwarp();
                if (me < work.count && me != work.part) {
                    u64 *theirs = flag + (began + 2 * me) * (8 * WGS) + work.part, found = ~key;
                    while (found != key) asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(theirs) : "memory");
                    *theirs = ~key;
                    asm volatile("fence.proxy.async.global;" ::: "memory");
                    copy_bytes(room + (me - (me > work.part)) * bytes, sums_of(began + 2 * me) + low / BOX * BYTES, bytes, gathered + 8 * half);
                }
                if (me < 32) __syncwarp();
                barrier_wait(gathered + 8 * half, 0);
                for (int p = 1; p < work.count; p++, room += bytes) {
#pragma unroll
                    for (int i = 0; i < SUMS / 4; i++)
                        if (8 * i >= low && 8 * i < high) add4(d + 4 * i, room + (i - low / 8) * 2048 + me * 16);
                }
            }
            float f = __uint_as_float((u32)row_group) * Codes<T>::UNDO * of_x;
            if (GATE) {
                float u = __uint_as_float((u32)up_group) * Codes<T>::UNDO * of_x;
#pragma unroll
                for (int n = 0; n < SUMS; n += 4)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        float v = d[n + i] * f;
                        d[n + i] = __fdividef(v, 1.f + __expf(-v)) * (d[n + i + 2] * u);
                    }
            } else {
#pragma unroll
                for (int i = 0; i < SUMS; i++) d[i] *= f;
            }
            put_all<GATE>(d, target, (u32)(row_group >> 32), meeting + half * (MEETING / WGS), token, low, high, group, lane, w, me, 2 + half);
            if (SETS == 2) arrive(6 + half, 256);
        }
    }
}

#define GEMM(NAME, GATE) \
    extern "C" __global__ void __cluster_dims__(2 * KS, 1, 1) __launch_bounds__(THREADS, 1) NAME( \
        const __grid_constant__ Map x_map, const __grid_constant__ Map units, const u64 *groups, u64 y, u64 ldy, \
        int tokens, int group_count, int row_units, int parts, int whole, int shares, int pairs, int token_tiles, float *partial, \
        u64 *flags, u64 key, int out, int aligned, const float *global, int convention) { \
        multiply<ELEMENT, GATE>(&x_map, &units, groups, y, ldy, tokens, group_count, row_units, parts, whole, shares, pairs, \
                                token_tiles, partial, flags, key, out, aligned, global, convention); \
    }

GEMM(gemm, false)
GEMM(gemm_gate, true)
