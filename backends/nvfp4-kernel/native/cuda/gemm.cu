// The product for many rows (prefill) on sm_90a: y[m, n] = x[m, k] W[n, k]^T with packed NVFP4 weights.
//
// wgmma with the weights as the first operand: each lane's bytes of the layout are its registers of m64k16, dequantised
// there, once per tile of tokens, while the product of the slab before runs. x comes through shared memory in the order of k
// that the weights' layout asks for, written by a staging kernel (order.cu) in tiles that one bulk copy brings in.
// Needs layout.cu and elements.cu before it. Definitions: TN, tokens of a tile (32, 64, 128 or 256); MB, blocks of 64 rows a
// warpgroup owns (1 or 2); ELEMENT, bf16 or f16.
//
// gemm(units, groups u64[group_count], x, y, ldy, tokens, group_count, row_units, parts, split_tiles, row_tiles,
//        token_tiles, partial, flags, out, aligned, global, convention); also gemm_gate
//   units: packed weights, `row_units` units of 1152 bytes (16 rows x 128 k) a row group. groups: {f32 multiplier,
//   u32 first_row * 32 + rows}. x: as `order_*` wrote it, `parts` summands side by side in k. y: element type by
//   out: 0 f32, 1 f32 to be added to, 2 bf16, 3 f16; ldy in elements. aligned: rows of y and its start are multiples of 16
//   bytes and all groups but the last are full.
//   row_tiles = ceil(group_count / (8 MB)), with gates ceil(group_count / 2 / (4 MB)); token_tiles = ceil(tokens / TN).
//   global: the per-tensor scale of x that multiplies (convention 1) or divides (2) the sums; convention 0: none.
//   Tiles below split_tiles are cut into gridDim equal shares of k (stream-K), the others are dealt whole.
//   partial: f32[gridDim][128 MB * TN]; flags: u32[2 gridDim], zero before (`order_*` clears them) and after every launch.
//   grid min(multiprocessors, work), every block resident; block 384 (two consuming warpgroups, one that copies);
//   dynamic shared memory SHARED bytes.

#define ALL4(b) "+f"(d[b]), "+f"(d[b + 1]), "+f"(d[b + 2]), "+f"(d[b + 3])
#define ALL16(b) ALL4(b), ALL4(b + 4), ALL4(b + 8), ALL4(b + 12)
// d += a b, 64 x TN x 16; `a` in registers, `b` a descriptor of shared memory. add = 0: d = a b.
#if TN == 32
#define PRODUCT(TYPE) \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " {" \
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15" \
        "}, {%16,%17,%18,%19}, %20, p, 1, 1, 0;}" \
        : ALL16(0) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
#endif
#if TN == 64
#define PRODUCT(TYPE) \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" \
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31" \
        "}, {%32,%33,%34,%35}, %36, p, 1, 1, 0;}" \
        : ALL16(0), ALL16(16) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
#endif
#if TN == 128
#define PRODUCT(TYPE) \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" \
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63" \
        "}, {%64,%65,%66,%67}, %68, p, 1, 1, 0;}" \
        : ALL16(0), ALL16(16), ALL16(32), ALL16(48) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
#endif
#if TN == 256
#define PRODUCT(TYPE) \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %133, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {" \
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
DEVICE void product(bf16, float (&d)[TN / 2], const u32 (&a)[4], u64 b, int add) { PRODUCT("bf16"); }
DEVICE void product(f16, float (&d)[TN / 2], const u32 (&a)[4], u64 b, int add) { PRODUCT("f16"); }

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
        "{.reg .pred p; AGAIN: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @p bra PASSED; bra AGAIN; PASSED: }" ::"r"(at), "r"(phase)
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
constexpr int STAGES = 131072 / STAGE < 16 ? 131072 / STAGE : 16;
constexpr int SUMS = TN / 2;                 // of a thread, per block of 64 rows
constexpr int ROWS = 128 * MB;               // of a tile
constexpr int TOKENS16 = TN, TOKENS32 = TN / 2; // sent off at once, of 16 and of 32 bits
constexpr int PIECE = 36864;                 // outputs of one warpgroup on their way to memory
constexpr int STORE = 2 * PIECE;
constexpr int SHARED = STAGES * STAGE + STORE + 16 * STAGES;
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
        u32 me = blockIdx.x, count = gridDim.x;
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
    int tokens, group_count, out, aligned, limit; // limit: rows of the weight that have a place in y, if aligned
};

