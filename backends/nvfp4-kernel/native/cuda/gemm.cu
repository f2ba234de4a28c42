// The product for many rows (prefill) on sm_90a: y[m, n] = x[m, k] W[n, k]^T with packed NVFP4 weights.
//
// wgmma with the weights as the first operand: each lane's bytes of the layout are its registers of m64k16, dequantised
// there, once per tile of tokens, while the product of the slab before runs. x comes through shared memory in the order of k
// that the weights' layout asks for, written by a staging kernel (`order_*`) in tiles that one bulk copy brings in.
// Needs layout.cu before it. Definitions: TN, tokens of a tile (128 or 256); MB, blocks of 64 rows a warpgroup owns (1 or 2).
//
// gemm_T(units, groups u64[group_count], x, y, ldy, tokens, group_count, row_units, parts, split_tiles, row_tiles,
//        token_tiles, partial, flags, out, aligned, global, convention), T bf16 or f16; also gemm_gate_T
//   units: packed weights, `row_units` units of 1152 bytes (16 rows x 128 k) a row group. groups: {f32 multiplier,
//   u32 first_row * 32 + rows}. x: as `order_*` wrote it, `parts` summands side by side in k. y: element type by
//   out: 0 f32, 1 f32 to be added to, 2 bf16, 3 f16; ldy in elements. aligned: rows of y and its start are multiples of 16
//   bytes and all groups but the last are full.
//   row_tiles = ceil(group_count / (8 MB)), with gates ceil(group_count / 2 / (4 MB)); token_tiles = ceil(tokens / TN).
//   global: the per-tensor scale of x that multiplies (convention 1) or divides (2) the sums; convention 0: none.
//   Tiles below split_tiles are cut into gridDim equal shares of k (stream-K), the others are dealt whole.
//   partial: f32[gridDim][128 MB * TN]; flags: u32[gridDim], zero before (`order_*` clears them) and after every launch.
//   grid min(multiprocessors, work), every block resident; block 384 (two consuming warpgroups, one that copies);
//   dynamic shared memory SHARED bytes.
//
// order_T_U(x T[rows, k], ld, k, row_units, out U, weight f32[k] or null, eps, flags, flag_count); order_f32_parts: three bf16
// order_codes, order_codes_parts (q i8[rows, k], steps f32[rows, k / 16], k, row_units, out, factor, flags, flag_count):
//   q * (step * factor), rounded to bf16 (exact for 4-bit codes) or as three bf16
//   grid rows, block 256. Optional norm: x/rms(x)*weight rounded to U. out: blocks of 128 tokens x 64 k, 16384 bytes each,
//   index (token / 128) * (2 row_units * parts) + slab; 128-byte lines of a token, 16-byte pieces in the order
//   piece ^ (token % 8); slot 16 j + 8 h + 2 t + b of a line is k = 16 t + 4 j + 2 h + b.

#define DEVICE static __device__ __forceinline__
struct bf16 { u16 bits; };
struct f16 { u16 bits; };

DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

