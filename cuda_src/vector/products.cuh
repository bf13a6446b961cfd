// Products of the delta rule's chains by a warpgroup: an accumulator is the next operand A.
#pragma once
#include "vector/rows.cuh"

// V^T - S^T Kc^T as operands of 16 tokens each; predicted: S^T Kc^T
LA_DEVICE void error_operands(u32 (&a)[4][4], const float (&predicted)[8][4], u32 values, int column, int lane, bool with_values = true) {
#pragma unroll
    for (int t = 0; t < 4; t++) {
        u32 v[4] = {0, 0, 0, 0};
        if (with_values) load_operand<Tokens>(v, values, t * 16, column, lane);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float (&y)[4] = predicted[2 * t + h];
            a[t][2 * h] = pack_bf16(low_bf16(v[2 * h]) - y[0], high_bf16(v[2 * h]) - y[1]);
            a[t][2 * h + 1] = pack_bf16(low_bf16(v[2 * h + 1]) - y[2], high_bf16(v[2 * h + 1]) - y[3]);
        }
    }
}
LA_DEVICE void token_operands(u32 (&a)[4][4], const float (&x)[8][4]) {
#pragma unroll
    for (int t = 0; t < 4; t++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            a[t][2 * h] = pack_bf16(x[2 * t + h][0], x[2 * t + h][1]);
            a[t][2 * h + 1] = pack_bf16(x[2 * t + h][2], x[2 * t + h][3]);
        }
}
// C = A B^T over 16-column steps of panels X, begun
template <class X, int N> LA_DEVICE void begin_product(float (&c)[8][4], const u32 (&a)[N][4], u32 b) {
    accumulator_fence(c);
    products_begin();
#pragma unroll
    for (int d = 0; d < N; d++) product_ABt(c, a[d], panel_descriptor(b) + X::along(d), d > 0);
    products_commit();
}
template <int N, int TILES> LA_DEVICE void end_product(float (&c)[TILES][4]) {
    products_wait<N>();
    accumulator_fence(c);
}
