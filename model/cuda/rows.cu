// Row operations of the model: embedding, norms, rotation with cache append, gating, addition, other orders.
//
// Every tensor is row-major and dense. `f32`, `bf16`, `f16` in a name are the types of the arguments marked
// T.
#include "elements.cuh"
#include "pages.cuh"

// embed_T(table T[vocab, width], ids u32[rows], out f32[rows, width], width)
//   grid (rows, ceil(width / 1024)), block 256. out[r] = table[ids[r]].
template <class T> DEVICE void embed(const T *table, const u32 *ids, float *out, int width) {
    let_next_start();
    wait_for_previous();
    const T *from = table + (u64)ids[blockIdx.x] * width;
    widen_row(from, out + (u64)blockIdx.x * width, width, blockIdx.y * 256 + threadIdx.x, gridDim.y * 256);
}

// norm_T(x f32[rows, width], weight f32[width], eps, out T[rows, width], width)
//   grid rows, block 256. out = T(x / sqrt(mean(x^2) + eps) * weight). out may be x.
template <class T> DEVICE void norm(const float *x, const float *weight, float eps, T *out, int width) {
    __shared__ float room[32];
    let_next_start();
    wait_for_previous();
    const float *row = x + (u64)blockIdx.x * width;
    T *to = out + (u64)blockIdx.x * width;
    if (width % 4 == 0 && width <= 8192 && (((u64)x | (u64)out | (u64)weight) & 15) == 0) {
        float v[8][4], total = 0.f;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int i = 4 * threadIdx.x + j * 1024;
            if (i < width) {
                load4(row + i, v[j]);
                for (int n = 0; n < 4; n++) total += v[j][n] * v[j][n];
            }
        }
        float scale = rsqrtf(block_sum(total, room) / (float)width + eps);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int i = 4 * threadIdx.x + j * 1024;
            if (i < width) {
                float4 w = *(const float4 *)(weight + i);
                v[j][0] *= scale * w.x, v[j][1] *= scale * w.y, v[j][2] *= scale * w.z, v[j][3] *= scale * w.w;
                store4(to + i, v[j]);
            }
        }
        return;
    }
    // The first 16 values of a thread stay in registers: one pass over rows up to 4096 wide.
    float kept[16];
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < 16; j++) {
        int i = threadIdx.x + j * 256;
        kept[j] = i < width ? row[i] : 0.f;
        sum += kept[j] * kept[j];
    }
    for (int i = threadIdx.x + 4096; i < width; i += 256) sum += row[i] * row[i];
    sum = block_sum(sum, room);
    float factor = rsqrtf(sum / (float)width + eps);
#pragma unroll
    for (int j = 0; j < 16; j++) {
        int i = threadIdx.x + j * 256;
        if (i < width) to[i] = As<T>::from(kept[j] * factor * weight[i]);
    }
    for (int i = threadIdx.x + 4096; i < width; i += 256) to[i] = As<T>::from(row[i] * factor * weight[i]);
}

