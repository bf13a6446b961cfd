// Weights that are a polynomial of z = q.k (scale is 1), and their slopes: constant + linear z + quadratic z^2.
#pragma once
#include "softmax/place.cuh"

// the score of a pair that is not read: minus infinity, or a NaN that no arithmetic makes
LA_DEVICE float unread() { return POLYNOMIAL ? __uint_as_float(0xffffdeadu) : -__uint_as_float(0x7f800000u); }
LA_DEVICE float if_read(float z, float x) { return __float_as_uint(z) == 0xffffdeadu ? 0.f : x; }
// each operation has one number of the arguments, which it reads in place: registers are few
LA_DEVICE float weight_of(const AttentionArguments& a, float z) {
    return if_read(z, (a.quadratic * z + a.linear) * z + a.constant);
}
LA_DEVICE float slope_of(const AttentionArguments& a, float z) { return 2 * (a.quadratic * z) + a.linear; }
