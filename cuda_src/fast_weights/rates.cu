// Coefficients of what the weights of the n tokens of a tile are made of (linattn_np/fast_weights/masks.py):
//
//     s_t = mu_t s_(t-1) + unit_(2 + t),   w_t = alpha_t w_(t-1) + beta_t s_t,   w_0 = unit_0, s_0 = unit_1
//
// and the transpose: gradients of the rates from those of w_1 .. w_n (`read`), of the last w, of the last s, and of the
// n rows w_(t-1) (LA_DECAYED: alpha_t w_(t-1)) at which errors are taken. Tokens that a last tile lacks change nothing:
// alpha = mu = 1, beta = 0. A warp has a tile, a lane every 32nd column of a row of 2 + n.
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
// the rates of token t of a tile
struct Own {
    const RatesArguments& a;
    i64 slot;
    int first;
    __device__ __forceinline__ bool has(int t) const { return first + t < a.T; }
    __device__ __forceinline__ Number at(const Tokens& y, int t, Number other) const {
        return has(t) ? *(const Number*)(y.data + slot / a.heads * y.batch + slot % a.heads * y.head +
                                         (first + t) * y.token)
                      : other;
    }
    __device__ __forceinline__ Number alpha(int t) const { return at(a.alpha, t, 1); }
    __device__ __forceinline__ Number mu(int t) const { return at(a.mu, t, 1); }
    __device__ __forceinline__ Number beta(int t) const { return at(a.beta, t, 0); }
};
LA_DEVICE Own own_tile(const RatesArguments& a, i64 tile) { return {a, tile / a.per, (int)(tile % a.per) * a.n}; }
LA_DEVICE Number sum_of_warp(Number x) {
#pragma unroll
    for (int d = 16; d; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) forward(const __grid_constant__ RatesArguments a) {
    const i64 tile = (i64)blockIdx.x * WARPS + threadIdx.x / 32;
    const Rows rows = {(int)threadIdx.x % 32, a.n + 2};
    if (tile >= a.tiles) return;
    const Own own = own_tile(a, tile);
    Number *W = (Number*)a.w + tile * (a.n + 1) * rows.width, *S = (Number*)a.s + tile * (a.n + 1) * rows.width;
    Number w[COLUMNS], s[COLUMNS];
    rows.each([&](int c, int j) {
        W[j] = w[c] = j == 0;
        S[j] = s[c] = j == 1;
    });
    for (int t = 0; t < a.n; t++) {
        W += rows.width;
        S += rows.width;
        const Number alpha = own.alpha(t), mu = own.mu(t), beta = own.beta(t);
        rows.each([&](int c, int j) {
            S[j] = s[c] = mu * s[c] + Number(j == 2 + t);
            W[j] = w[c] = alpha * w[c] + beta * s[c];
        });
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) backward(const __grid_constant__ RatesArguments a) {
    const i64 tile = (i64)blockIdx.x * WARPS + threadIdx.x / 32;
    const Rows rows = {(int)threadIdx.x % 32, a.n + 2};
    if (tile >= a.tiles) return;
    const i64 width = rows.width;
    const Own own = own_tile(a, tile);
    const Number *W = (const Number*)a.w + tile * (a.n + 1) * width, *S = (const Number*)a.s + tile * (a.n + 1) * width;
    const Number *read = (const Number*)a.d + tile * (2 * a.n + 2) * width, *ends = read + a.n * width,
                 *points = ends + 2 * width;
    Number w[COLUMNS], s[COLUMNS];
    rows.each([&](int c, int j) {
        w[c] = ends[j];
        s[c] = ends[width + j];
    });
    for (int t = a.n - 1; t >= 0; t--) {
        const Number alpha = own.alpha(t), mu = own.mu(t), beta = own.beta(t);
        Number dalpha = 0, dmu = 0, dbeta = 0;
        rows.each([&](int c, int j) {
            const Number before = W[t * width + j], point = points[t * width + j];
            w[c] += read[t * width + j];
            dbeta += w[c] * S[(t + 1) * width + j];
            s[c] += beta * w[c];
            dmu += s[c] * S[t * width + j];
            dalpha += (LA_DECAYED ? w[c] + point : w[c]) * before;
            w[c] = LA_DECAYED ? alpha * (w[c] + point) : alpha * w[c] + point;
            s[c] *= mu;
        });
        dalpha = sum_of_warp(dalpha);
        dmu = sum_of_warp(dmu);
        dbeta = sum_of_warp(dbeta);
        if (rows.lane || !own.has(t)) continue;
        const i64 at = own.slot * a.T + own.first + t;
        ((Number*)a.dalpha)[at] = dalpha;
        ((Number*)a.dmu)[at] = dmu;
        ((Number*)a.dbeta)[at] = dbeta;
    }
}
