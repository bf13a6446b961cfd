// The transposed system of deltaformer (system.cuh): du_j is complete once all later queries have added to it,
//
//     y_j = du_j + sum_{i > j} p_ij d_i = dv_j,   d_i = -beta_i y_i,   dbeta_i = -y_i.r_i
//
// d is the cotangent of attention of w with values u and outputs r, whose gradients queries.cu and keys.cu compute.
#include "softmax_portable/system.cuh"
#include "tile/reduce.cuh"

struct Backward : System {
    using System::System;
    __device__ __forceinline__ void weights(float (&p)[ROWS / 8][4], int step) const {
        const float c = a.scale * LOG2_E;
        const int first_i = first(step);
#pragma unroll
        for (int n = 0; n < ROWS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int h = e >> 1, r = n * 8 + (lane & 3) * 2 + (e & 1), i = first_i + r;
                float z = p[n][e] * c;
                if constexpr (GATED) z += decay_between(load_decays(stage(step) + AT_DECAYS + r * 16), decays[h]);
                p[n][e] = i < own.T && i > row(h) ? exp2_approx(z - load_shared(stage(step) + AT_LOGS + r * 4)) : 0.f;
            }
    }
    __device__ __forceinline__ void run() {
        float sum[WIDTH_V / 8][4];
        clear(sum);
        over_tiles(sum, [&](float (&p)[ROWS / 8][4], int step) { weights(p, step); });
        const float factor[2] = {1.f, 1.f};
        store_sums(a.dout, sum, factor);
        for (int c = threadIdx.x; c < WIDTH_V; c += THREADS)
            solve(c, [&](int i, float y) {
                const float d = -beta(i) * y;
                store_row(s.solved, SOLVED, i, c, d);
                store_row(a.dv, LA_V, i, c, y);
                return d;
            });
        count();
        for (int r = warp; r < min(ROWS, own.T - i0); r += WARPS) {
            const char* const product = own.token(a.out, head, i0 + r);
            float found = 0.f;
            for (int c = lane; c < LA_V; c += 32) found += load_shared(sum_at(r, c)) * element_at<LA_INPUT>(product, c);
            found = warp_sum(found);
            if (lane == 0) s.dbeta[strength(i0 + r)] = -found;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) system_backward(const __grid_constant__ SystemArguments s) {
    const int pairs = s.of.sequences * s.of.heads, pair = blockIdx.x % pairs, n = (int)blockIdx.x / pairs;
    const Owner own(s.of, pair / s.of.heads, 0);
    if (n * ROWS < own.T) Backward(s, own, pair, n).run();
}
