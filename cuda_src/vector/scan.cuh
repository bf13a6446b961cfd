// What one block of the scan has in shared memory, its barriers, and what it loads and stores.
#pragma once
#include "attention/group.cuh"
#include "attention/store.cuh"
#include "tile/wgmma_wide.cuh"
#include "vector/gram.cuh"
#include "vector/traversal.cuh"
#include "arguments/matrix_state/VectorArguments.cuh"   // after TensorMap

#ifndef LA_RAGGED   // 1: sequences are packed in a row, so that a chunk may hold rows of the next one
#define LA_RAGGED 0
#endif
#ifndef LA_KEEP     // 1: stores the state before each chunk, and P, for the backward
#define LA_KEEP 0
#endif

constexpr int CONSUMER_REGISTERS_OF_SCAN = 152, PRODUCER_REGISTERS_OF_SCAN = 104;   // of a thread: 2 x 128 of each
// stages of q, k, log decays (then quotients, then P and the decay of the chunk); two of values (then outputs); scratch
constexpr int STAGES = LA_STAGES, STAGE = 2 * Tokens::SIZE + GATES;
constexpr int AT_VALUES = STAGES * STAGE, AT_SCRATCH = AT_VALUES + 2 * Tokens::SIZE, AT_DECAYS = AT_SCRATCH + Scratch<true>::SIZE;
constexpr int AT_BONUS = AT_DECAYS + 4 * WIDE * 4, AT_BARRIERS = AT_BONUS + 2 * C * 4;
static_assert(LA_SHARED == AT_BARRIERS + 128 && LA_WARPS == 8 && LA_TILES == 1, "LA_SHARED is what the launch asks for");
static_assert(StatePanels::SIZE == 2 * Tokens::SIZE, "a state leaves through the place of q and k");

LA_DEVICE Tiles tiles_of(u32 shared, int s) {
    const u32 at = shared + s * STAGE;
    return {at, at + Tokens::SIZE, at + 2 * Tokens::SIZE, shared + AT_SCRATCH, shared + AT_DECAYS, 0, shared + AT_BONUS};
}
LA_DEVICE u32 values_at(u32 shared, int step) { return shared + AT_VALUES + (step & 1) * Tokens::SIZE; }

struct Barriers {   // of stage s: q, k, g are there; copies and P are made; all has been read. values: of each of the two
    u32 base;
    __device__ __forceinline__ u32 full(int s) const { return base + s * 24; }
    __device__ __forceinline__ u32 ready(int s) const { return base + s * 24 + 8; }
    __device__ __forceinline__ u32 empty(int s) const { return base + s * 24 + 16; }
    __device__ __forceinline__ u32 values(int n) const { return base + STAGES * 24 + n * 8; }
    __device__ __forceinline__ void init() const {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full(s), 1);
            barrier_init(ready(s), 8 * ARRIVALS);
            barrier_init(empty(s), 2);
        }
        barrier_init(values(0), 1);
        barrier_init(values(1), 1);
    }
};

// By one thread: copies of tiles into the stages
struct Loader {
    const VectorArguments& a;
    const ChunkTraversal& traversal;
    u32 shared;
    Barriers bar;
    __device__ __forceinline__ void tokens(int step) const {   // q, k and g
        const int s = step % STAGES, token = traversal.token(traversal.first + step), head = traversal.head, row = traversal.row;
        const u32 at = shared + s * STAGE, full = bar.full(s);
        barrier_expect(full, STAGE);
        gates_in(at + 2 * Tokens::SIZE, a.g, full, (u32)head / (u32)a.group_g, token, row);
        tile_in(at + Tokens::SIZE, a.k, full, (u32)head / (u32)a.group_k, token, row);
        tile_in(at, a.q, full, (u32)head / (u32)a.group_q, token, row);
    }
    __device__ __forceinline__ void values(int step) const {
        const u32 full = bar.values(step & 1);
        barrier_expect(full, Tokens::SIZE);
        tile_in(values_at(shared, step), a.v, full, (u32)traversal.head / (u32)a.group_v, traversal.token(traversal.first + step), traversal.row);
    }
    __device__ __forceinline__ void begin() const {
        for (int step = 0; step < STAGES && step < traversal.steps; step++) tokens(step);
        for (int step = 0; step < 2 && step < traversal.steps; step++) values(step);
    }
    __device__ __forceinline__ void next(int step) const {   // once step has been left
        if (step + STAGES < traversal.steps) tokens(step + STAGES);
        if (step + 2 < traversal.steps) values(step + 2);
    }
};

