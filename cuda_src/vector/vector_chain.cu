// The delta rule with one decay a token and key channel, forward (sm_90a, bfloat16): the chain of the chunks of a
// segment.
//
//     S~ = diag(e^{g_t}) S_(t-1)        S_t = S~ + k_t^T beta_t (v_t - k_t S~)        out_t = scale q_t S_t
//
// Two warpgroups hold 64 value rows of S^T each, in float32 registers; two others make scaled copies of q and k and P,
// a chunk ahead. With N of vector_inverse.cu and S the state before a chunk:
//
//     E = V - Kc S        U = beta E + N beta E        out = scale (Qg S + P U)        S <- D_0 D_1 D_2 D_3 S + Kd^T U
#include "vector/chain.cuh"
#include "vector/products.cuh"

// One thread of the chain copies tiles in and outputs out, while its warp would wait for the next chunk. N comes in by
// one of the producers, over quotients once these have been read.
struct Copier {
    Loader load;
    __device__ __forceinline__ void leave(int step) const {   // once all warps have left step
        const ChunkTraversal& traversal = load.traversal;
        const int chunk = traversal.first + step;
        barrier_wait(load.bar.empty(step % STAGES), step / STAGES & 1);
        if (!LA_RAGGED || traversal.count(chunk) == C) {
            const u32 values = values_at(load.shared, step);
            const int token = traversal.token(chunk);
            box_out(load.a.out, values, 0, traversal.head, token, traversal.row);
            if (LA_V > 64) box_out(load.a.out, values + PANEL, 64, traversal.head, token, traversal.row);
        }
        if (LA_KEEP) {
            const i64 stored = traversal.stored + chunk;
            const Tiles tiles = tiles_of(load.shared, step % STAGES);
            run_out(load.a.grams + stored * Square::SIZE, tiles.gates, Square::SIZE);
            run_out(load.a.new_values + stored * Tokens::SIZE, tiles.q, Tokens::SIZE);
        }
        out_commit();
        if (!LA_KEEP && step + STAGES < traversal.steps) load.tokens(step + STAGES);
        out_read();
        if (LA_KEEP && step + STAGES < traversal.steps) load.tokens(step + STAGES);
        if (step + 2 < traversal.steps) load.values(step + 2);
    }
};

// A chunk's copies of q and k, and P, once its rows are there. EXACT false: returns whether a block of 16 rows decays
// by more than quotients can bear; then P is not made, and rows and log decays are overwritten
template <bool EXACT> LA_DEVICE bool produce(const VectorArguments& a, const ChunkTraversal& traversal, u32 shared,
                                             Barriers bar, int step, int warp, int lane) {
    const bool copies = warp == 0 && lane == 0;
    const int s = step % STAGES, count = traversal.count(traversal.first + step);
    const char* const inverse = a.inverses + (traversal.stored + traversal.first + step) * LA_INVERSE;
    const Tiles tiles = tiles_of(shared, s);
    if (LA_RAGGED && count < C) {
        barrier_wait(bar.values(step & 1), step >> 1 & 1);
        clear_tail(tiles, values_at(shared, step), count, warp, lane);
        panels_barrier(warp >> 1);   // rows of both panels are read below
    }
    ExactBlock exact = {};
    if constexpr (EXACT) exact = exact_block<4, 1>(tiles, warp, lane);
    const float own = own_pair(tiles, warp, lane);
    float2 all, strengths = {0.f, 0.f};   // two tokens a lane of the first warp
    if (warp == 0) strengths = *(const float2*)(inverse + Square::SIZE + lane * 8);
    const bool far = __any_sync(0xffffffffu, scale_block<3, true, EXACT>(tiles, all, {0.f, 0.f}, warp, lane, [&] {
                                    if (step > 0)
                                        barrier_wait(bar.keys(), (step - 1) & 1);   // Kc and strengths are free
                                    if (warp == 0) store_pair(shared + AT_STRENGTHS + lane * 8, strengths);
                                }));
    publish_shared();   // N goes over quotients, or the rows are reloaded
    if (any_of_producers(!EXACT && far)) return true;
    make_gram<3, EXACT>(tiles, all, exact, own, warp, lane, [&] {
        if (copies) {
            barrier_expect(bar.inverse(s), Square::SIZE);
            run_in(tiles.gates + PANEL, inverse, Square::SIZE, bar.inverse(s));
            if (step + 1 < traversal.steps) run_prefetch(inverse + LA_INVERSE, LA_INVERSE);
        }
        __syncwarp();
    });
    publish_shared();
    warp_arrive(bar.ready(s), lane);
    return false;
}
// All chunks from `step` on by exact products; the rows of the first are reloaded. Not inlined, so that it takes no
// registers from its caller
__device__ __noinline__ void produce_exactly(const VectorArguments& a, u32 shared, int step) {
    const ChunkTraversal traversal(a, a.segments, a.chunks);
    const Barriers bar = {shared + AT_BARRIERS};
    const int warp = __shfl_sync(0xffffffffu, (threadIdx.x >> 5) - 8, 0), lane = threadIdx.x & 31;
    if (warp == 0 && lane == 0) Loader{a, traversal, shared, bar}.tokens(step, bar.reloaded());
    barrier_wait(bar.reloaded(), 0);
    for (const int first = step; step < traversal.steps; step++) {
        if (step > first) barrier_wait(bar.full(step % STAGES), step / STAGES & 1);
        produce<true>(a, traversal, shared, bar, step, warp, lane);
    }
}
LA_DEVICE void producer(const VectorArguments& a, const ChunkTraversal& traversal, u32 shared, Barriers bar, int warp,
                        int lane) {
    if (warp == 0 && lane == 0 && traversal.steps > 0)
        run_prefetch(a.inverses + (traversal.stored + traversal.first) * LA_INVERSE, LA_INVERSE);
    __syncwarp();
    for (int step = 0; step < traversal.steps; step++) {
        barrier_wait(bar.full(step % STAGES), step / STAGES & 1);
        if (produce<false>(a, traversal, shared, bar, step, warp, lane)) {
            produce_exactly(a, shared, step);
            return;
        }
    }
}

