// In front of cuda_src/tile/mma.cuh: products of 16 x 8 by 8 x 8 numbers in tf32, by moves between lanes.
#pragma once
#define mma_tf32 device_mma_tf32
#include_next "tile/mma.cuh"
#undef mma_tf32

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
LA_DEVICE void mma_tf32(float (&c)[4], const u32 (&a)[8], const u32 (&b)[4]) {
    mma_tf32(c, a[0], a[2], a[1], a[3], b[0], b[1]);
    mma_tf32(c, a[4], a[6], a[5], a[7], b[2], b[3]);
}
