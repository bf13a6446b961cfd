// The softmax of rows, and losses of rows of logits; ops/softmax_rows.py has the equations.
//
//     lse = m + log sum e^{x - m}, m = max x      y = e^{x - lse}      dx = y (dy - <y, dy>)
//     loss = lse - (1 - s) x_label - s mean x + z lse^2
//     dx = d (y (1 + 2 z lse) - (1 - s) [label] - s / D)
//
// Kinds: LA_DTYPE of x and of results of rows, LA_GRAD of dy. A label `ignored` has no loss; that
// of a label that is no column is NaN. LA_SAVED: the lse of the forward is given.
#include "arguments/ops/SoftmaxArguments.cuh"
#include "nn/rows.cuh"
#include "ops/formulas.cuh"

#define INFINITE (Real) __int_as_float(0x7f800000)
// what is taken off exponents: the largest number, 0 where there is none
LA_DEVICE Real shift(Real largest) { return largest > -INFINITE ? largest : (Real)0; }

struct Shares {   // a row, its largest number (0 for none) and the sum of e^{x - m}
    RowOf<LA_DTYPE> x;
    Real m, total, sum;
    __device__ __forceinline__ void begin(const SoftmaxArguments& a, u32 row, bool summed) {
        x.begin(row_at(a.x, row, a.inner));
        Real found[1] = {-INFINITE}, totals[2] = {0, 0};
        Numbers now;
        if constexpr (HELD) {
            each_piece([&](int p, int column) {
                x.get(now, p, column);
#pragma unroll
                for (int i = 0; i < LA_PER; i++) found[0] = fmax(found[0], now[i]);
            });
            combine(found, most);
            m = shift(found[0]);
        }
        each_piece([&](int p, int column) {
            x.get(now, p, column);
            if constexpr (!HELD) {   // of the pieces so far
                const Real before = found[0];
#pragma unroll
                for (int i = 0; i < LA_PER; i++) found[0] = fmax(found[0], now[i]);
                m = shift(found[0]);
                if (found[0] > before) totals[0] *= exp_of(before - m);
            }
#pragma unroll
            for (int i = 0; i < LA_PER; i++) {
                totals[0] += exp_of(now[i] - m);
                if (summed) totals[1] += now[i];
            }
        });
        if constexpr (!HELD) {
            const Real own = shift(found[0]);
            combine(found, most);
            m = shift(found[0]);
            if (totals[0] != 0) totals[0] *= exp_of(own - m);
        }
        combine(totals, plus);
        total = totals[0];
        sum = totals[1];
    }
    __device__ __forceinline__ Real lse() const { return m + log(total); }
};
LA_DEVICE u32 first_row() { return blockIdx.x * BESIDE + row_of_block(); }
LA_DEVICE char* dense(const SoftmaxArguments& a, u32 row, int column) {
    return a.y + ((i64)row * LA_D + column) * bytes_of(LA_DTYPE);
}

