// A linear model with a layer norm, learning: tiles of up to 16 tokens, a mini-batch each (docs/cores/fast_weights.md).
//
// A block is a head. Everything is transposed: a warp owns 16 channels v of the values, and of W^T (v, k) its rows, as
// accumulators w[D / 8][4]. Of an array of tokens y^T (v, tokens) a lane has y[n][e]: channel g + 8 (e / 2) of its
// warp, token 8 n + 2 j + e % 2. Accumulators are A operands as they are, and W^T and (tokens, tokens) matrices B
// operands of their transposes. Tiles in shared memory are float32, rows of tokens, S apart.
#pragma once
#include "arguments/fast_weights/LinearArguments.cuh"
#include "tile/mma.cuh"

constexpr int D = LA_D, WARPS = D / 16, THREADS = 32 * WARPS, MOST = 16, S = D + 8, TILE = MOST * S;
constexpr int MARK = (D / 2 + 2) * THREADS;   // numbers of a stored state, as lanes hold them
#if LA_ELEMENT == 0
typedef Bfloat16 Element;
typedef u16 Stored;
#elif LA_ELEMENT == 1
typedef Float16 Element;
typedef u16 Stored;
#else
typedef Float32 Element;
typedef float Stored;
#endif
typedef Element::A OperandA;
typedef Element::B OperandB;
typedef float Weights[D / 8][4];
typedef float Rows[2][4];   // y^T of a lane, or a (tokens, tokens) matrix

struct Lane {
    int warp, g, j, lane;
};
LA_DEVICE Lane own_place() {
    const int lane = threadIdx.x % 32;
    return {(int)threadIdx.x / 32, lane / 4, lane % 4, lane};
}
LA_DEVICE int token_of(const Lane& l, int n, int e) { return 8 * n + 2 * l.j + (e & 1); }
LA_DEVICE int channel_of(const Lane& l, int e) { return 16 * l.warp + l.g + 8 * (e >> 1); }

// operands

LA_DEVICE OperandB column(const float (&f)[4]) {
#if LA_ELEMENT == 0
    return {{pack_bf16(f[0], f[1]), pack_bf16(f[2], f[3])}};
#else
    return Element::column(f);
#endif
}
LA_DEVICE OperandA operand(const float (&x)[4], const float (&y)[4]) {
    const float f[8] = {x[0], x[1], x[2], x[3], y[0], y[1], y[2], y[3]};
    return Element::operand(f);
}
// 4 numbers of row g and of row g + 8, in the columns of an operand from `at` on: two B operands, or an A operand
struct Pair {
    float f[2][4];
};
LA_DEVICE Pair pair_of(const float* x, int at, const Lane& l) {
    Pair p;
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const float* from = x + (8 * n + l.g) * S + at + 2 * l.j;
        const float2 a = *(const float2*)from, b = *(const float2*)(from + 8);
        p.f[n][0] = a.x, p.f[n][1] = a.y, p.f[n][2] = b.x, p.f[n][3] = b.y;
    }
    return p;
}
LA_DEVICE OperandA rows_of(const Pair& p) {
    const float f[8] = {p.f[0][0], p.f[0][1], p.f[1][0], p.f[1][1], p.f[0][2], p.f[0][3], p.f[1][2], p.f[1][3]};
    return Element::operand(f);
}
// the B operand of columns 8 m .. 8 m + 7 of the transpose of a (tokens, tokens) matrix
LA_DEVICE OperandB transposed(const Rows& x, int m) {
    const float f[4] = {x[0][2 * m], x[0][2 * m + 1], x[1][2 * m], x[1][2 * m + 1]};
    return column(f);
}
// y += x m^T: x (v, tokens), m (tokens, tokens)
LA_DEVICE void times_transposed(Rows& y, const Rows& x, const Rows& m) {
    const OperandA a = operand(x[0], x[1]);
#pragma unroll
    for (int n = 0; n < 2; n++) Element::multiply(y[n], a, transposed(m, n));
}
// w += x y: x (v, tokens) of this lane, y a tile (tokens, k)
LA_DEVICE void add_outer(Weights& w, const Rows& x, const float* y, const Lane& l) {
    const OperandA a = operand(x[0], x[1]);
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        const float* from = y + 2 * l.j * S + 8 * n + l.g;
        const float f[4] = {from[0], from[S], from[8 * S], from[9 * S]};
        Element::multiply(w[n], a, column(f));
    }
}
// the sum over all tokens of the two channels of a lane
LA_DEVICE void add_tokens(float (&to)[2], const Rows& x) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float y = x[0][2 * h] + x[0][2 * h + 1] + x[1][2 * h] + x[1][2 * h + 1];
        y += __shfl_xor_sync(~0u, y, 1);
        y += __shfl_xor_sync(~0u, y, 2);
        to[h] += y;
    }
}

// sums over the channels of all warps, for the tokens t = 2 n + e % 2 of a lane; `place` is written: N WARPS 16
// numbers, which no other sum since the last barrier but one may have

