// Keys behind a diagonal preconditioner (ops/preconditioner.py), and their transpose.
//
//     A_t = e^{a_t} A_{t-1} + b_t k_t * k_t        w_t = m_t * k_t,  m_t = span^{-softsign(log(A_t + eps) - center)}
//     own_t = dw_t * k_t * dm_t / dcenter          c_t = y_{t+1} - own_t / (A_t + eps),  y_t = e^{a_t} c_t
//     dk_t = dw_t * m_t + 2 b_t k_t * c_t,  db_t = <k_t * k_t, c_t>,  da_t = <A_{t-1}, y_t>,  dA_0 = y_1
//
// A block has a head of a sequence, a lane every LANES-th of its channels. Arrays are dense: of keys (tokens, Hk, K),
// of other rows (tokens, H, K), of numbers (tokens, H), of sums (sequences, H, K). k is of kind LA_DTYPE, w of LA_OUT,
// dw of LA_GRAD, a, b and center of a kind of their own, all others of LA_WIDE; no begin, dw, dend: zeros.
#include "arguments/ops/PreconditionerArguments.cuh"
#include "ops/element.cuh"
#include "ops/segments.cuh"
#include "tile/reduce.cuh"

typedef Wide<LA_WIDE> Real;
constexpr int PER = (LA_K + LANES - 1) / LANES, AHEAD = PER > 4 || LA_WIDE == 3 ? 1 : 2;   // AHEAD: tokens
typedef Real Row[PER];                                                                     // of a lane

struct Affine {   // y -> first + factor y
    Real factor, first;
};
struct Place {   // of a block: a head of a sequence; of a warp: a part of the tokens
    const Segment tokens;
    const i64 head, state;   // state: row of the sums
    const int part, lane;
    const Real center;
    __device__ __forceinline__ explicit Place(const PreconditionerArguments& a)
        : tokens(a.offsets, a.T, (i64)a.H * LANES),
          head(tokens.column / LANES),
          state(tokens.sequence * a.H + head),
          part(threadIdx.x / LANES),
          lane(threadIdx.x % LANES),
          center(parameter<Real>(a.center, a.center_kind, head)) {}
    template <int KIND> __device__ __forceinline__ void load(Real* x, const char* from, i64 row) const {
#pragma unroll
        for (int j = 0; j < PER; j++) {
            const int column = j * LANES + lane;
            x[j] = from != nullptr && column < LA_K ? (Real)element<KIND>(from, row * LA_K + column) : (Real)0;
        }
    }
    template <int KIND> __device__ __forceinline__ void store(char* to, i64 row, const Real* x) const {
#pragma unroll
        for (int j = 0; j < PER; j++)
            if (j * LANES + lane < LA_K) put_element<KIND>(to, row * LA_K + j * LANES + lane, x[j]);
    }
    // e^a, b and the key of a token
    __device__ __forceinline__ void load_token(Real* x, const PreconditionerArguments& a, i64 t) const {
        x[0] = exp(parameter<Real>(a.a, a.a_kind, t * a.H + head));
        x[1] = parameter<Real>(a.b, a.b_kind, t * a.H + head);
        load<LA_DTYPE>(x + 2, a.k, t * (a.H / a.group) + head / a.group);
    }
    // A after a token
    __device__ __forceinline__ static void add_squares(Row& A, const Real* token) {
#pragma unroll
        for (int j = 0; j < PER; j++) A[j] = token[0] * A[j] + token[1] * token[2 + j] * token[2 + j];
    }
};
// the rows before the own part from those before the first, or after it from those after the last; x: what the own part
// adds to `factor` times its row
template <bool BACK> LA_DEVICE void enter(Affine (*maps)[LANES], Real factor, Row& x, const Row& first) {
#pragma unroll
    for (int j = 0; j < PER; j++) {
        x[j] = entering<BACK>(maps, Affine{factor, x[j]}, first[j],
                              [](const Affine& map, Real y) { return map.first + map.factor * y; });
        __syncthreads();
    }
}
// A before the own part
LA_DEVICE void find_sums(const Place& at, const PreconditionerArguments& a, Affine (*maps)[LANES], Row& A) {
    Real factor = 1;
    Row begin;
#pragma unroll
    for (int j = 0; j < PER; j++) A[j] = 0;
    traverse<false, 2 + PER, 2 * AHEAD, Real>(
        at.tokens, [&](i64 t, Real(&in)[2 + PER]) { at.load_token(in, a, t); },
        [&](i64, const Real(&in)[2 + PER]) {
            factor *= in[0];
            Place::add_squares(A, in);
        });
    at.load<LA_WIDE>(begin, a.begin, at.state);
    enter<false>(maps, factor, A, begin);
}
struct Factor {
    Real m, slope;   // m, dm / dcenter
    __device__ __forceinline__ Factor(const PreconditionerArguments& a, Real A, Real center) {
        const Real rate = (Real)a.rate, r = log(A + (Real)a.eps) - center, over = 1 / (1 + (r < 0 ? -r : r));
        m = exp(-rate * r * over);
        slope = rate * m * over * over;
    }
};