template <class T> struct Codes;
template <> struct Codes<bf16> {
    static constexpr float UNDO = 256.f; // pair * scale is the weight times 2^-8
    DEVICE u32 pack(float low, float high) {
        u32 y;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
        return y;
    }
    DEVICE u16 narrow(float x) {
        u16 y;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
        return y;
    }
    DEVICE float widen(u16 x) { return __uint_as_float((u32)x << 16); }
    DEVICE u32 times(u32 a, u32 b) {
        u32 y;
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
        return y;
    }
    // Values of a word of eight codes times 2^-126, in the order of k.
    DEVICE void pairs(u32 w, u32 (&p)[4]) {
        constexpr u32 M = 0x81C081C0;
        p[0] = w & M;
        p[1] = w << 3 & M;
        p[2] = (w & 0x20072007) * 68 & M;
        p[3] = (w >> 3 & 0x01C001C0) | (w << 1 & 0x80008000);
    }
    // A scale byte, the `i`th of a word, times 2^118, twice.
    DEVICE u32 scale(u32 word, int i) { return __byte_perm(word, 0, 0x4040 + i * 0x101) * 16 + 0x73007300; }
};
template <> struct Codes<f16> {
    static constexpr float UNDO = 128.f;
    DEVICE u32 pack(float low, float high) {
        u32 y;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
        return y;
    }
    DEVICE u16 narrow(float x) {
        u16 y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
        return y;
    }
    DEVICE float widen(u16 x) {
        float y;
        asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
        return y;
    }
    DEVICE u32 times(u32 a, u32 b) {
        u32 y;
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
        return y;
    }
    // Values times 2^-14.
    DEVICE void pairs(u32 w, u32 (&p)[4]) {
        constexpr u32 S = 0x80008000, M = 0x0E000E00;
        p[0] = (w << 3 & M) | (w & S);
        p[1] = (w << 6 & M) | (w << 3 & S);
        p[2] = (w & 0x20072007) * 516 & 0x8E008E00;
        p[3] = (w & M) | (w << 1 & S);
    }
    // Times 2^7.
    DEVICE u32 scale(u32 word, int i) { return __byte_perm(word, 0, 0x4040 + i * 0x101) * 128 + 0x1C001C00; }
};

