// Attention of one step's queries over the cache. HEAD_DIM (64, 80, 96 or 128) is defined at compilation for
// the kernels `decode_*`; `attention_*` take any even head size up to 512.
//
// Cache: keys/values[sequence * sequence_stride + kv_head * head_stride + position * dim + i], strides in elements.

// attention_T(q T[rows, heads dim], keys T, values T, head_stride, sequence_stride, position u32, batch,
//             out T[rows, heads dim], heads, kv_heads, dim, scale)
//   grid (heads, rows), block 256. scale = 1/sqrt(dim). Positions as in rotate_append.
//   f32 arithmetic without tensor cores: `--dtype f32` and head sizes the other kernels do not have.
template <class T>
DEVICE void attention(
    const T *q, const T *keys, const T *values, u64 head_stride, u64 sequence_stride, const u32 *position, int batch,
    T *out, int heads, int kv_heads, int dim, float scale) {
    __shared__ float best[8], total[8], sums[8][512];
    let_next_start();
    wait_for_previous();
    int head = blockIdx.x, row = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int count = (batch ? position[row] : position[0] + row) + 1;
    u64 base = (batch ? row * sequence_stride : 0) + (u64)(head / (heads / kv_heads)) * head_stride;
    const T *from = q + ((u64)row * heads + head) * dim;
    constexpr int PARTS = 16;
    float x[PARTS], o[PARTS], m = MINUS_INFINITY, l = 0.f;
#pragma unroll
    for (int j = 0; j < PARTS; j++) {
        x[j] = lane + 32 * j < dim ? widen(from[lane + 32 * j]) * scale : 0.f;
        o[j] = 0.f;
    }
    for (int p = warp; p < count; p += 8) {
        const T *k = keys + base + (u64)p * dim, *v = values + base + (u64)p * dim;
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
        const T *q, const T *keys, const T *values, u64 head_stride, u64 sequence_stride, const u32 *position, int batch, \
        T *out, int heads, int kv_heads, int dim, float scale) { \
        attention<T>(q, keys, values, head_stride, sequence_stride, position, batch, out, heads, kv_heads, dim, scale); \
    }
ATTENTION(float, f32)
ATTENTION(bf16, bf16)
ATTENTION(f16, f16)

#ifdef HEAD_DIM
// decode_X_T(qkv X[sequences, (heads + 2 kv_heads) HEAD_DIM], q_weight f32, k_weight f32, eps,
//            cosine f32[context, HEAD_DIM/2], sine, position u32[sequences], keys T, values T, head_stride,
//            sequence_stride, partial f32[sequences * kv_heads * groups * splits * 8 * (HEAD_DIM + 4)], 16-byte aligned,
//            counters u32[sequences * kv_heads * groups], out T[sequences, heads HEAD_DIM], heads, kv_heads, scale)
//   grid (splits, kv_heads * groups, sequences), groups = ceil(heads / kv_heads / 8), block 256;
//   splits: about (multiprocessors / (kv_heads * groups * sequences)), at most 32, at least 1.
//   One token a sequence: norm and rotation of its q and k, append of k and v at position[sequence], attention over
//   position[sequence] + 1 positions. `counters` are zero before the first launch and after every launch.
//   A split takes a multiple of 128 positions; the last block of a head to finish adds the splits in their order.
constexpr int D = HEAD_DIM;
constexpr int WARPS = 8;
// Positions a block takes at once, 16 a warp.
constexpr int STEP = 16 * WARPS;
// Splits at most, and one's share of sums: per head D sums, their peak and their total.
constexpr int MOST = 32, SLOT = 8 * (D + 4);
constexpr int FULL_V = D / 64, REST_V = D % 64;

template <class T> struct Tile {
    // Keys: n-tile j holds position 8 j + lane / 4; word 4 c + i holds values 32 c + 8 (lane % 4) + 2 i.
    u32 k[2][D / 8];
    // Values: row r is position 2 (lane % 4) + {0, 1, 8, 9}[r]; eight values of every 64 from 8 (lane / 4).
    u32 v[4][D / 16];

    DEVICE u32 row_of(int r, int t) { return 2 * t + (r & 1) + (r >> 1) * 8; }
    DEVICE void take(u32 *to, const T *from, int words) {
        if (words == 4) {
            uint4 x = *(const uint4 *)from;
            to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
        } else if (words == 2) {
            uint2 x = *(const uint2 *)from;
            to[0] = x.x, to[1] = x.y;
        } else {
            to[0] = *(const u32 *)from;
        }
    }
    DEVICE void key(u32 *to, const T *row, int t) {
#pragma unroll
        for (int c = 0; c < D / 32; c++) take(to + 4 * c, row + 32 * c + 8 * t, 4);
        if (D % 32) take(to + 4 * (D / 32), row + 32 * (D / 32) + 4 * t, 2);
    }
    DEVICE void value(u32 *to, const T *row, int g) {
#pragma unroll
        for (int c = 0; c < FULL_V; c++) take(to + 4 * c, row + 64 * c + 8 * g, 4);
        if (REST_V == 32) take(to + 4 * FULL_V, row + 64 * FULL_V + 4 * g, 2);
        if (REST_V == 16) take(to + 4 * FULL_V, row + 64 * FULL_V + 2 * g, 1);
    }
    // Positions from `end` on are zero.
    DEVICE void load(Tile &x, const T *keys, const T *values, u32 first, u32 end, int g, int t) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            u32 p = first + 8 * j + g;
            if (p < end) {
                key(x.k[j], keys + (u64)p * D, t);
            } else {
#pragma unroll
                for (int i = 0; i < D / 8; i++) x.k[j][i] = 0;
            }
        }
#pragma unroll
        for (int r = 0; r < 4; r++) {
            u32 p = first + row_of(r, t);
            if (p < end) {
                value(x.v[r], values + (u64)p * D, g);
            } else {
#pragma unroll
                for (int i = 0; i < D / 16; i++) x.v[r][i] = 0;
            }
        }
    }
    // Puts the new token, still in shared memory, at its place.
    DEVICE void patch(Tile &x, const T *k, const T *v, u32 first, u32 at, int g, int t) {
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (first + 8 * j + g == at) key(x.k[j], k, t);
#pragma unroll
        for (int r = 0; r < 4; r++)
            if (first + row_of(r, t) == at) value(x.v[r], v, g);
    }
};

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

