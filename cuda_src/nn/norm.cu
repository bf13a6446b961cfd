// Norms of rows, with weights, biases and gates, and their gradients; ops/norms.py and ops/gated_norm.py have the
// equations.
//
//     h = x, or x act(gate)      n = f (h - m)      y = n weight (act(gate)) + bias
//     f = 1 / sqrt(share |h - m|^2 + eps), share = 1 / D (LA_MEAN) or 1; m = mean h (LA_CENTRED), or 0
//     d = dy weight (act(gate))     dh = f (d - share <n, d> n - mean d)     dweight = sum dy (act(gate)) n
//
// Kinds: LA_DTYPE of x and y, LA_GATE, LA_WEIGHT and LA_BIAS (7: not given), LA_GRAD of dy. LA_ACT: 0 silu, 1 sigmoid;
// LA_FIRST: the gate comes before the norm. LA_ROWS rows of a lane are computed together.
#include "arguments/ops/NormArguments.cuh"
#include "nn/rows.cuh"
#include "ops/formulas.cuh"

constexpr bool GATED = LA_GATE != NONE, BEFORE = GATED && LA_FIRST, AFTER = GATED && !LA_FIRST;
constexpr bool WIDE = LA_LANES > 32;                // a block has one row
constexpr bool AHEAD = WIDE && PIECES <= 2;         // and loads the next one meanwhile
constexpr bool KEEPS = HELD && (BEFORE || !WIDE);   // h and d as numbers; else they are unpacked in every pass
constexpr Real SHARE = LA_MEAN ? (Real)1 / LA_D : (Real)1;

LA_DEVICE Real act(Real x) { return LA_ACT ? sigmoid(x) : silu(x); }
LA_DEVICE Real act_slope(Real x) { return LA_ACT ? sigmoid_slope(x) : silu_slope(x); }

struct Normed {   // a row, its mean and the two factors of f
    RowOf<LA_DTYPE> x;
    RowOf<LA_GATE> gate;
    Numbers h[KEEPS ? REGISTER_PIECES : 1];
    Real mean, factor, over;

    __device__ __forceinline__ void begin(const NormArguments& a, u32 row) {
        x.begin(row_at(a.x, row, a.inner));
        if constexpr (GATED) gate.begin(row_at(a.gate, row, a.inner));
        mean = 0;
        factor = 1;
    }
    __device__ __forceinline__ void compute(Numbers& to, int p, int column) const {   // h
        x.get(to, p, column);
        if constexpr (BEFORE) {
            Numbers g;
            gate.get(g, p, column);
#pragma unroll
            for (int i = 0; i < LA_PER; i++) to[i] *= act(g[i]);
        }
    }
    __device__ __forceinline__ void repack() {
        if constexpr (!KEEPS) {
            x.repack();
            gate.repack();
        }
    }
    __device__ __forceinline__ void unpack() {
        if constexpr (KEEPS) each_piece([&](int p, int column) { compute(h[p], p, column); });
    }
    template <class F> __device__ __forceinline__ void each(F f) const {   // f(piece, column, its numbers h)
        each_piece([&](int p, int column) {
            if constexpr (KEEPS) f(p, column, h[p]);
            else {
                Numbers now;
                compute(now, p, column);
                f(p, column, now);
            }
        });
    }
    __device__ __forceinline__ Real normed(Real h) const { return (h - mean) * factor * over; }
};

// sums over N rows of e^2, and in a backward of e d, e = factor (h - mean); d(numbers, row, piece, column)
template <int N, int M, class D> LA_DEVICE void products(Normed (&rows)[N], Real root, Real (&sums)[M], D d) {
#pragma unroll
    for (int r = 0; r < N; r++) {
        Real square = 0, along = 0;
        rows[r].each([&](int p, int column, const Numbers& h) {
            Numbers now;
            if constexpr (M > N) d(now, r, p, column);
#pragma unroll
            for (int i = 0; i < LA_PER; i++) {
                const Real e = (h[i] - rows[r].mean) * rows[r].factor;
                square += e * e;
                if constexpr (M > N) along += e * now[i];
            }
        });
        sums[r] = square;
        if constexpr (M > N) sums[N + r] = along;
    }
    combine(sums, plus);
#pragma unroll
    for (int r = 0; r < N; r++) sums[r] = (sums[r] + root * rows[r].factor * (root * rows[r].factor)) * SHARE;
}

