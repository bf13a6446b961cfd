// The gradients of one chunk and 64 of its key channels: places in shared memory, and the products that need no decay.
//
// With Pre_i the decay of a block of 16 rows up to row i, D the decay of whole blocks, h = 2^58 in the middle of the
// float range, and bfloat16 copies
//     qP = q Pre h,      kP = k / (Pre h),      kR = k Pre h (erase)
// of block J the readers' sums go from the first block to the last and the writers' from the last to the first
// (docs/internals/vector_backward.md):
//     readers:  y = X / h;  for J:  y[I >= J] += Z[I, J] kP_J;  out_J = Pre h y_J;  y[I > J] *= D_J
//     writers:  y = X h;    for I:  y[J <= I] *= D_I;  y[J <= I] += Z[I, J]^T qP_I;  out_I = y_I / (Pre h)
// A pair (i, j) of a chunk has no rounding of its own but that of the result: copies and Z (Y) are operands of two
// bfloat16 terms, x and its rounding error, whose four products are added. The second terms of Z (with LA_ERASE
// all) go where tiles have been that all products have read. LA_EXACT 1 is for chunks with a block that decays by more
// than 2^-116 in some channel: copies q Pre and k Suf (exponents <= 0), pairs inside a block one by one in float32.
#pragma once
#include "vector/backward/slices.cuh"
#include "tile/wgmma_part.cuh"
#include "arguments/matrix_state/VectorGradArguments.cuh"   // after TensorMap

#ifndef LA_DQ   // of dq, as LA_DTYPE: 0 bfloat16, 2 float32
#define LA_DQ 0
#endif
#ifndef LA_COMPLEMENT   // 1: keys are 1 - e^g, so that dg has e^g dk subtracted and no dk is stored
#define LA_COMPLEMENT 0
#endif
constexpr bool ERASE = LA_ERASE, EXACT_BLOCKS = LA_EXACT, COMPLEMENT = LA_COMPLEMENT;
constexpr bool TWO_TERMS = !ERASE || !EXACT_BLOCKS,
               RESTS_APART = !ERASE;   // of copies, Z and Y; the rests of copies have places of their own
constexpr bool DOTS_OF_COPIES =
    RESTS_APART || EXACT_BLOCKS;   // the terms of dg; else of q, k and their gradients, when the second terms are gone
constexpr bool DIAGONAL_APART =
    ERASE && !EXACT_BLOCKS;   // Z's diagonal is added one by one, in float32, and stands in no dot
constexpr float MIDDLE = 0x1p58f, SMALLEST_DECAY = 0x1p-116f;   // 80 nats in a block
constexpr int THREADS = 256, HALF = 64, HALVES = round_up(LA_K, HALF) / HALF, BLOCKS = C / 16;
constexpr int PER = 4, OWN = SLICE / 2;   // channels and rows of a lane, half a warp a row
constexpr int PANEL_BYTES = round_up(LA_V, 64) * 128,
              STEPS = round_up(LA_V, 64) / 16;   // of a state's panel that is used; of 16 value columns
// tiles: copies; S before and G after the chunk; dO, U (or V), dW. Z and Y have a place of their own, with erase that
// of dO
constexpr int AT_QP = 0, AT_KP = AT_QP + Square::SIZE, AT_KR = AT_KP + Square::SIZE,
              AT_STATE = AT_KR + ERASE * Square::SIZE;
constexpr int AT_AFTER = AT_STATE + Whole::PANEL, AT_DOUT = AT_AFTER + Whole::PANEL,
              AT_WRITTEN = AT_DOUT + Tokens::SIZE, AT_ERROR = AT_WRITTEN + Tokens::SIZE;
constexpr int AT_SPARE = AT_ERROR + ERASE * Tokens::SIZE, AT_Z = ERASE ? AT_DOUT : AT_SPARE, AT_Y = AT_Z + Square::SIZE;
typedef SliceTable<HALF, PER> Table;
// tables of slices: decays; <S, G>; sums of db, before them decays of blocks; then terms that cross the chunk's end,
// Z's diagonal
constexpr int AT_DECAYS = AT_SPARE + (ERASE ? EXACT_BLOCKS * 2 : 3 + EXACT_BLOCKS) * Square::SIZE,
              AT_PRODUCTS = AT_DECAYS + Table::BYTES;
constexpr int AT_SUMS = AT_PRODUCTS + Table::BYTES, AT_BLOCKS = AT_SUMS, AT_CROSSING = AT_SUMS + Table::BYTES,
              AT_OWN = AT_CROSSING + HALF * 4;
