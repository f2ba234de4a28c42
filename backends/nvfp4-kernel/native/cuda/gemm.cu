// The product for many rows on sm_90a: y[m, n] = x[m, k] W[n, k]^T with packed NVFP4 weights.
//
// wgmma with both operands in shared memory. Warps that only decode bring 128 rows of the weight by 64 of k (a slab), as
// 16-bit numbers, to a stage of the ring; the tensor copy engine brings TN rows of x beside them; two warpgroups multiply, 64
// rows each. Blocks come in pairs (clusters of two) with the same rows of x, half of which each one loads for both: without
// that the second cache, not the tensor cores, is what a launch waits for.
// Needs layout.cu and elements.cu before it. Definitions: TN, rows of x of a tile (16 to 256, a power of two); ELEMENT, bf16
// or f16.
//
// gemm(x_map, y_map, units, groups u64[group_count], y, ldy, tokens, group_count, row_units, parts, split_tiles, pairs,
//      token_tiles, partial, flags, out, aligned, global, convention); also gemm_gate
//   x_map: tensor map of x, 16 bits, rows of row_units * 128 * parts (or fewer: the copy engine fills up with zeros), boxes
//   of 64 by TN / 2, 128-byte swizzle. y_map, if `aligned`: of y, boxes of 128 bytes (gates in 16 bits: 64) by `piece`
//   tokens, swizzled as wide. units: packed weights, `row_units` units of 1152 bytes (16 rows x 128 k) a row group.
//   groups: {f32 multiplier, u32 first_row * 32 + rows}. parts: summands of x side by side in k. y: element type by out: 0 f32,
//   1 f32 to be added to, 2 bf16, 3 f16; ldy in elements. aligned: rows of y and its start are multiples of 16 bytes and all
//   groups but the last are full. pairs: of tiles of 128 rows, ceil(group_count / 16). global: the per-tensor scale of x
//   that multiplies (convention 1) or divides (2) the sums; convention 0: none.
//   Pairs of tiles below split_tiles are cut into gridDim / 2 equal shares of k (stream-K), the others are dealt whole.
//   partial: f32[gridDim][128 * TN]; flags: u32[2 gridDim], zero before, if split_tiles is not 0, and after every launch.
//   grid 2 min(multiprocessors / 2, work), every block resident; block 32 (8 + WARPS); dynamic shared memory SHARED bytes.

#define ALL4(b) "+f"(d[b]), "+f"(d[b + 1]), "+f"(d[b + 2]), "+f"(d[b + 3])
#define ALL16(b) ALL4(b), ALL4(b + 4), ALL4(b + 8), ALL4(b + 12)
// d += a b, 64 x TN x 16, descriptors of shared memory. add = 0: d = a b.
#if TN == 16
#define PRODUCT(TYPE) \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %10, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32." TYPE "." TYPE " {" \
        "%0,%1,%2,%3,%4,%5,%6,%7" \
        "}, %8, %9, p, 1, 1, 0, 0;}" \
        : ALL4(0), ALL4(4) \
        : "l"(a), "l"(b), "r"(add))
#endif
#if TN == 32
#define PRODUCT(TYPE) \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %18, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " {" \
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15" \
        "}, %16, %17, p, 1, 1, 0, 0;}" \
        : ALL16(0) \
        : "l"(a), "l"(b), "r"(add))
#endif
#if TN == 64
#define PRODUCT(TYPE) \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" \
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31" \
        "}, %32, %33, p, 1, 1, 0, 0;}" \
        : ALL16(0), ALL16(16) \
        : "l"(a), "l"(b), "r"(add))
#endif
#if TN == 128
#define PRODUCT(TYPE) \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" \
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63" \
        "}, %64, %65, p, 1, 1, 0, 0;}" \
        : ALL16(0), ALL16(16), ALL16(32), ALL16(48) \
        : "l"(a), "l"(b), "r"(add))
#endif
#if TN == 256
#define PRODUCT(TYPE) \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %130, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {" \
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63," \
        "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
        "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95," \
        "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
        "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127" \
        "}, %128, %129, p, 1, 1, 0, 0;}" \
        : ALL16(0), ALL16(16), ALL16(32), ALL16(48), ALL16(64), ALL16(80), ALL16(96), ALL16(112) \
        : "l"(a), "l"(b), "r"(add))
