// Shared memory of one block of the scan, its barriers, loads and stores.
#pragma once
#include "vector/rows.cuh"

constexpr int CONSUMER_REGISTERS_OF_SCAN = LA_BOUNDED ? 160 : 152,
              PRODUCER_REGISTERS_OF_SCAN = LA_BOUNDED ? 96 : 104;   // of a thread: 2 x 128 of each
// stages of q, k, log decays (then quotients, then P in two terms); two of values (then outputs); scratch; decays of
// blocks, and of the stages' chunks. With bounded gates only the stages, the values and the decays of chunks.
constexpr int STAGES = LA_STAGES, STAGE = 2 * Tokens::SIZE + GATES;
constexpr int AT_VALUES = STAGES * STAGE, AT_SCRATCH = AT_VALUES + 2 * Tokens::SIZE;
constexpr int AT_DECAYS = AT_SCRATCH + !LA_BOUNDED * Scratch<4>::SIZE;
constexpr bool DECAY_BEHIND_GRAM =
    Scratch<4>::TWO_TERM_KEYS && !LA_BOUNDED && LA_GATE == 2;   // the decay of a chunk lies behind its P
constexpr int AT_BONUS = AT_DECAYS + !LA_BOUNDED * 4 * WIDE * 4, AT_ALL = AT_BONUS + !LA_BOUNDED * 2 * C * 4,
              AT_BARRIERS = AT_ALL + !DECAY_BEHIND_GRAM * STAGES * WIDE * 4;
// Copies into the stages, one after the other, that have a barrier each. A group of producers of bounded.cuh waits for
// every other one: at a barrier of an odd number of stages it would come to every other phase, which parity does not
// tell from the phase two before
constexpr int COPY_BARRIERS = LA_BOUNDED && STAGES % 2 ? 2 * STAGES : STAGES;
constexpr int AT_LOADER = AT_BARRIERS + 24 * STAGES + 16 + 8 * (COPY_BARRIERS - STAGES),
              AT_STOPS = AT_LOADER + 48 + 16 * STAGES, BARRIER_BYTES = LA_BOUNDED ? 240 : 160;
constexpr int EXACT_TERMS = 1 + Scratch<4>::TWO_TERM_KEYS;
static_assert(Scratch<4>::SIZE >= 4 * EXACT_TERMS * EXACT_BYTES && AT_STOPS + 4 * STAGES <= AT_BARRIERS + BARRIER_BYTES,
              "the exact path has its operands there");
static_assert(LA_SHARED == AT_BARRIERS + BARRIER_BYTES && LA_WARPS == 8 && LA_TILES == 1,
              "LA_SHARED is the size that the launch requests");
static_assert(StatePanels::SIZE == 2 * Tokens::SIZE, "a state leaves through the place of q and k");

LA_DEVICE Tiles tiles_of(u32 shared, int s) {
    const u32 at = shared + s * STAGE;
    return {at,
            at + Tokens::SIZE,
            at + 2 * Tokens::SIZE,
            shared + AT_SCRATCH,
            shared + AT_DECAYS,
            0,
            shared + AT_BONUS,
            DECAY_BEHIND_GRAM ? at + 2 * Tokens::SIZE + 2 * Square::SIZE : shared + AT_ALL + s * WIDE * 4};
}
LA_DEVICE u32 values_at(u32 shared, int step) { return shared + AT_VALUES + (step & 1) * Tokens::SIZE; }

struct Barriers {   // q, k, g of a step are there; of stage s: copies and P are made; all has been read. values: of
                    // each of the two
    u32 base;
    __device__ __forceinline__ u32 full(int step) const {
        if (COPY_BARRIERS > STAGES && step / STAGES & 1) return base + STAGES * 24 + 16 + step % STAGES * 8;
        return base + step % STAGES * 24;
    }
    __device__ __forceinline__ void wait_full(int step) const { barrier_wait(full(step), step / COPY_BARRIERS & 1); }
    __device__ __forceinline__ u32 ready(int s) const { return base + s * 24 + 8; }
    __device__ __forceinline__ u32 empty(int s) const { return base + s * 24 + 16; }
    __device__ __forceinline__ u32 values(int n) const { return base + STAGES * 24 + n * 8; }
    __device__ __forceinline__ void init() const {
        for (int n = STAGES; n < COPY_BARRIERS; n++) barrier_init(full(n), 1);
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full(s), 1);
            barrier_init(ready(s), (LA_BOUNDED ? 4 : 8) * ARRIVALS);
            barrier_init(empty(s), 2);
        }
        barrier_init(values(0), 1);
        barrier_init(values(1), 1);
    }
};

// The traversal that a block leaves at a stage's chunk, since the exact path redoes all of it: a word of each stage in
// shared memory, written before its chunk is ready. Consumers leave before that chunk; producers make it, and nothing
// of later chunks (bounded.cuh: of later chunks in that stage).
struct Stops {
    u32 base;
    __device__ __forceinline__ void init() const {
        for (int s = 0; s < STAGES; s++) store_word(base + 4 * s, -1);
    }
    __device__ __forceinline__ void set(int s, int traversal) const { store_word(base + 4 * s, traversal); }
    __device__ __forceinline__ bool at(int s, int traversal) const {
        return !LA_EXACT && load_word(base + 4 * s) == traversal;
    }
};
LA_DEVICE void init_block(u32 shared, Barriers bar) {   // by one thread
    bar.init();
    Stops{shared + AT_STOPS}.init();
    barriers_made();
}

// P of a chunk and, if there is a next one, the state before it
LA_DEVICE void store_residuals(const VectorArguments& a, i64 stored, const Tiles& tiles, bool more) {
    run_out(a.grams + stored * 2 * Square::SIZE, tiles.gates, 2 * Square::SIZE);
    if (more) run_out(a.states + (stored + 1) * STORED_BYTES, tiles.q, STATE_BYTES);
}
