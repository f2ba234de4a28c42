// As much of CUDA C++ as lets a compiler for CPUs run kernels whose threads wait for each other: for tests. Threads
// of a block take turns; whoever waits gives way. Instructions stand for those of PTX, with their operands;
// products are exact and bf16 has subnormal numbers. Blocks run one after another.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <ucontext.h>
#include <vector>

#define __CUDA_ARCH__ 900
#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__
#define __align__(n)
#define __launch_bounds__(...)
#define __grid_constant__
struct float4 { float x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
struct uint2 { unsigned x, y; };
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
template <class A, class B> auto min(A a, B b) { return std::common_type_t<A, B>(a) < std::common_type_t<A, B>(b) ? a : b; }
template <class A, class B> auto max(A a, B b) { return std::common_type_t<A, B>(a) > std::common_type_t<A, B>(b) ? a : b; }

[[noreturn]] static void fault(const char *why) {
    fprintf(stderr, "the kernel: %s\n", why);
    abort();
}
[[noreturn]] static void not_for_cpus() { fault("an instruction that host.h does not have"); }

// ---- threads ----
struct Index { unsigned x, y, z; };
struct Thread { ucontext_t at; bool done; };
struct Warp { unsigned arrived, turn, in[32][6], out[2][32][6]; };
static std::vector<Thread> threads;
static std::vector<Warp> warps;
static ucontext_t scheduler;
static unsigned now, at_barrier, barriers;
static Index blockIdx, blockDim;
#define threadIdx (Index{now, 0, 0})
static void give_way() {
    unsigned me = now;
    swapcontext(&threads[me].at, &scheduler);
    now = me;
}
static void __syncthreads() {
    unsigned turn = barriers;
    if (++at_barrier == threads.size()) at_barrier = 0, barriers++;
    while (barriers == turn) give_way();
}
// What each lane of the warp brings, when all have.
static unsigned (*of_all(const unsigned *mine, unsigned count))[6] {
    Warp &w = warps[now / 32];
    unsigned turn = w.turn;
    memcpy(w.in[now % 32], mine, count * 4);
    if (++w.arrived == 32) memcpy(w.out[turn & 1], w.in, sizeof w.in), w.arrived = 0, w.turn++;
    while (w.turn == turn) give_way();
    return w.out[turn & 1];
}
template <class T> T of_lane(T v, unsigned lane) {
    unsigned bits;
    memcpy(&bits, &v, 4);
    bits = of_all(&bits, 1)[lane][0];
    memcpy(&v, &bits, 4);
    return v;
}
template <class T> T __shfl_xor_sync(unsigned, T v, int d) { return of_lane(v, (now % 32) ^ d); }
template <class T> T __shfl_sync(unsigned, T v, int lane, int width = 32) { return of_lane(v, (now % 32 & ~(width - 1)) | lane); }
static void __syncwarp() {}

// ---- numbers ----
static float __uint_as_float(unsigned u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static unsigned __float_as_uint(float f) {
    unsigned u;
    memcpy(&u, &f, 4);
    return u;
}
static int __float2int_rn(float f) { return (int)std::nearbyint(f); }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdividef(float a, float b) { return a / b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __frcp_rn(float a) { return 1 / a; }
static float rsqrtf(float a) { return 1 / std::sqrt(a); }
#define __expf(a) std::exp((float)(a))
static unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    unsigned long long both = (unsigned long long)y << 32 | x;
    unsigned v = 0;
    for (int i = 0; i < 4; i++) {
        if (selector >> 4 * i & 8) fault("a byte's sign");
        v |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    }
    return v;
}
static float of_bf16(unsigned h) { return __uint_as_float(h << 16); }
static unsigned as_bf16(double v) {
    unsigned u = __float_as_uint((float)v);
    return (u & 0x7fffffff) > 0x7f800000 ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
static void cvt_bf16(unsigned short &h, float f) { h = as_bf16(f); }
static void cvt_bf16_pair(unsigned &y, float high, float low) { y = as_bf16(high) << 16 | as_bf16(low); }
static void cvt_from_f16(float &f, unsigned short h) {
    int e = h >> 10 & 31, m = h & 1023;
    float v = e == 31 ? (m ? NAN : INFINITY) : std::ldexp((float)(e ? m + 1024 : m), (e ? e : 1) - 25);
    f = h & 0x8000 ? -v : v;
}
static void cvt_f16(unsigned short &h, float f) {
    float v = std::fabs(f);
    int e = v > 0 && std::ilogb(v) > -14 ? std::ilogb(v) : -14;
    // The implicit one adds to the exponent, which is one less than it should be.
    h = (v < 65520 ? ((e + 14) << 10) + (int)std::nearbyint(std::ldexp(v, 10 - e)) : 0x7c00) | (std::signbit(f) ? 0x8000 : 0);
}
static void fma_bf16_pair(unsigned &y, unsigned a, unsigned b, unsigned c) {
    unsigned v = 0;
    for (int i = 0; i < 32; i += 16)
        v |= as_bf16((double)of_bf16(a >> i & 0xffff) * of_bf16(b >> i & 0xffff) + of_bf16(c >> i & 0xffff)) << i;
    y = v;
}
static void mma_bf16(float &d0, float &d1, float &d2, float &d3, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    unsigned mine[6] = {a0, a1, a2, a3, b0, b1}, lane = now % 32, (*all)[6] = of_all(mine, 6);
    float *d[4] = {&d0, &d1, &d2, &d3};
    for (unsigned i = 0; i < 4; i++) {
        unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        double sum = *d[i];
        for (unsigned k = 0; k < 16; k++) {
            unsigned a = all[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], b = all[column * 4 + k % 8 / 2][4 + k / 8];
            sum += (double)of_bf16(a >> 16 * (k % 2) & 0xffff) * of_bf16(b >> 16 * (k % 2) & 0xffff);
        }
        *d[i] = (float)sum;
    }
}

// ---- memory ---- Shared: what the launch asked for, from an address that is no zero. Weights: `lent` bytes.
alignas(128) static unsigned char memory[232448];
static unsigned asked;
static const unsigned char *weight;
static unsigned long long lent;
enum { SHARED_AT = 0x01000400 };
static unsigned long long __cvta_generic_to_shared(const void *p) { return SHARED_AT + ((const unsigned char *)p - memory); }
static unsigned *shared(unsigned at, unsigned size) {
    at -= SHARED_AT;
    if (at % size || at + size > asked) fault("shared memory that it does not have");
    return (unsigned *)(memory + at);
}
static const unsigned *global(const unsigned char *from, unsigned size) {
    unsigned long long at = from - weight;
    if (at % size || at + size > lent) fault("bytes behind the weight");
    return (const unsigned *)from;
}
static void load_shared2(unsigned &a, unsigned &b, unsigned at) { a = shared(at, 8)[0], b = shared(at, 8)[1]; }
static void load_shared4(unsigned &a, unsigned &b, unsigned &c, unsigned &d, unsigned at) {
    const unsigned *p = shared(at, 16);
    a = p[0], b = p[1], c = p[2], d = p[3];
}
static void load_shared4_if(unsigned &a, unsigned &b, unsigned &c, unsigned &d, unsigned at, unsigned have, unsigned want) {
    if (have == want) load_shared4(a, b, c, d, at);
}
static void store_shared2(unsigned at, unsigned a, unsigned b) { shared(at, 8)[0] = a, shared(at, 8)[1] = b; }
static void store_shared_twice(unsigned at, unsigned a, unsigned b) { store_shared2(at, a, b), store_shared2(at + 8, a, b); }
static void load_global(unsigned &a, const unsigned char *from) { a = *global(from, 4); }
static void load_global4(unsigned &a, unsigned &b, unsigned &c, unsigned &d, const unsigned char *from) {
    const unsigned *p = global(from, 16);
    a = p[0], b = p[1], c = p[2], d = p[3];
}

// ---- launches ----
static void (*kernel)();
static void run_thread() {
    kernel();
    threads[now].done = true;
    swapcontext(&threads[now].at, &scheduler);
}
static void launch(unsigned blocks, unsigned count, void (*each)()) {
    std::vector<char> stacks((size_t)count << 16);
    kernel = each;
    for (unsigned b = 0; b < blocks; b++) {
        blockIdx = {b, 0, 0}, blockDim = {count, 1, 1};
        memset(memory, 0xff, sizeof memory); // not a number
        threads.assign(count, Thread()), warps.assign(count / 32, Warp()), at_barrier = barriers = 0;
        for (unsigned i = 0; i < count; i++) {
            getcontext(&threads[i].at);
            threads[i].at.uc_stack.ss_sp = &stacks[(size_t)i << 16], threads[i].at.uc_stack.ss_size = 1 << 16;
            makecontext(&threads[i].at, run_thread, 0);
        }
        for (unsigned left = count, rounds = 0; left; rounds++) {
            if (rounds > 10000000) fault("threads that wait for ever");
            left = 0;
            for (unsigned i = 0; i < count; i++) {
                now = i;
                if (!threads[i].done) swapcontext(&scheduler, &threads[i].at), left += !threads[i].done;
            }
        }
    }
}
