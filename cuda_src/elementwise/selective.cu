// The selective scan forward (selective.cuh has the equations).
//
// Where there are few sequences, they are cut into segments: `carry` finds what each adds to the state, `chain` the
// state that each begins with, since a segment multiplies an earlier state by e^{A sum dt}, or the product of its
// decays if LA_KEYS; LA_BACK: the gradient that each ends with. With `marks` the state before every tile is stored.
// LA_ALL, of sequences whose other tokens are elsewhere: `carry` is of the last segment too, and `chain` finds what all
// segments together add, `end`, and multiply by, `dA`.
#include "elementwise/selective.cuh"

struct alignas(2 * sizeof(Real)) Step {
    Real dt, u;
};
template <bool OUTPUTS> LA_DEVICE void pass(Given a) {
    __shared__ Step steps[TILE][CHANNELS];
    __shared__ Real ys[OUTPUTS ? TILE : 1][CHANNELS];
    __shared__ __align__(16) Real B[TILE][WIDTH], C[OUTPUTS ? TILE : 1][WIDTH];
    __shared__ Norms norms;
    const Segment s(a);
    if (s.count <= 0 && s.number) return;
    if (!OUTPUTS && !LA_ALL && s.is_last()) return;
    const Row row(a, s.d);
    const int c = threadIdx.x / LANES, q = threadIdx.x % LANES, d = s.d + c;
    State h, rate, product;
    load_state(rate, a.A, a.A_kind, 0, a.D, d, q);
#pragma unroll
    for (int k = 0; k < STATES; k++) rate[k] = rate_of(rate[k]), h[k] = 0, product[k] = 1;
    if constexpr (OUTPUTS) {
        if (a.segments > 1) load_own(h, a.begins, (i64)s.n * a.segments + s.number, a.D, d, q);
        else load_state(h, a.start, a.start_kind, s.n, a.D, d, q);
    }
    Real bias[PER] = {}, skip[PER] = {}, sum = 0;
    if (row.inside)
#pragma unroll
        for (int v = 0; v < PER; v++) {
            if (a.bias) bias[v] = parameter<Real>(a.bias, a.bias_kind, s.d + row.column + v);
            if (a.skip) skip[v] = parameter<Real>(a.skip, a.skip_kind, s.d + row.column + v);
        }
    const i64 token = s.start + s.from;
    const Real scale = (Real)a.scale;
    Ahead<LA_X> x(a.x, row, token, s.d), own = x;
    Ahead<LA_DT> dt(a.dt, row, token, s.d);
    Ahead<OUTPUTS ? LA_Z : (int)NONE> z(a.z, row, token, s.d);
    Place out(a.out, (i64)a.D * bytes_of(LA_X), row, token, s.d, bytes_of(LA_X));
    Vectors<LA_B> b(a.B, token);
    Vectors<LA_C> r(a.C, token);
    const auto fetch = [&](int count) {
        x.load(row, count);
        dt.load(row, count);
        b.load(count);
        if constexpr (OUTPUTS) r.load(count);
        x.at += x.tile, dt.at += dt.tile, b.at += TILE * b.outer, r.at += TILE * r.outer;
    };
    clear(B);
    if constexpr (OUTPUTS) clear(C);
    if constexpr (WIDTH > N) __syncthreads();
    if (s.count > 0) fetch(min(TILE, s.count));
    for (int t0 = 0; t0 < s.count; t0 += TILE) {
        const int count = min(TILE, s.count - t0);
        b.put(B, 1);
        find_norms(norms, B);
#pragma unroll
        for (int i = 0; i < Row::COUNT; i++) {
            Real xs[PER], raw[PER];
            x.get(i, xs);
            dt.get(i, raw);
            if (row.of(i) < TILE)
#pragma unroll
                for (int v = 0; v < PER; v++) {
                    const Real step = step_of(a, raw[v] + bias[v], norm_of(norms, row.of(i)));
                    steps[row.of(i)][row.column + v] = {step, step * xs[v]};
                }
        }
        if constexpr (OUTPUTS) {
#pragma unroll
            for (int i = 0; i < Row::COUNT; i++) own.rows[i] = x.rows[i];
            z.load(row, count);
            z.at += z.tile;
            r.put(C, scale);
        }
        __syncthreads();
        if (t0 + TILE < s.count) fetch(min(TILE, s.count - t0 - TILE));
        if (OUTPUTS && a.marks) store_own(a.marks, h, s.mark(s.from + t0), a.D, d, q);
#pragma unroll 4
        for (int t = 0; t < count; t++) {
            const Step now = steps[t][c];
            State Bt, Ct;
            read(Bt, &B[t][q * STATES]);
            if constexpr (OUTPUTS) read(Ct, &C[t][q * STATES]);
            Real y = 0, other = 0;
#pragma unroll
            for (int k = 0; k < STATES; k++) {
                const Real factor = decay_of(now.dt, rate[k], Bt[k]);
                h[k] = factor * h[k] + now.u * Bt[k];
                if constexpr (!OUTPUTS && LA_KEYS) product[k] *= factor;
                if constexpr (OUTPUTS) (k & 1 ? other : y) += Ct[k] * h[k];
            }
            if constexpr (OUTPUTS) {
                y += other;
#pragma unroll
                for (int m = 1; m < LANES; m *= 2) y += __shfl_xor_sync(~0u, y, m);
                if (q == 0) ys[t][c] = y;
            } else sum += now.dt;
        }
        __syncthreads();
        if constexpr (OUTPUTS)
#pragma unroll
            for (int i = 0; i < Row::COUNT; i++) {
                if (!row.inside || row.of(i) >= count) continue;
                Real y[PER], xs[PER], gate[PER] = {};
                own.get(i, xs);
                z.get(i, gate);
#pragma unroll
                for (int v = 0; v < PER; v++) {
                    y[v] = ys[row.of(i)][row.column + v] + skip[v] * xs[v];
                    if constexpr (LA_Z != NONE) y[v] *= silu(gate[v]);
                }
                store_elements<LA_X, PER>(out.of(i), y);
            }
        out.at += out.tile;
    }
    if constexpr (OUTPUTS) {
        if (s.is_last()) store_own(a.end, h, s.n, a.D, d, q);
    } else {
        const i64 slot = (i64)s.n * a.segments + s.number;
        store_own(a.begins, h, slot, a.D, d, q);
        if constexpr (LA_KEYS) store_own(a.sums, product, slot, a.D, d, q);
        else if (q == 0 && d < a.D) ((Real*)a.sums)[slot * a.D + d] = sum;
    }
}
extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS)
    selective(const __grid_constant__ SelectiveArguments a) {
    pass<true>(a);
}
extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS) carry(const __grid_constant__ SelectiveArguments a) {
    pass<false>(a);
}

