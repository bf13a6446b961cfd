// Formulas of numbers: f(x, y, z, u; a, b), `how` choosing between forms; the transposes with two results below.
#pragma once
#include "ops/formulas.cuh"
#include "ops/row.cuh"

struct Numbers {   // of a column; 0 where an array is not given
    Real x, y, z, u;
    bool has_y, has_z, has_u;
};
struct Two {
    Real out, more;
};
typedef const FormulaArguments& Given;
typedef const Numbers& In;

LA_DEVICE Real copy(Given, In n) { return n.x; }
LA_DEVICE Real filled(Given a, In) { return (Real)a.a; }
LA_DEVICE Real scaled(Given a, In n) { return (Real)a.a * n.x; }
LA_DEVICE Real product(Given, In n) { return n.has_z ? n.x * n.y * n.z : n.x * n.y; }
LA_DEVICE Real added(Given, In n) { return n.x + n.y; }

// (1 - e^x) y; log(1 - x)
LA_DEVICE Real complement(Given, In n) { return n.has_y ? -expm1(n.x) * n.y : -expm1(n.x); }
LA_DEVICE Real complement_vjp(Given, In n) { return n.y - exp(n.x) * n.z; }
LA_DEVICE Real log_rest(Given, In n) { return log1p(n.x >= 1 ? (Real)-1 : -n.x); }
LA_DEVICE Real log_rest_vjp(Given, In n) { return n.x < 1 ? n.y - n.z / (1 - n.x) : n.y; }

// x + y, or (how) its softplus, from a to b; NaN stays NaN. z times the slope
LA_DEVICE Real step_size(Given a, In n) {
    const Real step = a.how ? softplus(n.x + n.y) : n.x + n.y;
    return step<(Real)a.a ? (Real)a.a : step>(Real) a.b ? (Real)a.b : step;
}
LA_DEVICE Real step_size_vjp(Given a, In n) {
    const Real raw = n.x + n.y, step = a.how ? softplus(raw) : raw;
    return step >= (Real)a.a && step <= (Real)a.b ? (a.how ? n.z * sigmoid(raw) : n.z) : (Real)0;
}

// (x + y z) silu(u); x y silu'(z)
LA_DEVICE Real skip_and_gate(Given, In n) {
    const Real sum = n.has_y ? n.x + n.y * n.z : n.x;
    return n.has_u ? sum * silu(n.u) : sum;
}
LA_DEVICE Real gate_vjp(Given, In n) { return n.x * n.y * silu_slope(n.z); }

// a tanh(x / a); its log sigmoid, or (how) itself, at least b
LA_DEVICE Real capped(Given a, In n) { return cap(n.x, (Real)a.a); }
LA_DEVICE Real capped_vjp(Given a, In n) { return n.y * cap_slope(n.x, (Real)a.a); }
LA_DEVICE Real log_forget(Given a, In n) {
    const Real y = cap(n.x, (Real)a.a), log_f = a.how ? y : -softplus(-y);
    return log_f < (Real)a.b ? (Real)a.b : log_f;
}
LA_DEVICE Real log_forget_vjp(Given a, In n) {
    const Real y = cap(n.x, (Real)a.a), log_f = a.how ? y : -softplus(-y), slope = a.how ? (Real)1 : sigmoid(-y);
    return log_f > (Real)a.b ? n.y * slope * cap_slope(n.x, (Real)a.a) : (Real)0;
}

// -e^z softplus(x + y); a sigmoid(e^z (x + y)), no z: 0
LA_DEVICE Real log_decay(Given, In n) { return gate<false>(n.x + n.y, exp(n.z), (Real)0); }
LA_DEVICE Real bounded(Given a, In n) { return gate<true>(n.x + n.y, n.has_z ? exp(n.z) : (Real)1, (Real)a.a); }
// u times the derivatives by x and by z; the latter is 0 where the number that e^z is a factor of is infinite
LA_DEVICE Real finite(Real x, Real d) { return fabs(x) < (Real)__int_as_float(0x7f800000) ? x * d : (Real)0; }
LA_DEVICE Two log_decay_vjp(Given, In n) {
    const Real raw = n.x + n.y, rate = -exp(n.z);
    return {rate * sigmoid(raw) * n.u, finite(rate * softplus(raw), n.u)};
}
LA_DEVICE Two bounded_vjp(Given a, In n) {
    const Real rate = n.has_z ? exp(n.z) : (Real)1, x = rate * (n.x + n.y), d = (Real)a.a * n.u * sigmoid_slope(x);
    return {rate * d, finite(x, d)};
}

