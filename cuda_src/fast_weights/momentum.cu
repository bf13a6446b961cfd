// The momentum delta rule, token by token, and the adjoint walk of its states:
//
//     forward     e_t = v_t - a_t k_t S_(t-1)                    a_t = alpha_t, without LA_DECAYED 1
//                 M_t = mu_t M_(t-1) + eta_t k_t^T e_t           S_t = alpha_t S_(t-1) + beta_t M_t
//                 out_t = q_t S_t
//     backward    R += q_t^T dout_t                              N += beta_t R
//                 x_t = eta_t k_t N
//                 R <- alpha_t R - a_t k_t^T x_t                 N <- mu_t N
//
// With LA_BATCH tokens of a mini-batch, more than 1, e_t is taken at A, the S that its mini-batch began with: a_t
// S_(t-1) is A, and P, the gradient of A, gets -k_t^T x_t until R gets it where the mini-batch begins. R and N are the
// gradients of S and M. Columns of the states do not meet: a block has LA_COLUMNS of one sequence and head. A column
// lies in 8 lanes, 4 of every 32 rows in each. Tokens come in steps of STEP, one step ahead. The states before every
// LA_TILE tokens are stored, and R and N after them, and e_t, and x_t, which is dv_t; a last mini-batch that is not
// whole is a tile of its own, from `rest` on. LA_DOUBLE: float64, else float32.
#include "arguments/fast_weights/MomentumArguments.cuh"
#include "tile/copy.cuh"

#if LA_DOUBLE
typedef double Number;
#else
typedef float Number;
#endif
constexpr int K = LA_K, WARPS = 4, THREADS = 32 * WARPS, STEP = 8, OWN = LA_COLUMNS / (4 * WARPS);
constexpr int RUNS = (K + 31) / 32, KP = 32 * RUNS, ROWS_OF_LANE = 4 * RUNS, SIZE = sizeof(Number);
constexpr int ROW = 2 * KP + LA_COLUMNS + 4, PER = LA_ALIGN / SIZE;   // of a token: k, q, v or dout, the rates
static_assert(LA_SHARED == 2 * STEP * ROW * SIZE, "LA_SHARED is the size that the launch requests");
static_assert(LA_COLUMNS % (4 * WARPS) == 0 && K % PER == 0, "whole lanes and pieces");

// alpha, mu, beta, eta of a token stand behind its rows
enum { AT_Q = KP, AT_V = 2 * KP, AT_RATES = 2 * KP + LA_COLUMNS };

struct Walk {
    const MomentumArguments& a;
    i64 n;
    int head, column, T;
    Number* tokens;

    __device__ __forceinline__ const char* at(const Tokens& y, int t) const {
        return y.data + n * y.batch + head * y.head + t * y.token;
    }
    // the token that is the i-th of a walk
    template <bool BACK> __device__ __forceinline__ int token(int i) const { return BACK ? T - 1 - i : i; }

    template <bool BACK> __device__ __forceinline__ void fetch(int step) const {
        Number* to = tokens + step % 2 * (STEP * ROW);
#pragma unroll
        for (int which = 0; which < 2; which++) {
            const Tokens& rows = which ? a.q : a.k;
            if (rows.data == nullptr) continue;
            for (int i = threadIdx.x; i < STEP * (KP / PER); i += THREADS) {
                const int j = i / (KP / PER), c = i % (KP / PER) * PER, place = step * STEP + j;
                const bool valid = place < T && c < K;
                copy_in<LA_ALIGN>(shared_address(to + j * ROW + which * KP + c),
                                  at(rows, valid ? token<BACK>(place) : 0) + (valid ? c : 0) * SIZE, valid);
            }
        }
        if (a.v.data != nullptr)
            for (int i = threadIdx.x; i < STEP * LA_COLUMNS; i += THREADS) {
                const int j = i / LA_COLUMNS, c = i % LA_COLUMNS, place = step * STEP + j;
                const bool valid = place < T && column + c < a.V;
                copy_in<SIZE>(shared_address(to + j * ROW + AT_V + c),
                              at(a.v, valid ? token<BACK>(place) : 0) + (valid ? column + c : 0) * SIZE, valid);
            }
        if (threadIdx.x < 4 * STEP) {
            const int j = threadIdx.x / 4, r = threadIdx.x % 4, place = step * STEP + j;
            const Tokens& rate = r == 0 ? a.alpha : r == 1 ? a.mu : r == 2 ? a.beta : a.eta;
            copy_in<SIZE>(shared_address(to + j * ROW + AT_RATES + r), at(rate, place < T ? token<BACK>(place) : 0),
                          place < T);
        }
        copy_commit();
    }
};

