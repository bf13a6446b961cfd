// dsink = -sum e^{sink - l} <dout, out> over batch rows and the heads that share a sink: a block of threads for each
// sink, in a fixed order. A sink of -inf takes no weight.
#include "softmax/decays.cuh"
#include "tile/reduce.cuh"

#include "arguments/softmax/SinkArguments.cuh"

constexpr int THREADS = 512, AHEAD = 4;   // numbers that are loaded together

extern "C" __global__ void __launch_bounds__(THREADS) sinks(const __grid_constant__ SinkArguments a) {
    __shared__ float warps[THREADS / 32];
    const float sink = a.sinks[blockIdx.x] * LOG2_E;
    float sum = 0.f;
    for (i64 batch = 0; sink != minus_infinity() && batch < a.batch; batch++) {
        const i64 first = (batch * gridDim.x + blockIdx.x) * a.each;   // (batch, sinks, heads of one and tokens)
        for (i64 n = threadIdx.x; n < a.each; n += AHEAD * THREADS) {
            float log[AHEAD], dot[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const bool valid = n + i * THREADS < a.each;
                log[i] = valid ? a.logs[first + n + i * THREADS] : 0.f;
                dot[i] = valid ? a.dots[first + n + i * THREADS] : 0.f;
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (n + i * THREADS < a.each) sum += exp2f(sink - log[i]) * dot[i];
        }
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    sum = warp_sum(threadIdx.x < THREADS / 32 ? warps[threadIdx.x] : 0.f);
    if (threadIdx.x == 0) a.dsinks[blockIdx.x] = -sum;
}
