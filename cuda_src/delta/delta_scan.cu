// The chain of the delta rule (delta.cuh), portable: the pass of scan.cu with two products more, from A of every chunk.
//
// A warp holds 16 LA_TILES value rows of the state. LA_OUTPUTS 1: out; 0: the new values of each chunk, U, and the state before it;
// 2: what a segment adds to the state (the first one: makes of the initial state), and what it multiplies it by, which is what becomes
// of the rows of the identity without values.
constexpr bool OUTPUTS = LA_OUTPUTS == 1, READS = OUTPUTS;
constexpr bool OVER_BETA = LA_DTYPE == 1 && LA_OUTPUTS == 0;   // what is written
#include "attention/delta_stage.cuh"

constexpr int RUN = LA_RUN;   // tokens whose outputs are made together
constexpr int ALL_PARTS = PARTS + ADDS * ((K + VB - 1) / VB);

// solve: U = (V^T - e S K^T) A^T, from the last tokens on: those errors are not needed again
LA_DEVICE void solve(float (&n)[TILES][C / 8][4], const Element::A (&error)[C / 16][TILES], u32 inverse, int lane) {
    clear_tiles(n);
#pragma unroll
    for (int i = C - 16; i >= 0; i -= 16)
#pragma unroll
        for (int t = 0; t <= i; t += 16) {
            typename Element::B b[2];
            load_b_rows<Element, Gram>(b, inverse, i, t, lane);
            multiply_pair<Element>(n, i / 8, error[t / 16], b);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS) scan(const __grid_constant__ DeltaScanArguments a) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const int thread = threadIdx.x, warp = thread >> 5, row = warp * 16 * TILES;
    int lane = thread & 31;
    const Traversal<C, ALL_PARTS, false> traversal(a.offsets, a.T, a.heads, a.segments, a.chunks);
    const Sequence& sequence = traversal.sequence;
    const bool identity = ADDS && traversal.part >= PARTS;
    if (traversal.segment > traversal.last || (ADDS && (traversal.segment == traversal.last || (identity && traversal.segment == 0)))) return;
    const char *q = OUTPUTS ? rows_of(a.q, sequence, traversal.head) : nullptr, *k = rows_of(a.k, sequence, traversal.head), *v = rows_of(a.v, sequence, traversal.head);
    const char* r = LA_SEPARATE_ERASE_KEY ? rows_of(a.r, sequence, traversal.head) : nullptr;
    const float* g = traversal.gates(a.g);
    const char* inverse = inverse_of<C>(a, sequence, traversal.slot, traversal.head, traversal.first);
    const int column = (identity ? traversal.part - PARTS : traversal.part) * VB;
    auto load = [&](int step) {
        const u32 at = shared + step % STAGES * STAGE;
        const int token = traversal.token_of(step);
        load_rows<Keys, C, THREADS, K>(at, k, a.k.token, token, sequence.T, 0, thread);
        if constexpr (LA_SEPARATE_ERASE_KEY) load_rows<Keys, C, THREADS, K>(at + AT_R, r, a.r.token, token, sequence.T, 0, thread);
        if (!identity) load_rows<Values, C, THREADS, V>(at + AT_V, v, a.v.token, token, sequence.T, column, thread);
        load_inverse<Gram, C, THREADS>(at + AT_A, inverse + (i64)step * (C * C * Element::GRAM_BYTES), thread);
        load_gates<C, THREADS>(at + AT_G, g, a.g.token, token, sequence.T, thread);
        if (OVER_BETA) load_numbers<C, THREADS>(at + AT_G + C * 4, betas_of(a.beta, sequence, traversal.head), a.beta.token, token, sequence.T, thread);
    };
    auto load_queries = [&](int step) {
        load_rows<Keys, C, THREADS, K>(shared + AT_Q + step % QUERY_BUFFERS * C * Keys::ROW, q, a.q.token, traversal.token_of(step), sequence.T, 0, thread);
    };
    StateRows<TILES, KP> S;
    S.clear();
    if (identity) S.each([&](int r, int c, float& y) { y = column + row + (lane >> 2) + r == (lane & 3) * 2 + c ? 1.f : 0.f; });
    else if (a.start.data && !(ADDS && traversal.segment)) S.template load<V, K>(a.start, start_slot(a, traversal.slot, traversal.segment), column + row, lane);
    if (STAGES > 1 && traversal.steps > 0) {
        load(0);
        if (OUTPUTS) load_queries(0);
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
            if (OUTPUTS) load_queries(step);
            copy_commit();
        }
        copy_wait<0>();
        __syncthreads();
        if (STAGES > 1 && step + 1 < traversal.steps) {
            load(step + 1);
            if (OUTPUTS && QUERY_BUFFERS > 1) load_queries(step + 1);
        }
        const float all = decay.set(keys + AT_G, 1.f, 1.f, 0.f, lane);
        __syncwarp();
        if (LA_OUTPUTS == 0) {
            char* to = a.states + chunk_number<C>(a, sequence, traversal.slot, traversal.head, traversal.chunk_of(step)) * ChunkState<VP, KP>::SIZE;
            store_chunk_state(S, to, column + row, lane);
        }
        if constexpr (OUTPUTS) gram_matrix<Element, WARPS, C, KP, false, Keys, Gram>(queries, keys, shared + AT_GRAM, 0, decay, a.scale, warp, lane);
        typename Element::A error[C / 16][TILES];   // V^T - e S K^T, or S R^T
        {
            float x[TILES][C / 8][4];
            clear_tiles(x);
            read_state<C, Keys>(x, S, LA_SEPARATE_ERASE_KEY ? keys + AT_R : keys, 0, lane);
#pragma unroll
            for (int t = 0; t < C; t += 16) {
                const float2 e = read_starts(decay, t + (lane & 3) * 2), f = read_starts(decay, t + 8 + (lane & 3) * 2);
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    const auto raw = load_a_columns<Element, Values>(values, t, row + 16 * m, lane);
                    float w[8];
                    flatten(w, x[m][t / 8], x[m][t / 8 + 1]);
#pragma unroll
                    for (int i = 0; i < 8; i++) w[i] = (identity ? 0.f : Element::value(raw, i)) - factor(e, f, i) * w[i];
                    error[t / 16][m] = Element::operand(w);
                }
            }
        }
        float n[TILES][C / 8][4];   // U, the new values
        solve(n, error, keys + AT_A, lane);
        float2 applied = {0.f, 0.f};   // log2 decay that S has seen of this chunk, in two floats
        if constexpr (OUTPUTS) {
            __syncthreads();   // P is whole
#pragma unroll 1
            for (int first = 0; first < C; first += RUN) {
                if (RUN < C) {   // S decays run by run: its operands are recomputed; of one state they would be held and spill
                    const float2 upto = first ? decay.upto(first - 1) : float2{0.f, 0.f};
                    const float carry = exp2_approx((upto.x - applied.x) + (upto.y - applied.y));
                    S.each([&](int, int, float& y) { y *= carry; });
                    applied = upto;
                }
                float out[TILES][RUN / 8][4];   // scale e S Q^T + U P^T
                clear_tiles(out);
                read_state<RUN, Keys>(out, S, queries, first, lane);
#pragma unroll
                for (int i = 0; i < RUN / 8; i++) {
                    const int at = first + i * 8 + (lane & 3) * 2;
                    float2 e;
                    if (RUN < C) {
                        float2 sums[2];
                        decay.upto(at, sums);
                        e = {exp2_approx((sums[0].x - applied.x) + (sums[0].y - applied.y)), exp2_approx((sums[1].x - applied.x) + (sums[1].y - applied.y))};
                    } else e = decay.starts(at);
#pragma unroll
                    for (int j = 0; j < TILES * 4; j++) out[j >> 2][i][j & 3] *= a.scale * (j & 1 ? e.y : e.x);
                }
#pragma unroll
                for (int t = 0; t < C; t += 16) {
                    if (t >= first + RUN) break;
                    typename Element::A own[TILES];
#pragma unroll
                    for (int m = 0; m < TILES; m++) own[m] = operand_of(n, m, t / 8);
#pragma unroll
                    for (int i = 0; i < RUN; i += 16) {
                        if (first + i < t) continue;
                        typename Element::B b[2];
                        load_b_rows<Element, Gram>(b, shared + AT_GRAM, first + i, t, lane);
                        multiply_pair<Element>(out, i / 8, own, b);
                    }
                }
                stage_rows<Element, Values, TILES, RUN>(out, values + first * Values::ROW, row, lane);
            }
            store_rows<Values, C, 16 * TILES, V>(own_rows(a.out, sequence, traversal.head), a.out.token, values, token, sequence.T, row, column, lane);
        }
        if (OUTPUTS && STAGES > QUERY_BUFFERS) {
            __syncthreads();   // the queries have been read
            if (step + 1 < traversal.steps) load_queries(step + 1);
        }
        copy_commit();
        if (LA_DECAY) {
            float left = all - applied.x;
            if (Element::EXACT && OUTPUTS && RUN < C) {
                const float2 upto = decay.upto(C - 1);
                left = (upto.x - applied.x) + (upto.y - applied.y);
            }
            const float carry = exp2_approx(left);
            S.each([&](int, int, float& y) { y *= carry; });
        }
        write_rows<C, Keys>(S, keys, lane, [&](int m, int t) {   // S += (U d) K
            return operand_of(n, m, t / 8, decay.ends(t + (lane & 3) * 2), decay.ends(t + 8 + (lane & 3) * 2));
        });
        if (LA_OUTPUTS == 0) {
            if (OVER_BETA) divide_by_beta<C>(n, keys + AT_G + C * 4, lane);
            stage_rows<Element, Values, TILES, C>(n, values, row, lane);
            store_rows<Values, C, 16 * TILES, V>(own_rows(a.writes, sequence, traversal.head), a.writes.token, values, token, sequence.T, row, column, lane);
        }
    }
    copy_wait<0>();
    if (identity) S.template store<K, K>(a.transfers, traversal.slot * a.segments + traversal.segment, column + row, lane);
    else if (ADDS) S.template store<V, K>(a.end, traversal.slot * a.segments + traversal.segment, column + row, lane);
    else store_end<V, K>(S, a, traversal, traversal.is_end(), column + row, lane);
}
