// AdamW on packed moments, the NVFP4 value of a master weight, and sums of squares: the operations of
// kernel.rs, moments.rs and weight.rs on the same bytes, in the same order, each rounded the same way.
//
// A thread block works on one tile of 4096 elements, a thread on 16 in a row: one NVFP4 block, 1/8 of a 4-bit
// block, 1/16 of an 8-bit block.
#include "codec.cuh"

#define TILE 4096
#define EACH 16
#define THREADS 256

struct Scalars { float grad_scale, beta1, rest1, beta2, rest2, unbias1, unbias2, eps, minus_lr, keep, limit; };
// Codes of m and v, scales of m and v, second-level scales of m and v, in bytes from the start of the state.
struct Layout { u64 at[6]; u64 n; };
// Values and midpoints of the 8-bit maps of m and v, values of the 4-bit maps of m and the root of v.
struct Maps { float m8[256], m8b[256], v8[256], v8b[256], m4[16], r4[16]; };
struct Random { u32 key[2], counter[3], first; };

__device__ __forceinline__ float e2m1_value(u32 code) {
  u32 e = code >> 1 & 3, m = code & 1;
  return e == 0 ? 0.5f * (float)m : __uint_as_float((e + 126) << 23 | m << 22);
}

__device__ __forceinline__ u32 sign_bit(float x) { return __float_as_uint(x) >> 28 & 8; }

__device__ __forceinline__ float e2m1_decode(u32 code) {
  return __uint_as_float(__float_as_uint(e2m1_value(code & 7)) | (code & 8) << 28);
}

__device__ __forceinline__ float root_value(u32 code) { return code == 0 ? 0.25f : e2m1_value(code); }

// The upper one of two neighbours `a` and `b` of y, with the probability that makes the mean exact.
__device__ __forceinline__ u32 upper(float y, float a, float b, u32 random) {
  float share = __fmul_rn(__fadd_rn((float)random, 0.5f), 1.0f / 65536.0f);
  return y > __fadd_rn(a, __fmul_rn(share, __fsub_rn(b, a)));
}

// Code of y >= 0 among the magnitudes of E2M1, or those of a root.
template <int SQUARE> __device__ __forceinline__ u32 random_e2m1(float y, u32 random) {
  u32 low = (y >= 0.5f) + (y >= 1.0f) + (y >= 1.5f) + (y >= 2.0f) + (y >= 3.0f) + (y >= 4.0f);
  float a = SQUARE ? root_value(low) : e2m1_value(low);
  return low + upper(y, a, e2m1_value(low + 1), random);
}

__device__ __forceinline__ u32 random_map(const float *values, float y, u32 random) {
  u32 low = 0;
#pragma unroll
  for (u32 step = 8; step > 0; step /= 2) low += y >= values[low + step] ? step : 0;
  low = low < 14 ? low : 14;
  return low + upper(y, values[low], values[low + 1], random);
}

template <int N> __device__ __forceinline__ u32 map_code(const float *bounds, float x) {
  u32 code = 0;
#pragma unroll
  for (u32 step = N / 2; step > 0; step /= 2) code += x > bounds[code + step - 1] ? step : 0;
  return code;
}

__device__ __forceinline__ float larger(float a, float b) { return b > a ? b : a; }

__device__ __forceinline__ float largest(const float *x) {
  float a = 0.0f;
#pragma unroll
  for (int i = 0; i < EACH; i++) a = larger(a, fabsf(x[i]));
  return a;
}

// Largest over `lanes` neighbouring threads, a power of two up to 32.
__device__ __forceinline__ float group_max(float a, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) a = larger(a, __shfl_xor_sync(0xffffffffu, a, step));
  return a;
}

__device__ float block_max(float a, float *shared) {
  a = group_max(a, 32);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x / 32] = a;
  __syncthreads();
  float all = shared[0];
  for (int i = 1; i < THREADS / 32; i++) all = larger(all, shared[i]);
  return all;
}

