// What the inner segments of a sequence do to the state under the delta rule with a vector decay: S -> S M + added, value row by key
// column, as delta_adds.cu, whose matrices delta_segments.cu multiplies. With W = (1 + N) beta Kc of vector_inverse.cu
//
//     U = V^T beta + (V^T beta) N^T - S W^T        S <- S D + U Kd
//
// from a state of zeros (in the first segment from the initial state, so that its `added` is what the next begins with), and without
// values from the rows of the identity. No row is scaled here. Two warpgroups have 64 rows of S each and read the same W, Kd and N, which one
// more warp copies in; what does not need the state is made for the next chunk while this one's last product runs. All chunks of all
// traversals are cut into equal shares, one a block and multiprocessor (tile/share.cuh).
#include "vector/products.cuh"
#include "tile/share.cuh"
#include "tile/transfer.cuh"

constexpr int STAGES = LA_STAGES, FACTORS = 2 * Tokens::SIZE + WIDE * 4;   // of a chunk in memory: -W, Kd, D
// a stage: -W, Kd, V, N and strengths, D
constexpr int AT_WRITERS = Tokens::SIZE, AT_VALUES = 2 * Tokens::SIZE, AT_INVERSE = 3 * Tokens::SIZE, AT_DECAY = AT_INVERSE + LA_INVERSE;
constexpr int STAGE = (AT_DECAY + WIDE * 4 + 1023) / 1024 * 1024, AT_BARRIERS = STAGES * STAGE, HANDED_BYTES = STATE * 4 + 16;
static_assert(LA_SHARED == AT_BARRIERS + 64 && LA_HANDED == HANDED_BYTES && LA_WARPS == 8 && LA_TILES == 1, "LA_SHARED is what the launch asks for");

LA_DEVICE Share share_of(const VectorArguments& a) { return {a.steps, a.more, a.chunks}; }
// This block's part of traversal n: of a sequence and head, values of its first segment, then values and identity of each other one but the last
struct Part : ChunkTraversal {
    bool transfer;
    static __device__ __forceinline__ int number(const VectorArguments& a, int n) {
        const int each = 2 * a.segments - 3;
        return n / each * (a.segments - 1) + (n % each + 1) / 2;
    }
    __device__ __forceinline__ Part(const VectorArguments& a, int n) : ChunkTraversal(a, a.segments - 1, a.chunks, number(a, n)) {
        const int place = n % (2 * a.segments - 3);
        transfer = place && !(place & 1);
        cut(share_of(a).from(n), share_of(a).to(n));
    }
    __device__ __forceinline__ bool is_inner() const { return segment < last; }   // else there is none: of packed sequences, one part a block
};

struct Stages {   // numbered over all parts
    u32 shared;
    __device__ __forceinline__ u32 at(int step) const { return shared + step % STAGES * STAGE; }
    __device__ __forceinline__ u32 full(int step) const { return shared + AT_BARRIERS + 8 * (step % STAGES); }
    __device__ __forceinline__ u32 empty(int step) const { return full(step) + 8 * STAGES; }
    __device__ __forceinline__ void wait(int step) const { barrier_wait(full(step), step / STAGES & 1); }
    __device__ __forceinline__ void init() const {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full(s), 1);
            barrier_init(empty(s), 8 * ARRIVALS);
        }
        barriers_made();
    }
};

// By one thread
LA_DEVICE void load_parts(const VectorArguments& a, Stages ring) {
    int step = 0, n = share_of(a).last();
    do {
        const Part part(a, n);
        if (!part.is_inner()) return;
        const u32 head = (u32)part.head / (u32)a.group_v, bytes = FACTORS + (part.transfer ? 0 : Tokens::SIZE + LA_INVERSE);
        for (int chunk = part.first; chunk < part.first + part.steps; chunk++, step++) {
            const u32 at = ring.at(step), full = ring.full(step);
            const char* factors = a.factors + (part.stored + chunk) * FACTORS;
            barrier_wait(ring.empty(step), (step / STAGES & 1) ^ 1);
            barrier_expect(full, bytes);
            if (!part.transfer) {
                tile_in<true>(at + AT_VALUES, a.v, full, head, part.token(chunk), part.row);
                run_in(at + AT_INVERSE, a.inverses + (part.stored + chunk) * LA_INVERSE, LA_INVERSE, full);
            }
            run_in(at, factors, 2 * Tokens::SIZE, full);
            run_in(at + AT_DECAY, factors + 2 * Tokens::SIZE, WIDE * 4, full);
        }
    } while (share_of(a).has(--n));
}

