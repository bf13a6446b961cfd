// The log decay of a raw projection, g = -e^{A_log} softplus(a + bias), and its gradients; one number a thread.
#include "attention/config.cuh"

struct Arguments {
    const void* raw;                 // (tokens, width), of kind LA_DTYPE
    const float *A_log, *bias, *dg;  // (heads), (width) or null, (tokens, width)
    float *g, *da, *product;         // the formula; its gradient by a; g dg, 0 for a hard reset
    i64 count;
    u32 width, each;                 // of a token; numbers of a head
};

LA_DEVICE float raw_at(const Arguments& a, i64 n) {
    if (LA_DTYPE == 2) return ((const float*)a.raw)[n];
    const u32 bits = ((const u16*)a.raw)[n];
    return LA_DTYPE == 0 ? low_bf16(bits) : low_f16(bits);
}
LA_DEVICE float softplus(float x) { return fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))); }

LA_DEVICE bool place(const Arguments& a, i64& n, float& x, float& rate) {
    n = (i64)blockIdx.x * 256 + threadIdx.x;
    if (n >= a.count) return false;
    const u32 column = n % a.width;
    x = raw_at(a, n) + (a.bias ? a.bias[column] : 0.f);
    rate = -expf(a.A_log[column / a.each]);
    return true;
}

extern "C" __global__ void __launch_bounds__(256) gate_formula(const __grid_constant__ Arguments a) {
    i64 n;
    float x, rate;
    if (place(a, n, x, rate)) a.g[n] = rate * softplus(x);
}

extern "C" __global__ void __launch_bounds__(256) gate_formula_vjp(const __grid_constant__ Arguments a) {
    i64 n;
    float x, rate;
    if (!place(a, n, x, rate)) return;
    const float dg = a.dg[n], g = rate * softplus(x), small = expf(-fabsf(x));
    a.da[n] = rate * dg * ((x >= 0.f ? 1.f : small) / (1.f + small));
    a.product[n] = fabsf(g) > 3e38f ? 0.f : g * dg;
}
