// P of a chunk from the scaled copies, by the eight warps that made them: 16 x 16 blocks, a pair of warps the two
// halves of each.
//
// The pair of row block I makes its diagonal block and one or two of the six others, so that all have about as much:
// (3,0) (2,0) | (1,0) (3,1) | (2,1) | (3,2). Then P and the decay of the chunk go over the log decays, which are dead.
// Where queries are of two terms (in the blocks on the diagonal and next to it, which is most of P's error), so is P:
// its rounding error lies behind it.
#pragma once
#include "vector/exact.cuh"

#ifndef LA_BOUNDED   // 1: gates are declared to be small (bounded.cuh)
#define LA_BOUNDED 0
#endif

// q_i.k_i of rows as they came, of the lanes that have an entry of the diagonal: no copy's rounding is in it. 8 rows a
// warp
LA_DEVICE float own_pair(const Tiles& t, int warp, int lane) {
    const u32 rows = half_of_block(warp & 1, lane), block = (warp >> 1) * BLOCK_BYTES;
    float c[4] = {0.f, 0.f, 0.f, 0.f}, d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int x = 0; x < 4; x++) {
        const u32 at = block + (x >> 1) * PANEL + (rows ^ ((x & 1) * 64));
        u32 q[4], k[4];
        load_matrix(q, t.q + at);
        load_matrix(k, t.k + at);
        multiply(c, {q[0], 0, q[1], 0}, k[0], k[1]);
        multiply(d, {q[2], 0, q[3], 0}, k[2], k[3]);
    }
    return lane & 4 ? c[1] + d[1] : c[0] + d[0];
}
// The diagonal block: columns from the exact path where they need it, the bonus, zeros above. OWN: its diagonal is `own`
template <bool EXACT, bool OWN> LA_DEVICE void finish_diagonal(float (&c)[4], const Tiles& t, const ExactBlock& exact,
                                                               float own, int warp, int lane) {
    const int block = warp >> 1, panel = warp & 1, row = lane >> 2, column = 8 * panel + (lane & 3) * 2;
    if (EXACT)
#pragma unroll
        for (int n = 0; n < 4; n++)
            if (column + (n & 1) >= exact.begin) c[n] = exact.x[n];
    float2 bonus = {0.f, 0.f};
    if (LA_BONUS) {
        const u32 at = t.bonus + (block * ROWS + column) * 4;
        const float2 x = load_shared2(at), y = load_shared2(at + C * 4);
        bonus = {x.x + y.x, x.y + y.y};
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int ahead = column + (n & 1) - row - 8 * (n >> 1);   // of the diagonal
        if (OWN && ahead == 0) c[n] = own;
        if (ahead > 0 || (LA_BEFORE && ahead == 0)) c[n] = LA_BONUS && ahead == 0 ? (n & 1 ? bonus.y : bonus.x) : 0.f;
    }
}
// Half a row block of P, packed: rows lane / 4 and that plus 8
struct Packed {
    u32 low, high;
};
LA_DEVICE Packed packed(const float (&c)[4]) { return {pack_bf16(c[0], c[1]), pack_bf16(c[2], c[3])}; }
LA_DEVICE Packed rest_of(const float (&c)[4]) { return {rest_of(float2{c[0], c[1]}), rest_of(float2{c[2], c[3]})}; }

