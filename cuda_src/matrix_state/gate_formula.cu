// The log decay of a raw projection, g = -e^{A_log} softplus(a + bias), and its gradients.
#include "attention/config.cuh"

struct Arguments {
    const void* raw;                 // (tokens, width), of kind LA_DTYPE
    const float *A_log, *bias, *dg;  // (heads), (width) or null, (tokens, width)
    float *g, *da, *parts;           // the formula; its gradient by a; sums of a strip of tokens: of da, of g dg (strips, 2, width)
    i64 tokens;
    u32 width, each, strip, unused;  // of a token; numbers of a head; tokens of a strip
};

struct Column {   // of a token's numbers
    float bias, rate;
    __device__ __forceinline__ Column(const Arguments& a, u32 column) : bias(a.bias ? a.bias[column] : 0.f), rate(-expf(a.A_log[column / a.each])) {}
    __device__ __forceinline__ float raw(const Arguments& a, i64 n) const {
        if (LA_DTYPE == 2) return ((const float*)a.raw)[n] + bias;
        const u32 bits = ((const u16*)a.raw)[n];
        return (LA_DTYPE == 0 ? low_bf16(bits) : low_f16(bits)) + bias;
    }
};
LA_DEVICE float softplus(float x, float small) { return fmaxf(x, 0.f) + log1pf(small); }   // small: e^{-|x|}

extern "C" __global__ void __launch_bounds__(256) gate_formula(const __grid_constant__ Arguments a) {
    const i64 n = (i64)blockIdx.x * 256 + threadIdx.x;
    if (n >= a.tokens * a.width) return;
    const Column column(a, n % a.width);
    const float x = column.raw(a, n);
    a.g[n] = column.rate * softplus(x, expf(-fabsf(x)));
}

// One block a strip and 256 columns; threads lie over the columns, and over tokens where there is room.
extern "C" __global__ void __launch_bounds__(256) gate_formula_vjp(const __grid_constant__ Arguments a) {
    __shared__ float2 sums[256];
    const u32 blocks = (a.width + 255) / 256, first = blockIdx.x % blocks * 256, columns = min(256u, a.width - first), beside = 256 / columns;
    const u32 own = threadIdx.x % columns, row = threadIdx.x / columns;
    const i64 begin = (i64)(blockIdx.x / blocks) * a.strip, end = min(begin + a.strip, a.tokens);
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
