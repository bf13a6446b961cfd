// A constant diagonal system of complex states, forward and backward. Of channel d and number n of its state
//
//     h_t[n] = a[n] h_{t-1}[n] + B[n] x_t,   out_t = 2 scale Re sum_n C[n] h_t[n] + D x_t
//     P_t[n] = 2 scale C[n]* dout_t + a[n]* P_{t+1}[n],   dx_t = Re sum_n B[n]* P_t[n] + D dout_t
//     dB[n] = sum_t x_t P_t[n],   dC[n] = 2 scale sum_t dout_t h_t[n]*,   da[n] = sum_t P_t[n] h_{t-1}[n]*
//
// Blocks, tiles and lanes are those of selective.cuh, of sequences in one segment; N and STATES count real numbers, two
// of each complex one. a, B and C are dense (D, N). The backward computes the states of a tile again from its
// mark: first those before every PART tokens, then those of PART tokens in registers.
#include "elementwise/selective.cuh"

constexpr int PART = LA_PART;
static_assert(STATES == 4 && TILE % PART == 0 && PART <= TILE, "two complex numbers a lane");

// a, B and C of the two numbers of a lane
struct System {
    State a, B, C;
    __device__ __forceinline__ System(Given given, int d, int q) {
        load_state(a, given.A, given.A_kind, 0, given.D, d, q);
        load_state(B, given.B.data, LA_B, 0, given.D, d, q);
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
    store_own(a.dA, da, s.n, a.D, d, q);
    store_own(a.dB, dB, s.n, a.D, d, q);
#pragma unroll
    for (int k = 0; k < STATES; k++) dC[k] *= 2 * (Real)a.scale;
    store_own(a.dC, dC, s.n, a.D, d, q);
    if (q == 0 && d < a.D) ((Real*)a.dskip)[(i64)s.n * a.D + d] = dskip;
}
