// Log decays of pairs of tokens, and numbers of rows of a tile.
#pragma once
#include "tile/types.cuh"

constexpr float LOG2_E = 1.4426950408889634f;
LA_DEVICE float minus_infinity() { return __int_as_float(0xff800000); }
LA_DEVICE float log2_approx(float x) {
    float r;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// Sums of log2 decays of a head: of the tokens since its last reset (a decay of 0) as hi + lo, and the number of resets
// before.
typedef float4 Decays;
// log2 of the decay from key j to query i >= j: no difference of sums that hold a reset
LA_DEVICE float decay_between(const Decays& i, const Decays& j) {
    return __float_as_int(i.z) == __float_as_int(j.z) ? (i.x - j.x) + (i.y - j.y) : minus_infinity();
}
LA_DEVICE Decays load_decays(u32 a) {
    Decays r;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w) : "r"(a));
    return r;
}
LA_DEVICE void store_decays(u32 a, const Decays& x) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(a), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
}

// A row's number of a lane, summed over the four lanes that share the row
LA_DEVICE float row_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
LA_DEVICE float warp_max(float x) {
#pragma unroll
    for (int d = 16; d; d >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
    return x;
}
LA_DEVICE float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
