// The product with one row of x of bf16. Layout and arithmetic are those of gemv.cu, the design that of NVFP4's
// row.cu: codes go from memory to registers, AHEAD units of a warp in flight, the first of them before the
// kernel waits for the one before it.
//
// Few lanes hold x, so k may have any order in which codes and x agree: it is the one in which codes are
// cheapest to take apart. Each tile of k, with HALVES each half of one, has columns of B of its own: what sums
// a lane has are then those that its own word of scales belongs to, of one row and one tile.
#define Q4_ROW
#include "gemv.cu"
#include "codec.cuh"
#include "row.cuh"

// How far the k of a pair of INT4 or E2M1 lie apart (below), and of others the k that a lane has of two bytes.
enum { GAP = LEVELS == INT4 || LEVELS == E2M1 ? 16 : 8 };

// ---- codes to pairs of bf16 ---- Eight codes of a row in half a tile to pairs 0 to 3 of operands. Of four bits
// and with no table: pair i has the codes at bits 4 i and 4 i + 16 of the word, which one mask leaves.
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
    u32 y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
}
#if LEVELS == INT4
// 2^-6 of whole numbers: a code in the lowest bits of a bf16 is 2^-133 of itself, one behind four zeros 2^-129,
// subnormal or not. `zero`: a pair of what is added, 2^-6 of the negative of the zero point.
#define TIMES 64.0f
__device__ __forceinline__ void take_apart(u32 w, u32 zero, u32 (&a)[4]) {
    u32 v = w >> 8;
    a[0] = fma2(w & 0x000f000fu, 0x7f007f00u, zero);
    a[1] = fma2(w & 0x00f000f0u, 0x7d007d00u, zero);
    a[2] = fma2(v & 0x000f000fu, 0x7f007f00u, zero);
    a[3] = fma2(v & 0x00f000f0u, 0x7d007d00u, zero);
}
#elif LEVELS == E2M1
// A product puts magnitudes in bits 6 to 8 and signs in bit 15: 2^-126 of the values, also where subnormal.
#define TIMES 1.0f
__device__ __forceinline__ u32 raised(u32 bits) { return fma2(bits & 0x81c081c0u, 0x7e807e80u, 0x80008000u); }
__device__ __forceinline__ void take_apart(u32 w, u32 (&a)[4]) {
    u32 v = w >> 8;
    a[0] = raised((w & 0x000f000fu) * 0x1040u);
    a[1] = raised((w & 0x00f000f0u) * 0x104u);
    a[2] = raised((v & 0x000f000fu) * 0x1040u);
    a[3] = raised((v & 0x00f000f0u) * 0x104u);
}
#else
#define TIMES DOWN
#endif
#if LEVELS == NF4
// The table of levels.cuh with entries 256 bytes apart, so that an address is one permutation of bytes. SELECTED:
// words of eight that select() takes without it, two at most.
enum { ENTRIES = 65536, SELECTED = 1 };
// From select(): loads would come behind those of the units.
__device__ __forceinline__ void write_entries(u32 at, u32 thread, u32 threads) {
#pragma unroll 1
    for (u32 half = thread; half < 512; half += threads) {
        u32 a[8];
        select(half / 2, a);
        write_half(at + half / 2 * 128, half, a[0], a[1]);
    }
}
// As decode(). Volatile, for codes are there before the table is.
__device__ __forceinline__ void look_up(u32 w, u32 table, u32 copy, u32 (&a)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(a[2 * i]), "=r"(a[2 * i + 1]) : "r"(table + __byte_perm(w, copy, 0x7604 | i << 4)));
}
#else
enum { ENTRIES = 0 };
#endif

