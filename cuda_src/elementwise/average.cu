// Averages of the past with weights e^k that decay, in log space, and their adjoint:
// linattn_np/elementwise/readouts/log_average.py has the equations.
//
// A Number (S, n, m) is e^m (S, n), a Factor the log of a decay. The sum of two has the larger m, so that every
// exponent is <= 0; it is rounded, and the weight of the number that has it makes up for that. So the recurrence is
// associative, and tiles (tiles.cuh) compute it as any other:
//
//     forward     h_t = e^{-w} h_{t-1} + (v_t, 1, k_t)
//                 n = max(m_{t-1}, u + k_t),  p = scale e^{m_{t-1} - n},  r = e^{u + k_t - n},  total = p n_{t-1} + r
//                 out_t = (p S_{t-1} + r v_t) / total
//     LA_BACK     P_{t-1} = e^{-w} P_t + scale (d_t, c_t, -n),  d_t = dout_t / total,  c_t = -d_t out_t
//
// P_t is the gradient of the sums e^m (S_t, n_t), in a gauge of its own: m_t = -max over later tokens of their n, less
// what decays until then. From it, at fixed m of the states,
//
//     dv_t = e^{k_t} P_t.S + r d_t,   dk_t = e^{k_t} (P_t.S v_t + P_t.n) + du_t,   du_t = r (d_t v_t + c_t)
//     dw = -sum_t e^{-w} (P_t.S S_{t-1} + P_t.n n_{t-1})
//
// The gradient dm of the last m, less what S and n have of it, goes to the k_t that it is, and to -w once for every
// later token: a state knows its token. The last states are kept behind those of the marks.
//
// x is v, the gate k; parameters are w and u. States are three arrays: start, start_n, start_m; those that are written
// lie one behind the other. Arrays of tokens are read once, and held as they lie in memory.
#include "elementwise/number.cuh"
#include "ops/formulas.cuh"
typedef WideType<LA_DOUBLE>::type Real;
struct Factor {
    alignas(8) Real log;
};
struct Number {
    Real S, n, m;
    int origin;   // tokens of the sequence up to the one that m is of; 0: it is that of the initial state
};
constexpr double NOTHING = -1e30;   // m of no token
LA_DEVICE void unit(Factor& a) { a.log = 0; }
LA_DEVICE void zero(Number& h) { h = {0, 0, (Real)NOTHING, 0}; }
LA_DEVICE Factor times(Factor a, Factor b) { return {a.log + b.log}; }

// e^x of the rounding of a sum
LA_DEVICE float near_one(float x) { return fabsf(x) < 0.0078125f ? 1 + x * (1 + x * (0.5f + x / 6)) : expf(x); }
LA_DEVICE double near_one(double x) { return exp(x); }

// most = max(past + fade, own); e^{past + fade - most} and e^{own - most}, of which one is 1 but for rounding
struct Weights {
    Real past, own, most;
    bool is_own;
    __device__ __forceinline__ Weights(Real before, Real fade, Real token) {
        const Real faded = before + fade, ahead = token - faded;
        is_own = ahead > 0;
        most = is_own ? token : faded;
        const Real less = exp_of(is_own ? (before - most) + fade : ahead);
        past = is_own ? less : near_one((before - most) + fade);
        own = is_own ? (Real)1 : less;
    }
};
LA_DEVICE Number times_plus(Factor a, const Number& h, const Number& x) {
    const Weights w(h.m, a.log, x.m);
    return {w.past * h.S + w.own * x.S, w.past * h.n + w.own * x.n, w.most, w.is_own ? x.origin : h.origin};
}
#include "elementwise/tiles.cuh"

// of a token: the weights of the state before it and of itself, and their sums
struct Read {
    Real own, values, total, n;
    __device__ __forceinline__ Read(const Number& h, Real k, Real v, Real u, Real scale) {
        const Weights w(h.m, 0, u + k);
        const Real past = scale * w.past;
        own = w.own, n = w.most;
        values = past * h.S + own * v;
        total = past * h.n + own;
    }
};

