// The next token of every sequence, and the step to the next position.

// A key that orders floats; both zeros are one.
DEVICE u32 ordered(float x) {
    u32 bits = __float_as_uint(x + 0.f);
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// argmax(logits f32[sequences, vocab], vocab, best u64[sequences], counters u32[sequences], token u32[sequences],
//        position u32[sequences], history u32[sequences, capacity], capacity, flags u32[sequences])
//   grid (B, sequences), block 256; B about 128 / sequences, at least 1. `best` and `counters` are zero before the
//   first launch and after every launch. The largest logit, the first of several:
//   token = it, history[position + 1] = it (if that is below capacity), position += 1.
//   flags |= 1: a NaN or +inf among the logits. flags |= 2: -inf everywhere. The token is then 0.
extern "C" __global__ void __launch_bounds__(256) argmax(
    const float *logits, int vocab, u64 *best, u32 *counters, u32 *token, u32 *position, u32 *history, int capacity, u32 *flags) {
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
    u32 at = position[sequence] + 1;
    token[sequence] = id;
    if (at < capacity) history[(u64)sequence * capacity + at] = id;
    position[sequence] = at;
}

// Of a sequence; the meaning is that of sampling.rs.
struct Choice {
    float temperature; // above 0
    float top_p, min_p, penalty;
    u32 top_k;  // 0: all
    u32 window; // tokens of history, back from the present one, that the penalty applies to; 0: all
};

// sample(logits f32[sequences, vocab], vocab, choices Choice[sequences], uniform f64[sequences, capacity],
//        list u64[sequences, vocab], seen u32[sequences, ceil(vocab / 32)], token, position, history, capacity, flags)
//   grid sequences, block 1024; the rest as in argmax. The penalty changes the logits. `seen` is zero before the first
//   launch and after every launch. uniform[position + 1] in [0, 1) decides the token of that place.
//   Weights are whole multiples of 2^-40 of the heaviest token's, so sums do not depend on their order; what weighs less
//   cannot be drawn. Candidates are drawn by rank: heavier first, lower id first among equals.
constexpr int SORTED = 1024;

DEVICE u64 block_sum64(u64 x, u64 *room) {
    for (int d = 16; d; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = x;
    __syncthreads();
    x = room[threadIdx.x & 31];
    for (int d = 16; d; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
    return x;
}

DEVICE float unordered(u64 key) {
    u32 k = (u32)(key >> 32);
    return __uint_as_float(k & 0x80000000 ? k & 0x7fffffff : ~k);
}

extern "C" __global__ void __launch_bounds__(1024, 1) sample(
    float *logits, int vocab, const Choice *choices, const double *uniform, u64 *list, u32 *seen, u32 *token, u32 *position,
    u32 *history, int capacity, u32 *flags) {
    __shared__ u64 sorted[SORTED], room[32];
    __shared__ u32 length, wrong;
    let_next_start();
    wait_for_previous();
    int sequence = blockIdx.x, me = threadIdx.x;
    float *x = logits + (u64)sequence * vocab;
    list += (u64)sequence * vocab;
    seen += (u64)sequence * ((vocab + 31) / 32);
    history += (u64)sequence * capacity;
    Choice choice = choices[sequence];
    u32 at = position[sequence];
    if (me == 0) length = 0, wrong = 0;

    if (choice.penalty != 1.f) {
        u32 count = min(at + 1, (u32)capacity), from = choice.window && choice.window < count ? count - choice.window : 0;
        for (u32 i = from + me; i < count; i += 1024) {
            u32 id = history[i];
            if (id >= vocab || atomicOr(seen + id / 32, 1u << id % 32) >> id % 32 & 1) continue;
            float v = x[id], w = v < 0.f ? v * choice.penalty : v / choice.penalty;
            if (fabsf(v) < -MINUS_INFINITY) x[id] = fminf(fmaxf(w, -3.40282347e38f), 3.40282347e38f);
        }
        __syncthreads();
        for (u32 i = from + me; i < count; i += 1024)
            if (history[i] < vocab) seen[history[i] / 32] = 0;
    }
    __syncthreads();

    u32 top = 0;
    bool bad = false;
#pragma unroll 8
    for (int i = me; i < vocab; i += 1024) {
        float v = x[i];
        bad |= !(v < -MINUS_INFINITY);
        top = max(top, ordered(v));
    }
    if (bad) wrong = 1;
    for (int d = 16; d; d >>= 1) top = max(top, __shfl_xor_sync(~0u, top, d));
    if ((me & 31) == 0) room[me >> 5] = top;
    __syncthreads();
    for (int i = 0; i < 32; i++) top = max(top, (u32)room[i]);
    float peak = unordered((u64)top << 32);
    u32 id = 0, flag = wrong ? 1 : !(peak > MINUS_INFINITY) ? 2 : 0;
    if (!flag) {
        // 2^-41 is e^-28.4.
        float least = peak - 28.5f * choice.temperature;
        __syncthreads();
        for (int i = me; i < vocab; i += 1024) {
            float v = x[i];
            if (v >= least) list[atomicAdd(&length, 1)] = (u64)ordered(v) << 32 | (0xffffffffu - i);
        }
        __syncthreads();
        int n = length;
        auto weight = [&](u64 key) { return expf((unordered(key) - peak) / choice.temperature); };
        auto mass = [&](u64 key) { return (u64)(weight(key) * 1099511627776.f); };
        bool small = n <= SORTED;
        if (small) {
            sorted[me] = me < n ? list[me] : 0;
            for (int size = 2; size <= SORTED; size *= 2)
                for (int d = size / 2; d; d /= 2) {
                    __syncthreads();
                    int other = me ^ d;
                    if (other > me) {
                        u64 a = sorted[me], b = sorted[other];
                        if ((a < b) == ((me & size) == 0)) sorted[me] = b, sorted[other] = a;
                    }
                }
            __syncthreads();
        }
        // The key of the last candidate in rank whose predecessors weigh (or number) at most `before`; among keys >= low.
        auto last_within = [&](u64 low, u64 before, bool by_count) {
            if (small) {
                u64 key = sorted[me], own = key >= low && me < n ? (by_count ? 1 : mass(key)) : 0, sum = own;
                for (int d = 1; d < 32; d *= 2) {
                    u64 other = __shfl_up_sync(~0u, sum, d);
                    if ((me & 31) >= d) sum += other;
                }
                if ((me & 31) == 31) room[me >> 5] = sum;
                __syncthreads();
                u64 base = 0;
                for (int i = 0; i < me >> 5; i++) base += room[i];
                u64 ahead = base + sum - own;
                bool in = own && ahead <= before;
                u32 votes = __ballot_sync(~0u, in);
                __syncthreads();
                if ((me & 31) == 0) room[me >> 5] = votes ? sorted[(me & ~31) + 31 - __clz(votes)] : ~0ull;
                __syncthreads();
                u64 found = sorted[0];
                for (int i = 0; i < 32; i++)
                    if (room[i] < found) found = room[i];
                __syncthreads();
                return found;
            }
            // The largest t with mass(keys >= t) > before is the key that crosses; all keys in rank before it stay within.
            u64 t = 0;
            for (int bit = 63; bit >= 0; bit--) {
                u64 trial = t | 1ull << bit, sum = 0;
                for (int i = me; i < n; i += 1024) {
                    u64 key = list[i];
                    if (key >= trial && key >= low) sum += by_count ? 1 : mass(key);
                }
                if (block_sum64(sum, room) > before) t = trial;
            }
            // Nothing crosses: everything from `low` on stays.
            return t ? t : low;
        };
        auto total = [&](u64 low) {
            u64 sum = 0;
            for (int i = me; i < n; i += 1024) {
                u64 key = small ? sorted[i] : list[i];
                if (key >= low) sum += mass(key);
            }
            return block_sum64(sum, room);
        };
        u64 low = 0;
        if (choice.top_k && choice.top_k < n) low = last_within(low, choice.top_k - 1, true);
        if (choice.top_p < 1.f) {
            u64 all = total(low);
            // A candidate stays if those before it hold less than the share.
            double share = (double)choice.top_p * (double)all;
            u64 before = (u64)share;
            if ((double)before >= share && before) before--;
            u64 cut = last_within(low, before, false);
            low = max(low, cut);
        }
        if (choice.min_p > 0.f) {
            // In rank, so a cut by weight is a cut by key.
            u64 cut = (u64)top << 32;
            for (int i = me; i < n; i += 1024) {
                u64 key = small ? sorted[i] : list[i];
                if (weight(key) >= choice.min_p) cut = min(cut, key);
            }
            for (int d = 16; d; d >>= 1) cut = min(cut, __shfl_xor_sync(~0u, cut, d));
            __syncthreads();
            if ((me & 31) == 0) room[me >> 5] = cut;
            __syncthreads();
            for (int i = 0; i < 32; i++) cut = min(cut, room[i]);
            __syncthreads();
            low = max(low, cut);
        }
        u64 all = total(low);
        double u = at + 1 < capacity ? uniform[(u64)sequence * capacity + at + 1] : 0.0;
        u64 target = min((u64)(u * (double)all), all - 1);
        u64 key = last_within(low, target, false);
        id = 0xffffffffu - (u32)key;
    }
    if (me) return;
    if (flag) atomicOr(flags + sequence, flag);
    token[sequence] = id;
    if (at + 1 < capacity) history[at + 1] = id;
    position[sequence] = at + 1;
}
