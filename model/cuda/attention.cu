// Attention of one step's queries over the cache. HEAD_DIM (64, 80, 96 or 128) is defined at compilation for
// the kernels `decode_*`; `attention_*` take any even head size up to 512.
#include "elements.cuh"
#include "pages.cuh"

// attention_T(q T[rows, heads dim], keys T, values T, pages, out T[rows, heads dim], heads, kv_heads, dim, scale)
//   grid (heads, rows), block 256. scale = 1/sqrt(dim).
//   f32 arithmetic without tensor cores: `--dtype f32` and head sizes the other kernels do not have.
template <class T>
DEVICE void attention(
    const T *q, const T *keys, const T *values, const Pages &pages, T *out, int heads, int kv_heads, int dim, float scale) {
    __shared__ float best[8], total[8], sums[8][512];
    let_next_start();
    wait_for_previous();
    int head = blockIdx.x, row = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int count = position_of(pages, row) + 1;
    u64 base = (u64)(head / (heads / kv_heads)) * pages.head_stride;
    const u32 *list = list_of(pages, row);
    const T *from = q + ((u64)row * heads + head) * dim;
    constexpr int PARTS = 16;
    float x[PARTS], o[PARTS], m = MINUS_INFINITY, l = 0.f;
#pragma unroll
    for (int j = 0; j < PARTS; j++) {
        x[j] = lane + 32 * j < dim ? widen(from[lane + 32 * j]) * scale : 0.f;
        o[j] = 0.f;
    }
    for (int p = warp; p < count; p += 8) {
        u64 at = base + place_of(list, pages.page_stride, p, dim);
        const T *k = keys + at, *v = values + at;
        float s = 0.f;
#pragma unroll
        for (int j = 0; j < PARTS; j++)
            if (lane + 32 * j < dim) s += x[j] * widen(k[lane + 32 * j]);
        s = warp_sum(s);
        float peak = fmaxf(m, s), keep = expf(m - peak), w = expf(s - peak);
        m = peak;
        l = l * keep + w;
#pragma unroll
        for (int j = 0; j < PARTS; j++)
            if (lane + 32 * j < dim) o[j] = o[j] * keep + w * widen(v[lane + 32 * j]);
    }
    if (lane == 0) best[warp] = m, total[warp] = l;
#pragma unroll
    for (int j = 0; j < PARTS; j++) sums[warp][lane + 32 * j] = o[j];
    __syncthreads();
    float peak = best[0];
    for (int w = 1; w < 8; w++) peak = fmaxf(peak, best[w]);
    float all = 0.f, scales[8];
    for (int w = 0; w < 8; w++) {
        scales[w] = expf(best[w] - peak);
        all += total[w] * scales[w];
    }
    for (int i = threadIdx.x; i < dim; i += 256) {
        float sum = 0.f;
        for (int w = 0; w < 8; w++) sum += sums[w][i] * scales[w];
        out[((u64)row * heads + head) * dim + i] = As<T>::from(sum / all);
    }
}

#define ATTENTION(T, N) \
    extern "C" __global__ void __launch_bounds__(256) attention_##N( \
        const T *q, const T *keys, const T *values, const Pages pages, T *out, int heads, int kv_heads, int dim, float scale) { \
        attention<T>(q, keys, values, pages, out, heads, kv_heads, dim, scale); \
    }
ATTENTION(float, f32)
ATTENTION(bf16, bf16)
ATTENTION(f16, f16)