constexpr int AT_NEAR = AT_OWN + C * 4, AT_BARRIER = AT_NEAR + C * 4;   // exact: Z next to its diagonal
// exact: which items are flagged; the terms for G, and their sums
constexpr int AT_FLAGGED = AT_BARRIER + 16, AT_GIVEN = round_up(AT_FLAGGED + 32, 1024),
              AT_GIVEN_SUMS = AT_GIVEN + C * HALF * 4;
static_assert(LA_SHARED == (EXACT_BLOCKS ? AT_GIVEN_SUMS + Table::BYTES : AT_BARRIER + 16),
              "LA_SHARED is the size that the launch requests");
constexpr int AT_LOW_BITS = AT_Z,
              USED_LOW_BITS = STEPS * 512;   // of S and G, until Z takes their place; those that are used
// in the place of tiles that all products have read: sums before their last factor (C x 64 floats each), and
// raw rows
constexpr int AT_READS = AT_STATE, AT_WRITES = AT_AFTER, AT_ERASES = EXACT_BLOCKS ? AT_WRITTEN : AT_DOUT;
// second terms of Z, Y and copies. With erase the last three go where sums are staged later
constexpr int AT_Z_REST = ERASE          ? AT_ERROR
                          : EXACT_BLOCKS ? AT_SPARE + 3 * Square::SIZE
                                         : AT_DOUT,
              AT_Y_REST = AT_Z_REST + Square::SIZE;
constexpr int AT_KP_REST = ERASE ? AT_READS : AT_Z + Square::SIZE,
              AT_QP_REST = ERASE ? AT_WRITES : AT_KP_REST + Square::SIZE, AT_KR_REST = AT_QP_REST + Square::SIZE;
constexpr int AT_RAW_A = ERASE ? AT_ERROR : AT_DOUT, AT_RAW_Q = ERASE ? AT_SPARE : AT_WRITTEN,
              AT_RAW_K = AT_RAW_Q + Square::SIZE;

struct ChunkPlace {
    VectorPlace of;
    int chunk, half;
    // items: halves fastest, then heads, chunks, sequences
    __device__ __forceinline__ ChunkPlace(const VectorGradArguments& a, u32 item)
        : of(a.offsets, a.T, a.heads, a.slots, item / HALVES / a.heads / a.chunks, item / HALVES % a.heads),
          chunk(item / HALVES / a.heads % a.chunks),
          half(item % HALVES) {}
    __device__ __forceinline__ i64 block() const { return of.block + chunk; }
};

// An operand of two terms, the second the rounding error of the first (exact with erase: not there): places of tiles,
// and how far along them
struct Terms {
    int first, rest;
    u32 along;
    __device__ __forceinline__ Terms operator+(u32 n) const { return {first, rest, along + n}; }
};
template <int FIRST, int TILES, int B_COLUMNS> LA_DEVICE void add_products(float (&c)[8][4], u32 shared, Terms a,
                                                                           Terms b, bool add) {
    shared = opaque(shared);   // no descriptor is held from one block to the next: it would spill
    const u64 a0 = panel_descriptor(shared + a.first) + a.along, b0 = panel_descriptor(shared + b.first) + b.along;
    product_part<FIRST, TILES, 1, B_COLUMNS>(c, a0, b0, add);
    if constexpr (!TWO_TERMS) return;
    const u64 a1 = panel_descriptor(shared + a.rest) + a.along, b1 = panel_descriptor(shared + b.rest) + b.along;
    product_part<FIRST, TILES, 1, B_COLUMNS>(c, a1, b0, true);
    product_part<FIRST, TILES, 1, B_COLUMNS>(c, a0, b1, true);
    product_part<FIRST, TILES, 1, B_COLUMNS>(c, a1, b1, true);
}

