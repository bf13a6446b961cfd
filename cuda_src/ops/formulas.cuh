// Formulas of a number in float or double, each with its slope below it; log decays from their raw projections.
//
// small: e^-|x|. LA_NARROW: results are stored in 16 bits, so that functions of floats may be approximate: by single
// instructions and polynomials with relative errors below 1e-5, 1 / 20 of the rounding of float16.
#pragma once
#include "tile/types.cuh"

#ifndef LA_NARROW
#define LA_NARROW 0
#endif

LA_DEVICE float exp_of(float x) { return LA_NARROW ? exp2_approx(x * 1.44269504089f) : expf(x); }
LA_DEVICE double exp_of(double x) { return exp(x); }
LA_DEVICE float over(float x, float y) { return LA_NARROW ? x * reciprocal_approx(y) : x / y; }
LA_DEVICE double over(double x, double y) { return x / y; }

template <int N> LA_DEVICE float polynomial(const float (&c)[N], float x) {   // c_0 + c_1 x + ..
    float sum = c[N - 1];
#pragma unroll
    for (int i = N - 2; i >= 0; i--) sum = sum * x + c[i];
    return sum;
}
// log(1 + x) of x in 0..1: its minimax polynomial times x
LA_DEVICE float log_1p(float x) {
    constexpr float C[] = {0.99999873f, -0.49986965f, 0.33109442f, -0.23503829f,
                           0.14922326f, -0.06640126f, 0.01414084f};
    return LA_NARROW ? x * polynomial(C, x) : log1pf(x);
}
LA_DEVICE double log_1p(double x) { return log1p(x); }

template <class T> LA_DEVICE T softplus(T x, T small) { return fmax(x, (T)0) + log_1p(small); }
template <class T> LA_DEVICE T sigmoid(T x, T small) { return over(x >= 0 ? (T)1 : small, 1 + small); }
template <class T> LA_DEVICE T small_of(T x) { return exp_of(-fabs(x)); }
template <class T> LA_DEVICE T softplus(T x) { return softplus(x, small_of(x)); }
LA_DEVICE double sigmoid(double x) { return sigmoid(x, small_of(x)); }
LA_DEVICE float sigmoid(float x) { return LA_NARROW ? reciprocal_approx(1 + exp_of(-x)) : sigmoid(x, small_of(x)); }
template <class T> LA_DEVICE T sigmoid_slope(T x) {
    const T small = small_of(x);
    return over(small, (1 + small) * (1 + small));
}
template <class T> LA_DEVICE T silu(T x) { return x * sigmoid(x); }
template <class T> LA_DEVICE T silu_slope(T x) {
    const T s = sigmoid(x);
    return s * (1 + x * (1 - s));
}

// BOUNDED: bound sigmoid(rate a); else -rate softplus(a). a = raw + bias, rate = e^A_log
template <bool BOUNDED, class T> LA_DEVICE T gate(T a, T rate, T bound) {
    return BOUNDED ? bound * sigmoid(rate * a) : -rate * softplus(a);
}

// most tanh(x / most); most = 0: x
template <class T> LA_DEVICE T cap(T x, T most) { return most > 0 ? most * tanh(x / most) : x; }
template <class T> LA_DEVICE T cap_slope(T x, T most) {
    const T t = most > 0 ? tanh(x / most) : (T)0;
    return 1 - t * t;
}

// x Phi(x), Phi the distribution function of a normal variable; bell: e^{-x^2 / 2}. Approximate: Phi(-x) is
// t Q(t) bell, t = 1 / (1 + 0.4 x), Q a minimax polynomial. And x sigmoid(2 angle), where tanh stands for erf.
LA_DEVICE double normal_cdf(double x, double) { return 0.5 * erfc(x * -0.70710678118654752); }
LA_DEVICE float normal_cdf(float x, float bell) {
    if constexpr (!LA_NARROW) return 0.5f * erfcf(x * -0.70710678f);
    constexpr float Q[] = {0.15957569f, 0.15963538f, 0.13394961f, 0.07723532f, 0.05939018f, -0.13959292f, 0.04981039f};
    const float t = reciprocal_approx(1 + 0.4f * fabsf(x)), rest = t * polynomial(Q, t) * bell;
    return x > 0 ? 1 - rest : rest;
}
template <class T> LA_DEVICE T bell(T x) { return exp_of((T)-0.5 * x * x); }
template <class T> LA_DEVICE T gelu(T x) { return x * normal_cdf(x, bell(x)); }
template <class T> LA_DEVICE T gelu_slope(T x) {
    const T b = bell(x);
    return normal_cdf(x, b) + x * b * (T)0.39894228040143268;
}
template <class T> LA_DEVICE T twice_angle(T x) { return (T)1.59576912160573071 * (x + (T)0.044715 * x * x * x); }
template <class T> LA_DEVICE T gelu_tanh(T x) { return x * sigmoid(twice_angle(x)); }
template <class T> LA_DEVICE T gelu_tanh_slope(T x) {
    const T s = sigmoid(twice_angle(x));
    return s + x * s * (1 - s) * (T)1.59576912160573071 * (1 + 3 * (T)0.044715 * x * x);
}

// f'(x) of f(x) = (1 - e^{-x}) / x: its Taylor series near 0, elsewhere a difference that loses one digit
template <class T> LA_DEVICE T flow_slope(T x) {
    if (fabs(x) >= (T)0.1) return (exp(-x) + expm1(-x) / x) / x;
    T sum = 0, term = (T)-0.5;   // the n-th: (-1)^n n x^{n-1} / (n + 1)!
#pragma unroll
    for (int n = 1; n < 12; n++) {
        sum += term;
        term *= -x * (n + 1) / ((T)n * (n + 2));
    }
    return sum;
}
