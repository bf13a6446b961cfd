// What the portable chain of the delta rule and its reverse share: the layout of shared memory and the loads of a chunk. The entry
// says before: READS, whether queries are read; OVER_BETA, whether outputs are also divided by beta, which then comes along.
#pragma once
#include "attention/chunk_state.cuh"
#include "attention/delta_scan.cuh"

constexpr int C = LA_C, K = LA_K, V = LA_V, WARPS = LA_WARPS, TILES = LA_TILES, STAGES = LA_STAGES, THREADS = 32 * WARPS;
constexpr bool ADDS = LA_OUTPUTS == 2;
constexpr int KP = round_up(K, 16), VP = round_up(V, 16), VB = 16 * TILES * WARPS, PARTS = (V + VB - 1) / VB;
typedef Tile<KP, Element::BYTES> Keys;
typedef Tile<VB, Element::BYTES> Values;
typedef Tile<C, Element::GRAM_BYTES> Gram;
// a stage: k, v (in reverse dO), A, log decays and betas, r; then the queries, P, sums of decays of each warp
constexpr int AT_V = C * Keys::ROW, AT_A = AT_V + C * Values::ROW, AT_G = AT_A + C * Gram::ROW, AT_R = AT_G + (1 + OVER_BETA) * C * 4;
constexpr int STAGE = AT_R + LA_SEPARATE_ERASE_KEY * C * Keys::ROW, AT_Q = STAGES * STAGE;
constexpr int QUERY_BUFFERS = LA_QUERY_BUFFERS;   // STAGES, or 1: queries come late
constexpr int AT_GRAM = AT_Q + READS * QUERY_BUFFERS * C * Keys::ROW, AT_DECAY = AT_GRAM + READS * C * Gram::ROW;
static_assert(LA_SHARED == AT_DECAY + WARPS * Decay<C>::FLOATS * 4, "LA_SHARED is what the launch asks for");

// the state before a chunk, in reverse its gradient after it, for the gradients
LA_DEVICE void store_chunk_state(const StateRows<TILES, KP>& S, char* to, int row, int lane) {
#pragma unroll
    for (int m = 0; m < TILES; m++)
        if (row + 16 * m < VP) ChunkState<VP, KP>::store<Element>(to, S.x[m], row + 16 * m, lane);
}