// This thread's part of the work on a chunk. Products: warpgroup 0 reads, 1 writes; a warp has 16 channels (rows of the
// accumulators) of all tokens (columns). Copies and gradients: a warp has a slice, a lane 4 rows from `first` on of 4
// channels from `channel` on.
struct Lane {
    u32 shared;
    int warp, lane, group, quarter, first, channel;
    __device__ __forceinline__ Lane(u32 at) : shared(at) {
        warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
        lane = threadIdx.x & 31;
        group = warp >> 2;
        quarter = warp & 3;
        first = warp * SLICE + (lane >> 4) * OWN;
        channel = (lane & 15) * PER;
    }
    __device__ __forceinline__ bool upper() const { return lane & 16; }   // has the slice's later rows
    __device__ __forceinline__ u64 tile(int at) const { return panel_descriptor(shared + at); }
    __device__ __forceinline__ u32 row(int at, int r) const {
        return shared + at + row_offset(first + r, (first & 4) + r, channel);
    }
    // of staged sums: pieces of 8 channels are permuted by the token's number / 2
    __device__ __forceinline__ u32 staged(int at, int r) const {
        const int t = first + r;
        return shared + at + t * HALF * 4 + ((channel * 4) ^ (((t >> 1) & 3) << 5));
    }
    __device__ __forceinline__ Table decays() const { return {shared + AT_DECAYS}; }
    // decay of a block in one of the accumulators' two rows
    __device__ __forceinline__ float block_decay(int block, int m) const {
        return load_shared(shared + AT_BLOCKS + (block * HALF + quarter * 16 + (lane >> 2) + 8 * m) * 4);
    }
};
LA_DEVICE void load_four(float (&x)[PER], u32 at) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(at));
}
LA_DEVICE void store_four(u32 at, const float (&x)[PER]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
}
LA_DEVICE void load_copies(float (&x)[PER], u32 at) {   // of bfloat16
    const float2 y = load_shared2(at);
    const u32 u = __float_as_uint(y.x), v = __float_as_uint(y.y);
    x[0] = low_bf16(u);
    x[1] = high_bf16(u);
    x[2] = low_bf16(v);
    x[3] = high_bf16(v);
}
LA_DEVICE void load_terms(float (&x)[PER], u32 at, u32 rest) {   // of two terms
    float y[PER];
    load_copies(x, at);
    load_copies(y, rest);
#pragma unroll
    for (int c = 0; c < PER; c++) x[c] += y[c];
}
LA_DEVICE float load_bf16(u32 at) {
    u16 x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(at));
    return __uint_as_float((u32)x << 16);
}
// of the two lanes of a slice's channels
LA_DEVICE void other_half(float (&x)[PER], const float (&y)[PER]) {
#pragma unroll
    for (int c = 0; c < PER; c++) x[c] = __shfl_xor_sync(0xffffffffu, y[c], 16);
}

// Tiles of the chunk, by one thread
LA_DEVICE void load_tiles(const VectorGradArguments& a, const ChunkPlace& place, u32 shared) {
    const u32 full = shared + AT_BARRIER;
    const int token = place.of.token(place.chunk), head = place.of.head, row = place.of.row;
    barrier_expect(full, 2 * PANEL_BYTES + (2 + ERASE) * TILE_BYTES + !ERASE * 2 * USED_LOW_BITS);
    run_in(shared + AT_STATE, a.states + place.block() * LA_END + place.half * Whole::PANEL, PANEL_BYTES, full);
    run_in(shared + AT_AFTER, a.ends + place.block() * LA_ENDS + place.half * Whole::PANEL, PANEL_BYTES, full);
    tile_in(shared + AT_DOUT, a.dout, full, head, token, row);
    if constexpr (ERASE) {
        run_in(shared + AT_WRITTEN, a.new_values + place.block() * Tokens::SIZE, TILE_BYTES, full);
        tile_in(shared + AT_ERROR, a.v, full, head, token, row);   // dW = dv
    } else {
        run_in(shared + AT_LOW_BITS, a.states + place.block() * LA_END + Whole::SIZE + place.half * LOW_BITS_PANEL,
               USED_LOW_BITS, full);
        run_in(shared + AT_LOW_BITS + LOW_BITS_PANEL,
               a.ends + place.block() * LA_ENDS + Whole::SIZE + place.half * LOW_BITS_PANEL, USED_LOW_BITS, full);
        tile_in(shared + AT_WRITTEN, a.v, full, (u32)head / (u32)a.group_v, token, row);
    }
}

