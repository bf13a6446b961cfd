// Shared by the portable chain of the delta rule and its reverse: the layout of shared memory and the loads of a
// chunk. The entry says before: READS, whether queries are read; OVER_BETA, whether outputs are also divided by beta,
// which then comes along.
#pragma once
#include "attention/chunk_state.cuh"
#include "attention/delta_scan.cuh"

constexpr int C = LA_C, K = LA_K, V = LA_V, WARPS = LA_WARPS, TILES = LA_TILES, STAGES = LA_STAGES,
              THREADS = 32 * WARPS;
constexpr bool ADDS = LA_OUTPUTS == 2;
constexpr int KP = round_up(K, 16), VP = round_up(V, 16), VB = 16 * TILES * WARPS, PARTS = (V + VB - 1) / VB;
typedef Tile<KP, Element::BYTES> Keys;
typedef Tile<VB, Element::BYTES> Values;
typedef Tile<C, Element::GRAM_BYTES> Gram;
// a stage: k, v (in reverse dO), A, log decays and betas, r; then the queries, P, sums of decays of each warp
constexpr int AT_V = C * Keys::ROW, AT_A = AT_V + C * Values::ROW, AT_G = AT_A + C * Gram::ROW,
              AT_R = AT_G + (1 + OVER_BETA) * C * 4;
constexpr int STAGE = AT_R + LA_SEPARATE_ERASE_KEY * C * Keys::ROW, AT_Q = STAGES * STAGE;
constexpr int QUERY_BUFFERS = LA_QUERY_BUFFERS;   // STAGES, or 1: queries come late
constexpr int AT_GRAM = AT_Q + READS * QUERY_BUFFERS * C * Keys::ROW, AT_DECAY = AT_GRAM + READS * C * Gram::ROW;
static_assert(LA_SHARED == AT_DECAY + WARPS * Decay<C>::FLOATS * 4, "LA_SHARED is the size that the launch requests");