// rotate_append_T(qkv T[rows, (heads + 2 kv_heads) dim], q_weight f32[dim], k_weight f32[dim], eps,
//                 cosine f32[context, dim/2], sine f32[context, dim/2], pages, keys T, values T, q T[rows, heads dim], heads,
//                 kv_heads, dim)
//   grid (rows, ceil((heads + 2 kv_heads) / 8)), block 256: a warp per head.
//   Norms q and k heads, rotates pairs (i, i + dim/2), writes q to `q`, k and v to a row's place in the layer's keys and
//   values.
template <class T>
DEVICE void rotate_append(
    const T *qkv, const float *q_weight, const float *k_weight, float eps, const float *cosine, const float *sine,
    const Pages &pages, T *keys, T *values, T *q, int heads, int kv_heads, int dim) {
    let_next_start();
    wait_for_previous();
    int row = blockIdx.x, lane = threadIdx.x & 31, head = blockIdx.y * 8 + (threadIdx.x >> 5), half = dim / 2;
    if (head >= heads + 2 * kv_heads) return;
    u32 at = position_of(pages, row);
    const T *from = qkv + ((u64)row * (heads + 2 * kv_heads) + head) * dim;
    u64 place = place_of(list_of(pages, row), pages.page_stride, at, dim);
    if (head >= heads + kv_heads) {
        T *to = values + place + (u64)(head - heads - kv_heads) * pages.head_stride;
        if (dim % 4 == 0 && ((u64)qkv & 15) == 0) {
            float x[4];
            for (int i = 4 * lane; i < dim; i += 128) load4(from + i, x), store4(to + i, x);
        } else {
            for (int i = lane; i < dim; i += 32) to[i] = As<T>::from(widen(from[i]));
        }
        return;
    }
    bool key = head >= heads;
    T *to = key ? keys + place + (u64)(head - heads) * pages.head_stride : q + ((u64)row * heads + head) * dim;
    const float *weight = key ? k_weight : q_weight;
    // Four values a lane: the pairs of the first half lie dim / 8 lanes further on.
    if (dim % 8 == 0 && dim <= 128 && ((u64)qkv & 15) == 0) {
        int quarter = dim / 8, at4 = lane * 4;
        bool mine = lane < 2 * quarter, low = lane < quarter;
        float x[4] = {}, y[4], sum = 0.f;
        if (mine) load4(from + at4, x);
        for (int i = 0; i < 4; i++) sum += x[i] * x[i];
        float factor = rsqrtf(warp_sum(sum) / (float)dim + eps);
        float4 w = mine ? *(const float4 *)(weight + at4) : make_float4(0.f, 0.f, 0.f, 0.f);
        x[0] *= factor * w.x, x[1] *= factor * w.y, x[2] *= factor * w.z, x[3] *= factor * w.w;
        for (int i = 0; i < 4; i++) y[i] = __shfl_sync(~0u, x[i], low ? lane + quarter : max(lane - quarter, 0));
        if (!mine) return;
        u64 angle = (u64)at * half + (low ? at4 : at4 - half);
        float4 c = *(const float4 *)(cosine + angle), s = *(const float4 *)(sine + angle);
        float sign = low ? -1.f : 1.f;
        x[0] = x[0] * c.x + sign * y[0] * s.x, x[1] = x[1] * c.y + sign * y[1] * s.y;
        x[2] = x[2] * c.z + sign * y[2] * s.z, x[3] = x[3] * c.w + sign * y[3] * s.w;
        store4(to + at4, x);
        return;
    }
    float sum = 0.f;
    for (int i = lane; i < dim; i += 32) {
        float x = widen(from[i]);
        sum += x * x;
    }
    float factor = rsqrtf(warp_sum(sum) / (float)dim + eps);
    for (int i = lane; i < half; i += 32) {
        float a = widen(from[i]) * factor * weight[i], b = widen(from[i + half]) * factor * weight[i + half];
        float c = cosine[(u64)at * half + i], s = sine[(u64)at * half + i];
        to[i] = As<T>::from(a * c - b * s);
        to[i + half] = As<T>::from(b * c + a * s);
    }
}

// silu_mul_T(gate_up T[rows, 2 width], out T[rows, width], width)
//   grid (ceil(width / 1024), rows), block 256. out = T(silu(gate) * up).
template <class T> DEVICE void silu_mul(const T *gate_up, T *out, int width) {
    let_next_start();
    wait_for_previous();
    const T *gate = gate_up + (u64)blockIdx.y * 2 * width, *up = gate + width;
    T *to = out + (u64)blockIdx.y * width;
    if (width % 4 == 0 && (((u64)gate_up | (u64)out) & 15) == 0) {
        int i = blockIdx.x * 1024 + 4 * threadIdx.x;
        if (i >= width) return;
        float g[4], u[4];
        load4(gate + i, g);
        load4(up + i, u);
        for (int j = 0; j < 4; j++) g[j] = g[j] / (1.f + __expf(-g[j])) * u[j];
        store4(to + i, g);
        return;
    }
    for (int i = blockIdx.x * 1024 + threadIdx.x; i < min(width, (int)(blockIdx.x + 1) * 1024); i += 256) {
        float g = widen(gate[i]);
        to[i] = As<T>::from(g / (1.f + __expf(-g)) * widen(up[i]));
    }
}

