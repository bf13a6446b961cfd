// Products of two dense arrays, element by element, and back: dx = y dz, added to the old values where `add` is not
// null, and dy = x dz. LA_DTYPE: of all arrays. Eight numbers a thread.
#include "arguments/ops/ProductArguments.cuh"
#include "attention/config.cuh"
#include "ops/numbers.cuh"

LA_DEVICE i64 first_number() { return ((i64)blockIdx.x * 256 + threadIdx.x) * PER; }

extern "C" __global__ void __launch_bounds__(256) product(const __grid_constant__ ProductArguments a) {
    const i64 first = first_number();
    if (first >= a.size) return;
    float x[PER], y[PER];
    load_numbers<LA_DTYPE>(x, a.x, first);
    load_numbers<LA_DTYPE>(y, a.y, first);
#pragma unroll
    for (int i = 0; i < PER; i++) x[i] *= y[i];
    store_numbers<LA_DTYPE>(a.z, first, x);
}

extern "C" __global__ void __launch_bounds__(256) product_vjp(const __grid_constant__ ProductArguments a) {
    const i64 first = first_number();
    if (first >= a.size) return;
    float x[PER], y[PER], dz[PER], sum[PER] = {};
    load_numbers<LA_DTYPE>(x, a.x, first);
    load_numbers<LA_DTYPE>(y, a.y, first);
    load_numbers<LA_DTYPE>(dz, a.z, first);
    if (a.add != nullptr) load_numbers<LA_DTYPE>(sum, a.add, first);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        sum[i] = fmaf(dz[i], y[i], sum[i]);
        x[i] *= dz[i];
    }
    store_numbers<LA_DTYPE>(a.dx, first, sum);
    store_numbers<LA_DTYPE>(a.dy, first, x);
}
