// Rows of LA_D numbers, each held by LA_LANES lanes, LA_PER neighbours at a time: part of a warp, or a whole block.
//
// A row that does not fit into registers is read again in every pass. Sums have one order: the pieces of a lane, the
// lanes of a warp, the warps of a block.
#pragma once
#include "ops/element.cuh"

#if LA_DOUBLE
typedef double Real;
#else
typedef float Real;
#endif
enum { NONE = 7 };                                                             // the kind of an array that is not given
constexpr int PIECES = (LA_D + LA_PER * LA_LANES - 1) / (LA_PER * LA_LANES);   // of a lane
constexpr bool HELD = PIECES <= 4;
constexpr int REGISTER_PIECES = HELD ? PIECES : 1;
constexpr int THREADS = LA_LANES > 32 ? LA_LANES : 256, BESIDE = THREADS / LA_LANES;   // rows side by side
typedef Real Numbers[LA_PER];

LA_DEVICE int lane_of_row() { return threadIdx.x % LA_LANES; }
LA_DEVICE int row_of_block() { return threadIdx.x / LA_LANES; }

// f(piece, first column), of the pieces of this lane
template <class F> LA_DEVICE void each_piece(F f) {
    if constexpr (HELD) {
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            const int at = (p * LA_LANES + lane_of_row()) * LA_PER;
            if (LA_D % (LA_LANES * LA_PER) == 0 || at < LA_D) f(p, at);
        }
    } else if constexpr (LA_D % (LA_LANES * LA_PER) == 0) {   // a whole number of pieces: loads come first
#pragma unroll 4
        for (int p = 0; p < PIECES; p++) f(0, (p * LA_LANES + lane_of_row()) * LA_PER);
    } else
#pragma unroll 4
        for (int at = lane_of_row() * LA_PER; at < LA_D; at += LA_LANES * LA_PER) f(0, at);
}

// N numbers of every lane, each combined over the lanes of its row, the result in all of them
template <int N, class F> LA_DEVICE void combine(Real (&x)[N], F both) {
#pragma unroll
    for (int d = (LA_LANES < 32 ? LA_LANES : 32) / 2; d; d >>= 1)
#pragma unroll
        for (int n = 0; n < N; n++) x[n] = both(x[n], __shfl_xor_sync(0xffffffffu, x[n], d));
    if constexpr (LA_LANES > 32) {
        constexpr int WARPS = LA_LANES > 32 ? LA_LANES / 32 : 1;
        __shared__ Real parts[N][WARPS];
        __syncthreads();   // the last parts were read
        if (threadIdx.x % 32 == 0)
#pragma unroll
            for (int n = 0; n < N; n++) parts[n][threadIdx.x / 32] = x[n];
        __syncthreads();
#pragma unroll
        for (int n = 0; n < N; n++) {
            x[n] = parts[n][0];
            for (int w = 1; w < WARPS; w++) x[n] = both(x[n], parts[n][w]);
        }
    }
}
LA_DEVICE Real plus(Real x, Real y) { return x + y; }
LA_DEVICE Real most(Real x, Real y) { return fmax(x, y); }

// A row in memory, LA_PER numbers at a time; in registers as it was stored if it fits
template <int KIND> struct RowOf {
    const char* at;
    Loaded<KIND == NONE ? 2 : KIND, LA_PER> raw[KIND == NONE ? 1 : REGISTER_PIECES];
    __device__ __forceinline__ void begin(const char* from) {
        at = from;
        if constexpr (KIND != NONE && HELD)
            each_piece([&](int p, int column) { raw[p].load(at + column * bytes_of(KIND)); });
    }
    // the numbers are unpacked again afterwards, not held in registers
    __device__ __forceinline__ void repack() {
        if constexpr (KIND != NONE && HELD && sizeof(raw) % 4 == 0)
#pragma unroll
            for (u32 i = 0; i < sizeof(raw) / 4; i++) ((u32*)raw)[i] = opaque(((u32*)raw)[i]);
    }
    __device__ __forceinline__ void get(Numbers& x, int p, int column) const {
        if constexpr (KIND == NONE) return;
        else if constexpr (HELD) raw[p].get(x);
        else load_elements<KIND, LA_PER>(x, at + column * bytes_of(KIND));
    }
};
// where row n of an array begins, `inner` rows of each outer one
template <class A> LA_DEVICE char* row_at(const A& x, u32 n, u32 inner) {
    return x.data + (inner == 1 ? n * x.outer : n / inner * x.outer + n % inner * x.inner);
}
