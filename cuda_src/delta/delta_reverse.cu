// The chain of the delta rule backward: dS, the gradient of the transposed state, from a segment's end to its start.
//
//     dN = d dS K^T + dO^T P,   dW = dN A = dv^T,   dS <- e_last dS + scale e dO^T Q - e dW K
//
// It needs neither the states nor the written values. dS after each chunk goes to memory in bfloat16, as the
// products of delta_grads.cu read it, and with it dW_i.v_i, from dW before it is rounded: dbeta has nothing to lose. dN
// is an operand in two terms, since its rounding would be the largest part of dv's error. Warpgroups as in
// delta_chain.cu. A cut sequence takes two launches: for the segments' offsets, from zeros, but for the first one, or
// of EVERY segment between other ranks; then, with the gradients that they end with known, the WHOLE of all.
#include "attention/delta_chain.cuh"

enum { WHOLE, ADD, EVERY };
constexpr int CHAIN_PRODUCER_REGISTERS = 72, CHAIN_CONSUMER_REGISTERS = 216;
static_assert(CHAIN_PRODUCER_REGISTERS + 2 * CHAIN_CONSUMER_REGISTERS <= 3 * 168,
              "registers of 384 threads; a block that asks for more waits for ever");
// the barriers lie behind the sums of stage 0, dS after a chunk behind the ring
constexpr int AT_DOUT = AT_V, AT_BARRIERS = AT_SUMS + SUMS, AT_END = STAGES * STAGE;
static_assert(LA_SHARED == AT_END + END && LA_WARPS == 8, "LA_SHARED is the size that the launch requests");
typedef Panels<WIDE, WIDE> Whole;   // dS after a chunk, value row by key column

// a warp's operands of dS to memory, once its last ones have left shared memory
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
LA_DEVICE void load_own_values(u32 tile, const Rows& v, const DeltaTraversal& traversal, int chunk, int row, int lane) {
    const char* from = rows_of(v, traversal.sequence, traversal.head) + row * 2;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int t = 16 * n + (lane >> 1), c = lane & 1, token = chunk * C + t;
        copy_in<16>(tile + Tokens::piece(t, row / 8 + c), from + token * v.token + c * 16,
                    token < traversal.sequence.T && row + c * 8 < LA_V);
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
    for (int half = 4; half > 0; half >>= 1) {   // a lane has the half that its number says, of it and its partner
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

// dN = dO^T P + d dS K^T, the second given without d, which points at this lane's column
LA_DEVICE void add_decayed(float (&y)[8][4], const float (&x)[8][4], const float* d) {
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float2 z = pair_at(d, 8 * n);
        y[n][0] += z.x * x[n][0];
        y[n][1] += z.y * x[n][1];
        y[n][2] += z.x * x[n][2];
        y[n][3] += z.y * x[n][3];
    }
}
// operands of dO times scale e (with LA_UNIT e rq)
LA_DEVICE void scale_operands(u32 (&dout)[4][4], const float* e, float scale) {
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 z = pair_at(e, LA_UNIT * 2 * C + 16 * k + 8 * (i >> 1));
            dout[k][i] = pack_bf16(scale * z.x * low_bf16(dout[k][i]), scale * z.y * high_bf16(dout[k][i]));
        }
}
// results of a chunk: dS after it (operands f, by way of `at`), dW.v; dv (accumulators x) is staged in dO's place,
// where v is
LA_DEVICE void store_chunk(char* ends, u32 at, u32 douts, const u32 (&f)[8][4], float (&x)[8][4], int warp, int lane) {
    store_end(ends, at, f, warp, lane);
    copy_wait<0>();
    __syncwarp();
    ((float2*)(ends + END + warp * C * 4))[lane] = written_dots(x, douts, 16 * warp, lane);
    float (&o)[1][8][4] = (float (&)[1][8][4])x;
    stage_rows<Bfloat16, Tokens, 1, C>(o, douts, 16 * warp, lane);
}

