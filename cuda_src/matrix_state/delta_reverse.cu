// The chain of the delta rule backward: D, the gradient of the transposed state, from a segment's end to its start.
//
//     dN = d D K^T + dO^T P,   dW = dN A = dv^T,   D <- e_last D + scale e dO^T Q - e dW K
//
// It needs neither the states nor what the chunks wrote. D after each chunk goes to memory in bfloat16, as the products of
// delta_grads.cu read it, and with it dW_i.v_i, from dW before it is rounded: dbeta has nothing to lose. dN is an operand in two
// terms, since its rounding would be the largest part of dv's error. Warpgroups as in delta_chain.cu. A cut sequence takes two launches: for what segments ADD,
// from zeros, but for the first one; then, with the gradients that they end with known, the WHOLE of all.
#include "attention/delta.cuh"
#include "attention/store.cuh"

enum { WHOLE, ADD };
constexpr int STAGES = 3, FILLER_HAS = 72, CHAIN_HAS = 216;
static_assert(FILLER_HAS + 2 * CHAIN_HAS <= 3 * 168, "registers of 384 threads; a block that asks for more waits for ever");
constexpr int AT_K = 0, AT_Q = AT_K + Tokens::SIZE, AT_DOUT = AT_Q + Tokens::SIZE, AT_A = AT_DOUT + Tokens::SIZE, AT_P = AT_A + Square::SIZE;
constexpr int AT_SUMS = AT_P + Square::SIZE, STAGE = AT_SUMS + 1024;   // e, d, c; of stage 0 the barriers after them
constexpr int AT_BARRIERS = AT_SUMS + 3 * C * 4, AT_END = STAGES * STAGE, SUMS = 3 * C * 4;
static_assert(LA_SHARED == AT_END + END && LA_WARPS == 8, "LA_SHARED is what the launch asks for");
typedef Panels<WIDE, WIDE> Whole;   // D after a chunk, value row by key column

struct Barriers {   // of stage s: filled, empty, P made
    u32 base;
    __device__ __forceinline__ u32 full(int s) const { return base + s * 24; }
    __device__ __forceinline__ u32 empty(int s) const { return base + s * 24 + 8; }
    __device__ __forceinline__ u32 gram(int s) const { return base + s * 24 + 16; }
};

LA_DEVICE void fill(const DeltaArguments& a, const DeltaWalk& walk, unsigned char* memory, u32 shared, Barriers bar, int thread) {
    const int warp = thread >> 5, lane = thread & 31, last = walk.first + walk.steps - 1;
    const int q_head = (u32)walk.head / (u32)a.group_q, k_head = (u32)walk.head / (u32)a.group_k;
    for (int step = -2; step < walk.steps; step++) {
        if (step >= 0) {
            const int s = step % STAGES, own = walk.own(a, last - step);
            const u32 at = shared + s * STAGE;
            barrier_wait(bar.full(s), step / STAGES & 1);
            if (own < C) {
                clear_rows<128, 6>(at, own, thread);
                publish_shared();
                group_barrier(2);
            }
            gram_of_chunk(at + AT_Q, at + AT_K, at + AT_P, (float*)(memory + s * STAGE + AT_SUMS) + 2 * C, a.scale, warp, lane,
                          a.blocks + (walk.block + last - step) * BLOCK, true);
            publish_shared();
            warp_arrive(bar.gram(s), lane);
        }
        const int ahead = step + 2, chunk = last - ahead;
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
            token_tile_in(at + AT_DOUT, a.dout, full, walk.head, token, walk.row);
        }
        __syncwarp();
    }
}

// a warp's operands of D to memory, once its last ones have left shared memory
LA_DEVICE void store_end(char* to, u32 at, const u32 (&f)[8][4], int warp, int lane) {
    if (lane == 0) out_read();
    __syncwarp();
    store_state<Whole>(at, f, 16 * warp, lane);
    publish_shared();
    __syncwarp();
    if (lane == 0) {
        run_out(to + warp * 2048, at + warp * 2048, 2048);
        run_out(to + Whole::PANEL + warp * 2048, at + Whole::PANEL + warp * 2048, 2048);
        out_commit();
    }
    __syncwarp();
}

