// Sums of a warp from its registers to y. Needs elements.cu, wgmma.cu and copy.cu before it. Definition: TN, as in gemm.cu.

constexpr int WRITTEN = 2048; // bytes of outputs that a warp puts together in shared memory
enum { OUT_F32, OUT_ADD, OUT_BF16, OUT_F16 };

// Where outputs go. aligned: y and its rows start at multiples of 16 bytes.
struct Target {
    u64 y, ldy;
    const u64 *groups;
    int tokens, group_count, out, aligned;
};

// Four matrices of 8 by 8, transposed; lane 8 i + j says where row j of the `i`th goes.
DEVICE void store4(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

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
                else ((u16 *)to.y)[here] = to.out == OUT_F16 ? Codes<f16>::narrow(v) : Codes<bf16>::narrow(v);
            }
        }
        at += 8 * to.ldy;
    }
}

// Tokens from `low` to `high` of the tile that starts at `token`; rows of group `group`, with a gate from its row `row` on. Without
// a gate a lane has rows g and g + 8 of 16, with one row g of 8, in d[4 n] and d[4 n + 1]; two tokens, 2 t and 2 t + 1 of eight.
// room: WRITTEN bytes of this warp.
template <bool GATE>
DEVICE void put_all(const float (&d)[SUMS], const Target &to, u32 room, int token, int low, int high, int group, int row, int lane) {
    if (group >= to.group_count) return;
    u32 place = (u32)(to.groups[group] >> 32);
    int first = (place >> 5) + row, rows = (place & 31) - row;
    high = min(high, to.tokens - token);
    if (to.out == OUT_F32) return put_elements<GATE, OUT_F32>(d, to, token, low, high, first, rows, lane);
    if (to.out == OUT_ADD) return put_elements<GATE, OUT_ADD>(d, to, token, low, high, first, rows, lane);
    if (!to.aligned || first % 8 || rows < (GATE ? 8 : 16)) return put_elements<GATE, OUT_BF16>(d, to, token, low, high, first, rows, lane);
    // Lines of a token: 32 bytes, whose halves change places every four tokens so that no bank is asked twice; with a gate 16.
    constexpr int LINE = GATE ? 16 : 32, ONCE = GATE ? 32 : 16; // bytes; tokens a warp writes at a time
    bool half = to.out == OUT_F16;
    auto pack = [&](float a, float b) { return half ? Codes<f16>::pack(a, b) : Codes<bf16>::pack(a, b); };
    int matrix = lane >> 3, j = GATE ? lane : (matrix >> 1) * 8 + (lane & 7);
    u32 stored = room + j * LINE + (GATE ? 0 : (matrix ^ lane >> 2) % 2 * 16);
    int late = GATE ? lane : lane >> 1;
    u32 line = room + late * LINE + (GATE ? 0 : (lane ^ late >> 2) % 2 * 16);
    u64 at = to.y + ((u64)(token + late) * to.ldy + first + (GATE ? 0 : lane % 2 * 8)) * 2;
#pragma unroll
    for (int from = 0; from < TN; from += 64) {
        constexpr int COUNT = TN < 64 ? TN : 64;
        if (from + COUNT > low && from < high) {
#pragma unroll
            for (int n = 0; n < COUNT / 8; n += GATE ? 4 : 2) {
                const float *s = d + from / 2 + 4 * n;
                if (GATE) store4(stored + n * 8 * LINE, pack(s[0], s[1]), pack(s[4], s[5]), pack(s[8], s[9]), pack(s[12], s[13]));
                else store4(stored + n * 8 * LINE, pack(s[0], s[1]), pack(s[2], s[3]), pack(s[4], s[5]), pack(s[6], s[7]));
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < COUNT; i += ONCE) {
                int mine = from + i + late;
                uint4 v = read4(line + i * LINE);
                if (mine >= low && mine < high) *(uint4 *)(at + i * 2 * to.ldy) = v;
            }
            __syncwarp();
        }
        at += 64 * 2 * to.ldy;
    }
}
