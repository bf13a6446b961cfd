// The chain of the delta rule backward, portable: D, the gradient of the transposed state, and dv, as delta_reverse.cu has them.
//
// LA_OUTPUTS 1: dv, and D after every chunk; 2: what a segment adds to D (the last one: makes of the final state's gradient).
#include "attention/chunk_state.cuh"
#include "attention/delta_scan.cuh"

constexpr int C = LA_C, K = LA_K, V = LA_V, WARPS = LA_WARPS, STAGES = LA_STAGES, THREADS = 32 * WARPS;
constexpr bool ADDS = LA_OUTPUTS == 2;
constexpr int KP = round_up(K, 16), VP = round_up(V, 16), VB = 16 * WARPS, PARTS = (V + VB - 1) / VB;
constexpr bool APART = LA_DTYPE == 1 && !ADDS;   // dv also over beta
typedef Tile<KP, Element::BYTES> Keys;
typedef Tile<VB, Element::BYTES> Values;
typedef Tile<C, Element::GRAM_BYTES> Gram;
constexpr int AT_V = C * Keys::ROW, AT_A = AT_V + C * Values::ROW, AT_G = AT_A + C * Gram::ROW, AT_Q = AT_G + (1 + APART) * C * 4;
constexpr int AT_R = AT_Q + C * Keys::ROW, STAGE = AT_R + LA_OWN * C * Keys::ROW;
constexpr int AT_GRAM = STAGES * STAGE, AT_DECAY = AT_GRAM + C * Gram::ROW;
static_assert(LA_SHARED == AT_DECAY + WARPS * Decay<C>::FLOATS * 4, "LA_SHARED is what the launch asks for");

