// The producer of a chain's stages, in any of its layouts. The entry says before: Barriers, values_at, STAGES, STAGE.
#pragma once
#include "vector/rows.cuh"

// By one thread: copies of tiles into the stages
struct Loader {
    const VectorArguments& a;
    const ChunkTraversal& traversal;
    u32 shared;
    Barriers bar;
    // heads of q, k, g, v: divided once
    __device__ __forceinline__ void store_heads() const {
        const u32 head = traversal.head;
        store_word(shared + AT_HEADS, head / (u32)a.group_q);
        store_word(shared + AT_HEADS + 4, head / (u32)a.group_k);
        store_word(shared + AT_HEADS + 8, head / (u32)a.group_g);
        store_word(shared + AT_HEADS + 12, head / (u32)a.group_v);
    }
    __device__ __forceinline__ int head(int n) const { return load_word(shared + AT_HEADS + 4 * n); }
    __device__ __forceinline__ void tokens(int step) const { tokens(step, bar.full(step % STAGES)); }   // q, k and g
    __device__ __forceinline__ void tokens(int step, u32 full) const {
        const int token = traversal.token(traversal.first + step), row = traversal.row;
        const u32 at = shared + step % STAGES * STAGE;
        barrier_expect(full, STAGE);
        gates_in(at + 2 * Tokens::SIZE, a.g, full, head(2), token, row);
        tile_in(at + Tokens::SIZE, a.k, full, head(1), token, row);
        tile_in(at, a.q, full, head(0), token, row);
    }
    __device__ __forceinline__ void values(int step) const {
        const u32 full = bar.values(step & 1);
        barrier_expect(full, Tokens::SIZE);
        tile_in(values_at(shared, step), a.v, full, head(3), traversal.token(traversal.first + step), traversal.row);
    }
    __device__ __forceinline__ void begin() const {
        store_heads();
        for (int step = 0; step < STAGES && step < traversal.steps; step++) tokens(step);
        for (int step = 0; step < 2 && step < traversal.steps; step++) values(step);
    }
};
