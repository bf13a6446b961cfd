// Where SPLIT warps leave their parts of a sum, PER a lane, and find those of the others: one barrier a sum.
//
// Two places in turn. Who writes to one again has passed the barrier of the other, which nobody reached before he had read.
#pragma once
#include "tile/types.cuh"

template <int PER> struct alignas(4 * PER) Part { float x[PER]; };
template <int SPLIT, int PER> struct Meeting {
    typedef ::Part<PER> Part;
    Part (*place)[SPLIT][32];      // of two
    int warp, barrier, turn;       // of the SPLIT; number of the barrier; the place to write to
    // x: the sum over the warps, in all of them or, without ALL, in the first
    template <bool ALL> __device__ __forceinline__ void sum(float (&x)[PER], int lane) {
        Part mine, other[SPLIT];
#pragma unroll
        for (int j = 0; j < PER; j++) mine.x[j] = x[j];
        place[turn][warp][lane] = mine;
        asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(32 * SPLIT) : "memory");
        if (ALL || warp == 0) {
#pragma unroll
            for (int w = 0; w < SPLIT; w++) other[w] = place[turn][w][lane];
#pragma unroll
            for (int d = SPLIT / 2; d; d >>= 1)
#pragma unroll
                for (int w = 0; w < d; w++)
#pragma unroll
                    for (int j = 0; j < PER; j++) other[w].x[j] += other[w + d].x[j];
#pragma unroll
            for (int j = 0; j < PER; j++) x[j] = other[0].x[j];
        }
        turn ^= 1;
    }
};

template <int PER> struct Meeting<1, PER> {       // a warp alone
    typedef ::Part<PER> Part;
    Part (*place)[1][32];
    int warp, barrier, turn;       // 0
    template <bool ALL> __device__ __forceinline__ void sum(float (&)[PER], int) {}
};
