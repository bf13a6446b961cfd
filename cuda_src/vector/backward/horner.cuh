// Sums over the blocks of a chunk with decays on the output channels: accumulators have channels as rows, tokens as
// columns.
#pragma once
#include "vector/backward/grads.cuh"

template <int FIRST, int LAST> LA_DEVICE void scale_columns(float (&x)[8][4], const float (&f)[2]) {
#pragma unroll
    for (int n = FIRST; n < LAST; n++) {
        x[n][0] *= f[0];
        x[n][1] *= f[0];
        x[n][2] *= f[1];
        x[n][3] *= f[1];
    }
}
// y[I >= J] += Z[I, J] k_J, then (exact: before, and I > J) y[I > J] *= D_J; k: the copies that are read
template <int J = 0> LA_DEVICE void read_blocks(float (&y)[8][4], Terms k, Terms z, const Lane& me) {
    const float D[2] = {me.block_decay(J, 0), me.block_decay(J, 1)};
    constexpr int FIRST = EXACT_BLOCKS ? 2 * J + 2 : 2 * J;
    if constexpr (EXACT_BLOCKS) scale_columns<FIRST, 8>(y, D);
    accumulator_fence(y);
    products_begin();
    add_products<FIRST, 8 - FIRST, 0>(y, me.shared, k + Square::across(J),
                                      z + Square::across(FIRST / 2) + Square::along(J), true);
    products_commit();
    products_wait<0>();
    accumulator_fence(y);
    if constexpr (!EXACT_BLOCKS) scale_columns<2 * J + 2, 8>(y, D);
    if constexpr (J + 1 < BLOCKS - EXACT_BLOCKS) read_blocks<J + 1>(y, k, z, me);
}
// the same of two sums with the same copies, their products in flight together
template <int J = 0> LA_DEVICE void read_blocks(float (&x)[8][4], float (&y)[8][4], Terms k, Terms z, Terms of_y,
                                                const Lane& me) {
    const float D[2] = {me.block_decay(J, 0), me.block_decay(J, 1)};
    constexpr int FIRST = EXACT_BLOCKS ? 2 * J + 2 : 2 * J;
    constexpr u32 BLOCK = Square::across(FIRST / 2) + Square::along(J);
    if constexpr (EXACT_BLOCKS) {
        scale_columns<FIRST, 8>(x, D);
        scale_columns<FIRST, 8>(y, D);
    }
    accumulator_fence(x);
    accumulator_fence(y);
    products_begin();
    add_products<FIRST, 8 - FIRST, 0>(x, me.shared, k + Square::across(J), z + BLOCK, true);
    products_commit();
    add_products<FIRST, 8 - FIRST, 0>(y, me.shared, k + Square::across(J), of_y + BLOCK, true);
    products_commit();
    products_wait<1>();
    accumulator_fence(x);
    if constexpr (!EXACT_BLOCKS) scale_columns<2 * J + 2, 8>(x, D);
    products_wait<0>();
    accumulator_fence(y);
    if constexpr (!EXACT_BLOCKS) scale_columns<2 * J + 2, 8>(y, D);
    if constexpr (J + 1 < BLOCKS - EXACT_BLOCKS) read_blocks<J + 1>(x, y, k, z, of_y, me);
}
// y[J <= I] *= D_I, then y[J <= I] += Z[I, J]^T q_I (exact: J < I), and with erase the same of Y and its keys
template <int I = BLOCKS - 1> LA_DEVICE void write_blocks(float (&y)[8][4], Terms q, Terms z, Terms k, Terms of_y,
                                                          const Lane& me) {
    const float first = !EXACT_BLOCKS && I == BLOCKS - 1 ? MIDDLE : 1.f;
    const float D[2] = {me.block_decay(I, 0) * first, me.block_decay(I, 1) * first};
    constexpr int LAST = EXACT_BLOCKS ? 2 * I : 2 * I + 2;
    constexpr bool BEGINS = EXACT_BLOCKS && I == BLOCKS - 1;
    if constexpr (!BEGINS) scale_columns<0, LAST>(y, D);
    accumulator_fence(y);
    products_begin();
    add_products<0, LAST, 1>(y, me.shared, q + Square::across(I), z + Square::across(I), !BEGINS);
    if constexpr (ERASE) add_products<0, LAST, 1>(y, me.shared, k + Square::across(I), of_y + Square::across(I), true);
    products_commit();
    products_wait<0>();
    accumulator_fence(y);
    if constexpr (I > EXACT_BLOCKS) write_blocks<I - 1>(y, q, z, k, of_y, me);
}

