// The chain of the delta rule (delta.cuh), portable: the pass of scan.cu with two products more, from A of every chunk.
//
// A warp holds 16 LA_TILES value rows of the state. LA_OUTPUTS 1: out; 0: the new values of each chunk, U, and the
// state before it; 2: the segment's offset of the state (the first one: the state after it), and the matrix that it
// multiplies the state by, which is the image of the identity without values.
constexpr bool OUTPUTS = LA_OUTPUTS == 1, READS = OUTPUTS;
constexpr bool OVER_BETA = LA_DTYPE == 1 && LA_OUTPUTS == 0;   // written values
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

typedef Traversal<C, ALL_PARTS, false> ThisTraversal;

struct Chain : ChunkScan<ThisTraversal> {
    using ChunkScan::ChunkScan;

    __device__ __forceinline__ void load_first(StateRows<TILES, KP>& S) const {
        S.clear();
        if (!has_values)
            S.each(
                [&](int r, int c, float& y) { y = column + row + (lane >> 2) + r == (lane & 3) * 2 + c ? 1.f : 0.f; });
        else if (a.start.data && !(ADDS && traversal.segment))
            S.template load<V, K>(a.start, start_slot(a, traversal.slot, traversal.segment), column + row, lane);
    }
    // operands V^T - e S K^T, or S R^T
    __device__ __forceinline__ void make_errors(Element::A (&error)[C / 16][TILES], const StateRows<TILES, KP>& S,
                                                int step) const {
        float x[TILES][C / 8][4];
        clear_tiles(x);
        read_state<C, Keys>(x, S, erase_keys_at(step), 0, lane);
#pragma unroll
        for (int t = 0; t < C; t += 16) {
            const float2 e = read_starts(decay, t + (lane & 3) * 2), f = read_starts(decay, t + 8 + (lane & 3) * 2);
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                const auto raw = load_a_columns<Element, Values>(values_at(step), t, row + 16 * m, lane);
                float w[8];
                flatten(w, x[m][t / 8], x[m][t / 8 + 1]);
#pragma unroll
                for (int i = 0; i < 8; i++) w[i] = (has_values ? Element::value(raw, i) : 0.f) - factor(e, f, i) * w[i];
                error[t / 16][m] = Element::operand(w);
            }
        }
    }
    // read: scale e S Q^T of RUN tokens; applied: log2 decay that S has seen of this chunk, in two floats
    __device__ __forceinline__ void read_run(float (&out)[TILES][RUN / 8][4], const StateRows<TILES, KP>& S,
                                             const float2& applied, u32 queries, int first) const {
        clear_tiles(out);
        read_state<RUN, Keys>(out, S, queries, first, lane);
#pragma unroll
        for (int i = 0; i < RUN / 8; i++) {
            const int at = first + i * 8 + (lane & 3) * 2;
            float2 e;
            if (RUN < C) {
                float2 sums[2];
                decay.upto(at, sums);
                e = {exp2_approx((sums[0].x - applied.x) + (sums[0].y - applied.y)),
                     exp2_approx((sums[1].x - applied.x) + (sums[1].y - applied.y))};
            } else e = decay.starts(at);
#pragma unroll
            for (int j = 0; j < TILES * 4; j++) out[j >> 2][i][j & 3] *= a.scale * (j & 1 ? e.y : e.x);
        }
    }
    // out += U P^T for RUN tokens
    __device__ __forceinline__ void accumulate_PU(float (&out)[TILES][RUN / 8][4], const float (&n)[TILES][C / 8][4],
                                                  int first) const {
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
    }
    // out, run by run; returns the log2 decay that S has seen
    __device__ __forceinline__ float2 make_outputs(StateRows<TILES, KP>& S, const float (&n)[TILES][C / 8][4],
                                                   int step) const {
        float2 applied = {0.f, 0.f};
        __syncthreads();   // P is whole
#pragma unroll 1
        for (int first = 0; first < C; first += RUN) {
            if (RUN <
                C) {   // S decays run by run: its operands are recomputed; of one state they would be held and spill
                const float2 upto = first ? decay.upto(first - 1) : float2{0.f, 0.f};
                const float carry = exp2_approx((upto.x - applied.x) + (upto.y - applied.y));
                S.each([&](int, int, float& y) { y *= carry; });
                applied = upto;
            }
            float out[TILES][RUN / 8][4];
            read_run(out, S, applied, queries_at(step), first);
            accumulate_PU(out, n, first);
            stage_rows<Element, Values, TILES, RUN>(out, values_at(step) + first * Values::ROW, row, lane);
        }
        store_staged(a.out, step);
        return applied;
    }
    // S <- e_last S, of which it has seen `applied`; all: the sum of the chunk
    __device__ __forceinline__ void carry(StateRows<TILES, KP>& S, float all, const float2& applied) const {
        if (!LA_DECAY) return;
        float left = all - applied.x;
        if (Element::EXACT && OUTPUTS && RUN < C) {
            const float2 upto = decay.upto(C - 1);
            left = (upto.x - applied.x) + (upto.y - applied.y);
        }
        const float carry = exp2_approx(left);
        S.each([&](int, int, float& y) { y *= carry; });
    }
    __device__ __forceinline__ void run_chunk(StateRows<TILES, KP>& S, int step) {
        await(step);
        const float all = decay.set(keys_at(step) + AT_G, 1.f, 1.f, 0.f, lane);
        __syncwarp();
        if (LA_OUTPUTS == 0) store_state(S, step);
        if constexpr (OUTPUTS) make_gram(step);
        typename Element::A error[C / 16][TILES];
        make_errors(error, S, step);
        float n[TILES][C / 8][4];   // U, the new values
        solve(n, error, keys_at(step) + AT_A, lane);
        float2 applied = {0.f, 0.f};
        if constexpr (OUTPUTS) applied = make_outputs(S, n, step);
        release_queries(step);
        carry(S, all, applied);
        write_rows<C, Keys>(S, keys_at(step), lane, [&](int m, int t) {   // S += (U d) K
            return operand_of(n, m, t / 8, decay.ends(t + (lane & 3) * 2), decay.ends(t + 8 + (lane & 3) * 2));
        });
        if (LA_OUTPUTS == 0) {
            if (OVER_BETA) divide_by_beta<C>(n, keys_at(step) + AT_G + C * 4, lane);
            store_values(n, a.writes, step);
        }
    }
    __device__ __forceinline__ void store_last(StateRows<TILES, KP>& S) const {
        const i64 slot = traversal.slot * a.segments + traversal.segment;
        if (!has_values) S.template store<K, K>(a.transfers, slot, column + row, lane);
        else if (ADDS) S.template store<V, K>(a.end, slot, column + row, lane);
        else store_end<V, K>(S, a, traversal, traversal.is_end(), column + row, lane);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS) scan(const __grid_constant__ DeltaScanArguments a) {
    extern __shared__ __align__(128) unsigned char memory[];
    const ThisTraversal traversal(a.offsets, a.T, a.heads, a.segments, a.chunks);
    const bool identity = ADDS && traversal.part >= PARTS;
    if (traversal.segment > traversal.last ||
        (ADDS && (traversal.segment == traversal.last || (identity && traversal.segment == 0))))
        return;
    Chain chain(a, traversal, shared_address(memory), (identity ? traversal.part - PARTS : traversal.part) * VB,
                !identity);
    StateRows<TILES, KP> S;
    chain.load_first(S);
    chain.begin_loads();
    for (int step = 0; step < traversal.steps; step++) chain.run_chunk(S, step);
    copy_wait<0>();
    chain.store_last(S);
}
