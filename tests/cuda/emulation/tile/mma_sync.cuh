// In place of cuda_src/tile/mma_sync.cuh: products of bfloat16, each lane from the operands of all, and of tf32, by
// moves.
#pragma once
#include "tile/types.cuh"

LA_DEVICE float half_of(u32 x, int upper) { return upper ? high_bf16(x) : low_bf16(x); }
LA_DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    static u32 lanes[2][32][32][6];   // in turn: a lane is at most one product ahead of another
    static int turns[1024];
    const int warp = Fibers::own().now / 32, lane = own_lane(), turn = turns[Fibers::own().now]++ & 1;
    u32(&all)[32][6] = lanes[turn][warp];
    memcpy(all[lane], a, 16);
    memcpy(all[lane] + 4, b, 8);
    __syncwarp();
    for (int e = 0; e < 4; e++) {
        const int row = e / 2, column = lane % 4 * 2 + e % 2;   // row: of g and g + 8
        float sum = 0.f;
        for (int k = 0; k < 16; k++) {
            const int j = k % 8 / 2, part = k / 8;
            sum +=
                half_of(all[lane / 4 * 4 + j][2 * part + row], k % 2) * half_of(all[column * 4 + j][4 + part], k % 2);
        }
        c[e] += sum;
    }
}
LA_DEVICE void mma_f16(float (&)[4], const u32 (&)[4], u32, u32) { abort(); }
LA_DEVICE void mma_tf32(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const auto read = [](u32 x) { return __uint_as_float(x & 0xffffe000u); };
    const int row = own_lane() / 4, column = own_lane() % 4 * 2;
    for (int k = 0; k < 8; k++) {
        const float low = read(__shfl_sync(~0u, k < 4 ? a0 : a2, row * 4 + k % 4)),
                    high = read(__shfl_sync(~0u, k < 4 ? a1 : a3, row * 4 + k % 4)),
                    left = read(__shfl_sync(~0u, k < 4 ? b0 : b1, column * 4 + k % 4)),
                    right = read(__shfl_sync(~0u, k < 4 ? b0 : b1, column * 4 + 4 + k % 4));
        c[0] = fmaf(low, left, c[0]);
        c[1] = fmaf(low, right, c[1]);
        c[2] = fmaf(high, left, c[2]);
        c[3] = fmaf(high, right, c[3]);
    }
}