__device__ void philox(const Random &r, u32 block, u32 out[4]) {
  u32 c0 = r.first + block, c1 = r.counter[0], c2 = r.counter[1], c3 = r.counter[2], k0 = r.key[0], k1 = r.key[1];
#pragma unroll
  for (int i = 0; i < 10; i++) {
    u64 p = (u64)c0 * 0xd2511f53u, q = (u64)c2 * 0xcd9e8d57u;
    u32 n0 = (u32)(q >> 32) ^ c1 ^ k0, n2 = (u32)(p >> 32) ^ c3 ^ k1;
    c1 = (u32)q, c3 = (u32)p, c0 = n0, c2 = n2;
    k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

// bf16 = 1: bf16 bits, else f32. Elements from `n` on read as zero.
template <int bf16> __device__ __forceinline__ void load(const void *from, u64 first, u64 n, float *x) {
  if (first + EACH <= n) {
    if (bf16) {
      const uint4 *p = (const uint4 *)((const u16 *)from + first);
      uint4 a = p[0], b = p[1];
      u32 w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 8; i++) x[2 * i] = __uint_as_float(w[i] << 16), x[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
    } else {
      const float4 *p = (const float4 *)((const float *)from + first);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float4 a = p[i];
        x[4 * i] = a.x, x[4 * i + 1] = a.y, x[4 * i + 2] = a.z, x[4 * i + 3] = a.w;
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    x[i] = 0.0f;
    if (first + i < n) x[i] = bf16 ? __uint_as_float((u32)((const u16 *)from)[first + i] << 16) : ((const float *)from)[first + i];
  }
}

__device__ __forceinline__ void store(float *to, u64 first, u64 n, const float *x) {
  if (first + EACH <= n) {
#pragma unroll
    for (int i = 0; i < 4; i++) ((float4 *)(to + first))[i] = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    return;
  }
  for (int i = 0; i < EACH; i++)
    if (first + i < n) to[first + i] = x[i];
}

__device__ __forceinline__ void store16(u16 *to, u64 first, u64 n, const u32 *bits) {
  if (first + EACH <= n) {
    uint4 *p = (uint4 *)(to + first);
    u32 w[8];
#pragma unroll
    for (int i = 0; i < 8; i++) w[i] = bits[2 * i] | bits[2 * i + 1] << 16;
    p[0] = make_uint4(w[0], w[1], w[2], w[3]);
    p[1] = make_uint4(w[4], w[5], w[6], w[7]);
    return;
  }
  for (int i = 0; i < EACH; i++)
    if (first + i < n) to[first + i] = (u16)bits[i];
}

// FORMAT: 0 f32, 1 8-bit, 2 4-bit, 3 NVFP4. SQUARE: v instead of m. `t`: this thread's 16 elements, counted
// over the tensor.
template <int FORMAT, int SQUARE>
__device__ __forceinline__ void unpack(u8 *state, const Layout &l, const Maps *maps, u64 t, bool live, float *x) {
  const u8 *codes = state + l.at[SQUARE], *scales = state + l.at[2 + SQUARE], *second = state + l.at[4 + SQUARE];
#pragma unroll
  for (int i = 0; i < EACH; i++) x[i] = 0.0f;
  if (!live) return;
  if (FORMAT == 0) {
    load<0>(codes, t * EACH, l.n, x);
  } else if (FORMAT == 1) {
    float absmax = ((const float *)scales)[t / 16];
    const float *map = SQUARE ? maps->v8 : maps->m8;
    uint4 c = ((const uint4 *)codes)[t];
    u32 w[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
    for (int i = 0; i < EACH; i++) x[i] = __fmul_rn(map[w[i / 4] >> (8 * (i % 4)) & 255], absmax);
  } else if (FORMAT == 2) {
    float absmax = ((const float *)scales)[t / 8];
    u64 w = ((const u64 *)codes)[t];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      u32 code = (u32)(w >> (4 * i)) & 15;
      if (SQUARE) {
        float root = __fmul_rn(maps->r4[code], absmax);
        x[i] = __fmul_rn(root, root);
      } else {
        x[i] = __fmul_rn(maps->m4[code], absmax);
      }
    }
  } else {
    float factor = __fmul_rn(e4m3_value(scales[t]), ((const float *)second)[t / THREADS]);
    u64 w = ((const u64 *)codes)[t];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      u32 code = (u32)(w >> (4 * i)) & 15;
      if (SQUARE) {
        float root = __fmul_rn(root_value(code & 7), factor);
        x[i] = __fmul_rn(root, root);
      } else {
        x[i] = __fmul_rn(e2m1_decode(code), factor);
      }
    }
  }
}

// Random halves of this thread's 16 elements for a moment; a bf16 master has the blocks below.
__device__ __forceinline__ void draws(const Random &random, u32 own, u64 t, u32 *r) {
  philox(random, own | (u32)(2 * t), r);
  philox(random, own | (u32)(2 * t + 1), r + 4);
}

template <int FORMAT, int SQUARE>
__device__ __forceinline__ void pack(u8 *state, const Layout &l, const Maps *maps, float *shared, const Random &random, u64 t, bool live, float *x) {
  u8 *codes = state + l.at[SQUARE], *scales = state + l.at[2 + SQUARE], *second = state + l.at[4 + SQUARE];
  if (FORMAT >= 2 && SQUARE) {
#pragma unroll
    for (int i = 0; i < EACH; i++) x[i] = __fsqrt_rn(x[i]);
  }
  u32 r[8];
  if (FORMAT >= 2) draws(random, SQUARE ? 1u << 31 : 1u << 30, t, r);
  if (FORMAT == 0) {
    if (live) store((float *)codes, t * EACH, l.n, x);
  } else if (FORMAT == 1) {
    float absmax = group_max(largest(x), 16), divisor = absmax == 0.0f ? 1.0f : absmax;
    const float *bounds = SQUARE ? maps->v8b : maps->m8b;
    u32 w[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < EACH; i++) w[i / 4] |= map_code<256>(bounds, __fdiv_rn(x[i], divisor)) << (8 * (i % 4));
    if (!live) return;
    ((uint4 *)codes)[t] = make_uint4(w[0], w[1], w[2], w[3]);
    if (t % 16 == 0) ((float *)scales)[t / 16] = absmax;
  } else if (FORMAT == 2) {
    float absmax = group_max(largest(x), 8), divisor = absmax == 0.0f ? 1.0f : absmax;
    u64 w = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      float y = __fdiv_rn(x[i], divisor);
      u32 code = random_map(SQUARE ? maps->r4 : maps->m4, y, r[i / 2] >> (16 * (i % 2)) & 0xffff);
      w |= (u64)code << (4 * i);
    }
    if (!live) return;
    ((u64 *)codes)[t] = w;
    if (t % 8 == 0) ((float *)scales)[t / 8] = absmax;
  } else {
    float absmax = largest(x), level = __fdiv_rn(block_max(absmax, shared), 2688.0f);
    u32 scale = 0;
    u64 w = 0;
    if (absmax != 0.0f && level != 0.0f) {
      float want = __fdiv_rn(__fdiv_rn(absmax, 6.0f), level);
      scale = e4m3_of(want);
      if (e4m3_value(scale) < want && scale < 0x7e) scale++;
      float factor = __fmul_rn(e4m3_value(scale), level);
      if (factor != 0.0f) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
          float y = __fdiv_rn(x[i], factor);
          u32 code = random_e2m1<SQUARE>(SQUARE ? y : fabsf(y), r[i / 2] >> (16 * (i % 2)) & 0xffff);
          if (!SQUARE) code |= sign_bit(y);
          w |= (u64)code << (4 * i);
        }
      }
    }
    if (!live) return;
    ((u64 *)codes)[t] = w;
    scales[t] = (u8)scale;
    if (threadIdx.x == 0) ((float *)second)[t / THREADS] = level;
  }
}

