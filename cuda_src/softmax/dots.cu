// <dout, out> of every row (0 without a denominator), of LA_V numbers in pieces of 16 bytes: sixteen lanes a row. And the counts of backward.cu, which begin with 0.
#include "arguments/ops/Rows.cuh"
#include "tile/types.cuh"

#include "arguments/softmax/DotsArguments.cuh"

constexpr int LANES = 16, PIECES = LA_V / 8;
LA_DEVICE float low(u32 x) { return LA_DTYPE == 1 ? low_f16(x) : low_bf16(x); }
LA_DEVICE float high(u32 x) { return LA_DTYPE == 1 ? high_f16(x) : high_bf16(x); }

extern "C" __global__ void __launch_bounds__(256) dots(const __grid_constant__ DotsArguments a) {
    const i64 thread = (i64)blockIdx.x * 256 + threadIdx.x, row = thread / LANES;   // heads fastest, then tokens
    for (i64 n = thread; n < a.tiles; n += (i64)gridDim.x * 256) a.added[n] = 0;
    if (row >= a.rows) return;
    const i64 token = row / a.heads, batch = token / a.T, t = token - batch * a.T, head = row - token * a.heads;
    const char *const x = a.out.data + batch * a.out.batch + t * a.out.token + head * a.out.head;
    const char *const y = a.dout.data + batch * a.dout.batch + t * a.dout.token + head * a.dout.head;
    float sum = 0.f;
#pragma unroll
    for (int p = threadIdx.x % LANES; p < PIECES; p += LANES) {
        const uint4 u = *(const uint4*)(x + p * 16), v = *(const uint4*)(y + p * 16);
        sum += low(u.x) * low(v.x) + high(u.x) * high(v.x) + low(u.y) * low(v.y) + high(u.y) * high(v.y);
        sum += low(u.z) * low(v.z) + high(u.z) * high(v.z) + low(u.w) * low(v.w) + high(u.w) * high(v.w);
    }
#pragma unroll
    for (int d = LANES / 2; d; d >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d, LANES);
    if (threadIdx.x % LANES == 0) a.dots[(batch * a.heads + head) * a.T + t] = a.normalize ? sum : 0.f;
}
