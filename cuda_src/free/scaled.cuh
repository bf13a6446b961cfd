// Scaled copies of a chunk's rows, in place: readers q and a with the decay from the chunk's start (a's without its own
// token's), writers k and b with that to its end; and quotients k / Pre, b / Pre, with which readers make all pairs of
// the chunk in one product,
//
//     A_ij = sum over channels of (x_i Pre_i) (y_j / Pre_j)     as long as Pre_j >= 2^-90, that is 62 nats in 64 tokens
//
// Row j's columns take the exact levels (levels.cuh) from the first row on whose Pre is smaller: its choice depends on
// rows <= j alone.
#pragma once
#include "free/factors.cuh"

constexpr float SMALLEST_OF_CHUNK = 0x1p-90f;
// shared memory: q, a, k, b; log decays, then quotients, then P_qk, P_qb, A_ak (then N), A_ab; decays of blocks, of the
// chunk; diagonal blocks of A_ab, then their inverses in two terms; the rounding errors of A_ab's other blocks; first
// far rows; a barrier; the diagonal of P_qk; other pairs of neighbours, with 64 channels where the last two squares
// will be
constexpr int AT_SQUARES = AT_PAIRS, SQUARES = 4 * Square::SIZE, AT_DECAYS = AT_SQUARES + SQUARES,
              AT_ALL = AT_DECAYS + 4 * WIDE * 4;
constexpr int AT_DIAGONALS = AT_ALL + WIDE * 4, AT_RESTS = AT_DIAGONALS + 4 * 1280;
constexpr int AT_FAR = AT_RESTS + 6 * 512, AT_BARRIER = AT_FAR + 32;
constexpr int AT_QK_DIAGONAL = AT_BARRIER + 32,
              AT_NEIGHBOURS = KEY_PANELS == 1 ? AT_SQUARES + 2 * Square::SIZE : AT_QK_DIAGONAL + C * 4;
constexpr int AT_LEVELS = round_up(AT_QK_DIAGONAL + C * 4 + (KEY_PANELS == 1 ? 0 : 3 * C * 4), 1024);
constexpr int GATE_TILE = C * KEYS * GATE_BYTES;
static_assert(SQUARES >= 2 * TILE && SQUARES >= GATE_TILE, "quotients have place over the log decays");
static_assert(LA_SHARED == (LA_EXACT ? AT_LEVELS + 4 * TILE : AT_LEVELS),
              "LA_SHARED is the size that the launch requests");

// the smallest where x is smaller
LA_DEVICE float over_decay(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(fmaxf(x, SMALLEST_OF_CHUNK)));
    return r;
}

// Places of a chunk in shared memory
struct Chunk {
    u32 shared;
    int count;   // its tokens; rows past them are zeros
    __device__ __forceinline__ u32 reader(int part) const { return shared + part * TILE; }         // q, a
    __device__ __forceinline__ u32 writer(int part) const { return shared + (2 + part) * TILE; }   // k, b
    __device__ __forceinline__ u32 gates() const { return shared + AT_SQUARES; }
    // log decays of 32 bits have place for both quotients of their channels; log decays of 16 bits for one
    __device__ __forceinline__ u32 quotient(int part) const { return gates() + part * (LA_GATE == 2 ? PANEL : TILE); }
    static constexpr int QUOTIENT_PANEL = LA_GATE == 2 ? 2 * PANEL : PANEL;
    __device__ __forceinline__ u32 square(int n) const { return shared + AT_SQUARES + n * Square::SIZE; }
    __device__ __forceinline__ u32 decays() const { return shared + AT_DECAYS; }
    __device__ __forceinline__ u32 block(int n, int low) const { return shared + AT_DIAGONALS + n * 1280 + low * 512; }
    __device__ __forceinline__ u32 rest(int i, int j) const {
        return shared + AT_RESTS + (i * (i - 1) / 2 + j) * 512;
    }   // of block (i, j), j < i
};

// This thread's part. Scaling: two channels of a block's 16 rows, of both readers and writers, or with 64 channels of
// one of them
struct Lane {
    int warp, lane, group, block, panel, part, parts, count;   // count: rows of the block that are the sequence's
    __device__ __forceinline__ Lane(int tokens) {
        warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
        lane = threadIdx.x & 31;
        group = warp >> 2;
        block = warp >> 1;
        panel = KEY_PANELS == 2 ? warp & 1 : 0;
        part = KEY_PANELS == 2 ? 0 : warp & 1;
        parts = KEY_PANELS;
        count = LA_RAGGED ? tokens - 16 * block : ROWS;
    }
    __device__ __forceinline__ u32 own() const { return panel * PANEL + block * BLOCK_BYTES; }
    __device__ __forceinline__ u32 row(u32 tile, int r) const {
        const u32 x = load_word(tile + lane_row(r, lane));
        return r < count ? x : 0;
    }
};