#endif
DEVICE void product(bf16, float (&d)[TN / 2], u64 a, u64 b, int add) { PRODUCT("bf16"); }
DEVICE void product(f16, float (&d)[TN / 2], u64 a, u64 b, int add) { PRODUCT("f16"); }

DEVICE void open_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void close_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEVICE void wait_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

DEVICE void barrier_init(u32 at, u32 count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(count)); }
DEVICE void barrier_arrive(u32 at) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at) : "memory"); }
// The barrier at the same place in block `rank` of the pair.
DEVICE void barrier_arrive_at(u32 at, u32 rank) {
    asm volatile(
        "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(at), "r"(rank)
        : "memory");
}
DEVICE void barrier_expect(u32 at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(u32 at, u32 phase) {
    asm volatile(
        "{.reg .pred p; AGAIN: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @p bra PASSED; bra AGAIN; PASSED: }" ::"r"(at), "r"(phase)
        : "memory");
}
struct alignas(64) Map {
    u64 words[16];
};
// A box of x to both blocks of the pair.
DEVICE void copy_in(u32 to, const Map *map, int k, int token, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(k), "r"(token), "r"(barrier), "h"((u16)3)
        : "memory");
}
DEVICE void copy_unit(u32 to, const void *from, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "n"(1152), "r"(barrier)
                 : "memory");
}
DEVICE void copy_out(u32 from, const Map *map, int row, int token, bool add) {
    if (add)
        asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(row), "r"(token), "r"(from) : "memory");
    else
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(row), "r"(token), "r"(from) : "memory");
}
// A tile of lines of 128 bytes, swizzled, as products take it.
DEVICE u64 tile_at(u32 at) { return (u64)(at >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62; }
DEVICE void meet(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void meet_pair() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEVICE void store4(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

constexpr int WARPS = TN == 256 ? 4 : 8; // that decode
constexpr int SETS = 4; // slabs decoded at a time, by a team of warps each: what comes before and after costs a wait a slab
constexpr int TEAM = WARPS / SETS;
constexpr int GROUPS = 8 / TEAM; // row groups of a warp
constexpr int UNIT = 1152;       // bytes of 16 rows by 128 k
constexpr int A_STAGE = 128 * 128, B_STAGE = TN * 128;
constexpr int PIECE = 8192;    // outputs of one warpgroup on their way to memory
constexpr int PACK = 8 * UNIT; // packed weights of 128 rows by 128 k
constexpr int PACKS = TN == 256 ? 2 : TN == 128 ? 5 : 6;
constexpr int FITTING = (232448 - 1024 - 2 * PIECE - PACKS * PACK) / (A_STAGE + B_STAGE);
constexpr int STAGES = FITTING < 8 ? FITTING : 8;
constexpr int SHARED = STAGES * (A_STAGE + B_STAGE) + 2 * PIECE + PACKS * (PACK + 16) + 16 * STAGES;
constexpr int SUMS = TN / 2; // of a thread

// What a pair has to do, the same for those who load and those who multiply.
struct Work {
    int tile, from, to; // units of k
};
struct Plan {
    int units, split_tiles, tiles, begin, end, next;
    DEVICE Plan start(int units, int split_tiles, int tiles) {
        Plan p;
        u64 all = (u64)units * split_tiles;
        p.units = units, p.split_tiles = split_tiles, p.tiles = tiles;
        u32 me = blockIdx.x >> 1, count = gridDim.x >> 1;
        p.begin = (int)(all * me / count), p.end = (int)(all * (me + 1) / count);
        p.next = split_tiles + me;
        return p;
    }
    __device__ __forceinline__ bool take(Work &w) {
        if (begin < end) {
            w.tile = begin / units, w.from = begin - w.tile * units, w.to = min(units, w.from + end - begin);
            begin += w.to - w.from;
            return true;
        }
        if (next >= tiles) return false;
        w.tile = next, w.from = 0, w.to = units;
        next += gridDim.x >> 1;
        return true;
    }
    // Units of all work.
    __device__ __forceinline__ int total() const {
        int whole = next < tiles ? (tiles - 1 - next) / (int)(gridDim.x >> 1) + 1 : 0;
        return end - begin + whole * units;
    }
};
// Where a pair of tiles lies. Bands of eight token tiles: what runs at a time then shares rows of x and of the weight.
struct Place {
    int pair, token;
    DEVICE Place of(int tile, int pairs, int token_tiles) {
        int band = tile / (8 * pairs), in = tile - band * 8 * pairs, high = min(8, token_tiles - 8 * band);
        return {in / high, (8 * band + in % high) * TN};
    }
};
// The parts of all work, one after another; PARTS a unit.
template <int PARTS> struct Walk {
    Plan plan;
    Work work;
    int at;
    bool more;
    DEVICE Walk start(const Plan &plan) {
        Walk w;
        w.plan = plan, w.at = 0, w.more = w.plan.take(w.work);
        if (w.more) w.at = w.work.from * PARTS;
        return w;
    }
    // Whether the next part is of another piece of work.
    __device__ __forceinline__ bool step() {
        if (++at < work.to * PARTS) return false;
        more = plan.take(work);
        if (more) at = work.from * PARTS;
        return true;
    }
};

DEVICE uint4 read4(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
DEVICE u32 read1(u32 at) {
    u32 v;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}
// Eight codes to 16 bytes of shared memory.
template <class T> DEVICE void decode(u32 word, u32 scale, u32 at) {
    u32 p[4];
    Codes<T>::pairs(word, p);
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(Codes<T>::times(p[0], scale)), "r"(Codes<T>::times(p[1], scale)),
                 "r"(Codes<T>::times(p[2], scale)), "r"(Codes<T>::times(p[3], scale))
                 : "memory");
}

enum { OUT_F32, OUT_ADD, OUT_BF16, OUT_F16 };

// Outputs of a warpgroup in shared memory: WIDTH rows of the weight by up to COUNT tokens, in boxes of LINE bytes a token.
template <bool GATE, int SIZE> struct Piece {
    static constexpr int WIDTH = GATE ? 32 : 64;
    static constexpr int LINE = WIDTH * SIZE < 128 ? WIDTH * SIZE : 128;
    static constexpr int BOXES = WIDTH * SIZE / LINE;
    static constexpr int MOST = PIECE / (WIDTH * SIZE);
    static constexpr int COUNT = TN < MOST ? TN : MOST;
    DEVICE u32 at(u32 base, int token, int row) {
        int box = row * SIZE / LINE, byte = row * SIZE % LINE;
        int swizzled = LINE == 128 ? byte ^ (token & 7) << 4 : byte ^ (token >> 1 & 3) << 4;
        return base + box * (COUNT * LINE) + token * LINE + swizzled;
    }
};

// Where outputs go.
struct Target {
    const Map *map;
    u64 y, ldy;
    const u64 *groups;
    int tokens, group_count, out, aligned;
};

// What this thread sent off has left shared memory.
DEVICE void piece_left() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Tokens from `token` on, rows from group `group` on, `skip` rows into it.
template <bool GATE, int SIZE>
DEVICE void write_out(const Target &to, u32 base, int token, int group, int me, int own) {
    using P = Piece<GATE, SIZE>;
    if (to.aligned) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        meet(own, 128);
        if (me == 0) {
#pragma unroll
            for (int b = 0; b < P::BOXES; b++)
                if (group < to.group_count) copy_out(base + b * (P::COUNT * P::LINE), to.map, group * 16 + b * (P::LINE / SIZE), token, to.out == OUT_ADD);
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
        return;
    }
    meet(own, 128);
    int count = min(P::COUNT, to.tokens - token), groups = min(P::WIDTH / 16, to.group_count - group);
    for (int e = me; e < count * P::WIDTH; e += 128) {
        int i = e / P::WIDTH, r = e % P::WIDTH;
        if (r / 16 >= groups) continue;
        u32 place = (u32)(to.groups[group + r / 16] >> 32);
        if (r % 16 >= (place & 31)) continue;
        u64 at = (u64)(token + i) * to.ldy + (place >> 5) + r % 16;
        u32 from = P::at(base, i, r);
        if (SIZE == 2) {
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
    meet(own, 128);
}

// The sums of a warpgroup to y, a piece at a time. Without a gate a lane has rows g and g + 8 of its warp's 16, with one
// the products of two rows, in d[4 n] and d[4 n + 1]; two tokens, 2 t and 2 t + 1 of eight.
template <bool GATE, int SIZE>
DEVICE void put_all(const float (&d)[SUMS], const Target &to, u32 base, int token, int group, int lane, int w, int me, int own) {
    using P = Piece<GATE, SIZE>;
    int g = lane >> 2, t = lane & 3, matrix = lane >> 3;
#pragma unroll
    for (int first = 0; first < TN; first += P::COUNT) {
        if (me == 0) piece_left();
        meet(own, 128);
        const float *s = d + first / 2;
        if (SIZE == 2) {
            bool half = to.out == OUT_F16;
            auto pack = [&](float a, float b) { return half ? Codes<f16>::pack(a, b) : Codes<bf16>::pack(a, b); };
            if (GATE) {
#pragma unroll
                for (int n = 0; n < P::COUNT / 8; n += 4) {
                    u32 v[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        int block = (n + i) % (P::COUNT / 8);
                        v[i] = pack(s[4 * block], s[4 * block + 1]);
                    }
                    store4(P::at(base, 8 * ((n + matrix) % (P::COUNT / 8)) + (lane & 7), 8 * w), v[0], v[1], v[2], v[3]);
                }
            } else {
#pragma unroll
                for (int n = 0; n < P::COUNT / 8; n += 2)
                    store4(P::at(base, 8 * (n + (matrix >> 1)) + (lane & 7), 16 * w + (matrix & 1) * 8), pack(s[4 * n], s[4 * n + 1]),
                           pack(s[4 * n + 2], s[4 * n + 3]), pack(s[4 * n + 4], s[4 * n + 5]), pack(s[4 * n + 6], s[4 * n + 7]));
            }
        } else {
#pragma unroll
            for (int n = 0; n < P::COUNT / 8; n++)
#pragma unroll
                for (int i = 0; i < (GATE ? 2 : 4); i++)
                    asm volatile("st.shared.f32 [%0], %1;" ::"r"(P::at(base, 8 * n + 2 * t + (i & 1), (GATE ? 8 : 16) * w + g + (i >> 1) * 8)), "f"(s[4 * n + i]) : "memory");
        }
        write_out<GATE, SIZE>(to, base, token + first, group, me, own);
    }
}

template <class T, bool GATE>
DEVICE void multiply(
    const Map *x_map, const Map *y_map, const u8 *units, const u64 *groups, u64 y, u64 ldy, int tokens, int group_count,
    int row_units, int parts, int split_tiles, int pairs, int token_tiles, float *partial, u32 *flags, int out, int aligned,
    const float *global, int convention) {
    extern __shared__ __align__(1024) u8 room[];
    u32 weights = shared_address(room), xs = weights + STAGES * A_STAGE, store = xs + STAGES * B_STAGE, packs = store + 2 * PIECE;
    u32 full = packs + PACKS * PACK, empty = full + 8 * STAGES, packed = empty + 8 * STAGES, decoded = packed + 8 * PACKS;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, rank = blockIdx.x & 1;
    if (threadIdx.x == 0) {
        if (weights & 1023) asm volatile("trap;");
        for (int i = 0; i < STAGES; i++) barrier_init(full + 8 * i, TEAM + 1), barrier_init(empty + 8 * i, 16);
        for (int i = 0; i < PACKS; i++) barrier_init(packed + 8 * i, 1), barrier_init(decoded + 8 * i, 2 * TEAM);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    meet_pair();
    let_next_start();
    int all = row_units * parts;
    Plan plan = Plan::start(all, split_tiles, pairs * token_tiles);
    // This block's half of the rows of x of one slab, to both.
    auto token_of = [&](const Work &work) { return Place::of(work.tile, pairs, token_tiles).token + rank * (TN / 2); };
    auto bring = [&](int slab, int token, u32 stage) {
        barrier_expect(full + 8 * stage, B_STAGE);
        copy_in(xs + stage * B_STAGE + rank * (B_STAGE / 2), x_map, slab * 64, token, full + 8 * stage);
    };
    if (warp >= 8) {
        if (TN == 256) asm volatile("setmaxnreg.dec.sync.aligned.u32 96;");
        int set = (warp - 8) / TEAM, member = (warp - 8) % TEAM, total = 2 * plan.total();
        // The first warp of a set also has brought what the rings get room for: x of its slab, by one lane, and where it has the
        // second slab of a unit, weights, by eight lanes, a row group each. The first stages of x are brought by a warp
        // that multiplies.
        bool brings = member == 0;
        Walk<1> later = Walk<1>::start(plan);
        Walk<2> slab = Walk<2>::start(plan);
        const u8 *from = units;
        auto begin = [&]() {
            int row_tile = Place::of(later.work.tile, pairs, token_tiles).pair * 2 + rank, halves = group_count / 2, j = lane & 7;
            int group = GATE ? min(row_tile * 4 + (j & 3), halves - 1) + (j >> 2) * halves : min(row_tile * 8 + j, group_count - 1);
            from = units + (u64)group * row_units * UNIT;
        };
        auto step_units = [&](int count) {
            bool fresh = false;
            for (int i = 0; i < count && later.more; i++) fresh |= later.step();
            if (fresh && later.more) begin();
        };
        auto bring_unit = [&](u32 slot) {
            if (!later.more) return;
            int unit = parts == 1 ? later.at : later.at % row_units;
            if (lane == 0) barrier_expect(packed + 8 * slot, PACK);
            __syncwarp();
            if (lane < 8) copy_unit(packs + slot * PACK + lane * UNIT, from + (u64)unit * UNIT, packed + 8 * slot);
        };
        int token = 0;
        auto step_slabs = [&](int count) {
            bool fresh = false;
            for (int i = 0; i < count && slab.more; i++) fresh |= slab.step();
            if (fresh && slab.more) token = token_of(slab.work);
        };
        if (brings) {
            if (later.more) begin(), token = token_of(slab.work);
            if (set == 0) {
                for (int i = 0; i < PACKS; i++) {
                    bring_unit(i);
                    step_units(1);
                }
            } else if (set & 1) {
                step_units(PACKS + set / 2);
            }
            step_slabs(set);
        }
        // A lane has 16 of k of two rows, 16 bytes each of eight codes. Of gate and up, eight rows each lie side by side.
        int g = lane >> 2, t = lane & 3;
        u32 low = g * 128 + ((2 * t) ^ g) * 16, high = g * 128 + ((2 * t + 1) ^ g) * 16;
        for (int n = set; n < total; n += SETS) {
            u32 slot = n / 2 % PACKS, stage = n % STAGES, s = n & 1;
            uint4 codes[GROUPS];
            u32 scales[GROUPS];
            barrier_wait(packed + 8 * slot, n / 2 / PACKS & 1);
#pragma unroll
            for (int q = 0; q < GROUPS; q++) {
                u32 at = packs + slot * PACK + (member * GROUPS + q) * UNIT;
                codes[q] = read4(at + s * 512 + 16 * lane), scales[q] = read1(at + 1024 + 4 * lane) >> 16 * s;
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(decoded + 8 * slot);
            if (n >= STAGES) {
                barrier_wait(empty + 8 * stage, n / STAGES - 1 & 1);
                if (brings && lane == 0) bring(slab.at, token, stage);
            }
            if (brings) {
                if (s && later.more) {
                    barrier_wait(decoded + 8 * slot, n / 2 / PACKS & 1);
                    bring_unit(slot);
                    step_units(SETS / 2);
                }
                step_slabs(SETS);
            }
            u32 to = weights + stage * A_STAGE;
#pragma unroll
            for (int q = 0; q < GROUPS; q++) {
                int j = member * GROUPS + q;
                u32 a = to + (GATE ? (j & 3) * 32 + (j >> 2) * 8 : j * 16) * 128, b = a + (GATE ? 16 : 8) * 128;
                u32 one = Codes<T>::scale(scales[q], 0), two = Codes<T>::scale(scales[q], 1);
                decode<T>(codes[q].x, one, a + low), decode<T>(codes[q].y, one, a + high);
                decode<T>(codes[q].z, two, b + low), decode<T>(codes[q].w, two, b + high);
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncwarp();
            if (lane == 0) barrier_arrive(full + 8 * stage);
        }
    } else {
        if (TN == 256) asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
        wait_for_previous();
        if (threadIdx.x == 0) {
            Walk<2> first = Walk<2>::start(plan);
            int first_token = first.more ? token_of(first.work) : 0;
            for (int i = 0; i < STAGES && first.more; i++) {
                bring(first.at, first_token, i);
                if (first.step() && first.more) first_token = token_of(first.work);
            }
        }
        __syncwarp();
        int half = warp >> 2, w = warp & 3, me = threadIdx.x & 127, own = 2 + half;
        Target target = {y_map, y, ldy, groups, tokens, GATE ? group_count / 2 : group_count, out, aligned};
        u32 base = store + half * PIECE;
        u32 stage = 0, phase = 0, before = 0;
        auto leave = [&](u32 stage) {
            if (lane < 2) barrier_arrive_at(empty + 8 * stage, lane);
        };
        float d[SUMS], of_x = convention == 0 ? 1.f : convention == 1 ? *global : 1.f / *global;
        Work work;
        while (plan.take(work)) {
            Place place = Place::of(work.tile, pairs, token_tiles);
            int add = 0;
            for (int s = 2 * work.from; s < 2 * work.to; s++) {
                barrier_wait(full + 8 * stage, phase);
                u64 a = tile_at(weights + stage * A_STAGE + half * (A_STAGE / 2)), b = tile_at(xs + stage * B_STAGE);
                open_products();
                product(T{}, d, a, b, add);
                product(T{}, d, a + 2, b + 2, 1);
                product(T{}, d, a + 4, b + 4, 1);
                product(T{}, d, a + 6, b + 6, 1);
                close_products();
                wait_products<1>();
                if (add) leave(before);
                add = 1, before = stage;
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
            wait_products<0>();
            leave(before);

            int row_tile = place.pair * 2 + rank;
            if (work.from > 0) {
                float4 *slot = (float4 *)(partial + (u64)blockIdx.x * 128 * TN) + threadIdx.x;
#pragma unroll
                for (int i = 0; i < SUMS / 4; i++) __stcg(slot + i * 256, make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]));
                meet(own, 128);
                if (me == 0) asm volatile("fence.acq_rel.gpu;\nst.release.gpu.global.u32 [%0], 1;" ::"l"(flags + 2 * blockIdx.x + half) : "memory");
                continue;
            }
            if (work.to < all) {
                u64 sum = (u64)all * split_tiles;
                u32 count = gridDim.x >> 1;
                for (u32 c = (blockIdx.x >> 1) + 1; c < count && sum * c / count < (u64)all * (work.tile + 1); c++) {
                    if (sum * c / count == sum * (c + 1) / count) continue;
                    u32 other = 2 * c + rank;
                    if (me == 0) {
                        u32 ready = 0;
                        while (!ready) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(ready) : "l"(flags + 2 * other + half) : "memory");
                        flags[2 * other + half] = 0;
                    }
                    meet(own, 128);
                    const float4 *slot = (const float4 *)(partial + (u64)other * 128 * TN) + threadIdx.x;
#pragma unroll
                    for (int i = 0; i < SUMS / 4; i++) {
                        float4 v = __ldcg(slot + i * 256);
                        d[4 * i] += v.x, d[4 * i + 1] += v.y, d[4 * i + 2] += v.z, d[4 * i + 3] += v.w;
                    }
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
            if (out >= OUT_BF16) put_all<GATE, 2>(d, target, base, place.token, group, lane, w, me, own);
            else put_all<GATE, 4>(d, target, base, place.token, group, lane, w, me, own);
        }
        if (me == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        __syncwarp();
    }
    // Neither block's memory goes away while the other one may still write to it.
    meet_pair();
}

#define GEMM(NAME, GATE) \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(32 * (8 + WARPS), 1) NAME( \
        const __grid_constant__ Map x_map, const __grid_constant__ Map y_map, const u8 *units, const u64 *groups, u64 y, u64 ldy, \
        int tokens, int group_count, int row_units, int parts, int split_tiles, int pairs, int token_tiles, float *partial, \
        u32 *flags, int out, int aligned, const float *global, int convention) { \
        multiply<ELEMENT, GATE>(&x_map, &y_map, units, groups, y, ldy, tokens, group_count, row_units, parts, split_tiles, pairs, \
                                token_tiles, partial, flags, out, aligned, global, convention); \
    }

GEMM(gemm, false)
GEMM(gemm_gate, true)