template <int FORMAT, int MASTER, int GRAD>
__device__ __forceinline__ void adamw(const Scalars &s, const Layout &l, const Maps *global, void *master, const void *grad, u8 *state, const Random &random) {
  __shared__ Maps maps;
  __shared__ float shared[THREADS / 32];
  if (FORMAT == 1 || FORMAT == 2) {
    for (u32 i = threadIdx.x; i < sizeof(Maps) / 4; i += THREADS) ((float *)&maps)[i] = ((const float *)global)[i];
    __syncthreads();
  }
  u64 t = (u64)blockIdx.x * THREADS + threadIdx.x, first = t * EACH;
  // Packed formats store whole blocks of 256 elements.
  bool live = FORMAT == 0 ? first < l.n : first < (l.n + 255) / 256 * 256;
  float g[EACH], m[EACH], v[EACH], update[EACH];
  load<GRAD>(grad, first, l.n, g);
  unpack<FORMAT, 0>(state, l, &maps, t, live, m);
  unpack<FORMAT, 1>(state, l, &maps, t, live, v);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    if (first + i >= l.n) m[i] = 0.0f, v[i] = 0.0f;
    float x = __fmul_rn(g[i], s.grad_scale);
    m[i] = __fmaf_rn(s.beta1, m[i], __fmul_rn(s.rest1, x));
    v[i] = __fmaf_rn(s.beta2, v[i], __fmul_rn(__fmul_rn(s.rest2, x), x));
    float u = __fdiv_rn(__fmul_rn(m[i], s.unbias1), __fmaf_rn(__fsqrt_rn(v[i]), s.unbias2, s.eps));
    update[i] = u < -s.limit ? -s.limit : u > s.limit ? s.limit : u;
  }
  float w[EACH];
  load<MASTER>(master, first, l.n, w);
