// (1 - A_ab)^T X = Y for a chunk, from the last block of 16 rows to the first: of a warp's accumulators, 16 columns of
// X, transposed. Operands of blocks, for solve.cuh too.
#pragma once
#include "free/factors.cuh"

typedef Tile<16, 2> Small;   // of a diagonal block's inverse, transposed

// the rows of two accumulators as an operand A, and its rounding error
LA_DEVICE void split_operand(u32 (&hi)[4], u32 (&lo)[4], const float (&x)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float y = x[i >> 1][2 * (i & 1)], z = x[i >> 1][2 * (i & 1) + 1];
        hi[i] = pack_bf16(y, z);
        lo[i] = pack_bf16(y - low_bf16(hi[i]), z - high_bf16(hi[i]));
    }
}
LA_DEVICE void multiply_pair(float (&x)[2][4], const u32 (&a)[4], const Bfloat16::B (&b)[2]) {
    mma_bf16(x[0], a, b[0].x);
    mma_bf16(x[1], a, b[1].x);
}
LA_DEVICE void pack_operand(u32 (&a)[4], const float (&x)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = pack_bf16(x[i >> 1][2 * (i & 1)], x[i >> 1][2 * (i & 1) + 1]);
}
// Entries above the diagonal of a diagonal block become zero, if `strict` its diagonal too
LA_DEVICE void clear_upper(float (&x)[2][4], bool strict, int lane) {
    const int below = (lane >> 2) - (lane & 3) * 2 - strict;   // the diagonal, of x[0][0] and x[1][2]
    x[1][0] = x[1][1] = 0.f;
    if (below < 0) x[0][0] = x[1][2] = 0.f;
    if (below < 1) x[0][1] = x[1][3] = 0.f;
}
// Blocks of 16 columns of a block of 16 rows
LA_DEVICE void store_blocks(u32 square, const u32 (&x)[4][4], int row, int lane, int last = 3) {
#pragma unroll
    for (int J = 0; J < 4; J++)
        if (J <= last)
            store_matrix(square + Square::block_piece(row, 2 * J, lane & 15, lane >> 4), x[J][0], x[J][1], x[J][2],
                         x[J][3]);
}

// pairs: A_ab; blocks: inverses of its diagonal blocks, two terms each
LA_DEVICE void solve_transposed(u32 (&x)[4][4], const float (&y)[8][4], u32 pairs, u32 blocks, int lane) {
#pragma unroll
    for (int i = 3; i >= 0; i--) {
        float z[2][4] = {}, sum[2][4];
#pragma unroll
        for (int n = 0; n < 8; n++) sum[n >> 2][n & 3] = y[2 * i + (n >> 2)][n & 3];
#pragma unroll
        for (int j = i + 1; j < 4; j++) {
            Bfloat16::B b[2];
            load_b_columns<Bfloat16, Square>(b, pairs, 16 * j, 16 * i, lane);
            multiply_pair(sum, x[j], b);
        }
        u32 hi[4], lo[4];
        Bfloat16::B high[2], low[2];
        split_operand(hi, lo, sum);
        load_b_rows<Bfloat16, Small>(high, blocks + 2 * i * 512, 0, 0, lane);
        load_b_rows<Bfloat16, Small>(low, blocks + (2 * i + 1) * 512, 0, 0, lane);
        multiply_pair(z, lo, high);
        multiply_pair(z, hi, low);
        multiply_pair(z, hi, high);
        pack_operand(x[i], z);
    }
}
