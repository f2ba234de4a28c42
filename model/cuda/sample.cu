// The next token of every sequence, and the step to the next position.

// A key that orders floats; both zeros are one.
DEVICE u32 ordered(float x) {
    u32 bits = __float_as_uint(x + 0.f);
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// argmax(logits f32[sequences, vocab], vocab, best u64[sequences], counters u32[sequences], token u32[sequences],
//        position u32[sequences], flags u32[sequences])
//   grid (B, sequences), block 256; B about 128 / sequences, at least 1. `best` and `counters` are zero before the
//   first launch and after every launch. The largest logit, the first of several:
//   token = it, position += 1.
//   flags |= 1: a NaN or +inf among the logits. flags |= 2: -inf everywhere. The token is then 0.
extern "C" __global__ void __launch_bounds__(256) argmax(
    const float *logits, int vocab, u64 *best, u32 *counters, u32 *token, u32 *position, u32 *flags) {
    __shared__ u64 keys[8];
    let_next_start();
    wait_for_previous();
    int sequence = blockIdx.y;
    const float *x = logits + (u64)sequence * vocab;
    u64 key = 0;
    bool bad = false;
    auto take = [&](float v, int i) {
        bad |= !(v < -MINUS_INFINITY);
        u64 k = (u64)ordered(v) << 32 | (0xffffffffu - i);
        key = k > key ? k : key;
    };
#pragma unroll 8
    for (int i = blockIdx.x * 256 + threadIdx.x; i < vocab; i += gridDim.x * 256) take(x[i], i);
    if (bad) atomicOr(flags + sequence, 1);
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
    counters[sequence] = 0;
    u32 id = 0xffffffffu - (u32)key;
    if ((u32)(key >> 32) <= ordered(MINUS_INFINITY)) atomicOr(flags + sequence, 2);
    if (atomicOr(flags + sequence, 0)) id = 0;
    token[sequence] = id;
    position[sequence] += 1;
}
