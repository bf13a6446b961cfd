// The inverse of 1 + L, L a strictly lower triangular block of 16 rows, by substitution in float32.
#pragma once
#include "tile/types.cuh"

constexpr int DIAGONAL = 16 * 20 * 4;   // bytes of L in shared memory, transposed, in rows of 20 floats

// column j of the inverse
LA_DEVICE void invert_column(float (&x)[16], const float* diagonal, int j) {
#pragma unroll
    for (int i = 0; i < 16; i++) x[i] = i == j ? 1.f : 0.f;
#pragma unroll
    for (int m = 0; m < 15; m++)
#pragma unroll
        for (int i = (m + 1) / 4 * 4; i < 16; i += 4) {
            const float4 l = *(const float4*)(diagonal + m * 20 + i);
            if (i > m) x[i] -= l.x * x[m];
            if (i + 1 > m) x[i + 1] -= l.y * x[m];
            if (i + 2 > m) x[i + 2] -= l.z * x[m];
            if (i + 3 > m) x[i + 3] -= l.w * x[m];
        }
}
