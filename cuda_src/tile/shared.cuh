// A tile in shared memory: rows of COLUMNS elements of BYTES bytes, in pieces of 16 bytes that are permuted within a
// row so that the 8 rows of one ldmatrix are in 8 different groups of banks.
#pragma once
#include "tile/types.cuh"

template <int COLUMNS_, int BYTES_> struct Tile {
    static constexpr int COLUMNS = COLUMNS_, BYTES = BYTES_, ROW = COLUMNS * BYTES, PIECES = ROW / 16;
    static_assert(PIECES % 2 == 0, "rows of whole 32 bytes");
    static constexpr int SPAN = PIECES % 8 == 0 ? 8 : PIECES % 4 == 0 ? 4 : 2;   // pieces that change places
    static constexpr int SHIFT = SPAN == 8 ? 0 : SPAN == 4 ? 1 : 2;
    static __device__ __forceinline__ u32 mix(int row) { return (row >> SHIFT) & (SPAN - 1); }
    // byte offset of piece p of a row
    static __device__ __forceinline__ u32 piece(int row, int p) { return row * ROW + ((p ^ mix(row)) << 4); }
    // the same for row `row` + r and piece `p` + b, where row is a multiple of 16, p of 2, and r < 16, b < 2 are a
    // lane's own: one term in row and p, which are mostly constants, and one in r, b and the low bits of p
    static __device__ __forceinline__ u32 block_piece(int row, int p, int r, int b) {
        return row * ROW + (p & ~(SPAN - 1)) * 16 + (r * ROW + (((p & (SPAN - 1)) << 4) ^ ((b ^ mix(r)) << 4)));
    }
    // the same of the element (row + r, column + c), where row and column are multiples of 8 and r, c < 8 are a lane's
    // own
    static __device__ __forceinline__ u32 block_at(int row, int column, int r, int c) {
        static_assert((8 >> SHIFT) % SPAN == 0, "rows 8 apart are permuted alike");
        constexpr int PER = 16 / BYTES;
        return block_piece(row, column / PER, r, c / PER) + (c % PER) * BYTES;
    }
    // byte offset of an element
    static __device__ __forceinline__ u32 at(int row, int column) {
        constexpr int PER = 16 / BYTES;
        return piece(row, column / PER) + (column % PER) * BYTES;
    }
};

// The four 8 x 8 blocks of 16-bit elements that the lanes' row addresses name; lane 4 r + c gets row r, columns 2c, 2c
// + 1.
LA_DEVICE void load_matrix(u32 (&r)[4], u32 a) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(a));
}
// The same with each block transposed: lane 4 r + c gets column r, rows 2c, 2c + 1.
LA_DEVICE void load_matrix_transposed(u32 (&r)[4], u32 a) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(a));
}
// An 8 x 8 block of 16-bit elements distributed over a warp as by load_matrix, transposed.
LA_DEVICE u32 transpose_block(u32 x) {
    u32 r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
    return r;
}
