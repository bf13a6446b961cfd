// Blocks of a cluster (sm_90): they run at the same time and reach each other's shared memory and barriers. One copy of the
// engine can fill the same places of several of them and counts at the same barrier of each.
#pragma once
#include "tile/bulk.cuh"

// waits for all blocks of the cluster that have not ended; what they wrote to shared memory is seen
LA_DEVICE void cluster_barrier() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// arrives at the barrier in the same place of block `rank`
LA_DEVICE void barrier_arrive_at(u32 a, int rank) {
    asm volatile("{ .reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there]; }" ::"r"(a), "r"(rank) : "memory");
}
// as in bulk.cuh, to the blocks whose bits are set
LA_DEVICE void box_to(u32 to, const TensorMap& map, u32 barrier, int column, int head, int token, int batch, int blocks) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
                 ::"r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(head), "r"(token), "r"(batch), "h"((u16)blocks) : "memory");
}
LA_DEVICE void run_to(u32 to, const void* from, u32 bytes, u32 barrier, int blocks) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"((u16)blocks) : "memory");
}
