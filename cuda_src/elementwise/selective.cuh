// The selective scan: what its passes share. Of channel d and number n of its state
//
//     dt = clip(dt_t + bias, or softplus of it),   u = dt x_t
//     h_t[n] = e^{dt A[n]} h_{t-1}[n] + u B_t[n],   y_t = scale sum_n C_t[n] h_t[n],   out = (y + D x) silu(z)
//
// LA_KEYS: dt = beta / (1 + beta |B_t|^2), of a beta in the place of the raw dt, and 1 - dt B_t[n]^2 in place of
// e^{dt A[n]}.
//
// A block has CHANNELS channels of a segment of a sequence, whose tokens pass in tiles of TILE. LANES lanes share a
// channel, each with STATES numbers of its state in registers. Before and after a tile lanes have PER neighbouring
// channels of a token: `Row`. Kinds of numbers in memory: LA_X of x, out and dx, LA_DT, LA_Z (7: no gate), LA_B, LA_C,
// LA_GRAD of dout; constants and initial states by arguments.
#pragma once
#include "arguments/elementwise/SelectiveArguments.cuh"
#include "ops/element.cuh"
#include "ops/formulas.cuh"

#if LA_DOUBLE
typedef double Real;
#else
typedef float Real;
#endif
enum { NONE = 7 };
constexpr int N = LA_N, LANES = LA_LANES, STATES = LA_STATES, WIDTH = LANES * STATES, THREADS = LA_THREADS;
constexpr int TILE = LA_TILE, CHANNELS = THREADS / LANES, PER = LA_PER, PER_N = LA_PER_N;
static_assert(WIDTH >= N && 32 % LANES == 0 && CHANNELS % PER == 0 && N % PER_N == 0, "lanes of a channel");
typedef const SelectiveArguments& Given;
typedef Real State[STATES];

// e^{dt A} from the rate A, or A log2(e), which is finite: a step of 0 keeps a state
LA_DEVICE float rate_of(float A) {
    const float rate = A * 1.44269504089f;
    return rate < -3e38f ? -3e38f : rate;
}
LA_DEVICE double rate_of(double A) { return A < -1e308 ? -1e308 : A; }
LA_DEVICE float decay(float dt, float rate) { return exp2_approx(dt * rate); }
LA_DEVICE double decay(double dt, double rate) { return exp(dt * rate); }
constexpr Real RATE = LA_DOUBLE || LA_KEYS ? 1. : 0.693147180559945;   // A of a rate
LA_DEVICE Real decay_of(Real dt, Real rate, Real B) { return LA_KEYS ? fma(-(B * B), dt, (Real)1) : decay(dt, rate); }

// the step of dt + bias, and its slope; LA_SOFT: softplus, LA_CLIP: within limits; LA_KEYS: norm is |B_t|^2
LA_DEVICE Real step_of(Given a, Real raw, Real norm) {
    if (LA_KEYS) return raw / (1 + raw * norm);
    const Real step = LA_SOFT ? softplus(raw) : raw;
    if (!LA_CLIP) return step;
    return step<(Real)a.low ? (Real)a.low : step>(Real) a.high ? (Real)a.high : step;
}
LA_DEVICE Real slope_of(Given a, Real raw, Real norm) {
    if (LA_KEYS) return 1 / ((1 + raw * norm) * (1 + raw * norm));
    const Real slope = LA_SOFT ? sigmoid(raw) : (Real)1;
    if (!LA_CLIP) return slope;
    const Real step = LA_SOFT ? softplus(raw) : raw;
    return step >= (Real)a.low && step <= (Real)a.high ? slope : (Real)0;
}