// A thread of a block that scans the chunks of a traversal; its warp has value rows of the state, or of its gradient
template <class W> struct ChunkScan {
    const DeltaScanArguments& a;
    const W& traversal;
    const u32 shared;
    const int thread, warp, row, column;   // row: first value row of the warp in the block; column: of the block in V
    int lane;
    const bool has_values;                  // false: rows of the identity, without values
    const char *q, *k, *v, *r, *inverses;   // inverses: of the first chunk; from the end there are no registers for it
    const float* g;
    const Decay<C> decay;

    __device__ __forceinline__ ChunkScan(const DeltaScanArguments& a, const W& traversal, u32 shared, int column,
                                         bool has_values)
        : a(a),
          traversal(traversal),
          shared(shared),
          thread(threadIdx.x),
          warp(thread >> 5),
          row(warp * 16 * TILES),
          column(column),
          lane(thread & 31),
          has_values(has_values),
          q(READS ? rows_of(a.q, traversal.sequence, traversal.head) : nullptr),
          k(rows_of(a.k, traversal.sequence, traversal.head)),
          v(rows_of(a.v, traversal.sequence, traversal.head)),
          r(LA_SEPARATE_ERASE_KEY ? rows_of(a.r, traversal.sequence, traversal.head) : nullptr),
          inverses(W::FROM_END ? nullptr
                               : inverse_of<C>(a, traversal.sequence, traversal.slot, traversal.head, traversal.first)),
          g(traversal.gates(a.g)),
          decay({shared + AT_DECAY + warp * Decay<C>::FLOATS * 4}) {}

    // places of a step's chunk in shared memory
    __device__ __forceinline__ u32 keys_at(int step) const { return shared + step % STAGES * STAGE; }
    __device__ __forceinline__ u32 erase_keys_at(int step) const {
        return keys_at(step) + (LA_SEPARATE_ERASE_KEY ? AT_R : 0);
    }
    __device__ __forceinline__ u32 values_at(int step) const { return keys_at(step) + AT_V; }
    __device__ __forceinline__ u32 queries_at(int step) const {
        return shared + AT_Q + step % QUERY_BUFFERS * C * Keys::ROW;
    }

    __device__ __forceinline__ const char* inverse_at(int step) const {
        if constexpr (W::FROM_END)
            return inverse_of<C>(a, traversal.sequence, traversal.slot, traversal.head, traversal.chunk_of(step));
        else return inverses + (i64)step * (C * C * Element::GRAM_BYTES);
    }
    __device__ __forceinline__ void load(int step) const {
        const u32 at = keys_at(step);
        const int token = traversal.token_of(step), T = traversal.sequence.T;
        load_rows<Keys, C, THREADS, K>(at, k, a.k.token, token, T, 0, thread);
        if constexpr (LA_SEPARATE_ERASE_KEY)
            load_rows<Keys, C, THREADS, K>(at + AT_R, r, a.r.token, token, T, 0, thread);
        if (has_values) load_rows<Values, C, THREADS, V>(at + AT_V, v, a.v.token, token, T, column, thread);
        load_inverse<Gram, C, THREADS>(at + AT_A, inverse_at(step), thread);
        load_gates<C, THREADS>(at + AT_G, g, a.g.token, token, T, thread);
        if (OVER_BETA)
            load_numbers<C, THREADS>(at + AT_G + C * 4, betas_of(a.beta, traversal.sequence, traversal.head),
                                     a.beta.token, token, T, thread);
    }
    __device__ __forceinline__ void load_queries(int step) const {
        load_rows<Keys, C, THREADS, K>(queries_at(step), q, a.q.token, traversal.token_of(step), traversal.sequence.T,
                                       0, thread);
    }
    __device__ __forceinline__ void begin_loads() const {
        if (STAGES > 1 && traversal.steps > 0) {
            load(0);
            if (READS) load_queries(0);
        }
        copy_commit();
    }
    // the chunk of a step is there, and the next one on its way
    __device__ __forceinline__ void await(int step) {
        asm volatile(
            ""
            : "+r"(lane));   // opaque: addresses are recomputed in each chunk; held over the loop they would spill
        if (STAGES == 1) {
            __syncthreads();
            load(step);
            if (READS) load_queries(step);
            copy_commit();
        }
        copy_wait<0>();
        __syncthreads();
        if (STAGES > 1 && step + 1 < traversal.steps) {
            load(step + 1);
            if (READS && QUERY_BUFFERS > 1) load_queries(step + 1);
        }
    }
    // the queries of a step have been read
    __device__ __forceinline__ void release_queries(int step) const {
        if (READS && STAGES > QUERY_BUFFERS) {
            __syncthreads();
            if (step + 1 < traversal.steps) load_queries(step + 1);
        }
        copy_commit();
    }
    __device__ __forceinline__ void make_gram(int step) const {
        gram_matrix<Element, WARPS, C, KP, false, Keys, Gram>(queries_at(step), keys_at(step), shared + AT_GRAM, 0,
                                                              decay, a.scale, warp, lane);
    }
    // the state before a chunk, in reverse its gradient after it, for the gradients
    __device__ __forceinline__ void store_state(const StateRows<TILES, KP>& S, int step) const {
        char* to = a.states +
                   chunk_number<C>(a, traversal.sequence, traversal.slot, traversal.head, traversal.chunk_of(step)) *
                       ChunkState<VP, KP>::SIZE;
#pragma unroll
        for (int m = 0; m < TILES; m++)
            if (column + row + 16 * m < VP) ChunkState<VP, KP>::store<Element>(to, S.x[m], column + row + 16 * m, lane);
    }
    // accumulators (value row, token) of a chunk to rows of tokens, by way of the values' place
    __device__ __forceinline__ void store_values(const float (&x)[TILES][C / 8][4], const Rows& to, int step) const {
        stage_rows<Element, Values, TILES, C>(x, values_at(step), row, lane);
        store_staged(to, step);
    }
    __device__ __forceinline__ void store_staged(const Rows& to, int step) const {
        store_rows<Values, C, 16 * TILES, V>(own_rows(to, traversal.sequence, traversal.head), to.token,
                                             values_at(step), traversal.token_of(step), traversal.sequence.T, row,
                                             column, lane);
    }
};