extern "C" __global__ void __launch_bounds__(SEGMENTS* LANES, 1)
    preconditioned(const __grid_constant__ PreconditionerArguments a) {
    __shared__ Affine maps[SEGMENTS][LANES];
    const Place at(a);
    Row A;
    find_sums(at, a, maps, A);
    traverse<false, 2 + PER, 2 * AHEAD, Real>(
        at.tokens, [&](i64 t, Real(&in)[2 + PER]) { at.load_token(in, a, t); },
        [&](i64 t, const Real(&in)[2 + PER]) {
            Row w;
            Place::add_squares(A, in);
#pragma unroll
            for (int j = 0; j < PER; j++) w[j] = Factor(a, A[j], at.center).m * in[2 + j];
            at.store<LA_OUT>(a.w, t * a.H + at.head, w);
        });
    const Segment& s = at.tokens;
    if (s.begin == s.end ? at.part == 0 : s.stop == s.end && s.first < s.stop) at.store<LA_WIDE>(a.end, at.state, A);
}

extern "C" __global__ void __launch_bounds__(SEGMENTS* LANES, 1)
    preconditioned_vjp(const __grid_constant__ PreconditionerArguments a) {
    __shared__ Affine maps[SEGMENTS][LANES];
    const Place at(a);
    Row A, y, after;
    find_sums(at, a, maps, A);
    Real factor = 1;   // y of the first token is factor y_{t+1} + y
#pragma unroll
    for (int j = 0; j < PER; j++) y[j] = 0;
    traverse<false, 2 + 2 * PER, AHEAD, Real>(
        at.tokens,
        [&](i64 t, Real(&in)[2 + 2 * PER]) {
            at.load_token(in, a, t);
            at.load<LA_GRAD>(in + 2 + PER, a.dw, t * a.H + at.head);
        },
        [&](i64 t, const Real(&in)[2 + 2 * PER]) {
            Place::add_squares(A, in);
            at.store<LA_WIDE>(a.A, t * a.H + at.head, A);
            factor *= in[0];
#pragma unroll
            for (int j = 0; j < PER; j++) {
                const Real own = in[2 + PER + j] * in[2 + j] * Factor(a, A[j], at.center).slope;
                y[j] -= factor * own / (A[j] + (Real)a.eps);
            }
        });
    at.load<LA_WIDE>(after, a.dend, at.state);
    enter<true>(maps, factor, y, after);   // all of A is stored, too
    Real dcenter = 0;
    traverse<true, 2 + 3 * PER, AHEAD, Real>(
        at.tokens,
        [&](i64 t, Real(&in)[2 + 3 * PER]) {
            at.load_token(in, a, t);
            at.load<LA_GRAD>(in + 2 + PER, a.dw, t * a.H + at.head);
            if (t > at.tokens.begin) at.load<LA_WIDE>(in + 2 + 2 * PER, a.A, (t - 1) * a.H + at.head);
            else at.load<LA_WIDE>(in + 2 + 2 * PER, a.begin, at.state);
        },
        [&](i64 t, const Real(&in)[2 + 3 * PER]) {
            Row dk;
            Real da = 0, db = 0;
#pragma unroll
            for (int j = 0; j < PER; j++) {
                const Real k = in[2 + j], dw = in[2 + PER + j], before = in[2 + 2 * PER + j];
                const Factor now(a, A[j], at.center);
                const Real own = dw * k * now.slope, c = y[j] - own / (A[j] + (Real)a.eps);
                dk[j] = dw * now.m + 2 * in[1] * k * c;
                y[j] = in[0] * c;
                A[j] = before;
                dcenter += own;
                db += k * k * c;
                da += before * y[j];
            }
            const i64 n = t * a.H + at.head;
            at.store<LA_WIDE>(a.dk, n, dk);
            da = warp_sum(da);
            db = warp_sum(db);
            if (at.lane) return;
            put_element<LA_WIDE>(a.da, n, da);
            put_element<LA_WIDE>(a.db, n, db);
        });
    dcenter = warp_sum(dcenter);
    if (at.lane == 0)
        put_element<LA_WIDE>(a.dcenter, (at.tokens.sequence * SEGMENTS + at.part) * a.H + at.head, dcenter);
    if (at.part == 0) at.store<LA_WIDE>(a.dbegin, at.state, y);
}
