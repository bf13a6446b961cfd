// Shared by the portable kernels of softmax attention: sequences with a cache, tiles of keys and values in shared
// memory.
//
// Keys have one numbering: token j of the call is j, the last one of the cache -1, those before it -2, -3, ... Query i
// reads j <= i, and of a window those after i - window. Token p of a stream lies in slot p mod slots of its cache.
#pragma once
#include "arguments/ops/Rows.cuh"
#include "softmax/decays.cuh"
#include "tile/copy.cuh"
#include "tile/mma.cuh"
#include "tile/columns.cuh"

#include "arguments/softmax/PortableArguments.cuh"

template <int DTYPE> struct Factors;   // of products with elements in shared memory
template <> struct Factors<0> {
    typedef Bfloat16 type;
};
template <> struct Factors<1> {
    typedef Half type;
};
template <> struct Factors<2> {
    typedef Float32 type;
};
typedef Factors<LA_DTYPE>::type Element;

constexpr int BYTES = Element::BYTES, WIDTH_K = (LA_K + 15) / 16 * 16, WIDTH_V = (LA_V + 15) / 16 * 16;
constexpr bool GATED = LA_GATED;

// The bytes of a row's element in global memory
template <int FROM> LA_DEVICE float element_at(const char* row, int c) {
    return load_element<FROM>(row + c * bytes_of(FROM));
}

// A sequence of a call
struct Owner {
    int sequence, batch, first, T, Tk;   // first: token of the batch row
    int seen, past;   // tokens before the call, seen_of; those in the cache that its first query may read

    __device__ __forceinline__ Owner(const PortableArguments& a, int sequence, int seen)
        : sequence(sequence), seen(seen) {
        const i64 from = a.offsets ? a.offsets[sequence] : 0;
        batch = a.offsets ? 0 : sequence;
        first = (int)from;
        T = a.offsets ? (int)(a.offsets[sequence + 1] - from) : a.T;
        Tk = a.offsets ? T : a.Tk;
        past = min(seen, a.slots);
        if (a.causal) past = min(past, a.window - 1);
    }
    // whose keys are read in pieces, each by a block of its own
    __device__ __forceinline__ bool is_short() const { return T <= LA_FEW; }
    // of a cache whose slots are the keys of a call: those that hold tokens
    __device__ __forceinline__ int keys(const PortableArguments& a) const {
        return !LA_PAST && a.lengths ? (int)min((i64)Tk, a.lengths[sequence]) : Tk;
    }
    __device__ __forceinline__ int pieces(const PortableArguments& a) const {
        return (past + Tk + a.piece - 1) / a.piece;
    }
    // of a query's head in arrays (batch, heads, tokens)
    __device__ __forceinline__ i64 number(const PortableArguments& a, int head, int t) const {
        return ((i64)batch * a.heads + head) * a.T + first + t;
    }
    __device__ __forceinline__ char* token(const Rows& x, int head, int t) const {
        return x.data + batch * x.batch + (i64)(first + t) * x.token + (i64)(head / x.group) * x.head;
    }
    __device__ __forceinline__ char* slot(const Rows& x, int head, int slot) const {
        return x.data + sequence * x.batch + slot * x.token + (i64)(head / x.group) * x.head;
    }
};
// A small number with the slots of a length: as many are full, and the next token goes to the same one
LA_DEVICE int seen_of(const PortableArguments& a, i64 length) {
    return (int)(length < a.slots ? length : a.slots + length % a.slots);
}
LA_DEVICE int tokens_seen(const PortableArguments& a, int sequence) {
    return LA_PAST ? seen_of(a, a.lengths[sequence]) : 0;
}

