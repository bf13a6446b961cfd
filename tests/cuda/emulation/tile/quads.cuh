// In place of cuda_src/tile/quads.cuh: the same sums by moves between lanes.
#pragma once
#include "tile/types.cuh"

template <bool, class T> LA_DEVICE void sum_of_quads(T (&sums)[4], const T (&x)[4], int column, int lane) {
    for (int i = 0; i < 4; i++) {
        T y = x[i];
        y += __shfl_xor_sync(~0u, y, 1);
        y += __shfl_xor_sync(~0u, y, 2);
        sums[i] += lane % 4 == column ? y : 0;
    }
}
