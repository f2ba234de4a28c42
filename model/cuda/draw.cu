// Drawing a token: what sampling.rs draws from the same logits, bit for bit.
//
// A launch of `penalise` (where something is penalised, with `argmax` after it), then of `weigh`, `narrow`
// and `draw`. The first two of these use many multiprocessors to leave few candidates for the one block that
// draws. `best` is the token with the largest logit; some logit is finite, none is NaN or +inf.
#include "sample.cu"

// Of one draw.
struct Choice {
    double uniform; // [0, 1): decides
    float temperature; // above 0
    float top_p, min_p;
    u32 top_k; // 0: all
};
// A token that may still be drawn: its key orders by rank, its mass is in multiples of 2^-40 of the heaviest.
struct alignas(16) Candidate {
    u64 key, mass;
};
// Candidates by how far their logits are below the largest: a bucket's come before those of the next one in
// rank. All zero before `weigh` and after `draw`.
constexpr int BUCKETS = 2048;
struct Buckets {
    u64 mass[BUCKETS];
    u32 count[BUCKETS];
    u32 listed; // candidates in the list
};

DEVICE u64 key_of(float logit, u32 id) { return (u64)ordered(logit) << 32 | (u32)~id; }

// One rounding an operation: what a compiler may fuse here, the host does not.
DEVICE u64 mass_of(float logit, float peak, float temperature) {
    double x = __ddiv_rn((double)logit - (double)peak, (double)temperature);
    if (x < -28.0) return 0;
    long long n = (long long)__dsub_rn(__dmul_rn(x, 1.4426950408889634), 0.5);
    double r = __dsub_rn(x, __dmul_rn((double)n, 0.6931471805599453)), series = 1.0 / 479001600.0;
    constexpr double FACTORIALS[12] = {39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0};
#pragma unroll
    for (int i = 0; i < 12; i++) series = __dadd_rn(__dmul_rn(series, r), 1.0 / FACTORIALS[i]);
    return (u64)__dmul_rn(series, __longlong_as_double((1023 + 40 + n) << 52));
}
// What is farther below the peak weighs nothing.
DEVICE float least_of(float peak, float temperature) { return __fsub_rn(peak, __fmul_rn(28.5f, temperature)); }
// Every step is monotone, so a larger logit is never in a later bucket.
DEVICE int bucket_of(float logit, float peak, float temperature) {
    return min(BUCKETS - 1, (int)__fmul_rn(__fdiv_rn(__fsub_rn(peak, logit), temperature), BUCKETS / 28.5f));
}
// The largest mass below the share p of `all`: a token stays if those before it hold no more.
DEVICE u64 below_share(u64 all, float p) {
    double share = __dmul_rn((double)p, (double)all);
    u64 below = (u64)share;
    return (double)below >= share && below ? below - 1 : below;
}
DEVICE u64 least_mass(float min_p) { return (u64)ceil(__dmul_rn((double)min_p, 1099511627776.0)); }
DEVICE u64 target_of(double uniform, u64 all) { return min((u64)__dmul_rn(uniform, (double)all), all - 1); }

