// The momentum delta rule, tile by tile, and the adjoint walk of its states, with what momentum_systems.cu has of a
// tile (docs/cores/fast_weights.md):
//
//     forward     e = inverse (v - c' k S - d' k M)             out = c q S + d q M + P e
//                 S <- w S + w' M + k^T (u e)                   M <- s M + k^T (z e)
//     backward    dv = inverse^T (u k R + z k N + P^T dout)
//                 N <- w' R + s N + q^T (d dout) - k^T (d' dv)  R <- w R + q^T (c dout) - k^T (c' dv)
//
// Columns of the states do not meet: a warp has 16 of one sequence and head, and everything is transposed. S^T and M^T
// (16, K) are its accumulators, and those of tokens (16, C); both are A operands as they are. Queries, keys and the
// matrices of a tile come in stages, one tile ahead, for all warps of a block. The states before every tile are stored,
// and R and N after it.
#include "arguments/fast_weights/MomentumArguments.cuh"
#include "fast_weights/systems.cuh"
#include "tile/copy.cuh"

constexpr int K = LA_K, KP = (K + 15) / 16 * 16, WARPS = LA_COLUMNS / 16, THREADS = 32 * WARPS, PER = LA_ALIGN / 4;
constexpr int S = KP + 8, SC = C + 8, GROUPS = LA_EXACT ? 2 : 4;   // of 8 tokens, at once
constexpr int AT_K = C * S, AT_INVERSE = 2 * C * S, AT_P = AT_INVERSE + C * SC, AT_TOKENS = AT_P + C * SC,
              STAGE = AT_TOKENS + COEFFICIENTS * C + ENDS_COUNT;
static_assert(LA_SHARED == 8 * STAGE, "LA_SHARED is the size that the launch requests");

typedef float State[KP / 8][4];   // S^T or M^T of a lane
typedef float Row[C / 8][4];      // of tokens

// an operand of a state; half: HALF, read anew, or a compiler would hold every operand of a state in registers
LA_DEVICE OperandA operand_of(const float (&x)[4], const float (&y)[4], u32 half) {
    OperandA a;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float f = i < 4 ? x[i] : y[i - 4];
#if LA_EXACT
        a.hi[i] = (__float_as_uint(f) + half) & 0xffffe000u;
        a.lo[i] = __float_as_uint(f - __uint_as_float(a.hi[i]));
#else
        a.x[i] = (u32)min(__float_as_int(f), 0x7fffefff) + half;   // the NaN of arithmetic remains one
#endif
    }
    return a;
}

struct Walk {
    const MomentumArguments& a;
    i64 slot;
    int column;   // the first of the warp
    float* stages;
    Lane l;

