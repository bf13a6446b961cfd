// What a warpgroup does between its products: decayed gram matrices, values as operands, dots with outputs, states at marks.
#pragma once
#include "attention/decay.cuh"
#include "attention/state.cuh"
#include "tile/wgmma.cuh"

// P = (accumulators of a chunk's rows, the columns its tokens) decayed, to shared memory. Tiles above the diagonal are not
// written. strict: zeros on the diagonal, whose entries go to `own`.
template <class Gram, int C>
LA_DEVICE void store_gram(bool strict, const float (&p)[C / 8][4], u32 gram, u32 own, const Decay<C>& decay, float scale, int warp, int lane) {
    const int i0 = warp * 16 + (lane >> 2), i1 = i0 + 8;
    const float2 to[2] = {decay.upto(i0), decay.upto(i1)};
#pragma unroll
    for (int n = 0; n < C / 8; n++) {
        if (n >= 2 * warp + 2) continue;
        const int j = n * 8 + (lane & 3) * 2;
        float2 from[2];
        decay.upto(j, from);
#pragma unroll
        for (int below = 0; below < 2; below++) {
            const int i = below ? i1 : i0;
            float x[2];
#pragma unroll
            for (int m = 0; m < 2; m++) {
                x[m] = p[n][below * 2 + m] * scale;
                if (strict && i == j + m) store_shared(own + i * 4, x[m]);
                x[m] = i - strict >= j + m ? x[m] * decay.between(from[m], to[below]) : 0.f;
            }
            store_shared_u32(gram + Gram::piece(i, n) + (lane & 3) * 4, pack_bf16(x[0], x[1]));
        }
    }
}
// zeros, for the tiles that store_gram leaves out
template <class Gram, int THREADS> LA_DEVICE void clear_gram(u32 gram, int thread) {
#pragma unroll
    for (int i = 0; i < Gram::SIZE / 4 / THREADS; i++) store_shared_u32(gram + (i * THREADS + thread) * 4, 0);
}

// X^T for sixteen tokens t.. and this warp's columns as operand A; and that times e^{end}
template <class X> LA_DEVICE void load_operand(u32 (&a)[4], u32 base, int t, int column, int lane) {
    const auto x = load_a_columns<Bfloat16, X>(base, t, column, lane);
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = x.x[i];
}
template <int C> LA_DEVICE void weigh_operand(u32 (&weighted)[4], const u32 (&a)[4], int t, const Decay<C>& decay, int lane) {
    const float2 e = decay.ends(t + (lane & 3) * 2), f = decay.ends(t + 8 + (lane & 3) * 2);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 w = i < 2 ? e : f;
        weighted[i] = pack_bf16(low_bf16(a[i]) * w.x, high_bf16(a[i]) * w.y);
    }
}
// a warp's 16 rows of the state as operands A of 16 columns each, from columns 16 first on
template <int N, int COLUMNS> LA_DEVICE void state_operands(u32 (&a)[N][4], const StateRows<1, COLUMNS>& S, int first) {
#pragma unroll
    for (int d = 0; d < N; d++) {
        const float (&lo)[4] = S.x[0][2 * (first + d)], (&hi)[4] = S.x[0][2 * (first + d) + 1];
        a[d][0] = pack_bf16(lo[0], lo[1]);
        a[d][1] = pack_bf16(lo[2], lo[3]);
        a[d][2] = pack_bf16(hi[0], hi[1]);
        a[d][3] = pack_bf16(hi[2], hi[3]);
    }
}
// operands of a warp's rows of the state, from row `row`, as rows of shared memory
template <class X, int N> LA_DEVICE void store_state(u32 base, const u32 (&a)[N][4], int row, int lane) {
#pragma unroll
    for (int d = 0; d < N; d++)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(base + X::block_piece(row, 2 * d, lane & 15, lane >> 4)),
                     "r"(a[d][0]), "r"(a[d][1]), "r"(a[d][2]), "r"(a[d][3]) : "memory");
}
// S += A B, B's panels read across: a is one operand, b the descriptor of its sixteen rows
template <class X, int COLUMNS, int FIRST = 0> LA_DEVICE void write_state(StateRows<1, COLUMNS>& S, const u32 (&a)[4], u64 b) {
    product<FIRST, 1>(S.x[0], a, b, true);
    if constexpr (FIRST + 8 < COLUMNS / 8) write_state<X, COLUMNS, FIRST + 8>(S, a, b + X::panel(1));
}
// outputs of earlier chunks' states, times e^{start}
template <int C> LA_DEVICE void scale_starts(float (&out)[C / 8][4], const Decay<C>& decay, int lane) {
#pragma unroll
    for (int i = 0; i < C / 8; i++) {
        const float2 e = decay.starts(i * 8 + (lane & 3) * 2);
        out[i][0] *= e.x; out[i][1] *= e.y; out[i][2] *= e.x; out[i][3] *= e.y;
    }
}

