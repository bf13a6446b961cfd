// The chain of the delta rule backward, portable: dS, the gradient of the transposed state, and dv, as delta_reverse.cu
// has them.
//
// LA_OUTPUTS 1: dv, and dS after every chunk; 2: the segment's offset of dS (the last one: from the final state's
// gradient).
constexpr bool READS = true, OVER_BETA = LA_DTYPE == 1 && LA_OUTPUTS != 2;   // dv
#include "attention/delta_stage.cuh"

// rows t .. t + 15 of a lower triangular tile, columns from j on, times the operands of 16 tokens
template <class Gram, int N> LA_DEVICE void multiply_lower(float (&c)[TILES][N][4], int to,
                                                           const typename Element::A (&w)[TILES], u32 x, int t, int j,
                                                           int lane) {
    typename Element::B b[2];
    load_b_columns<Element, Gram>(b, x, t, j, lane);
    multiply_pair<Element>(c, to, w, b);
}

typedef Traversal<C, PARTS, true> ThisTraversal;

struct Chain : ChunkScan<ThisTraversal> {
    using ChunkScan::ChunkScan;

    __device__ __forceinline__ void load_first(StateRows<TILES, KP>& S) const {
        S.clear();
        if (a.start.data && !(ADDS && traversal.segment < traversal.last))
            S.template load<V, K>(a.start, start_slot(a, traversal.slot, traversal.segment), column + row, lane);
    }
    // read: dN = d dS K^T + dO^T P; dS <- e_last dS
    __device__ __forceinline__ void make_dN(float (&n)[TILES][C / 8][4], StateRows<TILES, KP>& S, float all,
                                            int step) const {
        clear_tiles(n);
        read_state<C, Keys>(n, S, keys_at(step), 0, lane);
#pragma unroll
        for (int i = 0; i < C / 8; i++) {
            const float2 e = decay.ends(i * 8 + (lane & 3) * 2);
#pragma unroll
            for (int j = 0; j < TILES * 4; j++) n[j >> 2][i][j & 3] *= j & 1 ? e.y : e.x;
        }
        if (LA_DECAY) {
            const float carry = exp2_approx(all);
            S.each([&](int, int, float& y) { y *= carry; });
        }
        __syncthreads();   // P is whole
#pragma unroll
        for (int t = 0; t < C; t += 16) {
            typename Element::A own[TILES];
#pragma unroll
            for (int m = 0; m < TILES; m++)
                own[m] = Element::operand(load_a_columns<Element, Values>(values_at(step), t, row + 16 * m, lane));
#pragma unroll
            for (int j = 0; j <= t; j += 16) multiply_lower<Gram>(n, j / 8, own, shared + AT_GRAM, t, j, lane);
        }
    }
    // write: dS += scale e dO^T Q
    __device__ __forceinline__ void write_queries(StateRows<TILES, KP>& S, int step) const {
        const u32 values = values_at(step);
        write_rows<C, Keys>(S, queries_at(step), lane, [&](int m, int t) {
            const auto raw = load_a_columns<Element, Values>(values, t, row + 16 * m, lane);
            const float2 e = decay.starts(t + (lane & 3) * 2), f = decay.starts(t + 8 + (lane & 3) * 2);
            float w[8];
#pragma unroll
            for (int i = 0; i < 8; i++) w[i] = a.scale * factor(e, f, i) * Element::value(raw, i);
            return Element::operand(w);
        });
    }
    // solve: dW = dN A in dN's place, from the first tokens on: their dN is not needed again
    __device__ __forceinline__ void solve(float (&n)[TILES][C / 8][4], u32 inverse) const {
#pragma unroll
        for (int j = 0; j < C; j += 16) {
            float w[TILES][2][4];
            clear_tiles(w);
#pragma unroll
            for (int t = j; t < C; t += 16) {
                typename Element::A own[TILES];
#pragma unroll
                for (int m = 0; m < TILES; m++) own[m] = operand_of(n, m, t / 8);
                multiply_lower<Gram>(w, 0, own, inverse, t, j, lane);
            }
#pragma unroll
            for (int i = 0; i < TILES * 8; i++)
                n[i >> 3][j / 8 + ((i >> 2) & 1)][i & 3] = w[i >> 3][(i >> 2) & 1][i & 3];
        }
    }
    __device__ __forceinline__ void run_chunk(StateRows<TILES, KP>& S, int step) {
        await(step);
        if (!ADDS) store_state(S, step);
        const float all = decay.set(keys_at(step) + AT_G, 1.f, 1.f, 0.f, lane);
        __syncwarp();
        make_gram(step);
        float n[TILES][C / 8][4];
        make_dN(n, S, all, step);
        write_queries(S, step);
        release_queries(step);
        solve(n, keys_at(step) + AT_A);
        write_rows<C, Keys>(S, erase_keys_at(step), lane, [&](int m, int t) {   // dS -= e dW K, or e dW R
            return operand_of(n, m, t / 8, read_starts(decay, t + (lane & 3) * 2),
                              read_starts(decay, t + 8 + (lane & 3) * 2), -1.f);
        });
        if (ADDS) return;
        store_values(n, a.out, step);
        if (OVER_BETA) {
            divide_by_beta<C>(n, keys_at(step) + AT_G + C * 4, lane);
            store_values(n, a.writes, step);
        }
    }
    __device__ __forceinline__ void store_last(StateRows<TILES, KP>& S) const {
        if (ADDS) S.template store<V, K>(a.end, traversal.slot * a.segments + traversal.segment, column + row, lane);
        else store_end<V, K>(S, a, traversal, traversal.segment == 0, column + row, lane);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS) reverse(const __grid_constant__ DeltaScanArguments a) {
    extern __shared__ __align__(128) unsigned char memory[];
    const ThisTraversal traversal(a.offsets, a.T, a.heads, a.segments, a.chunks);
    if (traversal.segment > traversal.last || (ADDS && traversal.segment == 0)) return;
    Chain chain(a, traversal, shared_address(memory), traversal.part * VB, true);
    StateRows<TILES, KP> S;   // dS
    chain.load_first(S);
    chain.begin_loads();
    for (int step = 0; step < traversal.steps; step++) chain.run_chunk(S, step);
    copy_wait<0>();
    chain.store_last(S);
}
