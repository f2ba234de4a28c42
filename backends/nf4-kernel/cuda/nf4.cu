// NF4 products on packed weights. A warp sums an output: a lane takes eight codes, looks their values up in a table of its
// own (16 values by 32 lanes in shared memory, so that no two lanes share a bank), and scales the sum of eight once. The
// order depends on k alone. Follows rows.cu.

// `codes` [n][k / 8] words, the first code in the lowest nibble; `scales` [n][k / group].
struct Weight {
    const u32 *codes;
    const float *scales;
    u32 n, k, group, unused;
};

__device__ const float CODEBOOK[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

// Raw codes and absmax of one segment, flat over its elements, to rows of words and of scales.
extern "C" __global__ void nf4_pack(const u8 *codes, const float *absmax, u32 high_first, u32 block, u32 rows, u32 k,
                                    u32 group, u32 *out, float *scales) {
    u32 word = blockIdx.x * 128 + threadIdx.x, row = blockIdx.y + blockIdx.z * 32768;
    if (row >= rows) return;
    if (word < k / 8) {
        u64 at = ((u64)row * k + word * 8) / 2;
        u32 w = codes[at] | codes[at + 1] << 8 | codes[at + 2] << 16 | (u32)codes[at + 3] << 24;
        if (high_first) w = (w & 0x0f0f0f0fu) << 4 | (w >> 4 & 0x0f0f0f0fu);
        out[(u64)row * (k / 8) + word] = w;
    }
    if (word < k / group) scales[(u64)row * (k / group) + word] = absmax[((u64)row * k + (u64)word * group) / block];
}

__device__ __forceinline__ float value(const Weight &w, u32 row, u32 k) {
    u32 word = w.codes[(u64)row * (w.k / 8) + k / 8];
    return __fmul_rn(CODEBOOK[word >> 4 * (k & 7) & 15], w.scales[(u64)row * (w.k / w.group) + k / w.group]);
}

extern "C" __global__ void nf4_dequantize(Weight w, Matrix out) {
    u32 k = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y + blockIdx.z * 32768;
    if (k < w.k && row < w.n) store(out, row * out.ld + k, value(w, row, k));
}

// dx = dy W: 32 columns a block, 16 partial sums over n each, added in order.
extern "C" __global__ void nf4_backward(Weight w, Matrix dy, Matrix dx) {
    __shared__ float sums[16][33];
    u32 k = blockIdx.x * 32 + threadIdx.x, m = blockIdx.y;
    float sum = 0;
    if (k < w.k)
        for (u32 row = threadIdx.y; row < w.n; row += 16) sum = fmaf(load(dy, m * dy.ld + row), value(w, row, k), sum);
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && k < w.k) {
        for (u32 i = 1; i < 16; i++) sum += sums[i][threadIdx.x];
        store(dx, m * dx.ld + k, sum);
    }
}

// Eight elements of x from an even place on.
__device__ __forceinline__ void load8(const Matrix &x, u64 at, float *v) {
    if (x.dtype == F32) {
        const float *p = (const float *)x.data + at;
        if (((u64)p & 15) == 0) {
            float4 a = ((const float4 *)p)[0], b = ((const float4 *)p)[1];
            v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
        } else {
            for (u32 i = 0; i < 8; i++) v[i] = p[i];
        }
        return;
    }
    const u16 *p = (const u16 *)x.data + at;
    u16 h[8];
    if (((u64)p & 15) == 0) *(uint4 *)h = *(const uint4 *)p;
    else
        for (u32 i = 0; i < 8; i++) h[i] = p[i];
    for (u32 i = 0; i < 8; i++) v[i] = x.dtype == F16 ? from_f16(h[i]) : from_bf16(h[i]);
}

