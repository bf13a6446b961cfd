// The gradients of one chunk and 64 of its key channels: places in shared memory, and the products that need no decay.
//
// With Pre_i the decay of a block of 16 rows up to row i, D the decay of whole blocks, h = 2^58 in the middle of the float range, and bfloat16 copies
//     qP = q Pre h,      kP = k / (Pre h),      kR = k Pre h (erase)
// of block J the readers' sums go from the first block to the last and the writers' from the last to the first (docs/vector_backward.md):
//     readers:  y = X / h;  for J:  y[I >= J] += Z[I, J] kP_J;  out_J = Pre h y_J;  y[I > J] *= D_J
//     writers:  y = X h;    for I:  y[J <= I] *= D_I;  y[J <= I] += Z[I, J]^T qP_I;  out_I = y_I / (Pre h)
// LA_EXACT 1 is for chunks of which a block decays by more than 2^-116 in some channel: copies q Pre and k Suf (exponents <= 0), pairs inside
// a block one by one in float32.
#pragma once
#include "vector_backward/slices.cuh"
#include "tile/prefetch.cuh"
#include "tile/wgmma_part.cuh"
#include "arguments/matrix_state/VectorGradArguments.cuh"   // after TensorMap

constexpr bool ERASE = LA_ERASE, EXACT_BLOCKS = LA_EXACT;
constexpr float MIDDLE = 0x1p58f, SMALLEST_DECAY = 0x1p-116f;   // 80 nats in a block
constexpr int THREADS = 256, HALF = 64, HALVES = round_up(LA_K, HALF) / HALF, BLOCKS = C / 16, PER = 2;
constexpr int PANEL_BYTES = round_up(LA_V, 64) * 128, STEPS = round_up(LA_V, 64) / 16;   // of a state's panel that is used; of 16 value columns
// tiles: copies; S before and G after the chunk; dO, U (or V), dW. Z and Y have a place of their own, with erase that of dO
constexpr int AT_QP = 0, AT_KP = AT_QP + Square::SIZE, AT_KR = AT_KP + Square::SIZE, AT_STATE = AT_KR + ERASE * Square::SIZE;
constexpr int AT_AFTER = AT_STATE + Whole::PANEL, AT_DOUT = AT_AFTER + Whole::PANEL, AT_WRITTEN = AT_DOUT + Tokens::SIZE, AT_ERROR = AT_WRITTEN + Tokens::SIZE;
constexpr int AT_SPARE = AT_ERROR + ERASE * Tokens::SIZE, AT_Z = ERASE ? AT_DOUT : AT_SPARE, AT_Y = AT_Z + Square::SIZE;
constexpr int AT_DECAYS = AT_SPARE + (ERASE ? EXACT_BLOCKS * 2 : 1) * Square::SIZE;   // tables of slices: decays; <S, G>; sums of db
constexpr int AT_PRODUCTS = AT_DECAYS + SliceTable<PER>::BYTES, AT_SUMS = AT_PRODUCTS + SliceTable<PER>::BYTES, AT_CROSSING = AT_SUMS + SliceTable<PER>::BYTES;
constexpr int AT_OWN = AT_CROSSING + HALF * 4, AT_BARRIER = AT_OWN + C * 4;
// then without erase a place for sums; exact: what is written for G, and its sums
constexpr int AT_STAGE = round_up(AT_BARRIER + 16, 1024), AT_GIVEN = AT_STAGE, AT_GIVEN_SUMS = AT_GIVEN + C * HALF * 4;
constexpr int SHARED = EXACT_BLOCKS ? AT_GIVEN_SUMS + SliceTable<PER>::BYTES : ERASE ? AT_BARRIER + 16 : AT_STAGE + C * HALF * 4;
constexpr int AT_NEAR = AT_CROSSING;   // exact, BEFORE: entries of Z next to the diagonal
static_assert(LA_SHARED == SHARED, "LA_SHARED is what the launch asks for");
// What takes the place of tiles that all products have read: sums before their last factor (C x 64 floats each), and raw rows. S, G
// and dO of the next chunk come as soon as products have left them (EARLY), except where they are needed for that
constexpr bool EARLY = !ERASE && !EXACT_BLOCKS;
constexpr int AT_READS = EARLY ? AT_WRITTEN : AT_STATE, AT_WRITES = EARLY ? AT_STAGE : AT_AFTER, AT_ERASES = AT_WRITTEN;
constexpr int AT_RAW_A = ERASE ? AT_ERROR : AT_DOUT, AT_RAW_Q = ERASE ? AT_SPARE : AT_WRITTEN, AT_RAW_K = AT_RAW_Q + Square::SIZE;
constexpr int FIRST_BYTES = 2 * PANEL_BYTES + TILE_BYTES, LAST_BYTES = (1 + ERASE) * TILE_BYTES;

