// What kernels of sm_90a ask of tensor cores, the copy engine and barriers in shared memory. Definition,
// where there are products: TN, rows of x of a tile (32, 64, 128, 176 or 256).
#include "launch.cuh"
#include "unit.cuh"

DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE void barrier_init(u32 at, u32 count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(count)); }
// An address in block `rank` of the cluster.
DEVICE u32 address_in(u32 at, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}
// Of this block or another of the cluster, for those who `may`: without a branch, which products must not run
// across.
DEVICE void barrier_arrive_there(u32 there, bool may) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; @p mbarrier.arrive.shared::cluster.b64 _, [%0];}" ::"r"(there), "r"((u32)may) : "memory");
}
DEVICE void barrier_arrive_if(u32 at, bool may) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; @p mbarrier.arrive.shared.b64 _, [%0];}" ::"r"(at), "r"((u32)may) : "memory");
}
DEVICE void barrier_expect(u32 at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(u32 at, u32 phase) {
    asm volatile(
        "{.reg .pred p; AGAIN: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @p bra PASSED; bra AGAIN; PASSED: }" ::"r"(at), "r"(phase)
        : "memory");
}
struct alignas(64) Map {
    u64 words[16];
};
DEVICE void expect_map(const Map *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
// Packed weights: a unit of each row group of the box, in boxes of 8-byte words, of which an axis has 256 at
// most.
DEVICE void copy_units(u32 to, const Map *map, int unit, int group, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {0, %2, %3}], [%4];" ::"r"(to), "l"(map), "r"(unit * OF_EIGHT),
                 "r"(group), "r"(barrier)
                 : "memory");
}
DEVICE void copy_bytes(u32 to, const void *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
// Four numbers to another block's memory, and their bytes to a barrier there.
DEVICE void send4(u32 there, u32 barrier, const float *v) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(there), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]),
                 "r"(barrier)
                 : "memory");
}
DEVICE void send1(u32 there, u32 barrier, u32 v) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(there), "r"(v), "r"(barrier) : "memory");
}
DEVICE void meet(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
// Four matrices of 8 by 8, transposed; lane 8 i + j says where row j of the `i`th goes.
DEVICE void store4(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

#ifdef TN
#define ALL4(b) "+f"(d[b]), "+f"(d[b + 1]), "+f"(d[b + 2]), "+f"(d[b + 3])
#define ALL16(b) ALL4(b), ALL4(b + 4), ALL4(b + 8), ALL4(b + 12)
#define TO32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define TO64 TO32 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define TO128 TO64 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define TO176 TO128 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
    "%80,%81,%82,%83,%84,%85,%86,%87"
#define TO256 TO128 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
    "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95," \
    "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
    "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#if TN == 32
#define SUMS_OF ALL16(0)
#define OPERANDS TO32 "}, {%16,%17,%18,%19}, %20, p"
#define ADDS "%21"
#define OPERANDS_IN_SHARED TO32 "}, %16, %17, p"
#define ADDS_IN_SHARED "%18"
#elif TN == 64
#define SUMS_OF ALL16(0), ALL16(16)
#define OPERANDS TO64 "}, {%32,%33,%34,%35}, %36, p"
#define ADDS "%37"
#define OPERANDS_IN_SHARED TO64 "}, %32, %33, p"
#define ADDS_IN_SHARED "%34"
#elif TN == 128
#define SUMS_OF ALL16(0), ALL16(16), ALL16(32), ALL16(48)
#define OPERANDS TO128 "}, {%64,%65,%66,%67}, %68, p"
#define ADDS "%69"
#define OPERANDS_IN_SHARED TO128 "}, %64, %65, p"
#define ADDS_IN_SHARED "%66"
#elif TN == 176
#define SUMS_OF ALL16(0), ALL16(16), ALL16(32), ALL16(48), ALL16(64), ALL4(80), ALL4(84)
#define OPERANDS TO176 "}, {%88,%89,%90,%91}, %92, p"
#define ADDS "%93"
#define OPERANDS_IN_SHARED TO176 "}, %88, %89, p"
#define ADDS_IN_SHARED "%90"
#else
#define SUMS_OF ALL16(0), ALL16(16), ALL16(32), ALL16(48), ALL16(64), ALL16(80), ALL16(96), ALL16(112)
#define OPERANDS TO256 "}, {%128,%129,%130,%131}, %132, p"
#define ADDS "%133"
#define OPERANDS_IN_SHARED TO256 "}, %128, %129, p"
#define ADDS_IN_SHARED "%130"
#endif
#define TEXT_OF(n) #n
#define SIZE_OF(n, k) "m64n" TEXT_OF(n) "k" TEXT_OF(k)
#define PRODUCT(TYPE) \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " ADDS ", 0; wgmma.mma_async.sync.aligned." SIZE_OF(TN, 16) ".f32." TYPE "." TYPE " {" OPERANDS ", 1, 1, 0;}" \
                 : SUMS_OF : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
constexpr int SUMS = TN / 2; // of a thread
// d += a b, 64 x TN x 16: `a` in registers, `b` a descriptor of shared memory. add = 0: d = a b.
DEVICE void product_bf16(float (&d)[SUMS], const u32 (&a)[4], u64 b, int add) { PRODUCT("bf16"); }
DEVICE void product_f16(float (&d)[SUMS], const u32 (&a)[4], u64 b, int add) { PRODUCT("f16"); }
// d += a b, 64 x TN x 32: both descriptors of shared memory.
DEVICE void product_e4m3(float (&d)[SUMS], u64 a, u64 b, int add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, " ADDS_IN_SHARED ", 0; wgmma.mma_async.sync.aligned." SIZE_OF(TN, 32) ".f32.e4m3.e4m3 {" OPERANDS_IN_SHARED ", 1, 1;}" \
                 : SUMS_OF : "l"(a), "l"(b), "r"(add));
}

DEVICE void open_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void close_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEVICE void wait_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// All of them, and the compiler reads no sum before that.
DEVICE void finish_products(float (&d)[SUMS]) {
    wait_products<0>();
#pragma unroll
    for (int i = 0; i < SUMS; i++) asm volatile("" : "+f"(d[i])::"memory");
}
// A tile of lines of 128 bytes, swizzled, as products take it.
DEVICE u64 tile_at(u32 at) { return (u64)(at >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62; }
// The same of lines of 64 bytes.
DEVICE u64 narrow_tile_at(u32 at) { return (u64)(at >> 4) | (u64)1 << 16 | (u64)32 << 32 | (u64)2 << 62; }
// N sums of each of THREADS threads on their way to another block, three bytes each: the 24 leading bits, so
// less than 2^-15 of one is cut off. A thread's words lie four by four beside those of the others, the last
// ones one by one.
template <int N, int THREADS> struct Short {
    static constexpr int WORDS = N / 4 * 3, FOURS = WORDS / 4 * 4, BYTES = WORDS * THREADS * 4;
    static_assert(N % 4 == 0, "four sums are three words");
    DEVICE u32 four(u32 base, u32 thread, int i) { return base + (i / 4 * THREADS + thread) * 16; }
    DEVICE u32 one(u32 base, u32 thread, int i) { return base + (i * THREADS + thread) * 4; }
    DEVICE void send_all(const float *d, u32 there, u32 barrier, u32 thread) {
        u32 w[WORDS];
#pragma unroll
        for (int i = 0, j = 0; i < WORDS; i += 3, j += 4) {
            u32 a = __float_as_uint(d[j]), b = __float_as_uint(d[j + 1]), c = __float_as_uint(d[j + 2]), e = __float_as_uint(d[j + 3]);
            w[i] = __byte_perm(a, b, 0x5321), w[i + 1] = __byte_perm(b, c, 0x6532), w[i + 2] = __byte_perm(c, e, 0x7653);
        }
#pragma unroll
        for (int i = 0; i < FOURS; i += 4) send4(four(there, thread, i), barrier, (const float *)w + i);
#pragma unroll
        for (int i = FOURS; i < WORDS; i++) send1(one(there, thread, i), barrier, w[i]);
    }
    DEVICE void add_all(float *d, u32 here, u32 thread) {
        u32 w[WORDS];
#pragma unroll
        for (int i = 0; i < FOURS; i += 4)
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[i]), "=r"(w[i + 1]), "=r"(w[i + 2]), "=r"(w[i + 3]) : "r"(four(here, thread, i)) : "memory");
#pragma unroll
        for (int i = FOURS; i < WORDS; i++) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w[i]) : "r"(one(here, thread, i)) : "memory");
#pragma unroll
        for (int i = 0, j = 0; i < WORDS; i += 3, j += 4) {
            d[j] += __uint_as_float(w[i] << 8), d[j + 1] += __uint_as_float(__byte_perm(w[i], w[i + 1], 0x5430) & ~0xffu);
            d[j + 2] += __uint_as_float(__byte_perm(w[i + 1], w[i + 2], 0x4320) & ~0xffu), d[j + 3] += __uint_as_float(w[i + 2] & ~0xffu);
        }
    }
};
#endif
