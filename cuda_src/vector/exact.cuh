// The diagonal block of P from rows of q and k as they came, for columns j from the first row on whose Pre is below the
// smallest: halves of 16, 8, 4, 2 rows, each with its reference in its own middle (q decayed from there, k decayed to
// it: both exponents are <= 0), then i = j. Row j's choice depends on rows <= j alone, so that no later token changes
// an earlier output.
//
// A level of halves is a product of 8 rows with 8: two levels make one operand of 16 rows each. All is done before the
// chunk's rows are scaled, in the scratch that their copies take afterwards: 8 KiB a block.
#pragma once
#include "vector/copies.cuh"

LA_DEVICE u32 rows_of_block(int lane) { return (lane & 15) * 128 + (((lane >> 4) ^ (lane & 7)) << 4); }   // an A
LA_DEVICE u32 half_of_block(int panel, int lane) {
    return (panel * 8 + (lane & 7)) * 128 + (((lane >> 3) ^ (lane & 7)) << 4);
}   // a B

// as mma.cuh's, but free to move: loads of the next operands go ahead of it
LA_DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// 16 rows of A against 8 rows of B over 128 channels: two accumulators, so that products do not wait for one another
LA_DEVICE void half_block(float (&c)[4], u32 a, int a_apart, u32 b, int b_apart, int panel, int lane) {
    const u32 to_a = rows_of_block(lane), to_b = half_of_block(panel, lane);
    float d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int n = 0; n < 4; n++) c[n] = 0.f;
#pragma unroll
    for (int x = 0; x < 4; x++) {
        u32 a0[4], a1[4], y[4];
        const u32 at = a + (x >> 1) * a_apart, bt = b + (x >> 1) * b_apart;
        load_matrix(a0, at + (to_a ^ ((x & 1) * 64)));
        load_matrix(a1, at + (to_a ^ ((x & 1) * 64 + 32)));
        load_matrix(y, bt + (to_b ^ ((x & 1) * 64)));
        multiply(c, a0, y[0], y[1]);
        multiply(d, a1, y[2], y[3]);
    }
#pragma unroll
    for (int n = 0; n < 4; n++) c[n] += d[n];
}

// The same of several A and one B
LA_DEVICE void load_half(u32 (&y)[4][4], u32 b, int b_apart, int panel, int lane) {
    const u32 to_b = half_of_block(panel, lane);
#pragma unroll
    for (int x = 0; x < 4; x++) load_matrix(y[x], b + (x >> 1) * b_apart + (to_b ^ ((x & 1) * 64)));
}
LA_DEVICE void multiply_half(float (&c)[4], u32 a, int a_apart, const u32 (&y)[4][4], int lane) {
    const u32 to_a = rows_of_block(lane);
    float d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int n = 0; n < 4; n++) c[n] = 0.f;
#pragma unroll
    for (int x = 0; x < 4; x++) {
        u32 a0[4], a1[4];
        const u32 at = a + (x >> 1) * a_apart;
        load_matrix(a0, at + (to_a ^ ((x & 1) * 64)));
        load_matrix(a1, at + (to_a ^ ((x & 1) * 64 + 32)));
        multiply(c, a0, y[x][0], y[x][1]);
        multiply(d, a1, y[x][2], y[x][3]);
    }
#pragma unroll
    for (int n = 0; n < 4; n++) c[n] += d[n];
}

struct ExactBlock {
    float x[4];
    int begin;
};   // a lane's part of 16 x 8, and the first column that it is for
constexpr int EXACT_BYTES =
    4 * BLOCK_BYTES;   // of a block and term: operands of 16 rows of q and of k, two panels of 64 channels each

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
// Waits for the two warps of a block's panels
LA_DEVICE void panels_barrier(int block) { asm volatile("bar.sync %0, 64;" ::"r"(block + 11) : "memory"); }
template <int TERMS> LA_DEVICE void store_terms(u32 at, float2 x) {
    store_word(at, pack(x));
    if (TERMS == 2) store_word(at + EXACT_BYTES, rest_of(x));
}
// A lane's channels of a block as they came
struct RawBlock {
    float2 a[ROWS];
    u32 q[ROWS], k[ROWS];
    __device__ __forceinline__ void load_decays(u32 gates, int lane) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) a[r] = load_gate(gates, r, lane);
#pragma unroll
        for (int r = 0; r < ROWS; r++) a[r] = decay_of(a[r]);
    }
    __device__ __forceinline__ void load_rows(u32 to_q, u32 to_k, int lane) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            q[r] = load_word(to_q + lane_row(r, lane));
            k[r] = load_word(to_k + lane_row(r, lane));
        }
    }
    // Halves of 2 HALF rows: second ones, q from the middle on, first ones, k up to it, as rows `first` .. of the
    // operands
    template <int HALF, int TERMS> __device__ __forceinline__ void store_level(u32 queries, u32 keys, int first,
                                                                               int lane) const {
        float2 x = {1.f, 1.f}, y = {1.f, 1.f};
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const int r = n / HALF * 2 * HALF + HALF + n % HALF;
            if (n % HALF == 0) x = {1.f, 1.f};
            if (!LA_BEFORE) x *= a[r];
            store_terms<TERMS>(queries + lane_row(first + n, lane), floats_of(q[r]) * x);
            if (LA_BEFORE) x *= a[r];
        }
