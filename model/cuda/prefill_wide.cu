// Causal attention of many rows of a sequence, and of several sequences, with wgmma (sm_90a); HEAD_DIM (64 or 128) is
// defined at compilation.
//
// prefill_wide_T(q T[rows, heads HEAD_DIM], keys T, values T, pages, runs, out T[rows, heads HEAD_DIM], heads, kv_heads, scale):
//   the arguments of prefill_T.
//   grid (heads, runs), block 384, dynamic shared memory 1024 + 5 * 256 * HEAD_DIM + 1152 bytes.
//   Two warpgroups own 64 rows each, the third brings keys and values, 128 positions at a time, through a ring of four tiles
//   in the order K0 K1 V0 K2 V1 ... The product with the next keys and the one with the last values run under the softmax.
#include "elements.cuh"
#include "pages.cuh"
#include "runs.cuh"

constexpr int D = HEAD_DIM;
constexpr int TILE = 128 * D * 2; // bytes of 128 positions
constexpr int GROUPS = D / 64;    // of 64 values, 16384 bytes: 128-byte lines of a position, 16-byte pieces ^ position % 8

#define ALL4(b) "+f"(d[b]), "+f"(d[b + 1]), "+f"(d[b + 2]), "+f"(d[b + 3])
#define ALL16(b) ALL4(b), ALL4(b + 4), ALL4(b + 8), ALL4(b + 12)
// scores: d[64 x 128] (+)= a b^T of descriptors. values: d[64 x D] += a b, a in registers, b lying across.
template <class T> struct Wide;
template <> struct Wide<bf16> {
    DEVICE void scores(float (&d)[64], u64 a, u64 b, int add) {
        asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
            "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
            "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
            "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
            "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
            "}, %64, %65, p, 1, 1, 0, 0;}"
            : ALL16(0), ALL16(16), ALL16(32), ALL16(48)
            : "l"(a), "l"(b), "r"(add));
    }
    DEVICE void values(float (&d)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
            "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
            "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
            "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
            : ALL16(0), ALL16(16)
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
    }
    DEVICE void values(float (&d)[64], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
            "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
            "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
            "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
            "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
            "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
            : ALL16(0), ALL16(16), ALL16(32), ALL16(48)
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
    }
};
template <> struct Wide<f16> {
    DEVICE void scores(float (&d)[64], u64 a, u64 b, int add) {
        asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
            "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
            "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
            "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
            "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
            "}, %64, %65, p, 1, 1, 0, 0;}"
            : ALL16(0), ALL16(16), ALL16(32), ALL16(48)
            : "l"(a), "l"(b), "r"(add));
    }
    DEVICE void values(float (&d)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
            "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
            "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
            "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
            : ALL16(0), ALL16(16)
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
    }
    DEVICE void values(float (&d)[64], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
            "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
            "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
            "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
            "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
            "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
            : ALL16(0), ALL16(16), ALL16(32), ALL16(48)
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
    }
};
DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void open_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void close_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEVICE void wait_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
DEVICE void barrier_init(u32 at, u32 count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(count)); }
DEVICE void barrier_arrive(u32 at) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at) : "memory"); }
DEVICE void barrier_wait(u32 at, u32 phase) {
    asm volatile(
        "{.reg .pred p; AGAIN: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @p bra PASSED; bra AGAIN; PASSED: }" ::"r"(at), "r"(phase)
        : "memory");
}
DEVICE void copy16(u32 to, const void *from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}
// Arrives when the copies this thread has started are there.
DEVICE void barrier_arrive_copied(u32 at) { asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at) : "memory"); }
DEVICE void for_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void meet(int id) { asm volatile("bar.sync %0, 256;" ::"r"(id) : "memory"); }
DEVICE void announce(int id) { asm volatile("bar.arrive %0, 256;" ::"r"(id) : "memory"); }

