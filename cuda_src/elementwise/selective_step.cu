// One token of the selective scan (selective.cuh): LANES lanes a channel, each with four numbers of its state, which
// are read and written once; `end` may be `start`. A thread does that for EACH sequences and asks for all that they
// need before it waits for any of it. Step, skip and gate of a channel are of one lane for each sequence: it has
// OWN of them, from `owned` on.
#include "elementwise/selective.cuh"

constexpr int EACH = LA_EACH, OWN = EACH > LANES ? EACH / LANES : 1, SHARED = EACH > LANES ? LANES : EACH;
static_assert(STATES == 4 && PER == 1 && TILE == 1, "one token");

// Four numbers from n on of a vector; those that N does not have are 0
template <int KIND> struct Four {
    Loaded<KIND, 4> together;
    Loaded<KIND, 1> each[PER_N == 4 ? 1 : 4];
    __device__ __forceinline__ void load(const char* from, int n, bool given) {
        if constexpr (PER_N == 4) {
            if (given && n < N) together.load(from + n * bytes_of(KIND));
            else together.zero();
        } else
#pragma unroll
            for (int k = 0; k < 4; k++)
                if (given && n + k < N) each[k].load(from + (n + k) * bytes_of(KIND));
                else each[k].zero();
    }
    __device__ __forceinline__ void get(State& x) const {
        if constexpr (PER_N == 4) together.get(x);
        else
#pragma unroll
            for (int k = 0; k < 4; k++) {
                Real one[1];
                each[k].get(one);
                x[k] = one[0];
            }
    }
};
template <int KIND> struct One {
    Loaded<KIND, 1> x;
    __device__ __forceinline__ void load(const Strided& from, i64 row, int d, bool given) {
        if (given) x.load(from.data + row * from.outer + (i64)d * bytes_of(KIND));
        else x.zero();
    }
    __device__ __forceinline__ Real get() const {
        Real one[1];
        x.get(one);
        return one[0];
    }
};
template <> struct One<NONE> {
    __device__ __forceinline__ void load(const Strided&, i64, int, bool) {}
    __device__ __forceinline__ Real get() const { return 0; }
};

// The first of the OWN sequences whose sums lane q has after `sums_of_lanes`; SHARED lanes have different ones
__device__ __forceinline__ int owned(int q) {
    int first = 0;
#pragma unroll
    for (int m = 1, part = EACH / 2; m < SHARED; m *= 2, part /= 2) first += q & m ? part : 0;
    return first;
}
__device__ __forceinline__ int owner(int i) {   // a lane that has those of sequence i
    int q = 0;
#pragma unroll
    for (int m = 1, part = EACH / 2; m < SHARED; m *= 2, part /= 2) q += i & part ? m : 0;
    return q;
}
// x[i], i < OWN: the sums over the lanes of a channel for sequences owned(q) + i.  Half of the sums goes to a neighbour
__device__ __forceinline__ void sums_of_lanes(Real (&x)[EACH], int q) {
#pragma unroll
    for (int m = 1, part = EACH / 2; m < SHARED; m *= 2, part /= 2)
#pragma unroll
        for (int i = 0; i < part; i++) {
            const bool upper = q & m;
            const Real other = __shfl_xor_sync(~0u, upper ? x[i] : x[i + part], m);
            x[i] = (upper ? x[i + part] : x[i]) + other;
        }
#pragma unroll
    for (int m = SHARED; m < LANES; m *= 2)
#pragma unroll
        for (int i = 0; i < OWN; i++) x[i] += __shfl_xor_sync(~0u, x[i], m);
}

extern "C" __global__ void __launch_bounds__(THREADS) selective_step(const __grid_constant__ SelectiveArguments a) {
    const int tile = blockIdx.x % a.tiles, first = blockIdx.x / a.tiles * EACH;
    const int q = threadIdx.x % LANES, d = tile * CHANNELS + threadIdx.x / LANES, n = 4 * q, own = first + owned(q);
    const bool inside = d < a.D;
    const i64 place = (i64)d * N, each = (i64)a.D * N;
    Four<LA_START> start[EACH];
    Four<LA_B> B[EACH];
    Four<LA_C> C[EACH];
    One<LA_X> x[OWN];
    One<LA_DT> dt[OWN];
    One<LA_Z> z[OWN];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const i64 row = first + i;
        const bool given = inside && row < a.sequences;
        start[i].load(a.start + (row * each + place) * bytes_of(LA_START), n, given && a.start);
        B[i].load(a.B.data + row * a.B.outer, n, given);
        C[i].load(a.C.data + row * a.C.outer, n, given);
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const i64 row = own + i;
        const bool given = inside && row < a.sequences;
        x[i].load(a.x, row, d, given);
        dt[i].load(a.dt, row, d, given);
        z[i].load(a.z, row, d, given);
    }
    State rate;
    load_state(rate, a.A, a.A_kind, 0, a.D, d, q);
#pragma unroll
    for (int k = 0; k < 4; k++) rate[k] = rate_of(rate[k]);
    const Real bias = a.bias && inside ? parameter<Real>(a.bias, a.bias_kind, d) : (Real)0;
    const Real skip = a.skip && inside ? parameter<Real>(a.skip, a.skip_kind, d) : (Real)0;
    Real steps[OWN], writes[OWN], y[EACH];
    if constexpr (LA_KEYS) {   // y: |B|^2
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            State b;
            B[i].get(b);
            y[i] = b[0] * b[0] + b[1] * b[1] + b[2] * b[2] + b[3] * b[3];
        }
        sums_of_lanes(y, q);
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        steps[i] = step_of(a, dt[i].get() + bias, LA_KEYS ? y[i] : (Real)0);
        writes[i] = steps[i] * x[i].get();
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const Real step = __shfl_sync(~0u, steps[i % OWN], owner(i), LANES);
        const Real write = __shfl_sync(~0u, writes[i % OWN], owner(i), LANES);
        State h, b, c;
        start[i].get(h);
        B[i].get(b);
        C[i].get(c);
        y[i] = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            h[k] = decay_of(step, rate[k], b[k]) * h[k] + write * b[k];
            y[i] += c[k] * h[k];
        }
        if (inside && first + i < a.sequences) store_own(a.end, h, first + i, a.D, d, q);
    }
    sums_of_lanes(y, q);
    if (!inside || q >= SHARED) return;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        if (own + i >= a.sequences) continue;
        Real out = (Real)a.scale * y[i] + skip * x[i].get();
        if constexpr (LA_Z != NONE) out *= silu(z[i].get());
        put_element<LA_X>(a.out, (i64)(own + i) * a.D + d, out);
    }
}
