// What fills the stages of a chain, in any of its layouts. The entry says before: Barriers, values_at, STAGES, STAGE.
#pragma once
#include "vector/rows.cuh"

// By one thread: copies of tiles into the stages
struct Loader {
    const VectorArguments& a;
    const ChunkTraversal& traversal;
    u32 shared;
    Barriers bar;
    __device__ __forceinline__ void tokens(int step) const {   // q, k and g
        const int s = step % STAGES, token = traversal.token(traversal.first + step), head = traversal.head, row = traversal.row;
        const u32 at = shared + s * STAGE, full = bar.full(s);
        barrier_expect(full, STAGE);
        gates_in(at + 2 * Tokens::SIZE, a.g, full, (u32)head / (u32)a.group_g, token, row);
        tile_in(at + Tokens::SIZE, a.k, full, (u32)head / (u32)a.group_k, token, row);
        tile_in(at, a.q, full, (u32)head / (u32)a.group_q, token, row);
    }
    __device__ __forceinline__ void values(int step) const {
        const u32 full = bar.values(step & 1);
        barrier_expect(full, Tokens::SIZE);
        tile_in(values_at(shared, step), a.v, full, (u32)traversal.head / (u32)a.group_v, traversal.token(traversal.first + step), traversal.row);
    }
    __device__ __forceinline__ void begin() const {
        for (int step = 0; step < STAGES && step < traversal.steps; step++) tokens(step);
        for (int step = 0; step < 2 && step < traversal.steps; step++) values(step);
    }
    // waits for all copies on their way, where nothing from `step` on is read: up to the steps `tokens` and `values`
    __device__ __forceinline__ void end(int step, int tokens, int values) const {
        for (int n = step; n <= tokens && n < traversal.steps; n++) barrier_wait(bar.full(n % STAGES), n / STAGES & 1);
        for (int n = step; n <= values && n < traversal.steps; n++) barrier_wait(bar.values(n & 1), n >> 1 & 1);
    }
    __device__ __forceinline__ void next(int step) const {   // once step has been left
        if (step + STAGES < traversal.steps) tokens(step + STAGES);
        if (step + 2 < traversal.steps) values(step + 2);
    }
};
