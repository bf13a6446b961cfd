// Outputs of a chunk from accumulators (value row, token) to rows of tokens in memory, through shared memory.
#pragma once
#include "tile/copy.cuh"
#include "attention/config.cuh"

LA_DEVICE void store_matrix_transposed(u32 a, u32 x0, u32 x1, u32 x2, u32 x3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(x0), "r"(x1),
                 "r"(x2), "r"(x3)
                 : "memory");
}

// Rows of tokens, into columns row .. row + 16 TILES of a tile that only this warp uses.
template <class E, class X, int TILES, int C>
LA_DEVICE void stage_rows(const float (&out)[TILES][C / 8][4], u32 base, int row, int lane) {
    __syncwarp();
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int i = 0; i < C / 8; i += 2) {
            const float (&x)[4] = out[m][i], (&y)[4] = out[m][i + 1];
            const int v = row + m * 16;
            if constexpr (X::BYTES == 2) {
                const u32 p[4] = {E::pair(x[0], x[1]), E::pair(x[2], x[3]), E::pair(y[0], y[1]), E::pair(y[2], y[3])};
#if __CUDA_ARCH__ >= 900
                const int n = lane >> 3;   // the block whose row address this lane provides
                store_matrix_transposed(base + X::piece((i + (n >> 1)) * 8 + (lane & 7), v / 8 + (n & 1)), p[0], p[1],
                                        p[2], p[3]);
#else
#pragma unroll
                for (int n = 0; n < 4; n++)
                    store_shared_u32(base + X::at((i + (n >> 1)) * 8 + (lane >> 2), v + (n & 1) * 8 + (lane & 3) * 2),
                                     transpose_block(p[n]));
#endif
            } else {
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    const int t = i * 8 + (lane & 3) * 2 + (n & 1), r = v + (lane >> 2) + (n >> 1) * 8;
                    store_shared(base + X::at(t, r), x[n]);
                    store_shared(base + X::at(t + 8, r), y[n]);
                }
            }
        }
    __syncwarp();
}

// Those columns of the tile to memory: row r is token `token` + r * (REVERSE ? -1 : 1), column c of the tile is column
// `column` + c of rows of WIDTH elements.
// STEPS: only rows of tokens t with t % STEPS == STEPS - 1.
template <class X, int C, int COLUMNS, int WIDTH, int STEPS = 1>
LA_DEVICE void store_rows(char* rows, i64 stride, u32 base, int token, int T, int row, int column, int lane) {
    constexpr u32 PER_ROW = COLUMNS * X::BYTES / LA_ALIGN, PER_PIECE = 16 / LA_ALIGN;
    constexpr int STEP = LA_REVERSE ? -1 : 1;
    constexpr bool EVEN = 32 % PER_ROW == 0 && 32 / PER_ROW >= 8;   // a lane stays in its column
    // rows in an order that keeps a quarter warp out of its own banks
    const u32 l = (u32)lane / PER_ROW;
    const u32 r0 = PER_ROW == 4 ? (l & 1) << 2 | l >> 1 : PER_ROW == 2 ? (l & 8) | (l & 3) << 1 | (l & 7) >> 2 : l;
    int t = token + (int)r0 * STEP;
    char* to = rows + t * stride + ((column + row) * X::BYTES + (int)((u32)lane % PER_ROW) * LA_ALIGN);
#pragma unroll
    for (u32 n = 0; n < C * PER_ROW / 32; n++) {
        const u32 i = n * 32 + lane, c = EVEN ? (u32)lane % PER_ROW : i % PER_ROW,
                  r = EVEN ? r0 + n * (32 / PER_ROW) : i / PER_ROW;
        const int byte = (column + row) * X::BYTES + (int)c * LA_ALIGN;
        if (!EVEN) {
            t = token + (int)r * STEP;
            to = rows + t * stride + byte;
        }
        const bool valid = (u32)t < (u32)T && (STEPS == 1 || t % STEPS == STEPS - 1) &&
                           (WIDTH % X::COLUMNS == 0 || byte < WIDTH * X::BYTES);
        copy_out<LA_ALIGN>(to, base + X::piece(r, row * X::BYTES / 16 + c / PER_PIECE) + (c % PER_PIECE) * LA_ALIGN,
                           valid);
        if (EVEN) {
            t += STEP * (int)(32 / PER_ROW);
            to += STEP * (int)(32 / PER_ROW) * stride;
        }
    }
}
// The same by the 128 threads of a warpgroup, for rows of whole 16 bytes and 64 columns: all pieces are read, then
// written.
template <class X, int C, int WIDTH>
LA_DEVICE void store_group_rows(char* rows, i64 stride, u32 base, int token, int T, int row, int column, int thread) {
    constexpr int STEP = LA_REVERSE ? -1 : 1, ROW_BLOCKS = C / 16;
    const int r0 = thread >> 3, c = thread & 7, byte = (column + row + c * 8) * 2;
    u32 x[ROW_BLOCKS][4];
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++)
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[n][0]), "=r"(x[n][1]), "=r"(x[n][2]), "=r"(x[n][3])
                     : "r"(base + X::piece(r0 + n * 16, row / 8 + c)));
    char* to = rows + (token + r0 * STEP) * stride + byte;
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) {
        if ((u32)(token + (r0 + n * 16) * STEP) < (u32)T && (WIDTH % 64 == 0 || byte < WIDTH * 2))
            asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x[n][0]), "r"(x[n][1]), "r"(x[n][2]),
                         "r"(x[n][3])
                         : "memory");
        to += 16 * STEP * stride;
    }
}
