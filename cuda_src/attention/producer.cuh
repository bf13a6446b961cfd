// The producer warpgroup of a ring: rows of tokens by asynchronous copies, sums of decays by its warps in turn.
#pragma once
#include "attention/decay.cuh"
#include "attention/traversal.cuh"
#include "tile/barrier.cuh"

constexpr int PRODUCERS = 128;   // threads of that warpgroup
// registers of a producer's and of a consumer's thread: two consumer groups with one block a multiprocessor, one with two
template <int GROUPS> constexpr int PRODUCER_REGISTERS = GROUPS == 2 ? 40 : 32;
template <int GROUPS> constexpr int CONSUMER_REGISTERS = GROUPS == 2 ? 232 : 224;

// Sums of decays of a stage: the sums of decay.cuh, the sum of the chunk, and e^{sum from each row to the end of its
// sixteen}
template <int C> struct StageDecay {
    static constexpr int AT_ALL = Decay<C>::FLOATS * 4, AT_SIXTEENTHS = AT_ALL + 16, BYTES = AT_SIXTEENTHS + C * 4;
    u32 base;
    __device__ __forceinline__ Decay<C> sums() const { return {base}; }
    __device__ __forceinline__ float all() const { return load_shared(base + AT_ALL); }
    __device__ __forceinline__ float2 to_sixteenth(int j) const { return load_shared2(base + AT_SIXTEENTHS + j * 4); }

    // from log decays in a warp's registers; read, write and later as decay.cuh's
    __device__ __forceinline__ void store(const float (&g)[C / 32], float read, float write, float later,
                                          int lane) const {
        const float all = sums().set(g, read, write, later, lane);
        if (lane == 0) store_shared(base + AT_ALL, all);
        __syncwarp();
        static_assert(C == 64, "two rows a lane, eight lanes a sixteenth");
        const float2 x = load_shared2(base + lane * 8);
        const float end = load_shared(base + (lane | 7) * 8 + 4);
        store_shared2(base + AT_SIXTEENTHS + lane * 8, exp2_approx(fminf(end - x.x, 0.f)),
                      exp2_approx(fminf(end - x.y, 0.f)));
    }
};

// Log decays of a traversal's chunks. Each warp of the producer has every fourth chunk, and loads it four ahead.
template <int C> struct Gates {
    const float* g;
    i64 stride;
    float x[C / 32];

    template <class W> __device__ __forceinline__ void load(const W& traversal, int step, int lane) {
        if (!LA_DECAY || step >= traversal.steps) return;
#pragma unroll
        for (int i = 0; i < C / 32; i++) {
            const int r = lane * (C / 32) + i, t = traversal.token_of(step) + (LA_REVERSE ? -r : r);
            x[i] = (u32)t < (u32)traversal.sequence.T ? g[t * stride] : 0.f;
        }
    }
    template <class W>
    __device__ __forceinline__ void store(const W& traversal, int step, u32 base, float read, float write, float later,
                                          int thread) {
        if (thread >> 5 != step % 4) return;
        StageDecay<C>{base}.store(x, read, write, later, thread & 31);
        load(traversal, step + 4, thread & 31);
    }
};

// Produces all chunks of a traversal: load(step) begins to copy the rows of one chunk into its stage, decays follow
// `decays`.
template <int C, int STAGES, class W, class Load>
LA_DEVICE void produce_ring(const W& traversal, Gates<C> gates, u32 decays, Ring<STAGES> ring, float read, float write,
                            int thread, Load load) {
    gates.load(traversal, thread >> 5, thread & 31);
    for (int step = 0; step < traversal.steps; step++) {
        const int stage = step % STAGES;
        ring.wait_empty(step);
        load(step);
        gates.store(traversal, step, decays + stage * StageDecay<C>::BYTES, read, write, 0.f, thread);
        ring.arrive_full(step);
    }
    copy_wait<0>();
}

// load_rows of an array whose address is in shared memory
template <class X, int C, int WIDTH> LA_DEVICE void load_rows_at(u32 base, u32 place, int token, int T, int column,
                                                                 int thread) {
    const RowsAddress x = load_address(place);
    load_rows<X, C, PRODUCERS, WIDTH, 2>(base, x.rows, x.stride, token, T, column, thread);
}