#define ALL4(b) "+f"(d[b]), "+f"(d[b + 1]), "+f"(d[b + 2]), "+f"(d[b + 3])
#define ALL16(b) ALL4(b), ALL4(b + 4), ALL4(b + 8), ALL4(b + 12)
// d += a b, 64 x N x 16; `a` in registers, `b` a descriptor of shared memory. add = 0: d = a b.
template <class T, int N> struct Wide;
template <> struct Wide<bf16, 256> {
    DEVICE void product(float (&d)[128], const u32 (&a)[4], u64 b, int add) {
        asm volatile("{.reg .pred p; setp.ne.b32 p, %133, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
            "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
            "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
            "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
            "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
            "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
            "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
            "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
            "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
            "}, {%128,%129,%130,%131}, %132, p, 1, 1, 0;}"
            : ALL16(0), ALL16(16), ALL16(32), ALL16(48), ALL16(64), ALL16(80), ALL16(96), ALL16(112)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
    }
};
template <> struct Wide<bf16, 128> {
    DEVICE void product(float (&d)[64], const u32 (&a)[4], u64 b, int add) {
        asm volatile("{.reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
            "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
            "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
            "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
            "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
            "}, {%64,%65,%66,%67}, %68, p, 1, 1, 0;}"
            : ALL16(0), ALL16(16), ALL16(32), ALL16(48)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
    }
};
template <> struct Wide<f16, 256> {
    DEVICE void product(float (&d)[128], const u32 (&a)[4], u64 b, int add) {
        asm volatile("{.reg .pred p; setp.ne.b32 p, %133, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
            "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
            "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
            "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
            "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
            "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
            "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
            "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
            "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
            "}, {%128,%129,%130,%131}, %132, p, 1, 1, 0;}"
            : ALL16(0), ALL16(16), ALL16(32), ALL16(48), ALL16(64), ALL16(80), ALL16(96), ALL16(112)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
    }
};
template <> struct Wide<f16, 128> {
    DEVICE void product(float (&d)[64], const u32 (&a)[4], u64 b, int add) {
        asm volatile("{.reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
            "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
            "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
            "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
            "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
            "}, {%64,%65,%66,%67}, %68, p, 1, 1, 0;}"
            : ALL16(0), ALL16(16), ALL16(32), ALL16(48)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
    }
};
DEVICE void open_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void close_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEVICE void wait_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

DEVICE void barrier_init(u32 at, u32 count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(count)); }
DEVICE void barrier_arrive(u32 at) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at) : "memory"); }
DEVICE void barrier_expect(u32 at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(u32 at, u32 phase) {
    asm volatile(
        "{.reg .pred p; L: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @p bra D; bra L; D: }" ::"r"(at), "r"(phase)
        : "memory");
}
DEVICE void copy_in(u32 to, const void *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
DEVICE void meet(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void store4(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

constexpr int STAGE = TN * 128;
constexpr int STAGES = 131072 / STAGE;
constexpr int SUMS = TN / 2;                 // of a thread, per block of 64 rows
constexpr int ROWS = 128 * MB;               // of a tile
constexpr int STORE = 69632;                 // outputs on their way to memory
constexpr int SHARED = 1024 + STAGES * STAGE + STORE + 16 * STAGES;
constexpr int UNIT = 1152;

// What a block has to do, the same for those who copy and those who multiply.
struct Work {
    int tile, from, to; // units of k
};
struct Plan {
    int units, split_tiles, tiles, begin, end, next;
    DEVICE Plan start(int units, int split_tiles, int tiles) {
        Plan p;
        u64 all = (u64)units * split_tiles;
        p.units = units, p.split_tiles = split_tiles, p.tiles = tiles;
        p.begin = (int)(all * blockIdx.x / gridDim.x), p.end = (int)(all * (blockIdx.x + 1) / gridDim.x);
        p.next = split_tiles + blockIdx.x;
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
        next += gridDim.x;
        return true;
    }
};

struct Fragment {
    uint4 codes[2]; // of two slabs
    u32 scales;
    DEVICE void load(Fragment &f, const u8 *unit, int lane) {
        const uint4 *c = (const uint4 *)unit + lane;
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(f.codes[0].x), "=r"(f.codes[0].y), "=r"(f.codes[0].z), "=r"(f.codes[0].w) : "l"(c));
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(f.codes[1].x), "=r"(f.codes[1].y), "=r"(f.codes[1].z), "=r"(f.codes[1].w) : "l"(c + 32));
        asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(f.scales) : "l"(unit + 1024 + 4 * lane));
    }
};

// The registers of the `J`th m64k16 of a slab.
template <class T, int J> DEVICE void dequantise(const uint4 &c, u32 low, u32 high, u32 (&a)[4]) {
    u32 p[4], q[4];
    Codes<T>::pairs(J < 2 ? c.x : c.y, p);
    Codes<T>::pairs(J < 2 ? c.z : c.w, q);
    constexpr int FIRST = 2 * (J % 2);
    a[0] = Codes<T>::times(p[FIRST], low), a[2] = Codes<T>::times(p[FIRST + 1], low);
    a[1] = Codes<T>::times(q[FIRST], high), a[3] = Codes<T>::times(q[FIRST + 1], high);
}

enum { OUT_F32, OUT_ADD, OUT_BF16, OUT_F16 };

// Where a tile of outputs goes.
struct Target {
    u64 y, ldy;
    const u64 *groups;
    int tokens, group_count, out, aligned;
};

// `count` tokens from `token` on, `rows` rows of groups from `group` on, lie in shared memory `pitch` bytes a token.
DEVICE void write_out(const Target &to, u32 buffer, int pitch, int token, int count, int group, int rows, int me, int threads, int barrier) {
    int size = to.out >= OUT_BF16 ? 2 : 4;
    count = min(count, to.tokens - token);
    int groups = min(rows / 16, to.group_count - group);
    u32 last = groups > 0 ? (u32)(to.groups[group + groups - 1] >> 32) : 0, first = groups > 0 ? (u32)(to.groups[group] >> 32) : 0;
    int row = first >> 5, width = (int)(last >> 5) + (int)(last & 31) - row;
    if (to.aligned) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        meet(barrier, threads);
        if (groups > 0)
            for (int i = me; i < count; i += threads) {
                u64 at = to.y + ((u64)(token + i) * to.ldy + row) * size;
                u32 from = buffer + i * pitch, bytes = width * size;
                if (to.out == OUT_ADD)
                    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(at), "r"(from), "r"(bytes) : "memory");
                else
                    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(at), "r"(from), "r"(bytes) : "memory");
            }
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        return;
    }
    meet(barrier, threads);
    for (int e = me; e < count * rows; e += threads) {
        int i = e / rows, r = e % rows;
        if (r / 16 >= groups) continue;
        u32 place = (u32)(to.groups[group + r / 16] >> 32);
        if (r % 16 >= (place & 31)) continue;
        u64 at = (u64)(token + i) * to.ldy + (place >> 5) + r % 16;
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
    meet(barrier, threads);
}
DEVICE void buffer_free() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Sums of one thread to shared memory: `line` is its first row in the tile. Tokens [first, first + count) of the tile.
template <int COUNT> DEVICE void put16(const float *d, int first, u32 buffer, int pitch, int line, int lane, bool half) {
#pragma unroll
    for (int n = 0; n < COUNT / 8; n += 2) {
        const float *s = d + (first / 8 + n) * 4;
        u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            v[i] = half ? Codes<f16>::pack(s[(i >> 1) * 4 + (i & 1) * 2], s[(i >> 1) * 4 + (i & 1) * 2 + 1])
                        : Codes<bf16>::pack(s[(i >> 1) * 4 + (i & 1) * 2], s[(i >> 1) * 4 + (i & 1) * 2 + 1]);
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

template <class T, bool GATE>
DEVICE void gemm(
    const u8 *units, const u64 *groups, const u8 *x, u64 y, u64 ldy, int tokens, int group_count, int row_units, int parts,
    int split_tiles, int row_tiles, int token_tiles, float *partial, u32 *flags, int out, int aligned, const float *global,
    int convention) {
    extern __shared__ u8 room[];
    u32 ring = (shared_address(room) + 1023) & ~1023u, buffer = ring + STAGES * STAGE, full = buffer + STORE, empty = full + 8 * STAGES;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    let_next_start();
    int all = row_units * parts;
    Plan plan = Plan::start(all, split_tiles, row_tiles * token_tiles);
    Work work;
    u32 slab = 0;
    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x != 256) return;
        wait_for_previous();
        while (plan.take(work)) {
            int token = work.tile % token_tiles * TN;
            int blocks = min(TN, tokens - token + 127) / 128;
            const u8 *from = x + (u64)(token / 128) * (2 * all) * 16384;
            for (int s = 2 * work.from; s < 2 * work.to; s++, slab++) {
                u32 stage = slab % STAGES;
                if (slab >= STAGES) barrier_wait(empty + 8 * stage, (slab / STAGES - 1) & 1);
                barrier_expect(full + 8 * stage, blocks * 16384);
                for (int b = 0; b < blocks; b++)
                    copy_in(ring + stage * STAGE + b * 16384, from + ((u64)b * (2 * all) + s) * 16384, 16384, full + 8 * stage);
            }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    int half = warp >> 2, w = warp & 3, g = lane >> 2, t = lane & 3;
    Target target = {y, ldy, groups, tokens, group_count, out, aligned};
    float d[MB][SUMS];
    bool waited = false;
    while (plan.take(work)) {
        int row_tile = work.tile / token_tiles, token = work.tile % token_tiles * TN;
        int first = GATE ? half * (group_count / 2) + row_tile * 4 * MB : row_tile * 8 * MB + half * 4 * MB;
        const u8 *from[MB];
        float multiplier[MB];
#pragma unroll
        for (int m = 0; m < MB; m++) {
            int group = min(first + 4 * m + w, group_count - 1);
            from[m] = units + (u64)group * row_units * UNIT;
            multiplier[m] = __uint_as_float((u32)groups[group]) * Codes<T>::UNDO;
        }
        Fragment now[MB], next[MB];
        int unit = work.from % row_units;
#pragma unroll
        for (int m = 0; m < MB; m++) Fragment::load(next[m], from[m] + (u64)unit * UNIT, lane);
        if (!waited) wait_for_previous(), waited = true;
        int add = 0;
        // Registers of the present group of four products and of the one after it, which is dequantised between them: an
        // issued product holds its warp until the one before it has started, so work goes between, not behind.
        u32 a[2][4][4];
#pragma unroll
        for (int m = 0; m < MB; m++) now[m] = next[m];
        dequantise<T, 0>(now[0].codes[0], Codes<T>::scale(now[0].scales, 0), Codes<T>::scale(now[0].scales, 1), a[0][0]);
        dequantise<T, 1>(now[0].codes[0], Codes<T>::scale(now[0].scales, 0), Codes<T>::scale(now[0].scales, 1), a[0][1]);
        dequantise<T, 2>(now[0].codes[0], Codes<T>::scale(now[0].scales, 0), Codes<T>::scale(now[0].scales, 1), a[0][2]);
        dequantise<T, 3>(now[0].codes[0], Codes<T>::scale(now[0].scales, 0), Codes<T>::scale(now[0].scales, 1), a[0][3]);
        for (int u = work.from; u < work.to; u++) {
            unit = unit + 1 == row_units ? 0 : unit + 1;
#pragma unroll
            for (int m = 0; m < MB; m++) Fragment::load(next[m], from[m] + (u64)unit * UNIT, lane);
#pragma unroll
            for (int i = 0; i < 2 * MB; i++) {
                const int m = i % MB, which = i & 1;
                u32 stage = slab % STAGES;
                const Fragment &then = i + 1 < 2 * MB ? now[(i + 1) % MB] : next[0];
                const int then_s = (i + 1) / MB % 2;
                u32 low = Codes<T>::scale(then.scales, 2 * then_s), high = Codes<T>::scale(then.scales, 2 * then_s + 1);
                if (m == 0) barrier_wait(full + 8 * stage, (slab / STAGES) & 1);
                u64 b = (u64)((ring + stage * STAGE) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
                open_products();
                Wide<T, TN>::product(d[m], a[which][0], b, add);
                close_products();
                wait_products<1>();
                if (m == 0 && add && lane == 0) barrier_arrive(empty + 8 * ((slab - 1) % STAGES));
                dequantise<T, 0>(then.codes[then_s], low, high, a[which ^ 1][0]);
                open_products();
                Wide<T, TN>::product(d[m], a[which][1], b + 2, 1);
                dequantise<T, 1>(then.codes[then_s], low, high, a[which ^ 1][1]);
                open_products();
                Wide<T, TN>::product(d[m], a[which][2], b + 4, 1);
                dequantise<T, 2>(then.codes[then_s], low, high, a[which ^ 1][2]);
                open_products();
                Wide<T, TN>::product(d[m], a[which][3], b + 6, 1);
                close_products();
                dequantise<T, 3>(then.codes[then_s], low, high, a[which ^ 1][3]);
                if (m == MB - 1) add = 1, slab++;
            }
#pragma unroll
            for (int m = 0; m < MB; m++) now[m] = next[m];
        }
        wait_products<0>();
        if (lane == 0) barrier_arrive(empty + 8 * ((slab - 1) % STAGES));

        int me = threadIdx.x;
        if (work.from > 0) {
            float4 *slot = (float4 *)(partial + (u64)blockIdx.x * ROWS * TN) + me;
#pragma unroll
            for (int m = 0; m < MB; m++)
#pragma unroll
                for (int i = 0; i < SUMS / 4; i++)
                    __stcg(slot + (m * SUMS / 4 + i) * 256, make_float4(d[m][4 * i], d[m][4 * i + 1], d[m][4 * i + 2], d[m][4 * i + 3]));
            __threadfence();
            meet(1, 256);
            if (me == 0) asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flags + blockIdx.x) : "memory");
            continue;
        }
        if (work.to < all) {
            u64 total = (u64)all * split_tiles;
            for (u32 c = blockIdx.x + 1; c < gridDim.x && total * c / gridDim.x < (u64)all * (work.tile + 1); c++) {
                if (total * c / gridDim.x == total * (c + 1) / gridDim.x) continue;
                if (me == 0) {
                    u32 ready = 0;
                    while (!ready) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(ready) : "l"(flags + c) : "memory");
                    flags[c] = 0;
                }
                meet(1, 256);
                const float4 *slot = (const float4 *)(partial + (u64)c * ROWS * TN) + me;
#pragma unroll
                for (int m = 0; m < MB; m++)
#pragma unroll
                    for (int i = 0; i < SUMS / 4; i++) {
                        float4 v = __ldcg(slot + (m * SUMS / 4 + i) * 256);
                        d[m][4 * i] += v.x, d[m][4 * i + 1] += v.y, d[m][4 * i + 2] += v.z, d[m][4 * i + 3] += v.w;
                    }
            }
        }
        float of_x = convention == 0 ? 1.f : convention == 1 ? *global : 1.f / *global;
#pragma unroll
        for (int m = 0; m < MB; m++)
#pragma unroll
            for (int i = 0; i < SUMS; i++) d[m][i] *= multiplier[m] * of_x;

        if (GATE) {
            if (half == 0) buffer_free();
            meet(1, 256);
            if (half == 1) {
#pragma unroll
                for (int m = 0; m < MB; m++)
#pragma unroll
                    for (int i = 0; i < SUMS; i++)
                        asm volatile("st.shared.f32 [%0], %1;" ::"r"(buffer + ((m * SUMS + i) * 128 + me - 128) * 4), "f"(d[m][i]) : "memory");
            }
            meet(1, 256);
            if (half == 1) continue;
#pragma unroll
            for (int m = 0; m < MB; m++)
#pragma unroll
                for (int i = 0; i < SUMS; i++) {
                    float up, gate = d[m][i];
                    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(up) : "r"(buffer + ((m * SUMS + i) * 128 + me) * 4));
                    d[m][i] = __fdividef(gate, 1.f + __expf(-gate)) * up;
                }
            meet(2, 128);
            Target gated = target;
            gated.group_count = group_count / 2;
            int pitch = out >= OUT_BF16 ? (64 * MB + 8) * 2 : (64 * MB + 4) * 4;
#pragma unroll
            for (int m = 0; m < MB; m++)
                if (out >= OUT_BF16) put16<TN>(d[m], 0, buffer, pitch, 64 * m + 16 * w, lane, out == OUT_F16);
                else put32<TN>(d[m], 0, buffer, pitch, 64 * m + 16 * w, g, t);
            write_out(gated, buffer, pitch, token, TN, row_tile * 4 * MB, 64 * MB, me, 128, 2);
        } else if (out >= OUT_BF16) {
            constexpr int PITCH = (ROWS + 8) * 2;
            buffer_free();
            meet(1, 256);
#pragma unroll
            for (int m = 0; m < MB; m++) put16<TN>(d[m], 0, buffer, PITCH, (half * MB + m) * 64 + 16 * w, lane, out == OUT_F16);
            write_out(target, buffer, PITCH, token, TN, row_tile * 8 * MB, ROWS, me, 256, 1);
        } else {
            constexpr int PITCH = (ROWS + 4) * 4;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                buffer_free();
                meet(1, 256);
#pragma unroll
                for (int m = 0; m < MB; m++) put32<TN / 2>(d[m], h * (TN / 2), buffer, PITCH, (half * MB + m) * 64 + 16 * w, g, t);
                write_out(target, buffer, PITCH, token + h * (TN / 2), TN / 2, row_tile * 8 * MB, ROWS, me, 256, 1);
            }
        }
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#define GEMM(T, M) \
    extern "C" __global__ void __launch_bounds__(384, 1) gemm_##M( \
        const u8 *units, const u64 *groups, const u8 *x, u64 y, u64 ldy, int tokens, int group_count, int row_units, \
        int parts, int split_tiles, int row_tiles, int token_tiles, float *partial, u32 *flags, int out, int aligned, \
        const float *global, int convention) { \
        gemm<T, false>(units, groups, x, y, ldy, tokens, group_count, row_units, parts, split_tiles, row_tiles, token_tiles, \
                       partial, flags, out, aligned, global, convention); \
    } \
    extern "C" __global__ void __launch_bounds__(384, 1) gemm_gate_##M( \
        const u8 *units, const u64 *groups, const u8 *x, u64 y, u64 ldy, int tokens, int group_count, int row_units, \
        int parts, int split_tiles, int row_tiles, int token_tiles, float *partial, u32 *flags, int out, int aligned, \
        const float *global, int convention) { \
        gemm<T, true>(units, groups, x, y, ldy, tokens, group_count, row_units, parts, split_tiles, row_tiles, token_tiles, \
                      partial, flags, out, aligned, global, convention); \
    }
