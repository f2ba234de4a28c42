// The product for many rows of bf16 on sm_90a, with weights rounded to bf16: y[m, n] = x[m, k] W[n, k]^T with packed NF4 weights.
//
// wgmma with the weights as the first operand, from registers. A byte of codes becomes two values by one look-up in shared
// memory, and these the weights by two operations of bf16, the last of which rounds: within 1.41 * 2^-8 of the weight.
// Operands of a slab (64 of k) come about while the slab before it is multiplied. One warp brings weights, one x, by the tensor
// copy engine as it is. In pairs of blocks (clusters) each block brings half of x for both.
// Needs layout.cu and pieces.cu before it. Definitions: TN, rows of x of a tile (32, 64, 128 or 256); WGS, warpgroups that
// multiply, 64 rows of the weight each; PAIR, 1 or 2 blocks that share rows of x; PACKS, packed weights in flight, 128 of k each;
// ORDERED, whether warpgroups multiply one after another.
//
// nf4_rounded(x_map, y_map, units, y, ldy, tokens, n, row_units, split_tiles, pairs, token_tiles, partial, flags, mark, out,
//             aligned); also nf4_rounded_gate
//   x_map: tensor map of x, boxes of 64 by TN / PAIR, 128-byte swizzle. y_map, if `aligned`: of y, boxes of 128 bytes (gates in
//   16 bits: 64) by as many tokens as fit a piece, swizzled as wide. units: packed weights, `row_units` units of 1152 bytes a
//   row group. y: element type by out: 0 f32, 1 f32 to be added to, 2 bf16, 3 f16; ldy in elements. aligned: rows of y and its
//   start are multiples of 16 bytes. pairs: of tiles of ROWS rows, or tiles where PAIR is 1.
//   Workers are blocks or pairs of them. Tiles below split_tiles are cut into equal shares of k, one a worker (stream-K), the
//   others are dealt whole.
//   partial: f32[gridDim][ROWS * TN]; flags: u64[gridDim * WGS * READERS]; mark: a number no other launch has.
//   grid PAIR * min(multiprocessors / PAIR, work), every block resident; block THREADS; dynamic shared memory SHARED bytes.

#define ALL4(b) "+f"(d[b]), "+f"(d[b + 1]), "+f"(d[b + 2]), "+f"(d[b + 3])
#define ALL16(b) ALL4(b), ALL4(b + 4), ALL4(b + 8), ALL4(b + 12)
// d += a b, 64 x TN x 16; `a` in registers, `b` a descriptor of shared memory. add = 0: d = a b.
#if TN == 32
#define PRODUCT \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" \
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15" \
        "}, {%16,%17,%18,%19}, %20, p, 1, 1, 0;}" \
        : ALL16(0) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
#endif
#if TN == 64
#define PRODUCT \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" \
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31" \
        "}, {%32,%33,%34,%35}, %36, p, 1, 1, 0;}" \
        : ALL16(0), ALL16(16) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
#endif
#if TN == 128
#define PRODUCT \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" \
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63" \
        "}, {%64,%65,%66,%67}, %68, p, 1, 1, 0;}" \
        : ALL16(0), ALL16(16), ALL16(32), ALL16(48) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
#endif
#if TN == 256
#define PRODUCT \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %133, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" \
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63," \
        "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
        "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95," \
        "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
        "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127" \
        "}, {%128,%129,%130,%131}, %132, p, 1, 1, 0;}" \
        : ALL16(0), ALL16(16), ALL16(32), ALL16(48), ALL16(64), ALL16(80), ALL16(96), ALL16(112) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