// R rows of a lane
template <int KIND> struct Rows {
    Streamed<KIND, V> rows[R];
    __device__ __forceinline__ void read(const Place& p, const Tokens& of, int first, int mine, int d) {
        const char* from = p.row(of, first) + (i64)d * bytes_of(KIND);
        if (mine >= R) {
#pragma unroll
            for (int r = 0; r < R; r++, from += of.token) rows[r].read(from);
        } else {
#pragma unroll
            for (int r = 0; r < R; r++, from += of.token) {
                rows[r].zero();
                if (r < mine) rows[r].read(from);
            }
        }
    }
};
template <int KIND> LA_DEVICE void write_row(const Real (&x)[V], const Place& p, const Tokens& to, int t, int d) {
    Streamed<KIND, V> row;
    row.round(x);
    row.write(p.row(to, t) + (i64)d * bytes_of(KIND));
}
LA_DEVICE Number initial(const ScanArguments& a, i64 at) {
    const Real m = BACK ? -((const Number*)a.last)[at].m : ((const Real*)a.start_m)[at];
    return {((const Real*)a.start)[at], ((const Real*)a.start_n)[at], m, 0};
}
// a number of one part of the states that are written
LA_DEVICE Real& part_of(char* state, const ScanArguments& a, int part, i64 at) {
    return ((Real*)state)[(i64)part * a.sequences * a.D + at];
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, LA_BLOCKS) average(const __grid_constant__ ScanArguments a) {
    u32 block = blockIdx.x;
    if constexpr (LA_LINKED) {
        __shared__ u32 ticket;
        block = taken(a, ticket);
    }
    const Place p(a, block);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = warp * R, t0 = p.j * L + first;
    const int d = p.column * WIDTH + lane * V;
    const bool inside = d < a.D;
    const int mine = inside ? min(p.count - first, R) : 0;
    const Real scale = (Real)a.scale;
    const i64 at = (i64)p.n * a.D + d;   // in a state

    Rows<LA_GATE> ks;
    Rows<LA_DTYPE> vs;
    Rows<LA_DOUT> douts;
    ks.read(p, a.gate, first, mine, d);
    vs.read(p, a.x, first, mine, d);
    if constexpr (BACK) douts.read(p, a.dout, first, mine, d);
    Factors decay;
    Real bonus[V];
#pragma unroll
    for (int v = 0; v < V; v++) {
        decay[v].log = inside ? -parameter<Real>(a.parameters[0].data, a.parameters[0].kind, d + v) : (Real)0;
        bonus[v] = inside ? parameter<Real>(a.parameters[1].data, a.parameters[1].kind, d + v) : (Real)0;
    }
    const auto follow_token = [&](Numbers& h, const Real(&k)[V], const Real(&x)[V], int r) {
#pragma unroll
        for (int v = 0; v < V; v++) h[v] = times_plus(decay[v], h[v], {x[v], 1, k[v], t0 + r + 1});
    };

    // the links of the warp: (A, H) forwards, (A, Q) backwards
    __shared__ SharedFactors all_A;
    __shared__ Shared all_H, all_Q;
    {
        Factors A;
        Numbers H;
        units(A);
        zeros(H);
#pragma unroll
        for (int r = 0; r < R; r++) {
            if (r >= mine) continue;
            Real k[V], x[V];
            ks.rows[r].get(k);
            vs.rows[r].get(x);
            follow_token(H, k, x, r);
#pragma unroll
            for (int v = 0; v < V; v++) A[v] = times(A[v], decay[v]);
        }
        put_in(all_A, warp, lane, A);
        put_in(all_H, warp, lane, H);
    }
    __syncthreads();

    Numbers h;
    if constexpr (!BACK) {
        begin(h, a, p, all_A, all_H, warp, lane, d);
        if constexpr (LA_MARK != 0) {
            if (t0 % LA_MARK == 0 && inside && (mine > 0 || t0 == 0))
                store_state(a.marks, p.mark + t0 / LA_MARK, a, d, h);
        }
#pragma unroll
        for (int r = 0; r < R; r++) {
            if (r >= mine) continue;
            Real k[V], x[V], out[V];
            ks.rows[r].get(k);
            vs.rows[r].get(x);
#pragma unroll
            for (int v = 0; v < V; v++) {
                const Read read(h[v], k[v], x[v], bonus[v], scale);
                out[v] = over(read.values, read.total);
            }
            write_row<LA_DTYPE>(out, p, a.out, first + r, d);
            follow_token(h, k, x, r);
        }
        if (inside && p.j == p.tiles - 1 && warp == (p.count > 0 ? (p.count - 1) / R : 0)) {   // after the last token
            if constexpr (LA_MARK != 0) store_state(a.last, p.n, a, d, h);
#pragma unroll
            for (int v = 0; v < V; v++) {
                part_of(a.end, a, 0, at + v) = h[v].S;
                part_of(a.end, a, 1, at + v) = h[v].n;
                part_of(a.end, a, 2, at + v) = h[v].m;
            }
        }
    } else {
        zeros(h);
        Numbers last;   // of the sequence
        Real dm[V] = {};
        zeros(last);
        if (inside) {
#pragma unroll
            for (int v = 0; v < V; v++) {
                h[v] = ((const Number*)a.marks)[(p.mark + p.j) * a.D + d + v];
                if (a.start == nullptr) continue;
                last[v] = ((const Number*)a.last)[at + v];
                dm[v] = ((const Real*)a.start_m)[at + v] - ((const Real*)a.start)[at + v] * last[v].S -
                        ((const Real*)a.start_n)[at + v] * last[v].n;
            }
        }
        for (int i = 0; i < warp; i++) follow(h, all_A, all_H, i, lane);
        struct Gradient {
            Real S, n, m;
        } P[R][V];   // what a token adds to that of the state before it; then that of the state behind it
        Numbers Q;
        zeros(Q);
        {
            Numbers state;
#pragma unroll
            for (int v = 0; v < V; v++) state[v] = h[v];
#pragma unroll
            for (int r = 0; r < R; r++) {
                Real k[V], x[V], dout[V];
                ks.rows[r].get(k);
                vs.rows[r].get(x);
                douts.rows[r].get(dout);
#pragma unroll
                for (int v = 0; v < V; v++) {
                    const Read read(state[v], k[v], x[v], bonus[v], scale);
                    const Real by = over((Real)1, read.total), d_values = dout[v] * by;
                    P[r][v] = {scale * d_values, -scale * d_values * (read.values * by), -read.n};
                }
                if (r < mine) follow_token(state, k, x, r);
            }
        }
        const auto precede_token = [&](Numbers& q, int r) {   // P_{t-1} from P_t
#pragma unroll
            for (int v = 0; v < V; v++) q[v] = times_plus(decay[v], q[v], {P[r][v].S, P[r][v].n, P[r][v].m, 0});
        };
#pragma unroll
        for (int r = R - 1; r >= 0; r--)
            if (r < mine) precede_token(Q, r);
        put_in(all_Q, warp, lane, Q);
        __syncthreads();
        begin(Q, a, p, all_A, all_Q, warp, lane, d);
#pragma unroll
        for (int r = R - 1; r >= 0; r--) {
            if (r >= mine) continue;
            Numbers behind;
#pragma unroll
            for (int v = 0; v < V; v++) behind[v] = Q[v];
            precede_token(Q, r);
#pragma unroll
            for (int v = 0; v < V; v++) P[r][v] = {behind[v].S, behind[v].n, behind[v].m};
        }
        if (inside && p.j == 0 && warp == 0)
#pragma unroll
            for (int v = 0; v < V; v++) {   // of (S_0, n_0, m_0); h is that state
                const Real weight = exp_of(Q[v].m + h[v].m), dS = weight * Q[v].S, dn = weight * Q[v].n;
                part_of(a.end, a, 0, at + v) = dS;
                part_of(a.end, a, 1, at + v) = dn;
                part_of(a.end, a, 2, at + v) = dS * h[v].S + dn * h[v].n + (last[v].origin == 0 ? dm[v] : (Real)0);
            }
        Real dw[V], du[V];   // sums over tokens
#pragma unroll
        for (int v = 0; v < V; v++) {
            du[v] = 0;
            const bool is_end = p.j == p.tiles - 1 && warp == 0;   // m of the last state has faded since its token
            dw[v] = is_end ? -dm[v] * (Real)(t0 + p.count - last[v].origin) : (Real)0;
        }
#pragma unroll
        for (int r = 0; r < R; r++) {
            if (r >= mine) continue;
            Real k[V], x[V], dout[V], dk[V], dv[V];
            ks.rows[r].get(k);
            vs.rows[r].get(x);
            douts.rows[r].get(dout);
#pragma unroll
            for (int v = 0; v < V; v++) {
                const Read read(h[v], k[v], x[v], bonus[v], scale);
                const Real by = over((Real)1, read.total), d_values = dout[v] * by;
                const Real here = read.own * d_values * (x[v] - read.values * by);
                const Real later = exp_of(k[v] + P[r][v].m), kept = exp_of((h[v].m + decay[v].log) + P[r][v].m);
                dv[v] = later * P[r][v].S + read.own * d_values;
                dk[v] = later * (P[r][v].S * x[v] + P[r][v].n) + here;
                if (last[v].origin == t0 + r + 1) dk[v] += dm[v];
                du[v] += here;
                dw[v] -= kept * (P[r][v].S * h[v].S + P[r][v].n * h[v].n);
            }
            write_row<LA_GATE>(dk, p, a.dgate, first + r, d);
            write_row<LA_DTYPE>(dv, p, a.out, first + r, d);
            follow_token(h, k, x, r);
        }
        __shared__ Real beside[WARPS][WIDTH];
        Real* const sums = (Real*)a.sums + (p.slot + p.j) * a.D + d;   // (parameters, tiles, D)
        const i64 each = (i64)(a.blocks / a.columns) * a.D;
        add_warps(dw, beside, warp, lane);
        add_warps(du, beside, warp, lane);
        if (warp == 0 && inside)
#pragma unroll
            for (int v = 0; v < V; v++) sums[v] = dw[v], sums[each + v] = du[v];
    }
}
