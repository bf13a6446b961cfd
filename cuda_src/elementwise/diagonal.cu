// A constant diagonal system of complex states, forward and backward. Of channel d and number n of its state
//
//     h_t[n] = a[n] h_{t-1}[n] + B[n] x_t,   out_t = 2 scale Re sum_n C[n] h_t[n] + D x_t
//     P_t[n] = 2 scale C[n]* dout_t + a[n]* P_{t+1}[n],   dx_t = Re sum_n B[n]* P_t[n] + D dout_t
//     dB[n] = sum_t x_t P_t[n],   dC[n] = 2 scale sum_t dout_t h_t[n]*,   da[n] = sum_t P_t[n] h_{t-1}[n]*
//
// of a system held over steps dt = e^bias: A = -e^{log rates} + i angles, z = dt A, a = e^z, B = (e^z - 1) / A, where A
// and B of the arguments are the log rates and angles (D, N), bias is (D,). The gradients of these follow from da and
// dB:
//
//     dz = a* da,   dA = dt dz + dB (dB/dA)*,   ddt = Re sum_n (dz A* + dB a*)
//
// Blocks, tiles and lanes are those of selective.cuh, of sequences in one segment; N and STATES count real numbers, two
// of each complex one. C is dense (D, N). The backward computes the states of a tile again from its
// mark: first those before every PART tokens, then those of PART tokens in registers.
#include "elementwise/number.cuh"
#include "elementwise/selective.cuh"

constexpr int PART = LA_PART;
static_assert(STATES == 4 && TILE % PART == 0 && PART <= TILE, "two complex numbers a lane");

constexpr int TERMS = 14;   // of the series of a difference that cancels where |z| < 1 / 2
typedef Complex<Real> Number;

// one number of a system held over steps
struct Held {
    Real dt;
    Number A, gain, B;   // gain: e^z - 1, exact near 0
    __device__ __forceinline__ Held(Real log_dt, Real log_rate, Real angle)
        : dt(exp(log_dt)), A{-exp(log_rate), angle} {
        const Number half = on_circle((Real)0.5 * dt * angle);   // cos, sin
        const Real less = expm1(dt * A.re), two = 2 * half.im * half.im;
        gain = {less * (1 - two) - two, (less + 1) * (2 * half.im * half.re)};
        B = times(gain, reciprocal(A));
    }
    __device__ __forceinline__ Number factor() const { return {gain.re + 1, gain.im}; }
    // dB / dA = (dt e^z - B) / A, near z = 0 dt^2 sum_n n z^{n - 1} / (n + 1)!
    __device__ __forceinline__ Number slope() const {
        const Number z = {dt * A.re, dt * A.im};
        if (z.re * z.re + z.im * z.im >= (Real)0.25)
            return times({dt * (gain.re + 1) - B.re, dt * gain.im - B.im}, reciprocal(A));
        Number s = {1, 0};
#pragma unroll 1
        for (int n = TERMS; n > 0; n--) {
            const Real ratio = (Real)(n + 1) / (Real)(n * (n + 2));
            s = times(z, s);
            s = {1 + ratio * s.re, ratio * s.im};
        }
        return {(Real)0.5 * dt * dt * s.re, (Real)0.5 * dt * dt * s.im};
    }
};
// number k / 2 of lane q of a channel; its place in (D, N)
LA_DEVICE bool is_number(Given a, int d, int q, int k) { return d < a.D && q * STATES + k < N; }
LA_DEVICE i64 place(int d, int q, int k) { return (i64)d * (N / 2) + (q * STATES + k) / 2; }
LA_DEVICE Held held(Given a, int d, int q, int k) {
    const i64 n = place(d, q, k);
    return Held(parameter<Real>(a.bias, a.bias_kind, d), parameter<Real>(a.A, a.A_kind, n), element<LA_B>(a.B.data, n));
}

