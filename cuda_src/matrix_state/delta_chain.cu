// The chain of the delta rule, forward: from the kept blocks of a segment's chunks and its first state to out and the last state.
//
// Two warpgroups hold 64 value rows of the state each, in float32 registers, and hand every accumulator on as the next operand
// A; a third asks for the tiles, three chunks ahead of their end, and makes P a chunk ahead.
#include "attention/delta.cuh"
#include "attention/store.cuh"

constexpr int STAGES = 3;
constexpr int AT_K = 0, AT_Q = AT_K + Tokens::SIZE, AT_V = AT_Q + Tokens::SIZE, AT_A = AT_V + Tokens::SIZE, AT_P = AT_A + Square::SIZE;
constexpr int AT_SUMS = AT_P + Square::SIZE, STAGE = AT_SUMS + 1024;   // e, d, c
constexpr int AT_BARRIERS = STAGES * STAGE, SUMS = 3 * C * 4;
static_assert(LA_SHARED == AT_BARRIERS + 128 && LA_WARPS == 8, "LA_SHARED is what the launch asks for");

struct Barriers {   // of stage s: filled, empty, P made
    u32 base;
    __device__ __forceinline__ u32 full(int s) const { return base + s * 24; }
    __device__ __forceinline__ u32 empty(int s) const { return base + s * 24 + 8; }
    __device__ __forceinline__ u32 gram(int s) const { return base + s * 24 + 16; }
};

LA_DEVICE void fill(const DeltaArguments& a, const DeltaWalk& walk, unsigned char* memory, u32 shared, Barriers bar, int thread) {
    const int warp = thread >> 5, lane = thread & 31;
    const int q_head = (u32)walk.head / (u32)a.group_q, k_head = (u32)walk.head / (u32)a.group_k, v_head = (u32)walk.head / (u32)a.group_v;
    for (int step = -2; step < walk.steps; step++) {
        if (step >= 0) {
            const int s = step % STAGES, own = walk.own(a, walk.first + step);
            const u32 at = shared + s * STAGE;
            barrier_wait(bar.full(s), step / STAGES & 1);
            if (own < C) {
                clear_rows<128, 6>(at, own, thread);
                publish_shared();
                group_barrier(2);
            }
            gram_of_chunk(at + AT_Q, at + AT_K, at + AT_P, (float*)(memory + s * STAGE + AT_SUMS) + 2 * C, a.scale, warp, lane,
                          a.blocks + (walk.block + walk.first + step) * BLOCK, false);
            publish_shared();
            warp_arrive(bar.gram(s), lane);
        }
        const int ahead = step + 2, chunk = walk.first + ahead;
        if (thread == 0 && ahead < walk.steps) {
            const int s = ahead % STAGES, token = walk.token(chunk);
            const u32 at = shared + s * STAGE, full = bar.full(s);
            const char* block = a.blocks + (walk.block + chunk) * BLOCK;
            if (ahead >= STAGES) barrier_wait(bar.empty(s), (ahead / STAGES - 1) & 1);
            barrier_expect(full, 3 * Tokens::SIZE + Square::SIZE + SUMS);
            tile_in(at + AT_K, a.k, full, k_head, token, walk.row);
            token_tile_in(at + AT_Q, a.q, full, q_head, token, walk.row);
            run_in(at + AT_A, block, Square::SIZE, full);
            run_in(at + AT_SUMS, block + AT_E, SUMS, full);
            tile_in(at + AT_V, a.v, full, v_head, token, walk.row);
        }
        __syncwarp();
    }
}

