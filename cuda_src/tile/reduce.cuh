// Sums over the lanes of a warp.
#pragma once
#include "tile/types.cuh"

// sum over lanes <= this one
template <class F> LA_DEVICE F prefix_sum(F x, int lane) {
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        const F y = __shfl_up_sync(0xffffffffu, x, d);
        if (lane >= d) x += y;
    }
    return x;
}
// sum over all lanes, in every lane
template <class F> LA_DEVICE F warp_sum(F x) {
#pragma unroll
    for (int d = 16; d; d >>= 1) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}
// One exchange of column_sums: lanes whose bit D is set keep the upper half of 2 HALF values, the others the lower.
template <int D, int HALF, int N> LA_DEVICE void exchange_half(float (&x)[N], int lane) {
    const bool upper = lane & D;
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        const float sent = upper ? x[i] : x[i + HALF], own = upper ? x[i + HALF] : x[i];
        x[i] = own + __shfl_xor_sync(0xffffffffu, sent, D);
    }
}
// Sums over the eight lanes that share lane & 3, N values a lane (a multiple of 8): each is left with one eighth of the
// N sums, in x[0 .. N / 8).
template <int N> LA_DEVICE void column_sums(float (&x)[N], int lane) {
    static_assert(N % 8 == 0, "N values over 8 lanes");
    exchange_half<4, N / 2>(x, lane);
    exchange_half<8, N / 4>(x, lane);
    exchange_half<16, N / 8>(x, lane);
}
// which eighth column_sums leaves in this lane
LA_DEVICE int column_eighth(int lane) { return ((lane >> 2) & 1) * 4 + ((lane >> 3) & 1) * 2 + ((lane >> 4) & 1); }
