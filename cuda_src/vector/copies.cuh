// The scaled copies of q and k that a chunk's products take, each rounded once: no exponent is positive but in 1 / Pre.
//
//     Qg = q Pre E in place of q     Kd = k Suf T in place of k     -Kc = -k Pre E
//     E, T: decay of the blocks before, behind
//     P on the diagonal: q Pre h against k / (Pre h), in place of g
//     P off the diagonal: q Pre h against k Suf, with the decay of the block between where one is between
//
// Scratch, tiles of 16 rows by 128 channels: q Pre h of the last QUERIES blocks; q Pre h D_2 of block 3; k Suf of block
// 0; the same times D_1; k Suf of blocks 1, 2. With all four blocks of queries, the rounding errors of these: they are
// two terms. Where a backward follows, keys too but keys two blocks away: the rounding errors of k Suf, and of k / (Pre
// h), in float32 log decays' other half.
#pragma once
#include "vector/decay.cuh"

#ifndef LA_EXACT   // 0: flags chunks that need the exact path. 1: that path, for flagged chunks
#define LA_EXACT 0
#endif
#ifndef LA_BONUS   // 1: a token reads its own write with a bonus u
#define LA_BONUS 0
#endif
#ifndef LA_KEEP   // 1: stores residuals: the state before each chunk, P (and U)
#define LA_KEEP 0
#endif
#ifndef LA_TWO_TERM_KEYS   // 1: a backward follows, whether its residuals are stored or not
#define LA_TWO_TERM_KEYS 0
#endif

// QUOTIENTS_IN_SCRATCH: second terms of k / (Pre h), else in the other half of the log decays
template <int QUERIES> struct Scratch {
    static constexpr bool TWO_TERMS = QUERIES == 4, TWO_TERM_KEYS = TWO_TERMS && LA_TWO_TERM_KEYS,
                          QUOTIENTS_IN_SCRATCH = TWO_TERM_KEYS && LA_GATE != 2;
    static constexpr int REST = QUERIES + 5, KEY_REST = REST + (TWO_TERMS ? 4 : 0),
                         QUOTIENT_REST = KEY_REST + (TWO_TERM_KEYS ? 3 : 0);
    static constexpr int TILES = QUOTIENT_REST + (QUOTIENTS_IN_SCRATCH ? 4 : 0), PANEL_BYTES = TILES * BLOCK_BYTES,
                         SIZE = 2 * PANEL_BYTES, FAR_QUERY = QUERIES;
    static constexpr int query(int block) { return block - 4 + QUERIES; }                 // negative: it has none
    static constexpr int key(int block) { return FAR_QUERY + (block ? block + 2 : 1); }   // of blocks 0..2
    static constexpr int FAR_KEY = FAR_QUERY + 2;
};

// Data of a warp that scales: addresses of a chunk's tiles, scratch, decays of blocks; -Kc, dots with the bonus; the
// decay of the chunk
struct Tiles {
    u32 q, k, gates, scratch, decays, keys, bonus, all;
};

LA_DEVICE float sum_of_eight(float (&x)[8], int lane) {   // the sum over the warp of value row_of_sum(lane)
    exchange_half<1, 4>(x, lane);
    exchange_half<2, 2>(x, lane);
    exchange_half<4, 1>(x, lane);
    x[0] += __shfl_xor_sync(0xffffffffu, x[0], 8);
    return x[0] + __shfl_xor_sync(0xffffffffu, x[0], 16);
}
LA_DEVICE int row_of_sum(int lane) { return (lane & 1) * 4 + (lane & 2) + ((lane >> 2) & 1); }

