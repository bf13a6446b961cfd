// The softmax of rows, and losses of rows of logits; ops/softmax_rows.py has the equations.
//
//     lse = m + log sum e^{x - m}, m = max x      y = e^{x - lse}      dx = y (dy - <y, dy>)
//     loss = lse - (1 - s) x_label - s mean x + z lse^2
//     dx = d (y (1 + 2 z lse) - (1 - s) [label] - s / D)
//
// Kinds: LA_DTYPE of x and of results of rows, LA_GRAD of dy. A label `ignored` has no loss.
#include "arguments/ops/SoftmaxArguments.cuh"
#include "nn/rows.cuh"
#include "ops/formulas.cuh"

struct Shares {   // a row, its largest number (0 for none) and the sum of e^{x - m}
    RowOf<LA_DTYPE> x;
    Real m, total, sum;
    __device__ __forceinline__ void begin(const SoftmaxArguments& a, u32 row, bool summed) {
        x.begin(row_at(a.x, row, a.inner));
        Real found[1] = {-(Real)__int_as_float(0x7f800000)}, totals[2] = {0, 0};
        Numbers now;
        each_piece([&](int p, int column) {
            x.get(now, p, column);
#pragma unroll
            for (int i = 0; i < LA_PER; i++) found[0] = fmax(found[0], now[i]);
        });
        combine(found, most);
        m = found[0] < -(Real)3e38f ? (Real)0 : found[0];
        if (LA_DOUBLE && found[0] > -(Real)__int_as_float(0x7f800000)) m = found[0];
        each_piece([&](int p, int column) {
            x.get(now, p, column);
#pragma unroll
            for (int i = 0; i < LA_PER; i++) {
                totals[0] += exp_of(now[i] - m);
                if (summed) totals[1] += now[i];
            }
        });
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
        const Real own = element<LA_DTYPE>(s.x.at, label);
        loss = lse + (Real)a.z * lse * lse - (1 - smoothing) * own;
        if (smoothing != 0) loss -= smoothing * (s.sum / LA_D);
    }
    ((Real*)a.loss)[row] = loss;
}

extern "C" __global__ void __launch_bounds__(THREADS) cross_entropy_vjp(const __grid_constant__ SoftmaxArguments a) {
    const u32 row = first_row(), from = min(row, a.rows - 1);
    const i64 label = a.labels[from];
    Shares s;
    s.begin(a, from, false);
    if (row >= a.rows) return;
    const Real lse = s.lse(), d = label == a.ignored ? (Real)0 : ((const Real*)a.loss)[row];
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
