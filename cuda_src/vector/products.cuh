// Products of the delta rule's chains by a warpgroup: an accumulator is the next operand A.
#pragma once
#include "vector/strengths.cuh"
#include "vector/rows.cuh"

// V^T of 64 tokens: accumulators that the product with -Kc goes on from
LA_DEVICE void load_values(float (&x)[8][4], u32 values, int column, int lane) {
#pragma unroll
    for (int t = 0; t < 4; t++) {
        u32 v[4];
        load_operand<Tokens>(v, values, t * 16, column, lane);
#pragma unroll
        for (int n = 0; n < 8; n++) x[2 * t + (n >> 2)][n & 3] = n & 1 ? high_bf16(v[n >> 1]) : low_bf16(v[n >> 1]);
    }
}
template <int N> LA_DEVICE void token_operands(u32 (&a)[N][4], const float (&x)[2 * N][4]) {
#pragma unroll
    for (int t = 0; t < N; t++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            a[t][2 * h] = pack_bf16(x[2 * t + h][0], x[2 * t + h][1]);
            a[t][2 * h + 1] = pack_bf16(x[2 * t + h][2], x[2 * t + h][3]);
        }
}
// C += A B^T over 16-column steps of panels X, begun; `add` false: C = A B^T
template <class X, int N> LA_DEVICE void begin_product(float (&c)[8][4], const u32 (&a)[N][4], u32 b, bool add = true) {
    accumulator_fence(c);
    products_begin();
#pragma unroll
    for (int d = 0; d < N; d++) product_ABt(c, a[d], panel_descriptor(b) + X::along(d), add || d > 0);
    products_commit();
}
template <int N, int TILES> LA_DEVICE void end_product(float (&c)[TILES][4]) {
    products_wait<N>();
    accumulator_fence(c);
}
// their rounding errors
template <int N> LA_DEVICE void rest_operands(u32 (&rest)[N][4], const u32 (&a)[N][4], const float (&x)[2 * N][4]) {
#pragma unroll
    for (int t = 0; t < N; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float (&y)[4] = x[2 * t + (i >> 1)];
            rest[t][i] = pack_bf16(y[2 * (i & 1)] - low_bf16(a[t][i]), y[2 * (i & 1) + 1] - high_bf16(a[t][i]));
        }
}
// E^T becomes U^T = beta E^T + (N bf(beta E))^T, begun; operands: bf(beta E). read(): strengths have been
template <class F> LA_DEVICE void begin_solution(float (&x)[8][4], u32 (&operands)[4][4], u32 inverse, u32 strengths,
                                                 int lane, F read) {
    scale_by_strengths(x, strengths, lane);
    token_operands(operands, x);
    round_alike(x, operands, strengths, lane);
    read();
    begin_product<Square>(x, operands, inverse);
}
// A warp's columns of a tile of tokens, where operands wait while registers have their rests
struct OwnColumns {
    u32 tile;
    int column, lane;
    __device__ __forceinline__ void store(const u32 (&x)[4][4]) const {
        const u32 at = tile + Tokens::block_piece(0, column / 8, (lane & 7) | ((lane >> 4) << 3), (lane >> 3) & 1);
#pragma unroll
        for (int t = 0; t < 4; t++) store_matrix_transposed(at + t * 16 * 128, x[t][0], x[t][1], x[t][2], x[t][3]);
    }
    __device__ __forceinline__ void load(u32 (&x)[4][4]) const {
#pragma unroll
        for (int t = 0; t < 4; t++) load_operand<Tokens>(x[t], tile, 16 * t, column, lane);
    }
    // operands to memory; in their place the rounding error of x, of tokens from `first` on
    __device__ __forceinline__ void exchange_for_rests(u32 (&operands)[4][4], const float (&x)[8][4], int first) const {
        store(operands);
#pragma unroll
        for (int t = 0; t < 4; t++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float (&y)[4] = x[2 * t + (i >> 1)];
                const int token = 16 * t + 8 * (i >> 1) + (lane & 3) * 2;
                operands[t][i] =
                    rest_of(token < first ? 0.f : y[2 * (i & 1)], token + 1 < first ? 0.f : y[2 * (i & 1) + 1]);
            }
        __syncwarp();
    }
};
// the same, ended; new_values: U^T as operands. What N multiplies has two terms from token `first` on, instead of
// rounded ones in the sum
template <class F> LA_DEVICE void solve_errors(float (&x)[8][4], u32 (&new_values)[4][4], int first,
                                               const OwnColumns& own, u32 inverse, u32 strengths, int lane, F read) {
    scale_by_strengths(x, strengths, lane);
    token_operands(new_values, x);
    if (first < C) own.exchange_for_rests(new_values, x, first);
    read();
    begin_product<Square>(x, new_values, inverse);
    end_product<0>(x);
    if (first < C) {
        own.load(new_values);
        begin_product<Square>(x, new_values, inverse);
        end_product<0>(x);
    }
    token_operands(new_values, x);
}