    __device__ __forceinline__ const char* at(const Tokens& y) const {
        return y.data + slot / a.heads * y.batch + slot % a.heads * y.head;
    }
    __device__ __forceinline__ int count(int tile) const { return min(a.n, a.T - tile * a.n); }
    __device__ __forceinline__ void fetch(int tile, int stage) const {
        float* to = stages + stage % 2 * STAGE;
        const int first = tile * a.n, valid = count(tile);
#pragma unroll
        for (int which = 0; which < 2; which++) {
            const Tokens& y = which ? a.k : a.q;
            if (y.data == nullptr) continue;
            const char* from = at(y);
#pragma unroll 1
            for (int i = threadIdx.x; i < C * (KP / PER); i += THREADS) {
                const int r = i / (KP / PER), c = i % (KP / PER) * PER;
                const bool is_there = r < valid && c < K;
                copy_in<LA_ALIGN>(shared_address(to + which * AT_K + r * S + c),
                                  from + (is_there ? (first + r) * y.token + c * 4 : 0), is_there);
            }
        }
        const float* system = (const float*)a.systems + (slot * a.tiles + tile) * SYSTEM;
#pragma unroll 1
        for (int i = threadIdx.x; i < 2 * C * (C / 4); i += THREADS)
            copy_in<16>(shared_address(to + AT_INVERSE + i / (C / 4) * SC + i % (C / 4) * 4), system + 4 * i, true);
#pragma unroll 1
        for (int i = threadIdx.x; i < (SYSTEM - BY_TOKEN) / 4; i += THREADS)
            copy_in<16>(shared_address(to + AT_TOKENS + 4 * i), system + BY_TOKEN + 4 * i, true);
        copy_commit();
    }
    // f(whether it is there, address, x) of the numbers of N groups of 8 tokens, whose rows are `row` bytes apart
    template <int N, class F> __device__ __forceinline__ void each(float (&x)[N][4], const char* from, i64 row,
                                                                   int tile, int group, F f) const {
        const int valid = count(tile) - 8 * group;
        const i64 next = opaque64(row);
        const char* at = from + (i64)(tile * a.n + 8 * group + 2 * l.j) * next + 4 * (column + l.g);
#pragma unroll
        for (int n = 0; n < N; n++, at += 8 * next)
#pragma unroll
            for (int e = 0; e < 4; e++)
                f(8 * n + 2 * l.j + (e & 1) < valid && column + l.g + 8 * (e >> 1) < a.V,
                  at + (e & 1) * next + (e >> 1) * 32, x[n][e]);
    }
    __device__ __forceinline__ void load(Row& x, const Tokens& y, int tile) const {
        each<C / 8>(x, at(y), y.token, tile, 0,
                    [&](bool is_there, const char* from, float& to) { to = is_there ? *(const float*)from : 0.f; });
    }
    template <int N> __device__ __forceinline__ void store(char* to, float (&x)[N][4], int tile, int group) const {
        if (to == nullptr) return;
        each<N>(x, to + 4 * slot * a.T * a.V, 4 * (i64)a.V, tile, group, [&](bool is_there, const char* at, float y) {
            if (is_there) *(float*)at = y;
        });
    }
    // f(address, x) of every number of a state that is there
    template <class F> __device__ __forceinline__ void each_state(State& x, const char* from, i64 matrix, F f) const {
        const i64 V = opaque64(a.V);
        const char* at = from + ((matrix * K + 2 * l.j) * V + column + l.g) * 4;
#pragma unroll
        for (int n = 0; n < KP / 8; n++, at += 32 * V)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (8 * n + 2 * l.j + (e & 1) < K && column + l.g + 8 * (e >> 1) < V)
                    f(at + (e & 1) * 4 * V + (e >> 1) * 32, x[n][e]);
    }
    __device__ __forceinline__ void load(State& x, const char* from) const {
#pragma unroll
        for (int n = 0; n < KP / 2; n++) x[n / 4][n % 4] = 0.f;
        if (from != nullptr) each_state(x, from, slot, [&](const char* at, float& y) { y = *(const float*)at; });
    }
    __device__ __forceinline__ void store(char* to, State& x, i64 matrix) const {
        if (to != nullptr) each_state(x, to, matrix, [&](const char* at, float y) { *(float*)at = y; });
    }
    // f(n, e, x S, x M) of groups first .. first + GROUPS - 1 of 8 tokens whose rows are x
    template <class F> __device__ __forceinline__ void times_states(const float* x, const State& s, const State& m,
                                                                    int first, const float* ends, F f) const {
        const u32 half = *(const volatile u32*)(ends + 3);
        float y[2][GROUPS][4] = {};
#pragma unroll
        for (int i = 0; i < KP / 16; i++) {
            const OperandA of_s = operand_of(s[2 * i], s[2 * i + 1], half),
                           of_m = operand_of(m[2 * i], m[2 * i + 1], half);
#pragma unroll
            for (int n = 0; n < GROUPS; n++) {
                const OperandB b = rows_b<S, true>(x + 8 * (first + n) * S + 16 * i, l);
                Element::multiply(y[0][n], of_s, b);
                Element::multiply(y[1][n], of_m, b);
            }
        }
#pragma unroll
        for (int n = 0; n < GROUPS; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) f(first + n, e, y[0][n][e], y[1][n][e]);
    }
    // s += x^T (y by_s), m += x^T (y by_m): rows x of tokens
    __device__ __forceinline__ void add_outer(State& s, State& m, const float* x, const Row& y, const float* by_s,
                                              const float* by_m, float sign) const {
#pragma unroll
        for (int i = 0; i < C / 16; i++) {
            float own[2][2][4];
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int t = 16 * i + 8 * h + 2 * l.j + (e & 1);
                    own[0][h][e] = sign * by_s[t] * y[2 * i + h][e];
                    own[1][h][e] = sign * by_m[t] * y[2 * i + h][e];
                }
            const OperandA of_s = operand_of(own[0][0], own[0][1]), of_m = operand_of(own[1][0], own[1][1]);
#pragma unroll
            for (int n = 0; n < KP / 8; n++) {
                const OperandB b = columns_b<S, true>(x + 16 * i * S + 8 * n, l);
                Element::multiply(s[n], of_s, b);
                Element::multiply(m[n], of_m, b);
            }
        }
    }
    __device__ __forceinline__ float by(const float* tokens, int which, int n, int e) const {
        return tokens[which * C + 8 * n + 2 * l.j + (e & 1)];
    }
};