// A unit in registers: of rows n and n + 8 the codes of lane 4 n + t, as gemv.cu has them, and word t of scales.
struct Unit {
    u32 words[2 * OF_EIGHT][4], scale;
};
__device__ __forceinline__ void load_unit(Unit &u, const u8 *codes, const u8 *scale) {
#pragma unroll
    for (int i = 0; i < 2 * OF_EIGHT; i++) load16(u.words[i], codes + 512 * i);
    load4(u.scale, scale);
}
// Which part of B column n is for: a tile, with HALVES half of one.
__device__ __forceinline__ u32 part_of_column(u32 n) { return HALVES ? n / 4 * 2 + n % 2 : n % 2 ? ~0u : n / 4; }
// What shared memory has where the column is for that part; elsewhere v stays zero. As branches the compiler
// would make one of them all, and keep v in memory.
__device__ __forceinline__ void lds4_if(u32 (&v)[4], u32 at, u32 have, u32 want) {
    asm volatile("{.reg .pred p; setp.eq.u32 p, %5, %6; @p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];}"
                 : "+r"(v[0]), "+r"(v[1]), "+r"(v[2]), "+r"(v[3])
                 : "r"(at), "r"(have), "r"(want));
}
// Adds `by` times the unit's product of row n, or n + 8 where t is odd, over tile t / 2. b: operands of x, of
// half h of tile s at 8 s + 4 h.
__device__ __forceinline__ void times_x(const Unit &u, u32 part, u32 t, u32 xat, u32 table, u32 copy, float by,
                                        u32 (&b)[16], float &sum) {
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int s = 0; s < 2; s++) lds4_if((u32(&)[4])b[8 * s + 4 * h], xat + s * 128 + h * 16, part, HALVES ? 2 * s + h : s);
#if LEVELS == INT4
    u32 zero[4] = {0xbe00be00u, 0xbe00be00u, 0xbe00be00u, 0xbe00be00u}; // as words of scales lie
    if (ZEROS) {
        u32 mine = fma2(__byte_perm(u.scale, 0, 0x3232), 0x3c803c80u, 0x80008000u);
#pragma unroll
        for (int i = 0; i < 4; i++) zero[i] = __shfl_sync(~0u, mine, i, 4);
    }
#endif
    float d[2][4] = {};
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int s = 0; s < 2; s++) {
            const u32 *upper = &u.words[OF_EIGHT * s][OF_EIGHT * h];
            const u32 *lower = &u.words[OF_EIGHT * s + OF_EIGHT - 1][OF_EIGHT == 2 ? 2 * h : 2 + h];
            const u32 *x = b + 8 * s + 4 * h;
#if LEVELS == NF4
            // Leading and trailing parts of eight rows are an A, sums of rows n in d[0], of rows n + 8 in d[1].
            u32 a0[8], a1[8];
            if (s == h && h < SELECTED) select(*upper, a0);
            else look_up(*upper, table, copy, a0);
            look_up(*lower, table, copy, a1);
            As<bf16>::mma(d[0], a0[0], a0[1], a0[2], a0[3], x[0], x[1]);
            As<bf16>::mma(d[1], a1[0], a1[1], a1[2], a1[3], x[0], x[1]);
            As<bf16>::mma(d[0], a0[4], a0[5], a0[6], a0[7], x[2], x[3]);
            As<bf16>::mma(d[1], a1[4], a1[5], a1[6], a1[7], x[2], x[3]);
#else
            u32 a0[4], a1[4];
#if LEVELS == INT4
            take_apart(*upper, zero[2 * s], a0), take_apart(*lower, zero[2 * s + 1], a1);
#elif LEVELS == E2M1
            take_apart(*upper, a0), take_apart(*lower, a1);
#else
            decode(upper, table, copy, a0), decode(lower, table, copy, a1);
#endif
            As<bf16>::mma(d[s], a0[0], a1[0], a0[1], a1[1], x[0], x[1]);
            As<bf16>::mma(d[s], a0[2], a1[2], a0[3], a1[3], x[2], x[3]);
#endif
        }
#if LEVELS == NF4
    sum = fmaf(t % 2 ? d[1][0] + d[1][2] : d[0][0] + d[0][2], __uint_as_float(u.scale) * by, sum);
#else
    // Of the two tiles the other one's columns are zero here.
#pragma unroll
    for (int h = 0; h <= HALVES; h++) sum = fmaf(t % 2 ? d[0][2 + h] + d[1][2 + h] : d[0][h] + d[1][h], scale_in(u.scale, h) * by, sum);
#endif
}