// `count` tokens from `token` on, `rows` rows of groups from `group` on, lie in shared memory `pitch` bytes a token.
DEVICE void write_out(const Target &to, u32 buffer, int pitch, int token, int count, int group, int rows, int me, int threads, int barrier) {
    int size = to.out >= OUT_BF16 ? 2 : 4;
    count = min(count, to.tokens - token);
    if (to.aligned) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        meet(barrier, threads);
        int row = group * 16, width = min(rows, to.limit - row);
        if (width > 0)
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
    int groups = min(rows / 16, to.group_count - group);
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
// What this thread sent off has left shared memory.
DEVICE void piece_left() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

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
DEVICE void multiply(
    const u8 *units, const u64 *groups, const u8 *x, u64 y, u64 ldy, int tokens, int group_count, int row_units, int parts,
    int split_tiles, int row_tiles, int token_tiles, float *partial, u32 *flags, int out, int aligned, const float *global,
    int convention) {
    extern __shared__ u8 room[];
    u32 ring = shared_address(room), buffer = ring + STAGES * STAGE, full = buffer + STORE, empty = full + 8 * STAGES;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        if (ring & 1023) asm volatile("trap;");
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
        // One warp starts the weights of the first tiles on their way to the second cache, before x is there.
        if (warp == 9 && lane < 8 * MB) {
            for (int i = 0; i < 3 && plan.take(work); i++) {
                int row_tile = work.tile / token_tiles, unit = work.from % row_units, count = min(work.to - work.from, row_units - unit);
                int group = GATE ? lane / (4 * MB) * (group_count / 2) + row_tile * 4 * MB + lane % (4 * MB) : row_tile * 8 * MB + lane;
                if (group < group_count)
                    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(units + ((u64)group * row_units + unit) * UNIT), "r"(count * UNIT) : "memory");
            }
        }
        if (threadIdx.x == 256) wait_for_previous();
        while (threadIdx.x == 256 && plan.take(work)) {
            int token = work.tile % token_tiles * TN;
            constexpr int BYTES = (TN < 128 ? TN : 128) * 128;
            int blocks = TN > 128 ? min(TN, tokens - token + 127) / 128 : 1;
            const u8 *from = x + (u64)(token / 128) * (2 * all) * 16384 + token % 128 * 128;
            for (int s = 2 * work.from; s < 2 * work.to; s++, slab++) {
                u32 stage = slab % STAGES;
                if (slab >= STAGES) barrier_wait(empty + 8 * stage, (slab / STAGES - 1) & 1);
                barrier_expect(full + 8 * stage, blocks * BYTES);
                for (int b = 0; b < blocks; b++)
                    copy_in(ring + stage * STAGE + b * BYTES, from + ((u64)b * (2 * all) + s) * 16384, BYTES, full + 8 * stage);
            }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    int half = warp >> 2, w = warp & 3, g = lane >> 2, t = lane & 3;
    u32 last = (u32)(groups[group_count - 1] >> 32);
    Target target = {y, ldy, groups, tokens, GATE ? group_count / 2 : group_count, out, aligned, GATE ? group_count / 2 * 16 : (int)((last >> 5) + (last & 31))};
    auto free_stage = [&](u32 slab) {
        u32 at = empty + 8 * (slab % STAGES);
        if (lane == 0) barrier_arrive(at);
    };
    float d[MB][SUMS];
    const u8 *from[MB];
    float multiplier[MB];
    Fragment now[MB], next[MB];
    int unit = 0;
    // The first weights of a tile start before the outputs of the tile before it leave.
    auto begin = [&]() {
        int row_tile = work.tile / token_tiles;
        int first = GATE ? half * (group_count / 2) + row_tile * 4 * MB : row_tile * 8 * MB + half * 4 * MB;
        unit = work.from % row_units;
#pragma unroll
        for (int m = 0; m < MB; m++) {
            int group = min(first + 4 * m + w, group_count - 1);
            from[m] = units + (u64)group * row_units * UNIT;
            multiplier[m] = __uint_as_float((u32)groups[group]) * Codes<T>::UNDO;
            Fragment::load(next[m], from[m] + (u64)unit * UNIT, lane);
        }
    };
    int me = threadIdx.x & 127, own = 2 + half;
    u32 piece = buffer + half * PIECE;
    bool more = plan.take(work);
    if (more) begin();
    wait_for_previous();
    while (more) {
        int row_tile = work.tile / token_tiles, token = work.tile % token_tiles * TN;
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
                product(T{}, d[m], a[which][0], b, add);
                close_products();
                wait_products<1>();
                if (m == 0 && add) free_stage(slab - 1);
                dequantise<T, 0>(then.codes[then_s], low, high, a[which ^ 1][0]);
                open_products();
                product(T{}, d[m], a[which][1], b + 2, 1);
                dequantise<T, 1>(then.codes[then_s], low, high, a[which ^ 1][1]);
                open_products();
                product(T{}, d[m], a[which][2], b + 4, 1);
                dequantise<T, 2>(then.codes[then_s], low, high, a[which ^ 1][2]);
                open_products();
                product(T{}, d[m], a[which][3], b + 6, 1);
                close_products();
                dequantise<T, 3>(then.codes[then_s], low, high, a[which ^ 1][3]);
                if (m == MB - 1) add = 1, slab++;
            }
#pragma unroll
            for (int m = 0; m < MB; m++) now[m] = next[m];
        }
        wait_products<0>();
        free_stage(slab - 1);

        Work done = work;
        float factor[MB], of_x = convention == 0 ? 1.f : convention == 1 ? *global : 1.f / *global;
#pragma unroll
        for (int m = 0; m < MB; m++) factor[m] = multiplier[m] * of_x;
        more = plan.take(work);
        if (more) begin();
        if (done.from > 0) {
            float4 *slot = (float4 *)(partial + (u64)blockIdx.x * ROWS * TN) + threadIdx.x;
#pragma unroll
            for (int m = 0; m < MB; m++)
#pragma unroll
                for (int i = 0; i < SUMS / 4; i++)
                    __stcg(slot + (m * SUMS / 4 + i) * 256, make_float4(d[m][4 * i], d[m][4 * i + 1], d[m][4 * i + 2], d[m][4 * i + 3]));
            meet(own, 128);
            if (me == 0) asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flags + 2 * blockIdx.x + half) : "memory");
            continue;
        }
        if (done.to < all) {
            u64 total = (u64)all * split_tiles;
            for (u32 c = blockIdx.x + 1; c < gridDim.x && total * c / gridDim.x < (u64)all * (done.tile + 1); c++) {
                if (total * c / gridDim.x == total * (c + 1) / gridDim.x) continue;
                if (me == 0) {
                    u32 ready = 0;
                    while (!ready) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(ready) : "l"(flags + 2 * c + half) : "memory");
                    flags[2 * c + half] = 0;
                }
                meet(own, 128);
                const float4 *slot = (const float4 *)(partial + (u64)c * ROWS * TN) + threadIdx.x;
#pragma unroll
                for (int m = 0; m < MB; m++)
#pragma unroll
                    for (int i = 0; i < SUMS / 4; i++) {
                        float4 v = __ldcg(slot + (m * SUMS / 4 + i) * 256);
                        d[m][4 * i] += v.x, d[m][4 * i + 1] += v.y, d[m][4 * i + 2] += v.z, d[m][4 * i + 3] += v.w;
                    }
            }
        }
