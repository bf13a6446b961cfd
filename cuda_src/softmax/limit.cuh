// Which keys have no weight: those whose 2^(z_ij - m_i) is below 2^-126, which is 0 (exp2_approx), for all queries of a
// block. For queries from i on and keys up to j, and gates of 0 at most,
//
//     z_ij <= scale log2(e) |q| |k| + log2 of the decay from j to i
//
// Skipping them changes no bit: m_i is that of nearer keys. Nothing is skipped where a number is NaN.
#pragma once
#include "softmax/decays.cuh"

LA_DEVICE float max_or_nan(float x, float y) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
    return r;
}
LA_DEVICE float min_or_nan(float x, float y) { return -max_or_nan(-x, -y); }
LA_DEVICE float warp_max_or_nan(float x) {
#pragma unroll
    for (int d = 16; d; d >>= 1) x = max_or_nan(x, __shfl_xor_sync(0xffffffffu, x, d));
    return x;
}
LA_DEVICE float warp_min_or_nan(float x) { return -warp_max_or_nan(-x); }
// the squares of eight numbers of 16 bits, added up
LA_DEVICE float add_squares(float sum, const uint4& x) {
    const u32 y[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const float low = LA_DTYPE == 1 ? low_f16(y[n]) : low_bf16(y[n]),
                    high = LA_DTYPE == 1 ? high_f16(y[n]) : high_bf16(y[n]);
        sum += low * low + high * high;
    }
    return sum;
}
// bound: scale log2(e) |q| |k| - m_i at most. 2 more than needed, for roundings
LA_DEVICE bool weightless(float bound, const Decays& i, const Decays& j) {
    return bound + decay_between(i, j) < -128.f;
}
