// The parts of traversals that a block of the scan has (tile/share.cuh): copies into the stages across them, states
// handed over.
#pragma once
#include "tile/share.cuh"
#include "vector/scan.cuh"

constexpr bool PARTS =
    !LA_RAGGED && !LA_EXACT;   // else a block has one traversal, and is started when another has ended
constexpr int HANDED_BYTES = STATE * 4 + 16;
static_assert(LA_HANDED == HANDED_BYTES, "LA_HANDED is the size that the host allocates");

struct Parts {   // nothing of a share is held in registers over a traversal: it is computed again
    const VectorArguments& a;
    __device__ __forceinline__ Share share() const { return {a.steps, a.more, a.chunks}; }
    __device__ __forceinline__ int last() const { return PARTS ? share().last() : blockIdx.x; }
    __device__ __forceinline__ bool has(int n) const { return PARTS && share().has(n); }
    // whether the block before has begun traversal n; whether the next one goes on with it
    __device__ __forceinline__ bool goes_on(int n) const { return PARTS && share().from(n) > 0; }
    __device__ __forceinline__ bool is_cut(int n) const { return PARTS && share().to(n) < a.chunks; }
    __device__ __forceinline__ ChunkTraversal traversal(int n) const {
        ChunkTraversal x(a, a.segments, a.chunks, n);
        if (PARTS) x.cut(share().from(n), share().to(n));
        return x;
    }
    // two flags a traversal, of the part that begins it and of the one that ends it
    __device__ __forceinline__ void clear_flags() const {
        for (int n = last(), first = n; n == first || has(n); n--) {
            if (!goes_on(n)) a.flags[2 * n] = 0;
            if (!is_cut(n)) a.flags[2 * n + 1] = 0;
        }
    }
    __device__ __forceinline__ void flag(int n) const { a.flags[2 * n + goes_on(n)] = 1; }
};

struct Place {
    int values, head, token, row;
};   // of a chunk: head of values, head, first token, batch row
struct Copies {
    bool tokens, values;
    int query, key, gate;
    Place of_tokens, of_values;
};   // which there are; heads

