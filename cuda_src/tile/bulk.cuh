// Bulk copies by the copy engine (sm_90): boxes of a tensor described by a tensor map, and runs of bytes, issued by one
// thread. Copies in are counted by a barrier; copies out belong to the bulk groups of the issuing thread.
#pragma once
#include "tile/barrier.cuh"

struct __align__(64) TensorMap {
    u64 words[16];
};   // the driver's own; linattn_np/runtime/cuda/tensor_map.py

// barriers that were initialised become visible to the engine; a block's barrier must follow
LA_DEVICE void barriers_made() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
// one arrival, and so many bytes that a phase waits for
LA_DEVICE void barrier_expect(u32 a, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(a), "r"(bytes) : "memory");
}

// 64 columns of 64 tokens of one head; zeros outside the tensor
LA_DEVICE void box_in(u32 to, const TensorMap& map, u32 barrier, int column, int head, int token, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::
            "r"(to),
        "l"(&map), "r"(barrier), "r"(column), "r"(head), "r"(token), "r"(batch)
        : "memory");
}
// the same of data that are read once: the first to be replaced in the L2 cache
LA_DEVICE void box_in_once(u32 to, const TensorMap& map, u32 barrier, int column, int head, int token, int batch) {
    asm volatile(
        "{ .reg .b64 first;\n"
        "createpolicy.fractional.L2::evict_first.b64 first, 1.0;\n"
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], first; }" ::
            "r"(to),
        "l"(&map), "r"(barrier), "r"(column), "r"(head), "r"(token), "r"(batch)
        : "memory");
}
// nothing is written outside the tensor
LA_DEVICE void box_out(const TensorMap& map, u32 from, int column, int head, int token, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
                 "r"(from), "r"(column), "r"(head), "r"(token), "r"(batch)
                 : "memory");
}
// the same of a map with an axis of steps between heads and tokens (tensor_map.py): zeros for all but the last of `steps`
LA_DEVICE void box_in_steps(u32 to, const TensorMap& map, u32 barrier, int column, int head, int steps, int token,
                            int batch) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::
            "r"(to),
        "l"(&map), "r"(barrier), "r"(column), "r"(head), "r"(1 - steps), "r"(token / steps), "r"(batch)
        : "memory");
}
LA_DEVICE void run_in(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
LA_DEVICE void run_prefetch(const void* from, u32 bytes) {   // into the L2 cache
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
LA_DEVICE void run_out(void* to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}
LA_DEVICE void run_add(void* to, u32 from, u32 bytes) {   // of float32, added in memory
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}
LA_DEVICE void out_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
LA_DEVICE void out_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}   // their shared memory is free again
LA_DEVICE void out_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }   // they are in global memory

// The four 8 x 8 blocks of 16-bit elements whose row addresses the lanes provide, from registers as load_matrix has them
LA_DEVICE void store_matrix(u32 a, u32 x0, u32 x1, u32 x2, u32 x3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(x0), "r"(x1), "r"(x2),
                 "r"(x3)
                 : "memory");
}