// Of the block's 1024 threads.
DEVICE u64 sum_of(u64 x, u64 *room) {
    for (int d = 16; d; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = x;
    __syncthreads();
    x = room[threadIdx.x & 31];
    for (int d = 16; d; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
    return x;
}
DEVICE u64 least_in_block(u64 x, u64 *room) {
    for (int d = 16; d; d >>= 1) x = min(x, __shfl_xor_sync(~0u, x, d));
    __syncthreads();
    if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = x;
    __syncthreads();
    x = room[threadIdx.x & 31];
    for (int d = 16; d; d >>= 1) x = min(x, __shfl_xor_sync(~0u, x, d));
    return x;
}
// The sum of the threads before this one.
DEVICE u64 sum_before(u64 x, u64 *room) {
    u64 sum = x;
    for (int d = 1; d < 32; d *= 2) {
        u64 other = __shfl_up_sync(~0u, sum, d);
        if ((threadIdx.x & 31) >= d) sum += other;
    }
    __syncthreads();
    if ((threadIdx.x & 31) == 31) room[threadIdx.x >> 5] = sum;
    __syncthreads();
    u64 ahead = sum - x;
    for (int i = 0; i < threadIdx.x >> 5; i++) ahead += room[i];
    return ahead;
}

// penalise(logits f32[vocab], recent u32[count], count, penalty, seen u32[ceil(vocab / 32)])
//   grid 1, block 1024. Each token of `recent` once; ids are below vocab. `seen` is zero before and after.
extern "C" __global__ void __launch_bounds__(1024) penalise(float *logits, const u32 *recent, u32 count, float penalty, u32 *seen) {
    let_next_start();
    wait_for_previous();
    for (u32 i = threadIdx.x; i < count; i += 1024) {
        u32 at = recent[i];
        if (atomicOr(seen + at / 32, 1u << at % 32) >> at % 32 & 1) continue;
        float v = logits[at], w = v < 0.f ? __fmul_rn(v, penalty) : __fdiv_rn(v, penalty);
        if (v > MINUS_INFINITY) logits[at] = fminf(fmaxf(w, -3.40282347e38f), 3.40282347e38f);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < count; i += 1024) seen[recent[i] / 32] = 0;
}

// weigh(logits f32[vocab], vocab, best u32, flags u32, choice, buckets); grid about 16, block 1024. Counts
// and weighs the candidates.
extern "C" __global__ void __launch_bounds__(1024) weigh(
    const float *logits, int vocab, const u32 *best, const u32 *flags, const Choice choice, Buckets *buckets) {
    __shared__ u64 mass[BUCKETS];
    __shared__ u32 count[BUCKETS];
    let_next_start();
    for (int i = threadIdx.x; i < BUCKETS; i += 1024) mass[i] = 0, count[i] = 0;
    __syncthreads();
    wait_for_previous();
    if (*flags) return;
    float t = choice.temperature, peak = logits[*best], least = least_of(peak, t);
#pragma unroll 4
    for (int i = blockIdx.x * 1024 + threadIdx.x; i < vocab; i += gridDim.x * 1024) {
        float v = logits[i];
        if (!(v >= least)) continue;
        u64 m = mass_of(v, peak, t);
        if (m) {
            int b = bucket_of(v, peak, t);
            atomicAdd(mass + b, m), atomicAdd(count + b, 1);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < BUCKETS; i += 1024)
        if (count[i]) atomicAdd(buckets->mass + i, mass[i]), atomicAdd(buckets->count + i, count[i]);
}

// narrow(logits, vocab, best, flags, choice, buckets, list Candidate[vocab]); grid about 16, block 1024.
// Lists the candidates of the first buckets, as many as the draw can need, in any order.
extern "C" __global__ void __launch_bounds__(1024) narrow(
    const float *logits, int vocab, const u32 *best, const u32 *flags, const Choice choice, Buckets *buckets, Candidate *list) {
    __shared__ u64 room[32];
    let_next_start();
    wait_for_previous();
    if (*flags) return;
    int me = threadIdx.x;
    float t = choice.temperature, peak = logits[*best], least = least_of(peak, t);
    u64 m[2] = {buckets->mass[2 * me], buckets->mass[2 * me + 1]};
    u32 c[2] = {buckets->count[2 * me], buckets->count[2 * me + 1]};
    // The last bucket needed: where the k-th candidate is, or the one that crosses the share, or the one that
    // is drawn.
    u64 within, ahead, own[2];
    if (choice.top_k) {
        within = choice.top_k - 1, own[0] = c[0], own[1] = c[1];
    } else {
        u64 all = sum_of(m[0] + m[1], room);
        within = choice.top_p < 1.f ? below_share(all, choice.top_p) : choice.min_p > 0.f ? all : target_of(choice.uniform, all);
        own[0] = m[0], own[1] = m[1];
    }
    ahead = sum_before(own[0] + own[1], room);
    u64 crossing = ahead + own[0] > within ? 2 * me : ahead + own[0] + own[1] > within ? 2 * me + 1 : BUCKETS - 1;
    int last = (int)least_in_block(crossing, room);
    u64 least_of_all = choice.min_p > 0.f && choice.top_p >= 1.f && !choice.top_k ? least_mass(choice.min_p) : 1;
#pragma unroll 4
    for (int from = blockIdx.x * 1024 + (me & ~31); from < vocab; from += gridDim.x * 1024) {
        int i = from + (me & 31);
        float v = i < vocab ? logits[i] : MINUS_INFINITY;
        u64 mass = v >= least && bucket_of(v, peak, t) <= last ? mass_of(v, peak, t) : 0;
        u32 takers = __ballot_sync(~0u, mass >= least_of_all), at = 0;
        if (!takers) continue;
        if ((me & 31) == 0) at = atomicAdd(&buckets->listed, __popc(takers));
        at = __shfl_sync(~0u, at, 0) + __popc(takers & ((1u << (me & 31)) - 1));
        if (mass >= least_of_all) list[at] = {key_of(v, i), mass};
    }
}

constexpr int SORTED = 1024;

// What is listed. Up to SORTED lie in rank in shared memory, a thread's one in `own`; more lie as they came
// in `list`.
struct Candidates {
    const Candidate *list;
    u64 *sorted, *room;
    Candidate own;
    int count;
    bool small;

    // The key of the last candidate in rank that has at most `before` of mass before it (of candidates, by
    // count). Candidates below the key `low` do not count.
    __device__ __forceinline__ u64 last_within(u64 low, u64 before, bool by_count) {
        int me = threadIdx.x;
        if (small) {
            u64 mine = own.mass && own.key >= low ? by_count ? 1 : own.mass : 0, ahead = sum_before(mine, room);
            return least_in_block(mine && ahead <= before ? own.key : ~0ull, room);
        }
        // The largest key such that it and those before it weigh more than `before`: the one that crosses.
        u64 key = 0;
        for (int bit = 63; bit >= 0; bit--) {
            u64 trial = max(key | 1ull << bit, low), sum = 0;
            for (int i = me; i < count; i += 1024)
                if (list[i].key >= trial) sum += by_count ? 1 : list[i].mass;
            if (sum_of(sum, room) > before) key |= 1ull << bit;
        }
        // Nothing crosses: everything stays.
        return max(key, low);
    }
    __device__ __forceinline__ u64 total(u64 low) {
        u64 sum = 0;
        if (small) sum = own.key >= low ? own.mass : 0;
        else
            for (int i = threadIdx.x; i < count; i += 1024) sum += list[i].key >= low ? list[i].mass : 0;
        return sum_of(sum, room);
    }
    // The least key of at least that mass: in rank, a cut by mass is a cut by key.
    __device__ __forceinline__ u64 last_of_mass(u64 least) {
        u64 cut = ~0ull;
        if (small) cut = own.mass >= least ? own.key : cut;
        else
            for (int i = threadIdx.x; i < count; i += 1024)
                if (list[i].mass >= least) cut = min(cut, list[i].key);
        return least_in_block(cut, room);
    }
};

// draw(logits, best, flags, choice, buckets, list, records u32, out u64[2, stride], stride, embedding); grid 1, block 1024.
// Embeds the token and hands it over with the flags; 0 where they are not 0.
extern "C" __global__ void __launch_bounds__(1024, 1) draw(
    const float *logits, const u32 *best, const u32 *flags, const Choice choice, Buckets *buckets, const Candidate *list,
    u32 *records, u64 *out, u32 stride, const Embedding embedding) {
    __shared__ u64 sorted[SORTED], room[32];
    __shared__ u32 kept;
    let_next_start();
    wait_for_previous();
    int me = threadIdx.x;
    u32 record = *records + 1;
    if (*flags) {
        if (me == 0) hand_over(out, stride, 0, record, 0, *flags), *records = record;
        return;
    }
    Candidates all = {list, sorted, room, {0, 0}, (int)buckets->listed, false};
    all.small = all.count <= SORTED;
    u64 weighed = sum_of(buckets->mass[2 * me] + buckets->mass[2 * me + 1], room), low = 0;
    if (me == 0) kept = 0;
    __syncthreads();
    buckets->mass[2 * me] = buckets->mass[2 * me + 1] = 0;
    buckets->count[2 * me] = buckets->count[2 * me + 1] = 0;
    if (me == 0) buckets->listed = 0;

    if (all.small) {
        sorted[me] = me < all.count ? list[me].key : 0;
    } else if (choice.top_k && choice.top_k <= SORTED) {
        low = all.last_within(0, choice.top_k - 1, true);
        sorted[me] = 0;
        __syncthreads();
        for (int i = me; i < all.count; i += 1024)
            if (list[i].key >= low) sorted[atomicAdd(&kept, 1)] = list[i].key;
        __syncthreads();
        all.count = kept, all.small = true;
    }
    if (all.small) {
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
        u64 key = sorted[me];
        u32 bits = (u32)(key >> 32);
        float v = __uint_as_float(bits & 0x80000000 ? bits & 0x7fffffff : ~bits);
        if (me < all.count) all.own = {key, mass_of(v, logits[*best], choice.temperature)};
    }
    if (choice.top_k && choice.top_k < all.count) low = max(low, all.last_within(0, choice.top_k - 1, true));
    // Without a cut by number or mass, the list may end before the candidates do.
    bool cut = choice.top_k || choice.min_p > 0.f && choice.top_p >= 1.f;
    u64 whole = cut ? all.total(low) : weighed;
    if (choice.top_p < 1.f) {
        low = max(low, all.last_within(low, below_share(whole, choice.top_p), false));
        whole = all.total(low);
    }
    if (choice.min_p > 0.f) {
        low = max(low, all.last_of_mass(least_mass(choice.min_p)));
        whole = all.total(low);
    }
    u64 key = all.last_within(low, target_of(choice.uniform, whole), false);
    if (me == 0) hand_over(out, stride, 0, record, ~(u32)key, 0), *records = record;
    embed_next(embedding, 0, ~(u32)key, 1024);
}
