// Causal attention of many rows of a sequence, and of several sequences, on tensor cores; HEAD_DIM (64, 80, 96 or 128) is
// defined at compilation.
//
// prefill_T(q T[rows, heads HEAD_DIM], keys T, values T, pages, runs, out T[rows, heads HEAD_DIM], heads, kv_heads, scale)
//   grid (heads, runs), block 256, dynamic shared memory 4 * 64 * (2 HEAD_DIM + 16) bytes.
//   Row i of a run stands at run.position + i and sees the cache up to there (its own key and value were appended before).
//   scale = 1/sqrt(HEAD_DIM).
//   A warp owns 16 rows; 64 positions at a time through a two-stage ring, m16n8k16.
#include "elements.cuh"
#include "pages.cuh"
#include "runs.cuh"

constexpr int D = HEAD_DIM;
constexpr int BLOCK = PAGE;
constexpr int LINE = 2 * D + 16;

DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void copy16(u32 to, const void *from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}
DEVICE void matrix4(u32 (&x)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at));
}
DEVICE void matrix4_turned(u32 (&x)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at));
}

template <class T>
DEVICE void prefill(
    const T *q, const T *keys, const T *values, const Pages &pages, const Run *runs, T *out, int heads, int kv_heads, float scale) {
    extern __shared__ __align__(16) u8 ring[];
    let_next_start();
    wait_for_previous();
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const Run run = runs[blockIdx.y];
    const u32 *list = list_at(pages, run.list);
    int head = blockIdx.x, first = run.first, rows = first + run.rows;
    u64 base = (u64)(head / (heads / kv_heads)) * pages.head_stride;
    int count = run.position + run.rows, blocks = (count + BLOCK - 1) / BLOCK;
    u32 k_ring = shared_address(ring), v_ring = k_ring + 2 * BLOCK * LINE;

    auto load = [&](int block) {
        u32 stage = (block & 1) * BLOCK * LINE;
        u64 page = base + place_of(list, pages.page_stride, block * BLOCK, D);
        for (int e = threadIdx.x; e < BLOCK * (D / 8); e += 256) {
            int p = e / (D / 8), i = e % (D / 8), at = block * BLOCK + p;
            u64 from = page + (u64)(min(at, count - 1) - block * BLOCK) * D + i * 8;
            copy16(k_ring + stage + p * LINE + i * 16, keys + from, at < count);
            copy16(v_ring + stage + p * LINE + i * 16, values + from, at < count);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    load(0);

    int row = first + warp * 16 + g;
    u32 a[D / 16][4];
#pragma unroll
    for (int i = 0; i < D / 16; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int r = min(row + (j & 1) * 8, rows - 1);
            a[i][j] = *(const u32 *)(q + ((u64)r * heads + head) * D + 16 * i + 2 * t + (j >> 1) * 8);
        }
    float o[D / 8][4], m[2] = {MINUS_INFINITY, MINUS_INFINITY}, l[2] = {};
#pragma unroll
    for (int i = 0; i < D / 8; i++) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.f;
    float scale2 = scale * 1.44269504f;
    // Rows of a matrix8 that this lane addresses: keys as they lie, values turned.
    u32 k_line = ((lane & 7) + (lane >> 4) * 8) * LINE + ((lane >> 3) & 1) * 16;
    u32 v_line = (lane & 15) * LINE + (lane >> 4) * 16;
    int seen = run.position + warp * 16;

    for (int block = 0; block < blocks; block++) {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
        if (block + 1 < blocks) load(block + 1);
        u32 stage = (block & 1) * BLOCK * LINE;
        if (block * BLOCK > seen + 15) continue;
        float s[BLOCK / 8][4];
#pragma unroll
        for (int n = 0; n < BLOCK / 8; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
#pragma unroll
        for (int i = 0; i < D / 16; i++)
#pragma unroll
            for (int n = 0; n < BLOCK / 16; n++) {
                u32 b[4];
                matrix4(b, k_ring + stage + n * 16 * LINE + i * 32 + k_line);
                As<T>::mma(s[2 * n], a[i][0], a[i][1], a[i][2], a[i][3], b[0], b[1]);
                As<T>::mma(s[2 * n + 1], a[i][0], a[i][1], a[i][2], a[i][3], b[2], b[3]);
            }
        if ((block + 1) * BLOCK > seen) {
#pragma unroll
            for (int n = 0; n < BLOCK / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (block * BLOCK + 8 * n + 2 * t + (i & 1) > seen + g + (i >> 1) * 8) s[n][i] = MINUS_INFINITY;
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float peak = m[h];
#pragma unroll
            for (int n = 0; n < BLOCK / 8; n++) peak = fmaxf(peak, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
            peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
            peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
            float keep = two_to((m[h] - peak) * scale2), shift = peak * scale2;
            m[h] = peak;
            l[h] *= keep;
#pragma unroll
            for (int n = 0; n < BLOCK / 8; n++)
#pragma unroll
                for (int i = 2 * h; i < 2 * h + 2; i++) {
                    s[n][i] = two_to(s[n][i] * scale2 - shift);
                    l[h] += s[n][i];
                }
#pragma unroll
            for (int i = 0; i < D / 8; i++) o[i][2 * h] *= keep, o[i][2 * h + 1] *= keep;
        }
#pragma unroll
        for (int n = 0; n < BLOCK / 16; n++) {
            u32 p0 = As<T>::pair(s[2 * n][0], s[2 * n][1]), p1 = As<T>::pair(s[2 * n][2], s[2 * n][3]);
            u32 p2 = As<T>::pair(s[2 * n + 1][0], s[2 * n + 1][1]), p3 = As<T>::pair(s[2 * n + 1][2], s[2 * n + 1][3]);
#pragma unroll
            for (int i = 0; i < D / 16; i++) {
                u32 b[4];
                matrix4_turned(b, v_ring + stage + n * 16 * LINE + i * 32 + v_line);
                As<T>::mma(o[2 * i], p0, p1, p2, p3, b[0], b[1]);
                As<T>::mma(o[2 * i + 1], p0, p1, p2, p3, b[2], b[3]);
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        l[h] += __shfl_xor_sync(~0u, l[h], 1);
        l[h] += __shfl_xor_sync(~0u, l[h], 2);
        float factor = 1.f / l[h];
        int r = row + h * 8;
        if (r >= rows) continue;
        u32 *to = (u32 *)(out + ((u64)r * heads + head) * D);
#pragma unroll
        for (int i = 0; i < D / 8; i++) to[4 * i + t] = As<T>::pair(o[i][2 * h] * factor, o[i][2 * h + 1] * factor);
    }
}

#define PREFILL(T, M) \
    extern "C" __global__ void __launch_bounds__(256, 1) prefill_##M( \
        const T *q, const T *keys, const T *values, const Pages pages, const Run *runs, T *out, int heads, int kv_heads, \
        float scale) { \
        prefill<T>(q, keys, values, pages, runs, out, heads, kv_heads, scale); \
    }
PREFILL(bf16, bf16)
PREFILL(f16, f16)
