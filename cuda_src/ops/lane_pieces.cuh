// Rows of a block: LA_LANES lanes hold one in pieces of LA_PER numbers, and each group of lanes has a row of its own.
#pragma once
#include "ops/element.cuh"

constexpr int THREADS = 256, PER = LA_PER, GROUPS = THREADS / LA_LANES;
constexpr int PIECES = (larger(LA_K, LA_V) + LA_LANES * PER - 1) / (LA_LANES * PER);
typedef float Piece[PER];
typedef float Sums[GROUPS][PIECES * LA_LANES * PER];

template <int KIND, int WIDTH> LA_DEVICE void load_row(Piece& x, const char* row, int at) {
    if constexpr (LA_APART) {
#pragma unroll
        for (int i = 0; i < PER; i++) x[i] = at + i < WIDTH ? (float)element<KIND>(row, at + i) : 0.f;
    } else load_elements<KIND, PER>(x, row + at * bytes_of(KIND));
}
template <int KIND, int WIDTH> LA_DEVICE void store_row(char* row, int at, const Piece& x) {
    if constexpr (LA_APART) {
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (at + i < WIDTH) put_element<KIND>(row, at + i, x[i]);
    } else store_elements<KIND, PER>(row + at * bytes_of(KIND), x);
}
LA_DEVICE float row_sum(float x) {
#pragma unroll
    for (int by = LA_LANES / 2; by; by /= 2) x += __shfl_xor_sync(~0u, x, by);
    return x;
}
LA_DEVICE float dot(const Piece& x, const Piece& y) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < PER; i++) sum += x[i] * y[i];
    return sum;
}
// f(piece, its first number) of the lane's pieces
template <class F> LA_DEVICE void pieces(F f) {
#pragma unroll
    for (int n = 0; n < PIECES; n++) f(n, (n * LA_LANES + (int)threadIdx.x % LA_LANES) * PER);
}
// numbers of a state's key or value, in float; none: zeros
template <int WIDTH> LA_DEVICE void load_end(Piece& x, const float* from, i64 owner, int at) {
#pragma unroll
    for (int i = 0; i < PER; i++) x[i] = from != nullptr && at + i < WIDTH ? from[owner * WIDTH + at + i] : 0.f;
}
template <int WIDTH> LA_DEVICE void store_end(float* to, i64 owner, int at, const Piece& x) {
#pragma unroll
    for (int i = 0; i < PER; i++)
        if (at + i < WIDTH) to[owner * WIDTH + at + i] = x[i];
}
// numbers of a vector, the n-th of many
template <int WIDTH> LA_DEVICE void load_vector(Piece& x, const float* from, i64 n, int at) {
    load_row<2, WIDTH>(x, (const char*)(from + n * WIDTH), at);
}
// to = the sum over the groups of the block of a row that each of them has
template <int WIDTH> LA_DEVICE void column_sums(Sums& sums, const Piece (&x)[PIECES], float* to) {
    __syncthreads();
    pieces([&](int i, int at) {
#pragma unroll
        for (int j = 0; j < PER; j++) sums[threadIdx.x / LA_LANES][at + j] = x[i][j];
    });
    __syncthreads();
    for (int n = threadIdx.x; n < WIDTH; n += THREADS) {
        float sum = 0.f;
        for (int group = 0; group < GROUPS; group++) sum += sums[group][n];
        to[n] = sum;
    }
}