// the rounding error of bfloat16
LA_DEVICE u32 rest_of(float2 x) {
    const float2 first = floats_of(pack(x));
    return pack({x.x - first.x, x.y - first.y});
}
// The copies of eight rows that reach a block further
LA_DEVICE void scale_far_queries(u32 to, const u32 (&q)[8], const float2 (&a)[8], float2 far, int lane) {
#pragma unroll
    for (int r = 0; r < 8; r++) {
        if (!LA_BEFORE) far *= a[r];
        store_word(to + lane_row(r, lane), pack(floats_of(q[r]) * far));
        if (LA_BEFORE) far *= a[r];
    }
}
LA_DEVICE void scale_far_keys(u32 to, const u32 (&k)[8], const float2 (&a)[8], float2 far, int lane) {
#pragma unroll
    for (int r = 7; r >= 0; r--) {
        store_word(to + lane_row(r, lane), pack(floats_of(k[r]) * far));
        far *= a[r];
    }
}
// q . u k of eight rows from row `first` on, over a warp's channels
LA_DEVICE void store_bonus(u32 to, int first, const u32 (&q)[8], const u32 (&k)[8], float2 u, int lane) {
    float x[8];
#pragma unroll
    for (int r = 0; r < 8; r++) {
        const float2 y = floats_of(q[r]) * u, z = floats_of(k[r]);
        x[r] = fmaf(y.x, z.x, y.y * z.y);
    }
    const float sum = sum_of_eight(x, lane);
    if (lane < 8) store_shared(to + (first + row_of_sum(lane)) * 4, sum);
}
// Eight rows from row `first` on: h Pre up to them in `pre`, Suf of the last of them in `suf`; reach.before: E / h.
// KEYS: -Kc too.
template <int QUERIES, bool KEYS, bool EXACT>
LA_DEVICE void scale_rows(const Tiles& t, int first, float2& pre, float2 suf, const Reach& reach, float2 u, int warp,
                          int lane) {
    const int block = warp >> 1, panel = warp & 1;
    typedef Scratch<QUERIES> X;
    const u32 own = panel * PANEL + block * BLOCK_BYTES + first * 128,
              scratch = t.scratch + panel * X::PANEL_BYTES + first * 128;
    const u32 gates = gates_of(t.gates, block, panel, lane) + first * 128,
              quotients = t.gates + panel * QUOTIENTS + block * BLOCK_BYTES + first * 128;
    float2 a[8];
    u32 q[8], k[8];
#pragma unroll
    for (int r = 0; r < 8; r++) a[r] = load_gate(gates, r, lane);
#pragma unroll
    for (int r = 0; r < 8; r++) {
        k[r] = load_word(t.k + own + lane_row(r, lane));
        q[r] = load_word(t.q + own + lane_row(r, lane));
    }
    if (LA_GATE == 2) __syncwarp();   // quotients go over the log decays of other lanes
#pragma unroll
    for (int r = 0; r < 8; r++) a[r] = decay_of(a[r]);
    const float2 begin = pre;
    float2 s = suf;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float2 before = pre;
        pre *= a[i];
        const float2 x = floats_of(q[i]) * (LA_BEFORE ? before : pre), y = floats_of(k[i]);
        store_word(t.q + own + lane_row(i, lane), pack(x * reach.before));
        store_word_if(X::query(block) >= 0, scratch + X::query(block) * BLOCK_BYTES + lane_row(i, lane), pack(x));
        if (X::TWO_TERMS) store_word(scratch + (X::REST + block) * BLOCK_BYTES + lane_row(i, lane), rest_of(x));
        if (KEYS) store_word(t.keys + own + lane_row(i, lane), pack(y * (pre * -reach.before)));
        const float2 w = y * (X::TWO_TERMS || !EXACT ? any_over(pre) : float2{over(pre.x), over(pre.y)});
        store_word(quotients + lane_row(i, lane), pack(w));
        if (X::TWO_TERM_KEYS)
            store_word(
                (X::QUOTIENTS_IN_SCRATCH ? scratch + (X::QUOTIENT_REST + block) * BLOCK_BYTES : quotients + PANEL) +
                    lane_row(i, lane),
                rest_of(w));
        const int r = 7 - i;
        const float2 z = floats_of(k[r]) * s;
        store_word(t.k + own + lane_row(r, lane), pack(z * reach.behind));
        store_word_if(block < 3, scratch + X::key(block) * BLOCK_BYTES + lane_row(r, lane), pack(z));
        if (X::TWO_TERM_KEYS)
            store_word_if(block < 3, scratch + (X::KEY_REST + block) * BLOCK_BYTES + lane_row(r, lane), rest_of(z));
        s *= a[r];
    }
    if (block == 3) scale_far_queries(scratch + X::FAR_QUERY * BLOCK_BYTES, q, a, begin * reach.between, lane);
    if (block == 0) scale_far_keys(scratch + X::FAR_KEY * BLOCK_BYTES, k, a, suf * reach.between, lane);
    if (LA_BONUS) store_bonus(t.bonus, panel * C + block * ROWS + first, q, k, u, lane);
}
// All copies of a warp's 16 rows. Returns whether the block decays by more than quotients can bear; all: decay of the
// chunk. begin() is called before anything is overwritten but q, k and g.
template <int QUERIES, bool KEYS, bool EXACT, class F>
LA_DEVICE bool scale_block(const Tiles& t, float2& all, float2 u, int warp, int lane, F begin) {
    const int block = warp >> 1, panel = warp & 1;
    const Halves halves = halves_of(gates_of(t.gates, block, panel, lane), lane);
    const float2 own = halves.first * halves.last;
    store_decay(t.decays, own, block, panel, lane);
    producers_barrier();
    Reach reach = reach_of(t.decays, own, block, panel, lane);
    all = reach.all;
    reach.before *= {OVER_MIDDLE, OVER_MIDDLE};
    begin();
    float2 pre = {MIDDLE, MIDDLE};
#pragma unroll 1   // one copy of this code for all rows and warps: with four, fetching instructions was the limit
    for (int first = 0; first < ROWS; first += 8)
        scale_rows<QUERIES, KEYS, EXACT>(t, first, pre, first ? float2{1.f, 1.f} : halves.last, reach, u, warp, lane);
    return fminf(pre.x, pre.y) < SMALLEST_DECAY * MIDDLE;
}
