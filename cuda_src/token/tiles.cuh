// The adjoint of a recurrence token by token: the loads of both kernels, TOKENS tokens of a sequence and head, as
// floats.
//
//     S_t = diag(e^{g_t}) S_(t-1) + k_t^T v_t + b_t^T w_t        w_t = a_t S_(t-1)        out_t = scale q_t S_t
//     G_t = R_t + scale q_t^T dO_t                               dw_t = b_t G_t           dv_t = k_t G_t
//     R_(t-1) = diag(e^{g_t}) G_t + a_t^T dw_t                   R_T: the gradient of the last state
//
// LA_BEFORE 1: queries read the state before the token, out_t = scale (q_t S_(t-1) + (q_t . u k_t) v_t), so that G_t =
// R_t and R_(t-1) = diag(e^{g_t}) R_t + scale q_t^T dO_t.
#pragma once
#include "attention/tokens.cuh"
#include "tile/reduce.cuh"
#include "tile/vec4.cuh"

#ifndef LA_GATE   // log decays: 0 bfloat16, 1 float16, 2 float32
#define LA_GATE 2
#endif
#ifndef LA_BEFORE
#define LA_BEFORE 0
#endif
#ifndef LA_ERASE   // 1: with a free rank-one term
#define LA_ERASE 0
#endif
#ifndef LA_WIDE   // 1: four elements of a row are one access
#define LA_WIDE 1
#endif
#include "arguments/matrix_state/RecurrenceArguments.cuh"

constexpr int K = LA_K, V = LA_V, WARPS = 8, THREADS = 32 * WARPS, KIND = LA_DTYPE;
constexpr int KEYS = (K + 31) / 32 * 32, VALUES = (V + 127) / 128 * 128, TOKENS = VALUES > 128 ? 8 : 16;

// A sequence and head, and the row of a token where rows are dense
struct Place {
    Sequence s;
    int n, head;
    i64 first;   // number of its first token
    __device__ __forceinline__ Place(const RecurrenceArguments& a, int slot)
        : s(sequence_of(a.offsets, slot / a.heads, a.T)), n(slot / a.heads), head(slot % a.heads) {
        first = a.offsets == nullptr ? (i64)n * a.T : s.first;
    }
    __device__ __forceinline__ i64 row(const RecurrenceArguments& a, int token) const {
        return (first + token) * a.heads + head;
    }
};
// WIDTH of COLUMNS columns, from `column` on, of TOKENS rows from `token` on, times `factor`; zeros where there are
// none. DECAYS: e^g of log decays, and 1 where there are none.
template <int KIND_, int WIDTH, int COLUMNS, bool DECAYS = false>
LA_DEVICE void load_tile(float* to, const char* rows, i64 step, int token, int T, int column, float factor) {
#pragma unroll 2   // a state stays in registers
    for (int i = threadIdx.x; i < TOKENS * WIDTH / 4; i += THREADS) {
        const int r = i / (WIDTH / 4), c = i % (WIDTH / 4) * 4,
                  count = (u32)(token + r) < (u32)T ? COLUMNS - column - c : 0;
        Vec4<KIND_> x;
        x.template load<LA_WIDE>(rows + (token + r) * step + (column + c) * bytes_of(KIND_), count);
        float4 y = {factor * x[0], factor * x[1], factor * x[2], factor * x[3]};
        if (DECAYS) y = {exp2_approx(y.x), exp2_approx(y.y), exp2_approx(y.z), exp2_approx(y.w)};
        *(float4*)(to + r * WIDTH + c) = y;
    }
}
constexpr float LOG2_OF_E = 1.4426950408889634f;
template <int WIDTH> LA_DEVICE void load_vectors(float* to, const Rows& x, const Place& at, int token, int column) {
    load_tile<KIND, WIDTH, K>(to, rows_of(x, at.s, at.head), x.token, token, at.s.T, column, 1.f);
}
template <int WIDTH> LA_DEVICE void load_decays(float* to, const Rows& x, const Place& at, int token, int column) {
    if (x.data == nullptr)
        for (int i = threadIdx.x; i < TOKENS * WIDTH; i += THREADS) to[i] = 1.f;
    else load_tile<LA_GATE, WIDTH, K, true>(to, rows_of(x, at.s, at.head), x.token, token, at.s.T, column, LOG2_OF_E);
}
