// From the offset of each segment of a sequence to the state that each segment but the first begins with, four key
// columns a thread:
//
//     S_begin(first) = S_0          S_begin(next)^T = S_begin^T diag(decay) + added
//
// LA_REVERSE 1: the gradient after each segment but the last, of the offset of the segment after it.
#include "vector/traversal.cuh"
#include "arguments/matrix_state/VectorArguments.cuh"   // after TensorMap

extern "C" __global__ void __launch_bounds__(256) segments(const __grid_constant__ VectorArguments a) {
    constexpr int BLOCKS = STATE / 4 / 256;
    const i64 slot = blockIdx.x / BLOCKS;
    const int element = (blockIdx.x % BLOCKS * 256 + threadIdx.x) * 4, row = element / WIDE, column = element % WIDE;
    const Sequence s = sequence_of(a.offsets, slot / a.heads, a.T);
    const int total = (s.T + C - 1) / C, last = max(total - 1, 0) / a.chunks;
    float4 S = {0.f, 0.f, 0.f, 0.f};
    if (a.start.data && row < LA_V) {
        const float* p =
            a.start.data + slot / a.start_group * a.start.slot + row * a.start.row + column * a.start.column;
        float* const to[4] = {&S.x, &S.y, &S.z, &S.w};
#pragma unroll
        for (int i = 0; i < 4; i++) *to[i] = column + i < LA_K ? p[i * a.start.column] : 0.f;
    }
    for (int i = 0; i < last; i++) {
        const int n = LA_REVERSE ? last - 1 - i : i;
        const i64 segment = slot * (a.segments - 1) + n;
        const float4 x = *(const float4*)(a.added + segment * STATE + element),
                     d = *(const float4*)(a.decays + segment * WIDE + column);
        S = {S.x * d.x + x.x, S.y * d.y + x.y, S.z * d.z + x.z, S.w * d.w + x.w};
        *(float4*)(a.begins + (slot * a.segments + n + !LA_REVERSE) * STATE + element) = S;
    }
}