// Rows of the next sequence become zeros: in a lane's channels of q, k, v and g of its block
LA_DEVICE void clear_tail(const Tiles& t, u32 values, int count, int block, int panel, int lane) {
    const u32 own = panel * PANEL + block * BLOCK_BYTES;
    for (int r = max(count - block * ROWS, 0); r < ROWS; r++) {
        const u32 at = own + lane_row(r, lane);
        store_word(t.q + at, 0);
        store_word(t.k + at, 0);
        store_word(values + at, 0);
        if (LA_GATE == 2) store_pair(gates_of(t.gates, block, panel, lane) + r * 128 + (((lane & 15) * 8) ^ ((r & 7) << 4)), {0.f, 0.f});
        else store_word(t.gates + at, 0);
    }
}

LA_DEVICE RawRows raw_rows(const Rows& x, const ChunkTraversal& traversal, int token, int byte) {
    return {rows_of(x, traversal.sequence, traversal.head) + token * x.token + byte, x.token};
}
// of channels past LA_K none are read
LA_DEVICE RawBlock raw_block(const VectorArguments& a, const ChunkTraversal& traversal, int chunk, int block, int channel) {
    const int token = chunk * C + block * ROWS, count = channel < LA_K ? traversal.sequence.T - token : 0;
    return {raw_rows(a.q_rows, traversal, token, channel * 2), raw_rows(a.k_rows, traversal, token, channel * 2),
            raw_rows(a.g_rows, traversal, token, channel * GATE_BYTES), count};
}

LA_DEVICE void load_state(StateRows<1, WIDE>& S, const VectorArguments& a, const ChunkTraversal& traversal, int row, int lane) {
    if (traversal.segment) S.template load<WIDE, WIDE>({a.begins, STATE, WIDE, 1}, traversal.slot * a.segments + traversal.segment, row, lane);
    else if (a.start.data) S.template load<LA_V, LA_K>(a.start, traversal.slot / a.start_group, row, lane);
    else S.clear();
}
// straight from registers, once a segment
LA_DEVICE void store_first_state(const float (&S)[16][4], char* to, int row, int lane) {
#pragma unroll
    for (int i = 0; i < 16; i++)
#pragma unroll
        for (int m = 0; m < 2; m++)
            *(u32*)(to + StatePanels::at(row + (lane >> 2) + 8 * m, 8 * i + (lane & 3) * 2)) = pack_bf16(S[i][2 * m], S[i][2 * m + 1]);
}
// P of a chunk and, if there is a next one, the state before it
LA_DEVICE void store_residuals(const VectorArguments& a, i64 stored, const Tiles& tiles, bool more) {
    run_out(a.grams + stored * Square::SIZE, tiles.gates, Square::SIZE);
    if (more) run_out(a.states + (stored + 1) * STATE_BYTES, tiles.q, STATE_BYTES);
}
// outputs of the sequence's last tokens
LA_DEVICE void store_part(const VectorArguments& a, const ChunkTraversal& traversal, u32 values, int chunk, int group, int thread) {
    store_group_rows<Tokens, C, LA_V>(own_rows(a.to, traversal.sequence, traversal.head), a.to.token, values, chunk * C, traversal.sequence.T, group * 64, 0, thread);
}
