// The product for many rows on sm_90a: y[m, n] = x[m, k] W[n, k]^T with packed NVFP4 weights.
//
// wgmma with the weight in registers: two warpgroups of 64 rows each decode packed weights from shared memory into operands, a
// product ahead, so that decoding runs beside the tensor cores. One warp has the copy engine bring TN rows of x by 64 of k (a
// slab), one packed weights. Blocks come in pairs (in a cluster) with the same rows of x, half of which each one loads for
// both: without that the second cache, not the tensor cores, is what a launch waits for. Where tiles are few, several pairs
// share the k of one: in a cluster of 2 KS blocks, which send each other sums, or through memory.
// Needs layout.cu, elements.cu, wgmma.cu, copy.cu, work.cu and output.cu before it. Definitions: TN, rows of x of a tile (32, 64,
// 128 or 256); KS, pairs of a cluster (1, 2 or 4); ELEMENT, bf16 or f16.
//
// gemm(x_map, units, groups u64[group_count], y, ldy, tokens, group_count, row_units, parts, whole, shares, pairs, token_tiles,
//      partial, flags, key, out, aligned, global, convention); also gemm_gate
//   x_map: tensor map of x, 16 bits, rows of row_units * 128 * parts (or fewer: the copy engine fills up with zeros), boxes
//   of 64 by TN / 2, 128-byte swizzle. units: tensor map of packed weights, 8-byte words [groups, row_units, 144], boxes of
//   8 (of a gate: 4) by 1 by 144: units of 1152 bytes (16 rows x 128 k).
//   groups: {f32 multiplier, u32 first_row * 32 + rows}. parts: summands of x side by side in k. y: element type by out: 0 f32,
//   1 f32 to be added to, 2 bf16, 3 f16; ldy in elements. aligned: rows of y and its start are multiples of
//   16 bytes. pairs: of tiles of 128 rows, ceil(group_count / 16). global: the per-tensor scale of x that multiplies
//   (convention 1) or divides (2) the sums; convention 0: none.
//   KS 1: pairs of tiles below `whole` are dealt whole; of each of the others `shares` pairs of blocks (at most 8) do a piece of k.
//   KS above 1: all are whole, and each has a cluster.
//   partial: f32[gridDim][128 * TN]; flags: u64[gridDim][16], none of which is `key` before, nor after.
//   grid: KS 1: at most 2 (multiprocessors / 2), every block resident; block THREADS; dynamic shared memory SHARED bytes.

constexpr int UNIT = 1152;      // bytes of 16 rows by 128 k
constexpr int PACK = 8 * UNIT;  // packed weights of 128 rows by 128 k
constexpr int STAGE = TN * 128; // x by 64 of k
// Where sums are few, two sets of warpgroups take turns at the slabs of a tile.
constexpr int SETS = TN <= 64 ? 2 : 1;
constexpr int PACKS = TN == 256 ? 5 : 8;
constexpr int MEETING = SETS == 2 ? 2 * 128 * SUMS * 4 : 0; // sums of the second set on their way to the first
constexpr int BOX = 16; // tokens that one of those who share a tile through memory sums up at least
// Tokens of each of KS pieces of k in the end, and bytes of them that arrive from the others.
constexpr int EACH = TN / KS, ARRIVING = (KS - 1) * EACH * 512;
constexpr int OTHERS = 16 + 8 * WRITTEN + MEETING + ARRIVING + PACKS * (PACK + 16);
constexpr int FITTING = (232448 - OTHERS) / (STAGE + 16) / SETS * SETS;
constexpr int STAGES = FITTING < 16 ? FITTING : 16;
constexpr int SHARED = STAGES * (STAGE + 16) + OTHERS;
constexpr int WORKERS = 8 * SETS; // warps that multiply
constexpr int THREADS = 32 * WORKERS + 128;
constexpr int REGISTERS = SETS == 2 ? 112 : 232; // of a thread that multiplies

