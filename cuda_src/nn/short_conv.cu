// The causal short convolution of each channel, and its gradients; ops/short_conv.py has the equations.
//
//     z_t = bias + sum_{i < W} weight_{W-1-i} x_{t-i}      y_t = act(z_t) (+ x_t)
//     dz_t = act'(z_t) dy_t      dx_t = sum_i weight_{W-1-i} dz_{t+i} (+ dy_t)      dweight_{W-1-i} = sum_t dz_t
//     x_{t-i}
//
// Lanes have LA_PER channels each and traverse a segment of `each` tokens of a sequence, the inputs of the last W
// tokens in registers; a warp has a segment, WARPS segments a block. Kinds: LA_DTYPE of x, y and dx, LA_WEIGHT,
// LA_BIAS, LA_PAST of states (7: not given), LA_GRAD of dy. LA_W: W. LA_SILU, LA_RESIDUAL. A segment is traversed in
// groups of LA_GROUP tokens; groups inside of it have no conditions, and the next group is loaded while one is
// computed. LA_SHIFT: of two tokens, 1 the weights are (mix, 1 - mix), 2 y_t = x_{t-1} without weights.
#include "arguments/ops/ConvArguments.cuh"
#include "ops/element.cuh"
#include "ops/formulas.cuh"

#if LA_DOUBLE
typedef double Real;
#else
typedef float Real;
#endif
enum { NONE = 7 };
constexpr int W = LA_W, WARPS = 4, GROUP = LA_GROUP;   // tokens that are loaded together
constexpr int KIND = LA_DTYPE, BYTES = bytes_of(KIND);
enum { MIX = 1, BEFORE = 2 };
constexpr bool WEIGHTED = LA_SHIFT != BEFORE;
typedef Real Numbers[LA_PER];
typedef Loaded<KIND, LA_PER> Token;
typedef Loaded<LA_GRAD, LA_PER> Gradient;

struct Segment {   // tokens from..from + count of a sequence of T tokens, which begins at token `start` of the array
    i64 start;
    int n, from, T, count;
    __device__ __forceinline__ Segment(const ConvArguments& a, u32 s) {
        if (a.offsets == nullptr) {
            n = s / a.per_sequence;
            from = s % a.per_sequence * a.each;
            T = a.T;
            start = (i64)n * a.T;
        } else {
            n = a.segments[2 * s];
            from = a.segments[2 * s + 1];
            start = a.offsets[n];
            T = (int)(a.offsets[n + 1] - start);
        }
        count = min((int)a.each, T - from);
    }
};
struct Channels {   // of a lane: the first one, its taps and bias
    int d;
    Numbers w[W], bias;
    __device__ __forceinline__ Channels(const ConvArguments& a, int first) : d(first) {
        if constexpr (!WEIGHTED) return;
        if constexpr (LA_SHIFT == MIX) {
            load_elements<LA_WEIGHT, LA_PER>(w[0], a.weight + (i64)d * bytes_of(LA_WEIGHT));
#pragma unroll
            for (int v = 0; v < LA_PER; v++) {
                w[W - 1][v] = 1 - w[0][v];
                bias[v] = 0;
            }
            return;
        }
        constexpr int SIZE = W * LA_PER * bytes_of(LA_WEIGHT);
        Real taps[W * LA_PER];
        const char* from = a.weight + (i64)d * W * bytes_of(LA_WEIGHT);
        if constexpr (SIZE % 16 == 0 || SIZE == 8 || SIZE == 4) load_elements<LA_WEIGHT, W * LA_PER>(taps, from);
        else
#pragma unroll
            for (int i = 0; i < W * LA_PER; i++) taps[i] = element<LA_WEIGHT>(from, i);
#pragma unroll
        for (int v = 0; v < LA_PER; v++) {
#pragma unroll
            for (int i = 0; i < W; i++) w[i][v] = taps[v * W + i];
            bias[v] = 0;
        }
        if constexpr (LA_BIAS != NONE) load_elements<LA_BIAS, LA_PER>(bias, a.bias + (i64)d * bytes_of(LA_BIAS));
    }
};
LA_DEVICE i64 slot_of(const ConvArguments& a, int n, int slot, int d) { return ((i64)n * a.S + slot) * a.D + d; }

