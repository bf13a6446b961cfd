// The diagonal block of P from rows of q and k as they came, for columns j from the first row on whose Pre is below the smallest:
// halves of 16, 8, 4, 2 rows, each with its reference in its own middle (q decayed from there, k decayed to it: both exponents
// are <= 0), then i = j. Row j's choice depends on rows <= j alone, so that no later token changes an earlier output.
#pragma once
#include "vector/copies.cuh"

// A lane's two channels of a block's rows in memory: row r is `rows` + r * stride
struct RawRows { const char* rows; i64 stride; };

// by predicates, so that all rows are on their way at once
LA_DEVICE u32 load_raw(const RawRows& x, int r, int count) {
    u32 y;
    asm("{ .reg .pred p; setp.gt.s32 p, %2, %3; mov.b32 %0, 0; @p ld.global.nc.b32 %0, [%1]; }" : "=r"(y) : "l"(x.rows + r * x.stride), "r"(count), "r"(r));
    return y;
}
LA_DEVICE float2 load_raw_gate(const RawRows& x, int r, int count) {
    if constexpr (LA_GATE == 2) {
        float2 y;
        asm("{ .reg .pred p; setp.gt.s32 p, %3, %4; mov.b32 %0, 0; mov.b32 %1, 0; @p ld.global.nc.v2.f32 {%0, %1}, [%2]; }"
            : "=f"(y.x), "=f"(y.y) : "l"(x.rows + r * x.stride), "r"(count), "r"(r));
        return y;
    } else return floats_of(load_raw(x, r, count));
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
// Off the diagonal, into `out`: one copy of the code for all levels, since fetching it would take longer than running it
LA_DEVICE void exact_levels(float (&out)[4], const float2 (&a)[ROWS], const u32 (&q)[ROWS], const u32 (&k)[ROWS], u32 tile, int apart, int warp, int lane) {
    const int block = warp >> 1, panel = warp & 1;
    const u32 own = tile + panel * apart;
    const int row = lane >> 2, column = 8 * panel + (lane & 3) * 2;
#pragma unroll 1
    for (int half = 8; half; half /= 2) {
        float2 x = {1.f, 1.f}, y = {1.f, 1.f};
#pragma unroll
        for (int r = 0; r < ROWS; r++) {   // second halves: q from the middle on
            if ((r & (half - 1)) == 0) x = {1.f, 1.f};
            if (!LA_BEFORE) x *= a[r];
            store_word_if(r & half, own + lane_row(r, lane), pack(floats_of(q[r]) * x));
            if (LA_BEFORE) x *= a[r];
        }
#pragma unroll
        for (int r = ROWS - 1; r >= 0; r--) {   // first halves: k up to the middle
            if ((r & (half - 1)) == half - 1) y = {1.f, 1.f};
            store_word_if(!(r & half), own + lane_row(r, lane), pack(floats_of(k[r]) * y));
            y *= a[r];
        }
        pair_barrier(block);
        float c[4] = {0.f, 0.f, 0.f, 0.f};
        product_of_tile(c, tile, apart, panel, lane);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int i = row + 8 * (n >> 1), j = column + (n & 1);
            if ((i & half) && !(j & half) && (i ^ j) < 2 * half) out[n] = c[n];
        }
        pair_barrier(block);
    }
}
// i = j into `out`: sums over the channels in float32, of either panel's warp through the tile
LA_DEVICE void exact_diagonal(float (&out)[4], const u32 (&q)[ROWS], const u32 (&k)[ROWS], u32 tile, int block, int panel, int lane) {
#pragma unroll
    for (int first = 0; first < ROWS; first += 8) {
        float x[8];
#pragma unroll
        for (int r = 0; r < 8; r++) {
            const float2 y = floats_of(q[first + r]), z = floats_of(k[first + r]);
            x[r] = fmaf(y.x, z.x, y.y * z.y);
        }
        const float sum = sum_of_eight(x, lane);
        if (lane < 8) store_shared(tile + (panel * ROWS + first + row_of_sum(lane)) * 4, sum);
    }
    pair_barrier(block);
    const int row = lane >> 2, column = 8 * panel + (lane & 3) * 2;
    const float2 x = load_shared2(tile + column * 4), y = load_shared2(tile + (ROWS + column) * 4);
#pragma unroll
    for (int n = 0; n < 4; n++)
        if (row + 8 * (n >> 1) == column + (n & 1)) out[n] = n & 1 ? x.y + y.y : x.x + y.x;
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
        a[r] = load_raw_gate(g_rows, r, count);
        q[r] = load_raw(q_rows, r, count);
        k[r] = load_raw(k_rows, r, count);
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) a[r] = decay_of(a[r]);
    const u32 far = far_rows(a);
    if (lane == 0) store_word(tile + panel * 4, far);
    pair_barrier(block);
    ExactBlock found = {{0.f, 0.f, 0.f, 0.f}, __ffs(load_word(tile) | load_word(tile + 4)) - 1};
    pair_barrier(block);
    exact_levels(found.x, a, q, k, tile, apart, warp, lane);
    if (!LA_BEFORE) exact_diagonal(found.x, q, k, tile, block, panel, lane);
    return found;
}