// The operands of a warp's products with its row block: 0 the diagonal block, 1 and (of blocks 0, 1) 2 the others
struct Operands {
    u32 a, b;
    int a_apart, b_apart;
    bool scratch;
};   // scratch: A is there, else in q's tile
constexpr bool reads_block_two(int n, int block) { return n == 2 && !block; }
// tiles in the scratch: rows of block 3 by way of D_2, or of the block itself; keys
template <int QUERIES> constexpr int query_tile(int n, int block) {
    return n && (n == 1) != (block > 0) ? Scratch<QUERIES>::FAR_QUERY
                                        : Scratch<QUERIES>::query(reads_block_two(n, block) ? 2 : block);
}
template <int QUERIES> constexpr int key_tile(int n, int block) {
    return block == 0 ? Scratch<QUERIES>::FAR_KEY : Scratch<QUERIES>::key(n == 2 ? 1 : block - 1);
}
// where all of them lie there: a byte for each of a row block's products, tile of A and tile of B
template <int QUERIES> constexpr u32 tiles_of_products(int block) {
    u32 found = 0;
    for (int n = 0; n < (block < 2 ? 3 : 2); n++)
        found |= (u32)(query_tile<QUERIES>(n, block) | (n ? key_tile<QUERIES>(n, block) : 0) << 4) << 8 * n;
    return found;
}
template <int QUERIES> LA_DEVICE Operands operands_of(const Tiles& t, int n, int block) {
    typedef Scratch<QUERIES> X;
    if constexpr (QUERIES == 4) {
        constexpr u32 OF[4] = {tiles_of_products<4>(0), tiles_of_products<4>(1), tiles_of_products<4>(2),
                               tiles_of_products<4>(3)};
        const u32 both = (block < 2 ? block ? OF[1] : OF[0] : block == 2 ? OF[2] : OF[3]) >> 8 * n;
        return {t.scratch + (both & 15) * BLOCK_BYTES,
                n ? t.scratch + (both >> 4 & 15) * BLOCK_BYTES : t.gates + block * BLOCK_BYTES, X::PANEL_BYTES,
                n ? X::PANEL_BYTES : QUOTIENTS, true};
    }
    const int a = query_tile<QUERIES>(n, block), b = key_tile<QUERIES>(n, block);
    const bool scratch = a >= 0;
    return {scratch ? t.scratch + a * BLOCK_BYTES : t.q + (reads_block_two(n, block) ? 2 : block) * BLOCK_BYTES,
            n ? t.scratch + b * BLOCK_BYTES : t.gates + block * BLOCK_BYTES, scratch ? X::PANEL_BYTES : PANEL,
            n ? X::PANEL_BYTES : QUOTIENTS, scratch};
}
LA_DEVICE void add_half(float (&c)[4], u32 a, int a_apart, const u32 (&y)[4][4], int lane) {
    float x[4];
    multiply_half(x, a, a_apart, y, lane);
#pragma unroll
    for (int i = 0; i < 4; i++) c[i] += x[i];
}
// Product n of a row block: on the diagonal and next to it with queries of two terms, and keys if they have them
template <class X> LA_DEVICE void multiply_terms(float (&c)[4], const Operands& x, const Tiles& t, int n, int block,
                                                 int panel, int lane) {
    const bool near = n == 0 || (n == 1 && block);
    u32 y[4][4];
    load_half(y, x.b, x.b_apart, panel, lane);
    multiply_half(c, x.a, x.a_apart, y, lane);
    if (near) add_half(c, x.a + X::REST * BLOCK_BYTES, x.a_apart, y, lane);
    if (X::TWO_TERM_KEYS && near) {
        const bool scratch = n || X::QUOTIENTS_IN_SCRATCH;
        const int tile = n ? X::KEY_REST + block - 1 : X::QUOTIENT_REST + block;
        load_half(y, scratch ? t.scratch + tile * BLOCK_BYTES : x.b + PANEL, scratch ? X::PANEL_BYTES : QUOTIENTS,
                  panel, lane);
        add_half(c, x.a, x.a_apart, y, lane);
    }
}
// all: decay of the chunk, of block 0's warps. own: own_pair() if P is of one term. read(): quotients have been.
template <int QUERIES, bool EXACT, class F> LA_DEVICE void make_gram(const Tiles& t, float2 all,
                                                                     const ExactBlock& exact, float own_pair, int warp,
                                                                     int lane, F read) {
    const int block = warp >> 1, panel = warp & 1;
    typedef Scratch<QUERIES> X;
    Packed own = {0, 0}, next = {0, 0}, other = {0, 0};   // the diagonal block, the first and the second of the others
    Packed own_rest = {0, 0}, next_rest = {0, 0}, other_rest = {0, 0};
#pragma unroll 1
    for (int n = 0; n < (block < 2 ? 3 : 2); n++) {
        const Operands x = operands_of<QUERIES>(t, n, block);
        float c[4];
        if constexpr (X::TWO_TERMS) multiply_terms<X>(c, x, t, n, block, panel, lane);
        else half_block(c, x.a, x.a_apart, x.b, x.b_apart, panel, lane);
        const float over = n ? OVER_MIDDLE : x.scratch ? 1.f : MIDDLE;   // Qg of block 0 is without h
#pragma unroll
        for (int i = 0; i < 4; i++) c[i] *= over;
        if (n == 0) {
            finish_diagonal<EXACT, !X::TWO_TERMS>(c, t, exact, own_pair, warp, lane);
            own = packed(c);
            own_rest = rest_of(c);
        } else if (n == 1) {
            next = packed(c);
            next_rest = rest_of(c);
        } else {
            other = packed(c);
            other_rest = rest_of(c);
        }
    }
    producers_barrier();   // all quotients have been read
    read();
    const u32 own_lane = opaque(lane), own_row = own_lane >> 2;   // no address is held over the chunk: it would spill
    const u32 gram = t.gates + own_row * 128 + (own_lane & 3) * 4, swizzle = (own_row & 7) << 4;
    auto put = [&](int i, int j, Packed x, Packed rest) {
        const u32 at = gram + i * BLOCK_BYTES + ((panel * 16 + j * 32) ^ swizzle);
        store_word(at, x.low);
        store_word(at + 8 * 128, x.high);
        if (X::TWO_TERMS) store_word(at + PANEL, rest.low);
        if (X::TWO_TERMS) store_word(at + PANEL + 8 * 128, rest.high);
    };
    put(block, block, own, own_rest);
    put(block ? block : 3, block ? block - 1 : 0, next, next_rest);
    if (block < 2) put(block ? 3 : 2, block, other, other_rest);
#pragma unroll
    for (int j = 1; j < 4; j++) {
        const u32 at = gram + block * BLOCK_BYTES + ((panel * 16 + j * 32) ^ swizzle);
        store_word_if(j > block, at, 0);
        store_word_if(j > block, at + 8 * 128, 0);
        store_word_if(X::TWO_TERMS && j > block, at + PANEL, 0);
        store_word_if(X::TWO_TERMS && j > block, at + PANEL + 8 * 128, 0);
    }
    if (block == 0) store_pair(t.all + panel * 256 + own_lane * 8, all);
}
