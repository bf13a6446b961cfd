// Linear attention with one decay a token and key channel, forward (sm_90a, bfloat16):
//
//     S_t = diag(e^{g_t}) S_(t-1) + k_t^T v_t
//     out_t = scale q_t S_t, or with LA_BEFORE scale (q_t S_(t-1) + (q_t . u k_t) v_t)
//
// A block has a segment of a sequence and head, or parts of several sequences and heads (parts.cuh). Two warpgroups
// hold 64 value rows of S^T each, in float32 registers; two others turn q, k and g of the next chunk into scaled copies
// in place, and make P, in two terms. In chunks, with S the state before:
//
//     out = scale (Qg S + P V)        S <- D_0 D_1 D_2 D_3 S + Kd^T V
//
// Where gates are declared to be small (LA_BOUNDED 1), one reference serves a whole chunk: bounded.cuh.
#include "vector/parts.cuh"

#if LA_BOUNDED
#include "vector/bounded.cuh"
#else
LA_DEVICE void producer(const Parts& parts, u32 shared, Barriers bar, int warp, int lane) {
    const VectorArguments& a = parts.a;
    const Stops stops = {shared + AT_STOPS};
    const int channel = 64 * (warp & 1) + 2 * lane;
    int step = 0, n = parts.last();
    do {
        const ChunkTraversal traversal = parts.traversal(n);
        float2 u = {0.f, 0.f};
        if (LA_BONUS) {
            const float* p = a.u + (i64)((u32)traversal.head / (u32)a.group_u) * LA_K + channel;
            u = {channel < LA_K ? p[0] : 0.f, channel + 1 < LA_K ? p[1] : 0.f};
        }
        bool left = false;
        const int first = traversal.first - step, end = step + traversal.steps;
        for (; step < end; step++) {
            const int s = step % STAGES, chunk = first + step;
            const Tiles tiles = tiles_of(shared, s);
            barrier_wait(bar.full(s), step / STAGES & 1);
            if (left) {
                warp_arrive(bar.ready(s), lane);
                continue;
            }
            if (LA_RAGGED && traversal.count(chunk) < C) {
                barrier_wait(bar.values(step & 1), step >> 1 & 1);
                clear_tail(tiles, values_at(shared, step), traversal.count(chunk), warp, lane);
            }
            ExactBlock exact = {};
            if (LA_EXACT) exact = exact_block<4, EXACT_TERMS>(tiles, warp, lane);
            float2 all;
            const bool far = __any_sync(0xffffffffu, scale_block<4, false, LA_EXACT>(tiles, all, u, warp, lane, [] {}));
            left = any_of_producers(far) && !LA_EXACT;
            if (left && warp == 0 && lane == 0) {
                parts.flag(n);
                stops.set(s, n);
            }
            __syncwarp();
            make_gram<4, LA_EXACT>(tiles, all, exact, 0.f, warp, lane, [] {});
            publish_shared();
            warp_arrive(bar.ready(s), lane);
        }
    } while (parts.has(--n));
}
#endif

// out^T = S^T Qg^T + V^T P^T and S^T += V^T Kd, begun one behind the other: two groups of products
LA_DEVICE void begin_products(float (&out)[8][4], float (&S)[16][4], const u32 (&state)[8][4], u32 queries, u32 keys,
                              u32 gram, u32 values) {
    const u64 q = panel_descriptor(queries), k = panels_descriptor<Tokens>(keys), p = panel_descriptor(gram),
              rest = panel_descriptor(gram + PANEL), v = panel_descriptor(values);
    accumulator_fence(out);
    products_begin();
#pragma unroll
    for (int d = 0; d < 8; d++) product_ABt(out, state[d], q + Tokens::along(d), d > 0);
#pragma unroll
    for (int t = 0; t < 4; t++) {
        product_AtBt(out, v + Tokens::across(t), p + Square::along(t), true);
        product_AtBt(out, v + Tokens::across(t), rest + Square::along(t), true);
    }
    products_commit();
    accumulator_fence(S);
    products_begin();
#pragma unroll
    for (int t = 0; t < 4; t++) product_AtB_wide(S, v + Tokens::across(t), k + Tokens::across(t));
    products_commit();
}
LA_DEVICE void end_products(float (&out)[8][4], float (&S)[16][4]) {
    products_wait<1>();
    accumulator_fence(out);
    products_wait<0>();
    accumulator_fence(S);
}