GEMM(bf16, bf16)
GEMM(f16, f16)

DEVICE float as_float(float x) { return x; }
DEVICE float as_float(bf16 x) { return Codes<bf16>::widen(x.bits); }
DEVICE float as_float(f16 x) { return Codes<f16>::widen(x.bits); }

// PARTS 1: rounded to U (exact where it was one). PARTS 3: f32 cut into three bf16 that add up to it exactly.
template <class U, int PARTS> DEVICE void cut_pair(float low, float high, u32 (&cut)[PARTS]) {
    if constexpr (PARTS == 1) {
        cut[0] = Codes<U>::pack(low, high);
    } else {
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            u32 l = __float_as_uint(low) & 0xffff0000, h = __float_as_uint(high) & 0xffff0000;
            // A NaN whose payload is cut off stays one.
            if (low != low) l = 0x7fc00000;
            if (high != high) h = 0x7fc00000;
            cut[p] = l >> 16 | h;
            low = (l & 0x7f800000) == 0x7f800000 ? 0.f : low - __uint_as_float(l);
            high = (h & 0x7f800000) == 0x7f800000 ? 0.f : high - __uint_as_float(h);
        }
    }
}

template <class T, class U, int PARTS>
DEVICE void order(
    const T *x, u64 ld, int k, int row_units, u8 *out, const float *weight, float eps, u32 *flags, int flag_count) {
    __shared__ float room[8];
    let_next_start();
    wait_for_previous();
    if (blockIdx.x == 0)
        for (int i = threadIdx.x; i < flag_count; i += 256) flags[i] = 0;
    int token = blockIdx.x, slabs = 2 * row_units;
    const T *row = x + (u64)token * ld;
    float factor = 1.f;
    if (weight) {
        float sum = 0.f;
        for (int i = threadIdx.x; i < k; i += 256) sum += as_float(row[i]) * as_float(row[i]);
        for (int s = 16; s; s >>= 1) sum += __shfl_xor_sync(~0u, sum, s);
        if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = sum;
        __syncthreads();
        sum = 0.f;
        for (int i = 0; i < 8; i++) sum += room[i];
        factor = rsqrtf(sum / (float)k + eps);
    }
    u8 *base = out + (u64)(token / 128) * slabs * PARTS * 16384 + token % 128 * 128;
    bool vector = ((u64)row & (4 * sizeof(T) - 1)) == 0;
    for (int e = threadIdx.x; e < slabs * 4; e += 256) {
        int slab = e >> 2, j = e & 3;
        u32 v[PARTS][2][4];
#pragma unroll
        for (int t = 0; t < 4; t++) {
            int at = slab * 64 + 16 * t + 4 * j;
            T raw[4];
            float f[4];
            if (vector && at + 4 <= k) {
                if (sizeof(T) == 4) *(uint4 *)raw = *(const uint4 *)(row + at);
                else *(uint2 *)raw = *(const uint2 *)(row + at);
#pragma unroll
                for (int i = 0; i < 4; i++) f[i] = as_float(raw[i]);
            } else {
#pragma unroll
                for (int i = 0; i < 4; i++) f[i] = at + i < k ? as_float(row[at + i]) : 0.f;
            }
            if (weight) {
#pragma unroll
                for (int i = 0; i < 4; i++) f[i] = at + i < k ? f[i] * factor * weight[at + i] : 0.f;
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                u32 cut[PARTS];
                cut_pair<U, PARTS>(f[2 * h], f[2 * h + 1], cut);
#pragma unroll
                for (int p = 0; p < PARTS; p++) v[p][h][t] = cut[p];
            }
        }
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                *(uint4 *)(base + (u64)(p * slabs + slab) * 16384 + ((2 * j + h) ^ (token & 7)) * 16) =
                    make_uint4(v[p][h][0], v[p][h][1], v[p][h][2], v[p][h][3]);
    }
}

