// In front of cuda_src/tile/shared.cuh: loads of blocks of 8 x 8, by moves between lanes.
#pragma once
#define load_matrix device_load_matrix
#define load_matrix_transposed device_load_matrix_transposed
#include_next "tile/shared.cuh"
#undef load_matrix
#undef load_matrix_transposed

struct Blocks {   // the addresses of the rows of four blocks, from all lanes
    const u32* rows;
    u32 at(int block, int row, int column) const {
        u16 x;
        memcpy(&x, memory + rows[8 * block + row] + 2 * column, sizeof x);
        return x;
    }
};
LA_DEVICE Blocks blocks_of(u32 a) {
    static u32 lanes[2][32][32];   // in turn: a lane is at most one load ahead of another
    static int turns[1024];
    const int now = Fibers::own().now, turn = turns[now]++ & 1;
    lanes[turn][now / 32][now % 32] = a;
    __syncwarp();
    return {lanes[turn][now / 32]};
}
LA_DEVICE void load_matrix(u32 (&r)[4], u32 a) {
    const Blocks blocks = blocks_of(a);
    const int row = own_lane() / 4, column = own_lane() % 4 * 2;
    for (int m = 0; m < 4; m++) r[m] = blocks.at(m, row, column) | blocks.at(m, row, column + 1) << 16;
}
LA_DEVICE void load_matrix_transposed(u32 (&r)[4], u32 a) {
    const Blocks blocks = blocks_of(a);
    const int column = own_lane() / 4, row = own_lane() % 4 * 2;
    for (int m = 0; m < 4; m++) r[m] = blocks.at(m, row, column) | blocks.at(m, row + 1, column) << 16;
}
