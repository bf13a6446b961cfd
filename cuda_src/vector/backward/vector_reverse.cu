// The chain of vector decay backward: G = dL/dS (transposed, value row by key column) from a segment's end to its
// start.
//
//     dv^T = G^T Kd^T + scale dO^T P,      G^T <- e^B G^T + dO^T Qg,      Qg = scale q e^{b},   Kd = k e^{B - b}
//
// P is without scale, in two terms, as the forward stores it, Kd in two terms. With LA_ERASE, both in one term and N of
// the forward, which made U = beta E + N beta E of E = V - Kc S:
//
//     dU^T = G^T Kd^T + scale dO^T P,     dv^T = dW^T = beta (dU^T + dU^T N),     G^T <- e^B G^T + dO^T Qg - dW^T Kc,
//     Kc = k e^{b}
//
// b: decays from the chunk's start (with BEFORE a query's excludes its own token), all exponents <= 0: no decay divides
// here. G after each chunk goes to memory in bfloat16, as the products of vector_grads.cu read it, without an erase
// term with its low bits. Warpgroups 0 and 1: 64 value rows of G^T each, in registers, where the decay is a factor of
// columns. Warpgroups 2 and 3 scale q and k of the chunks ahead, in a ring that the copy engine fills.
//
// LA_ADDS 1: the segment's offset of G before it, from its first chunk on and only as long as some channel is not
// forgotten, with the decays of the whole segment. With LA_ERASE by the chain itself, from zeros (the last segment from
// the given gradient); G alone is stored.
#include "vector/backward/reverse_copies.cuh"

// G^T in bfloat16, a warp's 16 rows, once the last one has left shared memory: an operand here, and on its way to memory
LA_DEVICE void round_state(const StateRows<1, WIDE>& state, u32 at, int warp, int lane) {
    u32 f[8][4];
    state_operands(f, state, 0);
    if (lane == 0) out_read();
    __syncwarp();
    store_state<Whole>(at, f, 16 * warp, lane);
    publish_shared();
    __syncwarp();
}
LA_DEVICE void store_after(char* to, u32 at, int warp, int lane) {
    if (lane == 0) {
#pragma unroll
        for (int p = 0; p < KEY_BYTES / Tokens::PANEL; p++)
            run_out(to + p * Whole::PANEL + warp * 2048, at + p * Whole::PANEL + warp * 2048, 2048);
        out_commit();
    }
    __syncwarp();
}
// accumulators (16 value rows, 64 tokens) as operands of 16 tokens each
LA_DEVICE void token_operands(u32 (&f)[4][4], const float (&x)[8][4]) {
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            f[k][i] = pack_bf16(x[2 * k + (i >> 1)][2 * (i & 1)], x[2 * k + (i >> 1)][2 * (i & 1) + 1]);
}
// waits for all but N groups of products; the last one waited for is in c
template <int N, int TILES> LA_DEVICE void end_products(float (&c)[TILES][4]) {
    products_wait<N>();
    accumulator_fence(c);
}
// rows of the values' panel that are the sequence's own, where other sequences follow
LA_DEVICE void store_own(char* rows, i64 stride, u32 panel, int column, int own, int thread) {
    for (int i = thread; i < own * 8; i += 128) {
        const int r = i >> 3, c = i & 7;
        copy_out<16>(rows + r * stride + (column + c * 8) * 2, panel + Square::piece(r, c), column + c * 8 < LA_V);
    }
}

struct Consumer {
    const VectorReverseArguments& a;
    const ReverseTraversal& traversal;
    u32 shared;
    Ring<STAGES> ring;
    int warp, lane;
    StateRows<1, WIDE> state;   // G^T