// S as an operand of a warpgroup's products, in shared memory
struct StateOperand {
    u32 panels[2];

    __device__ __forceinline__ StateOperand(u32 shared, const Tiles& t)
        : panels{shared + AT_STATE, STATE_IN_STAGE ? t.gates + 2 * PANEL : shared + AT_STATE + StatePanels::PANEL} {}
    // `to`: where the backward finds the state, if it needs it
    __device__ __forceinline__ void make(const StateRows<1, WIDE>& state, char* to, int warp, int lane) const {
        u32 x[8][4];
        state_operands(x, state, 0);
        if (LA_KEEP && lane == 0) out_read();   // the state before has left
        __syncwarp();
        store_state<StatePanels>(panels[0], (const u32(&)[4][4])x[0], 16 * warp, lane);
        store_state<StatePanels>(panels[1], (const u32(&)[4][4])x[4], 16 * warp, lane);
        publish_shared();
        group_barrier(warp >> 2);
        if (LA_KEEP && lane == 0) {
#pragma unroll
            for (int p = 0; p < 2; p++)
                run_out(to + p * StatePanels::PANEL + warp * 2048, panels[p] + warp * 2048, 2048);
            out_commit();
        }
        __syncwarp();
    }
    // c += S^T B^T, a part of a group of products; `add` false: c = S^T B^T
    __device__ __forceinline__ void multiply(float (&c)[8][4], u32 b, int group, bool add) const {
#pragma unroll
        for (int d = 0; d < 8; d++)
            product_ABt(c,
                        panel_descriptor(panels[d >> 2]) + group * StatePanels::across(4) + StatePanels::along(d & 3),
                        panel_descriptor(b) + Tokens::along(d), add || d > 0);
    }
};

// x = V^T - S^T Kc^T, begun, where x is V^T
LA_DEVICE void begin_errors(float (&x)[8][4], const StateOperand& state, u32 keys, int group) {
    accumulator_fence(x);
    products_begin();
    state.multiply(x, keys, group, true);
    products_commit();
}
// out^T += U^T P^T; S^T += U^T Kd
LA_DEVICE void multiply_gram(float (&out)[8][4], const u32 (&new_values)[4][4], u32 gram, bool add) {
#pragma unroll
    for (int d = 0; d < 4; d++)
        product_ABt(out, new_values[d], panel_descriptor(gram) + Square::along(d), add || d > 0);
}
LA_DEVICE void write_new_values(float (&S)[16][4], const u32 (&new_values)[4][4], u32 keys) {
#pragma unroll
    for (int d = 0; d < 4; d++) product_AB_wide(S, new_values[d], panels_descriptor<Tokens>(keys) + Tokens::across(d));
}
// What the second terms of U give the outputs, which they begin, and the state (not with log decays of 32 bits:
// registers). x: U^T, then those outputs
LA_DEVICE void add_rests(float (&x)[8][4], float (&S)[16][4], u32 (&new_values)[4][4], const Tiles& t,
                         const OwnColumns& own, int first) {
    own.exchange_for_rests(new_values, x, first);
    accumulator_fence(x);
    if (LA_GATE == 0) accumulator_fence(S);
    products_begin();
    multiply_gram(x, new_values, t.gates, false);
    if (LA_GATE == 0) write_new_values(S, new_values, t.k);
    products_commit();
    end_product<0>(x);
    if (LA_GATE == 0) accumulator_fence(S);
    own.load(new_values);
}
// out^T = S^T Qg^T + U^T P^T (add: += ) and S^T += U^T Kd, begun one behind the other: two groups of products
LA_DEVICE void begin_outputs(float (&out)[8][4], float (&S)[16][4], const StateOperand& state,
                             const u32 (&new_values)[4][4], const Tiles& t, int group, bool add) {
    accumulator_fence(out);
    accumulator_fence(S);
    products_begin();
    state.multiply(out, t.q, group, add);
    multiply_gram(out, new_values, t.gates, true);
    products_commit();
    write_new_values(S, new_values, t.k);
    products_commit();
}

