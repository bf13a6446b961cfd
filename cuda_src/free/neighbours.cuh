// Pairs that no decay crosses, q_t with k_t and b_t, a_t with k and b of the token before: products of rows as they
// came, which no copy's rounding is in. Without the pairs of two blocks of 16 rows.
#pragma once
#include "free/transposed_solve.cuh"
#include "free/scaled.cuh"

// of q (group 0) or a with k (w 0) or b
LA_DEVICE u32 neighbour_at(const Chunk& t, int w, int row, const Lane& me) {
    const int which = 2 * me.group + w;
    return t.shared + (which ? AT_NEIGHBOURS + (which - 1) * C * 4 : AT_QK_DIAGONAL) + row * 4;
}
// f(entry, row) of the entries of a block that are such pairs: its diagonal, of a's the one below
template <class F> LA_DEVICE void each_neighbour(float (&x)[2][4], const Lane& me, F f) {
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int m = 0; m < 4; m++) {
            const int row = (me.lane >> 2) + 8 * (m >> 1), column = 8 * n + (me.lane & 3) * 2 + (m & 1);
            if (row - column == me.group) f(x[n][m], row);
        }
}
// By a warp, of its 16 rows before they are scaled
LA_DEVICE void store_neighbours(const Chunk& t, float scale, const Lane& me) {
    const int first = 16 * (me.warp & 3);
    float x[2][2][4] = {};   // with k, b
#pragma unroll
    for (int d = 0; d < KEYS / 16; d++) {
        const auto rows = load_a_rows<Bfloat16, KeyTile>(t.reader(me.group), first, 16 * d, me.lane);
#pragma unroll
        for (int w = 0; w < 2; w++) {
            Bfloat16::B b[2];
            load_b_rows<Bfloat16, KeyTile>(b, t.writer(w), first, 16 * d, me.lane);
            multiply_pair(x[w], rows.x, b);
        }
    }
#pragma unroll
    for (int w = 0; w < 2; w++)
        each_neighbour(x[w], me, [&](float y, int row) {
            store_shared(neighbour_at(t, w, first + row, me), first + row >= t.count ? 0.f : me.group ? y : scale * y);
        });
}
// In place of a block's entries; the entries of q with k, which the chain adds in float32, are zeros
LA_DEVICE void take_neighbours(float (&x)[2][4], int w, const Chunk& t, const Lane& me) {
    const int first = 16 * (me.warp & 3);
    each_neighbour(
        x, me, [&](float& y, int row) { y = me.group || w ? load_shared(neighbour_at(t, w, first + row, me)) : 0.f; });
}