// <S, G> decayed over the chunk: of a channel, from the sums of eight warps
LA_DEVICE float crossing_state(float decay, int channel, const Lane& me) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < 8; w++) sum += Table{me.shared + AT_PRODUCTS}.at(w, channel);
    return decay * sum;
}
// Terms that cross the chunk's end, a number a channel: e^B <S, G>, and the chunk's own writes after it,
// times G, summed over the tokens, sum_j k_j x_j e^{decay to the chunk's end}; x^T = G U^T before anything else is
// added
LA_DEVICE void crossing_writes(const float (&x)[8][4], const Lane& me) {
    float tail[2] = {1.f, 1.f}, sum[2] = {0.f, 0.f};
#pragma unroll
    for (int J = BLOCKS - 1; J >= 0; J--) {
        const float D[2] = {me.block_decay(J, 0), me.block_decay(J, 1)};
        const auto k = load_a_columns<Bfloat16, Square>(me.shared + AT_KP, 16 * J, 16 * me.quarter, me.lane);
        const auto rest = load_a_columns<Bfloat16, Square>(me.shared + AT_KP_REST, 16 * J, 16 * me.quarter, me.lane);
        float own[2] = {0.f, 0.f};
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int m = 0; m < 2; m++)
                own[m] += x[2 * J + h][2 * m] * (low_bf16(k.x[2 * h + m]) + low_bf16(rest.x[2 * h + m])) +
                          x[2 * J + h][2 * m + 1] * (high_bf16(k.x[2 * h + m]) + high_bf16(rest.x[2 * h + m]));
#pragma unroll
        for (int m = 0; m < 2; m++) {
            tail[m] *= D[m];
            sum[m] += tail[m] * MIDDLE * own[m];
        }
    }
#pragma unroll
    for (int m = 0; m < 2; m++) {
        sum[m] += __shfl_xor_sync(0xffffffffu, sum[m], 1);
        sum[m] += __shfl_xor_sync(0xffffffffu, sum[m], 2);
        const int channel = me.quarter * 16 + (me.lane >> 2) + 8 * m;
        if ((me.lane & 3) == 0)
            store_shared(me.shared + AT_CROSSING + channel * 4, sum[m] + crossing_state(tail[m], channel, me));
    }
}
// accumulators to rows of tokens; pieces of 8 channels are permuted by the token, so that a warp is in all banks
LA_DEVICE void stage_sums(const float (&x)[8][4], int to, const Lane& me) {
    const int channel = me.quarter * 16 + (me.lane >> 2), column = (me.lane & 3) * 2;
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            store_shared(me.shared + to + (8 * n + column + (i & 1)) * HALF * 4 +
                             (((channel + 8 * (i >> 1)) * 4) ^ ((me.lane & 3) << 5)),
                         x[n][i]);
}
// Exact: the writers' terms through G go apart, decayed to the end of each block, and the sums begin at zero. The
// two parts meet nowhere in the gate gradient: a G that was given, which no decay of the chunk's last token has
// crossed, would drown the others.
LA_DEVICE void stage_given(float (&x)[8][4], const Lane& me) {
    float tail[2] = {1.f, 1.f};
#pragma unroll
    for (int J = BLOCKS - 1; J >= 0; J--)
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                x[2 * J + h][2 * m] *= tail[m];
                x[2 * J + h][2 * m + 1] *= tail[m];
            }
            tail[m] *= me.block_decay(J, m);
        }
    stage_sums(x, AT_GIVEN, me);
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const int channel = me.quarter * 16 + (me.lane >> 2) + 8 * m;
        if ((me.lane & 3) == 0)
            store_shared(me.shared + AT_CROSSING + channel * 4, crossing_state(tail[m], channel, me));
    }
#pragma unroll
    for (int i = 24; i < 32; i++)
        x[i >> 2][i & 3] = 0.f;   // the last block's; the others' begin with the first product
}