// sums over the 8 lanes of a column
LA_DEVICE void sum_columns(Number (&x)[OWN]) {
#pragma unroll
    for (int d = 1; d < 8; d *= 2)
#pragma unroll
        for (int j = 0; j < OWN; j++) x[j] += __shfl_xor_sync(0xffffffffu, x[j], d);
}

// 4 neighbouring numbers
LA_DEVICE void load4(Number (&x)[4], const Number* from) {
    struct alignas(16) Piece {
        Number x[16 / SIZE];
    };
    const Piece* pieces = (const Piece*)from;
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = pieces[i * SIZE / 16].x[i % (16 / SIZE)];
}

// the keys and, if it has them, the queries of the rows of a lane: f(r, k, q)
template <class F> LA_DEVICE void each_row(const Number* token, int first, bool has_q, F f) {
#pragma unroll
    for (int run = 0; run < RUNS; run++) {
        Number keys[4], queries[4] = {};
        load4(keys, token + run * 32 + first);
        if (has_q) load4(queries, token + AT_Q + run * 32 + first);
#pragma unroll
        for (int r = 0; r < 4; r++) f(run * 4 + r, keys[r], queries[r]);
    }
}

typedef Number Cells[ROWS_OF_LANE][OWN];

template <bool BACK> LA_DEVICE void walk(const MomentumArguments& a, char* tokens) {
    const int lane = threadIdx.x % 32, first = lane % 8 * 4;
    const i64 slot = blockIdx.x / a.parts;
    Walk w = {a, slot / a.heads, (int)(slot % a.heads), (int)(blockIdx.x % a.parts) * LA_COLUMNS, a.T, (Number*)tokens};
    const int own = (threadIdx.x / 32 * 4 + lane / 8) * OWN, column = w.column + own;
    constexpr bool SHARED = LA_BATCH > 1;
    Cells S, M;                                 // BACK: R, N
    Number A[SHARED ? ROWS_OF_LANE : 1][OWN];   // BACK: P
    const auto row_of = [&](int r) { return r / 4 * 32 + first + r % 4; };
    const auto load = [&](auto& x, const char* from) {
#pragma unroll
        for (int r = 0; r < ROWS_OF_LANE; r++)
#pragma unroll
            for (int j = 0; j < OWN; j++)
                x[r][j] = from != nullptr && row_of(r) < K && column + j < a.V
                              ? ((const Number*)from)[(slot * K + row_of(r)) * a.V + column + j]
                              : Number(0);
    };
    const auto store = [&](char* to, i64 matrix, const auto& x) {
        if (to == nullptr) return;
#pragma unroll
        for (int r = 0; r < ROWS_OF_LANE; r++)
#pragma unroll
            for (int j = 0; j < OWN; j++)
                if (row_of(r) < K && column + j < a.V)
                    ((Number*)to)[(matrix * K + row_of(r)) * a.V + column + j] = x[r][j];
    };
    load(S, a.S);
    load(M, a.M);
    if constexpr (BACK && SHARED) load(A, a.A);
    const int steps = (a.T + STEP - 1) / STEP;
    if (steps) w.fetch<BACK>(0);
    for (int step = 0; step < steps; step++) {
        if (step + 1 < steps) {
            w.fetch<BACK>(step + 1);
            copy_wait<1>();
        } else copy_wait<0>();
        __syncthreads();
        const int count = min(STEP, a.T - step * STEP);
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            const Number* at = w.tokens + (step % 2 * STEP + i) * ROW;
            const int t = w.token<BACK>(step * STEP + i);
            const Number alpha = at[AT_RATES], mu = at[AT_RATES + 1], beta = at[AT_RATES + 2], eta = at[AT_RATES + 3];
            const Number read = LA_DECAYED ? alpha : Number(1);
            const bool last = t >= a.rest;
            if (BACK ? t == a.T - 1 || t + 1 == a.rest || ((t + 1) % LA_TILE == 0 && !last)
                     : t == a.rest || (t % LA_TILE == 0 && !last)) {
                const i64 tile = slot * a.tiles + (last ? a.tiles - 1 : t / LA_TILE);
                store(a.S_tiles, tile, S);
                store(a.M_tiles, tile, M);
            }
            if constexpr (!BACK && SHARED)
                if (t % LA_BATCH == 0)
#pragma unroll
                    for (int r = 0; r < ROWS_OF_LANE; r++)
#pragma unroll
                        for (int j = 0; j < OWN; j++) A[r][j] = S[r][j];
            Number x[OWN], y[OWN];
#pragma unroll
            for (int j = 0; j < OWN; j++) {
                x[j] = 0;
                y[j] = BACK && a.v.data == nullptr ? Number(0) : at[AT_V + own + j];
            }
            // a row of a result: of a lane of each column
            const auto put = [&](char* to, const Number(&row)[OWN]) {
                if (to == nullptr || lane % 8) return;
#pragma unroll
                for (int j = 0; j < OWN; j++)
                    if (column + j < a.V) ((Number*)to)[(slot * a.T + t) * a.V + column + j] = row[j];
            };
            if constexpr (BACK) {
                each_row(at, first, a.v.data != nullptr, [&](int r, Number k, Number q) {
#pragma unroll
                    for (int j = 0; j < OWN; j++) {
                        S[r][j] += q * y[j];
                        M[r][j] += beta * S[r][j];
                        x[j] += k * M[r][j];
                        M[r][j] *= mu;
                    }
                });
                sum_columns(x);
#pragma unroll
                for (int j = 0; j < OWN; j++) x[j] *= eta;
                put(a.errors, x);
#pragma unroll
                for (int j = 0; j < OWN; j++) x[j] *= -read;
                each_row(at, first, false, [&](int r, Number k, Number) {
#pragma unroll
                    for (int j = 0; j < OWN; j++)
                        if constexpr (SHARED) {
                            A[r][j] += k * x[j];
                            S[r][j] *= alpha;
                            if (t % LA_BATCH == 0) {
                                S[r][j] += A[r][j];
                                A[r][j] = 0;
                            }
                        } else S[r][j] = alpha * S[r][j] + k * x[j];
                });
            } else {
                each_row(at, first, false, [&](int r, Number k, Number) {
#pragma unroll
                    for (int j = 0; j < OWN; j++) {
                        x[j] += k * (SHARED ? A[SHARED ? r : 0][j] : S[r][j]);
                        S[r][j] *= alpha;
                        M[r][j] *= mu;
                    }
                });
                sum_columns(x);
#pragma unroll
                for (int j = 0; j < OWN; j++) x[j] = y[j] - read * x[j];
                put(a.errors, x);
#pragma unroll
                for (int j = 0; j < OWN; j++) {
                    x[j] *= eta;
                    y[j] = 0;
                }
                each_row(at, first, a.q.data != nullptr, [&](int r, Number k, Number q) {
#pragma unroll
                    for (int j = 0; j < OWN; j++) {
                        M[r][j] += k * x[j];
                        S[r][j] += beta * M[r][j];
                        y[j] += q * S[r][j];
                    }
                });
                if (a.q.data == nullptr) continue;
                sum_columns(y);
                put(a.out, y);
            }
        }
        __syncthreads();
    }
    store(a.S_end, slot, S);
    store(a.M_end, slot, M);
    if constexpr (!BACK && SHARED) {
        if (a.rest == a.T) store(a.A_end, slot, S);
        else store(a.A_end, slot, A);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS) forward(const __grid_constant__ MomentumArguments a) {
    extern __shared__ __align__(16) char shared[];
    walk<false>(a, shared);
}
extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS) backward(const __grid_constant__ MomentumArguments a) {
    extern __shared__ __align__(16) char shared[];
    walk<true>(a, shared);
}
