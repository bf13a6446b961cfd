// Inverses of 64 tokens by four warps, in two terms of 16 bits, N = tril(W W^T, -1):
//
//     A = diag(beta) (I + N diag(beta))^-1 for factors.cu,
//     S = (I + diag(beta) N)^-1 for factors_adjoint.cu (BY_ROWS: L is scaled so),     A = S diag(beta)
//
// A row of A keeps its digits where its strength is small, a column of S does.
//
// As attention/inverse.cuh, without decays: diagonal blocks of 16 rows by substitution in float32, block columns from
// them,
//
//     T_IJ = -T_II sum over J <= M < I of L_IM T_MJ,
//
// with operands in float16 (T is of the order of 1) and sums in float32.
#pragma once
#include "path/place.cuh"

typedef Panels<64, 64> Square;
LA_DEVICE float2 pair_at(const float* x, int i) { return *(const float2*)(x + i); }
LA_DEVICE float decay_between(float, float) { return 1.f; }
#include "attention/inverse_blocks.cuh"

// Row block `warp` of L = N diag(beta), or diag(beta) N: blocks left of the diagonal in float16 to `lower`, the
// diagonal one transposed to `diagonals`
template <bool BY_ROWS> LA_DEVICE void store_lower(const float (&x)[8][4], u32 lower, float* diagonals,
                                                   const float* beta, int warp, int lane) {
    const int row = lane >> 2, column = (lane & 3) * 2;
    const float of[2] = {beta[16 * warp + row], beta[16 * warp + row + 8]};
    float* const diagonal = diagonals + warp * (DIAGONAL / 4);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (j > warp) continue;
        float y[8];   // two tiles of 8 columns
#pragma unroll
        for (int i = 0; i < 8; i++)
            y[i] = x[2 * j + (i >> 2)][i & 3] *
                   (BY_ROWS ? of[(i >> 1) & 1] : beta[16 * j + 8 * (i >> 2) + column + (i & 1)]);
        if (j < warp) {
            store_matrix(lower + rows_at(16 * warp, 16 * j, lane), pack_f16(y[0], y[1]), pack_f16(y[2], y[3]),
                         pack_f16(y[4], y[5]), pack_f16(y[6], y[7]));
            continue;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int r = row + 8 * ((i >> 1) & 1), c = 8 * (i >> 2) + column + (i & 1);
            diagonal[c * 20 + r] = r > c ? y[i] : 0.f;
        }
    }
}
// Block (i, column) of A in memory from its transpose
LA_DEVICE void store_block(u32 to, int i, int column, const u32 (&x)[4], int lane) {
    store_matrix_transposed(to + columns_at(16 * i, 16 * column, lane), x[0], x[1], x[2], x[3]);
}
// Block column `warp` of A from `lower`, which holds L below the diagonal and on it the diagonal blocks of T,
// transposed: the nearest 16 bits to `high`, and the rest to the registers `rest`
template <bool BY_ROWS> LA_DEVICE void store_inverse_high(u32 (&rest)[4][4], u32 lower, u32 high, const float* beta,
                                                          int warp, int lane) {
    u32 x[4][4];   // T_IJ^T as operands
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i == warp) load_matrix(x[i], lower + rows_at(16 * i, 16 * i, lane));
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float z[2][4] = {};
        if (i > warp) {
            float y[2][4] = {};
            u32 b[4];
#pragma unroll
            for (int m = 0; m < i; m++)
                if (m >= warp) {
                    load_matrix(b, lower + columns_at(16 * i, 16 * m, lane));
                    mma_f16(y[0], x[m], b[0], b[1]);
                    mma_f16(y[1], x[m], b[2], b[3]);
                }
            const u32 less[4] = {pack_f16(-y[0][0], -y[0][1]), pack_f16(-y[0][2], -y[0][3]),
                                 pack_f16(-y[1][0], -y[1][1]), pack_f16(-y[1][2], -y[1][3])};
            load_matrix_transposed(b, lower + rows_at(16 * i, 16 * i, lane));
            mma_f16(z[0], less, b[0], b[1]);
            mma_f16(z[1], less, b[2], b[3]);
#pragma unroll
            for (int n = 0; n < 4; n++) x[i][n] = pack_f16(z[n >> 1][2 * (n & 1)], z[n >> 1][2 * (n & 1) + 1]);
        } else if (i == warp)
#pragma unroll
            for (int n = 0; n < 4; n++) {
                z[n >> 1][2 * (n & 1)] = low_f16(x[i][n]);
                z[n >> 1][2 * (n & 1) + 1] = high_f16(x[i][n]);
            }
        u32 near[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {   // rows of the transpose are columns of A
            const float2 of = BY_ROWS ? float2{1.f, 1.f} : pair_at(beta, 16 * i + 8 * (n >> 1) + (lane & 3) * 2);
            const float u = z[n >> 1][2 * (n & 1)] * of.x, v = z[n >> 1][2 * (n & 1) + 1] * of.y;
            near[n] = pack_bf16(u, v);
            rest[i][n] = pack_bf16(u - low_bf16(near[n]), v - high_bf16(near[n]));
        }
        store_block(high, i, warp, near, lane);
    }
}