// 128 positions (or rows) of D values, 64 from `low` and 64 from `high`, `stride` values apart, those from `real` on zero,
// by 128 threads. A thread has one piece of every `STEP`th line, so that all but two addresses are constants away.
template <class T> DEVICE void bring(u32 to, const T *low, const T *high, u64 stride, int real, int me) {
    constexpr int PIECES = D / 8, STEP = 128 / PIECES, HALF = PIECES / 2;
    static_assert(HALF * STEP == PAGE, "a half is a page");
    int piece = me % PIECES, line = me / PIECES;
    to += (piece >> 3) * 16384 + line * 128 + ((piece ^ line) & 7) * 16;
    low += line * stride + piece * 8, high += line * stride + piece * 8;
    if (real >= 128) {
#pragma unroll
        for (int i = 0; i < HALF; i++) copy16(to + i * STEP * 128, low + i * STEP * stride, true);
#pragma unroll
        for (int i = 0; i < HALF; i++) copy16(to + (HALF + i) * STEP * 128, high + i * STEP * stride, true);
    } else {
#pragma unroll
        for (int i = 0; i < HALF; i++) copy16(to + i * STEP * 128, low + i * STEP * stride, line + i * STEP < real);
#pragma unroll
        for (int i = 0; i < HALF; i++)
            copy16(to + (HALF + i) * STEP * 128, high + i * STEP * stride, line + (HALF + i) * STEP < real);
    }
}