// One row of x to shared memory: what lane t has of a tile side by side, 16 bytes of each half, in the order of
// pairs.
template <int BLOCK> __device__ __forceinline__ void stage_one(const Gemv &p, u32 xs, float *norms) {
    // Of eight elements four are of lane t = k / 4 & 2, four of the next. Every other tile begins with the
    // latter, so that stores meet in no bank.
    auto put = [&](u32 k, bool in, u32 a, u32 b, u32 c, u32 d) {
        u32 to = xs + (k & ~63u) * 2 + (k & 8) * 8 + (k & 48) / 2, turn = (k & 64) / 2;
        if (!in) a = b = c = d = 0;
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to + turn), "r"(turn ? c : a), "r"(turn ? d : b) : "memory");
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to + (turn ^ 32)), "r"(turn ? a : c), "r"(turn ? b : d) : "memory");
    };
    auto normed = [&](u32 k, bool in, bool there, const float (&e)[8]) {
        auto pair = [&](int i, int j) { return As<bf16>::pair(e[i], e[j]); };
        if (!there) return;
        if (GAP == 16) put(k, in, pair(0, 4), pair(1, 5), pair(2, 6), pair(3, 7));
        else put(k, in, pair(0, 1), pair(4, 5), pair(2, 3), pair(6, 7));
    };
    auto plain = [&](u32 k, bool in, bool there, const u32 (&h)[4]) {
        auto pair = [&](int i, u32 halves) { return __byte_perm(h[i], h[i + 2], halves); };
        if (!there) return;
        if (GAP == 16) put(k, in, pair(0, 0x5410), pair(0, 0x7632), pair(1, 0x5410), pair(1, 0x7632));
        else put(k, in, h[0], h[2], h[1], h[3]);
    };
    stage_row<BLOCK, GAP>(p, norms, [] {}, normed, plain);
}

#if LEVELS == E4M3
// The staged row becomes what FP8 keeps of it: codes as bf16, and a scale for each unit of k. `p.fixed` is that
// of all; where it is 0 the row has one, below 0 each unit: amax / 448. NaN where an element is not finite.
template <int BLOCK>
__device__ __forceinline__ void round_staged(const Gemv &p, u16 *xs, float *scales, u32 *tops) {
    enum { MOST = (2047 + BLOCK) / BLOCK }; // of eight elements, a thread
    const u32 count = p.units * 16;
    u32 h[MOST][4], top[MOST], of_row = 0;
    __syncthreads();
#pragma unroll
    for (u32 j = 0; j < MOST; j++) {
        u32 i = threadIdx.x + j * BLOCK;
        uint4 v = i < count ? ((const uint4 *)xs)[i] : make_uint4(0, 0, 0, 0);
        h[j][0] = v.x, h[j][1] = v.y, h[j][2] = v.z, h[j][3] = v.w;
        top[j] = 0;
#pragma unroll
        for (int e = 0; e < 4; e++) top[j] = max(top[j], max(h[j][e] & 0x7fffu, h[j][e] >> 16 & 0x7fffu));
        of_row = max(of_row, top[j]);
        if (p.fixed < 0) // a unit has 16 threads
            for (int d = 1; d < 16; d *= 2) top[j] = max(top[j], __shfl_xor_sync(~0u, top[j], d));
    }
    if (p.fixed == 0) {
        for (int d = 16; d; d >>= 1) of_row = max(of_row, __shfl_xor_sync(~0u, of_row, d));
        if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = of_row;
        __syncthreads();
        for (u32 i = 0; i < BLOCK / 32; i++) of_row = max(of_row, tops[i]);
    }
#pragma unroll
    for (u32 j = 0; j < MOST; j++) {
        u32 i = threadIdx.x + j * BLOCK, most = p.fixed == 0 ? of_row : top[j];
        if (i >= count) break;
        float scale = p.fixed > 0 ? p.fixed : __fdiv_rn(from_bf16(most), 448.0f), inverse = __frcp_rn(scale);
        bool plain = scale > 1e-30f && scale < 1e30f;
        auto rounded = [&](u32 v) {
            float x = from_bf16(v & 0x7fffu), q = __fmul_rn(x, inverse);
            // The nearest quotient, where nothing on the way leaves the range.
            q = plain ? fmaf(fmaf(-q, scale, x), inverse, q) : scale == 0 ? 0.0f : __fdiv_rn(x, scale);
            return __float_as_uint(e4m3_nearest(fminf(q, 448.0f))) >> 16 | (v & 0x8000u);
        };
#pragma unroll
        for (int e = 0; e < 4; e++)
            h[j][e] =
                most < 0x7f80u ? rounded(h[j][e] & 0xffffu) | rounded(h[j][e] >> 16) << 16 : 0x7fff7fffu;
        ((uint4 *)xs)[i] = make_uint4(h[j][0], h[j][1], h[j][2], h[j][3]);
        if (i % 16 == 0) scales[i / 16] = scale;
    }
}
#else
template <int BLOCK> __device__ __forceinline__ void round_staged(const Gemv &, u16 *, float *, u32 *) {}
#endif

