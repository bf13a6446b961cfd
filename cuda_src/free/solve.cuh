// (1 - A_ab) X = Y for a chunk, by blocks of 16 rows from the first to the last.
//
// A warp has 16 columns of X, transposed: the accumulators of a block are the operand of the next one's products.
// Inverses of diagonal blocks are by substitution in float32, in two terms of bfloat16, and so are the blocks of A_ab
// below them: where the same direction is erased again and again, their rounding errors are multiplied by the
// norm of the inverse. A block of X is rounded once, as all that follows reads it. Columns of N begin at their own
// block: above it A_ak is 0.
#pragma once
#include "free/scaled.cuh"
#include "free/transposed_solve.cuh"
#include "attention/substitution.cuh"

template <class X> LA_DEVICE u32 transposed_at(u32 tile, int row, int column,
                                               int lane) {   // of a block whose columns are an operand's rows
    return tile + X::block_piece(row, column / 8, (lane & 7) | ((lane >> 4) << 3), (lane >> 3) & 1);
}
// 16 columns of a block of 16 rows as two accumulators
template <class X> LA_DEVICE void load_columns(float (&x)[2][4], u32 tile, int row, int column, int lane) {
    u32 y[4];
    load_matrix_transposed(y, transposed_at<X>(tile, row, column, lane));
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[i >> 1][2 * (i & 1)] = low_bf16(y[i]);
        x[i >> 1][2 * (i & 1) + 1] = high_bf16(y[i]);
    }
}
template <class X> LA_DEVICE void store_columns(u32 tile, const u32 (&x)[4], int row, int column, int lane) {
    store_matrix_transposed(transposed_at<X>(tile, row, column, lane), x[0], x[1], x[2], x[3]);
}
// By half a warp, a column a lane: the inverse of diagonal block `block`, in its place
LA_DEVICE void invert_block(const Chunk& t, const float* diagonals, int block, int lane) {
    if (lane >= 16) return;
    float x[16];
    invert_column(x, diagonals + block * (DIAGONAL / 4), lane);
    __syncwarp(0xffff);
#pragma unroll
    for (int p = 0; p < 2; p++) {
        u32 hi[4], lo[4];
        split_operand(hi, lo, (const float (&)[2][4])x[8 * p]);
        const u32 at = Small::piece(lane, p);
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(t.block(block, 0) + at), "r"(hi[0]), "r"(hi[1]),
                     "r"(hi[2]), "r"(hi[3])
                     : "memory");
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(t.block(block, 1) + at), "r"(lo[0]), "r"(lo[1]),
                     "r"(lo[2]), "r"(lo[3])
                     : "memory");
    }
}
// X for 16 columns in place of `tile`. begin: the first block that is not 0
template <class T> LA_DEVICE void solve_columns(const Chunk& t, u32 tile, int column, int begin, int lane) {
    u32 x[4][4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (i < begin) continue;
        float y[2][4], z[2][4] = {};
        load_columns<T>(y, tile, 16 * i, column, lane);
#pragma unroll
        for (int j = 0; j < i; j++) {
            Bfloat16::B b[2], rest[2];
            load_b_rows<Bfloat16, Square>(b, t.square(A_AB), 16 * i, 16 * j, lane);
            load_b_rows<Bfloat16, Small>(rest, t.rest(i, j), 0, 0, lane);
            multiply_pair(y, x[j], rest);
            multiply_pair(y, x[j], b);
        }
        u32 hi[4], lo[4];
        Bfloat16::B high[2], low[2];
        split_operand(hi, lo, y);
        load_b_columns<Bfloat16, Small>(high, t.block(i, 0), 0, 0, lane);
        load_b_columns<Bfloat16, Small>(low, t.block(i, 1), 0, 0, lane);
        multiply_pair(z, lo, high);
        multiply_pair(z, hi, low);
        multiply_pair(z, hi, high);
        pack_operand(x[i], z);
        store_columns<T>(tile, x[i], 16 * i, column, lane);
    }
}