// the row of `past` of a sequence, -1 for none
LA_DEVICE i64 place_of(const ConvArguments& a, i64 n) {
    if (!a.places) return n;
    const i64 place = LA_PLACE == 8 ? ((const i64*)a.places)[n] : (i64)((const int*)a.places)[n];
    return place >= 0 && place < a.pool ? place : -1;
}
// a slot of a state; 0 without one
LA_DEVICE void slot_in(Numbers& x, const ConvArguments& a, i64 place, i64 slot, int d) {
#pragma unroll
    for (int v = 0; v < LA_PER; v++) x[v] = 0;
    if constexpr (LA_PAST != NONE)
        if (place >= 0)
            load_elements<LA_PAST, LA_PER>(x, a.past + ((place * a.S + slot) * a.D + d) * bytes_of(LA_PAST));
}
// the input of token t < 0 of a sequence
LA_DEVICE void before(Numbers& x, const ConvArguments& a, const Segment& s, int t, int d) {
    slot_in(x, a, place_of(a, s.n), (i64)a.S + t, d);
}
struct Window {   // x_{t-W+1} .. x_{t-1}, in order
    Numbers x[W];
    __device__ __forceinline__ Window() {}
    __device__ __forceinline__ Window(const ConvArguments& a, const Segment& s, int d) {
#pragma unroll
        for (int i = 1; i < W; i++) {
            const int t = s.from - i;
            if (t >= 0)
                load_elements<KIND, LA_PER>(x[W - 1 - i], a.x.data + (s.start + t) * a.x.outer + (i64)d * BYTES);
            else before(x[W - 1 - i], a, s, t, d);
        }
    }
    // z of the token whose input is x[W - 1]
    __device__ __forceinline__ void convolve(Numbers& z, const Channels& c) const {
#pragma unroll
        for (int v = 0; v < LA_PER; v++) {
            if constexpr (WEIGHTED) {
                z[v] = c.bias[v];
#pragma unroll
                for (int i = 0; i < W; i++) z[v] += c.w[i][v] * x[i][v];
            } else z[v] = x[0][v];
        }
    }
    __device__ __forceinline__ void output(Numbers& y, const Channels& c) const {
        convolve(y, c);
#pragma unroll
        for (int v = 0; v < LA_PER; v++) {
            if (LA_SILU) y[v] = silu(y[v]);
            if (LA_RESIDUAL) y[v] += x[W - 1][v];
        }
    }
    __device__ __forceinline__ void advance() {
#pragma unroll
        for (int i = 0; i + 1 < W; i++)
#pragma unroll
            for (int v = 0; v < LA_PER; v++) x[i][v] = x[i + 1][v];
    }
};

template <bool IS> struct Flag {
    static constexpr bool value = IS;
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) conv(const __grid_constant__ ConvArguments a) {
    const u32 tiles = (a.D + 32 * LA_PER - 1) / (32 * LA_PER);
    const u32 segment = blockIdx.x / tiles * WARPS + threadIdx.x / 32;
    const int d = (blockIdx.x % tiles * 32 + threadIdx.x % 32) * LA_PER;
    if (segment >= a.count || d >= a.D) return;
    const Segment s(a, segment);
    const Channels c(a, d);
    Window window(a, s, d);
    const i64 step = (i64)a.D * BYTES;
    const char* from = a.x.data + (s.start + s.from) * a.x.outer + (i64)d * BYTES;
    char* to = a.y + ((s.start + s.from) * a.D + d) * BYTES;
    Token ahead[GROUP];
#pragma unroll
    for (int k = 0; k < GROUP; k++) {
        if (k < s.count) ahead[k].load(from);
        from += a.x.outer;
    }
    const auto compute = [&](auto inside, int n) {
        constexpr bool INSIDE = decltype(inside)::value;
#pragma unroll
        for (int k = 0; k < GROUP; k++) {
            if (!INSIDE && n + k >= s.count) break;
            ahead[k].get(window.x[W - 1]);
            if (INSIDE || n + k + GROUP < s.count) ahead[k].load(from);
            from += a.x.outer;
            Numbers y;
            window.output(y, c);
            store_elements<KIND, LA_PER>(to, y);
            to += step;
            window.advance();
        }
    };
    int n = 0;
    for (; n + 2 * GROUP <= s.count; n += GROUP) compute(Flag<true>(), n);
    for (; n < s.count; n += GROUP) compute(Flag<false>(), n);
}

