// One token of the selective scan (selective.cuh): LANES lanes a channel, each with four numbers of its state, which
// are read and written once; `end` may be `start`. A thread does that for EACH sequences and asks for all that they
// need before it waits for any of it.
#include "elementwise/selective.cuh"

constexpr int EACH = LA_EACH;
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

extern "C" __global__ void __launch_bounds__(THREADS) selective_step(const __grid_constant__ SelectiveArguments a) {
    const int tile = blockIdx.x % a.tiles, first = blockIdx.x / a.tiles * EACH;
    const int q = threadIdx.x % LANES, d = tile * CHANNELS + threadIdx.x / LANES, n = 4 * q;
    const bool inside = d < a.D;
    const i64 place = (i64)d * N, each = (i64)a.D * N;
    Four<LA_START> start[EACH];
    One<LA_X> x[EACH];
    One<LA_DT> dt[EACH];
    One<LA_Z> z[EACH];
    Four<LA_B> B[EACH];
    Four<LA_C> C[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const i64 row = first + i;
        const bool given = inside && row < a.sequences;
        start[i].load(a.start + (row * each + place) * bytes_of(LA_START), n, given && a.start);
        x[i].load(a.x, row, d, given);
        dt[i].load(a.dt, row, d, given);
        z[i].load(a.z, row, d, given);
        B[i].load(a.B.data + row * a.B.outer, n, given);
        C[i].load(a.C.data + row * a.C.outer, n, given);
    }
    State rate;
    load_state(rate, a.A, a.A_kind, 0, a.D, d, q);
#pragma unroll
    for (int k = 0; k < 4; k++) rate[k] = rate_of(rate[k]);
    const Real bias = a.bias && inside ? parameter<Real>(a.bias, a.bias_kind, d) : (Real)0;
    const Real skip = a.skip && inside ? parameter<Real>(a.skip, a.skip_kind, d) : (Real)0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const i64 row = first + i;
        State h, b, c;
        start[i].get(h);
        B[i].get(b);
        C[i].get(c);
        const Real own = x[i].get(), step = step_of(a, dt[i].get() + bias);
        Real y = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            h[k] = decay(step, rate[k]) * h[k] + step * own * b[k];
            y += c[k] * h[k];
        }
#pragma unroll
        for (int m = 1; m < LANES; m *= 2) y += __shfl_xor_sync(~0u, y, m);
        if (!inside || row >= a.sequences) continue;
        store_own(a.end, h, row, a.D, d, q);
        if (q) continue;
        y = (Real)a.scale * y + skip * own;
        if constexpr (LA_Z != NONE) y *= silu(z[i].get());
        put_element<LA_X>(a.out, row * a.D + d, y);
    }
}