// numbers of shared memory, 16 bytes at a time
template <int M> LA_DEVICE void read(double (&x)[M], const double* from) {
#pragma unroll
    for (int i = 0; i < M; i++) x[i] = from[i];
}
template <int M> LA_DEVICE void read(float (&x)[M], const float* from) {
    static_assert(M % 4 == 0 || M == 1, "16 bytes");
    if constexpr (M == 1) x[0] = from[0];
    else
#pragma unroll
        for (int i = 0; i < M; i += 4) {
            const float4 y = *(const float4*)(from + i);
            x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w;
        }
}

// Tokens from .. from + count of a segment of sequence n, which begins at token `start` of the array
struct Segment {
    i64 start;
    int n, number, from, T, count, tile, d;   // tile: of channels, of which d is the first
    __device__ __forceinline__ explicit Segment(Given a) {
        tile = blockIdx.x % a.tiles;
        number = blockIdx.x / a.tiles % a.segments;
        n = blockIdx.x / a.tiles / a.segments;
        d = tile * CHANNELS;
        start = a.offsets ? a.offsets[n] : (i64)n * a.T;
        T = a.offsets ? (int)(a.offsets[n + 1] - start) : a.T;
        from = number * a.each;
        count = min(a.each, T - from);
    }
    __device__ __forceinline__ bool is_last() const { return from + count == T; }
    // the state that lies before token t, a multiple of TILE
    __device__ __forceinline__ i64 mark(int t) const { return start / TILE + n + t / TILE; }
};

// PER channels of a token of a tile, of a thread
struct Row {
    static constexpr int COLUMNS = CHANNELS / PER, STEP = THREADS / COLUMNS, COUNT = (TILE + STEP - 1) / STEP;
    int column, first;
    bool inside;
    __device__ __forceinline__ Row(Given a, int d)
        : column(threadIdx.x % COLUMNS * PER), first(threadIdx.x / COLUMNS), inside(d + column < a.D) {}
    __device__ __forceinline__ int of(int i) const { return first + i * STEP; }
};
// Where a thread's rows of a tile are: bytes from one to the next, and from a tile to the next
struct Place {
    char* at;
    int step, tile;
    __device__ __forceinline__ Place(char* data, i64 outer, const Row& r, i64 token, int d, int bytes)
        : at(data + (token + r.first) * outer + (i64)(d + r.column) * bytes),
          step((int)outer * Row::STEP),
          tile((int)outer * TILE) {}
    __device__ __forceinline__ char* of(int i) const { return at + i * step; }
};
template <int KIND> struct Ahead : Place {   // the rows of a thread of a tile
    Loaded<KIND, PER> rows[Row::COUNT];
    __device__ __forceinline__ Ahead(const Strided& x, const Row& r, i64 token, int d)
        : Place(x.data, x.outer, r, token, d, bytes_of(KIND)) {
#pragma unroll
        for (int i = 0; i < Row::COUNT; i++) rows[i].zero();
    }
    // count: tokens of the tile
    __device__ __forceinline__ void load(const Row& r, int count) {
        if (!r.inside) return;
        if (count == TILE && TILE % Row::STEP == 0)
#pragma unroll
            for (int i = 0; i < Row::COUNT; i++) rows[i].load(of(i));
        else
#pragma unroll
            for (int i = 0; i < Row::COUNT; i++)
                if (r.of(i) < count) rows[i].load(of(i));
                else rows[i].zero();
    }
    __device__ __forceinline__ void get(int i, Real (&to)[PER]) const { rows[i].get(to); }
};
template <> struct Ahead<NONE> {   // an array that is not given
    int tile;
    char* at;
    __device__ __forceinline__ Ahead(const Strided&, const Row&, i64, int) : tile(0), at(nullptr) {}
    __device__ __forceinline__ void load(const Row&, int) {}
    __device__ __forceinline__ void get(int, Real (&)[PER]) const {}
};