// D += A B of m16n8k8 with TF32 operands, f32 sums.
__device__ __forceinline__ void mma(float *d, const u32 *a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// y = x W^T on tensor cores for f16 and bf16 x, both exact in TF32; a weight is the sum of two TF32 numbers, 21 bits of it.
// A block has 16 rows of the weight and NT * 8 of x; its warps share k in steps of 32, whose sums are added in f32. A lane
// takes a word of eight codes of two rows: k is permuted within the step, for both operands alike.
#ifndef NT
#define NT 1
#endif
extern "C" __global__ void __launch_bounds__(256) nf4_mma(Weight w, Matrix x, Matrix y) {
    __shared__ float table[16 * 32];
    __shared__ float parts[8][NT * 8][17];
    u32 lane = threadIdx.x, warp = threadIdx.y, g = lane >> 2, t = lane & 3;
    u32 first = blockIdx.x * 16, m = blockIdx.y * (NT * 8);
    for (u32 i = warp * 32 + lane; i < 512; i += 256) table[i] = CODEBOOK[i / 32];
    __syncthreads();
    u32 words = w.k / 8, shift = 31 - __clz(w.group), groups = w.k >> shift;
    u32 rows[2] = {min(first + g, w.n - 1), min(first + g + 8, w.n - 1)};
    const u32 *codes[2] = {w.codes + (u64)rows[0] * words, w.codes + (u64)rows[1] * words};
    const float *scales[2] = {w.scales + (u64)rows[0] * groups, w.scales + (u64)rows[1] * groups};
    float acc[NT][4] = {};
    u32 word[2] = {0, 0};
    float scale[2] = {0, 0};
    u32 i = warp * 4 + t;
    if (i < words)
        for (u32 h = 0; h < 2; h++) word[h] = codes[h][i], scale[h] = scales[h][i * 8 >> shift];
    for (u32 step = warp * 4; step < words; step += 32) {
        u32 now[2] = {word[0], word[1]};
        float by[2] = {scale[0], scale[1]};
        u32 at = i;
        i += 32;
        if (i < words)
            for (u32 h = 0; h < 2; h++) word[h] = codes[h][i], scale[h] = scales[h][i * 8 >> shift];
        float in[NT][8], sum[NT][4] = {};
        for (u32 c = 0; c < NT; c++) {
            u32 r = m + c * 8 + g;
            if (r < y.rows && at < words) load8(x, r * x.ld + at * 8, in[c]);
            else
                for (u32 j = 0; j < 8; j++) in[c][j] = 0;
        }
        if (at >= words) by[0] = by[1] = 0;
        for (u32 j = 0; j < 4; j++) {
            u32 hi[4], lo[4];
            for (u32 q = 0; q < 4; q++) {
                u32 code = now[q & 1] >> (8 * j + 4 * (q >> 1)) & 15;
                float v = table[code * 32 + lane] * by[q & 1];
                hi[q] = __float_as_uint(v) & 0xffffe000u;
                lo[q] = __float_as_uint(v - __uint_as_float(hi[q]));
            }
            for (u32 c = 0; c < NT; c++) {
                u32 b0 = __float_as_uint(in[c][2 * j]), b1 = __float_as_uint(in[c][2 * j + 1]);
                mma(sum[c], lo, b0, b1);
                mma(sum[c], hi, b0, b1);
            }
        }
        for (u32 c = 0; c < NT; c++)
            for (u32 q = 0; q < 4; q++) acc[c][q] += sum[c][q];
    }
    for (u32 c = 0; c < NT; c++)
        for (u32 q = 0; q < 4; q++) parts[warp][c * 8 + 2 * t + (q & 1)][g + 8 * (q >> 1)] = acc[c][q];
    __syncthreads();
    for (u32 o = warp * 32 + lane; o < NT * 128; o += 256) {
        u32 row = o & 15, r = o >> 4;
        float total = 0;
        for (u32 p = 0; p < 8; p++) total += parts[p][r][row];
        if (first + row < w.n && m + r < y.rows) store(y, (u64)(m + r) * y.ld + first + row, total);
    }
}

// y = x W^T: a warp per row of the weight, up to ROWS rows of x.
#ifndef ROWS
#define ROWS 8
#endif
extern "C" __global__ void __launch_bounds__(256) nf4_forward(Weight w, Matrix x, Matrix y) {
    __shared__ float table[16 * 32];
    u32 lane = threadIdx.x, row = blockIdx.x * 8 + threadIdx.y, m = blockIdx.y * ROWS;
    for (u32 i = threadIdx.y * 32 + lane; i < 512; i += 256) table[i] = CODEBOOK[i / 32];
    __syncthreads();
    if (row >= w.n) return;
    u32 count = min(ROWS, y.rows - m), words = w.k / 8;
    const u32 *codes = w.codes + (u64)row * words;
    const float *scales = w.scales + (u64)row * (w.k / w.group);
    float sum[ROWS];
    for (u32 r = 0; r < ROWS; r++) sum[r] = 0;
    u32 next = lane < words ? codes[lane] : 0;
    for (u32 i = lane; i < words; i += 32) {
        u32 word = next;
        if (i + 32 < words) next = codes[i + 32];
        float scale = scales[i * 8 / w.group], v[8];
        for (u32 j = 0; j < 8; j++) v[j] = table[(word >> 4 * j & 15) * 32 + lane];
        for (u32 r = 0; r < ROWS; r++) {
            if (r >= count) break;
            float in[8], part = 0;
            load8(x, (m + r) * x.ld + i * 8, in);
            for (u32 j = 0; j < 8; j++) part = fmaf(in[j], v[j], part);
            sum[r] = fmaf(part, scale, sum[r]);
        }
    }
    for (u32 r = 0; r < ROWS; r++) {
        if (r >= count) break;
        float total = warp_sum(sum[r]);
        if (lane == 0) store(y, (m + r) * y.ld + row, total);
    }
}
