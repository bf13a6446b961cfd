// Recurrences whose factors and inputs are formulas of a variant's arrays: a and u of a token from x, a gate y and an
// input gate z, and the gradients of these from those of u and a. LA_FORMULA chooses; rate is that of a channel.
//
//     HGRN       a = e^y                                          u = (1 - a) x
//     MIN_GRU    a = sigmoid(-y)                                  u = sigmoid(y) x
//     MIN_LSTM   a = sigmoid(y) / (sigmoid(y) + sigmoid(z))       u = (1 - a) x
//     RG_LRU     a = e^{rate sigmoid(y)}, rate = -8 softplus(p)   u = sqrt(1 - a^2) sigmoid(z) x
//     LRU        a = exp(-e^p + i e^q) of all tokens              u = e^r x, x real (LA_REAL) or complex
#pragma once
#include "ops/formulas.cuh"

enum Formula { GIVEN, HGRN, MIN_GRU, MIN_LSTM, RG_LRU, LRU };
#ifndef LA_FORMULA
#define LA_FORMULA 0
#endif
#ifndef LA_WRITE
#define LA_WRITE LA_DTYPE
#endif
#ifndef LA_REAL
#define LA_REAL 0
#endif
constexpr bool MADE = LA_FORMULA != GIVEN && LA_FORMULA != LRU;   // of the arrays of a token
constexpr bool HAS_Z = LA_FORMULA == MIN_LSTM || LA_FORMULA == RG_LRU;

template <class T> struct Pair {   // of a token
    T a, u;
};
template <class T> struct Slopes {   // gradients
    T x, y, z, rate;
};

LA_DEVICE float rest_of(float g) {   // 1 - e^g
    if constexpr (!LA_NARROW) return -expm1f(g);
    constexpr float C[] = {1.f, 1.f / 2, 1.f / 6, 1.f / 24, 1.f / 120, 1.f / 720};   // 4e-7 of it where it is taken
    return g > -0.35f ? -g * polynomial(C, g) : 1 - exp_of(g);
}
LA_DEVICE double rest_of(double g) { return -expm1(g); }
// the quotient of the gates of MIN_LSTM has this logarithm
template <class T> LA_DEVICE T balance(T y, T z) { return softplus(-z) - softplus(-y); }

template <class T> LA_DEVICE Pair<T> made(T x, T y, T z, T rate) {
    if constexpr (LA_FORMULA == HGRN) return {exp_of(y), rest_of(y) * x};
    else if constexpr (LA_FORMULA == MIN_GRU) return {sigmoid(-y), sigmoid(y) * x};
    else if constexpr (LA_FORMULA == MIN_LSTM) {
        const T b = balance(y, z);
        return {sigmoid(b), sigmoid(-b) * x};
    } else {
        const T g = rate * sigmoid(y), rest = rest_of(2 * g);
        return {exp_of(g), sqrt(rest > 0 ? rest : (T)0) * sigmoid(z) * x};
    }
}
// du, da: gradients of u and a
template <class T> LA_DEVICE Slopes<T> made_vjp(T x, T y, T z, T rate, T du, T da) {
    if constexpr (LA_FORMULA == HGRN) return {rest_of(y) * du, exp_of(y) * (da - x * du), 0, 0};
    else if constexpr (LA_FORMULA == MIN_GRU) {
        const T s = sigmoid(y);
        return {s * du, s * sigmoid(-y) * (x * du - da), 0, 0};
    } else if constexpr (LA_FORMULA == MIN_LSTM) {
        const T b = balance(y, z), rest = sigmoid(-b), d = sigmoid(b) * rest * (da - x * du);
        return {rest * du, d * sigmoid(-y), -d * sigmoid(-z), 0};
    } else {
        const T s = sigmoid(y), gate = sigmoid(z), g = rate * s, a = exp_of(g), rest = rest_of(2 * g);
        const T root = sqrt(rest > 0 ? rest : (T)0), driven = x * du;
        // u depends on g by the root: its slope is -a^2 / root, taken as 0 where a is 1
        const T dg = a * da - (rest > 0 ? a * a * driven * gate / root : (T)0);
        return {root * gate * du, rate * dg * s * sigmoid(-y), root * driven * gate * sigmoid(-z), s * dg};
    }
}