// c += w X: one operand of 16 tokens, by rows t .. t + 15 of a lower triangular tile
template <class Gram> LA_DEVICE void multiply_lower(float (&c)[C / 8][4], const typename Element::A& w, u32 x, int t, int lane) {
#pragma unroll
    for (int j = 0; j <= t; j += 16) {
        typename Element::B b[2];
        load_b_columns<Element, Gram>(b, x, t, j, lane);
        Element::multiply(c[j / 8], w, b[0]);
        Element::multiply(c[j / 8 + 1], w, b[1]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS) reverse(const __grid_constant__ DeltaScanArguments a) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const int thread = threadIdx.x, warp = thread >> 5, row = warp * 16;
    int lane = thread & 31;
    const Walk<C, PARTS, true> walk(a.offsets, a.T, a.heads, a.segments, a.chunks);
    const Sequence& sequence = walk.sequence;
    if (walk.segment > walk.last || (ADDS && walk.segment == 0)) return;
    const char *q = rows_of(a.q, sequence, walk.head), *k = rows_of(a.k, sequence, walk.head), *dout = rows_of(a.v, sequence, walk.head);
    const char* r = LA_OWN ? rows_of(a.r, sequence, walk.head) : nullptr;
    const float* g = walk.gates(a.g.data, a.g.batch, a.g.token, a.g.head, a.g.group);
    const int column = walk.part * VB;
    auto load = [&](int step) {
        const u32 at = shared + step % STAGES * STAGE;
        const int token = walk.token_of(step);
        load_rows<Keys, C, THREADS, K>(at, k, a.k.token, token, sequence.T, 0, thread);
        load_rows<Keys, C, THREADS, K>(at + AT_Q, q, a.q.token, token, sequence.T, 0, thread);
        if constexpr (LA_OWN) load_rows<Keys, C, THREADS, K>(at + AT_R, r, a.r.token, token, sequence.T, 0, thread);
        load_rows<Values, C, THREADS, V>(at + AT_V, dout, a.v.token, token, sequence.T, column, thread);
        load_inverse<Gram, C, THREADS>(at + AT_A, inverse_of<C>(a, sequence, walk.slot, walk.head, walk.chunk_of(step)), thread);
        load_gates<C, THREADS>(at + AT_G, g, a.g.token, token, sequence.T, thread);
        if (APART) load_numbers<C, THREADS>(at + AT_G + C * 4, betas_of(a.beta, sequence, walk.head), a.beta.token, token, sequence.T, thread);
    };
    StateRows<1, KP> D;
    D.clear();
    if (a.start.data && !(ADDS && walk.segment < walk.last)) D.template load<V, K>(a.start, start_slot(a, walk.slot, walk.segment), column + row, lane);
    if (STAGES > 1 && walk.steps > 0) load(0);
    copy_commit();
    const Decay<C> decay = {shared + AT_DECAY + warp * Decay<C>::FLOATS * 4};
    for (int step = 0; step < walk.steps; step++) {
        const u32 keys = shared + step % STAGES * STAGE, values = keys + AT_V, queries = keys + AT_Q;
        asm volatile("" : "+r"(lane));   // addresses are made anew in each chunk: kept over the loop they would spill
        if (STAGES == 1) {
            __syncthreads();
            load(step);
            copy_commit();
        }
        copy_wait<0>();
        __syncthreads();
        if (STAGES > 1 && step + 1 < walk.steps) load(step + 1);
        copy_commit();
        if (!ADDS && column + row < VP)
            ChunkState<VP, KP>::store<Element>(a.states + chunk_number<C>(a, sequence, walk.slot, walk.head, walk.chunk_of(step)) * ChunkState<VP, KP>::SIZE, D.x[0], column + row, lane);
        const float all = decay.set(keys + AT_G, 1.f, 1.f, 0.f, lane);
        __syncwarp();
        gram_matrix<Element, WARPS, C, KP, false, Keys, Gram>(queries, keys, shared + AT_GRAM, 0, decay, a.scale, warp, lane);
        float n[1][C / 8][4];   // dN = d D K^T + dO^T P
        clear_tiles(n);
        read_state<C, KP, Keys>(n[0], D, keys, lane);
#pragma unroll
        for (int i = 0; i < C / 8; i++) {
            const float2 e = decay.ends(i * 8 + (lane & 3) * 2);
            n[0][i][0] *= e.x; n[0][i][1] *= e.y; n[0][i][2] *= e.x; n[0][i][3] *= e.y;
        }
        if (LA_DECAY) {
            const float carry = exp2_approx(all);
            D.each([&](int, int, float& y) { y *= carry; });
        }
        __syncthreads();   // P is whole
        typename Element::A weighted[C / 16];
#pragma unroll
        for (int t = 0; t < C; t += 16) {
            const auto raw = load_a_columns<Element, Values>(values, t, row, lane);
            multiply_lower<Gram>(n[0], Element::operand(raw), shared + AT_GRAM, t, lane);
            const float2 e = decay.starts(t + (lane & 3) * 2), f = decay.starts(t + 8 + (lane & 3) * 2);
            float w[8];
#pragma unroll
            for (int i = 0; i < 8; i++) w[i] = a.scale * factor(e, f, i) * Element::value(raw, i);
            weighted[t / 16] = Element::operand(w);
        }
        write_rows<C, KP, Keys>(D, weighted, queries, lane);   // D += scale e dO^T Q
        float out[1][C / 8][4];   // dW = dN A
        clear_tiles(out);
#pragma unroll
        for (int t = 0; t < C; t += 16) {
            float w[8];
            flatten(w, n[0][t / 8], n[0][t / 8 + 1]);
            multiply_lower<Gram>(out[0], Element::operand(w), keys + AT_A, t, lane);
        }
#pragma unroll
        for (int t = 0; t < C; t += 16) {
            const float2 e = read_starts(decay, t + (lane & 3) * 2), f = read_starts(decay, t + 8 + (lane & 3) * 2);
            float w[8];
            flatten(w, out[0][t / 8], out[0][t / 8 + 1]);
#pragma unroll
            for (int i = 0; i < 8; i++) w[i] *= -factor(e, f, i);
            weighted[t / 16] = Element::operand(w);
        }
        write_rows<C, KP, Keys>(D, weighted, LA_OWN ? keys + AT_R : keys, lane);   // D -= e dW K, or e dW R
        if (ADDS) continue;
        stage_rows<Element, Values, 1, C>(out, values, row, lane);
        store_rows<Values, C, 16, V>(own_rows(a.out, sequence, walk.head), a.out.token, values, walk.token_of(step), sequence.T, row, column, lane);
        if (APART) {
            divide_by_beta<C>(out, keys + AT_G + C * 4, lane);
            stage_rows<Element, Values, 1, C>(out, values, row, lane);
            store_rows<Values, C, 16, V>(own_rows(a.writes, sequence, walk.head), a.writes.token, values, walk.token_of(step), sequence.T, row, column, lane);
        }
    }
    copy_wait<0>();
    if (ADDS) D.template store<V, K>(a.end, walk.slot * a.segments + walk.segment, column + row, lane);
    else if (a.end.data && walk.segment == 0 && walk.head % a.end_group == 0) D.template store<V, K>(a.end, walk.slot / a.end_group, column + row, lane);
}
