// Sums over neighbouring heads of an array of bfloat16 (tokens, heads x group, width), eight columns a thread, in
// float32.
#include "arguments/matrix_state/HeadSumsArguments.cuh"
#include "tile/types.cuh"

extern "C" __global__ void __launch_bounds__(256) head_sums(const __grid_constant__ HeadSumsArguments a) {
    const i64 n = (i64)blockIdx.x * 256 + threadIdx.x;
    if (n >= a.pieces) return;
    const uint4* x = a.x + n / a.row * a.group * a.row + n % a.row;
    float sum[8] = {};
    for (int h = 0; h < a.group; h++) {
        const uint4 y = x[h * a.row];
        const u32 w[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum[2 * i] += low_bf16(w[i]);
            sum[2 * i + 1] += high_bf16(w[i]);
        }
    }
    a.y[n] = make_uint4(pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]),
                        pack_bf16(sum[6], sum[7]));
}
