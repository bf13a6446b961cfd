// Formulas of a number in float or double, each with its slope below it; log decays from their raw projections.
//
// small: e^-|x|. LA_NARROW: results are stored in 16 bits, so that exponentials and quotients may be approximate.
#pragma once
#include "tile/types.cuh"

#ifndef LA_NARROW
#define LA_NARROW 0
#endif

LA_DEVICE float exp_of(float x) { return LA_NARROW ? exp2_approx(x * 1.44269504089f) : expf(x); }
LA_DEVICE double exp_of(double x) { return exp(x); }
LA_DEVICE float over(float x, float y) { return LA_NARROW ? x * reciprocal_approx(y) : x / y; }
LA_DEVICE double over(double x, double y) { return x / y; }

template <class T> LA_DEVICE T softplus(T x, T small) { return fmax(x, (T)0) + log1p(small); }
template <class T> LA_DEVICE T sigmoid(T x, T small) { return over(x >= 0 ? (T)1 : small, 1 + small); }
template <class T> LA_DEVICE T small_of(T x) { return exp_of(-fabs(x)); }
template <class T> LA_DEVICE T softplus(T x) { return softplus(x, small_of(x)); }
template <class T> LA_DEVICE T sigmoid(T x) { return sigmoid(x, small_of(x)); }
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

// x Phi(x), Phi(x) the distribution function of a normal variable; by tanh
template <class T> LA_DEVICE T normal_cdf(T x) { return (T)0.5 * erfc(x * (T)-0.70710678118654752); }
template <class T> LA_DEVICE T gelu(T x) { return x * normal_cdf(x); }
template <class T> LA_DEVICE T gelu_slope(T x) {
    return normal_cdf(x) + x * exp_of((T)-0.5 * x * x) * (T)0.39894228040143268;
}
template <class T> LA_DEVICE T gelu_angle(T x) { return (T)0.79788456080286536 * (x + (T)0.044715 * x * x * x); }
template <class T> LA_DEVICE T gelu_tanh(T x) { return (T)0.5 * x * (1 + tanh(gelu_angle(x))); }
template <class T> LA_DEVICE T gelu_tanh_slope(T x) {
    const T t = tanh(gelu_angle(x));
    return (T)0.5 * (1 + t + x * (1 - t * t) * (T)0.79788456080286536 * (1 + 3 * (T)0.044715 * x * x));
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
