// Outputs of a warpgroup on their way to memory. Needs elements.cu and copy.cu before it. Definition: TN, as in gemm.cu.

constexpr int PIECE = 8192; // bytes of outputs of one warpgroup in shared memory
enum { OUT_F32, OUT_ADD, OUT_BF16, OUT_F16 };

// Outputs of a warpgroup in shared memory: WIDTH rows of the weight by up to COUNT tokens, LINE bytes of a token side by side.
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

// Tokens of a box of y.
constexpr int BOX = 16;

// Tokens from `token` on, of which those from `low` to `high` are this block's; rows from group `group` on.
template <bool GATE, int SIZE>
DEVICE void write_out(const Target &to, u32 base, int token, int low, int high, int group, int me, int own) {
    using P = Piece<GATE, SIZE>;
    if (to.aligned) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        meet(own, 128);
        if (me == 0) {
#pragma unroll
            for (int b = 0; b < P::BOXES; b++)
                for (int i = low; i < high && group < to.group_count; i += BOX)
                    copy_out(base + b * (P::COUNT * P::LINE) + i * P::LINE, to.map, group * 16 + b * (P::LINE / SIZE), token + i, to.out == OUT_ADD);
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
        return;
    }
    meet(own, 128);
    int end = min(high, to.tokens - token), groups = min(P::WIDTH / 16, to.group_count - group);
    for (int e = low * P::WIDTH + me; e < end * P::WIDTH; e += 128) {
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

// The sums of a warpgroup to y, a piece at a time, tokens from `low` to `high` of the tile. Without a gate a lane has rows g and g + 8 of its warp's 16, with one
// the products of two rows, in d[4 n] and d[4 n + 1]; two tokens, 2 t and 2 t + 1 of eight.
template <bool GATE, int SIZE>
DEVICE void put_all(const float (&d)[SUMS], const Target &to, u32 base, int token, int low, int high, int group, int lane, int w, int me, int own) {
    using P = Piece<GATE, SIZE>;
    int g = lane >> 2, t = lane & 3, matrix = lane >> 3;
#pragma unroll
    for (int first = 0; first < TN; first += P::COUNT) {
        int from = max(low - first, 0), end = min(high - first, P::COUNT);
        if (from >= end) continue;
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
        write_out<GATE, SIZE>(to, base, token + first, from, end, group, me, own);
    }
}