// Every token has dz once in the segment that has its input, and again, for dx alone, in the one before it.
extern "C" __global__ void __launch_bounds__(32 * WARPS, LA_BLOCKS) conv_vjp(const __grid_constant__ ConvArguments a) {
    __shared__ Real sums[WEIGHTED ? WARPS : 1][W + 1][32 * LA_PER];
    const u32 tiles = (a.D + 32 * LA_PER - 1) / (32 * LA_PER), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 segment = blockIdx.x / tiles * WARPS + warp, tile = blockIdx.x % tiles * 32 * LA_PER;
    const int d = tile + lane * LA_PER;
    Numbers dw[W + 1] = {};
    if (segment < a.count && d < a.D) {
        const Segment s(a, segment);
        const Channels c(a, d);
        Window window;
        if constexpr (WEIGHTED) window = Window(a, s, d);
        Numbers dz[W] = {}, dys[LA_RESIDUAL ? W : 1] = {};   // of the last W tokens
        const i64 at = s.start + s.from, step = (i64)a.D * BYTES;
        const char* from = a.x.data + at * a.x.outer + (i64)d * BYTES;
        const char* grads = a.dy.data + at * a.dy.outer + (i64)d * bytes_of(LA_GRAD);
        char* to = a.y + ((at - (W - 1)) * a.D + d) * BYTES;   // dx of the token W - 1 before
        const int there = min(s.T - s.from, s.count + W - 1), last = s.count + W - 1;
        Token ahead[GROUP];
        Gradient dy_ahead[GROUP];
        const auto load = [&](int k, bool present) {
            if (present) {
                if constexpr (WEIGHTED) ahead[k].load(from);
                dy_ahead[k].load(grads);
            }
            from += a.x.outer;
            grads += a.dy.outer;
        };
#pragma unroll
        for (int k = 0; k < GROUP; k++) load(k, k < there);
        const auto compute = [&](auto inside, int n) {
            constexpr bool INSIDE = decltype(inside)::value;
#pragma unroll
            for (int k = 0; k < GROUP; k++) {
                const int now = n + k, own = now - (W - 1), t = s.from + own;
                if (!INSIDE && now >= last) break;
                if (INSIDE || now < there) {
                    Numbers z, dy;
                    if constexpr (WEIGHTED) ahead[k].get(window.x[W - 1]);
                    dy_ahead[k].get(dy);
                    load(k, INSIDE || now + GROUP < there);
                    if (LA_SILU) window.convolve(z, c);
#pragma unroll
                    for (int v = 0; v < LA_PER; v++) {
                        dz[W - 1][v] = LA_SILU ? dy[v] * silu_slope(z[v]) : dy[v];
                        if constexpr (LA_RESIDUAL) dys[W - 1][v] = dy[v];
                    }
                    if (WEIGHTED && (INSIDE || now < s.count))
#pragma unroll
                        for (int v = 0; v < LA_PER; v++) {
#pragma unroll
                            for (int i = 0; i < W; i++) dw[i][v] += dz[W - 1][v] * window.x[i][v];
                            dw[W][v] += dz[W - 1][v];
                        }
                } else
#pragma unroll
                    for (int v = 0; v < LA_PER; v++) {
                        dz[W - 1][v] = 0;
                        if constexpr (LA_RESIDUAL) dys[W - 1][v] = 0;
                    }
                if (INSIDE || own >= 0 || (LA_PAST != NONE && s.from == 0)) {
                    Numbers dx;
#pragma unroll
                    for (int v = 0; v < LA_PER; v++) {
                        dx[v] = WEIGHTED ? (Real)0 : dz[1][v];
                        if constexpr (WEIGHTED)
#pragma unroll
                            for (int i = 0; i < W; i++) dx[v] += c.w[W - 1 - i][v] * dz[i][v];
                        if constexpr (LA_RESIDUAL) dx[v] += dys[0][v];
                    }
                    const int slot = a.S + t - s.T;   // of the final state
                    if (!INSIDE && a.dend && slot >= 0) {
                        Numbers more;
                        load_elements<LA_END, LA_PER>(more, a.dend + slot_of(a, s.n, slot, d) * bytes_of(LA_END));
#pragma unroll
                        for (int v = 0; v < LA_PER; v++) dx[v] += more[v];
                    }
                    if (INSIDE || own >= 0) store_elements<KIND, LA_PER>(to, dx);
                    else if constexpr (LA_PAST != NONE)
                        store_elements<LA_PAST, LA_PER>(a.dpast + slot_of(a, s.n, a.S + t, d) * bytes_of(LA_PAST), dx);
                }
                to += step;
                if constexpr (WEIGHTED) window.advance();
#pragma unroll
                for (int i = 0; i + 1 < W; i++)
#pragma unroll
                    for (int v = 0; v < LA_PER; v++) {
                        dz[i][v] = dz[i + 1][v];
                        if constexpr (LA_RESIDUAL) dys[i][v] = dys[i + 1][v];
                    }
            }
        };
        // groups whose dx are of this segment and not of the final state, and that are followed by a whole group
        const int end = min(min(s.count, there - GROUP), a.dend ? s.T - (int)a.S - s.from + W - 1 : s.count);
        int n = 0;
        for (; n < min(W - 1, last); n += GROUP) compute(Flag<false>(), n);
        for (; n + GROUP <= end; n += GROUP) compute(Flag<true>(), n);
        for (; n < last; n += GROUP) compute(Flag<false>(), n);
    }
    if constexpr (!WEIGHTED) return;
#pragma unroll
    for (int i = 0; i <= W; i++)
#pragma unroll
        for (int v = 0; v < LA_PER; v++) sums[warp][i][v * 32 + lane] = dw[i][v];
    __syncthreads();
    Real* const parts = (Real*)a.parts + (i64)(blockIdx.x / tiles) * (W + 1) * a.D;
    for (int n = threadIdx.x; n < (W + 1) * 32 * LA_PER; n += 32 * WARPS) {
        const int i = n / (32 * LA_PER), own = n % (32 * LA_PER), column = tile + own % LA_PER + own / LA_PER * LA_PER;
        const int from = own % LA_PER * 32 + own / LA_PER;
        Real sum = sums[0][i][from];
#pragma unroll
        for (int w = 1; w < WARPS; w++) sum += sums[w][i][from];
        if (column < a.D) parts[(i64)i * a.D + column] = sum;
    }
}