struct ChunkPlace {
    VectorPlace of;
    int chunk, half;
    // items: halves fastest, then heads, chunks, sequences
    __device__ __forceinline__ ChunkPlace(const VectorGradArguments& a, u32 item)
        : of(a.offsets, a.T, a.heads, a.slots, item / HALVES / a.heads / a.chunks, item / HALVES % a.heads),
          chunk(item / HALVES / a.heads % a.chunks), half(item % HALVES) {}
    __device__ __forceinline__ i64 block() const { return of.block + chunk; }
};

// This thread's part of the work on a chunk. Products: warpgroup 0 reads, 1 writes; a warp has 16 channels (rows of the accumulators) of
// all tokens (columns). Copies and gradients: a warp has 8 tokens, a lane 2 channels.
struct Lane {
    u32 shared;
    int warp, lane, group, quarter;
    __device__ __forceinline__ Lane(u32 at) : shared(at) {
        warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
        lane = threadIdx.x & 31;
        group = warp >> 2;
        quarter = warp & 3;
    }
    __device__ __forceinline__ u64 tile(int at) const { return panel_descriptor(shared + at); }
    __device__ __forceinline__ u32 row(int at, int r) const { return shared + at + slice_row<PER>(warp, r, lane); }
    // of staged sums, row r of the slice
    __device__ __forceinline__ u32 staged(int at, int r) const {
        const int t = warp * SLICE + r;
        return shared + at + t * HALF * 4 + ((lane * 8) ^ (((t >> 1) & 3) << 5));
    }
    __device__ __forceinline__ SliceTable<PER> decays() const { return {shared + AT_DECAYS}; }
    // decay of a block in one of the accumulators' two rows
    __device__ __forceinline__ float block_decay(int block, int m) const {
        const int channel = quarter * 16 + (lane >> 2) + 8 * m;
        return decays().at(2 * block, channel) * decays().at(2 * block + 1, channel);
    }
};

