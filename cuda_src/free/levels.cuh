// Pairs of a chunk with any decay between them: halves of 64, 32, 16, 8, 4, 2 rows, each with its reference in its own
// middle, so that no exponent is positive: the pair (i, j) belongs to the level of the highest bit in which i and j
// differ. i = j: neighbours.cuh.
#pragma once
#include "free/scaled.cuh"

// Rows of a level: readers (q's times `scale`), in the second halves, from their middle on; writers up to it. to: tiles
// as the chunk's own four
template <int HALF> LA_DEVICE void scale_level(const Chunk& t, float scale, u32 to, const Lane& me,
                                               const float2 (&a)[ROWS]) {
    float2 between = {1.f, 1.f};
    if (HALF == 32 && (me.block == 0 || me.block == 3))
        between = load_shared2(t.decays() + (me.block == 3 ? 2 : 1) * WIDE * 4 + me.panel * 256 + me.lane * 8);
#pragma unroll 1
    for (int part = me.part; part < me.part + me.parts; part++) {
        const u32 q = t.reader(part) + me.own(), k = t.writer(part) + me.own(), to_q = to + q - t.shared,
                  to_k = to + k - t.shared;
        const float factor = part ? 1.f : scale;
        float2 x = between, y = between;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (HALF < ROWS && r % (2 * HALF) == HALF) x = {1.f, 1.f};
            if (HALF < ROWS ? r & HALF : me.block & (HALF / ROWS)) {
                const float2 before = x;
                x *= a[r];
                store_word(to_q + lane_row(r, me.lane),
                           pack(floats_of(me.row(q, r)) * ((part ? before : x) * float2{factor, factor})));
            }
        }
#pragma unroll
        for (int r = ROWS - 1; r >= 0; r--) {
            if (HALF < ROWS && r % (2 * HALF) == HALF - 1) y = {1.f, 1.f};
            if (!(HALF < ROWS ? r & HALF : me.block & (HALF / ROWS))) {
                store_word(to_k + lane_row(r, me.lane), pack(floats_of(me.row(k, r)) * y));
                y *= a[r];
            }
        }
    }
}
// entries of a level
template <int HALF> LA_DEVICE void take_level(float (&found)[2][8][4], const float (&x)[2][8][4], const Lane& me) {
    const int row = 16 * (me.warp & 3) + (me.lane >> 2), column = (me.lane & 3) * 2;
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int m = 0; m < 4; m++) {
            const int apart = (row + 8 * (m >> 1)) ^ (8 * n + column + (m & 1));
            const bool own = (apart & HALF) && apart < 2 * HALF;
#pragma unroll
            for (int w = 0; w < 2; w++) found[w][n][m] = own ? x[w][n][m] : found[w][n][m];
        }
}
template <int HALF> LA_DEVICE void add_levels(float (&found)[2][8][4], const Chunk& t, float scale, u32 scratch,
                                              const Lane& me, const float2 (&a)[ROWS]) {
    float x[2][8][4];
    scale_level<HALF>(t, scale, scratch, me, a);
    publish_shared();
    __syncthreads();
    multiply_pairs(x, scratch + me.group * TILE, scratch + 2 * TILE, TILE, PANEL);
    take_level<HALF>(found, x, me);
    __syncthreads();
    if constexpr (HALF > 1) add_levels<HALF / 2>(found, t, scale, scratch, me, a);
}