// The state after a chunk, in the place of q and k once both groups have read them; its low bits where it will be
// stored, null if no chunk follows
LA_DEVICE void stage_state(const StateRows<1, WIDE>& state, u32 at, char* stored, int warp, int lane) {
    if (stored) store_low_bits(stored + STATE_BYTES, state.x[0], round_up(LA_K, 64) / 64, warp, lane);
    u32 operands[8][4];
    groups_barrier<256>(8);
    state_operands(operands, state, 0);
    store_state<StatePanels>(at, operands, 16 * warp, lane);
}

LA_DEVICE void consumer(const Parts& parts, u32 shared, Barriers bar, int warp, int lane) {
    const VectorArguments& a = parts.a;
    const int group = warp >> 2, thread = warp * 32 + lane;
    const Loader load = {parts, shared, bar};
    int begin = 0, n = parts.last();
    if (thread == 0) load.begin(n);
    __syncwarp();
    do {
        const ChunkTraversal traversal = parts.traversal(n);
        StateRows<1, WIDE> state;
        begin_part(state, parts, traversal, n, warp, lane);
        int left_at = -1;   // a step, where a chunk decays too far
        for (int i = 0; i < traversal.steps; i++) {
            const int step = begin + i, s = step % STAGES, chunk = traversal.first + i;
            const Tiles tiles = tiles_of(shared, s);
            const u32 values = values_at(shared, step);
            float out[8][4], (&S)[16][4] = state.x[0];
            {
                u32 operands[8][4];
                state_operands(operands, state, 0);
                barrier_wait(bar.values(step & 1), step >> 1 & 1);
                barrier_wait(bar.ready(s), step / STAGES & 1);
                if (!LA_EXACT &&
                    __any_sync(0xffffffffu, Stops{shared + AT_STOPS}.at(s, n))) {   // uniform, as one may go on
                    left_at = step;
                    break;
                }
                if (!LA_BOUNDED) scale_state(S, tiles.all, lane);
                begin_products(out, S, operands, tiles.q, tiles.k, tiles.gates, values + group * PANEL);
            }
            end_products(out, S);
            if (LA_BOUNDED) scale_state(S, tiles.all, lane);
            const Place place = (thread & 127) == 0 ? load.place(step) : Place();   // whose thread stores the tile
            group_barrier(group);   // this group's values have been read
            store_outputs(out, a.scale, values, warp, lane);
            if (LA_KEEP)
                stage_state(
                    state, tiles.q,
                    i + 1 < traversal.steps ? a.states + (traversal.stored + chunk + 1) * STORED_BYTES : nullptr, warp,
                    lane);
            publish_shared();
            if (LA_KEEP) groups_barrier<256>(8);
            else group_barrier(group);
            const bool part = LA_RAGGED && traversal.count(chunk) < C;
            if (part && 64 * group < LA_V) store_part(a, traversal, values, chunk, group, thread & 127);
            if (part) group_barrier(group);
            if ((thread & 127) == 0) {
                if (!part && 64 * group < LA_V)
                    box_out(a.out, values + group * PANEL, 64 * group, place.head, place.token, place.row);
                if (LA_KEEP && warp == 0) store_residuals(a, traversal.stored + chunk, tiles, i + 1 < traversal.steps);
                out_commit();
                const Copies next = warp == 0 ? load.after(step) : Copies();
                out_read();
                barrier_arrive(bar.empty(s));
                if (warp == 0) load.copy_when_empty(next, step);
            }
            __syncwarp();
            store_position<LA_V, LA_K>(state, a, position_after(a, traversal.sequence, chunk), traversal, 16 * warp,
                                       lane);
        }
        end_part(state, parts, n, warp, lane);
        begin += traversal.steps;
        if (left_at >= 0) load.leave(left_at, begin, thread);
    } while (parts.has(--n));
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(512, 1) scan(const __grid_constant__ VectorArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const Parts parts = {a};
    if (!PARTS) {
        const ChunkTraversal traversal = parts.traversal(blockIdx.x);
        if (traversal.segment > traversal.last) return;
    } else if (a.segments > 1 && (int)blockIdx.x % a.segments * a.chunks * C >= max((int)a.T, 1)) return;
    if (LA_EXACT && !(a.flags[2 * blockIdx.x] | a.flags[2 * blockIdx.x + 1])) return;
    const Barriers bar = {shared + AT_BARRIERS};
    if (threadIdx.x == 0) {
        if (!LA_EXACT) parts.clear_flags();
        init_block(shared, bar);
    }
    __syncthreads();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0),
              lane = threadIdx.x & 31;   // a warp's number is uniform
    if (warp >= 8) {
        release_registers<PRODUCER_REGISTERS_OF_SCAN>();
        producer(parts, shared, bar, warp - 8, lane);
    } else {
        claim_registers<CONSUMER_REGISTERS_OF_SCAN>();
        consumer(parts, shared, bar, warp, lane);
    }
}
