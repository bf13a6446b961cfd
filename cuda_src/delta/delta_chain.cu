// The chain of the delta rule, forward: from the checkpoints of a segment's chunks and its first state to out and the
// last state.
//
// Two warpgroups hold 64 value rows of the state each, in float32 registers, and hand every accumulator on as the next
// operand A; a third, the producer, copies the tiles in, two chunks ahead, and makes P a chunk ahead.
#include "attention/delta_chain.cuh"

constexpr int AT_BARRIERS = STAGES * STAGE;
static_assert(LA_SHARED == AT_BARRIERS + 128 && LA_WARPS == 8, "LA_SHARED is the size that the launch requests");

LA_DEVICE void consumer(const DeltaArguments& a, const DeltaTraversal& traversal, unsigned char* memory, u32 shared,
                        Barriers bar, int thread) {
    const int warp = thread >> 5, lane = thread & 31, row = 16 * warp;
    StateRows<1, WIDE> state;
    float (&S)[16][4] = state.x[0];
    if (traversal.segment)
        state.template load<WIDE, WIDE>({a.begins, STATE, WIDE, 1}, traversal.slot * a.segments + traversal.segment,
                                        row, lane);
    else if (a.start.data) state.template load<LA_V, LA_K>(a.start, traversal.slot / a.start_group, row, lane);
    else state.clear();
    char* const out = token_rows(a.out, traversal.sequence, traversal.head);
    for (int step = 0; step < traversal.steps; step++) {
        const int s = step % STAGES, phase = step / STAGES & 1, token = (traversal.first + step) * C;
        const u32 at = shared + s * STAGE;
        const float *e = (const float*)(memory + s * STAGE + AT_SUMS) + (lane & 3) * 2, *d = e + C;
        const u64 keys = panels_descriptor<Tokens>(at + AT_K), queries = panels_descriptor<Tokens>(at + AT_Q);
        float x[8][4], y[8][4];
        u32 w[4][4];
        {
            u32 f[8][4];
            state_operands(f, state, 0);
            barrier_wait(bar.full(s), phase);
            if (traversal.own(a, traversal.first + step) < C) barrier_wait(bar.gram(s), phase);   // cleared by then
            begin_ABt(x, f, keys);                                                                // S K^T
            begin_ABt(y, f, queries);                                                             // S Q^T
        }
        end_products<1>(x);
        error_operands(w, x, at + AT_V, row, e, lane);
        begin_ABt(x, w, panel_descriptor(at + AT_A));   // U = W A^T
        scale_tiles(S, last_decay(e - (lane & 3) * 2));
        if (LA_UNIT) barrier_wait(bar.gram(s), phase);   // e rq is where b was
        end_products<1>(y);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float2 f = pair_at(e, LA_UNIT * 2 * C + 8 * n);
            y[n][0] *= a.scale * f.x;
            y[n][1] *= a.scale * f.y;
            y[n][2] *= a.scale * f.x;
            y[n][3] *= a.scale * f.y;
        }
        end_products<0>(x);
        token_operands(w, x);
        barrier_wait(bar.gram(s), phase);
        accumulator_fence(y);
        products_begin();
#pragma unroll
        for (int k = 0; k < 4; k++)
            product_ABt(y, w[k], panel_descriptor(at + AT_P) + Square::along(k), true);   // out^T += U P^T
        products_commit();
        u32 z[4][4];
        token_operands(z, x, d);
        begin_add_AB(S, z, keys);   // S = e_last S + (U d) K
        end_products<1>(y);
        float (&o)[1][8][4] = (float (&)[1][8][4])y;
        stage_rows<Bfloat16, Tokens, 1, C>(o, at + AT_V, row, lane);   // the warp's own columns of v, which it has read
        store_rows<Tokens, C, 16, LA_V, LA_STEPS>(out, a.out.token, at + AT_V, token, traversal.sequence.T, row, 0,
                                                  lane);
        publish_shared();
        end_products<0>(S);
        warp_arrive(bar.empty(s), lane);
        store_position<LA_V, LA_K>(state, a, position_after(a, traversal.sequence, traversal.first + step), traversal,
                                   row, lane);
    }
    if (a.end.data && traversal.segment == traversal.last && traversal.head % a.end_group == 0)
        state.template store<LA_V, LA_K>(a.end, traversal.slot / a.end_group, row, lane);
}

extern "C" __global__ void __launch_bounds__(384, 1) chain(const __grid_constant__ DeltaArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const DeltaTraversal traversal(a, blockIdx.x, a.segments, a.chunks);
    if (traversal.segment > traversal.last) return;
    const Barriers bar = {shared + AT_BARRIERS};
    if (threadIdx.x == 0) bar.init();
    __syncthreads();
    const int thread =
        __shfl_sync(0xffffffffu, threadIdx.x & ~31, 0) | (threadIdx.x & 31);   // a warp's number is uniform
    if (thread >= 256) {
        release_registers<88>();
        producer<false>(a, traversal, memory, shared, bar, thread - 256);
    } else {
        claim_registers<208>();
        consumer(a, traversal, memory, shared, bar, thread);
    }
}