// mean, factor and over of N rows; the factor is a power of 2 where squares would vanish or overflow. In a backward
// share <n, d> of each, and the means of d
template <int N, int M, class D>
LA_DEVICE void measure(Normed (&rows)[N], Real root, Real (&sums)[M], Real (&means)[M], D d) {
    constexpr Real LEAST = LA_DOUBLE ? (Real)0x1p-900 : (Real)0x1p-100f,
                   MOST = LA_DOUBLE ? (Real)0x1p900 : (Real)0x1p100f,
                   DOWN = LA_DOUBLE ? (Real)0x1p-600 : (Real)0x1p-75f;
    if constexpr (LA_CENTRED) {
#pragma unroll
        for (int r = 0; r < N; r++) {
            Real total = 0, other = 0;
            rows[r].each([&](int p, int column, const Numbers& h) {
                Numbers now;
                if constexpr (M > N) d(now, r, p, column);
#pragma unroll
                for (int i = 0; i < LA_PER; i++) {
                    total += h[i];
                    if constexpr (M > N) other += now[i];
                }
            });
            means[r] = total;
            if constexpr (M > N) means[N + r] = other;
        }
        combine(means, plus);
#pragma unroll
        for (int m = 0; m < M; m++) means[m] = means[m] / LA_D;
#pragma unroll
        for (int r = 0; r < N; r++) {
            rows[r].mean = means[r];
            rows[r].repack();
        }
    }
    products(rows, root, sums, d);
    bool odd = false;
#pragma unroll
    for (int r = 0; r < N; r++) {
        if (sums[r] < LEAST) rows[r].factor = MOST;
        else if (sums[r] > MOST) rows[r].factor = DOWN;
        odd |= rows[r].factor != 1;
    }
    if (__any_sync(0xffffffffu, odd)) {   // all lanes take part in the sums
#pragma unroll
        for (int r = 0; r < N; r++) rows[r].repack();
        products(rows, root, sums, d);
#pragma unroll
        for (int r = 0; r < N; r++)
            if (sums[r] == 0) rows[r].factor = 1;
    }
#pragma unroll
    for (int r = 0; r < N; r++) {
        rows[r].over = sums[r] == 0 ? (Real)1 : 1 / sqrt(sums[r]);   // NaN stays NaN
        if constexpr (M > N) sums[N + r] *= rows[r].over * SHARE;
    }
}

