// Forward of a head: outputs, the final state, and for a backward the state before every LA_EACH-th mini-batch.
#include "fast_weights/linear.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 2) linear(const __grid_constant__ LinearArguments a) {
    extern __shared__ __align__(16) char shared[];
    float *q = (float*)shared, *k = q + TILE, *v = k + TILE, *rates = v + TILE, *sums = rates + 2 * MOST;
    const Lane l = own_place();
    const i64 n = blockIdx.x / a.heads, h = blockIdx.x % a.heads;
    const i64 at = blockIdx.x;
    Weights w;
    float b[2];
    load_state(w, b, a.W + at * D * D, a.b + at * D, l);
    const float weight[2] = {a.weight[h * D + channel_of(l, 0)], a.weight[h * D + channel_of(l, 2)]},
                shift[2] = {a.shift[h * D + channel_of(l, 0)], a.shift[h * D + channel_of(l, 2)]};
    const int C = a.mini_batch, tiles = (a.T + C - 1) / C;
    float next[3][8], rate;
    const auto fetch_all = [&](int tile) {
        const int start = tile * C, count = min(C, a.T - start);
        fetch(next[0], a.q, n, h, start, count);
        fetch(next[1], a.k, n, h, start, count);
        fetch(next[2], a.v, n, h, start, count);
        rate = fetch_rate(a, n, h, start, count);
    };
    fetch_all(0);
    for (int tile = 0; tile < tiles; tile++) {
        const int start = tile * C, count = min(C, a.T - start);
        put(q, next[0]);
        put(k, next[1]);
        put(v, next[2]);
        if (threadIdx.x < 2 * MOST) rates[threadIdx.x] = rate;
        __syncthreads();
        if (tile + 1 < tiles) fetch_all(tile + 1);
        if (a.marks && tile % LA_EACH == 0) save_mark(a.marks + (at * a.groups + tile / LA_EACH) * MARK, w, b);
        Inner in;
        Rows o, m = {};
        set_bias(in.x, b);
        set_bias(o, b);
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            const OperandA own = operand(w[2 * i], w[2 * i + 1]);
            const Pair x = pair_of(q, 16 * i, l), y = pair_of(k, 16 * i, l);
            const OperandA rows = rows_of(x);
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const OperandB keys = column(y.f[c]);
                Element::multiply(in.x[c], own, keys);
                Element::multiply(o[c], own, column(x.f[c]));
                Element::multiply(m[c], rows, keys);
            }
        }
        gradient(in, k, v, weight, shift, a.eps, sums, l);
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                m[c][e] = factor(rates, l.g + 8 * (e >> 1), token_of(l, c, e), a.before) * (m[c][e] + 1.f);
        times_transposed(o, in.r, m);
        float over[4];
        standard(o, over, a.eps, sums + 4 * WARPS * MOST, l);
        const bool closes = count == C;
        if (!closes) save_state(w, b, a.end_A + at * D * D, a.end_bA + at * D, l);
        learn(w, b, in, k, rates, closes ? rates[MOST + C - 1] : 1.f, l);
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int to = token_of(l, c, e) * S + channel_of(l, e);
                v[to] = q[to] + weight[e >> 1] * o[c][e] + shift[e >> 1];
            }
        __syncthreads();
        save(v, a.out, n, h, start, count);
        __syncthreads();
        if (closes && tile + 1 == tiles) save_state(w, b, a.end_A + at * D * D, a.end_bA + at * D, l);
    }
    save_state(w, b, a.end_W + at * D * D, a.end_b + at * D, l);
}