// dN in two bfloat16 terms
LA_DEVICE void split_operands(u32 (&a)[4][4], u32 (&rest)[4][4], const float (&x)[8][4]) {
    token_operands(a, x);
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float (&z)[4] = x[2 * k + (i >> 1)];
            rest[k][i] = pack_bf16(z[2 * (i & 1)] - low_bf16(a[k][i]), z[2 * (i & 1) + 1] - high_bf16(a[k][i]));
        }
}

// v of a chunk, a warp's own 16 columns, into a tile whose columns nobody else uses
LA_DEVICE void load_own_values(u32 tile, const Rows& v, const DeltaWalk& walk, int chunk, int row, int lane) {
    const char* from = rows_of(v, walk.sequence, walk.head) + row * 2;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int t = 16 * n + (lane >> 1), c = lane & 1, token = chunk * C + t;
        copy_in<16>(tile + Tokens::piece(t, row / 8 + c), from + token * v.token + c * 16, token < walk.sequence.T && row + c * 8 < LA_V);
    }
    copy_commit();
}

// sums over a warp's 16 value rows of dW_i v_i: two tokens a lane
LA_DEVICE float2 written_dots(const float (&x)[8][4], u32 values, int row, int lane) {
    float sums[8][2];   // of tokens 8 n + 2 (lane & 3), + 1
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 v[4];
        load_operand<Tokens>(v, values, 16 * k, row, lane);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float (&z)[4] = x[2 * k + h];
            sums[2 * k + h][0] = z[0] * low_bf16(v[2 * h]) + z[2] * low_bf16(v[2 * h + 1]);
            sums[2 * k + h][1] = z[1] * high_bf16(v[2 * h]) + z[3] * high_bf16(v[2 * h + 1]);
        }
    }
#pragma unroll
    for (int half = 4; half > 0; half >>= 1) {   // a lane keeps the half that its number says, of it and its partner
        const bool upper = lane & 4 * half;
#pragma unroll
        for (int n = 0; n < half; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float other = __shfl_xor_sync(0xffffffffu, upper ? sums[n][i] : sums[n + half][i], 4 * half);
                sums[n][i] = (upper ? sums[n + half][i] : sums[n][i]) + other;
            }
    }
    return {sums[0][0], sums[0][1]};
}

