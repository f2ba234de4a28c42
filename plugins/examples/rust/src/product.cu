// Products with a packed NVFP4 weight. Compiled by NVRTC for the device that is there, without headers; numbers and structures
// are those of `cuda.rs`. A sum has one order, whatever the other rows of a call are and however many there are.

typedef unsigned long long u64;

struct Matrix { // row-major, `ld` elements from row to row; what lies between `cols` and `ld` is not ours
    void *data;
    u64 ld;
    unsigned rows, dtype;
};

struct Weight {
    const unsigned char *codes;  // [n][pitch / 2], the even element in the low bits; from k to pitch codes of 0
    const unsigned char *scales; // [n][pitch / 16], E4M3
    const float *globals;        // [n]
    unsigned n, k, pitch, divides;
};

enum { F32 = 1, F16 = 2, BF16 = 3 };

// Both formats are floats of a few bits: moved to where f32 has exponent and mantissa, they are off by a power of two.
__device__ float e2m1(unsigned code) { return __uint_as_float((code & 8) << 28 | (code & 7) << 22) * 0x1p126f; }
__device__ float e4m3(unsigned bits) { return __uint_as_float(bits << 20) * 0x1p120f; }

// The scale of one block, rounded once.
__device__ float scale(const Weight &w, unsigned bits, float global) {
    return w.divides ? e4m3(bits) / global : e4m3(bits) * global;
}

// Eight adjacent elements, as they are defined: fl32(code * scale).
__device__ void decode(unsigned codes, float scale, float *out) {
#pragma unroll
    for (int i = 0; i < 8; i++) out[i] = e2m1(codes >> 4 * i) * scale;
}

__device__ float load(const Matrix &m, unsigned row, unsigned column) {
    const u64 at = row * m.ld + column;
    if (m.dtype == F32) return ((const float *)m.data)[at];
    const unsigned short bits = ((const unsigned short *)m.data)[at];
    if (m.dtype == BF16) return __uint_as_float((unsigned)bits << 16);
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(bits));
    return wide;
}

__device__ void store(const Matrix &m, unsigned row, unsigned column, float value) {
    const u64 at = row * m.ld + column;
    if (m.dtype == F32) {
        ((float *)m.data)[at] = value;
        return;
    }
    unsigned short bits;
    if (m.dtype == BF16) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    ((unsigned short *)m.data)[at] = bits;
}

// y = x W^T. A warp makes ROWS x COLUMNS elements of y; a lane has 32 of every 1024 elements of k: 16 bytes of a row of codes,
// side by side with those of its neighbours. The warps of a block share their rows of x, widened, in shared memory.
constexpr int WARPS = 8, LANE = 32, CHUNK = 32 * LANE, PADDED = LANE + 4; // four more, so that lanes meet different banks

template <int ROWS, int COLUMNS>
__device__ void forward(const Weight &w, const Matrix &x, const Matrix &y) {
    __shared__ __align__(16) float tile[ROWS][32 * PADDED];
    const unsigned lane = threadIdx.x % 32, column = (blockIdx.x * WARPS + threadIdx.x / 32) * COLUMNS;
    for (unsigned row = blockIdx.y * ROWS; row < x.rows; row += gridDim.y * ROWS) {
        float sums[COLUMNS][ROWS] = {};
        for (unsigned first = 0; first < w.pitch; first += CHUNK) {
            // The weights are under way while x is staged. Past the end, codes of 0.
            const unsigned k = first + lane * LANE;
            unsigned codes[COLUMNS][4] = {};
            float scales[COLUMNS][2] = {};
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                if (k >= w.pitch || column + c >= w.n) continue;
                const u64 at = (u64)(column + c) * w.pitch + k;
                const uint4 sixteen = *(const uint4 *)(w.codes + at / 2);
                codes[c][0] = sixteen.x, codes[c][1] = sixteen.y, codes[c][2] = sixteen.z, codes[c][3] = sixteen.w;
                const float global = w.globals[column + c];
                scales[c][0] = scale(w, w.scales[at / 16], global);
                scales[c][1] = scale(w, w.scales[at / 16 + 1], global);
            }
            __syncthreads(); // nobody reads the tile before this one any more
            for (unsigned i = threadIdx.x; i < CHUNK; i += 32 * WARPS)
#pragma unroll
                for (int r = 0; r < ROWS; r++)
                    tile[r][i / LANE * PADDED + i % LANE] =
                        row + r < x.rows && first + i < w.k ? load(x, row + r, first + i) : 0.0f;
            __syncthreads();
#pragma unroll
            for (int word = 0; word < 4; word++) {
                float values[COLUMNS][8];
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) decode(codes[c][word], scales[c][word / 2], values[c]);
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const float4 *four = (const float4 *)&tile[r][lane * PADDED + 8 * word];
                    const float4 a = four[0], b = four[1];
                    const float inputs[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++)
#pragma unroll
                        for (int i = 0; i < 8; i++) sums[c][r] = fmaf(inputs[i], values[c][i], sums[c][r]);
                }
            }
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float sum = sums[c][r];
                for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffff, sum, other);
                if (lane == 0 && column + c < w.n && row + r < x.rows) store(y, row + r, column + c, sum);
            }
    }
}

extern "C" __global__ __launch_bounds__(256) void forward_few(Weight w, Matrix x, Matrix y) { forward<1, 1>(w, x, y); }
extern "C" __global__ __launch_bounds__(256, 2) void forward_many(Weight w, Matrix x, Matrix y) { forward<8, 4>(w, x, y); }

// dx = dy W. A thread makes four rows of eight columns of dx and walks down the weight; sixteen rows of it are one chain of
// additions, so that the error does not grow with n.
extern "C" __global__ __launch_bounds__(256) void backward(Weight w, Matrix dy, Matrix dx) {
    const unsigned column = (blockIdx.x * 256 + threadIdx.x) * 8;
    if (column >= w.k) return;
    for (unsigned row = blockIdx.y * 4; row < dy.rows; row += gridDim.y * 4) {
        float sums[4][8] = {};
        for (unsigned chain = 0; chain < w.n; chain += 16) {
            float part[4][8] = {};
            for (unsigned j = chain; j < min(chain + 16, w.n); j++) {
                const u64 at = (u64)j * w.pitch + column;
                float values[8];
                decode(*(const unsigned *)(w.codes + at / 2), scale(w, w.scales[at / 16], w.globals[j]), values);
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    const float input = row + r < dy.rows ? load(dy, row + r, j) : 0.0f;
#pragma unroll
                    for (int i = 0; i < 8; i++) part[r][i] = fmaf(input, values[i], part[r][i]);
                }
            }
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int i = 0; i < 8; i++) sums[r][i] += part[r][i];
        }
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (row + r < dx.rows) store(dx, row + r, column + i, sums[r][i]); // k is a multiple of 16
    }
}

// The decoded weight [n, k].
extern "C" __global__ __launch_bounds__(256) void dequantize(Weight w, Matrix out) {
    const unsigned column = (blockIdx.x * 256 + threadIdx.x) * 8;
    if (column >= w.k) return;
    for (unsigned row = blockIdx.y; row < w.n; row += gridDim.y) {
        const u64 at = (u64)row * w.pitch + column;
        float values[8];
        decode(*(const unsigned *)(w.codes + at / 2), scale(w, w.scales[at / 16], w.globals[row]), values);
#pragma unroll
        for (int i = 0; i < 8; i++) store(out, row, column + i, values[i]);
    }
}