// x^T = (64 channels of a state) (rows of tokens)^T, begun
LA_DEVICE void begin_state(float (&x)[8][4], u64 state, u64 rows) {
    accumulator_fence(x);
    products_begin();
#pragma unroll
    for (int d = 0; d < STEPS; d++) product_AtBt(x, state + Whole::across(d), rows + Tokens::along(d), d > 0);
    products_commit();
}
// 32 columns of rows written^T, begun
LA_DEVICE void begin_gram(float (&z)[4][4], u64 rows, u64 written) {
    accumulator_fence(z);
    products_begin();
#pragma unroll
    for (int d = 0; d < STEPS; d++)
        product_part<0, 4, 0, 0>(z, rows + Tokens::along(d), written + Tokens::along(d), d > 0);
    products_commit();
}
// Those columns of the lower triangle, times `factor`, to shared memory: blocks above the diagonal are not read.
// STRICT: zeros on the diagonal, whose entries go to `own` with KEEPS_DIAGONAL. NEAR: zeros next to it too, whose
// entries go to `near`: no decay crosses them.
template <bool STRICT, bool NEAR, bool KEEPS_DIAGONAL> LA_DEVICE void store_gram(const float (&z)[4][4], u32 to,
                                                                                 u32 to_rest, u32 own, u32 near,
                                                                                 float factor, const Lane& me) {
    const int row = me.lane >> 2, column = (me.lane & 3) * 2;
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const int J = 2 * me.group + n;
        if (J > me.quarter) continue;
        u32 x[4], rest[4];
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const float u = factor * z[2 * n + h][2 * m], v = factor * z[2 * n + h][2 * m + 1];
                const int i = 16 * me.quarter + row + 8 * m,
                          ahead = 16 * J + 8 * h + column - i;   // of the row's own column
                constexpr int LIMIT = STRICT ? -NEAR : 1;
                const float lower[2] = {ahead < LIMIT ? u : 0.f, ahead + 1 < LIMIT ? v : 0.f};
                x[2 * h + m] = pack_bf16(lower[0], lower[1]);
                rest[2 * h + m] = rest_of(lower[0], lower[1]);
                if constexpr (KEEPS_DIAGONAL) {
                    if (ahead == 0) store_shared(own + i * 4, u);
                    if (ahead == -1) store_shared(own + i * 4, v);
                }
                if constexpr (NEAR) {
                    if (ahead == -1) store_shared(near + i * 4, u);
                    if (ahead == -2) store_shared(near + i * 4, v);
                }
            }
        const u32 at = Square::block_piece(16 * me.quarter, 2 * J, me.lane & 15, me.lane >> 4);
        store_matrix(to + at, x[0], x[1], x[2], x[3]);
        if (TWO_TERMS) store_matrix(to_rest + at, rest[0], rest[1], rest[2], rest[3]);
    }
}

// <S, G> over a warp's 16 value rows, without erase with their low bits
LA_DEVICE void state_products(const Lane& me) {
    const u32 at = me.shared + AT_STATE + Whole::block_piece(16 * me.warp, 0, me.lane & 15, me.lane >> 4);
    const bool used = me.warp * 16 < round_up(LA_V, 64);
    const u32 low = me.shared + AT_LOW_BITS + threadIdx.x * 16;
#pragma unroll
    for (int d = 0; d < 4; d++) {
        float sum[4] = {0.f, 0.f, 0.f, 0.f};   // of channels 16 d + 2 (lane % 4), the next, and of those 8 further
        if (used) {
            u32 s[4], g[4];
            load_matrix(s, at ^ 32 * d);
            load_matrix(g, (at ^ 32 * d) + AT_AFTER - AT_STATE);
            const u32 low_s = ERASE ? 0 : __float_as_uint(load_shared(low + 4 * d));
            const u32 low_g = ERASE ? 0 : __float_as_uint(load_shared(low + LOW_BITS_PANEL + 4 * d));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 x = ERASE ? float2{low_bf16(s[i]), high_bf16(s[i])} : with_low_bits(s[i], low_s, i);
                const float2 y = ERASE ? float2{low_bf16(g[i]), high_bf16(g[i])} : with_low_bits(g[i], low_g, i);
                sum[i & 2] += x.x * y.x;
                sum[(i & 2) + 1] += x.y * y.y;
            }
        }
        const bool further = me.lane & 16, next = me.lane & 8;   // whose sum a lane has in the end
        float of[2];
#pragma unroll
        for (int c = 0; c < 2; c++)
            of[c] = (further ? sum[2 + c] : sum[c]) + __shfl_xor_sync(0xffffffffu, further ? sum[c] : sum[2 + c], 16);
        float one = (next ? of[1] : of[0]) + __shfl_xor_sync(0xffffffffu, next ? of[0] : of[1], 8);
        one += __shfl_xor_sync(0xffffffffu, one, 4);
        if (!(me.lane & 4))
            store_shared(
                me.shared + AT_PRODUCTS + me.warp * Table::ROW + (16 * d + 8 * further + 2 * (me.lane & 3) + next) * 4,
                one);
    }
}
