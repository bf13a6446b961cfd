// The warpgroups of delta_grads.cu that scan the chain of delta_chain.cu a chunk ahead: 64 value rows of S each.
#pragma once
#include "attention/delta_grads.cuh"

// Values of every thread of delta_grads.cu
struct GradContext {
    const DeltaArguments& a;
    const DeltaTraversal& traversal;
    unsigned char* memory;
    u32 shared;
    GradBarriers bar;
    int warp, lane;   // of the warpgroups with one task
};

// load, by one thread
LA_DEVICE void load_chunk(const GradContext& context, int chunk) {
    const auto& [a, traversal, memory, shared, bar, warp, lane] = context;
    const int first = traversal.first;
    const int s = (chunk - first) & 1, token = traversal.token(chunk), head = (u32)traversal.head / (u32)a.group_k;
    const u32 full = bar.chunk(s);
    barrier_expect(full, 2 * SLOT + CHECKPOINT_SUMS);
    tile_in(shared + AT_K + s * SLOT, a.k, full, head, token, traversal.row);
    tile_in(shared + AT_V + s * SLOT, a.v, full, (u32)traversal.head / (u32)a.group_v, token, traversal.row);
    run_in(shared + AT_CHECKPOINTS + s * CHECKPOINT_SUMS, a.checkpoints + (traversal.block + chunk) * CHECKPOINT,
           CHECKPOINT_SUMS, full);
}
LA_DEVICE void load_outputs(const GradContext& context, int chunk) {
    const auto& [a, traversal, memory, shared, bar, warp, lane] = context;
    barrier_expect(bar.outputs(), 2 * SLOT);
    tile_in(shared + AT_DV, a.dv, bar.outputs(), traversal.head, traversal.token(chunk), traversal.row);
    token_tile_in(shared + AT_DOUT, a.dout, bar.outputs(), traversal.head, traversal.token(chunk), traversal.row);
}
LA_DEVICE void load_queries(const GradContext& context, int chunk) {
    const auto& [a, traversal, memory, shared, bar, warp, lane] = context;
    barrier_expect(bar.queries(), SLOT);
    token_tile_in(shared + AT_Q, a.q, bar.queries(), (u32)traversal.head / (u32)a.group_q, traversal.token(chunk),
                  traversal.row);
}
LA_DEVICE void load_end(const GradContext& context, int chunk) {
    const auto& [a, traversal, memory, shared, bar, warp, lane] = context;
    barrier_expect(bar.end(), END);
    run_in(shared + AT_END, a.ends + (traversal.block + chunk) * ENDS, END, bar.end());
}
LA_DEVICE void begin_states(const GradContext& context, StateRows<1, WIDE>& state) {
    const auto& [a, traversal, memory, shared, bar, warp, lane] = context;
    const int first = traversal.first, stop = first + traversal.steps;
    if (threadIdx.x == 0) {
        load_chunk(context, first);
        load_outputs(context, first);
        load_queries(context, first);
        load_end(context, first);
        if (first + 1 < stop) load_chunk(context, first + 1);
    }
    __syncwarp();
    if (traversal.segment)
        state.template load<WIDE, WIDE>({a.begins, STATE, WIDE, 1}, traversal.slot * a.segments + traversal.segment,
                                        16 * warp, lane);
    else if (a.start.data) state.template load<LA_V, LA_K>(a.start, traversal.slot / a.start_group, 16 * warp, lane);
    else state.clear();
}
// read: S K^T; S goes to shared memory
LA_DEVICE void read_chunk(const GradContext& context, StateRows<1, WIDE>& state, float (&x)[8][4], int chunk,
                          u32 values, u64 keys) {
    const auto& [a, traversal, memory, shared, bar, warp, lane] = context;
    const int first = traversal.first;
    const int step = chunk - first, s = step & 1, own = traversal.own(a, chunk);
    {
        u32 f[8][4];
        state_operands(f, state, 0);
        barrier_wait(bar.chunk(s), step >> 1 & 1);
        if (own < C) {   // k and v
            clear_rows<256, 2>(shared + AT_K + s * SLOT, own, threadIdx.x);
            clear_rows<256, 2>(values, own, threadIdx.x);
            publish_shared();
            groups_barrier<256>(4);
        }
        begin_ABt(x, f, keys);
        if (step > 0) barrier_wait(bar.state_free(), (step - 1) & 1);
        store_state<Whole>(shared + AT_STATE, f, 16 * warp, lane);
    }
    publish_shared();
    warp_arrive(bar.state(), lane);
    if (lane == 0 && warp == 0 && step > 0)
        load_outputs(context, chunk);   // the gradients have left them when they free the state
    __syncwarp();
    end_products<0>(x);
}
// solve: U in v's place, token by value; S = e_last S + (U d) K begun, w being the operands of U d
LA_DEVICE void solve_chunk(const GradContext& context, StateRows<1, WIDE>& state, float (&x)[8][4], u32 (&w)[4][4],
                           int s, u32 values, u64 keys, u32 columns) {
    const auto& [a, traversal, memory, shared, bar, warp, lane] = context;
    const float *e = (const float*)(memory + AT_CHECKPOINTS + s * CHECKPOINT_SUMS + AT_E) + (lane & 3) * 2, *d = e + C;
    float (&S)[16][4] = state.x[0];
    error_operands(w, x, values, 16 * warp, e, lane);
    begin_ABt(x, w, panel_descriptor(shared + AT_CHECKPOINTS + s * CHECKPOINT_SUMS));   // U
    scale_tiles(S, last_decay(e - (lane & 3) * 2));
    end_products<0>(x);
#pragma unroll
    for (int k = 0; k < 4; k++)
        store_matrix_transposed(values + columns + k * 2048, pack_bf16(x[2 * k][0], x[2 * k][1]),
                                pack_bf16(x[2 * k][2], x[2 * k][3]), pack_bf16(x[2 * k + 1][0], x[2 * k + 1][1]),
                                pack_bf16(x[2 * k + 1][2], x[2 * k + 1][3]));
    token_operands(w, x, d);
    begin_add_AB(S, w, keys);
    publish_shared();
    warp_arrive(bar.new_values(), lane);
}
// write: U d to shared memory once the gradients of the chunk before are done; that chunk's dbeta; loads of the next ones
LA_DEVICE void write_chunk_values(const GradContext& context, const u32 (&w)[4][4], int chunk, u32 columns) {
    const auto& [a, traversal, memory, shared, bar, warp, lane] = context;
    const int first = traversal.first, stop = first + traversal.steps;
    const int step = chunk - first, before = (step - 1) & 1;
    const bool more = step > 0;
    if (warp == 0 && more) {
        barrier_wait(bar.chunk_free(), before);
        const Strengths strengths(a, traversal, chunk - 1, memory + AT_CHECKPOINTS + before * CHECKPOINT_SUMS, lane);
        __syncwarp();
        if (lane == 0) {
            load_end(context, chunk);
            if (chunk + 1 < stop) load_chunk(context, chunk + 1);
        }
        __syncwarp();
        strengths.store_gradients(a, traversal, chunk - 1, lane);
    }
    __syncwarp();
    if (more) barrier_wait(bar.chunk_free(), before);
#pragma unroll
    for (int k = 0; k < 4; k++)
        store_matrix_transposed(shared + AT_WRITTEN + columns + k * 2048, w[k][0], w[k][1], w[k][2], w[k][3]);
    publish_shared();
    warp_arrive(bar.written(), lane);
    if (lane == 0 && warp == 3 && more) {
        barrier_wait(bar.queries_free(), before);
        load_queries(context, chunk);
    }
    __syncwarp();
}
// dg of the chunk before, <S, dS> of this one
LA_DEVICE void finish_chunk(const GradContext& context, StateRows<1, WIDE>& state, int chunk) {
    const auto& [a, traversal, memory, shared, bar, warp, lane] = context;
    const int first = traversal.first;
    float* dots = (float*)(memory + AT_DOTS);
    const int step = chunk - first, s = step & 1, before = (step - 1) & 1;
    if (LA_DECAY && warp == 1 && step > 0)
        gate_gradients(a, traversal, chunk - 1, dots, dots + 3 * C + before * 8, lane);
    barrier_wait(bar.end(), step & 1);
    end_products<0>(state.x[0]);
    if (LA_DECAY) {
        const float product = dot_end(state.x[0], shared + AT_END, warp, lane);
        if (lane == 0) dots[3 * C + s * 8 + warp] = product;
    }
    warp_arrive(bar.end_done(), lane);
}

