// The states that segments begin with, from the offset and the matrix of each, sixteen value rows a block, a key column
// a thread:
//
//     S_0 the initial state,  S_1 the state after the first segment,  S_{s+1} = S_s M_s + B_s
//
// LA_REVERSE 1: the gradients that they end with, D_{s-1} = D_s M_s^T + B_s from the last one down.
#include "arguments/matrix_state/DeltaSegmentsArguments.cuh"
#include "attention/state.cuh"
#include "attention/tokens.cuh"

constexpr int K = LA_K, V = LA_V, RUN = 16, PARTS = (V + RUN - 1) / RUN;

extern "C" __global__ void __launch_bounds__(256) segments(const __grid_constant__ DeltaSegmentsArguments a) {
    __shared__ float4 rows[K][RUN / 4];   // of the state: column, value row
    const int part = blockIdx.x % PARTS, c = threadIdx.x;
    const i64 slot = blockIdx.x / PARTS;
    const int T = sequence_of(a.offsets, (int)(slot / a.heads), a.T).T,
              last = max((T + LA_C - 1) / LA_C - 1, 0) / a.chunks;
    float x[RUN] = {};
    auto inside = [&](int r) { return c < K && part * RUN + r < V; };
    auto at = [&](int segment) { return ((slot * a.segments + segment) * V + part * RUN) * K + c; };
    if (a.start.data)
#pragma unroll
        for (int r = 0; r < RUN; r++)
            if (inside(r))
                x[r] = a.start.data[slot / a.start_group * a.start.slot + (part * RUN + r) * a.start.row +
                                    c * a.start.column];
    for (int n = 0; n <= last; n++) {
        const int segment = LA_REVERSE ? last - n : n;
#pragma unroll
        for (int r = 0; r < RUN; r++)
            if (inside(r)) a.begins[at(segment) + r * K] = x[r];
        if (n == last) break;
        __syncthreads();
        if (c < K)
#pragma unroll
            for (int r = 0; r < RUN; r += 4) rows[c][r / 4] = make_float4(x[r], x[r + 1], x[r + 2], x[r + 3]);
        __syncthreads();
        const float* m = a.transfers + (slot * a.segments + segment) * K * K + (LA_REVERSE ? c * K : c);
#pragma unroll
        for (int r = 0; r < RUN; r++) x[r] = inside(r) ? a.added[at(segment) + r * K] : 0.f;
        if (n && c < K)
#pragma unroll 8
            for (int i = 0; i < K; i++) {
                const float y = m[LA_REVERSE ? i : i * K];
#pragma unroll
                for (int r = 0; r < RUN; r += 4) {
                    const float4 z = rows[i][r / 4];
                    x[r] += z.x * y;
                    x[r + 1] += z.y * y;
                    x[r + 2] += z.z * y;
                    x[r + 3] += z.w * y;
                }
            }
    }
}
