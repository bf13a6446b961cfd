// What the warpgroup that fills the ring does: rows of tokens by asynchronous copies, sums of decays by its first warp.
#pragma once
#include "attention/decay.cuh"
#include "attention/walk.cuh"
#include "tile/barrier.cuh"

constexpr int FILLERS = 128;   // threads of that group
// registers of a thread that fills and of one that uses: two groups use with one block a multiprocessor, one with two
constexpr int FILL_REGISTERS = 40;
template <int GROUPS> constexpr int USE_REGISTERS = GROUPS == 2 ? 232 : 216;

// Sums of decays of a stage: those of decay.cuh, then the sum of the chunk
template <int C> struct StageDecay {
    static constexpr int BYTES = (Decay<C>::FLOATS + 4) * 4;
    static __device__ __forceinline__ float all(u32 base) { return load_shared(base + Decay<C>::FLOATS * 4); }
};

// Log decays of the chunks of a walk, read one chunk ahead of their use
template <int C> struct Gates {
    const float* g;
    i64 stride;
    float x[C / 32];

    __device__ __forceinline__ void load(int token, int T, int lane) {
        if (!LA_DECAY) return;
#pragma unroll
        for (int i = 0; i < C / 32; i++) {
            const int r = lane * (C / 32) + i, t = token + (LA_REVERSE ? -r : r);
            x[i] = (u32)t < (u32)T ? g[t * stride] : 0.f;
        }
    }
    // into a stage; read, write and later as decay.cuh's
    __device__ __forceinline__ void store(u32 base, float read, float write, float later, int lane) const {
        const Decay<C> decay = {base};
        const float all = decay.set(x, read, write, later, lane);
        if (lane == 0) store_shared(base + Decay<C>::FLOATS * 4, all);
    }
};

// load_rows of an array whose place is kept in shared memory
template <class X, int C, int WIDTH> LA_DEVICE void load_kept(u32 base, u32 place, int token, int T, int column, int thread) {
    const Kept x = kept(place);
    load_rows<X, C, FILLERS, WIDTH, 2>(base, x.rows, x.stride, token, T, column, thread);
}