extern "C" __global__ void __launch_bounds__(THREADS) softmax(const __grid_constant__ SoftmaxArguments a) {
    const u32 row = first_row();
    Shares s;
    s.begin(a, min(row, a.rows - 1), false);
    if (row >= a.rows) return;
    const Real over = s.total == 0 ? (Real)1 : 1 / s.total;
    each_piece([&](int p, int column) {
        Numbers x;
        s.x.get(x, p, column);
#pragma unroll
        for (int i = 0; i < LA_PER; i++) x[i] = exp_of(x[i] - s.m) * over;
        store_elements<LA_DTYPE, LA_PER>(dense(a, row, column), x);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS) softmax_vjp(const __grid_constant__ SoftmaxArguments a) {
    const u32 row = first_row(), from = min(row, a.rows - 1);
    RowOf<LA_GRAD> grads;
    grads.begin(row_at(a.dy, from, a.inner));
    Shares s;
    s.begin(a, from, false);
    const Real over = s.total == 0 ? (Real)1 : 1 / s.total;
    Real along[1] = {0};
    Numbers x, dy;
    each_piece([&](int p, int column) {
        s.x.get(x, p, column);
        grads.get(dy, p, column);
#pragma unroll
        for (int i = 0; i < LA_PER; i++) along[0] += exp_of(x[i] - s.m) * over * dy[i];
    });
    combine(along, plus);
    if (row >= a.rows) return;
    each_piece([&](int p, int column) {
        s.x.get(x, p, column);
        grads.get(dy, p, column);
#pragma unroll
        for (int i = 0; i < LA_PER; i++) x[i] = exp_of(x[i] - s.m) * over * (dy[i] - along[0]);
        store_elements<LA_DTYPE, LA_PER>(dense(a, row, column), x);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS) cross_entropy(const __grid_constant__ SoftmaxArguments a) {
    const u32 row = first_row(), from = min(row, a.rows - 1);
    const i64 label = a.labels[from];
    Shares s;
    s.begin(a, from, true);
    if (row >= a.rows || lane_of_row()) return;
    const Real lse = s.lse(), smoothing = (Real)a.smoothing;
    Real loss = 0;
    if (label != a.ignored) {
        const bool known = label >= 0 && label < LA_D;
        const Real own = known ? (Real)element<LA_DTYPE>(s.x.at, label) : INFINITE - INFINITE;
        loss = lse + (Real)a.z * lse * lse - (1 - smoothing) * own;
        if (smoothing != 0) loss -= smoothing * (s.sum / LA_D);
    }
    ((Real*)a.loss)[row] = loss;
    ((Real*)a.lse)[row] = lse;
}

// Sums over all rows, y: the number of losses, labels that are no column, the total and the mean of losses; one block
template <int N> LA_DEVICE void sum_of_block(Real (&x)[N]) {   // of 1024 threads, in thread 0
    __shared__ Real parts[N][1024];
#pragma unroll
    for (int n = 0; n < N; n++) parts[n][threadIdx.x] = x[n];
    for (u32 d = 512; d; d >>= 1) {
        __syncthreads();
        if (threadIdx.x < d)
#pragma unroll
            for (int n = 0; n < N; n++) parts[n][threadIdx.x] += parts[n][threadIdx.x + d];
    }
#pragma unroll
    for (int n = 0; n < N; n++) x[n] = parts[n][threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(1024) label_sums(const __grid_constant__ SoftmaxArguments a) {
    Real own[2] = {0, 0};
    for (u32 row = threadIdx.x; row < a.rows; row += 1024) {
        const i64 label = a.labels[row];
        own[0] += label != a.ignored;
        own[1] += label != a.ignored && (label < 0 || label >= LA_D);
    }
    sum_of_block(own);
    if (threadIdx.x) return;
    ((Real*)a.y)[0] = own[0];
    ((Real*)a.y)[1] = own[1];
}
extern "C" __global__ void __launch_bounds__(1024) loss_sums(const __grid_constant__ SoftmaxArguments a) {
    Real own[1] = {0};
    for (u32 row = threadIdx.x; row < a.rows; row += 1024) own[0] += ((const Real*)a.loss)[row];
    sum_of_block(own);
    if (threadIdx.x) return;
    ((Real*)a.y)[2] = own[0];
    ((Real*)a.y)[3] = own[0] / max(((const Real*)a.y)[0], (Real)1);
}

// lse: of the forward, or null
extern "C" __global__ void __launch_bounds__(THREADS) cross_entropy_vjp(const __grid_constant__ SoftmaxArguments a) {
    const u32 row = first_row(), from = min(row, a.rows - 1);
    const i64 label = a.labels[from];
    Shares s;
    Real lse;
    if constexpr (LA_SAVED) {
        s.x.begin(row_at(a.x, from, a.inner));
        lse = ((const Real*)a.lse)[from];
    } else {
        s.begin(a, from, false);
        lse = s.lse();
    }
    if (row >= a.rows) return;
    const Real d = label == a.ignored ? (Real)0 : ((const Real*)a.loss)[row];
    const Real of_shares = d * (1 + 2 * (Real)a.z * lse), of_all = d * (Real)a.smoothing / LA_D,
               of_label = d * (1 - (Real)a.smoothing);
    each_piece([&](int p, int column) {
        Numbers x;
        s.x.get(x, p, column);
#pragma unroll
        for (int i = 0; i < LA_PER; i++) {
            const Real share = exp_of(x[i] - lse) * of_shares - of_all;
            x[i] = d == 0 ? (Real)0 : column + i == label ? share - of_label : share;
        }
        store_elements<LA_DTYPE, LA_PER>(dense(a, row, column), x);
    });
}
