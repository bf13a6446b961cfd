// Keys that take in what a channel forgets, k = 1 - e^g, and the gradient of g, dg - e^g dk. Dense arrays, eight numbers a thread.
// LA_DTYPE: of g and dg; LA_KEYS: of k and dk, as LA_DTYPE.
#include "arguments/ops/ComplementArguments.cuh"
#include "attention/config.cuh"
#include "attention/decay.cuh"

constexpr int PER = 8;

template <int KIND> LA_DEVICE void load_numbers(float (&x)[PER], const char* from, i64 first) {
    constexpr int BYTES = KIND == 2 ? 4 : 2;
    u32 w[PER * BYTES / 4];
#pragma unroll
    for (int i = 0; i < PER * BYTES / 16; i++) *(uint4*)(w + 4 * i) = *(const uint4*)(from + first * BYTES + 16 * i);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        if constexpr (KIND == 2) x[i] = __uint_as_float(w[i]);
        else if constexpr (KIND == 0) x[i] = i & 1 ? high_bf16(w[i / 2]) : low_bf16(w[i / 2]);
        else x[i] = i & 1 ? high_f16(w[i / 2]) : low_f16(w[i / 2]);
    }
}
template <int KIND> LA_DEVICE void store_numbers(char* to, i64 first, const float (&x)[PER]) {
    constexpr int BYTES = KIND == 2 ? 4 : 2;
    u32 w[PER * BYTES / 4];
#pragma unroll
    for (int i = 0; i < PER; i += KIND == 2 ? 1 : 2) {
        if constexpr (KIND == 2) w[i] = __float_as_uint(x[i]);
        else w[i / 2] = KIND == 0 ? pack_bf16(x[i], x[i + 1]) : pack_f16(x[i], x[i + 1]);
    }
#pragma unroll
    for (int i = 0; i < PER * BYTES / 16; i++) *(uint4*)(to + first * BYTES + 16 * i) = *(const uint4*)(w + 4 * i);
}

// e^x, x <= 0, and 1 - e^x: as exact as the kind of the keys asks
LA_DEVICE float exponential(float x) { return LA_KEYS == 2 ? expf(x) : exp2_approx(x * LOG2_E); }
LA_DEVICE float complement_of(float x) {
    if (LA_KEYS == 2) return -expm1f(x);
    float y = 1.f / 720;   // the series to x^6: 4e-7 of it where it is taken
    y = fmaf(y, x, 1.f / 120);
    y = fmaf(y, x, 1.f / 24);
    y = fmaf(y, x, 1.f / 6);
    y = fmaf(y, x, 1.f / 2);
    y = fmaf(y, x, 1.f);
    return x > -0.35f ? -x * y : 1.f - exponential(x);
}

extern "C" __global__ void __launch_bounds__(256) complement(const __grid_constant__ ComplementArguments a) {
    const i64 first = ((i64)blockIdx.x * 256 + threadIdx.x) * PER;
    if (first >= a.size) return;
    float x[PER];
    load_numbers<LA_DTYPE>(x, a.g, first);
#pragma unroll
    for (int i = 0; i < PER; i++) x[i] = complement_of(x[i]);
    store_numbers<LA_KEYS>(a.y, first, x);
}

extern "C" __global__ void __launch_bounds__(256) complement_vjp(const __grid_constant__ ComplementArguments a) {
    const i64 first = ((i64)blockIdx.x * 256 + threadIdx.x) * PER;
    if (first >= a.size) return;
    float x[PER], dk[PER], dg[PER];
    load_numbers<LA_DTYPE>(x, a.g, first);
    load_numbers<LA_KEYS>(dk, a.dk, first);
    load_numbers<LA_DTYPE>(dg, a.dg, first);
#pragma unroll
    for (int i = 0; i < PER; i++) x[i] = dg[i] - exponential(x[i]) * dk[i];
    store_numbers<LA_DTYPE>(a.y, first, x);
}
