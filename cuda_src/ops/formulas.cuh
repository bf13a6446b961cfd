// Formulas of gates in float or double: softplus, sigmoid, and log decays from their raw projections. small: e^-|x|.
#pragma once
#include "tile/types.cuh"

template <class T> LA_DEVICE T softplus(T x, T small) { return fmax(x, (T)0) + log1p(small); }
template <class T> LA_DEVICE T sigmoid(T x, T small) { return (x >= 0 ? 1 : small) / (1 + small); }
template <class T> LA_DEVICE T small_of(T x) { return exp(-fabs(x)); }
template <class T> LA_DEVICE T softplus(T x) { return softplus(x, small_of(x)); }
template <class T> LA_DEVICE T sigmoid(T x) { return sigmoid(x, small_of(x)); }

// BOUNDED: bound sigmoid(rate a); else -rate softplus(a). a = raw + bias, rate = e^A_log
template <bool BOUNDED, class T> LA_DEVICE T gate(T a, T rate, T bound) {
    return BOUNDED ? bound * sigmoid(rate * a) : -rate * softplus(a);
}