LA_DEVICE void use(const DeltaArguments& a, const DeltaWalk& walk, unsigned char* memory, u32 shared, Barriers bar, bool outputs, int thread) {
    const int warp = thread >> 5, lane = thread & 31, row = 16 * warp;
    StateRows<1, WIDE> state;
    float (&D)[16][4] = state.x[0];
    state.clear();
    if (walk.segment < walk.last) {
        if (outputs) state.template load<WIDE, WIDE>({a.begins, STATE, WIDE, 1}, walk.slot * a.segments + walk.segment, row, lane);
    } else if (a.start.data) state.template load<LA_V, LA_K>(a.start, walk.slot / a.start_group, row, lane);
    char* const out = own_rows(a.out, walk.sequence, walk.head);
    for (int step = 0; step < walk.steps; step++) {
        const int chunk = walk.first + walk.steps - 1 - step, s = step % STAGES, phase = step / STAGES & 1;
        const u32 at = shared + s * STAGE;
        const float *e = (const float*)(memory + s * STAGE + AT_SUMS) + (lane & 3) * 2, *d = e + C;
        const u64 keys = panels_descriptor<Tokens>(at + AT_K), queries = panels_descriptor<Tokens>(at + AT_Q);
        float x[8][4], y[8][4];
        u32 f[8][4], dout[4][4], w[4][4];
        state_operands(f, state, 0);
        barrier_wait(bar.full(s), phase);
        if (walk.own(a, chunk) < C) barrier_wait(bar.gram(s), phase);   // cleared by then
        products_done(x);
        products_begin();
        multiply<0>(x, f, keys);   // D K^T
        products_commit();
#pragma unroll
        for (int k = 0; k < 4; k++) load_operand<Tokens>(dout[k], at + AT_DOUT, 16 * k, row, lane);
        barrier_wait(bar.gram(s), phase);
        products_done(y);
        products_begin();
        multiply<1>(y, dout, panel_descriptor(at + AT_P));   // dO^T P
        products_commit();
        if (outputs) {
            __syncwarp();   // all have their operands of dO
            load_own_values(at + AT_DOUT, a.other, walk, chunk, row, lane);
        }
        products_wait<0>();
        products_done(x);
        products_done(y);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float2 z = pair_at(d, 8 * n);
            y[n][0] += z.x * x[n][0]; y[n][1] += z.y * x[n][1]; y[n][2] += z.x * x[n][2]; y[n][3] += z.y * x[n][3];
        }
        u32 rest[4][4];
        split_operands(w, rest, y);   // dN
        products_done(x);
        products_begin();
        multiply<1>(x, w, panel_descriptor(at + AT_A));   // dW = dN A
        multiply_more<1>(x, rest, panel_descriptor(at + AT_A));
        products_commit();
        scale_tiles(D, last_decay(e - (lane & 3) * 2));
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int i = 0; i < 4; i++) {   // scale e dO
                const float2 z = pair_at(e, LA_UNIT * 2 * C + 16 * k + 8 * (i >> 1));
                dout[k][i] = pack_bf16(a.scale * z.x * low_bf16(dout[k][i]), a.scale * z.y * high_bf16(dout[k][i]));
            }
        products_done(D);
        products_begin();
        multiply_wide(D, dout, queries);
        products_commit();
        products_wait<1>();
        products_done(x);
        token_operands(w, x, e, -1.f);
        products_begin();
        multiply_wide(D, w, keys);   // D = e_last D + scale e dO^T Q - e dW K
        products_commit();
        if (outputs) {
            char* const ends = a.ends + (walk.block + chunk) * ENDS;
            store_end(ends, shared + AT_END, f, warp, lane);
            copy_wait<0>();
            __syncwarp();
            ((float2*)(ends + END + warp * C * 4))[lane] = written_dots(x, at + AT_DOUT, row, lane);
            float (&o)[1][8][4] = (float (&)[1][8][4])x;
            stage_rows<Bfloat16, Tokens, 1, C>(o, at + AT_DOUT, row, lane);
            store_rows<Tokens, C, 16, LA_V>(out, a.out.token, at + AT_DOUT, chunk * C, walk.sequence.T, row, 0, lane);
        }
        publish_shared();
        products_wait<0>();
        products_done(D);
        warp_arrive(bar.empty(s), lane);
    }
    if (lane == 0) out_read();
    if (a.which == ADD) state.template store<WIDE, WIDE>({a.added, STATE, WIDE, 1}, walk.slot * (a.segments - 1) + walk.segment - 1, row, lane);
    else if (walk.segment == 0 && walk.head % a.end_group == 0) state.template store<LA_V, LA_K>(a.end, walk.slot / a.end_group, row, lane);
}

extern "C" __global__ void __launch_bounds__(384, 1) reverse(const __grid_constant__ DeltaArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    DeltaWalk walk(a, blockIdx.x, a.segments - a.which, a.chunks);
    if (a.which == ADD) walk.place(walk.segment + 1, a.chunks);
    if (walk.segment > walk.last) return;
    const bool outputs = a.which != ADD;
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
    const int thread = __shfl_sync(0xffffffffu, threadIdx.x & ~31, 0) | (threadIdx.x & 31);
    if (thread >= 256) {
        give_registers<FILLER_HAS>();
        fill(a, walk, memory, shared, bar, thread - 256);
    } else {
        take_registers<CHAIN_HAS>();
        use(a, walk, memory, shared, bar, outputs, thread);
    }
}