// One thread a sequence and LA_PER channels. Final states y are rows of the pool (LA_POOLED), or one a sequence; they
// may be written over `past`.
struct Ends {
    i64 n, place, start, T;
    int d;
    bool there;
    __device__ __forceinline__ explicit Ends(const ConvArguments& a) {
        const u32 each = (a.D + LA_PER - 1) / LA_PER;
        const i64 thread = (i64)blockIdx.x * (32 * WARPS) + threadIdx.x;
        n = thread / each;
        d = (int)(thread % each) * LA_PER;
        there = n < a.sequences;
        if (!there) return;
        place = place_of(a, n);
        start = a.offsets ? a.offsets[n] : n * a.T;
        T = a.offsets ? a.offsets[n + 1] - start : a.T;
    }
    __device__ __forceinline__ bool writes() const { return !LA_POOLED || place >= 0; }
    __device__ __forceinline__ void write(const ConvArguments& a, char* to, i64 slot, const Numbers& x) const {
        const i64 row = LA_POOLED ? place : n;
        store_elements<LA_END, LA_PER>(to + ((row * a.S + slot) * a.D + d) * bytes_of(LA_END), x);
    }
};
extern "C" __global__ void __launch_bounds__(32 * WARPS) conv_end(const __grid_constant__ ConvArguments a) {
    const Ends e(a);
    if (!e.there || !e.writes()) return;
    for (int slot = 0; slot < (int)a.S; slot++) {
        const i64 t = e.T - a.S + slot;
        Numbers x;
        if (t >= 0) load_elements<KIND, LA_PER>(x, a.x.data + (e.start + t) * a.x.outer + (i64)e.d * BYTES);
        else slot_in(x, a, e.place, a.S + t, e.d);
        e.write(a, a.y, slot, x);
    }
}
// One token a sequence: y, and the final states in `end` where it is given, a slot further.
extern "C" __global__ void __launch_bounds__(32 * WARPS) conv_step(const __grid_constant__ ConvArguments a) {
    const Ends e(a);
    if (!e.there) return;
    const Channels c(a, e.d);
    Window window;
    load_elements<KIND, LA_PER>(window.x[W - 1], a.x.data + e.start * a.x.outer + (i64)e.d * BYTES);
    const i64 first = (i64)a.S - (W - 1);   // slot of the window
#pragma unroll
    for (int i = 0; i + 1 < W; i++) slot_in(window.x[i], a, e.place, first + i, e.d);
    Numbers y;
    window.output(y, c);
    store_elements<KIND, LA_PER>(a.y + (e.start * a.D + e.d) * BYTES, y);
    if (!a.end || !e.writes()) return;
    for (i64 slot = 0; slot + 1 < first; slot++) {
        Numbers x;
        slot_in(x, a, e.place, slot + 1, e.d);
        e.write(a, a.end, slot, x);
    }
#pragma unroll
    for (int i = 0; i < W; i++)
        if (first - 1 + i >= 0) e.write(a, a.end, first - 1 + i, window.x[i]);
}
// The gradient of past inputs through the final state alone
extern "C" __global__ void __launch_bounds__(32 * WARPS) conv_end_vjp(const __grid_constant__ ConvArguments a) {
    const Ends e(a);
    if (!e.there) return;
    for (int slot = 0; slot < (int)a.S; slot++) {
        Numbers x = {};
        if (a.dend && slot >= e.T)
            load_elements<LA_END, LA_PER>(x, a.dend + slot_of(a, (int)e.n, slot - (int)e.T, e.d) * bytes_of(LA_END));
        if constexpr (LA_PAST != NONE)
            store_elements<LA_PAST, LA_PER>(a.dpast + slot_of(a, (int)e.n, slot, e.d) * bytes_of(LA_PAST), x);
    }
}