// U, which the backward needs of a chunk, in the place of q, once both groups have read that
LA_DEVICE void keep_values(const u32 (&new_values)[4][4], u32 queries, int row, int lane) {
    groups_barrier<256>(8);
    OwnColumns{queries, row, lane}.store(new_values);
    publish_shared();
}

LA_DEVICE void consumer(const VectorArguments& a, const ChunkTraversal& traversal, u32 shared, Barriers bar, int warp,
                        int lane) {
    const int group = warp >> 2;
    const bool copies = warp == 0 && lane == 0;
    const Copier copier = {{a, traversal, shared, bar}};
    if (copies) copier.load.begin();
    __syncwarp();
    StateRows<1, WIDE> state;
    float (&S)[16][4] = state.x[0];
    load_state(state, a, traversal, 16 * warp, lane);
    for (int step = 0; step < traversal.steps; step++) {
        const int s = step % STAGES, chunk = traversal.first + step, phase = step / STAGES & 1;
        const Tiles tiles = tiles_of(shared, s);
        const u32 values = values_at(shared, step);
        u32 new_values[4][4];
        float x[8][4];
        const StateOperand operand(shared, tiles);
        char* const stored = a.states + (traversal.stored + chunk) * STATE_BYTES;
        if (!STATE_IN_STAGE) operand.make(state, stored, warp, lane);
        if (LA_RAGGED) barrier_wait(bar.ready(s), phase);   // values of the next sequence are zeros
        barrier_wait(bar.values(step & 1), step >> 1 & 1);
        load_values(x, values, 16 * warp, lane);
        barrier_wait(bar.ready(s), phase);
        if (STATE_IN_STAGE) operand.make(state, stored, warp, lane);
        scale_state(S, tiles.all, lane);
        begin_errors(x, operand, tiles.keys, group);
        end_product<0>(x);
        const OwnColumns own{values, 16 * warp, lane};                    // of v, which the warp has read
        const int two_terms = first_alike(shared + AT_STRENGTHS, lane);   // from that token on
        solve_errors(x, new_values, two_terms, own, tiles.gates + PANEL, shared + AT_STRENGTHS, lane, [&] {   // U^T
            warp_arrive(bar.keys(), lane);
            barrier_wait(bar.inverse(s), phase);
        });
        if (two_terms < C) add_rests(x, S, new_values, tiles, own, two_terms);
        begin_outputs(x, S, operand, new_values, tiles, group, two_terms < C);
        end_product<1>(x);
        store_outputs(x, a.scale, values, warp, lane);   // the warp's own columns of v, which it has read
        publish_shared();
        if (LA_RAGGED && traversal.count(chunk) < C) {
            group_barrier(group);
            if (64 * group < LA_V) store_part(a, traversal, values, chunk, group, (warp & 3) * 32 + lane);
            publish_shared();
        }
        end_product<0>(S);
        if (LA_KEEP) keep_values(new_values, tiles.q, 16 * warp, lane);
        if (LA_KEEP && STATE_IN_STAGE && lane == 0) out_read();
        warp_arrive(bar.empty(s), lane);
        store_position<LA_V, LA_K>(state, a, position_after(a, traversal.sequence, chunk), traversal, 16 * warp, lane);
        if (copies) copier.leave(step);
        __syncwarp();
    }
    if (LA_KEEP && lane == 0) out_read();
    if (a.end.data && traversal.segment == traversal.last && traversal.head % a.end_group == 0)
        state.template store<LA_V, LA_K>(a.end, traversal.slot / a.end_group, 16 * warp, lane);
}

extern "C" __global__ void __launch_bounds__(512, 1) chain(const __grid_constant__ VectorArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const ChunkTraversal traversal(a, a.segments, a.chunks);
    if (traversal.segment > traversal.last) return;
    const Barriers bar = {shared + AT_BARRIERS};
    if (threadIdx.x == 0) {
        bar.init();
        barriers_made();
    }
    __syncthreads();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0),
              lane = threadIdx.x & 31;   // a warp's number is uniform
    if (warp >= 8) {
        release_registers<PRODUCER_REGISTERS_OF_CHAIN>();
        producer(a, traversal, shared, bar, warp - 8, lane);
    } else {
        claim_registers<CONSUMER_REGISTERS_OF_CHAIN>();
        consumer(a, traversal, shared, bar, warp, lane);
    }
}
