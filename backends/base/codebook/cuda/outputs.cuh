// Outputs of tiles on their way from the sums of warpgroups to y. Definitions: TN, SUMS (hopper.cuh); KEPT,
// tokens of a tile whose outputs a block writes; SPLIT, blocks of a cluster that share k of one tile; PIECE and PIECES, bytes of
// outputs of a warpgroup that leave together, and how many times there is room for them; PAIR, blocks of a
// cluster that do not share k; WGS, warpgroups that multiply.
DEVICE void barrier_wait_cluster(u32 at, u32 phase) {
    asm volatile(
        "{.reg .pred p; AGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1; @p bra PASSED; bra AGAIN; PASSED: }" ::"r"(at), "r"(phase)
        : "memory");
}
// Where the blocks of a cluster have a part of k of one tile each: every one adds up its share of the tokens,
// which come first in `d` then, all in one order.
DEVICE void exchange(float (&d)[SUMS], u32 received, u32 barrier, int part, int rank) {
    constexpr int EACH = SUMS / SPLIT, BYTES = 128 * WGS * 16; // of four sums of all threads
    u32 at = received + threadIdx.x * 16;
#pragma unroll
    for (int c = 0; c < SPLIT; c++) {
        if (c == part) continue;
        u32 block = c * PAIR + rank, to = address_in(at + (part - (part > c)) * (EACH / 4 * BYTES), block), signal = address_in(barrier, block);
#pragma unroll
        for (int i = c * EACH; i < (c + 1) * EACH; i += 4) send4(to + (i - c * EACH) / 4 * BYTES, signal, d + i);
    }
#pragma unroll
    for (int c = 1; c < SPLIT; c++)
#pragma unroll
        for (int i = 0; i < EACH; i++) d[i] = c == part ? d[c * EACH + i] : d[i];
    barrier_wait_cluster(barrier, 0);
#pragma unroll
    for (int c = 0; c < SPLIT - 1; c++)
#pragma unroll
        for (int i = 0; i < EACH; i += 4) {
            float v[4];
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(at + (c * EACH + i) / 4 * BYTES) : "memory");
#pragma unroll
            for (int j = 0; j < 4; j++) d[i + j] += v[j];
        }
}
DEVICE void copy_out(u32 from, const Map *map, int row, int token) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(row), "r"(token), "r"(from) : "memory");
}

enum { OUT_F32, OUT_ADD, OUT_BF16, OUT_F16 };

// Outputs of a warpgroup in bf16 in shared memory: WIDTH rows of the weight by COUNT tokens, a line of LINE
// bytes a token.
template <bool GATE> struct Piece {
    static constexpr int WIDTH = GATE ? 32 : 64, LINE = WIDTH * 2;
    static constexpr int COUNT = SPLIT > 1 ? KEPT : PIECE / LINE;
    static constexpr int BYTES = COUNT * LINE;
    DEVICE u32 at(u32 base, int token, int row) {
        int swizzled = LINE == 128 ? row * 2 ^ (token & 7) << 4 : row * 2 ^ (token >> 1 & 3) << 4;
        return base + token * LINE + swizzled;
    }
};

// Where outputs go.
struct Target {
    const Map *map;
    u64 y, ldy;
    int tokens, rows, out, aligned; // rows: columns of y
};

// All that this thread sent off but the last PIECES - 1 has left shared memory.
DEVICE void piece_left() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PIECES - 1) : "memory"); }

