// The values u of deltaformer, u_i = v_i - beta_i r_i, r_i = sum_{j < i} p_ij u_j, by products of warps (system.cuh).
//
//     z_ij = scale log2(e) w_i.k_j + log2 of the decay,   p_ij = 2^(z_ij - l_i)
#include "softmax_portable/system.cuh"

struct Forward : System {
    float m[2] = {minus_infinity(), minus_infinity()}, l[2] = {0.f, 0.f},
          first_m[2];   // maxima and sums of the lane's rows; of the own block

    using System::System;
    __device__ __forceinline__ void finish_scores(float (&p)[ROWS / 8][4], int step) const {
        const float c = a.scale * LOG2_E;
#pragma unroll
        for (int n = 0; n < ROWS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int h = e >> 1, j = n * 8 + (lane & 3) * 2 + (e & 1);
                p[n][e] *= c;
                if constexpr (GATED) p[n][e] += decay_between(decays[h], load_decays(stage(step) + AT_DECAYS + j * 16));
                if (step == 0 && i0 + j >= row(h)) p[n][e] = minus_infinity();
            }
    }
    // the weights of the own block by their final maxima and sums, and the logs of the sums; factor: of the sums over
    // other blocks
    __device__ __forceinline__ void normalise(float (&factor)[2]) {
        float own_factor[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float log;
            factor[h] = normalised(a, head, m[h], row_sum(l[h]), log);
            own_factor[h] = first_m[h] == minus_infinity() ? 0.f : factor[h] * exp2_approx(first_m[h] - m[h]);
            if (a.logs && (lane & 3) == 0 && row(h) < own.T) a.logs[own.number(a, head, row(h))] = log;
        }
#pragma unroll
        for (int n = 0; n < ROWS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) store_shared(pair_at(n, e), load_shared(pair_at(n, e)) * own_factor[e >> 1]);
    }
    __device__ __forceinline__ void run() {
        float sum[WIDTH_V / 8][4], factor[2];
        clear(sum);
        over_tiles(sum, [&](float (&p)[ROWS / 8][4], int step) {
            finish_scores(p, step);
            exponentiate(p, m, l, sum);
            if (step == 0) {
                first_m[0] = m[0];
                first_m[1] = m[1];
            }
        });
        normalise(factor);
        store_sums(a.v, sum, factor);
        for (int c = threadIdx.x; c < WIDTH_V; c += THREADS)
            solve(c, [&](int i, float r) {
                const float u = fmaf(-beta(i), r, given(i, c));
                store_row(s.solved, SOLVED, i, c, u);
                if (a.out.data) store_row(a.out, LA_V, i, c, r);
                return u;
            });
        count();
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) system_forward(const __grid_constant__ SystemArguments s) {
    const int pairs = s.of.sequences * s.of.heads, pair = blockIdx.x % pairs, n = (int)blockIdx.x / pairs;
    const Owner own(s.of, pair / s.of.heads, 0);
    if (n * ROWS < own.T) Forward(s, own, pair, n).run();
}