// a, B and C of the two numbers of a lane
struct System {
    State a, B, C;
    __device__ __forceinline__ System(Given given, int d, int q) {
#pragma unroll
        for (int k = 0; k < STATES; k += 2) {
            a[k] = a[k + 1] = B[k] = B[k + 1] = 0;
            if (is_number(given, d, q, k)) {
                const Held own = held(given, d, q, k);
                const Number factor = own.factor();
                a[k] = factor.re, a[k + 1] = factor.im, B[k] = own.B.re, B[k + 1] = own.B.im;
            }
        }
        load_state(C, given.C.data, LA_C, 0, given.D, d, q);
#pragma unroll
        for (int k = 0; k < STATES; k++) C[k] *= 2 * (Real)given.scale;
    }
    // next = a h + B x
    __device__ __forceinline__ void follow(State& next, const State& h, Real x) const {
#pragma unroll
        for (int k = 0; k < STATES; k += 2) {
            const Real re = h[k], im = h[k + 1];
            next[k] = a[k] * re - a[k + 1] * im + B[k] * x;
            next[k + 1] = a[k] * im + a[k + 1] * re + B[k + 1] * x;
        }
    }
};
struct Step {   // of a token and channel; x: afterwards dx
    Real x, dout;
};
struct alignas(16) Four {
    Real x[4];
};

// `count` tokens of a tile, 0 behind them and behind the last channel: put(token, channel, number)
template <int KIND, class Put>
LA_DEVICE void load_rows(const Strided& x, const Row& row, i64 token, int d, int count, Put put) {
    const char* const at = x.data + (token * x.outer + (i64)(d + row.column) * bytes_of(KIND));
#pragma unroll 4
    for (int t = row.first; t < TILE; t += Row::STEP) {
        Loaded<KIND, PER> own;
        Real y[PER];
        if (row.inside && t < count) own.load(at + t * x.outer);
        else own.zero();
        own.get(y);
#pragma unroll
        for (int v = 0; v < PER; v++) put(t, row.column + v, y[v]);
    }
}
// get(token, channel) of `count` tokens of a tile
template <class Get> LA_DEVICE void store_rows(char* to, Given a, const Row& row, i64 token, int d, int count,
                                               Get get) {
    char* const at = to + (token * a.D + d + row.column) * bytes_of(LA_X);
    if (!row.inside) return;
    for (int t = row.first; t < count; t += Row::STEP) {
        Real y[PER];
#pragma unroll
        for (int v = 0; v < PER; v++) y[v] = get(t, row.column + v);
        store_elements<LA_X, PER>(at + (i64)t * a.D * bytes_of(LA_X), y);
    }
}
LA_DEVICE Real sum_of_lanes(Real y) {
#pragma unroll
    for (int m = 1; m < LANES; m *= 2) y += __shfl_xor_sync(~0u, y, m);
    return y;
}

extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS)
    diagonal(const __grid_constant__ SelectiveArguments a) {
    __shared__ Real xs[TILE][CHANNELS], ys[TILE][CHANNELS];
    const Segment s(a);
    const Row row(a, s.d);
    const int c = threadIdx.x / LANES, q = threadIdx.x % LANES, d = s.d + c;
    const System system(a, d, q);
    State h;
    load_state(h, a.start, a.start_kind, s.n, a.D, d, q);
    const Real skip = a.skip && d < a.D ? parameter<Real>(a.skip, a.skip_kind, d) : (Real)0;
    for (int t0 = 0; t0 < s.count; t0 += TILE) {
        const int count = min(TILE, s.count - t0);
        load_rows<LA_X>(a.x, row, s.start + t0, s.d, count, [&](int t, int v, Real x) { xs[t][v] = x; });
        __syncthreads();
        if (a.marks) store_own(a.marks, h, s.mark(t0), a.D, d, q);
#pragma unroll 4
        for (int t = 0; t < count; t++) {
            const Real x = xs[t][c];
            system.follow(h, h, x);
            Real y = system.C[0] * h[0] - system.C[1] * h[1] + (system.C[2] * h[2] - system.C[3] * h[3]);
            y = sum_of_lanes(y);
            if (q == 0) ys[t][c] = y + skip * x;
        }
        __syncthreads();
        store_rows(a.out, a, row, s.start + t0, s.d, count, [&](int t, int v) { return ys[t][v]; });
    }
    store_own(a.end, h, s.n, a.D, d, q);
}

extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS)
    diagonal_vjp(const __grid_constant__ SelectiveArguments a) {
    __shared__ Step steps[TILE][CHANNELS];
    __shared__ Four checkpoints[TILE / PART][THREADS];
    const Segment s(a);
    const Row row(a, s.d);
    const int c = threadIdx.x / LANES, q = threadIdx.x % LANES, d = s.d + c;
    const System system(a, d, q);
    State P, da = {}, dB = {}, dC = {};
    load_state(P, a.start, a.start_kind, s.n, a.D, d, q);
    const Real skip = a.skip && d < a.D ? parameter<Real>(a.skip, a.skip_kind, d) : (Real)0;
    Real dskip = 0;
    for (int t0 = (max(s.count, 1) - 1) / TILE * TILE; t0 >= 0 && s.count > 0; t0 -= TILE) {
        const int count = min(TILE, s.count - t0);
        const i64 token = s.start + t0;
        load_rows<LA_X>(a.x, row, token, s.d, count, [&](int t, int v, Real x) { steps[t][v].x = x; });
        load_rows<LA_GRAD>(a.dout, row, token, s.d, count, [&](int t, int v, Real dy) { steps[t][v].dout = dy; });
        State begin;
        load_own(begin, a.marks, s.mark(t0), a.D, d, q);
        __syncthreads();
#pragma unroll 1
        for (int part = 0; part < count; part += PART) {
            checkpoints[part / PART][threadIdx.x] = {begin[0], begin[1], begin[2], begin[3]};
#pragma unroll
            for (int t = 0; t < PART; t++) system.follow(begin, begin, steps[part + t][c].x);
        }
#pragma unroll 1
        for (int part = (count - 1) / PART * PART; part >= 0; part -= PART) {
            Real h[PART + 1][STATES], dx[PART] = {};
            const Four first = checkpoints[part / PART][threadIdx.x];
#pragma unroll
            for (int k = 0; k < STATES; k++) h[0][k] = first.x[k];
#pragma unroll
            for (int t = 0; t < PART; t++) system.follow(h[t + 1], h[t], steps[part + t][c].x);
#pragma unroll
            for (int t = PART - 1; t >= 0; t--) {
                if (part + t >= count) continue;
                const Step now = steps[part + t][c];
                dskip += now.dout * now.x;
#pragma unroll
                for (int k = 0; k < STATES; k += 2) {
                    const Real re = P[k] + system.C[k] * now.dout, im = P[k + 1] - system.C[k + 1] * now.dout;
                    dx[t] += system.B[k] * re + system.B[k + 1] * im;
                    dB[k] += now.x * re, dB[k + 1] += now.x * im;
                    dC[k] += now.dout * h[t + 1][k], dC[k + 1] -= now.dout * h[t + 1][k + 1];
                    da[k] += re * h[t][k] + im * h[t][k + 1], da[k + 1] += im * h[t][k] - re * h[t][k + 1];
                    P[k] = system.a[k] * re + system.a[k + 1] * im;
                    P[k + 1] = system.a[k] * im - system.a[k + 1] * re;
                }
            }
#pragma unroll
            for (int t = 0; t < PART; t++) dx[t] = sum_of_lanes(dx[t]);
            __syncwarp();   // every lane of a channel has read its steps
            if (q == 0)
#pragma unroll
                for (int t = 0; t < PART; t++) steps[part + t][c].x = dx[t] + skip * steps[part + t][c].dout;
        }
        __syncthreads();
        store_rows(a.dx, a, row, token, s.d, count, [&](int t, int v) { return steps[t][v].x; });
        __syncthreads();
    }
    store_own(a.end, P, s.n, a.D, d, q);
    Real dlog_dt = 0;
#pragma unroll
    for (int k = 0; k < STATES; k += 2) {
        if (!is_number(a, d, q, k)) continue;
        const Held own = held(a, d, q, k);
        const Number dB_k = {dB[k], dB[k + 1]}, dz = times(conjugate(own.factor()), Number{da[k], da[k + 1]});
        const Number through = times(dB_k, conjugate(own.slope()));
        const i64 n = (i64)s.n * a.D * (N / 2) + place(d, q, k);
        ((Real*)a.dA)[n] = own.A.re * (own.dt * dz.re + through.re);
        ((Real*)a.dB)[n] = own.dt * dz.im + through.im;
        dlog_dt += own.dt * (times(dz, conjugate(own.A)).re + times(dB_k, conjugate(own.factor())).re);
    }
    dlog_dt = sum_of_lanes(dlog_dt);
    if (q == 0 && d < a.D) ((Real*)a.dbias)[(i64)s.n * a.D + d] = dlog_dt;
#pragma unroll
    for (int k = 0; k < STATES; k++) dC[k] *= 2 * (Real)a.scale;
    store_own(a.dC, dC, s.n, a.D, d, q);
    if (q == 0 && d < a.D) ((Real*)a.dskip)[(i64)s.n * a.D + d] = dskip;
}
