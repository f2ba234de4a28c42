// The next token of every sequence, and the step to the next position.
#include "elements.cuh"

// A key that orders floats; both zeros are one.
DEVICE u32 ordered(float x) {
    u32 bits = __float_as_uint(x + 0.f);
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// Hands a sequence's token to the host as its n-th record, with n's lowest 30 bits and two flags above the
// token. `out` is host memory; the parity of n chooses the half, so the record before stays until the host
// has read it.
DEVICE void hand_over(volatile u64 *out, u32 sequences, u32 sequence, u32 n, u32 token, u32 flags) {
    out[(n & 1) * sequences + sequence] = (u64)(n << 2 | flags) << 32 | token;
}

// The embedding of a sequence's next token is the next step's input: hidden[sequence] = table[token].
struct Embedding {
    const void *table;
    float *hidden;
    int width;
    int kind; // 1: f32, 2: bf16, 3: f16; 0: leave it
};
// By the `threads` threads of a block.
DEVICE void embed_next(const Embedding &e, u32 sequence, u32 token, int threads) {
    float *to = e.hidden + (u64)sequence * e.width;
    u64 at = (u64)token * e.width;
    if (e.kind == 1) widen_row((const float *)e.table + at, to, e.width, threadIdx.x, threads);
    if (e.kind == 2) widen_row((const bf16 *)e.table + at, to, e.width, threadIdx.x, threads);
    if (e.kind == 3) widen_row((const f16 *)e.table + at, to, e.width, threadIdx.x, threads);
}

// argmax(logits f32[sequences, vocab], vocab, rows, keys u64[sequences, B], turns u32[sequences], token
// u32[sequences],
//        position u32[sequences], flags u32[sequences], records u32[sequences], out u64[2, sequences], stride, embedding)
//   grid (B, sequences), block 256; the same B in every launch with these `keys` and `turns`, which start at zero.
//   The largest logit, the first of several: token = it, embedded, position += rows; handed over (out = 0: not), `stride`
//   records a half.
//   flags = 1: a NaN or +inf among the logits, 2: -inf everywhere; else 0. Where it is not 0, the token is 0.
extern "C" __global__ void __launch_bounds__(256) argmax(
    const float *logits, int vocab, u32 rows, u64 *keys, u32 *turns, u32 *token, u32 *position, u32 *flags, u32 *records,
    u64 *out, u32 stride, const Embedding embedding) {
    __shared__ u64 of_warp[8];
    // Orders logits, then ids backwards. The lowest bit is the launch's parity: what a block left for the
    // launch before is not taken for this one's.
    constexpr u64 UNUSABLE = ~1ull; // above the key of every number
    let_next_start();
    u32 sequence = blockIdx.y;
    const float *x = logits + (u64)sequence * vocab;
    keys += (u64)sequence * gridDim.x;
    u64 key = 0;
    bool bad = false;
    auto take = [&](float v, int i) {
        bad |= !(v < -MINUS_INFINITY);
        key = max(key, (u64)ordered(v) << 32 | (0xfffffffeu - 2 * i));
    };
    int first = blockIdx.x * 256 + threadIdx.x, threads = gridDim.x * 256;
    wait_for_previous();
    // All of it early: nothing is waited for behind the choice.
    u32 turn = turns[sequence] + 1, parity = turn & 1, at = position[sequence], record = out ? records[sequence] + 1 : 0;
    if (vocab % 4 == 0 && ((u64)x & 15) == 0) {
        for (int from = 4 * first; from < vocab; from += 16 * threads) {
            float4 v[4];
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (from + 4 * j * threads < vocab) v[j] = *(const float4 *)(x + from + 4 * j * threads);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int i = from + 4 * j * threads;
                if (i < vocab) take(v[j].x, i), take(v[j].y, i + 1), take(v[j].z, i + 2), take(v[j].w, i + 3);
            }
        }
    } else {
        for (int i = first; i < vocab; i += threads) take(x[i], i);
    }
    if (bad) key = UNUSABLE;
    auto largest_in_block = [&] {
        for (int d = 16; d; d >>= 1) key = max(key, __shfl_xor_sync(~0u, key, d));
        __syncthreads();
        if ((threadIdx.x & 31) == 0) of_warp[threadIdx.x >> 5] = key;
        __syncthreads();
        for (int w = 0; w < 8; w++) key = max(key, of_warp[w]);
    };
    largest_in_block();
    if (blockIdx.x) {
        if (threadIdx.x == 0)
            asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(keys + blockIdx.x), "l"(key | parity) : "memory");
        return;
    }
    // The first block waits for the others, which wait for nobody.
    for (int i = threadIdx.x; i < gridDim.x; i += 256) {
        u64 other = i ? ~(u64)parity : parity;
        while ((other & 1) != parity) asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(other) : "l"(keys + i) : "memory");
        key = max(key, other & ~1ull);
    }
    largest_in_block();
    u32 flag = key == UNUSABLE ? 1 : (u32)(key >> 32) <= ordered(MINUS_INFINITY) ? 2 : 0, next = flag ? 0 : (0xfffffffeu - (u32)key) / 2;
    if (threadIdx.x == 0) {
        if (out) hand_over(out, stride, sequence, record, next, flag), records[sequence] = record;
        turns[sequence] = turn;
        token[sequence] = next;
        flags[sequence] = flag;
        position[sequence] = at + rows;
    }
    embed_next(embedding, sequence, next, 256);
}
