// Gates of raw projections, and their gradients, a = raw + bias, rate = e^A_log:
//
//     gate_formula    g = -rate softplus(a)
//     bounded_gate    g = bound sigmoid(rate a); the rate is 1 without A_log
#include "arguments/ops/GateFormulaArguments.cuh"
#include "attention/config.cuh"
#include "ops/formulas.cuh"

template <bool BOUNDED> struct Column {   // of a token's numbers; rate: with its sign
    float bias, rate;
    __device__ __forceinline__ Column(const GateFormulaArguments& a, u32 column) : bias(a.bias ? a.bias[column] : 0.f) {
        if (BOUNDED) rate = a.A_log ? expf(a.A_log[column / a.each]) : 1.f;
        else rate = -expf(a.A_log[column / a.each]);
    }
    __device__ __forceinline__ float raw(const GateFormulaArguments& a, i64 n) const {
        if (LA_DTYPE == 2) return ((const float*)a.raw)[n] + bias;
        const u32 bits = ((const u16*)a.raw)[n];
        return (LA_DTYPE == 0 ? low_bf16(bits) : low_f16(bits)) + bias;
    }
};

template <bool BOUNDED> LA_DEVICE void forward(const GateFormulaArguments& a) {
    const i64 n = (i64)blockIdx.x * 256 + threadIdx.x;
    if (n >= a.tokens * a.width) return;
    const Column<BOUNDED> column(a, n % a.width);
    const float x = BOUNDED ? column.rate * column.raw(a, n) : column.raw(a, n), small = expf(-fabsf(x));
    a.g[n] = BOUNDED ? a.bound * sigmoid(x, small) : column.rate * softplus(x, small);
}

// One block a block of tokens and 256 columns; threads are over the columns, and over tokens where columns are fewer.
template <bool BOUNDED> LA_DEVICE void backward(const GateFormulaArguments& a) {
    __shared__ float2 sums[256];
    const u32 blocks = (a.width + 255) / 256, first = blockIdx.x % blocks * 256, columns = min(256u, a.width - first),
              beside = 256 / columns;
    const u32 own = threadIdx.x % columns, row = threadIdx.x / columns;
    const i64 begin = (i64)(blockIdx.x / blocks) * a.block, end = min(begin + a.block, a.tokens);
    const Column<BOUNDED> column(a, first + own);
    float2 sum = {0.f, 0.f};   // of da, and of dA_log
    if (row < beside)
        for (i64 t = begin + row; t < end; t += beside) {
            const i64 n = t * a.width + first + own;
            const float x = BOUNDED ? column.rate * column.raw(a, n) : column.raw(a, n), dg = a.dg[n],
                        small = expf(-fabsf(x));
            // the number that e^A_log is a factor of, and its gradient
            const float scaled = BOUNDED ? x : column.rate * softplus(x, small);
            const float d = BOUNDED ? a.bound * dg * (small / ((1.f + small) * (1.f + small))) : dg;
            const float da = BOUNDED ? column.rate * d : column.rate * d * sigmoid(x, small);
            a.da[n] = da;
            sum.x += da;
            sum.y += fabsf(scaled) > 3e38f ? 0.f : scaled * d;   // infinite entries have no gradient
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

extern "C" __global__ void __launch_bounds__(256) gate_formula(const __grid_constant__ GateFormulaArguments a) {
    forward<false>(a);
}
extern "C" __global__ void __launch_bounds__(256) gate_formula_vjp(const __grid_constant__ GateFormulaArguments a) {
    backward<false>(a);
}
extern "C" __global__ void __launch_bounds__(256) bounded_gate(const __grid_constant__ GateFormulaArguments a) {
    forward<true>(a);
}
extern "C" __global__ void __launch_bounds__(256) bounded_gate_vjp(const __grid_constant__ GateFormulaArguments a) {
    backward<true>(a);
}
