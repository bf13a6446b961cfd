// What lies between the products of a learner (linattn_np/fast_weights/models.py, norm.py, batches.py, muon.py), each
// in one pass over dense arrays. LA_KIND: its place in BETWEEN of linattn_np/fast_weights/cuda/between.py. LA_DOUBLE:
// float64, else float32.
//
// Of numbers, x0 .. x4 to y0 .. y2; an array that is not given is 0:
//     gelu        gelu(x0)                                  gelu_vjp    (x1 + x3) gelu'(x0) + x2
//     gelu_vjps   x1 gelu'(x0),  x1 x2 gelu''(x0)           swiglu      silu(x0) x1
// and with y = x0, u = x1, dh = x2 of a SwiGLU h = silu(y) u:
//     factors     dh u silu'(y),  dh silu(y),  silu(y) u    swiglu_vjp  the first two, plus x3 and x4
//     factors_vjp the transpose of the first two: (ddh, dy, du) from x3, x4
//     combined    a c0 x0 + b c1 x1 + c2 x2, c of each matrix of `each` numbers, 1 where it is not given
//     masked      (x0 + a) x1, of x1 one matrix of `each` numbers for as many of x0 as there are
// Of rows of D channels, with gamma and beta of a head:
//     norm        x1 + gamma x^ + beta                      norm_vjp    P(gamma x1),  x^ x1
//     norm_vjps   with z, e, c = x0, x1, x2: dz, dgamma of the row, de of <c, P(gamma e)>
// Of columns of matrices (D, M): renormed gives x0 the lengths of x1, w |w0| / (|w| + a); renormed_vjp (dw, dw0) of x2.
#include "arguments/fast_weights/BetweenArguments.cuh"
#include "tile/reduce.cuh"
#include "tile/types.cuh"

#if LA_DOUBLE
typedef double Number;
#else
typedef float Number;
#endif
enum {
    GELU,
    GELU_VJP,
    GELU_VJPS,
    SWIGLU,
    FACTORS,
    FACTORS_VJP,
    SWIGLU_VJP,
    COMBINED,
    MASKED,
    NORM,
    NORM_VJP,
    NORM_VJPS,
    RENORMED,
    RENORMED_VJP
};
constexpr int THREADS = 256, PER = 4, KIND = LA_KIND;

LA_DEVICE Number root(Number x) { return sqrt(x); }
LA_DEVICE Number of(const char* x, i64 i) { return x == nullptr ? Number(0) : ((const Number*)x)[i]; }
LA_DEVICE Number of(const char* x, i64 i, Number otherwise) { return x == nullptr ? otherwise : ((const Number*)x)[i]; }
LA_DEVICE void put(char* y, i64 i, Number x) {
    if (y != nullptr) ((Number*)y)[i] = x;
}
LA_DEVICE Number sigmoid_of(Number x) {
    const Number small = exp(x < 0 ? x : -x);
    return (x < 0 ? small : Number(1)) / (1 + small);
}

// gelu(x) = x s, s = sigmoid(2 v), v = ROOT (x + CUBE x^3), and its derivatives; beyond 16 they do not change
struct Gelu {
    Number value, first, second;
    __device__ __forceinline__ Gelu(Number x) {
        const Number ROOT = 0.79788456080286535588, CUBE = 0.044715;
        const Number y = x > 16 ? Number(16) : x < -16 ? Number(-16) : x;
        const Number v = ROOT * (y + CUBE * y * y * y), slope = ROOT * (1 + 3 * CUBE * y * y);
        const Number s = sigmoid_of(2 * v), both = 4 * s * sigmoid_of(-2 * v);   // 1 - tanh^2
        value = x * s;
        first = s + y * both * slope / 2;
        second = both * (slope + y * (3 * ROOT * CUBE * y - (2 * s - 1) * slope * slope));
    }
};
struct Silu {
    Number s, value, first, second;
    __device__ __forceinline__ Silu(Number y) {
        s = sigmoid_of(y);
        value = y * s;
        first = s * (1 + y * (1 - s));
        second = s * (1 - s) * (2 + y * (1 - 2 * s));
    }
};

LA_DEVICE void of_number(const BetweenArguments& a, i64 i) {
    if constexpr (KIND == COMBINED) {
        const i64 m = i / a.each;
        Number y = Number(a.a) * of(a.c0, m, 1) * of(a.x0, i);
        if (a.x1 != nullptr) y += Number(a.b) * of(a.c1, m, 1) * of(a.x1, i);
        if (a.x2 != nullptr) y += of(a.c2, m, 1) * of(a.x2, i);
        put(a.y0, i, y);
        return;
    }
    const Number x = of(a.x0, i);
    if constexpr (KIND == MASKED) return put(a.y0, i, (x + Number(a.a)) * of(a.x1, i % a.each));
    const Number x1 = of(a.x1, i);
    if constexpr (KIND == GELU) put(a.y0, i, Gelu(x).value);
    if constexpr (KIND == GELU_VJP) put(a.y0, i, (x1 + of(a.x3, i)) * Gelu(x).first + of(a.x2, i));
    if constexpr (KIND == GELU_VJPS) {
        const Gelu g(x);
        put(a.y0, i, x1 * g.first);
        put(a.y1, i, x1 * of(a.x2, i) * g.second);
    }
    if constexpr (KIND == SWIGLU) put(a.y0, i, Silu(x).value * x1);
    if constexpr (KIND == FACTORS || KIND == SWIGLU_VJP) {
        const Silu g(x);
        const Number dh = of(a.x2, i);
        put(a.y0, i, dh * x1 * g.first + (KIND == SWIGLU_VJP ? of(a.x3, i) : Number(0)));
        put(a.y1, i, dh * g.value + (KIND == SWIGLU_VJP ? of(a.x4, i) : Number(0)));
        if constexpr (KIND == FACTORS) put(a.y2, i, g.value * x1);
    }
    if constexpr (KIND == FACTORS_VJP) {
        const Silu g(x);
        const Number dh = of(a.x2, i), d1 = of(a.x3, i), d2 = of(a.x4, i);
        put(a.y0, i, d1 * x1 * g.first + d2 * g.value);
        put(a.y1, i, dh * (d1 * x1 * g.second + d2 * g.first));
        put(a.y2, i, d1 * dh * g.first);
    }
}

