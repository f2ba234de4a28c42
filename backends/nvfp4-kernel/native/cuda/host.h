// As much of CUDA C++ as lets a compiler for CPUs run kernels whose threads do not wait for each other: for tests. Floats of 16
// bits are not converted.
#include <cmath>
#include <cstddef>
#include <cstring>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define asm(...)
static thread_local struct Index {
    unsigned x, y, z;
} blockIdx, threadIdx;

template <class A, class B> auto min(A a, B b) { return std::common_type_t<A, B>(a) < std::common_type_t<A, B>(b) ? a : b; }
template <class A, class B> auto max(A a, B b) { return std::common_type_t<A, B>(a) > std::common_type_t<A, B>(b) ? a : b; }
template <class T> void atomicMin(T *at, T v) { *at = min(*at, v); }
template <class T> void atomicMax(T *at, T v) { *at = max(*at, v); }
template <class T> T __shfl_xor_sync(unsigned, T v, int) { return v; }
static void __syncthreads() {}
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
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fadd_rn(float a, float b) { return a + b; }
static unsigned __clz(unsigned v) { return v ? __builtin_clz(v) : 32; }

template <class... A, size_t... I> void call(void (*kernel)(A...), void **args, std::index_sequence<I...>) {
    kernel(*(A *)args[I]...);
}
// `how`: three dimensions of the grid, three of a block; `args` as for cuLaunchKernel.
template <class... A> void run(void (*kernel)(A...), const unsigned *how, void **args) {
    for (unsigned i = 0; i < how[0] * how[1] * how[2]; i++) {
        blockIdx = {i % how[0], i / how[0] % how[1], i / how[0] / how[1]};
        for (unsigned j = 0; j < how[3] * how[4] * how[5]; j++) {
            threadIdx = {j % how[3], j / how[3] % how[4], j / how[3] / how[4]};
            call(kernel, args, std::index_sequence_for<A...>());
        }
    }
}
#define RUN(name) \
    extern "C" void run_##name(const unsigned *how, void **args) { run(name, how, args); }