#endif
DEVICE void product(float (&d)[TN / 2], const u32 (&a)[4], u64 b, int add) { PRODUCT; }
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
// A box of x, to both blocks where there are pairs.
DEVICE void copy_in(u32 to, const Map *map, int k, int token, u32 barrier) {
    if (PAIR == 2)
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
            "l"(map), "r"(k), "r"(token), "r"(barrier), "h"((u16)3)
            : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
            "l"(map), "r"(k), "r"(token), "r"(barrier)
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
// Where there are pairs: both blocks have arrived.
DEVICE void pair_arrive() {
    if (PAIR == 2) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
DEVICE void pair_wait() {
    if (PAIR == 2) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEVICE void store4(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

constexpr int ROWS = 64 * WGS, GROUPS = 4 * WGS; // of a tile
constexpr int UNIT = 1152;       // bytes of 16 rows by 128 k
constexpr int SLAB = TN * 128;   // bytes of x of a tile by 64 of k
constexpr int PIECE = TN > 64 ? 4096 : 2048; // outputs of one warpgroup on their way to memory, twice
constexpr int PACK = GROUPS * UNIT;
constexpr int TABLE = 32768;
constexpr int FITTING = (232448 - 512 - 2 * WGS * PIECE - PACKS * PACK - TABLE) / SLAB;
constexpr int STAGES = FITTING < 16 ? FITTING : 16;
constexpr int SHARED = TABLE + STAGES * (SLAB + 16) + 2 * WGS * PIECE + PACKS * (PACK + 16);
constexpr int SUMS = TN / 2; // of a thread
constexpr int THREADS = 128 * WGS + (TN == 256 ? 128 : 64);

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
        u32 me = blockIdx.x / PAIR, count = gridDim.x / PAIR;
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
        next += gridDim.x / PAIR;
        return true;
    }
    // Units of all work.
    __device__ __forceinline__ int total() const {
        int whole = next < tiles ? (tiles - 1 - next) / (int)(gridDim.x / PAIR) + 1 : 0;
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

// bf16(level * UP), UP = 1.1888107612: within 2^-9.32 of the levels, the best factor.
#define DOWN 0.84117674827575684f
// Two codes' products with a scale, rounded once: scale = high + low.
DEVICE u32 times(u32 pair, u32 high, u32 low) {
    u32 y;
    asm("{.reg .b32 t; mul.rn.bf16x2 t, %1, %3; fma.rn.bf16x2 %0, %1, %2, t;}" : "=r"(y) : "r"(pair), "r"(high), "r"(low));
    return y;
}
struct Scale {
    u32 high, low;
};
DEVICE Scale scale_of(float s) {
    s *= DOWN;
    u32 bits = __float_as_uint(s);
    float rest = s - __uint_as_float(bits & 0xffff0000u);
    return {__byte_perm(bits, 0, 0x3232), pack_bf16(rest, rest)};
}
// Operands of a slab: four m64k16.
struct Operands {
    u32 a[4][4];
};
// Bytes of the value of a code.
DEVICE u32 level(u32 code) {
    u32 low = code & 8 ? __byte_perm(0xce9644c2, 0x985c2b06, code & 7) : __byte_perm(0xf0205498, 0x00de61ad, code & 7);
    u32 high = code & 8 ? __byte_perm(0x3e3e3e3d, 0x3f3f3f3f, code & 7) : __byte_perm(0xbebfbfbf, 0x00bdbebe, code & 7);
    return __byte_perm(low, high, 0x7740) & 0xffff;
}
DEVICE void write_table(u32 at, u32 thread, u32 threads) {
    for (u32 i = thread; i < 2048; i += threads) {
        u32 b = i / 8, v = level(b & 15) | level(b >> 4) << 16;
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at + i * 16), "r"(v) : "memory");
    }
}
// Eight codes of a row to four pairs: registers R and R + 2 of the products J and J + 1. A byte is looked up: entry b of the
// table holds the values of its low code, then of its high code, 32 times, so that no two lanes share a bank.
template <int J, int R> DEVICE void look_up(Operands &o, u32 w, Scale s, u32 table, u32 copy) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 at, v;
        asm("lop3.b32 %0, %1, 0x7f80, %2, 0xea;" : "=r"(at) : "r"(i == 0 ? w << 7 : w >> (8 * i - 7)), "r"(copy));
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(table + at));
        o.a[J + i / 2][R + i % 2 * 2] = times(v, s.high, s.low);
    }
}
struct Raw {
    u32 c[4];
    float s[2];
};
// Scales, then codes of a lane: rows g and g + 8 of a group; with a gate, row g of half a group of gate and of up.
template <bool GATE> DEVICE void fetch(Raw &r, u32 pack, int s, int w, int half, int lane) {
    if (GATE) {
        u32 at = pack + (half * 2 + (w >> 1)) * UNIT, up = at + GROUPS / 2 * UNIT;
        u32 code = s * 512 + lane * 16 + (w & 1) * 8, scale = 1024 + lane / 4 * 16 + s * 8 + (w & 1) * 4;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(r.s[0]) : "r"(at + scale) : "memory");
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(r.s[1]) : "r"(up + scale) : "memory");
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(r.c[0]), "=r"(r.c[1]) : "r"(at + code) : "memory");
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(r.c[2]), "=r"(r.c[3]) : "r"(up + code) : "memory");
    } else {
        u32 at = pack + (half * 4 + w) * UNIT;
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(r.s[0]), "=f"(r.s[1]) : "r"(at + 1024 + lane / 4 * 16 + s * 8) : "memory");
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r.c[0]), "=r"(r.c[1]), "=r"(r.c[2]), "=r"(r.c[3]) : "r"(at + s * 512 + lane * 16) : "memory");
    }
}
DEVICE void decode(Operands &o, const Raw &r, u32 table, u32 copy) {
    Scale one = scale_of(r.s[0]), two = scale_of(r.s[1]);
    look_up<0, 0>(o, r.c[0], one, table, copy), look_up<0, 1>(o, r.c[2], two, table, copy);
    look_up<2, 0>(o, r.c[1], one, table, copy), look_up<2, 1>(o, r.c[3], two, table, copy);
}

