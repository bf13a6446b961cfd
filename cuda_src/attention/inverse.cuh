// A = E . sqrt(beta_i) T_inv sqrt(beta_j) of a chunk, T_inv = (1 + L)^-1, L_ij = sqrt(beta_i) k_i.k_j sqrt(beta_j) for
// j < i, by four warps.
//
// The decay is taken out of the inverse and put back after it: with the factors E_ij = 2^(b_i - b_j) the inverse of 1 +
// E . L is E . T_inv. Half of beta is on each side, so that a tiny one keeps its digits in 16 bits. Diagonal blocks of
// 16 rows are inverted by substitution in float32; block columns follow from them,
//
//     T_IJ = -T_II sum over J <= M < I of L_IM T_MJ
//
// with operands in float16 (T_inv is of the order of 1) and sums in float32. A warp makes a row block of L, and a block
// column of T_inv, transposed, so that each accumulator is the next operand A.
//
// Where keys repeat, A = 1 - k.k below the diagonal loses its digits in bfloat16, and each row the same ones: what a
// chunk adds to the state is off by the sum. The rounding error of row i is therefore passed on to row i + 1, as far
// as its key stands for the one before:
//
//     rho_i = 2^(b_i - b_(i-1)) k_i.k_(i-1) / k_i.k_i where its size is 0.8 or more, else 0; within blocks of 16 rows
#pragma once
#include "attention/delta.cuh"
#include "attention/inverse_blocks.cuh"

// K K^T by the warpgroup: row block `warp` of it in warp `warp`
LA_DEVICE void key_gram(float (&x)[8][4], u32 k) {
    const u64 keys = panel_descriptor(k);
    accumulator_fence(x);
    products_begin();
    multiply_ABt<Tokens>(x, keys, keys);
    products_commit();
    end_products<0>(x);
}

// 1 / |k| of a warp's 16 rows, from the diagonal of the gram
LA_DEVICE void store_lengths(const float (&x)[8][4], float* lengths, float eps, int warp, int lane) {
    if (lane >> 3 != (lane & 3)) return;   // this one has two numbers of the diagonal
    const bool odd = lane & 4;
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (j == warp) {
            lengths[16 * warp + (lane >> 2)] = over_length(odd ? x[2 * j][1] : x[2 * j][0], eps);
            lengths[16 * warp + (lane >> 2) + 8] = over_length(odd ? x[2 * j + 1][3] : x[2 * j + 1][2], eps);
        }
}

// row block `warp` of L: blocks left of the diagonal in float16 to `lower`, the diagonal one transposed to `diagonal`,
// its diagonal being beta_i k_i.k_i; with LA_UNIT rows and columns are divided by the keys' lengths
LA_DEVICE void store_lower(const float (&x)[8][4], u32 lower, float* diagonal, const float* roots, const float* lengths,
                           int warp, int lane) {
    const int row = lane >> 2, column = (lane & 3) * 2;
    float to[2] = {roots[16 * warp + row], roots[16 * warp + row + 8]};
    if (LA_UNIT) {
        to[0] *= lengths[16 * warp + row];
        to[1] *= lengths[16 * warp + row + 8];
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (j > warp) continue;
        float z[2][4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float2 from = pair_at(roots, 16 * j + 8 * h + column);
            if (LA_UNIT) {
                const float2 rk = pair_at(lengths, 16 * j + 8 * h + column);
                from = {from.x * rk.x, from.y * rk.y};
            }
#pragma unroll
            for (int m = 0; m < 2; m++) {
                z[h][2 * m] = x[2 * j + h][2 * m] * (to[m] * from.x);
                z[h][2 * m + 1] = x[2 * j + h][2 * m + 1] * (to[m] * from.y);
            }
        }
        if (j < warp)
            store_matrix(lower + rows_at(16 * warp, 16 * j, lane), pack_f16(z[0][0], z[0][1]),
                         pack_f16(z[0][2], z[0][3]), pack_f16(z[1][0], z[1][1]), pack_f16(z[1][2], z[1][3]));
        else
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int r = row + 8 * ((i >> 1) & 1), c = 8 * (i >> 2) + column + (i & 1);
                diagonal[c * 20 + r] = r >= c ? z[i >> 2][i & 3] : 0.f;
            }
    }
}
