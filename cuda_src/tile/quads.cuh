// Sums over the four lanes of a quad by products with a matrix of ones, so that no lane moves numbers itself.
#pragma once
#include "tile/mma.cuh"

// sums of lane 4 r + column: += the sum of x over lanes 4 r .. 4 r + 3; the others keep theirs. x is read with the
// first 10 bits after the point; EXACT: with 21
template <bool EXACT> LA_DEVICE void sum_of_quads(float (&sums)[4], const float (&x)[4], int column, int lane) {
    const u32 one = __float_as_uint(1.f), first = lane / 4 == 2 * column ? one : 0;
    const u32 second = lane / 4 == 2 * column + 1 ? one : 0;
    float c[4] = {sums[0], sums[2], sums[1], sums[3]};
    if constexpr (EXACT) {
        u32 hi[4], lo[4];
#pragma unroll
        for (int i = 0; i < 4; i++) split_tf32(x[i], hi[i], lo[i]);
        mma_tf32(c, lo[0], lo[1], lo[2], lo[3], first, second);
        mma_tf32(c, hi[0], hi[1], hi[2], hi[3], first, second);
    } else
        mma_tf32(c, __float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]), first,
                 second);
    sums[0] = c[0], sums[2] = c[1], sums[1] = c[2], sums[3] = c[3];
}
template <bool> LA_DEVICE void sum_of_quads(double (&sums)[4], const double (&x)[4], int column, int lane) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        double y = x[i];
        y += __shfl_xor_sync(~0u, y, 1);
        y += __shfl_xor_sync(~0u, y, 2);
        sums[i] += lane % 4 == column ? y : 0;
    }
}