// One piece of the sums of a warpgroup to shared memory. Without a gate a lane has rows g and g + 8 of its
// warp's 16, with one the products of two rows, in d[4 n] and d[4 n + 1]; two tokens, 2 t and 2 t + 1 of
// eight.
template <bool GATE> DEVICE void fill(const float *s, u32 base, int lane, int w) {
    using P = Piece<GATE>;
    constexpr int BLOCKS8 = P::COUNT / 8;
    int matrix = lane >> 3;
    if (GATE) {
#pragma unroll
        for (int n = 0; n < BLOCKS8; n += 4) {
            u32 v[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int block = (n + i) % BLOCKS8;
                v[i] = As<bf16>::pair(s[4 * block], s[4 * block + 1]);
            }
            store4(P::at(base, 8 * ((n + matrix) % BLOCKS8) + (lane & 7), 8 * w), v[0], v[1], v[2], v[3]);
        }
    } else {
#pragma unroll
        for (int n = 0; n < BLOCKS8; n += 2) {
            const float *a = s + 4 * n, *b = s + 4 * ((n + 1) % BLOCKS8);
            store4(P::at(base, 8 * ((n + (matrix >> 1)) % BLOCKS8) + (lane & 7), 16 * w + (matrix & 1) * 8), As<bf16>::pair(a[0], a[1]),
                   As<bf16>::pair(a[2], a[3]), As<bf16>::pair(b[0], b[1]), As<bf16>::pair(b[2], b[3]));
        }
    }
}
// Outputs of N tokens straight from registers: f32, of which eight lanes have 32 bytes side by side, and what
// the copy engine cannot write.
template <bool GATE, int OUT, int N> DEVICE void write_out(const float *s, const Target &to, int token, int row, int lane, int w) {
    constexpr int SIZE = OUT >= OUT_BF16 ? 2 : 4;
    int g = lane >> 2, t = lane & 3, at = row + (GATE ? 8 : 16) * w + g, tokens = to.tokens - token - 2 * t;
    bool one = at < to.rows, two = at + 8 < to.rows;
    u64 step = to.ldy * SIZE, p = to.y + (token + 2 * t) * step + at * SIZE;
#pragma unroll
    for (int n = 0; n < N / 8; n++, p += 8 * step)
#pragma unroll
        for (int i = 0; i < (GATE ? 2 : 4); i++) {
            bool there = (i < 2 ? one : two) && 8 * n + (i & 1) < tokens;
            u64 q = p + (i & 1 ? step : 0) + (i >> 1) * 8 * SIZE;
            float v = s[4 * n + i];
            if (OUT == OUT_ADD)
                asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p red.relaxed.gpu.global.add.f32 [%0], %1;}" ::"l"(q), "f"(v), "r"((int)there) : "memory");
            else if (OUT == OUT_F32)
                asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p st.global.f32 [%0], %1;}" ::"l"(q), "f"(v), "r"((int)there) : "memory");
            else if (there)
                *(u16 *)q = (u16)(to.out == OUT_F16 ? As<f16>::pair(v, 0.f) : As<bf16>::pair(v, 0.f));
        }
}
// Sums of two rows to those of one, with a gate.
template <int N> DEVICE void gate(float *d) {
#pragma unroll
    for (int n = 0; n < N; n += 4)
#pragma unroll
        for (int i = 0; i < 2; i++) d[n + i] = __fdividef(d[n + i], 1.f + __expf(-d[n + i])) * d[n + i + 2];
}
// Tokens that are shared out together: pieces.
template <bool GATE> constexpr int TOGETHER = Piece<GATE>::COUNT;
// A piece, or all of a tile, straight from registers.
template <bool GATE, int N> DEVICE void write_any(const float *s, const Target &to, int token, int row, int lane, int w) {
    if (to.out == OUT_F32) write_out<GATE, OUT_F32, N>(s, to, token, row, lane, w);
    else if (to.out == OUT_ADD) write_out<GATE, OUT_ADD, N>(s, to, token, row, lane, w);
    else write_out<GATE, OUT_BF16, N>(s, to, token, row, lane, w);
}
// Outputs of a tile. Code that runs once waits for its instructions, so what differs between calls has
// straight code of its own. After the last tile there is room for all at `last`, in the ring of x; else for
// PIECES pieces at a time.
template <bool GATE>
DEVICE void put_all(float *d, const Target &to, u32 base, u32 last, int token, int row, int lane, int w, int me, int own, u32 &turn) {
    using P = Piece<GATE>;
    constexpr int COUNT = KEPT / P::COUNT;
    if (GATE) gate<KEPT / 2>(d);
    if (!to.aligned) {
        write_any<GATE, KEPT>(d, to, token, row, lane, w);
    } else if (SPLIT > 1 || last) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) fill<GATE>(d + i * (P::COUNT / 2), last + i * P::BYTES, lane, w);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        meet(own, 128);
        if (me) return;
#pragma unroll 1
        for (int i = 0; i < COUNT; i++) copy_out(last + i * P::BYTES, to.map, row, token + i * P::COUNT);
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            u32 at = base + turn * PIECE;
            if (me == 0) piece_left();
            meet(own, 128);
            fill<GATE>(d + i * (P::COUNT / 2), at, lane, w);
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            meet(own, 128);
            if (me == 0) {
                copy_out(at, to.map, row, token + i * P::COUNT);
                asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            }
            turn = turn + 1 == PIECES ? 0 : turn + 1;
        }
    }
}