LA_DEVICE void scan_states(const GradContext& context) {
    const auto& [a, traversal, memory, shared, bar, warp, lane] = context;
    const int first = traversal.first, stop = first + traversal.steps;
    StateRows<1, WIDE> state;
    begin_states(context, state);
    for (int chunk = first; chunk < stop; chunk++) {
        const int s = (chunk - first) & 1;
        const u32 values = shared + AT_V + s * SLOT;
        const u64 keys = panels_descriptor<Tokens>(shared + AT_K + s * SLOT);
        float x[8][4];
        u32 w[4][4];
        read_chunk(context, state, x, chunk, values, keys);
        const u32 columns = Tokens::block_piece(0, 2 * warp, (lane & 7) | ((lane >> 4) << 3), (lane >> 3) & 1);
        solve_chunk(context, state, x, w, s, values, keys, columns);
        write_chunk_values(context, w, chunk, columns);
        finish_chunk(context, state, chunk);
    }
    if (warp < 2) {   // of the last chunk
        float* dots = (float*)(memory + AT_DOTS);
        const int s = (traversal.steps - 1) & 1;
        barrier_wait(bar.chunk_free(), s);
        if (warp == 0)
            Strengths(a, traversal, stop - 1, memory + AT_CHECKPOINTS + s * CHECKPOINT_SUMS, lane)
                .store_gradients(a, traversal, stop - 1, lane);
        else if (LA_DECAY) gate_gradients(a, traversal, stop - 1, dots, dots + 3 * C + s * 8, lane);
    }
}
