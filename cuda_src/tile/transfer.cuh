// A transfer matrix in memory, M = diag(d) + R: d in float32, then R, whose diagonal is zero, in bfloat16 as panels of
// wgmma.cuh.
//
// Rounding takes 2^-9 of the entries of R, and nothing of d.
#pragma once
#include "tile/wgmma.cuh"

struct Transfer {
    static constexpr int WIDTH = 128, AT_REST = WIDTH * 4;
    typedef Panels<WIDTH, WIDTH> Rest;   // rows and columns of M
    static constexpr int BYTES = AT_REST + Rest::SIZE;

    // sixteen rows from `row` on, from a warp's accumulators
    static __device__ __forceinline__ void store(char* to, const float (&x)[WIDTH / 8][4], int row, int lane) {
#pragma unroll
        for (int i = 0; i < WIDTH / 4; i++) {
            const int r = row + (lane >> 2) + 8 * (i & 1), column = 8 * (i >> 1) + (lane & 3) * 2,
                      place = r - column;   // 0, 1: on the diagonal
            const float y = x[i >> 1][2 * (i & 1)], z = x[i >> 1][2 * (i & 1) + 1];
            if (place == 0 || place == 1) *((float*)to + r) = place ? z : y;
            *(u32*)(to + AT_REST + Rest::at(r, column)) = pack_bf16(place == 0 ? 0.f : y, place == 1 ? 0.f : z);
        }
    }
};