template <bool BACK> LA_DEVICE void walk(const MomentumArguments& a, char* memory_of_stages) {
    const Lane l = own_place();
    const Walk w = {a, blockIdx.x / a.parts, (int)(blockIdx.x % a.parts) * LA_COLUMNS + (int)threadIdx.x / 32 * 16,
                    (float*)memory_of_stages, l};
    State s, m;   // BACK: R, N
    w.load(s, a.S);
    w.load(m, a.M);
    const auto tile_of = [&](int step) { return BACK ? a.tiles - 1 - step : step; };
    if (a.tiles) w.fetch(tile_of(0), 0);
#pragma unroll 1
    for (int step = 0; step < a.tiles; step++) {
        const int tile = tile_of(step);
        copy_wait<0>();
        __syncthreads();
        if (step + 1 < a.tiles) w.fetch(tile_of(step + 1), step + 1);
        const float *q = w.stages + step % 2 * STAGE, *k = q + AT_K, *inverse = q + AT_INVERSE, *P = q + AT_P,
                    *tokens = q + AT_TOKENS, *ends = tokens + COEFFICIENTS * C;
        if (w.column >= a.V) continue;
        w.store(a.S_tiles, s, w.slot * a.tiles + tile);
        w.store(a.M_tiles, m, w.slot * a.tiles + tile);
        Row y, x = {};
        if constexpr (BACK) {
            const bool has_q = a.v.data != nullptr;
#pragma unroll
            for (int n = 0; n < C / 2; n++) y[n / 4][n % 4] = 0.f;
            if (has_q) {
                Row dout;
                w.load(dout, a.v, tile);
#pragma unroll
                for (int i = 0; i < C / 16; i++) {
                    const OperandA of = operand_of(dout[2 * i], dout[2 * i + 1]);
#pragma unroll
                    for (int n = 0; n < 2 * i + 2; n++)
                        Element::multiply(y[n], of, columns_b<SC, true>(P + 16 * i * SC + 8 * n, l));
                }
            }
#pragma unroll
            for (int h = 0; h < C / 8; h += GROUPS)
                w.times_states(k, s, m, h, ends, [&](int n, int e, float of_s, float of_m) {
                    y[n][e] += w.by(tokens, OF_R, n, e) * of_s + w.by(tokens, OF_N, n, e) * of_m;
                });
#pragma unroll
            for (int i = 0; i < C / 16; i++) {
                const OperandA of = operand_of(y[2 * i], y[2 * i + 1]);
#pragma unroll
                for (int n = 0; n < 2 * i + 2; n++)
                    Element::multiply(x[n], of, columns_b<SC, true>(inverse + 16 * i * SC + 8 * n, l));
            }
            w.store<C / 8>(a.errors, x, tile, 0);
#pragma unroll
            for (int n = 0; n < KP / 2; n++) {
                m[n / 4][n % 4] = ends[1] * s[n / 4][n % 4] + ends[2] * m[n / 4][n % 4];
                s[n / 4][n % 4] *= ends[0];
            }
            w.add_outer(s, m, k, x, tokens + OF_C_POINT * C, tokens + OF_D_POINT * C, -1.f);
            if (has_q) {
                w.load(y, a.v, tile);
                w.add_outer(s, m, q, y, tokens + OF_C * C, tokens + OF_D * C, 1.f);
            }
        } else {
            w.load(y, a.v, tile);
#pragma unroll
            for (int h = 0; h < C / 8; h += GROUPS)
                w.times_states(k, s, m, h, ends, [&](int n, int e, float of_s, float of_m) {
                    y[n][e] -= w.by(tokens, OF_C_POINT, n, e) * of_s + w.by(tokens, OF_D_POINT, n, e) * of_m;
                });
#pragma unroll
            for (int i = 0; i < C / 16; i++) {
                const OperandA of = operand_of(y[2 * i], y[2 * i + 1]);
#pragma unroll
                for (int n = 2 * i; n < C / 8; n++)
                    Element::multiply(x[n], of, rows_b<SC, true>(inverse + 8 * n * SC + 16 * i, l));
            }
            w.store<C / 8>(a.errors, x, tile, 0);
            if (a.q.data != nullptr) {
#pragma unroll
                for (int h = 0; h < C / 8; h += GROUPS) {
                    float out[GROUPS][4];
                    w.times_states(q, s, m, h, ends, [&](int n, int e, float of_s, float of_m) {
                        out[n - h][e] = w.by(tokens, OF_C, n, e) * of_s + w.by(tokens, OF_D, n, e) * of_m;
                    });
#pragma unroll
                    for (int i = 0; 2 * i < h + GROUPS; i++) {
                        const OperandA of = operand_of(x[2 * i], x[2 * i + 1]);
#pragma unroll
                        for (int n = max(2 * i, h); n < h + GROUPS; n++)
                            Element::multiply(out[n - h], of, rows_b<SC, true>(P + 8 * n * SC + 16 * i, l));
                    }
                    w.store<GROUPS>(a.out, out, tile, h);
                }
            }
#pragma unroll
            for (int n = 0; n < KP / 2; n++) {
                s[n / 4][n % 4] = ends[0] * s[n / 4][n % 4] + ends[1] * m[n / 4][n % 4];
                m[n / 4][n % 4] *= ends[2];
            }
            w.add_outer(s, m, k, x, tokens + OF_R * C, tokens + OF_N * C, 1.f);
        }
    }
    w.store(a.S_end, s, w.slot);
    w.store(a.M_end, m, w.slot);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ MomentumArguments a) {
    extern __shared__ __align__(16) char shared[];
    walk<false>(a, shared);
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) backward(const __grid_constant__ MomentumArguments a) {
    extern __shared__ __align__(16) char shared[];
    walk<true>(a, shared);
}