// likewise: log(sigmoid(x + y)) / b; log(a + (1 - a) sigmoid(x + y)); -e^{x + y + z}
LA_DEVICE Real log_sigmoid(Given a, In n) { return over(-softplus(-(n.x + n.y)), (Real)a.b); }
LA_DEVICE Real log_sigmoid_vjp(Given a, In n) { return over(n.u * sigmoid(-(n.x + n.y)), (Real)a.b); }
LA_DEVICE Real lower_bound(Given a, In n) { return log((Real)a.a + (1 - (Real)a.a) * sigmoid(n.x + n.y)); }
LA_DEVICE Real lower_bound_vjp(Given a, In n) {
    const Real s = sigmoid(n.x + n.y), most = 1 - (Real)a.a;
    return n.u * (most * s * (1 - s) / ((Real)a.a + most * s));
}
LA_DEVICE Real exponential(Given, In n) { return -exp(n.z) * exp(n.x + n.y); }
LA_DEVICE Two exponential_vjp(Given a, In n) {
    const Real d = n.u * exponential(a, n);
    return {d, d};
}

// features of a channel: how 0 x + 1 where x > 0 and e^x elsewhere, 1 max(x, 0), 2 e^x, 3 silu, 4 the root of
// max(x, 0); and y times the slope
LA_DEVICE Real feature(Given a, In n) {
    if (a.how == 0) return n.x > 0 ? n.x + 1 : exp(n.x);
    if (a.how == 1) return n.x > 0 ? n.x : (Real)0;
    if (a.how == 4) return n.x > 0 ? sqrt(n.x) : (Real)0;
    return a.how == 2 ? exp(n.x) : silu(n.x);
}
LA_DEVICE Real feature_vjp(Given a, In n) {
    if (a.how == 0) return n.x > 0 ? n.y : n.y * exp(n.x);
    if (a.how == 1) return n.x > 0 ? n.y : (Real)0;
    if (a.how == 4) return n.x > 0 ? n.y / (2 * sqrt(n.x)) : (Real)0;
    return n.y * (a.how == 2 ? exp(n.x) : silu_slope(n.x));
}

// activations, LA_HOW as Activation, and y times the slope
enum Activation { SIGMOID, SILU, SOFTPLUS, GELU, GELU_TANH, SQUARED_RELU };
#ifndef LA_HOW
#define LA_HOW 0
#endif
LA_DEVICE Real activation(Given, In n) {
    if constexpr (LA_HOW == SIGMOID) return sigmoid(n.x);
    else if constexpr (LA_HOW == SILU) return silu(n.x);
    else if constexpr (LA_HOW == SOFTPLUS) return softplus(n.x);
    else if constexpr (LA_HOW == GELU) return gelu(n.x);
    else if constexpr (LA_HOW == GELU_TANH) return gelu_tanh(n.x);
    else return n.x < 0 ? (Real)0 : n.x * n.x;
}
LA_DEVICE Real activation_vjp(Given, In n) {
    if constexpr (LA_HOW == SIGMOID) return n.y * sigmoid_slope(n.x);
    else if constexpr (LA_HOW == SILU) return n.y * silu_slope(n.x);
    else if constexpr (LA_HOW == SOFTPLUS) return n.y * sigmoid(n.x);
    else if constexpr (LA_HOW == GELU) return n.y * gelu_slope(n.x);
    else if constexpr (LA_HOW == GELU_TANH) return n.y * gelu_tanh_slope(n.x);
    else return n.x < 0 ? 0 * n.y : 2 * n.x * n.y;
}
// x silu(y); z silu(y) and z x silu'(y)
LA_DEVICE Real swiglu(Given, In n) { return n.x * silu(n.y); }
LA_DEVICE Two swiglu_vjp(Given, In n) {
    const Real s = sigmoid(n.y);
    return {n.z * n.y * s, n.z * n.x * s * (1 + n.y * (1 - s))};
}

// e^z x + u y, no z and no u: 1
LA_DEVICE Real decayed_sum(Given, In n) { return (n.has_z ? exp(n.z) * n.x : n.x) + (n.has_u ? n.u * n.y : n.y); }
// x over a y + b, or over max(|a y|, z); 0 where that is 0
LA_DEVICE Real average(Given a, In n) {
    const Real sum = (Real)a.a * n.y, size = fabs(sum), total = !n.has_z ? sum + (Real)a.b : size < n.z ? n.z : size;
    return total == 0 ? (Real)0 : n.x / total;
}