// Rows low .. high - 1 of a tile X in shared memory, the first WIDTH elements of each from where `row` points, else
// zeros; FROM: the elements there; ALIGN: bytes that rows' addresses are a multiple of
template <int FROM, int WIDTH, int THREADS, class X, int ALIGN = LA_ALIGN, class F> LA_DEVICE void fill_rows(u32 tile,
                                                                                                             int low,
                                                                                                             int high,
                                                                                                             F row) {
    if constexpr (FROM == LA_DTYPE) {
        constexpr int PER = X::ROW / ALIGN;
#pragma unroll 4
        for (int n = low * PER + threadIdx.x; n < high * PER; n += THREADS) {
            const int r = n / PER, at = n % PER * ALIGN;
            const char* const from = row(r);
            const bool valid = from && at < WIDTH * bytes_of(FROM);
            copy_in<ALIGN>(tile + X::piece(r, at / 16) + at % 16, valid ? from + at : (const char*)0, valid);
        }
    } else {
        for (int n = low * X::COLUMNS + threadIdx.x; n < high * X::COLUMNS; n += THREADS) {
            const int r = n / X::COLUMNS, c = n % X::COLUMNS;
            const char* const from = row(r);
            store_shared(tile + X::at(r, c), from && c < WIDTH ? element_at<FROM>(from, c) : 0.f);
        }
    }
}
// ROWS whole rows that lie `apart` bytes from one another; a thread has one place of a row wherever it can
template <int WIDTH, int ROWS, int THREADS, class X> LA_DEVICE void fill_all(u32 tile, const char* from, i64 apart) {
    constexpr int PER = X::ROW / LA_ALIGN, STEP = THREADS / PER;
    static_assert(THREADS % PER == 0 && ROWS % STEP == 0, "whole rows at a time");
    const int first = threadIdx.x / PER, at = threadIdx.x % PER * LA_ALIGN;
    const bool valid = at < WIDTH * BYTES;
    const char* const own = valid ? from + first * apart + at : (const char*)0;
#pragma unroll
    for (int r = 0; r < ROWS; r += STEP)
        copy_in<LA_ALIGN>(tile + X::piece(first + r, at / 16) + at % 16, own + r * apart, valid);
}
template <int FROM, int ROWS, int THREADS, class X> constexpr bool fills_all() {
    constexpr int PER = X::ROW / LA_ALIGN;
    return FROM == LA_DTYPE && THREADS % PER == 0 && ROWS % (THREADS % PER ? 1 : THREADS / PER) == 0;
}
// Keys, or values, from j0 on and before `end`; zeros after them
template <int WIDTH, int KEYS, int THREADS, class X>
LA_DEVICE void fill_keys(u32 tile, const PortableArguments& a, const Owner& own, const Rows& past, const Rows& tokens,
                         int head, int j0, int end) {
    const char* const from = own.token(tokens, head, j0);
    const auto token = [&](int r) -> const char* { return j0 + r < end ? from + r * tokens.token : (const char*)0; };
    if constexpr (fills_all<LA_INPUT, KEYS, THREADS, X>())
        if (j0 >= 0 && j0 + KEYS <= end) return fill_all<WIDTH, KEYS, THREADS, X>(tile, from, tokens.token);
    if constexpr (!LA_PAST) fill_rows<LA_INPUT, WIDTH, THREADS, X>(tile, 0, KEYS, token);
    else {
        const int before = min(max(-j0, 0), min(KEYS, end - j0)), base = before ? (own.seen + j0) % a.slots : 0;
        const char* const slots = own.slot(past, head, 0);
        if constexpr (fills_all<LA_CACHE, KEYS, THREADS, X>())
            if (before == KEYS && base + KEYS <= a.slots)
                return fill_all<WIDTH, KEYS, THREADS, X>(tile, slots + base * past.token, past.token);
        const auto slot = [&](int r) -> const char* {
            return slots + (base + r - (base + r >= a.slots ? a.slots : 0)) * past.token;
        };
        if (before) fill_rows<LA_CACHE, WIDTH, THREADS, X>(tile, 0, before, slot);
        if (before < KEYS) fill_rows<LA_INPUT, WIDTH, THREADS, X>(tile, before, KEYS, token);
    }
}
// A cache's sums of a token's decay before the first token of the call
LA_DEVICE Decays of_past(float b) {
    const float x = b * LOG2_E;
    return {-x, 0.f, __int_as_float(x > -16384.f ? 0 : -1), 0.f};
}

template <int N> LA_DEVICE void clear(float (&x)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) x[n][0] = x[n][1] = x[n][2] = x[n][3] = 0.f;
}
// Accumulators of two tiles of columns side by side as an operand A
LA_DEVICE typename Element::A operand_of(const float (&x)[4], const float (&y)[4]) {
    const float f[8] = {x[0], x[1], x[2], x[3], y[0], y[1], y[2], y[3]};
    return Element::operand(f);
}
// c += A B^T of 16 rows of A, from `row` on, and the 8 N rows of B from `other` on, over all columns
template <class X, class Y, int N> LA_DEVICE void multiply_rows(float (&c)[N][4], u32 a, int row, u32 b, int other,
                                                                int lane) {
    float rest[N][4];
    clear(rest);
#pragma unroll
    for (int k = 0; k < X::COLUMNS; k += 16) {
        const typename Element::A x = Element::operand(load_a_rows<Element, X>(a, row, k, lane));
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            typename Element::B y[2];
            load_b_rows<Element, Y>(y, b, other + n * 8, k, lane);
            multiply_terms<Element>(c[n], rest[n], x, y[0]);
            multiply_terms<Element>(c[n + 1], rest[n + 1], x, y[1]);
        }
    }