template <int N> LA_DEVICE void add_lanes(float (&x)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int t = 0; t < 4; t++)
#pragma unroll
            for (int by = 4; by < 32; by *= 2) x[i][t] += __shfl_xor_sync(~0u, x[i][t], by);
}
template <int N> LA_DEVICE void put_sums(const float (&x)[N][4], float* place, const Lane& l) {
    if (l.lane < 4)
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int t = 0; t < 4; t++) place[(l.warp * N + i) * MOST + token_of(l, t / 2, t)] = x[i][t];
    __syncthreads();
}
template <int N> LA_DEVICE float sum_of(const float* place, int warp, int i, int t, const Lane& l) {
    return place[(warp * N + i) * MOST + token_of(l, t / 2, t)];
}
template <int N> LA_DEVICE void all_sums(float (&x)[N][4], float* place, const Lane& l) {
    add_lanes(x);
    put_sums(x, place, l);
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int t = 0; t < 4; t++) {
            x[i][t] = 0.f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) x[i][t] += sum_of<N>(place, w, i, t, l);
        }
}
// z = (z - mean) over, over = 1 / s: squares are of distances from the mean of a warp's channels
LA_DEVICE void standard(Rows& z, float (&over)[4], float eps, float* place, const Lane& l) {
    float mean[1][4], each[2][4];
#pragma unroll
    for (int t = 0; t < 4; t++) mean[0][t] = z[t / 2][t & 1] + z[t / 2][(t & 1) + 2];
    add_lanes(mean);
#pragma unroll
    for (int t = 0; t < 4; t++) {
        each[0][t] = mean[0][t] / 16.f;
        const float a = z[t / 2][t & 1] - each[0][t], b = z[t / 2][(t & 1) + 2] - each[0][t];
        mean[0][t] = a * a + b * b;
    }
    add_lanes(mean);
#pragma unroll
    for (int t = 0; t < 4; t++) each[1][t] = mean[0][t];
    put_sums(each, place, l);
#pragma unroll
    for (int t = 0; t < 4; t++) {
        float all = 0.f, squares = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) all += sum_of<2>(place, w, 0, t, l);
        all /= WARPS;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float by = sum_of<2>(place, w, 0, t, l) - all;
            squares += sum_of<2>(place, w, 1, t, l) + 16.f * by * by;
        }
        over[t] = 1.f / sqrtf(squares / D + eps);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float& y = z[t / 2][(t & 1) + 2 * h];
            y = (y - all) * over[t];
        }
    }
}
// P(a) = (a - mean a - x mean(a x)) over, of both means
LA_DEVICE void project(Rows& y, const Rows& a, const Rows& x, const float (&mean)[4], const float (&along)[4],
                       const float (&over)[4]) {
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int t = 2 * n + (e & 1);
            y[n][e] = (a[n][e] - mean[t] - x[n][e] * along[t]) * over[t];
        }
}
// sums of x and of x y by token
LA_DEVICE void means(float (&sums)[2][4], const Rows& x, const Rows& y, float* place, const Lane& l) {
#pragma unroll
    for (int t = 0; t < 4; t++) {
        const int n = t / 2, e = t & 1;
        sums[0][t] = x[n][e] + x[n][e + 2];
        sums[1][t] = x[n][e] * y[n][e] + x[n][e + 2] * y[n][e + 2];
    }
    all_sums(sums, place, l);
#pragma unroll
    for (int t = 0; t < 4; t++) sums[0][t] /= D, sums[1][t] /= D;
}

// memory

