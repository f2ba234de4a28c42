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
//            sequence_stride, partial u32[sequences * kv_heads * groups * splits * 16 HEAD_DIM], 16-byte aligned,
//            out T[sequences, heads HEAD_DIM], heads, kv_heads, scale)
//   grid (splits, kv_heads * groups, sequences), groups = ceil(heads / kv_heads / 8), block 256, shared SLOTS * 8 tiles;
//   splits: 1, or as many as let every block of the grid have a multiprocessor: blocks wait for each other.
//   One token a sequence: norm and rotation of its q and k, append of k and v at position[sequence], attention over
//   position[sequence] + 1 positions. `partial` is zero before the first launch and after every launch.
//   Splits take turns in runs of 128 positions, 16 a warp.
constexpr int D = HEAD_DIM;
constexpr int WARPS = 8;
// Positions a block takes at once, 16 a warp.
constexpr int STEP = 16 * WARPS;
constexpr int FULL_V = D / 64, REST_V = D % 64;

// A word that every layer reads again: stays in the L2 while weights pass through.
DEVICE u32 kept(const u32 *p) {
    u64 policy;
    u32 x;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("ld.global.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(x) : "l"(p), "l"(policy));
    return x;
}

// 16 positions in shared memory, on their way while others are summed. Lanes that load at once meet no bank twice: rows of
// values are 16 bytes apart, and of two rows of keys that begin in the same bank the odd one has its halves of 64 bytes swapped.
struct Tile {
    static constexpr u32 KEY = 2 * D, VALUE = 2 * D + 16, VALUES = 16 * KEY, BYTES = 16 * (KEY + VALUE);
    static constexpr u32 SWAP = D % 64 == 0 ? 64 : 0;

    DEVICE void copy(u32 to, const void *from, u32 bytes) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
    }
    // Positions from the `real`th on are zero.
    template <class T> DEVICE void fetch(u32 to, const T *keys, const T *values, int real) {
        int lane = threadIdx.x & 31;
#pragma unroll
        for (int j = 0; j < D / 16; j++) {
            int e = lane + 32 * j, r = e / (D / 8);
            u32 unit = e % (D / 8) * 16;
            copy(to + r * KEY + (unit ^ (r % 2 * SWAP)), keys + 8 * e, r < real ? 16 : 0);
        }
#pragma unroll
        for (int j = 0; j < D / 16; j++) {
            int e = lane + 32 * j, r = e / (D / 8);
            copy(to + VALUES + r * VALUE + e % (D / 8) * 16, values + 8 * e, r < real ? 16 : 0);
        }
    }
    // Puts the new token at its place.
    template <class T> DEVICE void patch(u32 tile, const T *k, const T *v, u32 r) {
        for (u32 i = threadIdx.x & 31; i < D / 2; i += 32) {
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(tile + r * KEY + (4 * i ^ (r % 2 * SWAP))), "r"(((const u32 *)k)[i]) : "memory");
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(tile + VALUES + r * VALUE + 4 * i), "r"(((const u32 *)v)[i]) : "memory");
        }
    }
    DEVICE void take(u32 *to, u32 from, int words) {
        if (words == 4) asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from));
        else if (words == 2) asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(from));
        else asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to[0]) : "r"(from));
    }
    // Word 4 c + i holds values 32 c + 8 t + 2 i of a key, which begins at `row`; `swap` for the odd ones of SWAP.
    DEVICE void key(u32 *to, u32 row, u32 t, u32 swap) {
        u32 even = row + 16 * t + swap, odd = row + 16 * t + 64 - swap;
#pragma unroll
        for (int c = 0; c < D / 32; c++) take(to + 4 * c, c % 2 ? odd + 64 * (c - 1) : even + 64 * c, 4);
        if (D % 32) take(to + 4 * (D / 32), row + 64 * (D / 32) + 8 * t, 2);
    }
    // Eight values of every 64 from 8 g.
    DEVICE void value(u32 *to, u32 row, u32 g) {
#pragma unroll
        for (int c = 0; c < FULL_V; c++) take(to + 4 * c, row + 128 * c + 16 * g, 4);
        if (REST_V == 32) take(to + 4 * FULL_V, row + 128 * FULL_V + 8 * g, 2);
        if (REST_V == 16) take(to + 4 * FULL_V, row + 128 * FULL_V + 4 * g, 1);
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
static_assert(4 * PAIR * sizeof(float) <= Tile::BYTES, "a warp's sums take the place of its first tile");

// The transpose of 8 x 8 values, two of a row in a lane.
DEVICE u32 transposed(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// What a split hands on of two values of a head: their sums, the peak these stand below, the total. Words are inverted, so
// that none is zero (no sum is the NaN of all ones): a zero has not come yet.
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

template <class X, class T>
DEVICE void decode(
    const X *qkv, const float *q_weight, const float *k_weight, float eps, const float *cosine, const float *sine,
    const u32 *position, T *keys, T *values, u64 head_stride, u64 sequence_stride, u32 *partial, T *out, int heads,
    int kv_heads, float scale) {
    extern __shared__ __align__(128) u8 tiles[];
    __shared__ __align__(16) T q[8][D];
    __shared__ __align__(16) T fresh[2][D];
    __shared__ float best[WARPS][8], total[WARPS][8];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int group = heads / kv_heads, groups = (group + 7) / 8, kv = blockIdx.y / groups, first_head = (blockIdx.y % groups) * 8;
    int mine = min(8, group - first_head);
    const X *row = qkv + (u64)blockIdx.z * (heads + 2 * kv_heads) * D;
    bool query = warp < mine, key = warp == WARPS - 1, value = warp == WARPS - 2;
    let_next_start();
    // Positions, and keys and values before this one, are older than the step: only q, k and v come from the kernel before.
    u32 at = kept(position + blockIdx.z);
    u32 active = min(gridDim.x, (at + STEP) / STEP), stride = gridDim.x * STEP;
    if (blockIdx.x >= active) return;
    keys += blockIdx.z * sequence_stride + kv * head_stride;
    values += blockIdx.z * sequence_stride + kv * head_stride;
    u32 begin = blockIdx.x * STEP + warp * 16, end = at + 1;
    u32 room = (u32)__cvta_generic_to_shared(tiles) + warp * SLOTS * Tile::BYTES;
    auto fetch = [&](u32 p, u32 slot) {
        if (p < end) Tile::fetch(room + slot, keys + (u64)p * D, values + (u64)p * D, (int)at - (int)p);
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    bool owner = at / STEP % gridDim.x == blockIdx.x;
    {
        Head<float> weight;
        Head<X> head, other;
        float c[Head<X>::N], s[Head<X>::N];
        Head<float>::load(weight, key && !query ? k_weight : q_weight);
        Head<X>::angles(c, s, cosine + (u64)at * (D / 2), sine + (u64)at * (D / 2));
#pragma unroll
        for (u32 i = 0; i < SLOTS; i++) fetch(begin + i * stride, i * Tile::BYTES);
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
    u32 a[D / 8], swap = g % 2 * Tile::SWAP;
    Tile::key(a, (u32)__cvta_generic_to_shared(q[g]), t, 0);
    u32 slot = 0;
    for (u32 p = begin; p < end; p += stride) {
        asm volatile("cp.async.wait_group %0;" ::"n"(SLOTS - 1) : "memory");
        __syncwarp();
        u32 tile = room + slot;
        if (p <= at && at < p + 16) {
            Tile::patch(tile, fresh[0], fresh[1], at - p);
            __syncwarp();
        }
        float y[4] = {}, z[4] = {};
        {
            u32 low[D / 8], high[D / 8];
            Tile::key(low, tile + g * Tile::KEY, t, swap);
            Tile::key(high, tile + (g + 8) * Tile::KEY, t, swap);
#pragma unroll
            for (int i = 0; i < N; i++)
                As<T>::mma(i % 2 ? z : y, low[2 * i], high[2 * i], low[2 * i + 1], high[2 * i + 1], a[2 * i], a[2 * i + 1]);
        }
        // Row r is position 2 t + {0, 1, 8, 9}[r].
        u32 v[4][D / 16];
#pragma unroll
        for (int r = 0; r < 4; r++) Tile::value(v[r], tile + Tile::VALUES + (2 * t + (r & 1) + (r >> 1) * 8) * Tile::VALUE, g);
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
                b[j] = __byte_perm(v[j & 2][n / 2], v[(j & 2) + 1][n / 2], n % 2 ? 0x7632 : 0x5410);
            }
            o[i][0] *= keep[0], o[i][1] *= keep[1], o[i][2] *= keep[0], o[i][3] *= keep[1];
            As<T>::mma(o[i], b[0], b[1], b[2], b[3], p0, p1);
        }
        __syncwarp();
        fetch(p + SLOTS * stride, slot);
        slot = slot == (SLOTS - 1) * Tile::BYTES ? 0 : slot + Tile::BYTES;
    }
    float *sums = (float *)(tiles + warp * SLOTS * Tile::BYTES);
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int d = 4; d < 32; d *= 2) l[h] += __shfl_xor_sync(~0u, l[h], d);
        if (g == 0) best[warp][2 * t + h] = m[h], total[warp][2 * t + h] = l[h];
        // In runs as long as the loads of values had them.
        float *to = sums + head_at(2 * t + h);
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

    // Two values a thread.
    u32 *to = (u32 *)(out + ((u64)blockIdx.z * heads + kv * group + first_head) * D);
    u64 pair = (u64)blockIdx.z * gridDim.y + blockIdx.y;
    u32 *shares = partial + pair * gridDim.x * (16 * D);
    for (int e = 2 * threadIdx.x; e < mine * D; e += 2 * WARPS * 32) {
        int h = e / D;
        const float *from = (const float *)tiles + head_at(h) + e % D;
        float peak = best[0][h];
#pragma unroll
        for (int w = 1; w < WARPS; w++) peak = fmaxf(peak, best[w][h]);
        float x = 0.f, y = 0.f, all = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float f = two_to(best[w][h] - peak);
            float2 sum = *(const float2 *)(from + w * (SLOTS * Tile::BYTES / 4));
            x += sum.x * f, y += sum.y * f;
            all += total[w][h] * f;
        }
        if (active == 1) to[e / 2] = As<T>::pair(x / all, y / all);
        else Share::put(shares + blockIdx.x * (16 * D) + 2 * e, x, y, peak, all);
    }
    if (active == 1) return;
    // Every block adds runs of 32 values over the splits, a warp a run: half of it takes the even splits, half the odd ones.
    constexpr int MOST = 8;
    u32 runs = (mine * D + 31) / 32, half = lane / 16;
    for (u32 run = active - 1 - blockIdx.x + warp * active; run < runs; run += WARPS * active) {
        int e = 32 * run + 2 * (lane % 16);
        float x = 0.f, y = 0.f, peak = MINUS_INFINITY, all = 0.f;
        for (u32 first = half; first < active; first += 2 * MOST) {
            u32 *from = shares + (u64)first * (16 * D) + 2 * e;
            u32 splits = e < mine * D ? (active - first + 1) / 2 : 0;
            Share s[MOST];
            bool came;
            do {
                came = true;
#pragma unroll
                for (u32 w = 0; w < MOST; w++)
                    if (w < splits) Share::take(s[w], from + w * (32 * D));
                    else s[w] = Share::none();
#pragma unroll
                for (u32 w = 0; w < MOST; w++) came &= Share::came(s[w]);
            } while (!came);
            float top = peak;
#pragma unroll
            for (u32 w = 0; w < MOST; w++) {
                top = fmaxf(top, Share::at(s[w], 2));
                if (w < splits) *(uint4 *)(from + w * (32 * D)) = make_uint4(0, 0, 0, 0);
            }
            float f = two_to(peak - top);
            x *= f, y *= f, all *= f, peak = top;
#pragma unroll
            for (u32 w = 0; w < MOST; w++) {
                f = two_to(Share::at(s[w], 2) - peak);
                x += Share::at(s[w], 0) * f, y += Share::at(s[w], 1) * f, all += Share::at(s[w], 3) * f;
            }
        }
        __syncwarp();
        float top = fmaxf(peak, __shfl_xor_sync(~0u, peak, 16)), f = two_to(peak - top);
        x *= f, y *= f, all *= f;
        x += __shfl_xor_sync(~0u, x, 16), y += __shfl_xor_sync(~0u, y, 16), all += __shfl_xor_sync(~0u, all, 16);
        if (half == 0 && e < mine * D) to[e / 2] = As<T>::pair(x / all, y / all);
    }
}

#define DECODE(NAME, X, T) \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) NAME( \
        const X *qkv, const float *q_weight, const float *k_weight, float eps, const float *cosine, const float *sine, \
        const u32 *position, T *keys, T *values, u64 head_stride, u64 sequence_stride, u32 *partial, T *out, \
        int heads, int kv_heads, float scale) { \
        decode<X, T>(qkv, q_weight, k_weight, eps, cosine, sine, position, keys, values, head_stride, sequence_stride, \
                     partial, out, heads, kv_heads, scale); \
    }
DECODE(decode_f32_bf16, float, bf16)
DECODE(decode_bf16_bf16, bf16, bf16)
DECODE(decode_f32_f16, float, f16)
DECODE(decode_f16_f16, f16, f16)
#endif