    __device__ __forceinline__ char* after(int chunk) const { return a.ends + (traversal.of.block + chunk) * LA_ENDS; }
    __device__ __forceinline__ void begin() {
        state.clear();
        if (ADDS || (OFFSETS && traversal.segment < traversal.last)) return;
        const i64 slot = traversal.of.slot;
        if (traversal.segment < traversal.last)
            state.template load<WIDE, WIDE>({a.begins, STATE, WIDE, 1}, slot * a.segments + traversal.segment,
                                            16 * warp, lane);
        else if (a.start.data) state.template load<LA_V, LA_K>(a.start, slot / a.start_group, 16 * warp, lane);
    }
    __device__ __forceinline__ void end() {
        if (lane == 0) out_read();
        const i64 slot = traversal.of.slot;
        if (ADDS || OFFSETS)
            state.template store<WIDE, WIDE>({a.added, STATE, WIDE, 1},
                                             slot * (a.segments - 1) + traversal.segment - !a.every, 16 * warp, lane);
        else if (traversal.segment == 0) state.template store<LA_V, LA_K>(a.end, slot, 16 * warp, lane);
    }
    // dv^T = dO^T P, begun
    __device__ __forceinline__ void begin_local(float (&dv)[8][4], u32 at) {
        const u64 dout = panel_descriptor(at + AT_DOUT + (warp >> 2) * Tokens::PANEL),
                  gram = panel_descriptor(at + AT_GRAM);
        accumulator_fence(dv);
        products_begin();
#pragma unroll
        for (int d = 0; d < 4; d++) {
            product_AtB(dv, dout + Tokens::across(d), gram + Square::across(d), d > 0);
            if (!ERASE)
                product_AtB(dv, dout + Tokens::across(d), gram + Square::across(d) + (Square::SIZE >> 4),
                            true);   // its second term
        }
        products_commit();
    }
    // dv^T = scale dv^T + G^T Kd^T, begun
    __device__ __forceinline__ void begin_values(float (&dv)[8][4], u32 at) {
        const u64 after = panel_descriptor(shared + AT_AFTER) + (warp >> 2) * Whole::across(4),
                  keys = panel_descriptor(at + AT_K);
#pragma unroll
        for (int i = 0; i < 32; i++) dv[i >> 2][i & 3] *= a.scale;
        accumulator_fence(dv);
        products_begin();
#pragma unroll
        for (int d = 0; d < round_up(LA_K, 64) / 16; d++) {
            product_ABt(dv, after + Whole::along(d), keys + Tokens::along(d), true);
            if (!ERASE)
                product_ABt(dv, after + Whole::along(d), keys + Tokens::along(d) + (AT_K_REST - AT_K >> 4),
                            true);   // its second term
        }
        products_commit();
    }
    // G^T += dO^T Qg, begun
    __device__ __forceinline__ void begin_state(u32 at) {
        const u64 dout = panel_descriptor(at + AT_DOUT + (warp >> 2) * Tokens::PANEL),
                  queries = panels_descriptor<Tokens>(at + AT_Q);
        accumulator_fence(state.x[0]);
        products_begin();
#pragma unroll
        for (int d = 0; d < 4; d++) product_AtB_wide(state.x[0], dout + Tokens::across(d), queries + Tokens::across(d));
        products_commit();
    }
    // dU^T becomes dW^T = beta (dU^T + bf(dU)^T N)
    __device__ __forceinline__ void solve(float (&dv)[8][4], u32 at) const {
        const u64 inverse = panel_descriptor(at + AT_INVERSE);
        u32 f[4][4];
        token_operands(f, dv);
        round_alike(dv, f, at + AT_STRENGTHS, lane);
        accumulator_fence(dv);
        products_begin();
#pragma unroll
        for (int d = 0; d < 4; d++) product_AB(dv, f[d], inverse + Square::across(d), true);
        products_commit();
        end_products<0>(dv);
        scale_by_strengths(dv, at + AT_STRENGTHS, lane);
    }
    // G^T -= dW^T Kc, begun
    __device__ __forceinline__ void begin_erase(const u32 (&f)[4][4], u32 at) {
        const u64 keys = panels_descriptor<Tokens>(at + AT_ERASE);
        accumulator_fence(state.x[0]);
        products_begin();
#pragma unroll
        for (int d = 0; d < 4; d++) product_AB_wide(state.x[0], f[d], keys + Tokens::across(d));
        products_commit();
    }
    // dW_i.v_i over the warp's value columns, dW before it is rounded, to memory behind G
    __device__ __forceinline__ void store_dots(const float (&dv)[8][4], int step, int chunk) const {
        const u32 dots = shared + AT_DOTS + warp * C * 4;
        barrier_wait(shared + AT_VALUES_LOADED, step & 1);
        const int own = traversal.of.own(chunk), t = 2 * lane;
        dot_outputs<Tokens, C>(dv, shared + AT_VALUES, 16 * warp, dots, lane);
        __syncwarp();
        const float2 x = load_shared2(dots + t * 4);
        float2* to = (float2*)(after(chunk) + LA_END) + warp * C / 2;
        to[lane] = {t < own ? x.x : 0.f, t + 1 < own ? x.y : 0.f};
    }
    __device__ __forceinline__ void decay(int step) {
        float (&G)[16][4] = state.x[0];
        const u32 carries = shared + AT_CARRIES + step % STAGES * WIDE * 4 + (lane & 3) * 8;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const float2 d = load_shared2(carries + i * 32);
            G[i][0] *= d.x;
            G[i][1] *= d.y;
            G[i][2] *= d.x;
            G[i][3] *= d.y;
        }
    }
    __device__ __forceinline__ void store_values(const float (&dv)[8][4], u32 at, int chunk) {
        const int group = warp >> 2, own = traversal.of.own(chunk), thread = threadIdx.x & 127;
        const u32 panel = at + AT_DOUT + group * Tokens::PANEL;
        group_barrier(group);   // the panel of dO has been read
        const float (&o)[1][8][4] = (const float (&)[1][8][4])dv;
        stage_rows<Bfloat16, Square, 1, C>(o, panel, 16 * (warp & 3), lane);
        publish_shared();
        group_barrier(group);
        if (own < C)
            store_own(own_rows(a.out, traversal.of.sequence, traversal.of.head) + (i64)chunk * C * a.out.token,
                      a.out.token, panel, 64 * group, own, thread);
        else if (thread == 0) {
            box_out(a.dv, panel, 64 * group, traversal.of.head, traversal.of.token(chunk), traversal.of.row);
            out_commit();
            out_read();
        }
        __syncwarp();
    }
    __device__ __forceinline__ void run() {
        begin();
        for (int step = 0; step < traversal.steps; step++) {
            const int chunk = traversal.chunk(step), own = traversal.of.own(chunk);
            const u32 at = shared + step % STAGES * STAGE;
            float dv[8][4];
            if (!ADDS)
                add_position<LA_V, LA_K>(state, a, position_after(a, traversal.of.sequence, chunk), traversal.of,
                                         16 * warp, lane);
            if (!ADDS) round_state(state, shared + AT_AFTER, warp, lane);
            barrier_wait(loaded(shared, step), step / STAGES & 1);
            if (own < C) {
                clear_rows<CONSUMERS>(at + AT_DOUT, own, threadIdx.x);
                publish_shared();
                groups_barrier<CONSUMERS>(4);
            }
            if (!ADDS) {
                begin_local(dv, at);
                if (!ERASE)
                    store_low_bits(after(chunk) + Whole::SIZE, state.x[0], KEY_BYTES / Tokens::PANEL, warp, lane);
                group_barrier(warp >> 2);   // G is whole in shared memory
            }
            ring.wait_full(step);
            if (!ADDS) end_products<0>(dv);
            if (!ADDS) {
                decay(step);
                begin_values(dv, at);
            }
            begin_state(at);
            if (!ADDS && !OFFSETS) store_after(after(chunk), shared + AT_AFTER, warp, lane);
            end_products<0>(state.x[0]);
            if (!ADDS) accumulator_fence(dv);
            if constexpr (ERASE) {
                u32 f[4][4];
                solve(dv, at);
                token_operands(f, dv);
                begin_erase(f, at);
                if (OFFSETS) barrier_wait(shared + AT_VALUES_LOADED, step & 1);
                else store_dots(dv, step, chunk);
            }
            if (!ADDS && !OFFSETS) store_values(dv, at, chunk);
            if constexpr (ERASE) end_products<0>(state.x[0]);
            publish_shared();   // reads and writes here precede the copies to come
            warp_arrive(ring.empty(step), lane);
        }
        end();
    }
};

extern "C" __global__ void __launch_bounds__(512, 1) reverse(const __grid_constant__ VectorReverseArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const ReverseTraversal traversal(a, blockIdx.x);
    if (traversal.segment > traversal.last || ((ADDS || OFFSETS) && traversal.segment == 0 && !a.every))
        return;   // nothing reads the offset of the first segment, but other ranks
    const Ring<STAGES> ring = {shared + AT_RING};
    if (threadIdx.x == 0) {
        ring.init(8 * ARRIVALS, 4 * GROUPS_OF_VALUES * ARRIVALS);
        for (int s = 0; s <= STAGES; s++) barrier_init(shared + AT_LOADED + 8 * s, 1);   // stages, and the values
        barriers_made();
    }
    __syncthreads();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    if (warp >= 8) {
        release_registers<COPY_REGISTERS>();
        Producer producer = {
            a, traversal, shared, ring, warp - 8, lane, rows_of(a.g, traversal.of.sequence, traversal.of.head)};
        producer.run();
    } else {
        claim_registers<CHAIN_REGISTERS>();
        Consumer consumer = {a, traversal, shared, ring, warp, lane};
        if (warp < 4 * GROUPS_OF_VALUES) consumer.run();
    }
}
