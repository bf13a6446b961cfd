// Keys that are the forgotten share of a channel, k = 1 - e^g, and the gradient of g, dg - e^g dk. Dense arrays, eight
// numbers a thread. LA_DTYPE: of g and dg; LA_KEYS: of k and dk, as LA_DTYPE.
#include "arguments/ops/ComplementArguments.cuh"
#include "attention/config.cuh"
#include "attention/decay.cuh"
#include "ops/numbers.cuh"

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
