// Barriers in shared memory (8 bytes each), for producers that fill a ring of stages and their consumers (sm_90).
//
// A barrier's phases are numbered by parity: 0, 1, 0, ...; each ends when `count` arrivals have come. Waiting for
// parity 1 of a new barrier returns at once: an empty ring is free.
#pragma once
#include "tile/types.cuh"

LA_DEVICE void barrier_init(u32 a, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(a), "r"(count) : "memory");
}
LA_DEVICE void barrier_arrive(u32 a) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(a) : "memory"); }
// arrives once all cp.async of this thread so far are there
LA_DEVICE void barrier_arrive_copied(u32 a) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(a) : "memory");
}
LA_DEVICE void barrier_wait(u32 a, int parity) {
    asm volatile(
        "{ .reg .pred p;\n"
        "again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
        "@!p bra again; }" ::"r"(a),
        "r"(parity)
        : "memory");
}
// Arrivals that a warp makes: one, of its first lane, which speaks for all lanes after __syncwarp. Or one of every
// lane: compute-sanitizer's racecheck looks at single threads, and sees only so that the others had come
// (tests/cuda/sanitized.py).
#ifndef LA_ARRIVALS
#define LA_ARRIVALS 1
#endif
constexpr int ARRIVALS = LA_ARRIVALS;
LA_DEVICE void warp_arrive(u32 a, int lane) {
    __syncwarp();
    if (ARRIVALS > 1 || lane == 0) barrier_arrive(a);
}
// registers a thread of this warpgroup may have from here on
template <int N> LA_DEVICE void release_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> LA_DEVICE void claim_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

// A ring of STAGES at `base`: a barrier `full` and a barrier `empty` each. Step n uses stage n % STAGES.
template <int STAGES> struct Ring {
    static constexpr int BYTES = 16 * STAGES;
    u32 base;
    __device__ __forceinline__ void init(int producers,
                                         int consumers) const {   // arrivals that make a stage full, and empty
        for (int s = 0; s < STAGES; s++) {
            barrier_init(base + s * 16, producers);
            barrier_init(base + s * 16 + 8, consumers);
        }
    }
    __device__ __forceinline__ u32 full(int step) const { return base + step % STAGES * 16; }
    __device__ __forceinline__ u32 empty(int step) const { return full(step) + 8; }
    __device__ __forceinline__ void wait_full(int step) const { barrier_wait(full(step), step / STAGES & 1); }
    __device__ __forceinline__ void wait_empty(int step) const { barrier_wait(empty(step), (step / STAGES & 1) ^ 1); }
    // of a thread whose copies and stores make up its share of a stage: two arrivals
    __device__ __forceinline__ void arrive_full(int step) const {
        barrier_arrive_copied(full(step));
        barrier_arrive(full(step));
    }
    // of a thread that has read all that it needs: one arrival
    __device__ __forceinline__ void arrive_empty(int step) const { barrier_arrive(empty(step)); }
};