// Floats between pairs of heads in the sums, and where a head begins: lanes that store at once meet no bank twice.
constexpr int PAIR = 2 * D + 4;
DEVICE int head_at(int h) { return (h >> 1) * PAIR + (h & 1) * D; }

// The transpose of 8 x 8 values, two of a row in a lane.
DEVICE u32 transposed(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
// Brings bytes that are read soon into the L2; nothing on devices that cannot.
DEVICE void fetch_ahead(const void *from, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

template <class X, class T>
DEVICE void decode(
    const X *qkv, const float *q_weight, const float *k_weight, float eps, const float *cosine, const float *sine,
    const u32 *position, T *keys, T *values, u64 head_stride, u64 sequence_stride, float *partial, u32 *counters, T *out,
    int heads, int kv_heads, float scale) {
    __shared__ __align__(16) T q[8][D];
    __shared__ __align__(16) T fresh[2][D];
    __shared__ __align__(16) float sums[WARPS][4 * PAIR];
    __shared__ float best[WARPS][8], total[WARPS][8];
    __shared__ bool last;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int group = heads / kv_heads, groups = (group + 7) / 8, kv = blockIdx.y / groups, first_head = (blockIdx.y % groups) * 8;
    int mine = min(8, group - first_head);
    const X *row = qkv + (u64)blockIdx.z * (heads + 2 * kv_heads) * D;
    bool query = warp < mine, key = warp == WARPS - 1, value = warp == WARPS - 2;
    let_next_start();
    // Positions, and keys and values before this one, are older than the step: only q, k and v come from the kernel before.
    u32 at = position[blockIdx.z];
    u32 steps = (at + STEP) / STEP, share = (steps + gridDim.x - 1) / gridDim.x;
    u32 active = (steps + share - 1) / share;
    if (blockIdx.x >= active) return;
    u32 begin = blockIdx.x * share * STEP, end = min(at + 1, begin + share * STEP);
    keys += blockIdx.z * sequence_stride + kv * head_stride;
    values += blockIdx.z * sequence_stride + kv * head_stride;
    u32 rest = begin + 2 * STEP;
    if (threadIdx.x == 0 && rest < end) {
        fetch_ahead(keys + (u64)rest * D, (end - rest) * D * sizeof(T));
        fetch_ahead(values + (u64)rest * D, (end - rest) * D * sizeof(T));
    }
    begin += warp * 16;
    // Two tiles on their way at once.
    Tile<T> x, next;
    Tile<T>::load(x, keys, values, begin, min(end, at), g, t);
    if (begin + STEP < end) Tile<T>::load(next, keys, values, begin + STEP, min(end, at), g, t);
    bool owner = blockIdx.x == active - 1;
    {
        Head<float> weight;
        Head<X> head, other;
        float c[Head<X>::N], s[Head<X>::N];
        Head<float>::load(weight, key && !query ? k_weight : q_weight);
        Head<X>::angles(c, s, cosine + (u64)at * (D / 2), sine + (u64)at * (D / 2));
        wait_for_previous();
        if (query) Head<X>::load(head, row + (kv * group + first_head + warp) * D);
        if (owner && (key || value)) Head<X>::load(other, row + (heads + (value ? kv_heads : 0) + kv) * D);
        if (query) {
            Head<X>::norm_rotate(head, weight, c, s, eps);
            Head<X>::store(head, q[warp]);
        } else {
            for (int i = lane; i < D; i += 32) q[warp][i] = As<T>::from(0.f);
        }
        if (owner && key) {
            if (query) Head<float>::load(weight, k_weight);
            Head<X>::norm_rotate(other, weight, c, s, eps);
            Head<X>::store(other, fresh[0]);
        }
        if (owner && value) Head<X>::store(other, fresh[1]);
    }
    __syncthreads();
    if (owner && threadIdx.x < D) {
        keys[(u64)at * D + threadIdx.x] = fresh[0][threadIdx.x];
        values[(u64)at * D + threadIdx.x] = fresh[1][threadIdx.x];
    }

    // Keys are the first operand, rows g and g + 8 of a warp's 16 positions; q is the second, a head a column, its words in
    // the order of a key's. So scores, sums and their factors are of heads 2 t and 2 t + 1.
    constexpr int N = D / 16;
    float o[N][4], m[2] = {MINUS_INFINITY, MINUS_INFINITY}, l[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < N; i++) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.f;
    float scale2 = scale * 1.44269504f;
    for (u32 p = begin; p < end; p += STEP) {
        if (p <= at && at < p + 16) Tile<T>::patch(x, fresh[0], fresh[1], p, at, g, t);
        float y[4] = {}, z[4] = {};
        {
            u32 a[D / 8];
            Tile<T>::key(a, q[g], t);
#pragma unroll
            for (int i = 0; i < N; i++)
                As<T>::mma(i % 2 ? z : y, x.k[0][2 * i], x.k[1][2 * i], x.k[0][2 * i + 1], x.k[1][2 * i + 1], a[2 * i], a[2 * i + 1]);
        }
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
            l[h] = l[h] * keep[h] + y[h] + y[h + 2];
        }
        u32 p0 = transposed(As<T>::pair(y[0], y[1])), p1 = transposed(As<T>::pair(y[2], y[3]));
        // Values are the first operand again: its row g is value i of lane group g's eight, row g + 8 value i + D / 16.
#pragma unroll
        for (int i = 0; i < N; i++) {
            u32 b[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int n = i + (j & 1) * N;
                b[j] = __byte_perm(x.v[j & 2][n / 2], x.v[(j & 2) + 1][n / 2], n % 2 ? 0x7632 : 0x5410);
            }
            o[i][0] *= keep[0], o[i][1] *= keep[1], o[i][2] *= keep[0], o[i][3] *= keep[1];
            As<T>::mma(o[i], b[0], b[1], b[2], b[3], p0, p1);
        }
        x = next;
        if (p + 2 * STEP < end) Tile<T>::load(next, keys, values, p + 2 * STEP, min(end, at), g, t);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int d = 4; d < 32; d *= 2) l[h] += __shfl_xor_sync(~0u, l[h], d);
        if (g == 0) best[warp][2 * t + h] = m[h], total[warp][2 * t + h] = l[h];
        // In runs as long as the loads of values had them.
        float *to = sums[warp] + head_at(2 * t + h);
        auto value_of = [&](int n) { return n < N ? o[n][h] : o[n - N][h + 2]; };
        if (2 * t + h < mine) {
#pragma unroll
            for (int c = 0; c < FULL_V; c++)
#pragma unroll
                for (int n = 8 * c; n < 8 * c + 8; n += 4)
                    *(float4 *)(to + 64 * c + 8 * g + n % 8) = make_float4(value_of(n), value_of(n + 1), value_of(n + 2), value_of(n + 3));
            constexpr int F = 8 * FULL_V;
            if (REST_V == 32) *(float4 *)(to + 64 * FULL_V + 4 * g) = make_float4(value_of(F), value_of(F + 1), value_of(F + 2), value_of(F + 3));
            if (REST_V == 16) *(float2 *)(to + 64 * FULL_V + 2 * g) = make_float2(value_of(F), value_of(F + 1));
        }
    }
    __syncthreads();

    T *to = out + ((u64)blockIdx.z * heads + kv * group + first_head) * D;
    u64 pair = (u64)blockIdx.z * gridDim.y + blockIdx.y;
    float *slots = partial + pair * gridDim.x * SLOT;
    float *slot = slots + (u64)blockIdx.x * SLOT;
    for (int e = threadIdx.x; e < mine * D; e += WARPS * 32) {
        int h = e / D, i = e % D;
        float peak = best[0][h];
#pragma unroll
        for (int w = 1; w < WARPS; w++) peak = fmaxf(peak, best[w][h]);
        float sum = 0.f, all = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float f = two_to(best[w][h] - peak);
            sum += sums[w][head_at(h) + i] * f;
            all += total[w][h] * f;
        }
        if (active == 1) {
            to[e] = As<T>::from(sum / all);
        } else {
            __stcg(slot + h * (D + 4) + i, sum);
            if (i == 0) __stcg((float2 *)(slot + h * (D + 4) + D), make_float2(peak, all));
        }
    }
    if (active == 1) return;
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 before;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counters + pair) : "memory");
        last = before == active - 1;
        if (last) counters[pair] = 0;
    }
    __syncthreads();
    if (!last) return;
    // Four values a thread, the even splits in one half of the block, the odd ones in the other, all loads in flight at once.
    struct Share { float4 sum; float peak, all; };
    Share *shares = (Share *)sums;
    int items = mine * (D / 4), half = threadIdx.x >> 7;
    for (int first = 0; first < items; first += 128) {
        int item = first + (threadIdx.x & 127), h = item / (D / 4), i = item % (D / 4) * 4;
        float4 part[MOST / 2];
        float2 head[MOST / 2];
        float peak = MINUS_INFINITY;
#pragma unroll
        for (int w = 0; w < MOST / 2; w++) {
            bool real = 2 * w + half < active && item < items;
            const float *from = slots + (u64)(2 * w + half) * SLOT + h * (D + 4);
            part[w] = real ? __ldcg((const float4 *)(from + i)) : make_float4(0.f, 0.f, 0.f, 0.f);
            head[w] = real ? __ldcg((const float2 *)(from + D)) : make_float2(MINUS_INFINITY, 0.f);
        }
#pragma unroll
        for (int w = 0; w < MOST / 2; w++) peak = fmaxf(peak, head[w].x);
        Share mine_share = {make_float4(0.f, 0.f, 0.f, 0.f), peak, 0.f};
#pragma unroll
        for (int w = 0; w < MOST / 2; w++) {
            float f = head[w].x == MINUS_INFINITY ? 0.f : two_to(head[w].x - peak);
            mine_share.sum.x += part[w].x * f, mine_share.sum.y += part[w].y * f;
            mine_share.sum.z += part[w].z * f, mine_share.sum.w += part[w].w * f;
            mine_share.all += head[w].y * f;
        }
        if (half) shares[threadIdx.x & 127] = mine_share;
        __syncthreads();
        if (!half && item < items) {
            Share odd = shares[threadIdx.x];
            float top = fmaxf(peak, odd.peak), f = two_to(peak - top), e = two_to(odd.peak - top);
            float r = 1.f / (mine_share.all * f + odd.all * e);
            f *= r, e *= r;
            u32 *place = (u32 *)(to + h * D + i);
            place[0] = As<T>::pair(mine_share.sum.x * f + odd.sum.x * e, mine_share.sum.y * f + odd.sum.y * e);
            place[1] = As<T>::pair(mine_share.sum.z * f + odd.sum.z * e, mine_share.sum.w * f + odd.sum.w * e);
        }
        __syncthreads();
    }
}

#define DECODE(NAME, X, T) \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) NAME( \
        const X *qkv, const float *q_weight, const float *k_weight, float eps, const float *cosine, const float *sine, \
        const u32 *position, T *keys, T *values, u64 head_stride, u64 sequence_stride, float *partial, u32 *counters, T *out, \
        int heads, int kv_heads, float scale) { \
        decode<X, T>(qkv, q_weight, k_weight, eps, cosine, sine, position, keys, values, head_stride, sequence_stride, \
                     partial, counters, out, heads, kv_heads, scale); \
    }
DECODE(decode_f32_bf16, float, bf16)
DECODE(decode_bf16_bf16, bf16, bf16)
DECODE(decode_f32_f16, float, f16)
DECODE(decode_f16_f16, f16, f16)
#endif