LA_DEVICE void load_row(const char* from, float (&x)[8]) {
    const uint4 a = *(const uint4*)from;
#if LA_ELEMENT == 2
    const uint4 b = *(const uint4*)(from + 16);
    const u32 w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = __uint_as_float(w[i]);
#else
    const u32 w[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = LA_ELEMENT ? low_f16(w[i]) : low_bf16(w[i]);
        x[2 * i + 1] = LA_ELEMENT ? high_f16(w[i]) : high_bf16(w[i]);
    }
#endif
}
LA_DEVICE void store_row(char* to, const float* x) {
#if LA_ELEMENT == 2
    *(float4*)to = make_float4(x[0], x[1], x[2], x[3]);
    *(float4*)(to + 16) = make_float4(x[4], x[5], x[6], x[7]);
#else
    u32 w[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        w[i] = LA_ELEMENT ? pack_f16(x[2 * i], x[2 * i + 1]) : pack_bf16(x[2 * i], x[2 * i + 1]);
    *(uint4*)to = make_uint4(w[0], w[1], w[2], w[3]);
#endif
}
// a thread has 8 channels of a token of a tile
constexpr int PIECES = D / 8;
LA_DEVICE const char* place_in(const Tokens& y, i64 n, i64 h, i64 t) {
    return (const char*)y.data + n * y.batch + h * y.head + t * y.token;
}
LA_DEVICE void fetch(float (&x)[8], const Tokens& y, i64 n, i64 h, int start, int count) {
    const int t = threadIdx.x / PIECES, c = threadIdx.x % PIECES * 8;
    if (t < count && y.data) load_row(place_in(y, n, h, start + t) + c * sizeof(Stored), x);
    else
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = 0.f;
}
LA_DEVICE void put(float* tile, const float (&x)[8]) {
    const int t = threadIdx.x / PIECES, c = threadIdx.x % PIECES * 8;
#pragma unroll
    for (int i = 0; i < 8; i += 4) *(float4*)(tile + t * S + c + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
}
LA_DEVICE void save(const float* tile, const Tokens& y, i64 n, i64 h, int start, int count) {
    const int t = threadIdx.x / PIECES, c = threadIdx.x % PIECES * 8;
    if (t < count) store_row((char*)place_in(y, n, h, start + t) + c * sizeof(Stored), tile + t * S + c);
}
// eta and gain of a tile: rates[0 .. 15], rates[16 .. 31]; those of no token are 0
LA_DEVICE float fetch_rate(const LinearArguments& a, i64 n, i64 h, int start, int count) {
    const int t = threadIdx.x % MOST, is_gain = threadIdx.x / MOST;
    if (threadIdx.x >= 2 * MOST || t >= count) return 0.f;
    if (is_gain && !a.gain.data) return 1.f;
    return *(const float*)place_in(is_gain ? a.gain : a.eta, n, h, start + t);
}

// states (sequences, heads, k, v) and rows (.., v)
LA_DEVICE void load_state(Weights& w, float (&b)[2], const float* W, const float* bias, const Lane& l) {
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) w[n][e] = W[(8 * n + 2 * l.j + (e & 1)) * D + channel_of(l, e)];
    b[0] = bias[channel_of(l, 0)], b[1] = bias[channel_of(l, 2)];
}
LA_DEVICE void save_state(const Weights& w, const float (&b)[2], float* W, float* bias, const Lane& l) {
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) W[(8 * n + 2 * l.j + (e & 1)) * D + channel_of(l, e)] = w[n][e];
    if (!l.j) bias[channel_of(l, 0)] = b[0], bias[channel_of(l, 2)] = b[1];
}
LA_DEVICE void save_mark(float* to, const Weights& w, const float (&b)[2]) {
    to += threadIdx.x;
#pragma unroll
    for (int n = 0; n < D / 2; n++) to[n * THREADS] = w[n / 4][n % 4];
    to[D / 2 * THREADS] = b[0], to[(D / 2 + 1) * THREADS] = b[1];
}
LA_DEVICE void load_mark(const float* from, Weights& w, float (&b)[2]) {
    from += threadIdx.x;
#pragma unroll
    for (int n = 0; n < D / 2; n++) w[n / 4][n % 4] = from[n * THREADS];
    b[0] = from[D / 2 * THREADS], b[1] = from[(D / 2 + 1) * THREADS];
}

// equations

struct Inner {
    Rows x, e, r;           // x^ and the error of z = k W + b, r the gradient of z
    float over[4], ax[4];   // 1 / s, mean(a x^) of a = weight e
};
LA_DEVICE void set_bias(Rows& y, const float (&b)[2]) {
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) y[n][e] = b[e >> 1];
}
// y^T += w x^T
LA_DEVICE void times_tile(Rows& y, const Weights& w, const float* x, const Lane& l) {
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        const OperandA a = operand(w[2 * i], w[2 * i + 1]);
        const Pair p = pair_of(x, 16 * i, l);
#pragma unroll
        for (int n = 0; n < 2; n++) Element::multiply(y[n], a, column(p.f[n]));
    }
}
// from z = k W + b, in in.x
LA_DEVICE void gradient(Inner& in, const float* k, const float* v, const float (&weight)[2], const float (&shift)[2],
                        float eps, float* place, const Lane& l) {
    standard(in.x, in.over, eps, place, l);
    Rows a;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int at = token_of(l, n, e) * S + channel_of(l, e);
            in.e[n][e] = k[at] + weight[e >> 1] * in.x[n][e] + shift[e >> 1] - v[at];
            a[n][e] = weight[e >> 1] * in.e[n][e];
        }
    float sums[2][4];
    means(sums, a, in.x, place + 2 * WARPS * MOST, l);
    project(in.r, a, in.x, sums[0], sums[1], in.over);
#pragma unroll
    for (int t = 0; t < 4; t++) in.ax[t] = sums[1][t];
}
// (W, b) -= c eta_j (k_j, 1)^T r_j
LA_DEVICE void learn(Weights& w, float (&b)[2], const Inner& in, const float* k, const float* rates, float c,
                     const Lane& l) {
    Rows y;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) y[n][e] = -c * rates[token_of(l, n, e)] * in.r[n][e];
    add_outer(w, y, k, l);
    add_tokens(b, y);
}
// the factor of query i and key j: -c_i eta_j, 0 where i does not read j
LA_DEVICE float factor(const float* rates, int i, int j, int before) {
    return j + before <= i ? -rates[MOST + i] * rates[j] : 0.f;
}