#ifdef HEAD_DIM
// decode_T(qkv T[sequences, (heads + 2 kv_heads) HEAD_DIM], q_weight f32, k_weight f32, eps,
//            cosine f32[context, HEAD_DIM/2], sine, pages, keys T, values T, partial u32[sequences * kv_heads * groups * (splits * 16 HEAD_DIM + 4)], 16-byte aligned,
//            out T[sequences, heads HEAD_DIM], heads, kv_heads, scale)
//   grid (splits, kv_heads * groups, sequences), groups = ceil(heads / kv_heads / 8), block 256,
//   shared 8 SLOTS tiles (SLOTS 1 or 2, defined at compilation);
//   splits: 1 to 32; a grid of no more blocks than multiprocessors is fastest, for blocks wait for each other.
//   One token a sequence, a row each: norm and rotation of its q and k, append of k and v at its position, attention over
//   all up to there. `partial` is zero before the first launch and after every launch.
//   Splits take turns in runs of 128 positions, 16 a warp.
constexpr int D = HEAD_DIM;
constexpr int WARPS = 8;
// Positions a block takes at once, 16 a warp.
constexpr int STEP = 16 * WARPS;
// How often a block looks for the sums of others before it may leave them, about half a microsecond each.
constexpr u32 TRIES = 64;
// Halves of tiles a warp has on their way.
constexpr int AHEAD = SLOTS == 1 ? 2 : 3;

// 16 positions in shared memory: a half of keys, a half of values. The same 16 bytes of eight rows are in
// different banks: in rows of 128 bytes or twice that their number is turned by the row's, others are 16
// bytes apart.
struct Tile {
    static constexpr bool TURNED = D % 64 == 0;
    static constexpr u32 PITCH = TURNED ? 2 * D : 2 * D + 16, HALF = 16 * PITCH, BYTES = 2 * HALF;
    DEVICE u32 at(u32 row, u32 byte) { return row * PITCH + (TURNED ? byte ^ row % 8 * 16 : byte); }

    // A half. Positions from the `real`th on are zero.
    template <class T> DEVICE void fetch(u32 to, const T *from, int real) {
        int lane = threadIdx.x & 31;
#pragma unroll
        for (int j = 0; j < D / 16; j++) {
            int e = lane + 32 * j, r = e / (D / 8);
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + at(r, e % (D / 8) * 16)),
                         "l"(from + 8 * e), "r"(r < real ? 16 : 0) : "memory");
        }
    }
    // Puts the new token in its row of a half.
    template <class T> DEVICE void patch(u32 to, u32 row, const T *from) {
        for (u32 i = threadIdx.x & 31; i < D / 2; i += 32)
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + at(row, 4 * i)), "r"(((const u32 *)from)[i]) : "memory");
    }
};
// All but the last LEFT halves are there.
template <int LEFT> DEVICE void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
    __syncwarp();
}
// Four blocks of 8 x 8 values, a row's address from each lane; two of a row in a lane, or of a column.
DEVICE void matrices(u32 (&x)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from) : "memory");
}
DEVICE void columns(u32 (&x)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from) : "memory");
}

// One head in a warp: values i and i + D/2 of i = lane + 32 j.
template <class X> struct Head {
    static constexpr int HALF = D / 2, N = (HALF + 31) / 32;
    float a[N], b[N];
    DEVICE void load(Head &h, const X *from) {
        int lane = threadIdx.x & 31;
#pragma unroll
        for (int j = 0; j < N; j++) {
            int i = lane + 32 * j;
            h.a[j] = i < HALF ? widen(from[i]) : 0.f;
            h.b[j] = i < HALF ? widen(from[i + HALF]) : 0.f;
        }
    }
    template <class T> DEVICE void store(const Head &h, T *to) {
        int lane = threadIdx.x & 31;
#pragma unroll
        for (int j = 0; j < N; j++) {
            int i = lane + 32 * j;
            if (i < HALF) to[i] = As<T>::from(h.a[j]), to[i + HALF] = As<T>::from(h.b[j]);
        }
    }
    DEVICE void angles(float (&c)[N], float (&s)[N], const float *cosine, const float *sine) {
        int lane = threadIdx.x & 31;
#pragma unroll
        for (int j = 0; j < N; j++) {
            int i = min(lane + 32 * j, HALF - 1);
            c[j] = cosine[i], s[j] = sine[i];
        }
    }
    DEVICE void norm_rotate(Head &h, const Head<float> &weight, const float (&c)[N], const float (&s)[N], float eps) {
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < N; j++) sum += h.a[j] * h.a[j] + h.b[j] * h.b[j];
        float factor = rsqrtf(warp_sum(sum) / (float)D + eps);
#pragma unroll
        for (int j = 0; j < N; j++) {
            float p = h.a[j] * factor * weight.a[j], q = h.b[j] * factor * weight.b[j];
            h.a[j] = p * c[j] - q * s[j];
            h.b[j] = q * c[j] + p * s[j];
        }
    }
};