// a row of weights or biases; `otherwise` where none is given
template <int KIND> struct Parameter {
    RowOf<KIND> row;
    __device__ __forceinline__ void begin(const char* from, u32 n) {
        if constexpr (KIND == NONE) return;
        from += (i64)n * LA_D * bytes_of(KIND);
        if constexpr (WIDE) row.at = from;
        else row.begin(from);
    }
    __device__ __forceinline__ void get(Numbers& x, int p, int column, Real otherwise) const {
        if constexpr (WIDE && KIND != NONE) load_elements<KIND, LA_PER>(x, row.at + column * bytes_of(KIND));
        else row.get(x, p, column);
        if constexpr (KIND == NONE)
#pragma unroll
            for (int i = 0; i < LA_PER; i++) x[i] = otherwise;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) row_norm(const __grid_constant__ NormArguments a) {
    const u32 first = (blockIdx.x * BESIDE + row_of_block()) * LA_ROWS;
    Normed rows[LA_ROWS];
#pragma unroll
    for (int r = 0; r < LA_ROWS; r++) rows[r].begin(a, min(first + r, a.rows - 1));
#pragma unroll
    for (int r = 0; r < LA_ROWS; r++) rows[r].unpack();
    Real sums[LA_ROWS], means[LA_ROWS];
    measure(rows, (Real)a.root, sums, means, [](Numbers&, int, int, int) {});
#pragma unroll
    for (int r = 0; r < LA_ROWS; r++) {
        if (first + r >= a.rows) return;
        const u32 group = a.groups == 1 ? 0 : (first + r) % a.groups;
        Parameter<LA_WEIGHT> weights;
        Parameter<LA_BIAS> biases;
        weights.begin(a.weight, group);
        biases.begin(a.bias, group);
        rows[r].each([&](int p, int column, const Numbers& h) {
            Numbers y, weight, bias, g;
            weights.get(weight, p, column, 1);
            biases.get(bias, p, column, 0);
            if constexpr (AFTER) rows[r].gate.get(g, p, column);
#pragma unroll
            for (int i = 0; i < LA_PER; i++) {
                y[i] = rows[r].normed(h[i]) * weight[i];
                if constexpr (AFTER) y[i] *= act(g[i]);
                y[i] += bias[i];
            }
            store_elements<LA_DTYPE, LA_PER>(a.y + ((i64)(first + r) * LA_D + column) * bytes_of(LA_DTYPE), y);
        });
    }
}

constexpr bool SUMMED = LA_WEIGHT != NONE, ADDED = LA_BIAS != NONE;

// what a row adds to a sum over rows: in registers, or in the memory of this block
LA_DEVICE void add_row(Numbers (&sums)[REGISTER_PIECES], Real* memory, bool begins, int p, int column,
                       const Numbers& x) {
    if constexpr (HELD) {
#pragma unroll
        for (int i = 0; i < LA_PER; i++) sums[p][i] += x[i];
    } else
#pragma unroll
        for (int i = 0; i < LA_PER; i++) memory[column + i] = begins ? x[i] : memory[column + i] + x[i];
}
// the sums over the rows side by side in a block
LA_DEVICE void store_sums(const Numbers (&sums)[REGISTER_PIECES], Real* to) {
    if constexpr (!HELD) return;
    __shared__ Real beside[BESIDE > 1 ? THREADS : 1][LA_PER];
#pragma unroll
    for (int p = 0; p < REGISTER_PIECES; p++) {
        const int column = (p * LA_LANES + lane_of_row()) * LA_PER;
        Numbers x;
#pragma unroll
        for (int i = 0; i < LA_PER; i++) x[i] = sums[p][i];
        if constexpr (BESIDE > 1) {
            __syncthreads();
#pragma unroll
            for (int i = 0; i < LA_PER; i++) beside[threadIdx.x][i] = x[i];
            __syncthreads();
            if (row_of_block() == 0)
                for (int n = 1; n < BESIDE; n++)
#pragma unroll
                    for (int i = 0; i < LA_PER; i++) x[i] += beside[n * LA_LANES + threadIdx.x][i];
        }
        if (row_of_block() == 0 && column < LA_D)
#pragma unroll
            for (int i = 0; i < LA_PER; i++) to[column + i] = x[i];
    }
}

// A block has `block` rows of one of `groups` groups, every groups-th row of the array.
extern "C" __global__ void __launch_bounds__(THREADS) row_norm_vjp(const __grid_constant__ NormArguments a) {
    const u32 group = blockIdx.x % a.groups, part = blockIdx.x / a.groups, count = a.rows / a.groups;
    const u32 begin = part * a.block, end = min(begin + a.block, count);
    Real* const sums_weight = SUMMED ? (Real*)a.dweight + blockIdx.x * (i64)LA_D : nullptr;
    Real* const sums_bias = ADDED ? (Real*)a.dbias + blockIdx.x * (i64)LA_D : nullptr;
    Numbers dweight[REGISTER_PIECES] = {}, dbias[REGISTER_PIECES] = {};
    Parameter<LA_WEIGHT> weights;
    weights.begin(a.weight, group);
    Normed rows[LA_ROWS], next[LA_ROWS];
    RowOf<LA_GRAD> grads[LA_ROWS], next_grads[LA_ROWS];
    const auto load = [&](Normed(&rows)[LA_ROWS], RowOf<LA_GRAD>(&grads)[LA_ROWS], u32 first) {
#pragma unroll
        for (int r = 0; r < LA_ROWS; r++) {
            const u32 row = min(first + r, end - 1) * a.groups + group;
            rows[r].begin(a, row);
            grads[r].begin(row_at(a.dy, row, a.inner));
        }
    };
    const auto cotangent = [&](Numbers& d, int r, int p, int column) {
        Numbers weight, g;
        grads[r].get(d, p, column);
        weights.get(weight, p, column, 1);
        if constexpr (AFTER) rows[r].gate.get(g, p, column);
#pragma unroll
        for (int i = 0; i < LA_PER; i++) {
            d[i] *= weight[i];
            if constexpr (AFTER) d[i] *= act(g[i]);
        }
    };
    if constexpr (AHEAD) load(next, next_grads, begin);
    for (u32 n = begin; n < end; n += BESIDE * LA_ROWS) {   // all lanes take part in the sums
        const u32 first = n + row_of_block() * LA_ROWS;
        if constexpr (AHEAD) {
#pragma unroll
            for (int r = 0; r < LA_ROWS; r++) {
                rows[r] = next[r];
                grads[r] = next_grads[r];
            }
            if (n + LA_ROWS < end) load(next, next_grads, n + LA_ROWS);
        } else load(rows, grads, first);
#pragma unroll
        for (int r = 0; r < LA_ROWS; r++) rows[r].unpack();
        Numbers held[LA_ROWS][KEEPS ? REGISTER_PIECES : 1];
        if constexpr (KEEPS)
#pragma unroll
            for (int r = 0; r < LA_ROWS; r++)
                each_piece([&](int p, int column) { cotangent(held[r][p], r, p, column); });
        const auto d_of = [&](Numbers& d, int r, int p, int column) {
            if constexpr (KEEPS)
#pragma unroll
                for (int i = 0; i < LA_PER; i++) d[i] = held[r][p][i];
            else cotangent(d, r, p, column);
        };
        Real sums[2 * LA_ROWS], means[2 * LA_ROWS] = {};
        measure(rows, (Real)a.root, sums, means, d_of);
#pragma unroll
        for (int r = 0; r < LA_ROWS; r++) {
            rows[r].repack();
            if constexpr (!KEEPS) grads[r].repack();
            if (first + r >= end) break;
            const u32 row = (first + r) * a.groups + group;
            rows[r].each([&](int p, int column, const Numbers& h) {
                Numbers dx, dgate, dy, weight, g, x, more;
                d_of(dx, r, p, column);
                grads[r].get(dy, p, column);
                weights.get(weight, p, column, 1);
                if constexpr (GATED) rows[r].gate.get(g, p, column);
                if constexpr (BEFORE) rows[r].x.get(x, p, column);
#pragma unroll
                for (int i = 0; i < LA_PER; i++) {
                    const Real n = rows[r].normed(h[i]);
                    dx[i] = (dx[i] - means[LA_ROWS + r] - n * sums[LA_ROWS + r]) * rows[r].factor * rows[r].over;
                    more[i] = dy[i] * n;
                    if constexpr (AFTER) {
                        dgate[i] = more[i] * weight[i] * act_slope(g[i]);
                        more[i] *= act(g[i]);
                    }
                    if constexpr (BEFORE) {
                        dgate[i] = dx[i] * x[i] * act_slope(g[i]);
                        dx[i] *= act(g[i]);
                    }
                }
                store_elements<LA_DTYPE, LA_PER>(a.y + ((i64)row * LA_D + column) * bytes_of(LA_DTYPE), dx);
                if constexpr (GATED)
                    store_elements<LA_GATE, LA_PER>(a.dgate + ((i64)row * LA_D + column) * bytes_of(LA_GATE), dgate);
                const bool begins = first + r == begin;
                if constexpr (SUMMED) add_row(dweight, sums_weight, begins, p, column, more);
                if constexpr (ADDED) add_row(dbias, sums_bias, begins, p, column, dy);
            });
        }
    }
    if constexpr (SUMMED) store_sums(dweight, sums_weight);
    if constexpr (ADDED) store_sums(dbias, sums_bias);
}
