// The next token of every sequence, and the step to the next position.

// A key that orders floats; both zeros are one.
DEVICE u32 ordered(float x) {
    u32 bits = __float_as_uint(x + 0.f);
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// Hands a sequence's token to the host: its n-th record, with n's lowest 30 bits and two flags above the token. `out` is host
// memory; the parity of n chooses the half, so the record before stays until the host has read it.
DEVICE void hand_over(volatile u64 *out, u32 sequences, u32 sequence, u32 *records, u32 token, u32 flags) {
    u32 n = ++records[sequence];
    out[(n & 1) * sequences + sequence] = (u64)(n << 2 | flags) << 32 | token;
}

// argmax(logits f32[sequences, vocab], vocab, rows, best u64[sequences], counters u32[sequences], token u32[sequences],
//        id u32[sequences], position u32[sequences], flags u32[sequences], records u32[sequences], out u64[2, sequences],
//        stride)
//   grid (B, sequences), block 256; B about 128 / sequences, at least 1. `best` and `counters` are zero before the
//   first launch and after every launch. The largest logit, the first of several:
//   token = id = it, position += rows; handed over (out = 0: not), `stride` records a half.
//   flags = 1: a NaN or +inf among the logits, 2: -inf everywhere; else 0. Where it is not 0, the token is 0.
extern "C" __global__ void __launch_bounds__(256) argmax(
    const float *logits, int vocab, u32 rows, u64 *best, u32 *counters, u32 *token, u32 *id, u32 *position, u32 *flags,
    u32 *records, u64 *out, u32 stride) {
    __shared__ u64 keys[8];
    let_next_start();
    u32 sequence = blockIdx.y;
    const float *x = logits + (u64)sequence * vocab;
    constexpr u64 UNUSABLE = ~0ull; // above the key of every number
    u64 key = 0;
    bool bad = false;
    auto take = [&](float v, int i) {
        bad |= !(v < -MINUS_INFINITY);
        u64 k = (u64)ordered(v) << 32 | (0xffffffffu - i);
        key = k > key ? k : key;
    };
    wait_for_previous();
#pragma unroll 8
    for (int i = blockIdx.x * 256 + threadIdx.x; i < vocab; i += gridDim.x * 256) take(x[i], i);
    if (bad) key = UNUSABLE;
    for (int d = 16; d; d >>= 1) {
        u64 other = __shfl_xor_sync(~0u, key, d);
        key = other > key ? other : key;
    }
    if ((threadIdx.x & 31) == 0) keys[threadIdx.x >> 5] = key;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 1; w < 8; w++) key = keys[w] > key ? keys[w] : key;
    atomicMax(best + sequence, key);
    __threadfence();
    if (atomicAdd(counters + sequence, 1) != gridDim.x - 1) return;
    __threadfence();
    key = atomicExch(best + sequence, 0);
    u32 flag = key == UNUSABLE ? 1 : (u32)(key >> 32) <= ordered(MINUS_INFINITY) ? 2 : 0;
    u32 chosen = flag ? 0 : 0xffffffffu - (u32)key;
    if (out) hand_over(out, stride, sequence, records, chosen, flag);
    counters[sequence] = 0;
    token[sequence] = id[sequence] = chosen;
    flags[sequence] = flag;
    position[sequence] += rows;
}
