// The log decay of a raw projection, g = -e^{A_log} softplus(a + bias), and its gradients.
#include "arguments/ops/GateFormulaArguments.cuh"
#include "attention/config.cuh"

struct Column {   // of a token's numbers
    float bias, rate;
    __device__ __forceinline__ Column(const GateFormulaArguments& a, u32 column) : bias(a.bias ? a.bias[column] : 0.f), rate(-expf(a.A_log[column / a.each])) {}
    __device__ __forceinline__ float raw(const GateFormulaArguments& a, i64 n) const {
        if (LA_DTYPE == 2) return ((const float*)a.raw)[n] + bias;
        const u32 bits = ((const u16*)a.raw)[n];
        return (LA_DTYPE == 0 ? low_bf16(bits) : low_f16(bits)) + bias;
    }
};
LA_DEVICE float softplus(float x, float small) { return fmaxf(x, 0.f) + log1pf(small); }   // small: e^{-|x|}

extern "C" __global__ void __launch_bounds__(256) gate_formula(const __grid_constant__ GateFormulaArguments a) {
    const i64 n = (i64)blockIdx.x * 256 + threadIdx.x;
    if (n >= a.tokens * a.width) return;
    const Column column(a, n % a.width);
    const float x = column.raw(a, n);
    a.g[n] = column.rate * softplus(x, expf(-fabsf(x)));
}

// One block a block of tokens and 256 columns; threads are over the columns, and over tokens where columns are fewer.
extern "C" __global__ void __launch_bounds__(256) gate_formula_vjp(const __grid_constant__ GateFormulaArguments a) {
    __shared__ float2 sums[256];
    const u32 blocks = (a.width + 255) / 256, first = blockIdx.x % blocks * 256, columns = min(256u, a.width - first), beside = 256 / columns;
    const u32 own = threadIdx.x % columns, row = threadIdx.x / columns;
    const i64 begin = (i64)(blockIdx.x / blocks) * a.block, end = min(begin + a.block, a.tokens);
    const Column column(a, first + own);
    float2 sum = {0.f, 0.f};
    if (row < beside)
        for (i64 t = begin + row; t < end; t += beside) {
            const i64 n = t * a.width + first + own;
            const float x = column.raw(a, n), dg = a.dg[n], small = expf(-fabsf(x)), g = column.rate * softplus(x, small);
            const float da = column.rate * dg * ((x >= 0.f ? 1.f : small) / (1.f + small));
            a.da[n] = da;
            sum.x += da;
            sum.y += fabsf(g) > 3e38f ? 0.f : g * dg;   // a hard reset has no gradient
        }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (row) return;
    for (u32 r = 1; r < beside; r++) {
        sum.x += sums[r * columns + own].x;
        sum.y += sums[r * columns + own].y;
    }
    float* to = a.parts + (i64)(blockIdx.x / blocks) * 2 * a.width + first + own;
    to[0] = sum.x;
    to[a.width] = sum.y;
}