#pragma unroll
  for (int i = 0; i < EACH; i++) w[i] = __fmaf_rn(s.minus_lr, update[i], __fmul_rn(w[i], s.keep));
  if (MASTER) {
    u32 bits[EACH], r[4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      philox(random, (u32)(first / 8) + half, r);
#pragma unroll
      for (int i = 0; i < 8; i++)
        bits[8 * half + i] = (__float_as_uint(w[8 * half + i]) + (r[i / 2] >> (16 * (i % 2)) & 0xffff)) >> 16;
    }
    store16((u16 *)master, first, l.n, bits);
  } else {
    store((float *)master, first, l.n, w);
  }
  pack<FORMAT, 0>(state, l, &maps, shared, random, t, live, m);
  pack<FORMAT, 1>(state, l, &maps, shared, random, t, live, v);
}

#define ADAMW(name, FORMAT, MASTER, GRAD)                                                                                       \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                                       \
      name(Scalars s, Layout l, const Maps *maps, void *master, const void *grad, u8 *state, Random random) {                 \
    adamw<FORMAT, MASTER, GRAD>(s, l, maps, master, grad, state, random);                                                     \
  }
#define ADAMW4(name, FORMAT)                                                                                                    \
  ADAMW(name##_f32_f32, FORMAT, 0, 0) ADAMW(name##_f32_bf16, FORMAT, 0, 1) ADAMW(name##_bf16_f32, FORMAT, 1, 0) ADAMW(name##_bf16_bf16, FORMAT, 1, 1)
ADAMW4(adamw_f32, 0)
ADAMW4(adamw_8bit, 1)
ADAMW4(adamw_4bit, 2)
ADAMW4(adamw_nvfp4, 3)

// Bits of the largest magnitude; what is not finite counts as infinity. `out` must be zero.
template <int BF16> __device__ void amax(const void *w, u64 n, u32 *out) {
  __shared__ float shared[THREADS / 32];
  float x[EACH], a = 0.0f;
  for (u64 first = ((u64)blockIdx.x * THREADS + threadIdx.x) * EACH; first < n; first += (u64)gridDim.x * TILE) {
    load<BF16>(w, first, n, x);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      float y = fabsf(x[i]);
      a = larger(a, y <= 3.402823466e38f ? y : __uint_as_float(0x7f800000u));
    }
  }
  a = block_max(a, shared);
  if (threadIdx.x == 0) atomicMax(out, __float_as_uint(a));
}

extern "C" __global__ void __launch_bounds__(THREADS) amax_f32(const void *w, u64 n, u32 *out) { amax<0>(w, n, out); }
extern "C" __global__ void __launch_bounds__(THREADS) amax_bf16(const void *w, u64 n, u32 *out) { amax<1>(w, n, out); }

