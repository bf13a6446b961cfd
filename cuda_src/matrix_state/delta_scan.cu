// The chain of the delta rule (delta.cuh), portable: the pass of scan.cu with two products more, from A of every chunk.
//
// A warp holds 16 value rows of the state. LA_OUTPUTS 1: out; 0: what each chunk writes, N, and the state before it;
// 2: what a segment adds to the state (the first one: makes of the initial state), and what it multiplies it by, which is what becomes
// of the rows of the identity without values.
#include "attention/chunk_state.cuh"
#include "attention/delta_scan.cuh"

constexpr int C = LA_C, K = LA_K, V = LA_V, WARPS = LA_WARPS, STAGES = LA_STAGES, THREADS = 32 * WARPS;
constexpr bool OUTPUTS = LA_OUTPUTS == 1, ADDS = LA_OUTPUTS == 2;
constexpr int KP = round_up(K, 16), VP = round_up(V, 16), VB = 16 * WARPS, PARTS = (V + VB - 1) / VB, ALL_PARTS = PARTS + ADDS * ((K + VB - 1) / VB);
constexpr bool APART = LA_DTYPE == 1 && LA_OUTPUTS == 0;   // what is written, over beta
typedef Tile<KP, Element::BYTES> Keys;
typedef Tile<VB, Element::BYTES> Values;
typedef Tile<C, Element::GRAM_BYTES> Gram;
constexpr int AT_V = C * Keys::ROW, AT_A = AT_V + C * Values::ROW, AT_G = AT_A + C * Gram::ROW, AT_Q = AT_G + (1 + APART) * C * 4;
constexpr int AT_R = AT_Q + OUTPUTS * C * Keys::ROW, STAGE = AT_R + LA_OWN * C * Keys::ROW;
constexpr int AT_GRAM = STAGES * STAGE, AT_DECAY = AT_GRAM + OUTPUTS * C * Gram::ROW;
static_assert(LA_SHARED == AT_DECAY + WARPS * Decay<C>::FLOATS * 4, "LA_SHARED is what the launch asks for");

extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS) scan(const __grid_constant__ DeltaScanArguments a) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const int thread = threadIdx.x, warp = thread >> 5, row = warp * 16;
    int lane = thread & 31;
    const Walk<C, ALL_PARTS, false> walk(a.offsets, a.T, a.heads, a.segments, a.chunks);
    const Sequence& sequence = walk.sequence;
    const bool identity = ADDS && walk.part >= PARTS;
    if (walk.segment > walk.last || (ADDS && (walk.segment == walk.last || (identity && walk.segment == 0)))) return;
    const char *q = OUTPUTS ? rows_of(a.q, sequence, walk.head) : nullptr, *k = rows_of(a.k, sequence, walk.head), *v = rows_of(a.v, sequence, walk.head);
    const char* r = LA_OWN ? rows_of(a.r, sequence, walk.head) : nullptr;
    const float* g = walk.gates(a.g.data, a.g.batch, a.g.token, a.g.head, a.g.group);
    const char* inverse = inverse_of<C>(a, sequence, walk.slot, walk.head, walk.first);
    const int column = (identity ? walk.part - PARTS : walk.part) * VB;
    auto load = [&](int step) {
        const u32 at = shared + step % STAGES * STAGE;
        const int token = walk.token_of(step);
        load_rows<Keys, C, THREADS, K>(at, k, a.k.token, token, sequence.T, 0, thread);
        if constexpr (OUTPUTS) load_rows<Keys, C, THREADS, K>(at + AT_Q, q, a.q.token, token, sequence.T, 0, thread);
        if constexpr (LA_OWN) load_rows<Keys, C, THREADS, K>(at + AT_R, r, a.r.token, token, sequence.T, 0, thread);
        if (!identity) load_rows<Values, C, THREADS, V>(at + AT_V, v, a.v.token, token, sequence.T, column, thread);
        load_inverse<Gram, C, THREADS>(at + AT_A, inverse + (i64)step * (C * C * Element::GRAM_BYTES), thread);
        load_gates<C, THREADS>(at + AT_G, g, a.g.token, token, sequence.T, thread);
        if (APART) load_numbers<C, THREADS>(at + AT_G + C * 4, betas_of(a.beta, sequence, walk.head), a.beta.token, token, sequence.T, thread);
    };
    StateRows<1, KP> S;
    S.clear();
    if (identity) S.each([&](int r, int c, float& y) { y = column + row + (lane >> 2) + r == (lane & 3) * 2 + c ? 1.f : 0.f; });
    else if (a.start.data && !(ADDS && walk.segment)) S.template load<V, K>(a.start, start_slot(a, walk.slot, walk.segment), column + row, lane);
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
        const float all = decay.set(keys + AT_G, 1.f, 1.f, 0.f, lane);
        __syncwarp();
        if (LA_OUTPUTS == 0 && column + row < VP)
            ChunkState<VP, KP>::store<Element>(a.states + chunk_number<C>(a, sequence, walk.slot, walk.head, walk.chunk_of(step)) * ChunkState<VP, KP>::SIZE, S.x[0], column + row, lane);
        float x[1][C / 8][4], out[1][C / 8][4];
        clear_tiles(x);
        read_state<C, KP, Keys>(x[0], S, LA_OWN ? keys + AT_R : keys, lane);   // S K^T, or S R^T
        if constexpr (OUTPUTS) {
            gram_matrix<Element, WARPS, C, KP, false, Keys, Gram>(queries, keys, shared + AT_GRAM, 0, decay, a.scale, warp, lane);
            clear_tiles(out);
            read_state<C, KP, Keys>(out[0], S, queries, lane);
#pragma unroll
            for (int i = 0; i < C / 8; i++) {
                const float2 e = decay.starts(i * 8 + (lane & 3) * 2);
                out[0][i][0] *= a.scale * e.x; out[0][i][1] *= a.scale * e.y; out[0][i][2] *= a.scale * e.x; out[0][i][3] *= a.scale * e.y;
            }
        }
        if (LA_DECAY) {
            const float carry = exp2_approx(all);
            S.each([&](int, int, float& y) { y *= carry; });
        }
        float n[1][C / 8][4];   // N = (V^T - e S K^T) A^T
        clear_tiles(n);
