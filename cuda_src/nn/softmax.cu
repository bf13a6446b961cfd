// The softmax of rows, and losses of rows of logits; ops/softmax_rows.py has the equations.
//
//     lse = m + log sum e^{x - m}, m = max x      y = e^{x - lse}      dx = y (dy - <y, dy>)
//     loss = lse - (1 - s) x_label - s mean x + z lse^2
//     dx = d (y (1 + 2 z lse) - (1 - s) [label] - s / D)
//
// Kinds: LA_DTYPE of x and of results of rows, LA_GRAD of dy. A label `ignored` has no loss; that
// of a label that is no column is NaN, and so is its gradient. LA_SAVED: the lse of the forward is given.
#include "arguments/ops/SoftmaxArguments.cuh"
#include "nn/rows.cuh"
#include "ops/formulas.cuh"

#define INFINITE (Real) __int_as_float(0x7f800000)
// what is taken off exponents: the largest number, 0 where there is none
LA_DEVICE Real shift(Real largest) { return largest > -INFINITE ? largest : (Real)0; }

struct Shares {   // a row, its largest number (0 for none), the sum of e^{x - m}, and of x (LA_SMOOTH)
    RowOf<LA_DTYPE> x;
    Real m, total, sum;
    __device__ __forceinline__ void begin(const SoftmaxArguments& a, u32 row) {
        x.begin(row_at(a.x, row, a.inner));
        Real found[1] = {-INFINITE}, totals[LA_SMOOTH ? 2 : 1] = {};
        if constexpr (HELD) {
            Numbers now;
            each_piece([&](int p, int column) {
                x.get(now, p, column);
#pragma unroll
                for (int i = 0; i < LA_PER; i++) found[0] = fmax(found[0], now[i]);
            });
            combine(found, most);
            m = shift(found[0]);
            each_piece([&](int p, int column) {
                x.get(now, p, column);
                add(totals, now);
            });
        } else {
            constexpr int STEP = LA_LANES * LA_PER, AHEAD = 4;
            int column = lane_of_row() * LA_PER;
            for (; column + (AHEAD - 1) * STEP < LA_D; column += AHEAD * STEP) read<AHEAD, STEP>(found, totals, column);
            for (; column < LA_D; column += STEP) read<1, STEP>(found, totals, column);
            const Real own = shift(found[0]);
            combine(found, most);
            m = shift(found[0]);
            if (totals[0] != 0) totals[0] *= exp_of(own - m);
        }
        combine(totals, plus);
        total = totals[0];
        sum = totals[LA_SMOOTH ? 1 : 0];
    }
    // N pieces, loaded together; the sum is that of the pieces so far, over e^m of them
    template <int N, int STEP, class T> __device__ __forceinline__ void read(Real (&found)[1], T& totals, int column) {
        Loaded<LA_DTYPE, LA_PER> raw[N];
        Numbers now[N];
        const Real before = found[0];
#pragma unroll
        for (int n = 0; n < N; n++) raw[n].load(x.at + (i64)(column + n * STEP) * bytes_of(LA_DTYPE));
#pragma unroll
        for (int n = 0; n < N; n++) {
            raw[n].get(now[n]);
#pragma unroll
            for (int i = 0; i < LA_PER; i++) found[0] = fmax(found[0], now[n][i]);
        }
        m = shift(found[0]);
        if (found[0] > before) totals[0] *= exp_of(before - m);
#pragma unroll
        for (int n = 0; n < N; n++) add(totals, now[n]);
    }
    template <class T> __device__ __forceinline__ void add(T& totals, const Numbers& now) const {
#pragma unroll
        for (int i = 0; i < LA_PER; i++) {
            totals[0] += exp_of(now[i] - m);
            if constexpr (LA_SMOOTH) totals[1] += now[i];
        }
    }
    __device__ __forceinline__ Real lse() const { return m + log(total); }
};
LA_DEVICE u32 first_row() { return blockIdx.x * BESIDE + row_of_block(); }
LA_DEVICE bool is_column(i64 label) { return label >= 0 && label < LA_D; }
LA_DEVICE char* dense(const SoftmaxArguments& a, u32 row, int column) {
    return a.y + ((i64)row * LA_D + column) * bytes_of(LA_DTYPE);
}

extern "C" __global__ void __launch_bounds__(THREADS) softmax(const __grid_constant__ SoftmaxArguments a) {
    const u32 row = first_row();
    Shares s;
    s.begin(a, min(row, a.rows - 1));
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
    s.begin(a, from);
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
    s.begin(a, from);
    if (row >= a.rows || lane_of_row()) return;
    const Real lse = s.lse(), smoothing = (Real)a.smoothing;
    Real loss = 0;
    if (label != a.ignored) {
        const Real own = is_column(label) ? (Real)element<LA_DTYPE>(s.x.at, label) : INFINITE - INFINITE;
        loss = lse + (Real)a.z * lse * lse - (1 - smoothing) * own;
        if constexpr (LA_SMOOTH) loss -= smoothing * (s.sum / LA_D);
    }
    ((Real*)a.loss)[row] = loss;
    ((Real*)a.lse)[row] = lse;
}

// Sums over all rows, y: the total of losses, their mean, their number, at least 1; one block of 1024 threads
extern "C" __global__ void __launch_bounds__(1024) loss_sums(const __grid_constant__ SoftmaxArguments a) {
    __shared__ Real parts[2][1024];
    Real total = 0, count = 0;
    for (u32 row = threadIdx.x; row < a.rows; row += 1024) {
        total += ((const Real*)a.loss)[row];
        count += a.labels[row] != a.ignored;
    }
    parts[0][threadIdx.x] = total;
    parts[1][threadIdx.x] = count;
    for (u32 d = 512; d; d >>= 1) {
        __syncthreads();
        if (threadIdx.x < d)
#pragma unroll
            for (int n = 0; n < 2; n++) parts[n][threadIdx.x] += parts[n][threadIdx.x + d];
    }
    if (threadIdx.x) return;
    const Real number = max(parts[1][0], (Real)1);
    ((Real*)a.y)[0] = parts[0][0];
    ((Real*)a.y)[1] = parts[0][0] / number;
    ((Real*)a.y)[2] = number;
}

// loss: the cotangent of each row, or one for all (each = 0); it is divided by the number of losses where that is given
extern "C" __global__ void __launch_bounds__(THREADS) cross_entropy_vjp(const __grid_constant__ SoftmaxArguments a) {
    const u32 row = first_row(), from = min(row, a.rows - 1);
    const i64 label = a.labels[from];
    Shares s;
    Real lse;
    if constexpr (LA_SAVED) {
        s.x.begin(row_at(a.x, from, a.inner));
        lse = ((const Real*)a.lse)[from];
    } else {
        s.begin(a, from);
        lse = s.lse();
    }
    if (row >= a.rows) return;
    Real d = 0;
    if (label != a.ignored) {
        d = is_column(label) ? ((const Real*)a.loss)[(i64)row * a.each] : INFINITE - INFINITE;
        if (a.number) d /= *(const Real*)a.number;
    }
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
