// Shared by the chain of the delta rule and its reverse: the ring of stages, its barriers, and the warpgroup that
// produces them.
#pragma once
#include "attention/delta.cuh"
#include "attention/store.cuh"

constexpr int STAGES = 3;
// a stage: k, q, v (in reverse dO), A, P; then e, d, b of the chunk
constexpr int AT_K = 0, AT_Q = AT_K + Tokens::SIZE, AT_V = AT_Q + Tokens::SIZE, AT_A = AT_V + Tokens::SIZE,
              AT_P = AT_A + Square::SIZE;
constexpr int AT_SUMS = AT_P + Square::SIZE, STAGE = AT_SUMS + 1024, SUMS = 3 * C * 4;

struct Barriers {   // of stage s: full, empty, P made
    u32 base;
    __device__ __forceinline__ u32 full(int s) const { return base + s * 24; }
    __device__ __forceinline__ u32 empty(int s) const { return base + s * 24 + 8; }
    __device__ __forceinline__ u32 gram(int s) const { return base + s * 24 + 16; }
    __device__ __forceinline__ void init() const {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full(s), 1);
            barrier_init(empty(s), 8 * ARRIVALS);
            barrier_init(gram(s), 4 * ARRIVALS);
        }
        barriers_made();
    }
};

// Tiles and checkpoints of a segment's chunks into the ring, two chunks ahead, and P of each; REVERSE: from the last
// chunk on, with dO for v, and 1 / |q| to the checkpoint.
template <bool REVERSE> LA_DEVICE void producer(const DeltaArguments& a, const DeltaTraversal& traversal,
                                                unsigned char* memory, u32 shared, Barriers bar, int thread) {
    const int warp = thread >> 5, lane = thread & 31;
    const int first = REVERSE ? traversal.first + traversal.steps - 1 : traversal.first;   // chunk
    const int q_head = (u32)traversal.head / (u32)a.group_q, k_head = (u32)traversal.head / (u32)a.group_k;
    const int v_head = REVERSE ? 0 : (u32)traversal.head / (u32)a.group_v;
    for (int step = -2; step < traversal.steps; step++) {
        if (step >= 0) {
            const int s = step % STAGES, own = traversal.own(a, REVERSE ? first - step : first + step);
            const u32 at = shared + s * STAGE;
            barrier_wait(bar.full(s), step / STAGES & 1);
            if (own < C) {
                clear_rows<128, 6>(at, own, thread);
                publish_shared();
                group_barrier(2);
            }
            gram_of_chunk<REVERSE>(
                at + AT_Q, at + AT_K, at + AT_P, (float*)(memory + s * STAGE + AT_SUMS) + 2 * C, a, warp, lane,
                a.checkpoints +
                    (REVERSE ? traversal.block + first - step : traversal.block + first + step) * CHECKPOINT);
            publish_shared();
            warp_arrive(bar.gram(s), lane);
        }
        const int ahead = step + 2, chunk = REVERSE ? first - ahead : first + ahead;
        if (thread == 0 && ahead < traversal.steps) {
            const int s = ahead % STAGES, token = traversal.token(chunk);
            const u32 at = shared + s * STAGE, full = bar.full(s);
            const char* block = a.checkpoints + (traversal.block + chunk) * CHECKPOINT;
            if (ahead >= STAGES) barrier_wait(bar.empty(s), (ahead / STAGES - 1) & 1);
            barrier_expect(full, 3 * Tokens::SIZE + Square::SIZE + SUMS);
            tile_in(at + AT_K, a.k, full, k_head, token, traversal.row);
            token_tile_in(at + AT_Q, a.q, full, q_head, token, traversal.row);
            run_in(at + AT_A, block, Square::SIZE, full);
            run_in(at + AT_SUMS, block + AT_E, SUMS, full);
            if (REVERSE) token_tile_in(at + AT_V, a.dout, full, traversal.head, token, traversal.row);
            else tile_in(at + AT_V, a.v, full, v_head, token, traversal.row);
        }
        __syncwarp();
    }
}