#pragma unroll
    for (int n = 0; n < (Element::EXACT ? N : 0); n++)
#pragma unroll
        for (int e = 0; e < 4; e++) c[n][e] += rest[n][e];
}
// c += P B of the accumulators P (16, 8 N) and rows of B from `row` on. LONG: a sum over many tiles, to which 32
// products at a time are added
template <class Y, bool LONG = true, int N, int M> LA_DEVICE void multiply_weights(float (&c)[M][4],
                                                                                   const float (&p)[N][4], u32 b,
                                                                                   int row, int lane) {
    constexpr bool APART = LONG && Element::EXACT;
    constexpr int RUN = APART && N >= 4 ? 4 : 2;
    static_assert(N % RUN == 0, "whole runs of columns of P");
#pragma unroll
    for (int first = 0; first < N; first += RUN) {
        typename Element::A x[RUN / 2];
#pragma unroll
        for (int n = 0; n < RUN; n += 2) x[n / 2] = operand_of(p[first + n], p[first + n + 1]);
#pragma unroll
        for (int m = 0; m < M; m += 2)
            add_products<APART>(c, m, [&](float (&d)[4], float (&e)[4]) {
#pragma unroll
                for (int n = 0; n < RUN; n += 2) {
                    typename Element::B y[2];
                    load_b_columns<Element, Y>(y, b, row + (first + n) * 8, m * 8, lane);
                    Element::multiply(d, x[n / 2], y[0]);
                    Element::multiply(e, x[n / 2], y[1]);
                }
            });
    }
}
// two neighbouring numbers of a row of WIDTH elements
template <int TO, int WIDTH> LA_DEVICE void store_two(char* row, int c, float x, float y) {
    char* const to = row + c * bytes_of(TO);
    if constexpr (WIDTH % 2 == 0 && TO != 2) {
        if (c < WIDTH) *(u32*)to = pack_halves<TO>(x, y);
    } else if constexpr (WIDTH % 2 == 0) {
        if (c < WIDTH) *(float2*)to = {x, y};
    } else {
        if (c < WIDTH) store_element<TO>(to, x);
        if (c + 1 < WIDTH) store_element<TO>(to + bytes_of(TO), y);
    }
}

LA_DEVICE char* shared_memory() {
    extern __shared__ __align__(128) char memory[];
    return memory;
}
// Logits of a lane's two rows become exponentials, below the maxima m so far; l, their sums, and out are scaled to new
// maxima
template <int N, int M> LA_DEVICE void exponentiate(float (&s)[N][4], float (&m)[2], float (&l)[2],
                                                    float (&out)[M][4]) {
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float most = s[0][2 * h], sum = 0.f;
#pragma unroll
        for (int n = 0; n < N; n++) most = fmaxf(most, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
        most = fmaxf(m[h], row_max(most));
        const float shift = most == minus_infinity() ? 0.f : most;
        factor[h] = exp2_approx(m[h] - shift);
        m[h] = most;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float& y = s[n][2 * h + e];
                y = exp2_approx(y - shift);
                sum += y;
            }
        l[h] = l[h] * factor[h] + sum;
    }
    if (factor[0] == 1.f && factor[1] == 1.f) return;
#pragma unroll
    for (int n = 0; n < M; n++) {
        out[n][0] *= factor[0];
        out[n][1] *= factor[0];
        out[n][2] *= factor[1];
        out[n][3] *= factor[1];
    }
}
// Of a row with maximum m and sum l, with the sink: the factor of its sum of values, and log2 of the denominator
LA_DEVICE float normalised(const PortableArguments& a, int head, float m, float l, float& log) {
    log = 0.f;
    if (!a.normalize) return exp2_approx(m);
    const float sink = a.sinks ? a.sinks[head / a.group_s] * LOG2_E : minus_infinity(), most = fmaxf(m, sink);
    if (most == minus_infinity()) return 1.f;
    const float less = exp2_approx(m - most), sum = l * less + exp2_approx(sink - most);
    log = most + log2_approx(sum);
    return less / sum;
}
// a row of `parts` and `maxima`: (pieces, tokens of the call, heads)
LA_DEVICE i64 part_row(const PortableArguments& a, const Owner& own, int piece, int head, int t) {
    return (((i64)piece * a.tokens) + (i64)own.batch * a.T + own.first + t) * a.heads + head;
}