// info[0]: bits of amax, info[1]: receives the per-tensor scale. NaN comes out where amax is not finite.
template <int IN, int OUT> __device__ void value(const void *w, u64 n, u32 power_of_two, u32 *info, void *out) {
  float all = __uint_as_float(info[0]);
  float g = __fdiv_rn(all, 2688.0f);
  if (g == 0.0f) g = 1.0f;
  if (power_of_two) {
    u32 b = __float_as_uint(larger(g, 1.17549435e-38f));
    g = __uint_as_float((b + 0x7fffff) & 0xff800000u);
  }
  bool bad = info[0] >= 0x7f800000u;
  u64 t = (u64)blockIdx.x * THREADS + threadIdx.x, first = t * EACH;
  if (t == 0) info[1] = __float_as_uint(bad ? __uint_as_float(0x7fc00000u) : g);
  if (first >= n) return;
  float x[EACH];
  load<IN>(w, first, n, x);
  float a = largest(x), r = __fdiv_rn(a, __fmul_rn(6.0f, g));
  if (a == 0.0f || r == 0.0f) r = 1.0f;
  r = r < 0.001953125f ? 0.001953125f : r > 448.0f ? 448.0f : r;
  float step = __fmul_rn(e4m3_value(e4m3_of(r)), g);
  u32 bits[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    float y = __fdiv_rn(x[i], step);
    float v = __fmul_rn(e2m1_decode(e2m1_magnitude(fabsf(y)) | sign_bit(y)), step);
    if (bad) v = __uint_as_float(0x7fc00000u);
    x[i] = v;
    // Exact with a power of two, nearest-even else.
    u32 b = __float_as_uint(v);
    bits[i] = (b + 0x7fff + (b >> 16 & 1)) >> 16;
  }
  if (OUT) store16((u16 *)out, first, n, bits);
  else store((float *)out, first, n, x);
}

#define VALUE(name, IN, OUT)                                                                                                    \
  extern "C" __global__ void __launch_bounds__(THREADS) name(const void *w, u64 n, u32 power_of_two, u32 *info, void *out) {  \
    value<IN, OUT>(w, n, power_of_two, info, out);                                                                            \
  }
VALUE(value_f32_f32, 0, 0)
VALUE(value_f32_bf16, 0, 1)
VALUE(value_bf16_f32, 1, 0)
VALUE(value_bf16_bf16, 1, 1)

// Sums within a tile in a fixed order, then over tiles in a fixed order: the same bits every time.
__device__ double block_sum(double a, double *shared) {
  for (int step = 16; step > 0; step /= 2) a += __shfl_xor_sync(0xffffffffu, a, step);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x / 32] = a;
  __syncthreads();
  double all = 0.0;
  for (int i = 0; i < THREADS / 32; i++) all += shared[i];
  return all;
}

template <int BF16> __device__ void squares(const void *g, u64 n, double *partial) {
  __shared__ double shared[THREADS / 32];
  float x[EACH];
  double a = 0.0;
  load<BF16>(g, ((u64)blockIdx.x * THREADS + threadIdx.x) * EACH, n, x);
#pragma unroll
  for (int i = 0; i < EACH; i++) a += (double)x[i] * (double)x[i];
  a = block_sum(a, shared);
  if (threadIdx.x == 0) partial[blockIdx.x] = a;
}

extern "C" __global__ void __launch_bounds__(THREADS) squares_f32(const void *g, u64 n, double *partial) { squares<0>(g, n, partial); }
extern "C" __global__ void __launch_bounds__(THREADS) squares_bf16(const void *g, u64 n, double *partial) { squares<1>(g, n, partial); }

extern "C" __global__ void __launch_bounds__(THREADS) total(const double *partial, u64 tiles, double *out) {
  __shared__ double shared[THREADS / 32];
  double a = 0.0;
  for (u64 i = threadIdx.x; i < tiles; i += THREADS) a += partial[i];
  a = block_sum(a, shared);
  if (threadIdx.x == 0) *out = a;
}
