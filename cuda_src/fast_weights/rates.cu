// Coefficients of what the weights of the n tokens of a tile are made of (linattn_np/fast_weights/masks.py):
//
//     s_t = mu_t s_(t-1) + unit_(2 + t),   w_t = alpha_t w_(t-1) + beta_t s_t,   w_0 = unit_0, s_0 = unit_1
//
// and the transpose: gradients of the rates from those of w_1 .. w_n (`read`), of the last w, of the last s, and of the
// n rows w_(t-1) (LA_DECAYED: alpha_t w_(t-1)) at which errors are taken. A warp has a tile, a lane every 32nd column
// of a row of 2 + n.
#include "arguments/fast_weights/RatesArguments.cuh"

#if LA_DOUBLE
typedef double Number;
#else
typedef float Number;
#endif
constexpr int WARPS = 4, COLUMNS = LA_COLUMNS;   // of a lane

struct Rows {
    int lane, width;
    template <class F> __device__ __forceinline__ void each(F f) const {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            if (c * 32 + lane < width) f(c, c * 32 + lane);
    }
};
LA_DEVICE Number sum_of_warp(Number x) {
#pragma unroll
    for (int d = 16; d; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) forward(const __grid_constant__ RatesArguments a) {
    const i64 tile = (i64)blockIdx.x * WARPS + threadIdx.x / 32;
    const Rows rows = {(int)threadIdx.x % 32, a.n + 2};
    if (tile >= a.tiles) return;
    const Number *alpha = (const Number*)a.alpha + tile * a.n, *mu = (const Number*)a.mu + tile * a.n,
                 *beta = (const Number*)a.beta + tile * a.n;
    Number *W = (Number*)a.w + tile * (a.n + 1) * rows.width, *S = (Number*)a.s + tile * (a.n + 1) * rows.width;
    Number w[COLUMNS], s[COLUMNS];
    rows.each([&](int c, int j) {
        W[j] = w[c] = j == 0;
        S[j] = s[c] = j == 1;
    });
    for (int t = 0; t < a.n; t++) {
        W += rows.width;
        S += rows.width;
        rows.each([&](int c, int j) {
            S[j] = s[c] = mu[t] * s[c] + Number(j == 2 + t);
            W[j] = w[c] = alpha[t] * w[c] + beta[t] * s[c];
        });
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) backward(const __grid_constant__ RatesArguments a) {
    const i64 tile = (i64)blockIdx.x * WARPS + threadIdx.x / 32;
    const Rows rows = {(int)threadIdx.x % 32, a.n + 2};
    if (tile >= a.tiles) return;
    const i64 width = rows.width;
    const Number *alpha = (const Number*)a.alpha + tile * a.n, *mu = (const Number*)a.mu + tile * a.n,
                 *beta = (const Number*)a.beta + tile * a.n;
    const Number *W = (const Number*)a.w + tile * (a.n + 1) * width, *S = (const Number*)a.s + tile * (a.n + 1) * width;
    const Number *read = (const Number*)a.d + tile * (2 * a.n + 2) * width, *ends = read + a.n * width,
                 *points = ends + 2 * width;
    Number w[COLUMNS], s[COLUMNS];
    rows.each([&](int c, int j) {
        w[c] = ends[j];
        s[c] = ends[width + j];
    });
    for (int t = a.n - 1; t >= 0; t--) {
        Number dalpha = 0, dmu = 0, dbeta = 0;
        rows.each([&](int c, int j) {
            const Number before = W[t * width + j], point = points[t * width + j];
            w[c] += read[t * width + j];
            dbeta += w[c] * S[(t + 1) * width + j];
            s[c] += beta[t] * w[c];
            dmu += s[c] * S[t * width + j];
            dalpha += (LA_DECAYED ? w[c] + point : w[c]) * before;
            w[c] = LA_DECAYED ? alpha[t] * (w[c] + point) : alpha[t] * w[c] + point;
            s[c] *= mu[t];
        });
        dalpha = sum_of_warp(dalpha);
        dmu = sum_of_warp(dmu);
        dbeta = sum_of_warp(dbeta);
        if (rows.lane) continue;
        ((Number*)a.dalpha)[tile * a.n + t] = dalpha;
        ((Number*)a.dmu)[tile * a.n + t] = dmu;
        ((Number*)a.dbeta)[tile * a.n + t] = dbeta;
    }
}