#pragma unroll
        for (int t = 0; t < C; t += 16) {
            const auto raw = load_a_columns<Element, Values>(values, t, row, lane);
            const float2 e = read_starts(decay, t + (lane & 3) * 2), f = read_starts(decay, t + 8 + (lane & 3) * 2);
            float w[8];
            flatten(w, x[0][t / 8], x[0][t / 8 + 1]);
#pragma unroll
            for (int i = 0; i < 8; i++) w[i] = (identity ? 0.f : Element::value(raw, i)) - factor(e, f, i) * w[i];
            const auto error = Element::operand(w);
#pragma unroll
            for (int i = t; i < C; i += 16) {
                typename Element::B b[2];
                load_b_rows<Element, Gram>(b, keys + AT_A, i, t, lane);
                Element::multiply(n[0][i / 8], error, b[0]);
                Element::multiply(n[0][i / 8 + 1], error, b[1]);
            }
        }
        if (OUTPUTS) __syncthreads();   // P is whole
        typename Element::A weighted[C / 16];
#pragma unroll
        for (int t = 0; t < C; t += 16) {
            float w[8];
            flatten(w, n[0][t / 8], n[0][t / 8 + 1]);
            if constexpr (OUTPUTS) {
                const auto plain = Element::operand(w);
#pragma unroll
                for (int i = t; i < C; i += 16) {   // out^T += N P^T
                    typename Element::B b[2];
                    load_b_rows<Element, Gram>(b, shared + AT_GRAM, i, t, lane);
                    Element::multiply(out[0][i / 8], plain, b[0]);
                    Element::multiply(out[0][i / 8 + 1], plain, b[1]);
                }
            }
            const float2 e = decay.ends(t + (lane & 3) * 2), f = decay.ends(t + 8 + (lane & 3) * 2);
#pragma unroll
            for (int i = 0; i < 8; i++) w[i] *= factor(e, f, i);
            weighted[t / 16] = Element::operand(w);
        }
        write_rows<C, KP, Keys>(S, weighted, keys, lane);   // S += (N d) K
        if (LA_OUTPUTS == 0) {
            if (APART) divide_by_beta<C>(n, keys + AT_G + C * 4, lane);
            stage_rows<Element, Values, 1, C>(n, values, row, lane);
            store_rows<Values, C, 16, V>(own_rows(a.writes, sequence, walk.head), a.writes.token, values, walk.token_of(step), sequence.T, row, column, lane);
        }
        if constexpr (OUTPUTS) {
            stage_rows<Element, Values, 1, C>(out, values, row, lane);
            store_rows<Values, C, 16, V>(own_rows(a.out, sequence, walk.head), a.out.token, values, walk.token_of(step), sequence.T, row, column, lane);
        }
    }
    copy_wait<0>();
    if (identity) S.template store<K, K>(a.transfers, walk.slot * a.segments + walk.segment, column + row, lane);
    else if (ADDS) S.template store<V, K>(a.end, walk.slot * a.segments + walk.segment, column + row, lane);
    else if (a.end.data && walk.is_end() && walk.head % a.end_group == 0) S.template store<V, K>(a.end, walk.slot / a.end_group, column + row, lane);
}
