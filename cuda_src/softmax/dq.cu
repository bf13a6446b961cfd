// dq from its sums in float32, which backward.cu stores in tiles of 64 queries in the order of its threads: 16 bytes,
// of rows r and r + 8 columns c and c + 1, of each lane 4 r + c / 2, for 4 warps of 16 rows, for every 8 columns.
#include "softmax/place.cuh"

constexpr int TILES = WIDTH_K / 8, UNITS = BLOCK / 2 * TILES;   // of a block: 8 columns of rows r and r + 8

extern "C" __global__ void __launch_bounds__(256) dq(const __grid_constant__ AttentionArguments a) {
    const Place place(a, a.heads);
    const int left = place.T - place.tile * BLOCK;
    if (left <= 0) return;
    const i64 tile = place.tiles(a, place.head) + place.tile * 2;
    char* const to = rows_of(a.out, place, place.head) + (i64)place.tile * BLOCK * a.out.token;
#pragma unroll
    for (int u = threadIdx.x; u < UNITS; u += 256) {
        const int n = u % TILES, r = u / TILES % 8, warp = u / TILES / 8 % 4, half = u / TILES / 32,
                  row = half * 64 + warp * 16 + r;
        const float4* const from = (const float4*)a.dq + (tile + half) * (TILE_DQ / 4) + n * 128 + warp * 32 + r * 4;
        if (row >= left || n * 8 >= LA_K) continue;
        u32 x[2][4];
        const bool any = a.added[tile + half] != 0;   // some keys are read
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const float4 y = any ? from[c] : float4{0.f, 0.f, 0.f, 0.f};
            x[0][c] = pack_pair(y.x * a.scale, y.y * a.scale);
            x[1][c] = pack_pair(y.z * a.scale, y.w * a.scale);
        }
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (row + 8 * h < left)
                *(uint4*)(to + (i64)(row + 8 * h) * a.out.token + n * 16) = {x[h][0], x[h][1], x[h][2], x[h][3]};
    }
}