template <class T>
DEVICE void prefill(
    const T *q, const T *keys, const T *values, const Pages &pages, const Run *runs, T *out, int heads, int kv_heads, float scale) {
    extern __shared__ u8 room[];
    u32 q_tile = (shared_address(room) + 1023) & ~1023u, ring = q_tile + TILE, full = ring + 4 * TILE, empty = full + 32, q_full = empty + 32;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 4; i++) barrier_init(full + 8 * i, 128), barrier_init(empty + 8 * i, 8);
        barrier_init(q_full, 128);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    let_next_start();
    wait_for_previous();
    const Run run = runs[blockIdx.y];
    const u32 *list = list_at(pages, run.list);
    int head = blockIdx.x, first = run.first, rows = first + run.rows;
    int count = run.position + run.rows, blocks = (count + 127) / 128;
    u64 base = (u64)(head / (heads / kv_heads)) * pages.head_stride;

    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        int me = threadIdx.x - 256;
        const T *queries = q + ((u64)first * heads + head) * D;
        bring(q_tile, queries, queries + (u64)PAGE * heads * D, (u64)heads * D, run.rows, me);
        barrier_arrive_copied(q_full);
        int items = 2 * blocks;
        for (int i = 0; i < items; i++) {
            if (i >= 4) barrier_wait(empty + 8 * (i & 3), (i / 4 - 1) & 1);
            bool key = i == 0 || (i & 1 && i < items - 1);
            int block = key ? (i + 1) / 2 : i == items - 1 ? blocks - 1 : i / 2 - 1;
            const T *from = (key ? keys : values) + base;
            // A page that would begin behind the last position is on no list.
            u64 low = place_of(list, pages.page_stride, block * 128, D);
            u64 high = block * 128 + (int)PAGE < count ? place_of(list, pages.page_stride, block * 128 + PAGE, D) : low;
            bring(ring + (i & 3) * TILE, from + low, from + high, D, min(count - block * 128, 128), me);
            barrier_arrive_copied(full + 8 * (i & 3));
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    int half = warp >> 2, w = warp & 3, g = lane >> 2, t = lane & 3;
    int seen = run.position + half * 64;
    constexpr u64 KEYS = (u64)1 << 62 | (u64)64 << 32 | (u64)1 << 16;
    constexpr u64 VALUES = (u64)1 << 62 | (u64)64 << 32 | (u64)1024 << 16;
    float s[64], o[D / 2], m[2] = {MINUS_INFINITY, MINUS_INFINITY}, l[2] = {}, keep[2];
    u32 p[32];
#pragma unroll
    for (int i = 0; i < D / 2; i++) o[i] = 0.f;
    float scale2 = scale * 1.44269504f;
    u64 q_at = ((q_tile + half * 8192) >> 4) | KEYS;

    auto wait_item = [&](int i) {
        barrier_wait(full + 8 * (i & 3), (i / 4) & 1);
        for_products();
    };
    auto free_item = [&](int i) {
        if (lane == 0) barrier_arrive(empty + 8 * (i & 3));
    };
    auto key_item = [&](int block) { return block ? 2 * block - 1 : 0; };
    auto value_item = [&](int block) { return block == blocks - 1 ? 2 * blocks - 1 : 2 * block + 2; };
    auto issue_scores = [&](int item) {
        u64 k_at = ((ring + (item & 3) * TILE) >> 4) | KEYS;
#pragma unroll
        for (int i = 0; i < D / 16; i++)
            Wide<T>::scores(s, q_at + (i >> 2) * 1024 + (i & 3) * 2, k_at + (i >> 2) * 1024 + (i & 3) * 2, i != 0);
        close_products();
    };
    auto issue_values = [&](int item) {
        u64 v_at = ((ring + (item & 3) * TILE) >> 4) | VALUES;
#pragma unroll
        for (int i = 0; i < 8; i++) Wide<T>::values(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], v_at + i * 128);
        close_products();
    };
    // Scores to weights in place; `keep` says by what the sums so far shrink.
    auto soften = [&](int block) {
        if (block * 128 + 127 > seen + 16 * w) {
#pragma unroll
            for (int n = 0; n < 64; n++)
                if (block * 128 + 8 * (n >> 2) + 2 * t + (n & 1) > seen + 16 * w + g + (n >> 1 & 1) * 8) s[n] = MINUS_INFINITY;
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float peak = m[h];
#pragma unroll
            for (int n = 0; n < 16; n++) peak = fmaxf(peak, fmaxf(s[4 * n + 2 * h], s[4 * n + 2 * h + 1]));
            peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
            peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
            keep[h] = two_to((m[h] - peak) * scale2);
            m[h] = peak;
            float shift = peak * scale2, sum = 0.f;
#pragma unroll
            for (int n = 0; n < 16; n++)
#pragma unroll
                for (int i = 2 * h; i < 2 * h + 2; i++) {
                    s[4 * n + i] = two_to(s[4 * n + i] * scale2 - shift);
                    sum += s[4 * n + i];
                }
            l[h] = l[h] * keep[h] + sum;
        }
    };
    auto narrow = [&]() {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            p[4 * i] = As<T>::pair(s[8 * i], s[8 * i + 1]);
            p[4 * i + 1] = As<T>::pair(s[8 * i + 2], s[8 * i + 3]);
            p[4 * i + 2] = As<T>::pair(s[8 * i + 4], s[8 * i + 5]);
            p[4 * i + 3] = As<T>::pair(s[8 * i + 6], s[8 * i + 7]);
        }
    };

    // The warpgroups take turns: one's products run under the other's softmax.
    int turn = 1 + half, next = 2 - half;
    if (half == 1) announce(next);
    barrier_wait(q_full, 0);
    wait_item(0);
    meet(turn);
    open_products();
    issue_scores(0);
    announce(next);
    wait_products<0>();
    free_item(0);
    soften(0);
    narrow();
    for (int block = 1; block < blocks; block++) {
        int k = key_item(block), v = value_item(block - 1);
        wait_item(k);
        meet(turn);
        open_products();
        issue_scores(k);
        wait_item(v);
        issue_values(v);
        announce(next);
        wait_products<1>();
        free_item(k);
        soften(block);
        // Keeps the compiler from waiting before the softmax.
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(q_full + 8 + threadIdx.x * 4), "f"(l[0] + l[1]) : "memory");
        wait_products<0>();
        free_item(v);
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] *= keep[i >> 1 & 1];
        narrow();
    }
    if (half == 0) meet(turn);
    int v = value_item(blocks - 1);
    wait_item(v);
    open_products();
    issue_values(v);
    wait_products<0>();
    free_item(v);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        l[h] += __shfl_xor_sync(~0u, l[h], 1);
        l[h] += __shfl_xor_sync(~0u, l[h], 2);
        float factor = 1.f / l[h];
        int r = first + half * 64 + w * 16 + g + h * 8;
        if (r >= rows) continue;
        u32 *to = (u32 *)(out + ((u64)r * heads + head) * D);
#pragma unroll
        for (int n = 0; n < D / 8; n++) to[4 * n + t] = As<T>::pair(o[4 * n + 2 * h] * factor, o[4 * n + 2 * h + 1] * factor);
    }
}

#define PREFILL(T, M) \
    extern "C" __global__ void __launch_bounds__(384, 1) prefill_wide_##M( \
        const T *q, const T *keys, const T *values, const Pages pages, const Run *runs, T *out, int heads, int kv_heads, \
        float scale) { \
        prefill<T>(q, keys, values, pages, runs, out, heads, kv_heads, scale); \
    }
PREFILL(bf16, bf16)
PREFILL(f16, f16)
