// Formulas of gates: softplus, sigmoid, and log decays from their raw projections. small: e^-|x|.
#pragma once
#include "tile/types.cuh"

LA_DEVICE float softplus(float x, float small) { return fmaxf(x, 0.f) + log1pf(small); }
LA_DEVICE float sigmoid(float x, float small) { return (x >= 0.f ? 1.f : small) / (1.f + small); }
LA_DEVICE float sigmoid(float x) { return sigmoid(x, expf(-fabsf(x))); }

// BOUNDED: y = bound sigmoid(rate a); else y = -rate softplus(a). a = raw + bias, rate = e^A_log
template <bool BOUNDED> LA_DEVICE float log_decay(float a, float rate, float bound) {
    const float x = BOUNDED ? rate * a : a, small = expf(-fabsf(x));
    return BOUNDED ? bound * sigmoid(x, small) : -rate * softplus(x, small);
}