// Tiles of a chunk, by one thread: a barrier's phase has both parts
LA_DEVICE void load_first(const VectorGradArguments& a, const ChunkPlace& place, u32 shared) {
    const u32 full = shared + AT_BARRIER;
    barrier_expect(full, FIRST_BYTES);
    run_in(shared + AT_STATE, a.states + place.block() * LA_END + place.half * Whole::PANEL, PANEL_BYTES, full);
    run_in(shared + AT_AFTER, a.ends + place.block() * LA_ENDS + place.half * Whole::PANEL, PANEL_BYTES, full);
    tile_in(shared + AT_DOUT, a.dout, full, place.of.head, place.of.token(place.chunk), place.of.row);
}
LA_DEVICE void load_last(const VectorGradArguments& a, const ChunkPlace& place, u32 shared) {
    const u32 full = shared + AT_BARRIER;
    const int token = place.of.token(place.chunk), head = place.of.head, row = place.of.row;
    barrier_expect(full, LAST_BYTES);
    if constexpr (ERASE) {
        run_in(shared + AT_WRITTEN, a.new_values + place.block() * Tokens::SIZE, TILE_BYTES, full);
        tile_in(shared + AT_ERROR, a.v, full, head, token, row);   // dW = dv
    } else tile_in(shared + AT_WRITTEN, a.v, full, (u32)head / (u32)a.group_v, token, row);
}
// the same on their way to the cache
LA_DEVICE void prefetch_first(const VectorGradArguments& a, const ChunkPlace& place) {
    run_prefetch(a.states + place.block() * LA_END + place.half * Whole::PANEL, PANEL_BYTES);
    run_prefetch(a.ends + place.block() * LA_ENDS + place.half * Whole::PANEL, PANEL_BYTES);
#pragma unroll
    for (int p = 0; p < TILE_BYTES / Tokens::PANEL; p++) box_prefetch(a.dout, 64 * p, place.of.head, place.of.token(place.chunk), place.of.row);
}
LA_DEVICE void prefetch_last(const VectorGradArguments& a, const ChunkPlace& place) {
    const int token = place.of.token(place.chunk), head = place.of.head, row = place.of.row;
    if constexpr (ERASE) run_prefetch(a.new_values + place.block() * Tokens::SIZE, TILE_BYTES);
#pragma unroll
    for (int p = 0; p < TILE_BYTES / Tokens::PANEL; p++) box_prefetch(a.v, 64 * p, ERASE ? head : (u32)head / (u32)a.group_v, token, row);
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
    for (int d = 0; d < STEPS; d++) product_part<0, 4, 0, 0>(z, rows + Tokens::along(d), written + Tokens::along(d), d > 0);
    products_commit();
}
// Those columns of the lower triangle, times `factor`, to shared memory: blocks above the diagonal are not read. STRICT: zeros on the
// diagonal, whose entries go to `own` if there is a bonus. NEAR: zeros next to it too, whose entries go to `near`: no decay crosses them.
template <bool STRICT, bool NEAR> LA_DEVICE void store_gram(const float (&z)[4][4], u32 to, u32 own, u32 near, float factor, const Lane& me) {
    const int row = me.lane >> 2, column = (me.lane & 3) * 2;
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const int J = 2 * me.group + n;
        if (J > me.quarter) continue;
        u32 x[4];
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const float u = factor * z[2 * n + h][2 * m], v = factor * z[2 * n + h][2 * m + 1];
                const int i = 16 * me.quarter + row + 8 * m, ahead = 16 * J + 8 * h + column - i;   // of the row's own column
                constexpr int LIMIT = STRICT ? -NEAR : 1;
                x[2 * h + m] = pack_bf16(ahead < LIMIT ? u : 0.f, ahead + 1 < LIMIT ? v : 0.f);
                if constexpr (STRICT && BONUS) {
                    if (ahead == 0) store_shared(own + i * 4, u);
                    if (ahead == -1) store_shared(own + i * 4, v);
                }
                if constexpr (NEAR) {
                    if (ahead == -1) store_shared(near + i * 4, u);
                    if (ahead == -2) store_shared(near + i * 4, v);
                }
            }
        store_matrix(to + Square::block_piece(16 * me.quarter, 2 * J, me.lane & 15, me.lane >> 4), x[0], x[1], x[2], x[3]);
    }
}

// <S, G> of a lane's channels over 16 value rows
LA_DEVICE void state_products(const Lane& me) {
    float sum[PER] = {0.f, 0.f};
    if (me.warp * 16 < round_up(LA_V, 64))
#pragma unroll
        for (int r = 0; r < 16; r++) {
            const u32 at = me.shared + AT_STATE + (me.warp * 16 + r) * 128 + ((me.lane * 4) ^ ((r & 7) << 4));
            const u32 s = __float_as_uint(load_shared(at)), g = __float_as_uint(load_shared(at + AT_AFTER - AT_STATE));
            sum[0] += low_bf16(s) * low_bf16(g);
            sum[1] += high_bf16(s) * high_bf16(g);
        }
    SliceTable<PER>{me.shared + AT_PRODUCTS}.store(me.warp, me.lane, sum);
}
