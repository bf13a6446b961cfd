// A chunk of a head, as the gradients number them.
#pragma once
#include "free/factors.cuh"
#include "arguments/matrix_state/FreeGradArguments.cuh"   // after TensorMap

struct ChunkPlace {
    ChunkTraversal of;
    __device__ __forceinline__ ChunkPlace(const FreeGradArguments& a, int item) : of(a, a.chunks, 1, item) {}
    __device__ __forceinline__ i64 stored() const { return of.stored + of.segment; }
    __device__ __forceinline__ int count() const { return of.count(of.segment); }
};