LA_DEVICE void load_decays(float2 (&a)[ROWS], const Chunk& t, const Lane& me) {
    const u32 gates = gates_of(t.gates(), me.block, me.panel, me.lane);
#pragma unroll
    for (int r = 0; r < ROWS; r++) a[r] = load_gate(gates, r, me.lane);
#pragma unroll
    for (int r = 0; r < ROWS; r++) a[r] = r < me.count ? decay_of(a[r]) : float2{1.f, 1.f};
}
// Decays of the blocks to shared memory; where the chunk's rows are far, the first such row to its place
LA_DEVICE void share_decays(const float2 (&a)[ROWS], const Chunk& t, const Lane& me) {
    float2 all = a[0];
#pragma unroll
    for (int r = 1; r < ROWS; r++) all *= a[r];
    store_decay(t.decays(), all, me.block, me.panel, me.lane);
    __syncthreads();
}
// Decay of the blocks before a lane's, and of those behind it
struct Around {
    float2 before, behind, all;
};
LA_DEVICE Around around(const Chunk& t, const Lane& me) {
    Around x = {{1.f, 1.f}, {1.f, 1.f}, {1.f, 1.f}};
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const float2 d = load_shared2(t.decays() + n * WIDE * 4 + me.panel * 256 + me.lane * 8);
        if (n < me.block) x.before *= d;
        if (n > me.block) x.behind *= d;
        x.all *= d;
    }
    return x;
}
// All copies of a lane's rows, q's times `scale`. Returns Pre of the last row
LA_DEVICE float2 scale_rows(const float2 (&a)[ROWS], float scale, const Chunk& t, const Around& reach, const Lane& me) {
    constexpr int HALF = ROWS / 2;
    float2 pre = reach.before;
#pragma unroll 1   // one copy of this code: fetching instructions limits a longer one
    for (int part = me.part; part < me.part + me.parts; part++) {
        const u32 reader = t.reader(part) + me.own(), writer = t.writer(part) + me.own();
        const u32 quotient = t.quotient(part) + me.panel * Chunk::QUOTIENT_PANEL + me.block * BLOCK_BYTES;
        const float factor = part ? 1.f : scale;
        u32 q[HALF], k[HALF];   // eight rows at a time: registers
        pre = reach.before;
        float2 suf = reach.behind;
#pragma unroll
        for (int first = 0; first < ROWS; first += HALF) {
#pragma unroll
            for (int r = 0; r < HALF; r++) {
                q[r] = me.row(reader, first + r);
                k[r] = me.row(writer, first + r);
            }
#pragma unroll
            for (int r = 0; r < HALF; r++) {
                const float2 before = pre;
                pre *= a[first + r];
                store_word(reader + lane_row(first + r, me.lane),
                           pack(floats_of(q[r]) * ((part ? before : pre) * float2{factor, factor})));
                store_word(quotient + lane_row(first + r, me.lane),
                           pack(floats_of(k[r]) * float2{over_decay(pre.x), over_decay(pre.y)}));
            }
        }
#pragma unroll
        for (int first = ROWS - HALF; first >= 0; first -= HALF) {
            if (first < ROWS - HALF)
#pragma unroll
                for (int r = 0; r < HALF; r++) k[r] = me.row(writer, first + r);
#pragma unroll
            for (int r = HALF - 1; r >= 0; r--) {
                store_word(writer + lane_row(first + r, me.lane), pack(floats_of(k[r]) * suf));
                suf *= a[first + r];
            }
        }
    }
    return pre;
}
// The first row of the chunk whose Pre is too small for quotients in some channel of the warp, 64 if there is none
LA_DEVICE int first_far(const float2 (&a)[ROWS], float2 pre, int block) {
    u32 found = 0;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        pre *= a[r];
        found |= (u32)(fminf(pre.x, pre.y) < SMALLEST_OF_CHUNK) << r;
    }
    found = __reduce_or_sync(0xffffffffu, found);
    return found ? 16 * block + __ffs(found) - 1 : C;
}
// x[n] = readers writers^T by a warpgroup, a warp 16 rows; n `next` bytes further; apart: of the panels of the writers
template <int N> LA_DEVICE void multiply_pairs(float (&x)[N][8][4], u32 readers, u32 writers, u32 next, int apart) {
#pragma unroll
    for (int n = 0; n < N; n++) accumulator_fence(x[n]);
    products_begin();
#pragma unroll
    for (int d = 0; d < KEYS / 16; d++)
#pragma unroll
        for (int n = 0; n < N; n++)
            product_ABt(x[n], panel_descriptor(readers + (d >> 2) * PANEL) + (d & 3) * 2,
                        panel_descriptor(writers + n * next + (d >> 2) * apart) + (d & 3) * 2, d > 0);
    products_commit();
    products_wait<0>();
#pragma unroll
    for (int n = 0; n < N; n++) accumulator_fence(x[n]);
}
