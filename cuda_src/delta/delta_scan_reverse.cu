// The chain of the delta rule backward, portable: dS, the gradient of the transposed state, and dv, as delta_reverse.cu has them.
//
// LA_OUTPUTS 1: dv, and dS after every chunk; 2: what a segment adds to dS (the last one: makes of the final state's gradient).
constexpr bool READS = true, OVER_BETA = LA_DTYPE == 1 && LA_OUTPUTS != 2;   // dv
#include "attention/delta_stage.cuh"

// rows t .. t + 15 of a lower triangular tile, columns from j on, times the operands of 16 tokens
template <class Gram, int N> LA_DEVICE void multiply_lower(float (&c)[TILES][N][4], int to, const typename Element::A (&w)[TILES], u32 x, int t, int j, int lane) {
    typename Element::B b[2];
    load_b_columns<Element, Gram>(b, x, t, j, lane);
    multiply_pair<Element>(c, to, w, b);
}

extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS) reverse(const __grid_constant__ DeltaScanArguments a) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const int thread = threadIdx.x, warp = thread >> 5, row = warp * 16 * TILES;
    int lane = thread & 31;
    const Traversal<C, PARTS, true> traversal(a.offsets, a.T, a.heads, a.segments, a.chunks);
    const Sequence& sequence = traversal.sequence;
    if (traversal.segment > traversal.last || (ADDS && traversal.segment == 0)) return;
    const char *q = rows_of(a.q, sequence, traversal.head), *k = rows_of(a.k, sequence, traversal.head), *dout = rows_of(a.v, sequence, traversal.head);
    const char* r = LA_SEPARATE_ERASE_KEY ? rows_of(a.r, sequence, traversal.head) : nullptr;
    const float* g = traversal.gates(a.g);
    const int column = traversal.part * VB;
    auto load = [&](int step) {
        const u32 at = shared + step % STAGES * STAGE;
        const int token = traversal.token_of(step);
        load_rows<Keys, C, THREADS, K>(at, k, a.k.token, token, sequence.T, 0, thread);
        if constexpr (LA_SEPARATE_ERASE_KEY) load_rows<Keys, C, THREADS, K>(at + AT_R, r, a.r.token, token, sequence.T, 0, thread);
        load_rows<Values, C, THREADS, V>(at + AT_V, dout, a.v.token, token, sequence.T, column, thread);
        load_inverse<Gram, C, THREADS>(at + AT_A, inverse_of<C>(a, sequence, traversal.slot, traversal.head, traversal.chunk_of(step)), thread);
        load_gates<C, THREADS>(at + AT_G, g, a.g.token, token, sequence.T, thread);
        if (OVER_BETA) load_numbers<C, THREADS>(at + AT_G + C * 4, betas_of(a.beta, sequence, traversal.head), a.beta.token, token, sequence.T, thread);
    };
    auto load_queries = [&](int step) {
        load_rows<Keys, C, THREADS, K>(shared + AT_Q + step % QUERY_BUFFERS * C * Keys::ROW, q, a.q.token, traversal.token_of(step), sequence.T, 0, thread);
    };
    StateRows<TILES, KP> dS;
    dS.clear();
    if (a.start.data && !(ADDS && traversal.segment < traversal.last)) dS.template load<V, K>(a.start, start_slot(a, traversal.slot, traversal.segment), column + row, lane);
    if (STAGES > 1 && traversal.steps > 0) {
        load(0);
        load_queries(0);
    }
    copy_commit();
    const Decay<C> decay = {shared + AT_DECAY + warp * Decay<C>::FLOATS * 4};
    for (int step = 0; step < traversal.steps; step++) {
        const u32 keys = shared + step % STAGES * STAGE, values = keys + AT_V, queries = shared + AT_Q + step % QUERY_BUFFERS * C * Keys::ROW;
        const int token = traversal.token_of(step);
        asm volatile("" : "+r"(lane));   // opaque: addresses are recomputed in each chunk; held over the loop they would spill
        if (STAGES == 1) {
            __syncthreads();
            load(step);
            load_queries(step);
            copy_commit();
        }
        copy_wait<0>();
        __syncthreads();
        if (STAGES > 1 && step + 1 < traversal.steps) {
            load(step + 1);
            if (QUERY_BUFFERS > 1) load_queries(step + 1);
        }
        if (!ADDS) {
            char* to = a.states + chunk_number<C>(a, sequence, traversal.slot, traversal.head, traversal.chunk_of(step)) * ChunkState<VP, KP>::SIZE;
            store_chunk_state(dS, to, column + row, lane);
        }
        const float all = decay.set(keys + AT_G, 1.f, 1.f, 0.f, lane);
        __syncwarp();
        gram_matrix<Element, WARPS, C, KP, false, Keys, Gram>(queries, keys, shared + AT_GRAM, 0, decay, a.scale, warp, lane);
        float n[TILES][C / 8][4];   // dN = d dS K^T + dO^T P, then dW = dN A
        clear_tiles(n);
        read_state<C, Keys>(n, dS, keys, 0, lane);
#pragma unroll
        for (int i = 0; i < C / 8; i++) {
            const float2 e = decay.ends(i * 8 + (lane & 3) * 2);
#pragma unroll
            for (int j = 0; j < TILES * 4; j++) n[j >> 2][i][j & 3] *= j & 1 ? e.y : e.x;
        }
        if (LA_DECAY) {
            const float carry = exp2_approx(all);
            dS.each([&](int, int, float& y) { y *= carry; });
        }
        __syncthreads();   // P is whole
#pragma unroll
        for (int t = 0; t < C; t += 16) {
            typename Element::A own[TILES];
#pragma unroll
            for (int m = 0; m < TILES; m++) own[m] = Element::operand(load_a_columns<Element, Values>(values, t, row + 16 * m, lane));
#pragma unroll
            for (int j = 0; j <= t; j += 16) multiply_lower<Gram>(n, j / 8, own, shared + AT_GRAM, t, j, lane);
        }
        write_rows<C, Keys>(dS, queries, lane, [&](int m, int t) {   // dS += scale e dO^T Q
            const auto raw = load_a_columns<Element, Values>(values, t, row + 16 * m, lane);
            const float2 e = decay.starts(t + (lane & 3) * 2), f = decay.starts(t + 8 + (lane & 3) * 2);
            float w[8];
#pragma unroll
            for (int i = 0; i < 8; i++) w[i] = a.scale * factor(e, f, i) * Element::value(raw, i);
            return Element::operand(w);
        });
        if (STAGES > QUERY_BUFFERS) {
            __syncthreads();   // the queries have been read
            if (step + 1 < traversal.steps) load_queries(step + 1);
        }
        copy_commit();
#pragma unroll
        for (int j = 0; j < C; j += 16) {   // from the first tokens on: their dN is not needed again
            float w[TILES][2][4];
            clear_tiles(w);
#pragma unroll
            for (int t = j; t < C; t += 16) {
                typename Element::A own[TILES];
#pragma unroll
                for (int m = 0; m < TILES; m++) own[m] = operand_of(n, m, t / 8);
                multiply_lower<Gram>(w, 0, own, keys + AT_A, t, j, lane);
            }
#pragma unroll
            for (int i = 0; i < TILES * 8; i++) n[i >> 3][j / 8 + ((i >> 2) & 1)][i & 3] = w[i >> 3][(i >> 2) & 1][i & 3];
        }
        write_rows<C, Keys>(dS, LA_SEPARATE_ERASE_KEY ? keys + AT_R : keys, lane, [&](int m, int t) {   // dS -= e dW K, or e dW R
            return operand_of(n, m, t / 8, read_starts(decay, t + (lane & 3) * 2), read_starts(decay, t + 8 + (lane & 3) * 2), -1.f);
        });
        if (ADDS) continue;
        auto put = [&](const Rows& to) {
            stage_rows<Element, Values, TILES, C>(n, values, row, lane);
            store_rows<Values, C, 16 * TILES, V>(own_rows(to, sequence, traversal.head), to.token, values, token, sequence.T, row, column, lane);
        };
        put(a.out);
        if (OVER_BETA) {
            divide_by_beta<C>(n, keys + AT_G + C * 4, lane);
            put(a.writes);
        }
    }
    copy_wait<0>();
    if (ADDS) dS.template store<V, K>(a.end, traversal.slot * a.segments + traversal.segment, column + row, lane);
    else store_end<V, K>(dS, a, traversal, traversal.segment == 0, column + row, lane);
}