// x = V^T beta + (V^T beta) N^T of a stage, begun
LA_DEVICE void begin_own(float (&x)[8][4], u32 (&operands)[4][4], u32 stage, int warp, int lane) {
    load_values(x, stage + AT_VALUES, 16 * warp, lane);
    begin_solution(x, operands, stage + AT_INVERSE, stage + AT_INVERSE + Square::SIZE, lane, [] {});
}
// S after the chunks of a part, of stages from `first` on; VALUES: what they add, else what becomes of the rows of the identity
template <bool VALUES> LA_DEVICE void traverse(StateRows<1, WIDE>& state, Stages ring, int first, int steps, int warp, int lane) {
    float (&S)[16][4] = state.x[0];
    float x[8][4];
    u32 own[4][4];
    ring.wait(first);
    if (VALUES) {
        begin_own(x, own, ring.at(first), warp, lane);
        end_product<0>(x);
    }
    for (int step = first; step < first + steps; step++) {
        const u32 at = ring.at(step);
        const bool more = step + 1 < first + steps;
        u32 operands[8][4], news[4][4];
        state_operands(operands, state, 0);
        begin_product<Tokens>(x, operands, at, VALUES);   // U
        scale_state(S, at + AT_DECAY, lane);
        end_product<0>(x);
        token_operands(news, x);
        accumulator_fence(S);
        products_begin();
#pragma unroll
        for (int d = 0; d < 4; d++) product_AB_wide(S, news[d], panels_descriptor<Tokens>(at + AT_WRITERS) + Tokens::across(d));   // S D + U Kd
        products_commit();
        if (more) ring.wait(step + 1);
        if (VALUES) begin_own(x, own, more ? ring.at(step + 1) : at, warp, lane);   // after the last chunk nothing reads it
        end_product<0>(S);
        if (VALUES) accumulator_fence(x);
        warp_arrive(ring.empty(step), lane);
    }
}

// What a part begins with
LA_DEVICE void begin_state(StateRows<1, WIDE>& state, const VectorArguments& a, const Part& part, bool goes_on, int warp, int lane) {
    const int row = 16 * warp;
    if (goes_on) {
        char* from = a.handed + blockIdx.x * (i64)HANDED_BYTES;
        if (warp == 0 && lane == 0) await(from + STATE * 4);
        groups_barrier<256>(2);
        state.load_registers((const float4*)from + warp * (STATE / 32), lane);
        return;
    }
    state.clear();
    if (part.transfer) state.each([&](int r, int c, float& y) { y = row + r + (lane >> 2) == c + (lane & 3) * 2 ? 1.f : 0.f; });
    else if (part.segment == 0 && a.start.data) state.template load<LA_V, LA_K>(a.start, part.slot / a.start_group, row, lane);
}
// Where it goes: to the next block, which goes on with it, or what becomes of a segment
LA_DEVICE void end_state(StateRows<1, WIDE>& state, const VectorArguments& a, const Part& part, bool is_cut, int warp, int lane) {
    const int row = 16 * warp;
    if (is_cut) {
        char* to = a.handed + (blockIdx.x + 1) * (i64)HANDED_BYTES;
        state.store_registers((float4*)to + warp * (STATE / 32), lane);
        __threadfence();
        groups_barrier<256>(2);
        if (warp == 0 && lane == 0) announce(to + STATE * 4);
        return;
    }
    const i64 place = part.slot * (a.segments - 1) + part.segment;
    if (part.transfer) {
        Transfer::store(a.transfers + place * Transfer::BYTES, state.x[0], row, lane);
        return;
    }
    float* to = a.added + place * STATE + (row + (lane >> 2)) * WIDE + (lane & 3) * 2;
#pragma unroll
    for (int i = 0; i < 32; i++) *(float2*)(to + (i & 1) * 8 * WIDE + (i >> 1) * 8) = {state.x[0][i >> 1][2 * (i & 1)], state.x[0][i >> 1][2 * (i & 1) + 1]};
}

extern "C" __global__ void __launch_bounds__(288, 1) transfers(const __grid_constant__ VectorArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Stages ring = {shared_address(memory)};
    if (threadIdx.x == 0) ring.init();
    __syncthreads();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    if (warp == 8) {
        if (lane == 0) load_parts(a, ring);
        return;
    }
    int first = 0, n = share_of(a).last();
    do {
        const Part part(a, n);
        if (!part.is_inner()) return;
        StateRows<1, WIDE> state;
        begin_state(state, a, part, share_of(a).from(n) > 0, warp, lane);
        if (part.transfer) traverse<false>(state, ring, first, part.steps, warp, lane);
        else traverse<true>(state, ring, first, part.steps, warp, lane);
        const Part same(a, opaque(n));   // computed again: not held in registers over the chunks
        end_state(state, a, same, share_of(a).to(n) < a.chunks, warp, lane);
        first += same.steps;
    } while (share_of(a).has(--n));
}