template <int PARTS>
DEVICE void order_quantised(const i8 *q, const float *steps, int k, int row_units, u8 *out, float factor, u32 *flags, int flag_count) {
    let_next_start();
    wait_for_previous();
    if (blockIdx.x == 0)
        for (int i = threadIdx.x; i < flag_count; i += 256) flags[i] = 0;
    int token = blockIdx.x, slabs = 2 * row_units;
    u8 *base = out + (u64)(token / 128) * slabs * PARTS * 16384 + token % 128 * 128;
    for (int e = threadIdx.x; e < slabs * 4; e += 256) {
        int slab = e >> 2, j = e & 3;
        u32 v[PARTS][2][4];
#pragma unroll
        for (int t = 0; t < 4; t++) {
            int at = slab * 64 + 16 * t + 4 * j;
            float step = at < k ? steps[(u64)token * (k / 16) + at / 16] * factor : 0.f;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float f[2];
#pragma unroll
                for (int b = 0; b < 2; b++) f[b] = at < k ? (float)q[(u64)token * k + at + 2 * h + b] * step : 0.f;
                u32 cut[PARTS];
                cut_pair<bf16, PARTS>(f[0], f[1], cut);
#pragma unroll
                for (int p = 0; p < PARTS; p++) v[p][h][t] = cut[p];
            }
        }
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                *(uint4 *)(base + (u64)(p * slabs + slab) * 16384 + ((2 * j + h) ^ (token & 7)) * 16) =
                    make_uint4(v[p][h][0], v[p][h][1], v[p][h][2], v[p][h][3]);
    }
}

#define ORDER(NAME, T, U, PARTS) \
    extern "C" __global__ void __launch_bounds__(256) NAME( \
        const T *x, u64 ld, int k, int row_units, u8 *out, const float *weight, float eps, u32 *flags, int flag_count) { \
        order<T, U, PARTS>(x, ld, k, row_units, out, weight, eps, flags, flag_count); \
    }
ORDER(order_bf16, bf16, bf16, 1)
ORDER(order_f16, f16, f16, 1)
ORDER(order_f32_bf16, float, bf16, 1)
ORDER(order_f32_f16, float, f16, 1)
ORDER(order_f32_parts, float, bf16, 3)

#define ORDER_CODES(NAME, PARTS) \
    extern "C" __global__ void __launch_bounds__(256) NAME( \
        const i8 *q, const float *steps, int k, int row_units, u8 *out, float factor, u32 *flags, int flag_count) { \
        order_quantised<PARTS>(q, steps, k, row_units, out, factor, flags, flag_count); \
    }
ORDER_CODES(order_codes, 1)
ORDER_CODES(order_codes_parts, 3)
