// What gemm.cu asks of a cluster and of its barriers.
#include "hopper.cuh"

// A box of x to the blocks of `mask`.
DEVICE void copy_in(u32 to, const Map *map, int k, int token, u32 barrier, int mask) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(k), "r"(token), "r"(barrier), "h"((u16)mask)
        : "memory");
}
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