// Operands of a slab of a lane's two rows, `above` and `below` (g and g + 8 of its warp's 16; of gate and up the same row each).
// All lanes of a row read all of its codes and take a pair of k of each word.
template <class T, bool GATE> struct Weights {
    static constexpr int UP = GATE ? 4 : 0;
    u32 codes_at, scales_at; // of the row above, in a pack
    u32 select;              // of scales: the byte of a row of gate or up twice, else those of both rows
    u32 rotate, sign;        // what brings magnitudes and signs into place
    u32 codes[4], scale[4 + UP];

    // From tile `s` of a unit on.
    DEVICE Weights of(int warp, int lane, int s) {
        Weights o;
        int g = lane >> 2, t = lane & 3, upper = warp & 1;
        u32 unit = (GATE ? warp >> 1 : warp) * UNIT;
        o.codes_at = unit + g * 64 + (GATE ? upper * 8 : 0) + s * 512, o.scales_at = unit + 1024 + g * 16;
        o.select = (GATE ? 0x4040 + upper * 0x101 : 0x4140) + s * 0x202;
        o.rotate = Codes<T>::ROTATE >> 8 * t & 31, o.sign = 0x02040801 >> 8 * t & 15;
        return o;
    }
    // Scales of a unit.
    __device__ __forceinline__ void fetch_scales(u32 pack) {
#pragma unroll
        for (int u = 0; u <= UP; u += 4) {
            uint4 four = read4(pack + scales_at + u * UNIT);
            scale[u] = four.x, scale[u + 1] = four.y, scale[u + 2] = four.z, scale[u + 3] = four.w;
        }
    }
    // Codes of sixteen values of k, the `b`th.
    __device__ __forceinline__ void fetch(u32 pack, int b) {
        u32 at = pack + codes_at + b * 16;
        if (GATE) {
            uint2 gate = read2(at), up = read2(at + 4 * UNIT);
            codes[0] = gate.x, codes[2] = gate.y, codes[1] = up.x, codes[3] = up.y;
        } else {
            uint4 both = read4(at);
            codes[0] = both.x, codes[2] = both.y, codes[1] = both.z, codes[3] = both.w;
        }
    }
    // What was fetched last as operands.
    __device__ __forceinline__ void decode(int b, u32 (&to)[4]) const {
        u32 one = Codes<T>::expand(scale[b], select), two = GATE ? Codes<T>::expand(scale[b + UP], select) : one;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 w = codes[i];
            u32 pair = (__funnelshift_l(w, w, rotate) & Codes<T>::MAGNITUDE) | (w * sign & 0x80008000);
            to[i] = i & 1 ? (GATE ? Codes<T>::times_low(pair, two) : Codes<T>::times_high(pair, one)) : Codes<T>::times_low(pair, one);
        }
    }
    // From tile `s` of a unit to the other one.
    __device__ __forceinline__ void turn(int s) { codes_at += 512 - 1024 * s, select ^= 0x202; }
};

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
    u32 xs = shared_address(memory), meeting = xs + STAGES * STAGE, arriving = meeting + MEETING, packs = arriving + ARRIVING;
    u32 written = packs + PACKS * PACK, full = written + 8 * WRITTEN, empty = full + 8 * STAGES, packed = empty + 8 * STAGES, decoded = packed + 8 * PACKS;
    u32 gathered = decoded + 8 * PACKS;
    int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, rank = blockIdx.x & 1, piece = blockIdx.x / 2 % KS;
    int all = row_units * parts;
    Plan plan = Plan::start(all, whole, pairs * token_tiles, shares);
    if (threadIdx.x == 32 * WORKERS) {
        expect_map(x_map), expect_map(units);
        if (xs & 1023) asm volatile("trap;");
        for (int i = 0; i < STAGES; i++) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, 16);
        for (int i = 0; i < PACKS; i++) barrier_init(packed + 8 * i, 1), barrier_init(decoded + 8 * i, WORKERS);
        for (int i = 0; i < 2; i++) {
            barrier_init(gathered + 8 * i, 1);
            if (KS > 1) barrier_expect(gathered + 8 * i, ARRIVING / 2);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    meet_cluster();
    let_next_start();
    if (warp >= WORKERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        Work work;
        if (warp == WORKERS) {
            // This block's half of the rows of x of one slab, to both.
            wait_for_previous();
            u32 stage = 0, round = 0;
            while (plan.take(work)) {
                int token = Place::of(work.tile, pairs, token_tiles).token + rank * (TN / 2);
                for (int slab = 2 * work.from; slab < 2 * work.to; slab++) {
                    if (round) barrier_wait(empty + 8 * stage, round - 1 & 1);
                    if (lane == 0) {
                        barrier_expect(full + 8 * stage, STAGE);
                        copy_in(xs + stage * STAGE + rank * (STAGE / 2), x_map, slab * 64, token, full + 8 * stage, 3 << 2 * piece);
                    }
                    if (++stage == STAGES) stage = 0, round++;
                }
            }
        } else if (warp == WORKERS + 1) {
            // Weights do not depend on what ran before.
            u32 slot = 0, round = 0;
            while (plan.take(work)) {
                int row_tile = Place::of(work.tile, pairs, token_tiles).pair * 2 + rank, group = row_tile * (GATE ? 4 : 8);
                for (int at = work.from; at < work.to; at++) {
                    if (round) barrier_wait(decoded + 8 * slot, round - 1 & 1);
                    if (lane == 0) {
                        u32 to = packs + slot * PACK, unit = parts == 1 ? at : at % row_units;
                        barrier_expect(packed + 8 * slot, PACK);
                        copy_units(to, units, unit, group, packed + 8 * slot);
                        if (GATE) copy_units(to + PACK / 2, units, unit, group + group_count / 2, packed + 8 * slot);
                    }
                    if (++slot == PACKS) slot = 0, round++;
                }
            }
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
        int set = SETS == 2 ? warp >> 3 : 0, half = warp >> 2 & 1, w = warp & 3, me = threadIdx.x & 127;
        Target target = {y, ldy, groups, tokens, GATE ? group_count / 2 : group_count, out, aligned};
        u32 stage = set, phase = 0, slot = 0, turn = 0;
        int left = plan.total(), s = set;
        // A stage that is used again is left to whoever fills it: without those that are not, nothing is under way to a block that ends.
        u32 empty_there = address_in(empty, 2 * piece + (lane & 1));
        int refills = 2 * left - STAGES - set;
        auto leave = [&](u32 stage, bool used) { barrier_arrive_there(empty_there + 8 * stage, used && lane < 2 && refills > 0), refills -= used ? SETS : 0; };
        float d[SUMS];
        u32 operands[4][4]; // of four products in turn
        Weights<T, GATE> weights = Weights<T, GATE>::of(warp & 7, lane, set);
        // With one set a warp has both slabs of a unit in turn.
        auto fetch = [&](int b) {
            u32 pack = packs + slot * PACK;
            if (b == 0 && left && (SETS == 2 || s == 0)) {
                barrier_wait(packed + 8 * slot, turn);
                weights.fetch_scales(pack);
            }
            weights.fetch(pack, b);
        };
        auto decode = [&](int b) {
            weights.decode(b, operands[b]);
            if (b < 3) return;
            bool over = SETS == 2 || s == 1;
            __syncwarp();
            barrier_arrive_if(decoded + 8 * slot, over && lane == 0);
            if (over) {
                left--;
                if (++slot == PACKS) slot = 0, turn ^= 1;
            }
            if (SETS == 1) weights.turn(s), s ^= 1;
        };
        fetch(0), decode(0);
        wait_for_previous();
        float of_x = convention == 0 ? 1.f : convention == 1 ? *global : 1.f / *global;
        Work work;
        while (plan.take(work)) {
            Place place = Place::of(work.tile, pairs, token_tiles);
#pragma unroll
            for (int i = 0; i < SUMS; i++) d[i] = 0.f;
            int steps = (work.to - work.from) * (SETS == 2 ? 1 : 2);
            u32 before = 0;
            for (int n = 0; n < steps; n++) {
                barrier_wait(full + 8 * stage, phase);
                u64 x = tile_at(xs + stage * STAGE);
                // The operands of a product are made while the one before it runs.
#pragma unroll
                for (int b = 0; b < 4; b++) {
                    fetch((b + 1) % 4);
                    open_products();
                    product(T{}, d, operands[b], x + 2 * b);
                    close_products();
                    wait_products<1>();
                    if (b == 0) leave(before, n > 0);
                    decode((b + 1) % 4);
                }
                before = stage, stage += SETS;
                if (stage >= STAGES) stage -= STAGES, phase ^= 1;
            }
            wait_products<0>();
            leave(before, true);
            if (SETS == 2) {
                u32 at = meeting + (half * 128 + me) * 16;
                if (set == 1) {
#pragma unroll
                    for (int i = 0; i < SUMS; i += 4) write4(at + i * 1024, d[i], d[i + 1], d[i + 2], d[i + 3]);
                }
                meet(4 + half, 256);
                if (set == 0) {
#pragma unroll
                    for (int i = 0; i < SUMS; i += 4) add4(d + i, at + i * 1024);
                }
                meet(4 + half, 256);
                if (set == 1) continue;
            }

            int row_tile = place.pair * 2 + rank, low = 0, high = TN;
            if (KS > 1) {
                // Every block of the cluster has some of the tokens in the end; the others send it theirs.
                constexpr int ROOM = EACH / 8 * 2048;
                u32 to = arriving + half * (KS - 1) * ROOM + me * 16, barrier = gathered + 8 * half;
                low = piece * EACH, high = low + EACH;
#pragma unroll
                for (int q = 0; q < KS; q++) {
                    if (q == piece) continue;
                    u32 there = address_in(to + (piece - (piece > q)) * ROOM, 2 * q + rank), arrived = address_in(barrier, 2 * q + rank);
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
                int owners = min(work.count, BOXES), first = blockIdx.x - 2 * work.part;
                auto begin_of = [&](int part) { return part < owners ? BOXES * part / owners * BOX : TN; };
                low = begin_of(work.part), high = begin_of(work.part + 1);
                auto sums_of = [&](int block) { return (u8 *)partial + (u64)(2 * block + half) * (BOXES * BYTES); };
                u64 *flag = flags + half * 8;
#pragma unroll
                for (int i = 0; i < SUMS / 4; i++)
                    if (8 * i < low || 8 * i >= high) __stcg((float4 *)sums_of(blockIdx.x) + i * 128 + me, make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]));
                meet(2 + half, 128);
                if (me < owners && me != work.part)
                    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag + blockIdx.x * 16 + me), "l"(key) : "memory");
                if (low == high) continue;
                // What the others have of them comes to where x was, when both warpgroups are done with that.
                meet(1, 256);
                u32 bytes = (high - low) / BOX * BYTES, room = xs + half * (work.count - 1) * bytes;
                if (me == 0) barrier_expect(gathered + 8 * half, bytes * (work.count - 1));
                if (me < 32) __syncwarp();
                if (me < work.count && me != work.part) {
                    u64 *theirs = flag + (first + 2 * me) * 16 + work.part, found = ~key;
                    while (found != key) asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(theirs) : "memory");
                    *theirs = ~key;
                    asm volatile("fence.proxy.async.global;" ::: "memory");
                    copy_bytes(room + (me - (me > work.part)) * bytes, sums_of(first + 2 * me) + low / BOX * BYTES, bytes, gathered + 8 * half);
                }
                if (me < 32) __syncwarp();
                barrier_wait(gathered + 8 * half, 0);
                for (int p = 1; p < work.count; p++, room += bytes) {
#pragma unroll
                    for (int i = 0; i < SUMS / 4; i++)
                        if (8 * i >= low && 8 * i < high) add4(d + 4 * i, room + (i - low / 8) * 2048 + me * 16);
                }
            }
            // The rows of a warp are of one group, or of one of each half.
            int group = GATE ? row_tile * 4 + half * 2 : row_tile * 8 + half * 4;
            if (GATE) {
                int mine = min(group + w / 2, group_count / 2 - 1);
                float f = __uint_as_float((u32)groups[mine]) * Codes<T>::UNDO * of_x;
                float u = __uint_as_float((u32)groups[mine + group_count / 2]) * Codes<T>::UNDO * of_x;
#pragma unroll
                for (int n = 0; n < SUMS; n += 4)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        float v = d[n + i] * f;
                        d[n + i] = __fdividef(v, 1.f + __expf(-v)) * (d[n + i + 2] * u);
                    }
            } else {
                float f = __uint_as_float((u32)groups[min(group + w, group_count - 1)]) * Codes<T>::UNDO * of_x;
#pragma unroll
                for (int i = 0; i < SUMS; i++) d[i] *= f;
            }
            put_all<GATE>(d, target, written + (warp & 7) * WRITTEN, place.token, low, high, group + (GATE ? w / 2 : w), GATE ? w % 2 * 8 : 0, lane);
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
