// x to tiles for gemm.cu. Needs layout.cu and elements.cu before it.
//
// order_T_U(x T[rows, k], ld, k, row_units, out U, weight f32[k] or null, eps, flags, flag_count); order_f32_parts: three bf16
// order_codes, order_codes_parts (q i8[rows, k], steps f32[rows, k / 16], k, row_units, out, factor, flags, flag_count):
//   q * (step * factor), rounded to bf16 (exact for 4-bit codes) or as three bf16
//   grid rows, block 256. Optional norm: x/rms(x)*weight rounded to U. out: blocks of 128 tokens x 64 k, 16384 bytes each,
//   index (token / 128) * (2 row_units * parts) + slab; 128-byte lines of a token, 16-byte pieces in the order
//   piece ^ (token % 8); slot 16 j + 8 h + 2 t + b of a line is k = 16 t + 4 j + 2 h + b.

DEVICE float as_float(float x) { return x; }
DEVICE float as_float(bf16 x) { return Codes<bf16>::widen(x.bits); }
DEVICE float as_float(f16 x) { return Codes<f16>::widen(x.bits); }

// PARTS 1: rounded to U (exact where it was one). PARTS 3: f32 cut into three bf16 that add up to it exactly.
template <class U, int PARTS> DEVICE void cut_pair(float low, float high, u32 (&cut)[PARTS]) {
    if constexpr (PARTS == 1) {
        cut[0] = Codes<U>::pack(low, high);
    } else {
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            u32 l = __float_as_uint(low) & 0xffff0000, h = __float_as_uint(high) & 0xffff0000;
            // A NaN whose payload is cut off stays one.
            if (low != low) l = 0x7fc00000;
            if (high != high) h = 0x7fc00000;
            cut[p] = l >> 16 | h;
            low = (l & 0x7f800000) == 0x7f800000 ? 0.f : low - __uint_as_float(l);
            high = (h & 0x7f800000) == 0x7f800000 ? 0.f : high - __uint_as_float(h);
        }
    }
}

template <class T, class U, int PARTS>
DEVICE void order(
    const T *x, u64 ld, int k, int row_units, u8 *out, const float *weight, float eps, u32 *flags, int flag_count) {
    __shared__ float room[8];
    let_next_start();
    wait_for_previous();
    if (blockIdx.x == 0)
        for (int i = threadIdx.x; i < flag_count; i += 256) flags[i] = 0;
    int token = blockIdx.x, slabs = 2 * row_units;
    const T *row = x + (u64)token * ld;
    float factor = 1.f;
    if (weight) {
        float sum = 0.f;
        for (int i = threadIdx.x; i < k; i += 256) sum += as_float(row[i]) * as_float(row[i]);
        for (int s = 16; s; s >>= 1) sum += __shfl_xor_sync(~0u, sum, s);
        if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = sum;
        __syncthreads();
        sum = 0.f;
        for (int i = 0; i < 8; i++) sum += room[i];
        factor = rsqrtf(sum / (float)k + eps);
    }
    u8 *base = out + (u64)(token / 128) * slabs * PARTS * 16384 + token % 128 * 128;
    bool vector = ((u64)row & (4 * sizeof(T) - 1)) == 0;
    for (int e = threadIdx.x; e < slabs * 4; e += 256) {
        int slab = e >> 2, j = e & 3;
        u32 v[PARTS][2][4];
#pragma unroll
        for (int t = 0; t < 4; t++) {
            int at = slab * 64 + 16 * t + 4 * j;
            T raw[4];
            float f[4];
            if (vector && at + 4 <= k) {
                if (sizeof(T) == 4) *(uint4 *)raw = *(const uint4 *)(row + at);
                else *(uint2 *)raw = *(const uint2 *)(row + at);
#pragma unroll
                for (int i = 0; i < 4; i++) f[i] = as_float(raw[i]);
            } else {
#pragma unroll
                for (int i = 0; i < 4; i++) f[i] = at + i < k ? as_float(row[at + i]) : 0.f;
            }
            if (weight) {
#pragma unroll
                for (int i = 0; i < 4; i++) f[i] = at + i < k ? f[i] * factor * weight[at + i] : 0.f;
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                u32 cut[PARTS];
                cut_pair<U, PARTS>(f[2 * h], f[2 * h + 1], cut);
#pragma unroll
                for (int p = 0; p < PARTS; p++) v[p][h][t] = cut[p];
            }
        }
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                *(uint4 *)(base + (u64)(p * slabs + slab) * 16384 + ((2 * j + h) ^ (token & 7)) * 16) =
                    make_uint4(v[p][h][0], v[p][h][1], v[p][h][2], v[p][h][3]);
    }
}

template <int PARTS>
DEVICE void order_quantised(const i8 *q, const float *steps, int k, int row_units, u8 *out, float factor, u32 *flags, int flag_count) {
    let_next_start();
    wait_for_previous();
    if (blockIdx.x == 0)
        for (int i = threadIdx.x; i < flag_count; i += 256) flags[i] = 0;
    int token = blockIdx.x, slabs = 2 * row_units;
    u8 *base = out + (u64)(token / 128) * slabs * PARTS * 16384 + token % 128 * 128;
    for (int e = threadIdx.x; e < slabs * 4; e += 256) {
        int slab = e >> 2, j = e & 3;
        u32 v[PARTS][2][4];
#pragma unroll
        for (int t = 0; t < 4; t++) {
            int at = slab * 64 + 16 * t + 4 * j;
            float step = at < k ? steps[(u64)token * (k / 16) + at / 16] * factor : 0.f;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float f[2];
#pragma unroll
                for (int b = 0; b < 2; b++) f[b] = at < k ? (float)q[(u64)token * k + at + 2 * h + b] * step : 0.f;
                u32 cut[PARTS];
                cut_pair<bf16, PARTS>(f[0], f[1], cut);
#pragma unroll
                for (int p = 0; p < PARTS; p++) v[p][h][t] = cut[p];
            }
        }
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                *(uint4 *)(base + (u64)(p * slabs + slab) * 16384 + ((2 * j + h) ^ (token & 7)) * 16) =
                    make_uint4(v[p][h][0], v[p][h][1], v[p][h][2], v[p][h][3]);
    }
}

#define ORDER(NAME, T, U, PARTS) \
    extern "C" __global__ void __launch_bounds__(256) NAME( \
        const T *x, u64 ld, int k, int row_units, u8 *out, const float *weight, float eps, u32 *flags, int flag_count) { \
        order<T, U, PARTS>(x, ld, k, row_units, out, weight, eps, flags, flag_count); \
    }
ORDER(order_bf16, bf16, bf16, 1)
ORDER(order_f16, f16, f16, 1)
ORDER(order_f32_bf16, float, bf16, 1)
ORDER(order_f32_f16, float, f16, 1)
ORDER(order_f32_parts, float, bf16, 3)

#define ORDER_CODES(NAME, PARTS) \
    extern "C" __global__ void __launch_bounds__(256) NAME( \
        const i8 *q, const float *steps, int k, int row_units, u8 *out, float factor, u32 *flags, int flag_count) { \
        order_quantised<PARTS>(q, steps, k, row_units, out, factor, flags, flag_count); \
    }
ORDER_CODES(order_codes, 1)
ORDER_CODES(order_codes_parts, 3)
