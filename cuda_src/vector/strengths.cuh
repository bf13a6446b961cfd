// N of vector_inverse.cu, strictly lower, and behind it beta of a chunk's tokens, 64 floats: with E = V - Kc S
//
//     U = beta E + N beta E        dE = beta (dU + N^T dU)
//
// where only what N multiplies is rounded. If a key is like the one before it, errors of the two would add up in the
// state: there the forward's chain takes two terms, and transfers and the backward the rounded operand in the sum as
// well. Beta is negative at such tokens, at those before them and, if there are any, at token 0.
#pragma once
#include "tile/types.cuh"

constexpr int STRENGTHS = 64 * 4;   // bytes of a chunk
LA_DEVICE float2 strengths_of(u32 strengths, int tile, int lane) {
    return load_shared2(strengths + (8 * tile + (lane & 3) * 2) * 4);
}

// By one warp, two tokens a lane. rhos: 0 where a key is not like the one before it
LA_DEVICE void store_strengths(u32 to, const float* roots, const float* rhos, int lane) {
    const int i = 2 * lane;
    const bool first = rhos[i] != 0.f, second = rhos[i + 1] != 0.f, third = lane < 31 && rhos[i + 2] != 0.f;
    const bool any = __any_sync(0xffffffffu, first || second);
    const float x = roots[i] * roots[i], y = roots[i + 1] * roots[i + 1];
    store_shared2(to + i * 4, first || second || (any && lane == 0) ? -x : x, second || third ? -y : y);
}
// accumulators (values by tokens) times beta
LA_DEVICE void scale_by_strengths(float (&x)[8][4], u32 strengths, int lane) {
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float2 b = strengths_of(strengths, n, lane);
        x[n][0] *= fabsf(b.x);
        x[n][1] *= fabsf(b.y);
        x[n][2] *= fabsf(b.x);
        x[n][3] *= fabsf(b.y);
    }
}
LA_DEVICE bool keys_are_alike(u32 strengths) {
    return load_shared(strengths) < 0.f;
}   // some; the same for all threads
// The first token of which it is known by then that its key, or one before it, is like the one before (of token 1 a
// token later); 64 without
LA_DEVICE int first_alike(u32 strengths, int lane) {
    if (!keys_are_alike(strengths)) return 64;
    const u32 low = __ballot_sync(0xffffffffu, lane > 0 && load_shared(strengths + lane * 4) < 0.f);
    const u32 high = __ballot_sync(0xffffffffu, load_shared(strengths + (lane + 32) * 4) < 0.f);
    return 1 + (low ? __ffs(low) - 1 : __ffs(high) + 31);   // the token before it is the first that is marked
}
// accumulators become their operands where keys are alike
LA_DEVICE void round_alike(float (&x)[8][4], const u32 (&operands)[4][4], u32 strengths, int lane) {
    if (!keys_are_alike(strengths)) return;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float2 b = strengths_of(strengths, n, lane);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const u32 y = operands[n >> 1][2 * (n & 1) + m];
            if (b.x < 0.f) x[n][2 * m] = low_bf16(y);
            if (b.y < 0.f) x[n][2 * m + 1] = high_bf16(y);
        }
    }
}
