// P of a chunk where queries are two terms, in the blocks on the diagonal and next to it, which is most of P's error. So is P: what
// rounding leaves of it lies behind it.
//
// The blocks are divided among the pairs of warps as in gram.cuh. Both warps of a pair make all of a block over 64 channels each, so that
// each reads half of the operands; the sums of half of its columns each takes from the other.
#pragma once
#include "vector/gram.cuh"

constexpr int HALF_SUM = 32 * 16, HALVES_BYTES = 2 * 10 * HALF_SUM;   // of a lane's four sums; of both warps of 10 blocks
LA_DEVICE u32 half_sum(u32 halves, int block, int n, int panel, int lane) {   // those that warp `panel` leaves of product n
    return halves + (((block < 2 ? 3 * block : 2 * block + 2) + n) * 2 + panel) * HALF_SUM + lane * 16;
}
LA_DEVICE void store_sums(u32 a, const float (&x)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(a), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}
LA_DEVICE void add_sums(float (&x)[4], u32 a) {
    float y[4];
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(y[0]), "=f"(y[1]), "=f"(y[2]), "=f"(y[3]) : "r"(a));
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] += y[i];
}
LA_DEVICE Packed rest_of(const float (&c)[4]) { return {rest_of(float2{c[0], c[1]}), rest_of(float2{c[2], c[3]})}; }

// Product n of a row block over a warp's channels: its own half of the columns; the other half goes to the other warp
LA_DEVICE void multiply_panel(float (&own)[4], const Tiles& t, int n, int block, int panel, int lane) {
    const Operands x = operands_of<4>(t, n, block);
    const u32 a = x.a + panel * x.a_apart;
    float c[2][4];
    u32 y[4][4];
    load_block(y, x.b + panel * x.b_apart, lane);
    multiply_block(c, a, y, lane);
    if (n == 0 || (n == 1 && block)) {   // in the same row block or the one before
        float rest[2][4];
        multiply_block(rest, a + Scratch<4>::REST * BLOCK_BYTES, y, lane);
#pragma unroll
        for (int i = 0; i < 8; i++) c[i >> 2][i & 3] += rest[i >> 2][i & 3];
    }
    float other[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        own[i] = panel ? c[1][i] : c[0][i];
        other[i] = panel ? c[0][i] : c[1][i];
    }
    store_sums(half_sum(t.halves, block, n, panel, lane), other);
}
// all: decay of the chunk, of block 0's warps
LA_DEVICE void make_gram_in_two_terms(const Tiles& t, float2 all, const ExactBlock& exact, int warp, int lane) {
    const int block = warp >> 1, panel = warp & 1;
    float own[4] = {}, next[4] = {}, other[4] = {};   // the diagonal block, the first and the second of the others
#pragma unroll 1
    for (int n = 0; n < (block < 2 ? 3 : 2); n++) {
        float c[4];
        multiply_panel(c, t, n, block, panel, lane);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (n == 0) own[i] = c[i];
            else if (n == 1) next[i] = c[i];
            else other[i] = c[i];
        }
    }
    producers_barrier();   // all quotients have been read, all halves are there
    const int own_lane = opaque(lane);   // no address is held over the chunk: it would spill
    auto put = [&](int n, int i, int j, float (&c)[4]) {
        add_sums(c, half_sum(t.halves, block, n, 1 - panel, own_lane));
#pragma unroll
        for (int m = 0; m < 4; m++) c[m] *= n ? OVER_MIDDLE : 1.f;
        if (n == 0) finish_diagonal(c, t, exact, warp, own_lane);
        store_packed(t.gates, i, j, packed(c), panel, own_lane);
        store_packed(t.gates + PANEL, i, j, rest_of(c), panel, own_lane);
    };
    put(0, block, block, own);
    put(1, block ? block : 3, block ? block - 1 : 0, next);
    if (block < 2) put(2, block ? 3 : 2, block, other);
    clear_above(t.gates, block, panel, own_lane);
    clear_above(t.gates + PANEL, block, panel, own_lane);
    if (block == 0) store_pair(t.all + panel * 256 + own_lane * 8, all);
}
