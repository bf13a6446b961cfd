// Shared by the portable kernels of the delta rule (the equations are in delta.cuh): places of chunks, and operands of
// a warp's value rows.
#pragma once
#include "arguments/matrix_state/DeltaScanArguments.cuh"
#include "attention/gram.cuh"
#include "attention/store.cuh"
#include "attention/traversal.cuh"

#ifndef LA_SEPARATE_ERASE_KEY   // 1: erase vectors r of their own read the state, 0: the keys do
#define LA_SEPARATE_ERASE_KEY 0
#endif
#ifndef LA_BEFORE   // 1: r reads the state before it decays
#define LA_BEFORE 0
#endif
constexpr float SMALLEST = 1e-8f;   // of beta: its gradient divides by beta^2

// number of a chunk among all
template <int C, class Arguments> LA_DEVICE i64 chunk_number(const Arguments& a, const Sequence& s, i64 slot, int head,
                                                             int chunk) {
    const i64 n = slot / a.heads, first = a.offsets ? s.first / C + n : n * ((a.T + C - 1) / C);
    return head * a.slots + first + chunk;
}
static_assert(LA_INVERSE == LA_C * LA_C * Element::GRAM_BYTES, "the size that the host allocates by");
// the place of a chunk's A
template <int C> LA_DEVICE char* inverse_of(const DeltaScanArguments& a, const Sequence& s, i64 slot, int head,
                                            int chunk) {
    return a.inverses + chunk_number<C>(a, s, slot, head, chunk) * (C * C * Element::GRAM_BYTES);
}
// a chunk's A as a tile, the 16 x 16 blocks up to the diagonal
template <class Gram, int C, int THREADS> LA_DEVICE void load_inverse(u32 base, const char* from, int thread) {
    constexpr int PER_ROW = Gram::ROW / 16;
    for (int i = thread; i < C * PER_ROW; i += THREADS) {
        const int row = i / PER_ROW, piece = i % PER_ROW;
        if (piece / Gram::BYTES <= row / 16) copy_in<16>(base + Gram::piece(row, piece), from + i * 16, true);
    }
}

// a lane's four factors of sixteen tokens from two pairs, in the order of an operand A
LA_DEVICE float factor(const float2& e, const float2& f, int i) {
    return i < 4 ? (i & 1 ? e.y : e.x) : (i & 1 ? f.y : f.x);
}

// operand_of, columns times their factors e (16-column half 0) and f
template <int TILES, int N> LA_DEVICE Element::A operand_of(const float (&x)[TILES][N][4], int m, int i,
                                                            const float2& e, const float2& f, float sign = 1.f) {
    float w[8];
    flatten(w, x[m][i], x[m][i + 1]);
#pragma unroll
    for (int n = 0; n < 8; n++) w[n] *= sign * factor(e, f, n);
    return Element::operand(w);
}
// S += w X: w(m, t) is the operand of 16 tokens from token t, X has the C rows of a tile. Matrix units cut sums off: in
// float32 the terms of a chunk are summed apart, and all operands are held.
template <int C, class X, int TILES, int KP, class F> LA_DEVICE void write_rows(StateRows<TILES, KP>& S, u32 x,
                                                                                int lane, F w) {
    if constexpr (Element::EXACT) {
        typename Element::A all[C / 16][TILES];
#pragma unroll
        for (int t = 0; t < C; t += 16)
#pragma unroll
            for (int m = 0; m < TILES; m++) all[t / 16][m] = w(m, t);
#pragma unroll
        for (int d = 0; d < KP; d += 16) {
            float add[TILES][2][4] = {};
#pragma unroll
            for (int t = 0; t < C; t += 16) {
                typename Element::B b[2];
                load_b_columns<Element, X>(b, x, t, d, lane);
#pragma unroll
                for (int m = 0; m < TILES; m++)
#pragma unroll
                    for (int h = 0; h < 2; h++) Element::multiply(add[m][h], all[t / 16][m], b[h]);
            }
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int i = 0; i < 8; i++) S.x[m][d / 8 + (i >> 2)][i & 3] += add[m][i >> 2][i & 3];
        }
    } else
#pragma unroll
        for (int t = 0; t < C; t += 16) {
            typename Element::A own[TILES];
#pragma unroll
            for (int m = 0; m < TILES; m++) own[m] = w(m, t);
#pragma unroll
            for (int d = 0; d < KP; d += 16) {
                typename Element::B b[2];
                load_b_columns<Element, X>(b, x, t, d, lane);
#pragma unroll
                for (int m = 0; m < TILES; m++)
#pragma unroll
                    for (int h = 0; h < 2; h++) Element::multiply(S.x[m][d / 8 + h], own[m], b[h]);
            }
        }
}

LA_DEVICE const float* betas_of(const Gate& beta, const Sequence& s, int head) {   // of a sequence, beta.token apart
    return beta.data + s.row * beta.batch + s.first * beta.token + (u32)head / (u32)beta.group * beta.head;
}
// accumulators (value row, token) divided by their token's beta, in shared memory
template <int C, int TILES> LA_DEVICE void divide_by_beta(float (&x)[TILES][C / 8][4], u32 betas, int lane) {
#pragma unroll
    for (int i = 0; i < C / 8; i++) {
        const float2 beta = load_shared2(betas + (i * 8 + (lane & 3) * 2) * 4);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const float b = m ? beta.y : beta.x, y = 1.f / (b < SMALLEST ? SMALLEST : b);
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                x[n][i][m] *= y;
                x[n][i][2 + m] *= y;
            }
        }
    }
}

// e^{sum up to the state that r_i reads}, rows i and i + 1 of a chunk, i even
template <int C> LA_DEVICE float2 read_starts(const Decay<C>& decay, int i) {
    if (!LA_BEFORE) return decay.starts(i);
    return {i ? load_shared(decay.base + (C + i - 1) * 4) : 1.f, load_shared(decay.base + (C + i) * 4)};
}
