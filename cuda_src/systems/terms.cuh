// Numbers as sums of bfloat16, most significant first: operands of products that are exact to 8 bits a term.
#pragma once
#include "tile/mma.cuh"

// two floats as N pairs of bfloat16
template <int N> LA_DEVICE void split(float x, float y, u32 (&terms)[N]) {
#pragma unroll
    for (int t = 0; t < N; t++) {
        terms[t] = pack_bf16(x, y);
        x -= low_bf16(terms[t]);
        y -= high_bf16(terms[t]);
    }
}
// an operand of 16 rows and 16 columns in N terms: two tiles of accumulators side by side
template <int N> struct Operand {
    Bfloat16::A term[N];
    __device__ __forceinline__ void set(int i, float x, float y) {   // pair i: the numbers 2 i, 2 i + 1 of the operand
        u32 terms[N];
        split(x, y, terms);
#pragma unroll
        for (int t = 0; t < N; t++) term[t].x[i] = terms[t];
    }
    __device__ __forceinline__ float2 get(int i) const {
        float2 sum = {low_bf16(term[N - 1].x[i]), high_bf16(term[N - 1].x[i])};
#pragma unroll
        for (int t = N - 2; t >= 0; t--) {
            sum.x += low_bf16(term[t].x[i]);
            sum.y += high_bf16(term[t].x[i]);
        }
        return sum;
    }
};

// The tiles i.. of C, two each, += A B for the operands B of PAIRS pairs of tiles that load(t, pair, b) brings.
// Products of terms whose places add up to N and more are rounding errors.
template <int N, int B_TERMS, int PAIRS, int TILES, class Load>
LA_DEVICE void multiply_terms_of(float (&c)[TILES][4], int i, const Operand<N>& a, Load load) {
#pragma unroll
    for (int t = 0; t < B_TERMS; t++) {
        Bfloat16::B b[PAIRS][2];
#pragma unroll
        for (int m = 0; m < PAIRS; m++) load(t, m, b[m]);
#pragma unroll
        for (int u = 0; u + t < N; u++)
#pragma unroll
            for (int m = 0; m < 2 * PAIRS; m++) Bfloat16::multiply(c[i + m], a.term[u], b[m / 2][m % 2]);
    }
}
