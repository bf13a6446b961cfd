// Shared memory of the reverse chain, and the traversal of one of its blocks.
#pragma once
#include "vector/backward/slices.cuh"
#include "tile/wgmma_part.cuh"
#include "tile/wgmma_wide.cuh"
#include "attention/state.cuh"
#include "attention/store.cuh"
#include "attention/group.cuh"
#include "vector/strengths.cuh"
#include "arguments/matrix_state/VectorReverseArguments.cuh"   // after TensorMap

constexpr bool ERASE = LA_ERASE, ADDS = LA_ADDS && !ERASE, OFFSETS = LA_ADDS && ERASE;
constexpr int STAGES = 2, GROUPS_OF_VALUES = round_up(LA_V, 64) / 64, CONSUMERS = 128 * GROUPS_OF_VALUES, COPIERS = 256,
              PER = 4;
// a stage: copies of q and k (k in two terms, with erase two copies), dO, P in two terms, with erase in one and N with
// its strengths
constexpr int AT_Q = 0, AT_K = AT_Q + Tokens::SIZE, AT_ERASE = AT_K + Tokens::SIZE, AT_K_REST = AT_ERASE,
              AT_DOUT = AT_ERASE + Tokens::SIZE;
constexpr int AT_GRAM = AT_DOUT + Tokens::SIZE, AT_INVERSE = AT_GRAM + LA_GRAM,
              AT_STRENGTHS = AT_INVERSE + Square::SIZE;
constexpr int STAGE = AT_INVERSE + ERASE * round_up(LA_INVERSE, 1024);
// then tables of slices for two chunks, G after a chunk, decays of the stages' chunks; with erase v and each warp's dW.v
constexpr int AT_AFTER = STAGES * STAGE, AT_VALUES = AT_AFTER + Whole::SIZE,
              AT_TABLES = AT_VALUES + ERASE * Tokens::SIZE;
constexpr int AT_CARRIES = AT_TABLES + 2 * SliceTable<WIDE, PER>::BYTES, AT_DOTS = AT_CARRIES + STAGES * WIDE * 4;
constexpr int AT_RING = AT_DOTS + ERASE * 8 * C * 4, AT_LOADED = AT_RING + 16 * STAGES,
              AT_VALUES_LOADED = AT_LOADED + 8 * STAGES;
static_assert(LA_SHARED == AT_VALUES_LOADED + 8 && LA_WARPS == 8, "LA_SHARED is the size that the launch requests");
static_assert(LA_ENDS == LA_END + ERASE * 8 * C * 4, "behind G after a chunk, each warp's dW.v");
constexpr int CHAIN_REGISTERS = ERASE ? 144 : 136, COPY_REGISTERS = ERASE ? 112 : 120;
static_assert(CHAIN_REGISTERS + COPY_REGISTERS <= 256,
              "registers of 512 threads; a block that asks for more waits for ever");

struct ReverseTraversal {
    VectorPlace of;
    int segment, first, steps, last;   // first chunk, number of chunks; the sequence's last segment
    __device__ __forceinline__ ReverseTraversal(const VectorReverseArguments& a, u32 number)
        : of(a.offsets, a.T, a.heads, a.slots, number / a.segments / a.heads, number / a.segments % a.heads),
          segment(number % a.segments) {
        const int total = of.chunks();
        last = max(total - 1, 0) / a.chunks;
        first = segment * a.chunks;
        steps = min(total - first, a.chunks);
    }
    __device__ __forceinline__ int chunk(int step) const { return ADDS ? first + step : first + steps - 1 - step; }
};

// Of a stage: copied in by the copy engine; scaled (full) and read (empty) is the ring's
LA_DEVICE u32 loaded(u32 shared, int step) { return shared + AT_LOADED + step % STAGES * 8; }
