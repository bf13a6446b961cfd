// Cross-warp reduction: SPLIT warps store their parts of a sum, PER a lane, and load the parts of the others, with one
// barrier a sum.
//
// Two buffers in turn: a warp that writes to one again has passed the barrier of the other, which no warp reaches
// before it has read the first.
#pragma once
#include "tile/types.cuh"

template <int PER> struct alignas(4 * PER) Part {
    float x[PER];
};
template <int SPLIT, int PER> struct CrossWarpSum {
    typedef ::Part<PER> Part;
    Part (*buffer)[SPLIT][32];   // of two
    int warp, barrier, phase;    // of the SPLIT; number of the barrier; the buffer to write to
    // x: the sum over the warps, in all of them or, without ALL, in the first
    template <bool ALL> __device__ __forceinline__ void sum(float (&x)[PER], int lane) {
        Part partial, other[SPLIT];
#pragma unroll
        for (int j = 0; j < PER; j++) partial.x[j] = x[j];
        buffer[phase][warp][lane] = partial;
        asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(32 * SPLIT) : "memory");
        if (ALL || warp == 0) {
#pragma unroll
            for (int w = 0; w < SPLIT; w++) other[w] = buffer[phase][w][lane];
#pragma unroll
            for (int d = SPLIT / 2; d; d >>= 1)
#pragma unroll
                for (int w = 0; w < d; w++)
#pragma unroll
                    for (int j = 0; j < PER; j++) other[w].x[j] += other[w + d].x[j];
#pragma unroll
            for (int j = 0; j < PER; j++) x[j] = other[0].x[j];
        }
        phase ^= 1;
    }
};

template <int PER> struct CrossWarpSum<1, PER> {   // a warp alone
    typedef ::Part<PER> Part;
    Part (*buffer)[1][32];
    int warp, barrier, phase;   // 0
    template <bool ALL> __device__ __forceinline__ void sum(float (&)[PER], int) {}
};