// add_T(x T[count], residual f32[count], count u64)
//   grid ceil(count / 1024), block 256. residual += x.
template <class T> DEVICE void add(const T *x, float *residual, u64 count) {
    let_next_start();
    wait_for_previous();
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u64 i = (u64)blockIdx.x * 1024 + j * 256 + threadIdx.x;
        if (i < count) residual[i] += widen(x[i]);
    }
}

// gather_T(x T[rows, width], order u32[width], out T[rows, width], width)
//   grid (ceil(width / 1024), rows), block 256. out[r, i] = x[r, order[i]]. out is not x.
template <class T> DEVICE void gather(const T *x, const u32 *order, T *out, int width) {
    let_next_start();
    // The order belongs to the weight, so it is there already.
    u32 from[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int i = blockIdx.x * 1024 + j * 256 + threadIdx.x;
        from[j] = i < width ? order[i] : 0;
    }
    wait_for_previous();
    const T *row = x + (u64)blockIdx.y * width;
    T *to = out + (u64)blockIdx.y * width;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int i = blockIdx.x * 1024 + j * 256 + threadIdx.x;
        if (i < width) to[i] = row[from[j]];
    }
}

// finite_T(x T[count], count u64, flag u32[1])
//   grid min(ceil(count / 1024), 1024), block 256. Sets flag to 1 if any value is NaN or infinite.
template <class T> DEVICE void finite(const T *x, u64 count, u32 *flag) {
    let_next_start();
    wait_for_previous();
    bool bad = false;
    for (u64 i = (u64)blockIdx.x * 256 + threadIdx.x; i < count; i += (u64)gridDim.x * 256)
        bad |= !(fabsf(widen(x[i])) < __int_as_float(0x7f800000));
    if (__any_sync(~0u, bad) && (threadIdx.x & 31) == 0) *flag = 1;
}

#define ROWS(T, N) \
    extern "C" __global__ void __launch_bounds__(256) embed_##N(const T *table, const u32 *ids, float *out, int width) { \
        embed<T>(table, ids, out, width); \
    } \
    extern "C" __global__ void __launch_bounds__(256) norm_##N(const float *x, const float *weight, float eps, T *out, int width) { \
        norm<T>(x, weight, eps, out, width); \
    } \
    extern "C" __global__ void __launch_bounds__(256) add_##N(const T *x, float *residual, u64 count) { \
        add<T>(x, residual, count); \
    } \
    extern "C" __global__ void __launch_bounds__(256) gather_##N(const T *x, const u32 *order, T *out, int width) { \
        gather<T>(x, order, out, width); \
    } \
    extern "C" __global__ void __launch_bounds__(256) finite_##N(const T *x, u64 count, u32 *flag) { \
        finite<T>(x, count, flag); \
    } \
    extern "C" __global__ void __launch_bounds__(256) rotate_append_##N( \
        const T *qkv, const float *q_weight, const float *k_weight, float eps, const float *cosine, const float *sine, \
        const Pages pages, T *keys, T *values, T *q, int heads, int kv_heads, int dim) { \
        rotate_append<T>(qkv, q_weight, k_weight, eps, cosine, sine, pages, keys, values, q, heads, kv_heads, dim); \
    } \
    extern "C" __global__ void __launch_bounds__(256) silu_mul_##N(const T *gate_up, T *out, int width) { \
        silu_mul<T>(gate_up, out, width); \
    }
ROWS(float, f32)
ROWS(bf16, bf16)
ROWS(f16, f16)