LA_DEVICE void use(const DeltaArguments& a, const DeltaWalk& walk, unsigned char* memory, u32 shared, Barriers bar, int thread) {
    const int warp = thread >> 5, lane = thread & 31, row = 16 * warp;
    StateRows<1, WIDE> state;
    float (&S)[16][4] = state.x[0];
    if (walk.segment) state.template load<WIDE, WIDE>({a.begins, STATE, WIDE, 1}, walk.slot * a.segments + walk.segment, row, lane);
    else if (a.start.data) state.template load<LA_V, LA_K>(a.start, walk.slot / a.start_group, row, lane);
    else state.clear();
    char* const out = token_rows(a.out, walk.sequence, walk.head);
    for (int step = 0; step < walk.steps; step++) {
        const int s = step % STAGES, phase = step / STAGES & 1, token = (walk.first + step) * C;
        const u32 at = shared + s * STAGE;
        const float *e = (const float*)(memory + s * STAGE + AT_SUMS) + (lane & 3) * 2, *d = e + C;
        const u64 keys = panels_descriptor<Tokens>(at + AT_K), queries = panels_descriptor<Tokens>(at + AT_Q);
        float x[8][4], y[8][4];
        u32 w[4][4];
        {
            u32 f[8][4];
            state_operands(f, state, 0);
            barrier_wait(bar.full(s), phase);
            if (walk.own(a, walk.first + step) < C) barrier_wait(bar.gram(s), phase);   // cleared by then
            products_done(x);
            products_begin();
            multiply<0>(x, f, keys);   // S K^T
            products_commit();
            products_done(y);
            products_begin();
            multiply<0>(y, f, queries);   // S Q^T
            products_commit();
        }
        products_wait<1>();
        products_done(x);
        error_operands(w, x, at + AT_V, row, e, lane);
        products_done(x);
        products_begin();
        multiply<0>(x, w, panel_descriptor(at + AT_A));   // N = W A^T
        products_commit();
        scale_tiles(S, last_decay(e - (lane & 3) * 2));
        if (LA_UNIT) barrier_wait(bar.gram(s), phase);   // e rq is where c was
        products_wait<1>();
        products_done(y);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float2 f = pair_at(e, LA_UNIT * 2 * C + 8 * n);
            y[n][0] *= a.scale * f.x; y[n][1] *= a.scale * f.y; y[n][2] *= a.scale * f.x; y[n][3] *= a.scale * f.y;
        }
        products_wait<0>();
        products_done(x);
        token_operands(w, x);
        barrier_wait(bar.gram(s), phase);
        products_done(y);
        products_begin();
#pragma unroll
        for (int k = 0; k < 4; k++) product<0, 0>(y, w[k], panel_descriptor(at + AT_P) + Square::along(k), true);   // out^T += N P^T
        products_commit();
        u32 z[4][4];
        token_operands(z, x, d);
        products_done(S);
        products_begin();
        multiply_wide(S, z, keys);   // S = e_last S + (N d) K
        products_commit();
        products_wait<1>();
        products_done(y);
        float (&o)[1][8][4] = (float (&)[1][8][4])y;
        stage_rows<Bfloat16, Tokens, 1, C>(o, at + AT_V, row, lane);   // the warp's own columns of v, which it has read
        store_rows<Tokens, C, 16, LA_V, LA_STEPS>(out, a.out.token, at + AT_V, token, walk.sequence.T, row, 0, lane);
        publish_shared();
        products_wait<0>();
        products_done(S);
        warp_arrive(bar.empty(s), lane);
    }
    if (a.end.data && walk.segment == walk.last && walk.head % a.end_group == 0)
        state.template store<LA_V, LA_K>(a.end, walk.slot / a.end_group, row, lane);
}

extern "C" __global__ void __launch_bounds__(384, 1) chain(const __grid_constant__ DeltaArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const DeltaWalk walk(a, blockIdx.x, a.segments, a.chunks);
    if (walk.segment > walk.last) return;
    const Barriers bar = {shared + AT_BARRIERS};
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(bar.full(s), 1);
            barrier_init(bar.empty(s), 8 * ARRIVALS);
            barrier_init(bar.gram(s), 4 * ARRIVALS);
        }
        barriers_made();
    }
    __syncthreads();
    const int thread = __shfl_sync(0xffffffffu, threadIdx.x & ~31, 0) | (threadIdx.x & 31);   // a warp's number is uniform
    if (thread >= 256) {
        give_registers<88>();
        fill(a, walk, memory, shared, bar, thread - 256);
    } else {
        take_registers<208>();
        use(a, walk, memory, shared, bar, thread);
    }
}