// By one thread: copies of tiles into the stages. Where it is lies in shared memory: no registers hold it over a chunk.
struct Loader {
    const Parts& parts;
    u32 shared;
    Barriers bar;
    // heads; of the next chunk; chunks so far; by stage its place
    enum Word { QUERIES, KEYS, GATE, VALUES, HEAD, TOKEN, ROW, REMAINING, NUMBER, LOADED, PLACES = 12 };
    __device__ __forceinline__ int word(int n) const { return load_word(shared + AT_LOADER + 4 * n); }
    __device__ __forceinline__ void set(int n, int x) const { store_word(shared + AT_LOADER + 4 * n, x); }
    __device__ __forceinline__ void open(int number) const {
        const ChunkTraversal traversal = parts.traversal(number);
        const u32 head = traversal.head;
        set(QUERIES, head / (u32)parts.a.group_q);
        set(KEYS, head / (u32)parts.a.group_k);
        set(GATE, head / (u32)parts.a.group_g);
        set(VALUES, head / (u32)parts.a.group_v);
        set(HEAD, head);
        set(TOKEN, traversal.token(traversal.first));
        set(ROW, traversal.row);
        set(REMAINING, traversal.steps);
        set(NUMBER, number);
    }
    __device__ __forceinline__ Place place(int step) const {
        const int at = PLACES + 4 * (step % STAGES);
        return {word(at), word(at + 1), word(at + 2), word(at + 3)};
    }
    // The copies once `step` has been left, known before: q, k and g of the step STAGES behind it, values of the one
    // two behind it
    __device__ __forceinline__ Copies after(int step) const {
        Copies x = {};
        x.tokens = word(REMAINING) > 0;
        if (!x.tokens) {
            const int next = word(NUMBER) - 1;
            x.tokens = parts.has(next);
            if (x.tokens) open(next);
        }
        if (x.tokens) {
            x.query = word(QUERIES);
            x.key = word(KEYS);
            x.gate = word(GATE);
            x.of_tokens = {word(VALUES), word(HEAD), word(TOKEN), word(ROW)};
            set(TOKEN, x.of_tokens.token + C);
            set(REMAINING, word(REMAINING) - 1);
            set(LOADED, step + STAGES + 1);
        }
        x.values = step + 2 >= 0 && step + 2 < word(LOADED);
        if (x.values) x.of_values = STAGES == 2 ? x.of_tokens : place(step + 2);
        return x;
    }
    // SKIP: copies of steps before `end` are not made, and their barriers pass
    template <bool SKIP = false> __device__ __forceinline__ void copy(const Copies& x, int step, int end = 0) const {
        const VectorArguments& a = parts.a;
        if (x.tokens) {
            const int s = (step + STAGES) % STAGES, token = x.of_tokens.token, row = x.of_tokens.row;
            const u32 at = shared + s * STAGE, full = bar.full(step + STAGES);
            if (SKIP && step + STAGES < end) {
                barrier_arrive(full);
            } else {
                barrier_expect(full, STAGE);
                gates_in(at + 2 * Tokens::SIZE, a.g, full, x.gate, token, row);
                tile_in(at + Tokens::SIZE, a.k, full, x.key, token, row);
                tile_in(at, a.q, full, x.query, token, row);
            }
            set(PLACES + 4 * s, x.of_tokens.values);
            set(PLACES + 4 * s + 1, x.of_tokens.head);
            set(PLACES + 4 * s + 2, token);
            set(PLACES + 4 * s + 3, row);
        }
        if (x.values) {
            const u32 full = bar.values(step & 1);
            if (SKIP && step + 2 < end) {
                barrier_arrive(full);
            } else {
                barrier_expect(full, Tokens::SIZE);
                tile_in(values_at(shared, step), a.v, full, x.of_values.values, x.of_values.token, x.of_values.row);
            }
        }
    }
    __device__ __forceinline__ void begin(int number) const {
        open(number);
        set(LOADED, 0);
        for (int step = -STAGES; step < 0; step++) {
            const Copies x = after(step);
            copy(x, step);
        }
    }
    __device__ __forceinline__ void copy_when_empty(const Copies& x, int step) const {
        barrier_wait(bar.empty(step % STAGES), step / STAGES & 1);
        copy(x, step);
    }
    // Steps of a traversal that is left, by all consumers: copies that are not yet on their way are not made
    __device__ __forceinline__ void leave(int step, int end, int thread) const {
        groups_barrier<256>(8);
        if (thread == 0) skip(step, end);
        groups_barrier<256>(8);
    }
    // by one thread, which arrives for both groups of consumers
    __device__ __forceinline__ void skip(int step, int end) const {
#pragma unroll 1
        for (; step < end; step++) {
            const int s = step % STAGES;
            barrier_wait(bar.values(step & 1), step >> 1 & 1);
            barrier_wait(bar.ready(s), step / STAGES & 1);
            barrier_arrive(bar.empty(s));
            barrier_arrive(bar.empty(s));
            copy<true>(after(step), step, end);
        }
    }
};

// The state of a traversal that the next block goes on with; of one that the block before has begun
LA_DEVICE void hand_over(const StateRows<1, WIDE>& state, const VectorArguments& a, int warp, int lane) {
    char* to = a.handed + (blockIdx.x + 1) * (i64)HANDED_BYTES;
    state.store_registers((float4*)to + warp * (STATE / 32), lane);
    __threadfence();
    groups_barrier<256>(8);
    if (warp == 0 && lane == 0) announce(to + STATE * 4);
}
LA_DEVICE void take_over(StateRows<1, WIDE>& state, const VectorArguments& a, int warp, int lane) {
    char* from = a.handed + blockIdx.x * (i64)HANDED_BYTES;
    if (warp == 0 && lane == 0) await(from + STATE * 4);
    groups_barrier<256>(8);
    state.load_registers((const float4*)from + warp * (STATE / 32), lane);
}

// The initial state of a part; the state after its last chunk
LA_DEVICE void begin_part(StateRows<1, WIDE>& state, const Parts& parts, const ChunkTraversal& traversal, int n,
                          int warp, int lane) {
    if (parts.goes_on(n)) take_over(state, parts.a, warp, lane);
    else load_state(state, parts.a, traversal, 16 * warp, lane);
    if (LA_KEEP)
        store_first_state(state.x[0], parts.a.states + (traversal.stored + traversal.first) * STORED_BYTES, 16 * warp,
                          lane);
}
LA_DEVICE void end_part(StateRows<1, WIDE>& state, const Parts& parts, int n, int warp, int lane) {
    const VectorArguments& a = parts.a;
    if (parts.is_cut(n)) {
        hand_over(state, a, warp, lane);
        return;
    }
    const ChunkTraversal traversal =
        parts.traversal(opaque(n));   // computed again: not held in registers over the chunks
    if (a.end.data && traversal.segment == traversal.last && traversal.head % a.end_group == 0)
        state.template store<LA_V, LA_K>(a.end, traversal.slot / a.end_group, 16 * warp, lane);
}