// B or C of a tile
template <int KIND> struct Vectors {
    static constexpr int EACH = N / PER_N, ITEMS = TILE * EACH, COUNT = (ITEMS + THREADS - 1) / THREADS;
    Loaded<KIND, PER_N> rows[COUNT];
    const char* at;   // of the first token of the tile
    int outer;
    __device__ __forceinline__ Vectors(const Strided& x, i64 token)
        : at(x.data + token * x.outer), outer((int)x.outer) {}
    __device__ __forceinline__ void load(int count) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int item = threadIdx.x + i * THREADS, t = item / EACH, n = item % EACH * PER_N;
            if (t < count) rows[i].load(at + (t * outer + n * bytes_of(KIND)));
            else rows[i].zero();
        }
    }
    __device__ __forceinline__ void put(Real (&to)[TILE][WIDTH], Real scale) const {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int item = threadIdx.x + i * THREADS, t = item / EACH, n = item % EACH * PER_N;
            Real x[PER_N];
            rows[i].get(x);
#pragma unroll
            for (int k = 0; k < PER_N; k++)
                if (t < TILE) to[t][n + k] = scale * x[k];
        }
    }
};
LA_DEVICE void clear(Real (&to)[TILE][WIDTH]) {   // the numbers that no state has
    if constexpr (WIDTH > N)
        for (int i = threadIdx.x; i < TILE * WIDTH; i += THREADS) to[i / WIDTH][i % WIDTH] = 0;
}

// |B_t|^2 of the tokens of a tile (LA_KEYS), of which PARTS neighbouring threads each add some; a barrier before, one
// after
typedef Real Norms[LA_KEYS ? TILE : 1];
LA_DEVICE Real norm_of(const Norms& norms, int t) { return LA_KEYS && t < TILE ? norms[t] : (Real)0; }
LA_DEVICE void find_norms(Norms& norms, const Real (&B)[TILE][WIDTH]) {
    if constexpr (LA_KEYS) {
        constexpr int PARTS = THREADS / TILE < 32 ? THREADS / TILE : 32;
        static_assert((PARTS & (PARTS - 1)) == 0 && PARTS * TILE <= THREADS, "threads of a token");
        const int t = threadIdx.x / PARTS, part = threadIdx.x % PARTS;
        Real sum = 0;
        __syncthreads();
        if (t < TILE)
#pragma unroll
            for (int n = part; n < N; n += PARTS) sum += B[t][n] * B[t][n];
#pragma unroll
        for (int m = 1; m < PARTS; m *= 2) sum += __shfl_xor_sync(~0u, sum, m);
        if (t < TILE && part == 0) norms[t] = sum;
        __syncthreads();
    }
}

// numbers q STATES .. of channel d of an array (.., D, N); 0 outside
LA_DEVICE void load_state(State& h, const char* from, int kind, i64 slot, int D, int d, int q) {
#pragma unroll
    for (int s = 0; s < STATES; s++)
        h[s] = from && d < D && q * STATES + s < N ? parameter<Real>(from, kind, (slot * D + d) * N + q * STATES + s)
                                                   : (Real)0;
}
LA_DEVICE void load_own(State& h, const char* from, i64 slot, int D, int d, int q) {
    if constexpr (WIDTH == N && !LA_DOUBLE) {
        if (d < D) read(h, (const Real*)from + ((slot * D + d) * N + q * STATES));
        else
#pragma unroll
            for (int s = 0; s < STATES; s++) h[s] = 0;
    } else load_state(h, from, LA_DOUBLE ? 3 : 2, slot, D, d, q);
}
LA_DEVICE void store_own(char* to, const State& h, i64 slot, int D, int d, int q) {
    if (d >= D) return;
    Real* const at = (Real*)to + ((slot * D + d) * N + q * STATES);
    if constexpr (WIDTH == N && !LA_DOUBLE) {
#pragma unroll
        for (int s = 0; s < STATES; s += 4) *(float4*)(at + s) = make_float4(h[s], h[s + 1], h[s + 2], h[s + 3]);
    } else
#pragma unroll
        for (int s = 0; s < STATES; s++)
            if (q * STATES + s < N) at[s] = h[s];
}