#pragma unroll
        for (int m = 0; m < MB; m++)
#pragma unroll
            for (int i = 0; i < SUMS; i++) d[m][i] *= factor[m];

        if (GATE) {
            if (half == 0) piece_left();
            // `up` goes to the warpgroup of `gate`, 64 values a thread at a time.
#pragma unroll
            for (int round = 0; round < (MB * SUMS + 63) / 64; round++) {
                meet(1, 256);
                if (half == 1) {
#pragma unroll
                    for (int e = 64 * round; e < 64 * (round + 1) && e < MB * SUMS; e++)
                        asm volatile("st.shared.f32 [%0], %1;" ::"r"(buffer + ((e % 64) * 128 + me) * 4), "f"(d[e / SUMS][e % SUMS]) : "memory");
                }
                meet(1, 256);
                if (half == 0) {
#pragma unroll
                    for (int e = 64 * round; e < 64 * (round + 1) && e < MB * SUMS; e++) {
                        float up, gate = d[e / SUMS][e % SUMS];
                        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(up) : "r"(buffer + ((e % 64) * 128 + me) * 4));
                        d[e / SUMS][e % SUMS] = __fdividef(gate, 1.f + __expf(-gate)) * up;
                    }
                }
            }
            if (half == 1) continue;
        }
        int group = GATE ? row_tile * 4 * MB : row_tile * 8 * MB + half * 4 * MB;
        if (out >= OUT_BF16) {
            constexpr int PITCH = (64 * MB + 8) * 2;
#pragma unroll
            for (int h = 0; h < TN / TOKENS16; h++) {
                piece_left();
                meet(own, 128);
#pragma unroll
                for (int m = 0; m < MB; m++) put16<TOKENS16>(d[m], h * TOKENS16, piece, PITCH, 64 * m + 16 * w, lane, out == OUT_F16);
                write_out(target, piece, PITCH, token + h * TOKENS16, TOKENS16, group, 64 * MB, me, 128, own);
            }
        } else {
            constexpr int PITCH = (64 * MB + 4) * 4;
#pragma unroll
            for (int h = 0; h < TN / TOKENS32; h++) {
                piece_left();
                meet(own, 128);
#pragma unroll
                for (int m = 0; m < MB; m++) put32<TOKENS32>(d[m], h * TOKENS32, piece, PITCH, 64 * m + 16 * w, g, t);
                write_out(target, piece, PITCH, token + h * TOKENS32, TOKENS32, group, 64 * MB, me, 128, own);
            }
        }
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#define GEMM(NAME, GATE) \
    extern "C" __global__ void __launch_bounds__(384, 1) NAME( \
        const u8 *units, const u64 *groups, const u8 *x, u64 y, u64 ldy, int tokens, int group_count, int row_units, \
        int parts, int split_tiles, int row_tiles, int token_tiles, float *partial, u32 *flags, int out, int aligned, \
        const float *global, int convention) { \
        multiply<ELEMENT, GATE>(units, groups, x, y, ldy, tokens, group_count, row_units, parts, split_tiles, row_tiles, \
                                token_tiles, partial, flags, out, aligned, global, convention); \
    }
GEMM(gemm, false)
GEMM(gemm_gate, true)