// What y holds where this thread will add, and element i of y of the block.
__device__ __forceinline__ float old_of(const Gemv &p, const Part &r, u32 i) {
    Element<1> y(p, r, i);
    return p.accumulate && y.there ? ((const float *)p.y)[y.at] : 0.0f;
}
__device__ __forceinline__ void finish(const Gemv &p, const Part &r, const float *sums, float old, u32 i) {
    Element<1> y(p, r, i);
    float sum = summed(p, r, sums, y.v, y.row, 0) * TIMES, up = p.gate_at ? summed(p, r, sums, y.v, y.row, 1) * TIMES : 0.0f;
    if (!y.there || threadIdx.x % MATES) return;
    if (p.gate_at) sum = silu(sum) * up;
    if (p.y_dtype == F32) ((float *)p.y)[y.at] = p.accumulate ? old + sum : sum;
    else ((u16 *)p.y)[y.at] = p.y_dtype == BF16 ? to_bf16(sum) : to_f16(sum);
}

// Shared memory: the table, x, sums of the norm, scales of x if it is ROUNDED, partial sums.
template <int BLOCK, int AHEAD, bool ROUNDED> __device__ __forceinline__ void row(const Gemv &p) {
    extern __shared__ __align__(128) u8 memory[];
    // Told to the compiler to be the same in all lanes.
    u32 lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    let_next_start();
    Part r = part_of<BLOCK>(p, warp);
    u16 *xs = (u16 *)(memory + ENTRIES);
    float *norms = (float *)(xs + p.units * 128 + 8), *scales = norms + BLOCK / 32;
    float *sums = scales + (ROUNDED ? p.units : 0);
    u32 half = warp >= r.warps, left = r.to - r.from;
    int ahead = left;
    const u8 *codes = p.w + ((u64)((half ? p.gate_at : 0) + r.first) * p.units + r.from) * UNIT, *scale = codes + SCALES_AT + lane * 4;
    codes += place_of(lane);
    Unit units[AHEAD];
    auto next = [&](Unit &u) {
        if (ahead > 0) load_unit(u, codes, scale);
        codes += UNIT, scale += UNIT, ahead--;
    };
#pragma unroll
    for (int j = 0; j < AHEAD; j++) next(units[j]);
    u32 table = shared_at(memory), copy = copy_of(lane), b[16];
#pragma unroll
    for (int i = 0; i < 16; i++) b[i] = 0;
#if LEVELS == NF4
    write_entries(table, threadIdx.x, BLOCK);
#endif
    stage_one<BLOCK>(p, shared_at(xs), norms);
    if (ROUNDED) round_staged<BLOCK>(p, xs, scales, (u32 *)norms);
    u32 i = threadIdx.x / MATES;
    float old = old_of(p, r, i);
    __syncthreads(); // x and the table are there

    u32 t = lane % 4, n = lane / 4, v = divided(r.from, __fdividef(1.0f, (float)p.units)), at = r.from - v * p.units;
    u32 part = part_of_column(n), xfirst = shared_at(xs) + t * 32, xat = xfirst + at * 256;
    float *to = sums + (v + half * r.count + warp) * 16 + n, sum = 0;
    const float *by = scales + at;
    // Units up to the end of a row group, and those behind it.
    u32 run = min(p.units - at, left);
    left -= run;
    if (run) while (true) {
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            times_x(units[j], part, t, xat, table, copy, ROUNDED ? *by : 1.0f, b, sum);
            next(units[j]);
            xat += 256, by++;
            if (!--run) {
                sum += __shfl_xor_sync(~0u, sum, 2);
                if (t < 2) to[8 * t] = sum;
                if (!left) goto summed_up;
                to += 16, sum = 0, xat = xfirst, by = scales;
                run = min(p.units, left), left -= run;
            }
        }
    }
summed_up:
    __syncthreads();
    finish(p, r, sums, old, i);
#pragma unroll 1
    for (i += BLOCK / MATES; i - threadIdx.x / MATES < r.count * 16; i += BLOCK / MATES) finish(p, r, sums, old_of(p, r, i), i);
}

// Fewer warps with more registers, for blocks of few units.
#define ROW(name, BLOCK, AHEAD, ROUNDED) \
    extern "C" __global__ void __launch_bounds__(BLOCK, 1) name(const __grid_constant__ Gemv p) { \
        row<BLOCK, AHEAD, ROUNDED>(p); \
    }
#if CODE_BITS == 8
ROW(levels_row, 512, 2, false)
ROW(levels_row_narrow, 384, 3, false)
ROW(levels_row_rounded, 512, 2, true)
ROW(levels_row_rounded_narrow, 384, 3, true)
#else
ROW(levels_row, 512, 3, false)
ROW(levels_row_narrow, 384, 5, false)
#endif