// One thread a sequence and number of its state. `start`: h_0, or the gradient of h_T.
extern "C" __global__ void __launch_bounds__(128) chain(const __grid_constant__ SelectiveArguments a) {
    const i64 each = (i64)a.D * N, thread = (i64)blockIdx.x * 128 + threadIdx.x;
    const int n = (int)(thread / each);
    if (n >= a.sequences) return;
    const i64 place = thread % each;
    const int T = a.offsets ? (int)(a.offsets[n + 1] - a.offsets[n]) : a.T, d = (int)(place / N);
    const int segments = max(1, (T + a.each - 1) / a.each);
    const Real rate = LA_KEYS ? (Real)0 : rate_of(parameter<Real>(a.A, a.A_kind, place));
    Real h = a.start ? parameter<Real>(a.start, a.start_kind, n * each + place) : (Real)0, product = 1;
    for (int i = 0; i < segments; i++) {
        const i64 slot = (i64)n * a.segments + (LA_BACK ? segments - 1 - i : i);
        Real* const at = (Real*)a.begins + slot * each + place;
        Real next = 0;
        if (LA_ALL || i + 1 < segments) {
            const Real sum = ((const Real*)a.sums)[LA_KEYS ? slot * each + place : slot * a.D + d];
            const Real factor = LA_KEYS ? sum : decay(sum, rate);
            next = *at + factor * h;
            product *= factor;
        }
        if (!LA_ALL) *at = h;
        h = next;
    }
    if constexpr (LA_ALL) {
        ((Real*)a.end)[n * each + place] = h;
        ((Real*)a.dA)[n * each + place] = product;
    }
}