// <x_t, out_t> over this warp's 16 columns of x, to `dots` (C floats), and then the token's own write added to out: `values`
// is the tile that was written from, `own` the entries of the gram matrix.
template <class X, int C>
LA_DEVICE void dot_outputs(float (&out)[C / 8][4], u32 values, u32 x, int column, u32 own, u32 dots, int lane) {
    float sums[C / 4];   // column pairs (2j, 2j + 1) of each 8 tokens
#pragma unroll
    for (int t = 0; t < C / 16; t++) {
        const auto y = load_a_columns<Bfloat16, X>(x, t * 16, column, lane), v = load_a_columns<Bfloat16, X>(values, t * 16, column, lane);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int tile = 2 * t + half;
            const float2 e = load_shared2(own + (tile * 8 + (lane & 3) * 2) * 4);
            float (&o)[4] = out[tile];
            const u32 y0 = y.x[2 * half], y1 = y.x[2 * half + 1], v0 = v.x[2 * half], v1 = v.x[2 * half + 1];
            sums[2 * tile] = o[0] * low_bf16(y0) + o[2] * low_bf16(y1);
            sums[2 * tile + 1] = o[1] * high_bf16(y0) + o[3] * high_bf16(y1);
            o[0] += e.x * low_bf16(v0); o[1] += e.y * high_bf16(v0); o[2] += e.x * low_bf16(v1); o[3] += e.y * high_bf16(v1);
        }
    }
    column_sums<C / 4>(sums, lane);
#pragma unroll
    for (int i = 0; i < C / 32; i++) {
        const int m = column_eighth(lane) * (C / 32) + i;
        store_shared(dots + ((m >> 1) * 8 + (lane & 3) * 2 + (m & 1)) * 4, sums[i]);
    }
}

// States at marks: a warp's operands as they are, COLUMNS / 16 pieces of 16 bytes a lane
template <int COLUMNS> struct Marks {
    static constexpr int PIECES = COLUMNS / 16, BYTES = PIECES * 512;   // of a warp
    static __device__ __forceinline__ void store(char* p, const StateRows<1, COLUMNS>& S, int lane) {
        u32 a[PIECES][4];
        state_operands(a, S, 0);
#pragma unroll
        for (int i = 0; i < PIECES; i++)
            asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p + (i * 32 + lane) * 16), "r"(a[i][0]), "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3]) : "memory");
    }
    static __device__ __forceinline__ void prefetch(const char* p, int lane) {
        if (lane < BYTES / 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(p + lane * 128));
    }
    // this lane's part of the inner product with a state
    static __device__ __forceinline__ float dot(const char* p, const StateRows<1, COLUMNS>& S, int lane) {
        u32 x[PIECES][4];
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < PIECES; i++)
            asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x[i][0]), "=r"(x[i][1]), "=r"(x[i][2]), "=r"(x[i][3]) : "l"(p + (i * 32 + lane) * 16));
#pragma unroll
        for (int i = 0; i < 2 * PIECES; i++) {
            const float (&y)[4] = S.x[0][i];
            const u32 a = x[i / 2][(i & 1) * 2], b = x[i / 2][(i & 1) * 2 + 1];
            sum += y[0] * low_bf16(a) + y[1] * high_bf16(a) + y[2] * low_bf16(b) + y[3] * high_bf16(b);
        }
        return sum;
    }
};