#pragma unroll
        for (int n = 7; n >= 0; n--) {
            const int r = n / HALF * 2 * HALF + n % HALF;
            if (n % HALF == HALF - 1) y = {1.f, 1.f};
            store_terms<TERMS>(keys + lane_row(first + n, lane), floats_of(k[r]) * y);
            y *= a[r];
        }
    }
    // Levels HALF and HALF / 2: a lane's two entries of that of its warp's panel
    template <int HALF, int TERMS> __device__ __forceinline__ float2 multiply_levels(u32 operands, int block, int panel,
                                                                                     int lane) const {
        const u32 own = operands + panel * BLOCK_BYTES;
        store_level<HALF, TERMS>(own, own + 2 * BLOCK_BYTES, 0, lane);
        store_level<HALF / 2, TERMS>(own, own + 2 * BLOCK_BYTES, 8, lane);
        panels_barrier(block);
        float c[4], rest[4];
        half_block(c, operands, BLOCK_BYTES, operands + 2 * BLOCK_BYTES, BLOCK_BYTES, panel, lane);
#pragma unroll 1
        for (int n = 1; n < 2 * TERMS - 1; n++) {   // with two terms: rest of q and k, q and rest of k
            const u32 q = operands + (n & 1) * EXACT_BYTES, k = operands + 2 * BLOCK_BYTES + (n >> 1) * EXACT_BYTES;
            half_block(rest, q, BLOCK_BYTES, k, BLOCK_BYTES, panel, lane);
#pragma unroll
            for (int i = 0; i < 4; i++) c[i] += rest[i];
        }
        panels_barrier(block);
        return panel ? float2{c[2], c[3]} : float2{c[0], c[1]};
    }
};
// Entries of a level, of 8 x 8, to their places in 16 x 16 floats
LA_DEVICE void place_level(u32 to, float2 x, int half, int lane) {
    const int n = lane >> 2, m = (lane & 3) * 2, low = half - 1;
    const int i = ((n & ~low) << 1) + half + (n & low);
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const int j = (((m + e) & ~low) << 1) + ((m + e) & low);
        store_word_if(((n ^ (m + e)) & ~low) == 0, to + (i * ROWS + j) * 4, __float_as_uint(e ? x.y : x.x));
    }
}
// Columns 8 panel and on of the diagonal block, by the two warps of a block's panels, where any of the four blocks is
// far; AT_ONCE of them have operands, of one or two terms, in the scratch
template <int AT_ONCE, int TERMS> LA_DEVICE ExactBlock exact_block(const Tiles& t, int warp, int lane) {
    const int block = warp >> 1, panel = warp & 1;
    const u32 operands = t.scratch + block % AT_ONCE * TERMS * EXACT_BYTES, q = t.q + block * BLOCK_BYTES,
              k = t.k + block * BLOCK_BYTES, flags = t.scratch + block * 8;
    RawBlock raw;
    raw.load_decays(gates_of(t.gates, block, panel, lane), lane);
    const u32 far = far_rows(raw.a);
    store_word_if(lane == 0, flags + panel * 4, far);
    const bool any = any_of_producers(far);
    ExactBlock found = {{0.f, 0.f, 0.f, 0.f}, __ffs(load_word(flags) | load_word(flags + 4) | 1 << ROWS) - 1};
    if (!any) return found;
    raw.load_rows(q + panel * PANEL, k + panel * PANEL, lane);
#pragma unroll 1
    for (int round = 0; round < 4 / AT_ONCE; round++) {
        producers_barrier();   // the scratch is free, flags have been read
        if (block / AT_ONCE != round) continue;
        float own[4];
        if (!LA_BEFORE) half_block(own, q, PANEL, k, PANEL, panel, lane);   // i = j is read
        const float2 wide = raw.multiply_levels<8, TERMS>(operands, block, panel, lane),
                     narrow = raw.multiply_levels<2, TERMS>(operands, block, panel, lane);
        place_level(operands, wide, panel ? 4 : 8, lane);
        place_level(operands, narrow, panel ? 1 : 2, lane);
        panels_barrier(block);
        const int row = lane >> 2, column = 8 * panel + (lane & 3) * 2;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int i = row + 8 * (n >> 1), j = column + (n & 1);
            const float x = load_shared(operands + (i * ROWS + j) * 4);
            found.x[n] = i > j ? x : LA_BEFORE ? 0.f : own[n];
        }
    }
    return found;
}