enum { OUT_F32, OUT_ADD, OUT_BF16, OUT_F16 };

// Outputs of a warpgroup in shared memory: WIDTH rows of the weight by up to COUNT tokens, in boxes of LINE bytes a token.
template <bool GATE, int SIZE> struct Piece {
    static constexpr int WIDTH = GATE ? 32 : 64;
    static constexpr int LINE = WIDTH * SIZE < 128 ? WIDTH * SIZE : 128;
    static constexpr int BOXES = WIDTH * SIZE / LINE;
    static constexpr int FIT = PIECE / (WIDTH * SIZE);
    static constexpr int COUNT = TN < FIT ? TN : FIT;
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
    int tokens, rows, out, aligned; // rows: columns of y
};

// All that this thread sent off but the last has left shared memory.
DEVICE void piece_left() { asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory"); }

// Where the copy engine cannot write y: by hand.
template <bool GATE, int SIZE>
DEVICE void write_elements(const Target &to, u32 base, int token, int row, int me) {
    using P = Piece<GATE, SIZE>;
    int count = min(P::COUNT, to.tokens - token), width = to.rows - row;
    for (int e = me; e < count * P::WIDTH; e += 128) {
        int i = e / P::WIDTH, r = e % P::WIDTH;
        if (r >= width) continue;
        u64 at = (u64)(token + i) * to.ldy + row + r;
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
}
template <bool GATE, int SIZE>
DEVICE void write_out(const Target &to, u32 base, int token, int row, int me, int own) {
    using P = Piece<GATE, SIZE>;
    if (to.aligned) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        meet(own, 128);
        if (me == 0) {
#pragma unroll
            for (int b = 0; b < P::BOXES; b++) {
                int at = row + b * (P::LINE / SIZE);
                if (at < to.rows) copy_out(base + b * (P::COUNT * P::LINE), to.map, at, token, to.out == OUT_ADD);
            }
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
        return;
    }
    meet(own, 128);
    write_elements<GATE, SIZE>(to, base, token, row, me);
    meet(own, 128);
}

// One piece of the sums of a warpgroup to y. Without a gate a lane has rows g and g + 8 of its warp's 16, with one the products
// of two rows, in d[4 n] and d[4 n + 1]; two tokens, 2 t and 2 t + 1 of eight.
template <bool GATE, int SIZE>
DEVICE void put(const float *s, const Target &to, u32 base, int token, int row, int lane, int w, int me, int own) {
    using P = Piece<GATE, SIZE>;
    int g = lane >> 2, t = lane & 3, matrix = lane >> 3;
    if (me == 0) piece_left();
    meet(own, 128);
    if (SIZE == 2) {
        bool half = to.out == OUT_F16;
        auto pack = [&](float a, float b) { return half ? pack_f16(a, b) : pack_bf16(a, b); };
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
    write_out<GATE, SIZE>(to, base, token, row, me, own);
}
// Sums of two rows to those of one, with a gate.
template <int N> DEVICE void gate(float *d) {
#pragma unroll
    for (int n = 0; n < N; n += 4)
#pragma unroll
        for (int i = 0; i < 2; i++) d[n + i] = __fdividef(d[n + i], 1.f + __expf(-d[n + i])) * d[n + i + 2];
}
// Tokens that are shared out together: the largest pieces.
template <bool GATE> constexpr int TOGETHER = Piece<GATE, 2>::COUNT;
// Pieces of a tile: all of them, or those of turn `mine` of `share`.
template <bool GATE, int SIZE>
DEVICE void put_all(float (&d)[SUMS], const Target &to, u32 base, int token, int row, int lane, int w, int me, int own, int mine, int share, u32 &turn) {
    using P = Piece<GATE, SIZE>;
#pragma unroll
    for (int i = 0; i < TN / P::COUNT; i++) {
        if (share > 1 && i * P::COUNT / TOGETHER<GATE> % share != mine) continue;
        if (GATE) gate<P::COUNT / 2>(d + i * (P::COUNT / 2));
        put<GATE, SIZE>(d + i * (P::COUNT / 2), to, base + turn * PIECE, token + i * P::COUNT, row, lane, w, me, own);
        turn ^= 1;
    }
}

// Flags of a launch: of each warpgroup, for up to READERS that wait for it. What is raised is the launch's own mark, and who has
// seen it takes it away, so that whatever was there before does no harm.
constexpr int READERS = 8;
DEVICE u64 *flag_at(u64 *flags, u32 block, int half, int reader) { return flags + (block * WGS + half) * READERS + reader; }
DEVICE void raise(u64 *flag, u64 mark) { asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(mark) : "memory"); }
DEVICE void await(u64 *flag, u64 mark) {
    u64 seen = ~mark;
    while (seen != mark) asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(flag) : "memory");
    *flag = 0;
}
// Where `share` neighbours have a part of k of one tile each: every one adds up some of its tokens. Whether there are any.
template <bool GATE> DEVICE bool add_share(float (&d)[SUMS], int me, int own, int half, float *partial, u64 *flags, u64 mark, int mine, int share) {
    constexpr int TURNS = TN / TOGETHER<GATE>, EACH = TOGETHER<GATE> / 8;
    int readers = min(share, TURNS);
    float4 *here = (float4 *)(partial + (u64)blockIdx.x * ROWS * TN) + threadIdx.x;
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

template <bool GATE>
DEVICE void multiply(
    const Map *x_map, const Map *y_map, const u8 *units, u64 y, u64 ldy, int tokens, int n, int row_units, int split_tiles,
    int pairs, int token_tiles, float *partial, u64 *flags, u64 mark, int out, int aligned) {
    extern __shared__ __align__(1024) u8 room[];
    u32 xs = shared_address(room), store = xs + STAGES * SLAB, packs = store + 2 * WGS * PIECE;
    u32 table = packs + PACKS * PACK, full = table + TABLE, empty = full + 8 * STAGES, packed = empty + 8 * STAGES, decoded = packed + 8 * PACKS;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, rank = PAIR == 2 ? blockIdx.x & 1 : 0;
    if (threadIdx.x == 0) {
        if (xs & 1023) asm volatile("trap;");
        for (int i = 0; i < STAGES; i++) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, 4 * WGS * PAIR);
        for (int i = 0; i < PACKS; i++) barrier_init(packed + 8 * i, 1), barrier_init(decoded + 8 * i, 4 * WGS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    pair_arrive();
    let_next_start();
    int group_count = (n + 15) / 16;
    Plan plan = Plan::start(row_units, split_tiles, pairs * token_tiles);
    Work work;
    // Every worker has one part of one tile.
    u32 workers = gridDim.x / PAIR;
    bool even = split_tiles == pairs * token_tiles && split_tiles > 0 && workers % split_tiles == 0 && workers / split_tiles <= READERS;
    int share = even ? workers / split_tiles : 1;
    if (warp >= 4 * WGS) {
        if (TN == 256) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == 4 * WGS) {
            // Weights do not depend on what ran before.
            u32 slot = 0, phase = 1;
            bool first = true;
            while (plan.take(work)) {
                int row_tile = Place::of(work.tile, pairs, token_tiles).pair * PAIR + rank, halves = group_count / 2, j = lane % GROUPS;
                int group = GATE ? min(row_tile * (GROUPS / 2) + j % (GROUPS / 2), halves - 1) + j / (GROUPS / 2) * halves
                                 : min(row_tile * GROUPS + j, group_count - 1);
                const u8 *from = units + (u64)group * row_units * UNIT;
                for (int u = work.from; u < work.to; u++) {
                    if (!first) barrier_wait(decoded + 8 * slot, phase);
                    if (lane == 0) barrier_expect(packed + 8 * slot, PACK);
                    __syncwarp();
                    if (lane < GROUPS) copy_unit(packs + slot * PACK + lane * UNIT, from + (u64)u * UNIT, packed + 8 * slot);
                    if (++slot == PACKS) slot = 0, phase ^= 1, first = false;
                }
            }
            pair_wait();
        } else if (warp == 4 * WGS + 1) {
            if (lane == 0) asm volatile("prefetch.tensormap [%0];" ::"l"(x_map) : "memory");
            pair_wait();
            wait_for_previous();
            u32 stage = 0, phase = 1;
            bool first = true;
            while (plan.take(work)) {
                int token = Place::of(work.tile, pairs, token_tiles).token + rank * (TN / 2);
                for (int s = 2 * work.from; s < 2 * work.to; s++) {
                    if (!first) barrier_wait(empty + 8 * stage, phase);
                    if (lane == 0) {
                        barrier_expect(full + 8 * stage, SLAB);
                        copy_in(xs + stage * SLAB + rank * (SLAB / 2), x_map, s * 64, token, full + 8 * stage);
                    }
                    __syncwarp();
                    if (++stage == STAGES) stage = 0, phase ^= 1, first = false;
                }
            }
        } else {
            pair_wait();
        }
    } else {
        if (TN == 256) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        write_table(table, threadIdx.x, 128 * WGS);
        meet(1, 128 * WGS);
        pair_wait();
        wait_for_previous();
        int half = warp >> 2, w = warp & 3, me = threadIdx.x & 127, own = 2 + half;
        Target target = {y_map, y, ldy, tokens, GATE ? n / 2 : n, out, aligned};
        u32 base = store + half * 2 * PIECE;
        u32 stage = 0, phase = 0, before = 0, slot = 0, slot_phase = 0, turn = 0;
        auto leave = [&](u32 stage) {
            if (lane < PAIR) {
                if (PAIR == 2) barrier_arrive_at(empty + 8 * stage, lane);
                else barrier_arrive(empty + 8 * stage);
            }
        };
        float d[SUMS];
        Operands o[2];
        Raw raw;
        int left = plan.total();
        u32 copy = lane * 4;
        // The second half of a unit has been looked up, so its bytes are in registers: an arrival does not wait for loads before it.
        auto passed = [&]() {
            __syncwarp();
            if (lane == 0) barrier_arrive(decoded + 8 * slot);
            if (++slot == PACKS) slot = 0, slot_phase ^= 1;
        };
#if ORDERED
        if (half == WGS - 1) asm volatile("bar.arrive 6, 256;" ::: "memory");
#endif
        if (left) {
            barrier_wait(packed, 0);
            fetch<GATE>(raw, packs, 0, w, half, lane);
            decode(o[0], raw, table, copy);
            fetch<GATE>(raw, packs, 1, w, half, lane);
        }
        while (plan.take(work)) {
            Place place = Place::of(work.tile, pairs, token_tiles);
            int add = 0;
            for (int u = work.from; u < work.to; u++) {
                left--;
#pragma unroll
                for (int s = 0; s < 2; s++) {
                    barrier_wait(full + 8 * stage, phase);
                    u64 b = tile_at(xs + stage * SLAB);
#if ORDERED
                    meet(6 + half, 256);
#endif
                    open_products();
                    product(d, o[s].a[0], b, add);
                    product(d, o[s].a[1], b + 2, 1);
                    product(d, o[s].a[2], b + 4, 1);
                    product(d, o[s].a[3], b + 6, 1);
                    close_products();
#if ORDERED
                    asm volatile("bar.arrive %0, 256;" ::"r"(half + 1 == WGS ? 6 : 7 + half) : "memory");
#endif
                    wait_products<1>();
                    if (add) leave(before);
                    add = 1, before = stage;
                    if (++stage == STAGES) stage = 0, phase ^= 1;
                    // Operands of the slab after this one while it is multiplied; then codes of the one after that.
                    decode(o[s ^ 1], raw, table, copy);
                    if (s == 0) passed();
                    if (left) {
                        if (s == 0) barrier_wait(packed + 8 * slot, slot_phase);
                        fetch<GATE>(raw, packs + slot * PACK, s, w, half, lane);
                    }
                }
            }
            wait_products<0>();
            leave(before);

            int row_tile = place.pair * PAIR + rank;
            int row = GATE ? (row_tile * (GROUPS / 2) + half * 2) * 16 : (row_tile * GROUPS + half * 4) * 16;
            int mine = share > 1 ? (int)(blockIdx.x / PAIR) % share : 0;
            if (share > 1) {
                if (!add_share<GATE>(d, me, own, half, partial, flags, mark, mine, share)) continue;
            } else
            if (work.from > 0) {
                float4 *to = (float4 *)(partial + (u64)blockIdx.x * ROWS * TN) + threadIdx.x;
#pragma unroll
                for (int i = 0; i < SUMS / 4; i++) __stcg(to + i * 128 * WGS, make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]));
                meet(own, 128);
                if (me == 0) raise(flag_at(flags, blockIdx.x, half, 0), mark);
                continue;
            }
            if (share == 1 && work.to < row_units) {
                u64 sum = (u64)row_units * split_tiles;
                for (u32 c = blockIdx.x / PAIR + 1; c < workers && sum * c / workers < (u64)row_units * (work.tile + 1); c++) {
                    if (sum * c / workers == sum * (c + 1) / workers) continue;
                    u32 other = PAIR * c + rank;
                    if (me == 0) await(flag_at(flags, other, half, 0), mark);
                    meet(own, 128);
                    const float4 *from = (const float4 *)(partial + (u64)other * ROWS * TN) + threadIdx.x;
#pragma unroll
                    for (int i = 0; i < SUMS / 4; i++) {
                        float4 v = __ldcg(from + i * 128 * WGS);
                        d[4 * i] += v.x, d[4 * i + 1] += v.y, d[4 * i + 2] += v.z, d[4 * i + 3] += v.w;
                    }
                }
            }
            if (out >= OUT_BF16) put_all<GATE, 2>(d, target, base, place.token, row, lane, w, me, own, mine, share, turn);
            else put_all<GATE, 4>(d, target, base, place.token, row, lane, w, me, own, mine, share, turn);
        }
        if (me == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        __syncwarp();
    }
    // Neither block's memory goes away while the other one may still write to it.
    pair_arrive(), pair_wait();
}

#if PAIR == 2
#define CLUSTER __cluster_dims__(2, 1, 1)
#else
#define CLUSTER
#endif
#define GEMM(NAME, GATE) \
    extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, 1) NAME( \
        const __grid_constant__ Map x_map, const __grid_constant__ Map y_map, const u8 *units, u64 y, u64 ldy, int tokens, int n, \
        int row_units, int split_tiles, int pairs, int token_tiles, float *partial, u64 *flags, u64 mark, int out, int aligned) { \
        multiply<GATE>(&x_map, &y_map, units, y, ldy, tokens, n, row_units, split_tiles, pairs, token_tiles, partial, flags, mark, out, \
                       aligned); \
    }
GEMM(nf4_rounded, false)
GEMM(nf4_rounded_gate, true)