// Value i of head h in a warp's sums: runs of every eighth value, so that a lane stores four at once, and no
// bank is met twice.
constexpr int RUN = D > 96 ? 20 : 12, PAIR = 16 * RUN + 8;
DEVICE int sum_at(int h, int i) { return (h >> 1) * PAIR + ((h & 1) * 8 + i % 8) * RUN + i / 8; }
static_assert(4 * PAIR * sizeof(float) <= Tile::BYTES, "a warp's sums take the place of its first tile");

// The transpose of 8 x 8 values, two of a row in a lane.
DEVICE u32 transposed(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// What a split hands on of two values of a head: their sums, the peak these stand below, the total. Words are
// inverted, so that none is zero (no sum is the NaN of all ones): a zero has not come yet.
struct Share {
    u32 word[4];
    DEVICE void put(u32 *to, float x, float y, float peak, float total) {
        asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(~__float_as_uint(x)),
                     "r"(~__float_as_uint(y)), "r"(~__float_as_uint(peak)), "r"(~__float_as_uint(total)) : "memory");
    }
    DEVICE void take(Share &s, const u32 *from) {
        asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(s.word[0]), "=r"(s.word[1]), "=r"(s.word[2]), "=r"(s.word[3]) : "l"(from) : "memory");
    }
    // Of no split.
    DEVICE Share none() { return {~0u, ~0u, ~0xff800000u, ~0u}; }
    DEVICE bool came(const Share &s) { return s.word[0] && s.word[1] && s.word[2] && s.word[3]; }
    DEVICE float at(const Share &s, int i) { return __uint_as_float(~s.word[i]); }
};

// A block that waits for others keeps its multiprocessor, which these may need. `state` counts the splits
// that run, << 32, and has a bit for every run of sums that was left by who had waited too long: to the last
// split that comes to run, which makes `state` zero again. From then on nobody leaves anything.
DEVICE bool leave(u64 *state, u32 run, u32 active) {
    bool left = false;
    if ((threadIdx.x & 31) == 0) {
        u32 running = atomicOr(state, 1ull << run) >> 32;
        left = running && running < active;
        if (!left) atomicAnd(state, ~(1ull << run));
    }
    return __shfl_sync(~0u, left, 0);
}