// a warp has a row of D channels
struct Row {
    int lane, D;
    template <class F> __device__ __forceinline__ void each(F f) const {
        for (int j = lane; j < D; j += 32) f(j);
    }
    template <class F> __device__ __forceinline__ Number mean(F f) const {
        Number total = 0;
        each([&](int j) { total += f(j); });
        return warp_sum(total) / D;
    }
};
LA_DEVICE void of_row(const BetweenArguments& a, i64 row, int lane) {
    const Row r = {lane, a.D};
    const i64 at = row * a.D, head = row / a.each % a.heads * a.D;
    const Number center = r.mean([&](int j) { return of(a.x0, at + j); });
    const Number s = root(r.mean([&](int j) {
        const Number d = of(a.x0, at + j) - center;
        return d * d;
    }) + Number(a.a));
    const auto unit = [&](int j) { return (of(a.x0, at + j) - center) / s; };
    const auto gamma = [&](int j) { return of(a.gamma, head + j); };
    const auto e = [&](int j) { return of(a.x1, at + j); };
    if constexpr (KIND == NORM)
        r.each([&](int j) { put(a.y0, at + j, e(j) + gamma(j) * unit(j) + of(a.beta, head + j)); });
    else {
        const Number mean_a = r.mean([&](int j) { return gamma(j) * e(j); });
        const Number along_a = r.mean([&](int j) { return gamma(j) * e(j) * unit(j); });
        const auto y = [&](int j) { return (gamma(j) * e(j) - mean_a - unit(j) * along_a) / s; };
        if constexpr (KIND == NORM_VJP)
            r.each([&](int j) {
                put(a.y0, at + j, y(j));
                put(a.y1, at + j, unit(j) * e(j));
            });
        else {
            const auto c = [&](int j) { return of(a.x2, at + j); };
            const Number mean_c = r.mean(c), along_c = r.mean([&](int j) { return c(j) * unit(j); });
            const auto p = [&](int j) { return (c(j) - mean_c - unit(j) * along_c) / s; };
            const Number both = r.mean([&](int j) { return gamma(j) * e(j) * p(j); });
            r.each([&](int j) {
                put(a.y0, at + j, -(y(j) * along_c + p(j) * along_a + unit(j) * both) / s);
                put(a.y1, at + j, e(j) * p(j));
                put(a.y2, at + j, gamma(j) * p(j));
            });
        }
    }
}

// a block has 32 columns of a matrix of `each` rows and D columns
LA_DEVICE void of_columns(const BetweenArguments& a, Number (*shared)[8][32]) {
    const int parts = (a.D + 31) / 32, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int column = (int)(blockIdx.x % parts) * 32 + lane;
    const i64 first = (i64)(blockIdx.x / parts) * a.each * a.D + column;
    const bool own = column < a.D;
    Number sums[3] = {0, 0, 0};
    if (own)
        for (i64 k = warp; k < a.each; k += 8) {
            const Number w = of(a.x0, first + k * a.D), w0 = of(a.x1, first + k * a.D);
            sums[0] += w * w;
            sums[1] += w0 * w0;
            if constexpr (KIND == RENORMED_VJP) sums[2] += w * of(a.x2, first + k * a.D);
        }
#pragma unroll
    for (int n = 0; n < 3; n++) shared[n][warp][lane] = sums[n];
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 3; n++) {
        sums[n] = 0;
        for (int i = 0; i < 8; i++) sums[n] += shared[n][i][lane];
    }
    const Number n = root(sums[0]), n0 = root(sums[1]), size = n + Number(a.a), along = sums[2];
    const Number by_w = n > 0 ? n0 * along / (size * size) / n : Number(0);
    const Number by_w0 = n0 > 0 ? along / size / n0 : Number(0);
    if (!own) return;
    for (i64 k = warp; k < a.each; k += 8) {
        const i64 i = first + k * a.D;
        if constexpr (KIND == RENORMED) put(a.y0, i, of(a.x0, i) * (n0 / size));
        else {
            put(a.y0, i, of(a.x2, i) * (n0 / size) - of(a.x0, i) * by_w);
            put(a.y1, i, of(a.x1, i) * by_w0);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) between(const __grid_constant__ BetweenArguments a) {
    if constexpr (KIND >= RENORMED) {
        __shared__ Number shared[3][8][32];
        of_columns(a, shared);
    } else if constexpr (KIND >= NORM) {
        const i64 row = (i64)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
        if (row < a.count) of_row(a, row, threadIdx.x % 32);
    } else {
#pragma unroll
        for (int j = 0; j < PER; j++) {
            const i64 i = ((i64)blockIdx.x * PER + j) * THREADS + threadIdx.x;
            if (i < a.count) of_number(a, i);
        }
    }
}
