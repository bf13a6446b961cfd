// The diagonal block of P from rows of q and k as they came, for columns j from the first row on whose Pre is below the smallest:
// halves of 16, 8, 4, 2 rows, each with its reference in its own middle (q decayed from there, k decayed to it: both exponents
// are <= 0), then i = j. Row j's choice depends on rows <= j alone, so that no later token changes an earlier output.
#pragma once
#include "vector/copies.cuh"

// A lane's two channels of a block's rows in memory: row r is `rows` + r * stride
struct RawRows { const char* rows; i64 stride; };

template <int BYTES> LA_DEVICE float2 load_raw(const RawRows& x, int r, int count) {
    if (r >= count) return {0.f, 0.f};
    if constexpr (BYTES == 4) return *(const float2*)(x.rows + r * x.stride);
    else return floats_of(*(const u32*)(x.rows + r * x.stride));
}
LA_DEVICE u32 rows_of_block(int lane) { return (lane & 15) * 128 + (((lane >> 4) ^ (lane & 7)) << 4); }                        // an A
LA_DEVICE u32 half_of_block(int panel, int lane) { return (panel * 8 + (lane & 7)) * 128 + (((lane >> 3) ^ (lane & 7)) << 4); }   // a B

// Bits of the rows whose Pre is below the smallest in some channel
LA_DEVICE u32 far_rows(const float2 (&a)[ROWS]) {
    float2 pre = {1.f, 1.f};
    u32 found = 0;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        pre *= a[r];
        found |= (u32)(fminf(pre.x, pre.y) < SMALLEST_DECAY) << r;
    }
    return __reduce_or_sync(0xffffffffu, found);
}
// 16 x 8 of q k^T over 128 channels; A and B are both in the tile (panels `apart` bytes from one another)
LA_DEVICE void product_of_tile(float (&c)[4], u32 tile, int apart, int panel, int lane) {
    const u32 to_a = rows_of_block(lane), to_b = half_of_block(panel, lane);
#pragma unroll
    for (int x = 0; x < 4; x++) {
        u32 a0[4], a1[4], b[4];
        const u32 at = tile + (x >> 1) * apart;
        load_matrix(a0, at + (to_a ^ ((x & 1) * 64)));
        load_matrix(a1, at + (to_a ^ ((x & 1) * 64 + 32)));
        load_matrix(b, at + (to_b ^ ((x & 1) * 64)));
        mma_bf16(c, a0, {b[0], b[1]});
        mma_bf16(c, a1, {b[2], b[3]});
    }
}
// Off the diagonal, level by level, into `out`
LA_DEVICE void exact_levels(float (&out)[4], const float2 (&a)[ROWS], const u32 (&q)[ROWS], const u32 (&k)[ROWS], u32 tile, int apart, int block, int panel, int lane) {
    const u32 own = tile + panel * apart;
    const int row = lane >> 2, column = 8 * panel + (lane & 3) * 2;
#pragma unroll
    for (int half = 8; half; half /= 2) {
#pragma unroll
        for (int first = 0; first < ROWS; first += 2 * half) {
            float2 x = {1.f, 1.f}, y = {1.f, 1.f};
#pragma unroll
            for (int r = first + half; r < first + 2 * half; r++) {
                if (!LA_BEFORE) x *= a[r];
                store_word(own + lane_row(r, lane), pack(floats_of(q[r]) * x));
                if (LA_BEFORE) x *= a[r];
            }
#pragma unroll
            for (int r = first + half - 1; r >= first; r--) {
                store_word(own + lane_row(r, lane), pack(floats_of(k[r]) * y));
                y *= a[r];
            }
        }
        pair_barrier(block);
        float c[4] = {0.f, 0.f, 0.f, 0.f};
        product_of_tile(c, tile, apart, panel, lane);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int i = row + 8 * (n >> 1), j = column + (n & 1);
            if ((i & half) && !(j & half) && i / (2 * half) == j / (2 * half)) out[n] = c[n];
        }
        pair_barrier(block);
    }
}
// i = j into `out`: rows of q, then of k, one after the other in the tile
LA_DEVICE void exact_diagonal(float (&out)[4], const u32 (&q)[ROWS], const u32 (&k)[ROWS], u32 tile, int apart, int block, int panel, int lane) {
    const u32 own = tile + panel * apart;
    u32 x[8][4];
#pragma unroll
    for (int r = 0; r < ROWS; r++) store_word(own + lane_row(r, lane), q[r]);
    pair_barrier(block);
#pragma unroll
    for (int n = 0; n < 8; n++) load_matrix(x[n], tile + (n >> 2) * apart + (rows_of_block(lane) ^ ((n & 3) * 32)));
    pair_barrier(block);
#pragma unroll
    for (int r = 0; r < ROWS; r++) store_word(own + lane_row(r, lane), k[r]);
    pair_barrier(block);
    float c[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int n = 0; n < 4; n++) {
        u32 b[4];
        load_matrix(b, tile + (n >> 1) * apart + (half_of_block(panel, lane) ^ ((n & 1) * 64)));
        mma_bf16(c, x[2 * n], {b[0], b[1]});
        mma_bf16(c, x[2 * n + 1], {b[2], b[3]});
    }
#pragma unroll
    for (int n = 0; n < 4; n++)
        if ((lane >> 2) + 8 * (n >> 1) == 8 * panel + (lane & 3) * 2 + (n & 1)) out[n] = c[n];
    pair_barrier(block);
}
struct ExactBlock { float x[4]; int begin; };   // a lane's part of 16 x 8, and the first column that it is for
// Columns 8 panel and on of the block. tile: its rows in both panels, which are overwritten; count: rows that there are
static __device__ __noinline__ ExactBlock exact_block(RawRows q_rows, RawRows k_rows, RawRows g_rows, int count, u32 tile, int apart, int warp, int lane) {
    const int block = warp >> 1, panel = warp & 1;
    float2 a[ROWS];
    u32 q[ROWS], k[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        a[r] = decay_of(load_raw<GATE_BYTES>(g_rows, r, count));
        q[r] = pack(load_raw<2>(q_rows, r, count));
        k[r] = pack(load_raw<2>(k_rows, r, count));
    }
    const u32 far = far_rows(a);
    if (lane == 0) store_word(tile + panel * 4, far);
    pair_barrier(block);
    ExactBlock found = {{0.f, 0.f, 0.f, 0.f}, __ffs(load_word(tile) | load_word(tile + 4)) - 1};
    pair_barrier(block);
    exact_levels(found.x, a, q, k, tile, apart, block, panel, lane);
    if (!LA_BEFORE) exact_diagonal(found.x, q, k, tile, apart, block, panel, lane);
    return found;
}
