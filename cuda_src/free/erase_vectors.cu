// The delta rule with erase vectors r of its own and a decay of the key channels, as a free rank-one term; a warp has a
// token and head.
//
//     a_t = -beta_t e^{g_t} r_t     values beta_t v_t     (b = k)
//     LA_BEFORE 1: r reads the undecayed state, a_t = -beta_t r_t
//
// And back, in place of the gradients of g and, where dk is not null, of k:
//
//     dr = -beta e^g da      dg += a da      dv = beta dvalues      dbeta = <v, dvalues> - <e^g r, da>      dk += db
#include "arguments/matrix_state/Gate.cuh"
#include "attention/tokens.cuh"
#include "tile/reduce.cuh"
#include "tile/vec4.cuh"
#include "arguments/matrix_state/EraseVectorArguments.cuh"

#ifndef LA_BEFORE
#define LA_BEFORE 0
#endif
constexpr int WARPS = 8, LANE = 4;   // of a block; columns of a lane
static_assert(LA_K <= 32 * LANE && LA_V <= 32 * LANE && LA_K % LANE == 0 && LA_V % LANE == 0,
              "a lane has four columns of a row");

// A warp's token and head: number of the row where rows are dense
struct Row {
    i64 number, batch;
    int token, head, lane;
    __device__ __forceinline__ Row(const EraseVectorArguments& a)
        : number((i64)blockIdx.x * WARPS + threadIdx.x / 32), lane(threadIdx.x & 31) {
        const i64 token_of_all = number / a.heads;
        head = (int)(number - token_of_all * a.heads);
        batch = token_of_all / a.T;
        token = (int)(token_of_all - batch * a.T);
    }
    template <int KIND> __device__ __forceinline__ Vec4<KIND> load(const Rows& x, int width) const {
        Vec4<KIND> y;
        y.template load<1>(
            x.data + batch * x.batch + token * x.token + head / x.group * x.head + LANE * lane * bytes_of(KIND),
            width - LANE * lane);
        return y;
    }
    template <int KIND> __device__ __forceinline__ Vec4<KIND> load(const char* dense, int width) const {
        Vec4<KIND> y;
        y.template load<1>(dense + (number * width + LANE * lane) * bytes_of(KIND), width - LANE * lane);
        return y;
    }
    template <int KIND> __device__ __forceinline__ void store(char* dense, int width, const float (&x)[LANE]) const {
        if (LANE * lane < width) store_vec4<KIND>(dense + (number * width + LANE * lane) * bytes_of(KIND), x);
    }
    __device__ __forceinline__ float strength(const Gate& beta) const {
        return beta.data[batch * beta.batch + token * beta.token + head / beta.group * beta.head];
    }
};
// e^g r
LA_DEVICE void decayed(float (&x)[LANE], const Vec4<LA_ERASERS>& r, const Vec4<LA_GATE>& g) {
#pragma unroll
    for (int j = 0; j < LANE; j++) x[j] = LA_BEFORE ? r[j] : r[j] * exp2_approx(g[j] * 1.4426950408889634f);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) erase_vectors(const __grid_constant__ EraseVectorArguments a) {
    const Row row(a);
    if (row.number >= a.rows) return;
    const auto r = row.load<LA_ERASERS>(a.r, LA_K);
    const auto g = row.load<LA_GATE>(a.g, LA_K);
    const auto v = row.load<0>(a.v, LA_V);
    const float beta = row.strength(a.beta);
    float x[LANE], y[LANE];
    decayed(x, r, g);
#pragma unroll
    for (int j = 0; j < LANE; j++) {
        x[j] *= -beta;
        y[j] = beta * v[j];
    }
    row.store<0>(a.a, LA_K, x);
    row.store<0>(a.values, LA_V, y);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    erase_vectors_vjp(const __grid_constant__ EraseVectorArguments a) {
    const Row row(a);
    if (row.number >= a.rows) return;
    const auto r = row.load<LA_ERASERS>(a.r, LA_K);
    const auto g = row.load<LA_GATE>(a.g, LA_K);
    const auto dg = row.load<LA_GATE>(a.dg, LA_K);
    const auto v = row.load<0>(a.v, LA_V), da = row.load<0>(a.a, LA_K), dvalues = row.load<0>(a.values, LA_V);
    const float beta = row.strength(a.beta);
    float x[LANE], dr[LANE], gates[LANE], dv[LANE], sum = 0.f;
    decayed(x, r, g);
#pragma unroll
    for (int j = 0; j < LANE; j++) {
        const float factor = LA_BEFORE ? 1.f : exp2_approx(g[j] * 1.4426950408889634f);
        dr[j] = -beta * factor * da[j];
        gates[j] = dg[j] - (LA_BEFORE ? 0.f : beta * x[j] * da[j]);
        dv[j] = beta * dvalues[j];
        sum += v[j] * dvalues[j] - x[j] * da[j];
    }
    row.store<LA_ERASERS>(a.dr, LA_K, dr);
    row.store<LA_GATE>(a.dg, LA_K, gates);
    row.store<0>(a.dv, LA_V, dv);
    sum = warp_sum(sum);
    if (row.lane == 0) a.dbeta[row.number] = sum;
    if (a.dk == nullptr) return;
    const auto dk = row.load<0>(a.dk, LA_K), db = row.load<0>(a.db, LA_K);
#pragma unroll
    for (int j = 0; j < LANE; j++) x[j] = dk[j] + db[j];
    row.store<0>(a.dk, LA_K, x);
}
