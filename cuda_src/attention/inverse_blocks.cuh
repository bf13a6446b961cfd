// The blocks of an inverse of a unit lower matrix of 64 rows (inverse.cuh has the equations): diagonal blocks by
// substitution, block columns from them. The entry defines the chunk before: C, Square; and pair_at, decay_between.
#pragma once
#include "attention/store.cuh"
#include "attention/substitution.cuh"

LA_DEVICE u32 rows_at(int row, int column, int lane) {
    return Square::block_piece(row, column / 8, lane & 15, lane >> 4);
}   // of an A
LA_DEVICE u32 columns_at(int row, int column, int lane) {   // of two B, rows of memory being their columns
    return Square::block_piece(row, column / 8, (lane & 7) | ((lane >> 4) << 3), (lane >> 3) & 1);
}

// By half a warp: rho of diagonal block `block`, a row a lane
LA_DEVICE void store_rho(float* rhos, const float* diagonal, const float* sums, const float* roots, int block,
                         int lane) {
    const int r = lane & 15, i = 16 * block + r, before = r ? i - 1 : i;
    const float own = diagonal[r * 21], with = diagonal[(r ? r - 1 : 0) * 20 + r];
    float rho =
        __fdividef(with * roots[i], own * roots[before]) * (LA_DECAY ? decay_between(sums[i], sums[before]) : 1.f);
    rho = fminf(fmaxf(rho, -1.f), 1.f);
    rhos[i] = r && own > 1e-30f && fabsf(rho) >= 0.8f ? rho : 0.f;
}
LA_DEVICE float as_bf16(float x) { return __uint_as_float(pack_bf16(0.f, x) & 0xffff0000u); }

// values of 16 rows (across the tiles) and two columns a lane: row i takes over rho_i of the rounding error of row i
// - 1. Neighbours in a lane one after the other, lanes twice at once, which is as good as all in turn.
LA_DEVICE void pass_rounding_on(float (&f)[2][4], const float* rhos, int lane) {
    const float2 rho[2] = {pair_at(rhos, (lane & 3) * 2), pair_at(rhos, 8 + (lane & 3) * 2)};
    if (!__any_sync(0xffffffffu, rho[0].x != 0.f || rho[0].y != 0.f || rho[1].x != 0.f || rho[1].y != 0.f)) return;
    float left[2][2];   // rounding errors of the pair of rows
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const float x = f[h][2 * m], y = f[h][2 * m + 1] + rho[h].y * (x - as_bf16(x));
            left[h][m] = y - as_bf16(y);
        }
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const float first = __shfl_sync(0xffffffffu, left[0][m], (lane + 3) & 3, 4);
        const float second = __shfl_sync(0xffffffffu, (lane & 3) == 3 ? left[0][m] : left[1][m], (lane + 3) & 3, 4);
        f[0][2 * m] += rho[0].x * ((lane & 3) ? first : 0.f);
        f[1][2 * m] += rho[1].x * second;
#pragma unroll
        for (int h = 0; h < 2; h++) f[h][2 * m + 1] += rho[h].y * (f[h][2 * m] - as_bf16(f[h][2 * m]));
    }
}

// By half a warp: the inverse of diagonal block `block` by substitution, a column a lane; transposed, in float16 to
// `lower`
LA_DEVICE void invert_diagonal(u32 lower, const float* diagonal, int block, int lane) {
    float x[16];
    const int j = lane & 15;
    invert_column(x, diagonal, j);
#pragma unroll
    for (int p = 0; p < 2; p++) {
        const float (&y)[8] = (const float (&)[8])x[8 * p];
        asm volatile(
            "st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(lower + Square::piece(16 * block + j, 2 * block + p)),
            "r"(pack_f16(y[0], y[1])), "r"(pack_f16(y[2], y[3])), "r"(pack_f16(y[4], y[5])), "r"(pack_f16(y[6], y[7]))
            : "memory");
    }
}

// block column `warp` of A = sqrt(beta_i) X sqrt(beta_j) from `lower`, which holds L below the diagonal and on it the
// diagonal blocks of X, transposed. STRICT: sqrt(beta_i) X / sqrt(beta_j) without its diagonal of ones
template <bool STRICT = false> LA_DEVICE void store_inverse(u32 lower, u32 inverse, const float* rhos,
                                                            const float* sums, const float* roots, int warp, int lane) {
    const int row = lane >> 2, column = (lane & 3) * 2;
    u32 x[4][4];   // X_IJ^T as operands A
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i == warp) load_matrix(x[i], lower + rows_at(16 * i, 16 * i, lane));
    const float bj[2] = {sums[16 * warp + row], sums[16 * warp + row + 8]},
                from[2] = {roots[16 * warp + row], roots[16 * warp + row + 8]};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (i < warp) {   // above the diagonal
            store_matrix(inverse + rows_at(16 * i, 16 * warp, lane), 0, 0, 0, 0);
            continue;
        }
        float z[2][4] = {};
        if (i > warp) {
            float y[2][4] = {};
#pragma unroll
            for (int m = 0; m < i; m++)
                if (m >= warp) {
                    u32 b[4];
                    load_matrix(b, lower + columns_at(16 * i, 16 * m, lane));
                    mma_f16(y[0], x[m], b[0], b[1]);
                    mma_f16(y[1], x[m], b[2], b[3]);
                }
            const u32 less[4] = {pack_f16(-y[0][0], -y[0][1]), pack_f16(-y[0][2], -y[0][3]),
                                 pack_f16(-y[1][0], -y[1][1]), pack_f16(-y[1][2], -y[1][3])};
            u32 b[4];
            load_matrix_transposed(b, lower + rows_at(16 * i, 16 * i, lane));
            mma_f16(z[0], less, b[0], b[1]);
            mma_f16(z[1], less, b[2], b[3]);
#pragma unroll
            for (int n = 0; n < 4; n++) x[i][n] = pack_f16(z[n >> 1][2 * (n & 1)], z[n >> 1][2 * (n & 1) + 1]);
        } else
#pragma unroll
            for (int n = 0; n < 4; n++) {
                z[n >> 1][2 * (n & 1)] = low_f16(x[i][n]);
                z[n >> 1][2 * (n & 1) + 1] = high_f16(x[i][n]);
            }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float2 bi = pair_at(sums, 16 * i + 8 * h + column), to = pair_at(roots, 16 * i + 8 * h + column);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const float f = STRICT ? __fdividef(1.f, from[m]) : from[m];
                z[h][2 * m] *= to.x * f * decay_between(bi.x, bj[m]);
                z[h][2 * m + 1] *= to.y * f * decay_between(bi.y, bj[m]);
            }
        }
        pass_rounding_on(z, rhos + 16 * i, lane);
        store_matrix_transposed(inverse + columns_at(16 * i, 16 * warp, lane), pack_bf16(z[0][0], z[0][1]),
                                pack_bf16(z[0][2], z[0][3]), pack_bf16(z[1][0], z[1][1]), pack_bf16(z[1][2], z[1][3]));
    }
    __syncwarp();
    if (STRICT && lane < 16)
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(inverse + Square::at(16 * warp + lane, 16 * warp + lane)),
                     "h"((u16)0)
                     : "memory");
}
