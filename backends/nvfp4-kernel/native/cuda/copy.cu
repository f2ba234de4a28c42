// Barriers in shared memory, and what the copy engine of sm_90 brings there and takes away. Needs elements.cu before it.

DEVICE void barrier_init(u32 at, u32 count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(count)); }
// An address in block `rank` of the cluster.
DEVICE u32 address_in(u32 at, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}
// For those who `may`: without a branch, which products must not run across.
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
// A box of x to the blocks of `mask`.
DEVICE void copy_in(u32 to, const Map *map, int k, int token, u32 barrier, int mask) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(k), "r"(token), "r"(barrier), "h"((u16)mask)
        : "memory");
}
// Packed weights: a unit of each row group of the box.
DEVICE void copy_units(u32 to, const Map *map, int unit, int group, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {0, %2, %3}], [%4];" ::"r"(to), "l"(map), "r"(unit),
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
DEVICE void meet(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
// Blocks of a cluster start together; barriers are seen by a fence of their own.
DEVICE void meet_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEVICE uint4 read4(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
DEVICE u32 read1(u32 at) {
    u32 v;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}