template <class T>
DEVICE void decode(
    const T *qkv, const float *q_weight, const float *k_weight, float eps, const float *cosine, const float *sine,
    const Pages &pages, T *keys, T *values, u32 *partial, T *out, int heads, int kv_heads, float scale) {
    extern __shared__ __align__(128) u8 tiles[];
    __shared__ __align__(16) T q[8][D + 8];
    __shared__ __align__(16) T fresh[2][D];
    __shared__ __align__(16) float best[8][WARPS], total[8][WARPS];
    __shared__ u32 left_to_us;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int group = heads / kv_heads, groups = (group + 7) / 8, kv = blockIdx.y / groups, first_head = (blockIdx.y % groups) * 8;
    int mine = min(8, group - first_head);
    const T *row = qkv + (u64)blockIdx.z * (heads + 2 * kv_heads) * D;
    bool query = warp < mine, key = warp == WARPS - 1, value = warp == WARPS - 2;
    // Positions, and keys and values before this one, are older than the step: only q, k and v come from the
    // kernel before.
    u32 at = position_of(pages, blockIdx.z);
    const u32 *list = list_of(pages, blockIdx.z);
    u32 active = min(gridDim.x, (at + STEP) / STEP), stride = gridDim.x * STEP;
    if (blockIdx.x >= active) return;
    keys += kv * pages.head_stride;
    values += kv * pages.head_stride;
    u32 *shares = partial + ((u64)blockIdx.z * gridDim.y + blockIdx.y) * (gridDim.x * (16 * D) + 4);
    u64 *state = (u64 *)(shares + gridDim.x * (16 * D)), before = 0;
    u32 begin = blockIdx.x * STEP + warp * 16, end = at + 1;
    u32 room = (u32)__cvta_generic_to_shared(tiles) + warp * SLOTS * Tile::BYTES;
    // The hth half from the tile of position p in `slot` on: keys, values, keys of the next tile. More before
    // the wait would let q wait behind them.
    auto fetch = [&](u32 p, u32 slot, int h) {
        p += h / 2 * stride, slot = (slot + h / 2) % SLOTS;
        u32 to = room + slot * Tile::BYTES + h % 2 * Tile::HALF;
        if (p < end) Tile::fetch(to, (h % 2 ? values : keys) + place_of(list, pages.page_stride, p, D), (int)at - (int)p);
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    fetch(begin, 0, 0);
    fetch(begin, 0, 1);
    bool owner = at / STEP % gridDim.x == blockIdx.x;
    {
        Head<float> weight;
        Head<T> head, other;
        float c[Head<T>::N], s[Head<T>::N];
        Head<float>::load(weight, key && !query ? k_weight : q_weight);
        Head<T>::angles(c, s, cosine + (u64)at * (D / 2), sine + (u64)at * (D / 2));
        wait_for_previous();
        // Not before: the weights of the next product would come ahead of q.
        let_next_start();
        if (query) Head<T>::load(head, row + (kv * group + first_head + warp) * D);
        if (owner && (key || value)) Head<T>::load(other, row + (heads + (value ? kv_heads : 0) + kv) * D);
        if (query) {
            Head<T>::norm_rotate(head, weight, c, s, eps);
            Head<T>::store(head, q[warp]);
        } else {
            for (int i = lane; i < D; i += 32) q[warp][i] = As<T>::from(0.f);
        }
        if (owner && key) {
            if (query) Head<float>::load(weight, k_weight);
            Head<T>::norm_rotate(other, weight, c, s, eps);
            Head<T>::store(other, fresh[0]);
        }
        if (owner && value) Head<T>::store(other, fresh[1]);
    }
    __syncthreads();
    // Behind the barrier, which would wait for the answer.
    if (threadIdx.x == 0 && active > 1) before = atomicAdd(state, 1ull << 32);
    if (owner && threadIdx.x < D) {
        u64 place = place_of(list, pages.page_stride, at, D) + threadIdx.x;
        keys[place] = fresh[0][threadIdx.x];
        values[place] = fresh[1][threadIdx.x];
    }

#pragma unroll
    for (int h = 2; h < AHEAD; h++) fetch(begin, 0, h);

    // Keys are the first operand, rows g and g + 8 of a warp's 16 positions; q is the second, a head a
    // column. So scores, sums and their factors are of heads 2 t and 2 t + 1.
    constexpr int N = D / 16;
    u32 a[D / 32 * 4 + 4];
#pragma unroll
    for (int c = 0; c < (D + 31) / 32; c++)
        matrices((u32(&)[4])a[4 * c], (u32)__cvta_generic_to_shared(q[lane % 8]) + min(64 * c + lane / 8 * 16, 2 * D - 16));
    // A lane's row and 16 bytes of the first 16 values; those of four times 16 values stand alike.
    u32 key_at[4], value_at[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        key_at[i] = Tile::at(lane % 16, 32 * i + lane / 16 * 16);
        value_at[i] = Tile::HALF + Tile::at(lane % 8 + lane / 16 * 8, 32 * i + lane / 8 % 2 * 16);
    }
    float o[N][4], l[4] = {}, m[2] = {MINUS_INFINITY, MINUS_INFINITY};
#pragma unroll
    for (int i = 0; i < N; i++) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.f;
    float scale2 = scale * 1.44269504f;
    u32 slot = 0;
    for (u32 p = begin; p < end; p += stride) {
        u32 tile = room + slot * Tile::BYTES, fresh_at = at - p;
        wait_for_copies<AHEAD - 1>();
        if (fresh_at < 16) {
            Tile::patch(tile, fresh_at, fresh[0]);
            __syncwarp();
        }
        float y[4] = {}, z[4] = {};
#pragma unroll
        for (int i = 0; i < N; i++) {
            u32 k[4];
            matrices(k, tile + key_at[i % 4] + i / 4 * 128);
            As<T>::mma(i % 2 ? z : y, k[0], k[1], k[2], k[3], a[2 * i], a[2 * i + 1]);
        }
        __syncwarp();
        fetch(p, slot, AHEAD);
        float keep[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float low = p + g < end ? (y[h] + z[h]) * scale2 : MINUS_INFINITY;
            float high = p + g + 8 < end ? (y[h + 2] + z[h + 2]) * scale2 : MINUS_INFINITY;
            float peak = fmaxf(m[h], fmaxf(low, high));
#pragma unroll
            for (int d = 4; d < 32; d *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, d));
            keep[h] = two_to(m[h] - peak);
            m[h] = peak;
            y[h] = two_to(low - peak), y[h + 2] = two_to(high - peak);
            l[h] *= keep[h];
        }
        u32 p0 = transposed(As<T>::pair(y[0], y[1])), p1 = transposed(As<T>::pair(y[2], y[3])), one = As<T>::pair(1.f, 1.f);
        As<T>::mma(l, one, one, one, one, p0, p1);
        wait_for_copies<AHEAD - 1>();
        if (fresh_at < 16) {
            Tile::patch(tile + Tile::HALF, fresh_at, fresh[1]);
            __syncwarp();
        }
        // Values are the first operand again, rows g and g + 8 of 16.
#pragma unroll
        for (int i = 0; i < N; i++) {
            u32 v[4];
            columns(v, tile + value_at[i % 4] + i / 4 * 128);
            o[i][0] *= keep[0], o[i][1] *= keep[1], o[i][2] *= keep[0], o[i][3] *= keep[1];
            As<T>::mma(o[i], v[0], v[1], v[2], v[3], p0, p1);
        }
        __syncwarp();
        fetch(p, slot, AHEAD + 1);
        slot = (slot + 1) % SLOTS;
    }
    if (threadIdx.x == 0 && active > 1) {
        bool last = before >> 32 == active - 1;
        if (last) atomicExch(state, 0ull);
        left_to_us = last ? (u32)before : 0;
    }
    float *sums = (float *)(tiles + warp * SLOTS * Tile::BYTES);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (g == 0) best[2 * t + h][warp] = m[h], total[2 * t + h][warp] = l[h];
        float *to = sums + sum_at(2 * t + h, g);
        auto value_of = [&](int n) { return o[n / 2][h + n % 2 * 2]; };
        if (2 * t + h < mine) {
#pragma unroll
            for (int n = 0; n + 4 <= D / 8; n += 4)
                *(float4 *)(to + n) = make_float4(value_of(n), value_of(n + 1), value_of(n + 2), value_of(n + 3));
            if (D / 8 % 4) *(float2 *)(to + D / 8 - 2) = make_float2(value_of(D / 8 - 2), value_of(D / 8 - 1));
        }
    }
    __syncthreads();

    // Two values a thread.
    u32 *to = (u32 *)(out + ((u64)blockIdx.z * heads + kv * group + first_head) * D);
    for (int e = 2 * threadIdx.x; e < mine * D; e += 2 * WARPS * 32) {
        int h = e / D;
        const float *from = (const float *)tiles + sum_at(h, e % D);
        float peak = best[h][0];
#pragma unroll
        for (int w = 1; w < WARPS; w++) peak = fmaxf(peak, best[h][w]);
        float x = 0.f, y = 0.f, all = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float *sum = from + w * (SLOTS * Tile::BYTES / 4);
            float f = two_to(best[h][w] - peak);
            x += sum[0] * f, y += sum[RUN] * f, all += total[h][w] * f;
        }
        if (active == 1) {
            float r = __fdividef(1.f, all);
            to[e / 2] = As<T>::pair(x * r, y * r);
        } else {
            Share::put(shares + blockIdx.x * (16 * D) + 2 * e, x, y, peak, all);
        }
    }
    if (active == 1) return;
    // Every block adds runs of 32 values over the splits, a warp a run. All stay until then: blocks of the
    // next kernel that start earlier ask for weights, which the shares would wait behind.
    u32 runs = (mine * D + 31) / 32, todo = warp == 0 ? left_to_us : 0;
    for (u32 run = active - 1 - blockIdx.x + warp * active; run < runs; run += WARPS * active) todo |= 1u << run;
    constexpr int MOST = 8;
    u32 half = lane / 16; // takes the even splits, or the odd ones
    for (; todo; todo &= todo - 1) {
        u32 run = __ffs(todo) - 1, e = 32 * run + 2 * (lane % 16);
        u32 *from = shares + 2 * e;
        u32 splits = (int)e < mine * D ? (active - half + 1) / 2 : 0;
        float x = 0.f, y = 0.f, peak = MINUS_INFINITY, all = 0.f;
        bool left = false;
        for (u32 done = 0; done < (active + 1) / 2 && !left; done += MOST) {
            Share s[MOST];
#pragma unroll
            for (u32 w = 0; w < MOST; w++) s[w] = done + w < splits ? Share{} : Share::none();
            u32 tries = TRIES;
            for (bool came = false; !came && !left;) {
                came = true;
#pragma unroll
                for (u32 w = 0; w < MOST; w++)
                    if (!Share::came(s[w])) Share::take(s[w], from + (u64)(2 * (done + w) + half) * (16 * D));
#pragma unroll
                for (u32 w = 0; w < MOST; w++) came &= Share::came(s[w]);
                came = __all_sync(~0u, came);
                if (!came && !--tries) left = leave(state, run, active);
            }
            float top = peak;
#pragma unroll
            for (u32 w = 0; w < MOST; w++) top = fmaxf(top, Share::at(s[w], 2));
            float f = two_to(peak - top);
            x *= f, y *= f, all *= f, peak = top;
#pragma unroll
            for (u32 w = 0; w < MOST; w++) {
                f = two_to(Share::at(s[w], 2) - peak);
                x += Share::at(s[w], 0) * f, y += Share::at(s[w], 1) * f, all += Share::at(s[w], 3) * f;
            }
        }
        if (left) continue;
        float top = fmaxf(peak, __shfl_xor_sync(~0u, peak, 16)), f = two_to(peak - top);
        x *= f, y *= f, all *= f;
        x += __shfl_xor_sync(~0u, x, 16), y += __shfl_xor_sync(~0u, y, 16), all += __shfl_xor_sync(~0u, all, 16);
        float r = __fdividef(1.f, all);
        if (half == 0 && (int)e < mine * D) to[e / 2] = As<T>::pair(x * r, y * r);
        for (u32 w = 0; w < splits; w++) *(uint4 *)(from + (u64)(2 * w + half) * (16 * D)) = make_uint4(0, 0, 0, 0);
    }
}

#define DECODE(T) \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) decode_##T( \
        const T *qkv, const float *q_weight, const float *k_weight, float eps, const float *cosine, const float *sine, \
        const Pages pages, T *keys, T *values, u32 *partial, T *out, int heads, int kv_heads, float scale) { \
        decode<T>(qkv, q_weight, k_weight, eps, cosine, sine, pages, keys, values, partial, out, heads, kv_heads, scale); \
    }
DECODE(bf16)
DECODE(f16)
#endif
