// The gram matrix of a chunk: P_ij = scale (q_i . k_j) 2^s(j, i) for j <= i, into shared memory, 16 x 16 blocks at a
// time, or 16 x 8 where there are twice as many warps as blocks.
#pragma once
#include "attention/decay.cuh"

// block number n of the lower triangle, row by row
LA_DEVICE int triangle_row(int n) { return n >= 6 ? 3 : n >= 3 ? 2 : n >= 1 ? 1 : 0; }

struct HalfBlock {
    int row, column, half;
};   // of the gram matrix, in blocks; columns half * 8 and on

// Half a block from products to shared memory. STRICT: zeros on the diagonal, whose entries go to `own`. to: sums of
// decays up to rows g and g + 8 of the block; from: up to columns 2j and 2j + 1 of the half
template <class E, int C, bool STRICT, class Gram>
LA_DEVICE void store_half(const float (&c)[4], u32 gram, u32 own, float scale, HalfBlock block, const float2 (&to)[2],
                          const float2 (&from)[2], int lane) {
    const int row = block.row, column = block.column, half = block.half;
    const int i0 = row * 16 + (lane >> 2), j = column * 16 + half * 8 + (lane & 3) * 2;
#pragma unroll
    for (int below = 0; below < 2; below++) {
        const int i = i0 + below * 8;
        float p[2];
#pragma unroll
        for (int m = 0; m < 2; m++) {
            p[m] = c[below * 2 + m] * scale;
            if (STRICT && i == j + m) store_shared(own + i * 4, p[m]);
            p[m] = i - STRICT >= j + m ? p[m] * Decay<C>::between(from[m], to[below]) : 0.f;
        }
        static_assert((8 >> Gram::SHIFT) % Gram::SPAN == 0, "rows 8 apart are permuted alike");
        const u32 at = gram + below * 8 * Gram::ROW;   // of element (i, j): piece j / 8 or j / 4 of its row
        if constexpr (Gram::BYTES == 2)
            store_shared_u32(at + Gram::block_piece(row * 16, column * 2, lane >> 2, half) + (lane & 3) * 4,
                             E::pair(p[0], p[1]));
        else
            store_shared2(
                at + Gram::block_piece(row * 16, column * 4 + half * 2, lane >> 2, (lane >> 1) & 1) + (lane & 1) * 8,
                p[0], p[1]);
    }
}

// N blocks of one warp: numbers warp, warp + WARPS, ...; STRICT: zeros on the diagonal, whose entries go to `own`
template <class E, int N, int WARPS, int C, int WIDTH, bool STRICT, class X, class Gram>
LA_DEVICE void gram_blocks(u32 q, u32 k, u32 gram, u32 own, const Decay<C>& decay, float scale, int warp, int lane) {
    constexpr int TOGETHER = N < 3 ? N : 3;   // blocks in flight
#pragma unroll
    for (int first = 0; first < N; first += TOGETHER) {
        float c[TOGETHER][2][4];
#pragma unroll
        for (int n = 0; n < TOGETHER * 8; n++) c[n >> 3][(n >> 2) & 1][n & 3] = 0.f;
#pragma unroll
        for (int d = 0; d < WIDTH; d += 16)
#pragma unroll
            for (int n = 0; n < TOGETHER; n++)
                if (first + n < N) {
                    const int block = warp + (first + n) * WARPS, row = triangle_row(block),
                              column = block - row * (row + 1) / 2;
                    typename E::B b[2];
                    const auto a = E::operand(load_a_rows<E, X>(q, row * 16, d, lane));
                    load_b_rows<E, X>(b, k, column * 16, d, lane);
                    E::multiply(c[n][0], a, b[0]);
                    E::multiply(c[n][1], a, b[1]);
                }
#pragma unroll
        for (int n = 0; n < TOGETHER; n++)
            if (first + n < N) {
                const int block = warp + (first + n) * WARPS, row = triangle_row(block),
                          column = block - row * (row + 1) / 2;
                const int i0 = row * 16 + (lane >> 2), j0 = column * 16 + (lane & 3) * 2;
                float2 to[2] = {}, from[2][2] = {};
                if (LA_DECAY) {
                    to[0] = decay.upto(i0);
                    to[1] = decay.upto(i0 + 8);
                    decay.upto(j0, from[0]);
                    decay.upto(j0 + 8, from[1]);
                }
#pragma unroll
                for (int half = 0; half < 2; half++)
                    store_half<E, C, STRICT, Gram>(c[n][half], gram, own, scale, {row, column, half}, to, from[half],
                                                   lane);
            }
    }
}

// Half a block of one warp, 32-bit elements.
template <class E, int C, int WIDTH, bool STRICT, class X, class Gram>
LA_DEVICE void gram_half(u32 q, u32 k, u32 gram, u32 own, const Decay<C>& decay, float scale, int warp, int lane) {
    const int half = warp & 1, row = triangle_row(warp >> 1), column = (warp >> 1) - row * (row + 1) / 2;
    float c[2][4] = {};   // the contraction's even and odd sixteens
#pragma unroll
    for (int d = 0; d < WIDTH; d += 16) {
        typename E::B b;
        const auto a = E::operand(load_a_rows<E, X>(q, row * 16, d, lane));
        load_b_row<E, X>(b, k, column * 16 + half * 8, d, lane);
        E::multiply(c[d / 16 & 1], a, b);
    }
#pragma unroll
    for (int n = 0; n < 4; n++) c[0][n] += c[1][n];
    float2 to[2] = {}, from[2] = {};
    if (LA_DECAY) {
        to[0] = decay.upto(row * 16 + (lane >> 2));
        to[1] = decay.upto(row * 16 + (lane >> 2) + 8);
        decay.upto(column * 16 + half * 8 + (lane & 3) * 2, from);
    }
    store_half<E, C, STRICT, Gram>(c[0], gram, own, scale, {row, column, half}, to, from, lane);
}

template <class E, int WARPS, int C, int WIDTH, bool STRICT, class X, class Gram>
LA_DEVICE void gram_matrix(u32 q, u32 k, u32 gram, u32 own, const Decay<C>& decay, float scale, int warp, int lane) {
    constexpr int BLOCKS = (C / 16) * (C / 16 + 1) / 2, MOST = (BLOCKS + WARPS - 1) / WARPS,
                  REST = BLOCKS - (MOST - 1) * WARPS;
    if constexpr (X::BYTES == 4 && 2 * BLOCKS <= WARPS) {
        if (warp < 2 * BLOCKS) gram_half<E, C, WIDTH, STRICT, X, Gram>(q, k, gram, own, decay, scale, warp, lane);
    } else if (warp < REST)
        gram_blocks<E, MOST, WARPS, C, WIDTH, STRICT, X, Gram>(q, k, gram, own, decay, scale, warp, lane);
    else if constexpr (MOST > 1)
        gram_blocks<E, MOST - 1, WARPS, C, WIDTH, STRICT, X, Gram>(q, k, gram, own, decay, scale, warp, lane);
}