LA_DEVICE void consumer(const DeltaArguments& a, const DeltaTraversal& traversal, unsigned char* memory, u32 shared,
                        Barriers bar, bool outputs, int thread) {
    const int warp = thread >> 5, lane = thread & 31, row = 16 * warp;
    StateRows<1, WIDE> state;
    float (&dS)[16][4] = state.x[0];
    state.clear();
    if (traversal.segment < traversal.last) {
        if (outputs)
            state.template load<WIDE, WIDE>({a.begins, STATE, WIDE, 1}, traversal.slot * a.segments + traversal.segment,
                                            row, lane);
    } else if (a.start.data) state.template load<LA_V, LA_K>(a.start, traversal.slot / a.start_group, row, lane);
    char* const out = own_rows(a.out, traversal.sequence, traversal.head);
    for (int step = 0; step < traversal.steps; step++) {
        const int chunk = traversal.first + traversal.steps - 1 - step, s = step % STAGES, phase = step / STAGES & 1;
        const u32 at = shared + s * STAGE;
        const float *e = (const float*)(memory + s * STAGE + AT_SUMS) + (lane & 3) * 2, *d = e + C;
        const u64 keys = panels_descriptor<Tokens>(at + AT_K), queries = panels_descriptor<Tokens>(at + AT_Q);
        float x[8][4], y[8][4];
        u32 f[8][4], dout[4][4], w[4][4];
        add_position<LA_V, LA_K>(state, a, position_after(a, traversal.sequence, chunk), traversal, row, lane);
        state_operands(f, state, 0);
        barrier_wait(bar.full(s), phase);
        if (traversal.own(a, chunk) < C) barrier_wait(bar.gram(s), phase);   // cleared by then
        begin_ABt(x, f, keys);                                               // dS K^T
#pragma unroll
        for (int k = 0; k < 4; k++) load_operand<Tokens>(dout[k], at + AT_DOUT, 16 * k, row, lane);
        barrier_wait(bar.gram(s), phase);
        begin_AB(y, dout, panel_descriptor(at + AT_P));   // dO^T P
        if (outputs) {
            __syncwarp();   // all have their operands of dO
            load_own_values(at + AT_DOUT, a.other, traversal, chunk, row, lane);
        }
        end_products<0>(x);
        accumulator_fence(y);
        add_decayed(y, x, d);   // dN
        u32 rest[4][4];
        split_operands(w, rest, y);
        accumulator_fence(x);
        products_begin();
        multiply_AB(x, w, panel_descriptor(at + AT_A));   // dW = dN A
        add_AB(x, rest, panel_descriptor(at + AT_A));
        products_commit();
        scale_tiles(dS, last_decay(e - (lane & 3) * 2));
        scale_operands(dout, e, a.scale);
        begin_add_AB(dS, dout, queries);
        end_products<1>(x);
        token_operands(w, x, e, -1.f);
        products_begin();
        add_AB_wide(dS, w, keys);   // dS = e_last dS + scale e dO^T Q - e dW K
        products_commit();
        if (outputs) {
            store_chunk(a.ends + (traversal.block + chunk) * ENDS, shared + AT_END, at + AT_DOUT, f, x, warp, lane);
            store_rows<Tokens, C, 16, LA_V>(out, a.out.token, at + AT_DOUT, chunk * C, traversal.sequence.T, row, 0,
                                            lane);
        }
        publish_shared();
        end_products<0>(dS);
        warp_arrive(bar.empty(s), lane);
    }
    if (lane == 0) out_read();
    if (!outputs)
        state.template store<WIDE, WIDE>({a.added, STATE, WIDE, 1},
                                         traversal.slot * (a.segments - 1) + traversal.segment - (a.which == ADD), row,
                                         lane);
    else if (traversal.segment == 0 && traversal.head % a.end_group == 0)
        state.template store<LA_V, LA_K>(a.end, traversal.slot / a.end_group, row, lane);
}

extern "C" __global__ void __launch_bounds__(384, 1) reverse(const __grid_constant__ DeltaArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const bool outputs = a.which == WHOLE;
    DeltaTraversal traversal(a, blockIdx.x, a.segments - !outputs, a.chunks);
    if (a.which == ADD) traversal.place(traversal.segment + 1, a.chunks);
    if (traversal.segment > traversal.last) return;
    const Barriers bar = {shared + AT_BARRIERS};
    if (threadIdx.x == 0) bar.init();
    __syncthreads();
    const int thread = __shfl_sync(0xffffffffu, threadIdx.x & ~31, 0) | (threadIdx.x & 31);
    if (thread >= 256) {
        release_registers<CHAIN_PRODUCER_REGISTERS>();
        producer<true>(a, traversal, memory, shared, bar, thread - 256);
    } else {
        claim_registers<CHAIN_CONSUMER_REGISTERS>();
        consumer(a, traversal, memory, shared, bar, outputs, thread);
    }
}
