// The terms of the bonus in the gradients: out_t has d_t v_t, d_t = scale (q_t . u k_t). LA_TOKENS tokens of a head a
// block, a token a warp.
//
//     dd_t = scale <dO_t, v_t>        dq_t += dd_t u k_t        dk_t += dd_t u q_t
//     parts[block] = sum_t dd_t q_t k_t, whose sum is du
#include "portable/chunk.cuh"

constexpr int PASSES = (K + 127) / 128;   // a lane has four channels in 128
constexpr int WIDE = LA_ALIGN >= 4 * bytes_of(KIND) && K % 4 == 0;

LA_DEVICE int held(int width, int column) { return max(0, min(4, width - column)); }
LA_DEVICE void store_some(char* to, const float (&x)[4], int count) {
    if constexpr (WIDE) {
        if (count > 0) store_vec4<KIND>(to, x);
    } else
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (j < count) store_element<KIND>(to + j * bytes_of(KIND), x[j]);
}

extern "C" __global__ void __launch_bounds__(THREADS) bonus(const __grid_constant__ VectorPortableArguments a) {
    __shared__ float sums[WARPS][PASSES * 128];
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, head = blockIdx.x % a.heads;
    const i64 block = blockIdx.x / a.heads;
    const float* const u = a.u + (i64)(head / a.group_u) * K;
    float du[PASSES][4] = {};
    for (int n = warp; n < LA_TOKENS; n += WARPS) {
        const i64 of = block * LA_TOKENS + n;
        if (of >= a.tokens) break;
        const Sequence s = {of / a.T, 0, 0, a.T};
        const i64 t = of % a.T;
        const auto row = [&](const Rows& x) { return rows_of(x, s, head) + t * x.token; };
        float d = 0.f;
#pragma unroll
        for (int c = lane * 4; c < V; c += 128) {
            Vec4<KIND> x, y;
            x.template load<WIDE && V % 4 == 0>(row(a.dout) + c * bytes_of(KIND), held(V, c));
            y.template load<WIDE && V % 4 == 0>(row(a.v) + c * bytes_of(KIND), held(V, c));
#pragma unroll
            for (int j = 0; j < 4; j++) d = fmaf(x[j], y[j], d);
        }
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) d += __shfl_xor_sync(0xffffffffu, d, step);
        d *= a.scale;
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            const int c = pass * 128 + lane * 4, count = held(K, c), at = c * bytes_of(KIND);
            Vec4<KIND> q, k, dq, dk;
            q.template load<WIDE>(row(a.q) + at, count);
            k.template load<WIDE>(row(a.k) + at, count);
            dq.template load<WIDE>(row(a.dq) + at, count);
            dk.template load<WIDE>(row(a.dk) + at, count);
            float x[4], y[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float bonus = j < count ? d * u[c + j] : 0.f;
                x[j] = fmaf(bonus, k[j], dq[j]);
                y[j] = fmaf(bonus, q[j], dk[j]);
                du[pass][j] = fmaf(d * q[j], k[j], du[pass][j]);
            }
            store_some(row(a.dq) + at, x, count);
            store_some(row(a.dk) + at, y, count);
        }
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) *(float4*)(sums[warp] + pass * 128 + lane * 4) = *(const float4*)du[pass];
    __syncthreads();
    for (int c = threadIdx.x; c < K; c += THREADS) {
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += sums[w][c];
        a.parts[(i64)blockIdx.x * K + c] = sum;
    }
}
