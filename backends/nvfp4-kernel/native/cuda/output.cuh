// Sums of a warpgroup from its registers to y. Definition: TN, as in gemm.cu.
#include "copy.cuh"
#include "elements.cuh"

constexpr int PIECE = 8192; // bytes of outputs that a warpgroup puts together in shared memory
enum { OUT_F32, OUT_ADD, OUT_BF16, OUT_F16 };

// Where outputs go. end: rows of the weight, of a gate half of them. aligned: y and its rows start at
// multiples of 16 bytes, group i has rows 16 i to 16 i + 15, and end is a multiple of eight.
struct Target {
    u64 y, ldy;
    int tokens, group_count, end, out, aligned;
};

// One by one; of 32 bits eight lanes write 32 bytes side by side. OUT_BF16: or f16.
template <bool GATE, int OUT>
DEVICE void put_elements(const float (&d)[SUMS], const Target &to, int token, int low, int high, int first, int rows, int lane) {
    int g = lane >> 2, t = lane & 3;
    u64 at = (u64)(token + 2 * t) * to.ldy + first + g;
#pragma unroll
    for (int n = 0; n < TN / 8; n++) {
        if (8 * n + 8 > low && 8 * n < high) {
#pragma unroll
            for (int i = 0; i < (GATE ? 2 : 4); i++) {
                int late = 8 * n + 2 * t + (i & 1), row = (i >> 1) * 8;
                if (late < low || late >= high || g + row >= rows) continue;
                u64 here = at + (i & 1) * to.ldy + row;
                float v = d[4 * n + i];
                if (OUT == OUT_F32) ((float *)to.y)[here] = v;
                else if (OUT == OUT_ADD) asm volatile("red.global.add.f32 [%0], %1;" ::"l"((float *)to.y + here), "f"(v) : "memory");
                else ((u16 *)to.y)[here] = to.out == OUT_F16 ? to_f16(v) : to_bf16(v);
            }
        }
        at += 8 * to.ldy;
    }
}

// Tokens from `low` to `high` of the tile that starts at `token`; rows from group `group` on. Without a gate
// a lane has rows g and g + 8 of its warp's 16, with one the products of row g of 8, in d[4 n] and d[4 n +
// 1]; two tokens, 2 t and 2 t + 1 of eight. place: first row * 32 + rows of this warp's group. room: PIECE
// bytes of this warpgroup, whose barrier is `own`.
template <bool GATE>
DEVICE void put_all(const float (&d)[SUMS], const Target &to, u32 place, u32 room, int token, int low, int high, int group, int lane, int w, int me, int own) {
    high = min(high, to.tokens - token);
    if (to.out < OUT_BF16 || !to.aligned) {
        int row = GATE ? w % 2 * 8 : 0;
        if (group + (GATE ? w / 2 : w) >= to.group_count) return;
        int first = (place >> 5) + row, rows = (place & 31) - row;
        if (to.out == OUT_F32) put_elements<GATE, OUT_F32>(d, to, token, low, high, first, rows, lane);
        else if (to.out == OUT_ADD) put_elements<GATE, OUT_ADD>(d, to, token, low, high, first, rows, lane);
        else put_elements<GATE, OUT_BF16>(d, to, token, low, high, first, rows, lane);
        return;
    }
    // Lines of a token, with this warpgroup's rows: whole lines leave twice as fast as sectors. Their 16-byte
    // pieces change places.
    constexpr int LINE = GATE ? 64 : 128, ONCE = 2048 / LINE; // bytes; tokens of which all threads have a piece
    bool half = to.out == OUT_F16;
    auto pack = [&](float a, float b) { return half ? As<f16>::pair(a, b) : As<bf16>::pair(a, b); };
    auto turned = [](int token) { return GATE ? token >> 1 & 3 : token & 7; };
    int matrix = lane >> 3, j = GATE ? lane : (matrix >> 1) * 8 + (lane & 7);
    u32 stored = room + j * LINE + ((GATE ? w : 2 * w + matrix % 2) ^ turned(j)) * 16;
    int late = me / (LINE / 16), piece = me % (LINE / 16);
    u32 line = room + late * LINE + (piece ^ turned(late)) * 16;
    int rows = to.end - group * 16;
    u64 at = to.y + ((u64)(token + late) * to.ldy + group * 16 + piece * 8) * 2;
#pragma unroll
    for (int from = 0; from < TN; from += 64) {
        const int count = TN - from < 64 ? TN - from : 64;
        if (from + count > low && from < high) {
            meet(own, 128);
#pragma unroll
            for (int n = 0; n < 8; n += GATE ? 4 : 2) {
                if (8 * n >= count) break;
                const float *s = d + from / 2 + 4 * n;
                if (GATE) store4(stored + n * 8 * LINE, pack(s[0], s[1]), pack(s[4], s[5]), pack(s[8], s[9]), pack(s[12], s[13]));
                else store4(stored + n * 8 * LINE, pack(s[0], s[1]), pack(s[2], s[3]), pack(s[4], s[5]), pack(s[6], s[7]));
            }
            meet(own, 128);
#pragma unroll
            for (int i = 0; i < count; i += ONCE) {
                int mine = from + i + late;
                uint4 v = read4(line + i * LINE);
                if (mine >= low && mine < high && 8 * piece < rows) *(uint4 *)(at + i * 2 * to.ldy) = v;
            }
        }
        at += 64 * 2 * to.ldy;
    }
}
