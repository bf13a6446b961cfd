// Shared memory of one block of the chain of the delta rule, its barriers and loads.
#pragma once
#include "vector/strengths.cuh"
#include "vector/rows.cuh"

constexpr int CONSUMER_REGISTERS_OF_CHAIN = 144, PRODUCER_REGISTERS_OF_CHAIN = 112;   // of a thread: 2 x 128 of each
// S as the products read it: two panels. With float32 log decays shared memory holds one, the other goes over those of
// the stage
constexpr bool STATE_IN_STAGE = LA_GATE == 2;
// stages of q, k, log decays (then quotients, then P in the first panel and N in the second); two of values (then
// outputs); -Kc; S; scratch; decays of blocks and of the chunk; its strengths
constexpr int STAGES = LA_STAGES, STAGE = 2 * Tokens::SIZE + GATES;
constexpr int AT_VALUES = STAGES * STAGE, AT_KEYS = AT_VALUES + 2 * Tokens::SIZE, AT_STATE = AT_KEYS + Tokens::SIZE;
constexpr int AT_SCRATCH = AT_STATE + (2 - STATE_IN_STAGE) * StatePanels::PANEL;
constexpr int AT_DECAYS = AT_SCRATCH + Scratch<3>::SIZE, AT_ALL = AT_DECAYS + 4 * WIDE * 4;
constexpr int AT_STRENGTHS = AT_ALL + WIDE * 4, AT_BARRIERS = AT_STRENGTHS + STRENGTHS;
constexpr int AT_HEADS = AT_BARRIERS + 32 * STAGES + 32;
static_assert(Scratch<3>::SIZE >= 4 * EXACT_BYTES && AT_HEADS + 16 <= AT_BARRIERS + 160,
              "the exact path has its operands there");
static_assert(LA_INVERSE == Square::SIZE + STRENGTHS && LA_SHARED == AT_BARRIERS + 160 && LA_WARPS == 8 &&
                  LA_TILES == 1,
              "LA_SHARED is the size that the launch requests");

LA_DEVICE Tiles tiles_of(u32 shared, int s) {
    const u32 at = shared + s * STAGE;
    return {at, at + Tokens::SIZE, at + 2 * Tokens::SIZE, shared + AT_SCRATCH, shared + AT_DECAYS, shared + AT_KEYS,
            0,  shared + AT_ALL};
}
LA_DEVICE u32 values_at(u32 shared, int step) { return shared + AT_VALUES + (step & 1) * Tokens::SIZE; }

struct Barriers {   // of stage s: q, k, g are there; copies and P are made; N is there; all has been read. values; Kc
                    // and strengths have been read; rows loaded a second time are there
    u32 base;
    __device__ __forceinline__ u32 full(int s) const { return base + s * 32; }
    __device__ __forceinline__ u32 ready(int s) const { return base + s * 32 + 8; }
    __device__ __forceinline__ u32 inverse(int s) const { return base + s * 32 + 16; }
    __device__ __forceinline__ u32 empty(int s) const { return base + s * 32 + 24; }
    __device__ __forceinline__ u32 values(int n) const { return base + STAGES * 32 + n * 8; }
    __device__ __forceinline__ u32 keys() const { return base + STAGES * 32 + 16; }
    __device__ __forceinline__ u32 reloaded() const { return base + STAGES * 32 + 24; }
    __device__ __forceinline__ void init() const {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full(s), 1);
            barrier_init(ready(s), 8 * ARRIVALS);
            barrier_init(inverse(s), 1);
            barrier_init(empty(s), 8 * ARRIVALS);
        }
        barrier_init(values(0), 1);
        barrier_init(values(1), 1);
        barrier_init(keys(), 8 * ARRIVALS);
        barrier_init(reloaded(), 1);
    }
};
#include "vector/loader.cuh"
