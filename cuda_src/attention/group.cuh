// Operations of a warpgroup between its products: decayed gram matrices, values as operands, dots with outputs, states
// at marks.
#pragma once
#include "attention/producer.cuh"
#include "attention/state.cuh"
#include "tile/wgmma.cuh"

// The factors of a gram matrix, where a warpgroup holds its 64 rows: scale e^{s(j, i)} on the diagonal and
// below it, 0 above. Made while the products are in flight. Left of the 16 columns of the warp's own rows it is a
// product of two numbers, one a row and one a column, that both reach to the end of the column's sixteen: neither is
// more than 1.
template <int C> LA_DEVICE void gram_factors(float (&f)[C / 8][4], const StageDecay<C>& decay, float scale, int warp,
                                             int lane) {
    const int row = warp * 16 + (lane >> 2), column = (lane & 3) * 2;
    const float to[2] = {decay.sums().upto(row).x, decay.sums().upto(row + 8).x};
    float own[2][4];   // the warp's own sixteen columns
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int j = warp * 16 + h * 8 + column;
        const float2 from = load_shared2(decay.base + j * 4);
#pragma unroll
        for (int m = 0; m < 4; m++) {
            const float s = to[m >> 1] - (m & 1 ? from.y : from.x);
            own[h][m] = row + (m >> 1) * 8 >= j + (m & 1) ? (LA_DECAY ? exp2_approx(s) * scale : scale) : 0.f;
        }
    }
#pragma unroll
    for (int b = 0; b < C / 16; b++) {
        if (b < warp) {
            const float end = decay.sums().upto(b * 16 + 15).x;
            const float a[2] = {LA_DECAY ? exp2_approx(to[0] - end) * scale : scale,
                                LA_DECAY ? exp2_approx(to[1] - end) * scale : scale};
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float2 e = LA_DECAY ? decay.to_sixteenth(b * 16 + h * 8 + column) : float2{1.f, 1.f};
                f[2 * b + h][0] = a[0] * e.x;
                f[2 * b + h][1] = a[0] * e.y;
                f[2 * b + h][2] = a[1] * e.x;
                f[2 * b + h][3] = a[1] * e.y;
            }
        } else
#pragma unroll
            for (int m = 0; m < 8; m++) f[2 * b + (m >> 2)][m & 3] = b == warp ? own[m >> 2][m & 3] : 0.f;
    }
}
// The accumulators times their factors to shared memory.
template <class Gram, int C> LA_DEVICE void store_gram(const float (&p)[C / 8][4], const float (&f)[C / 8][4], u32 gram,
                                                       int warp, int lane) {
    const int i0 = warp * 16 + (lane >> 2), i1 = i0 + 8;
#pragma unroll
    for (int n = 0; n < C / 8; n++) {
        store_shared_u32(gram + Gram::piece(i0, n) + (lane & 3) * 4, pack_bf16(p[n][0] * f[n][0], p[n][1] * f[n][1]));
        store_shared_u32(gram + Gram::piece(i1, n) + (lane & 3) * 4, pack_bf16(p[n][2] * f[n][2], p[n][3] * f[n][3]));
    }
}

// X^T for sixteen tokens t.. and this warp's columns as operand A; and that times e^{end}
template <class X> LA_DEVICE void load_operand(u32 (&a)[4], u32 base, int t, int column, int lane) {
    const auto x = load_a_columns<Bfloat16, X>(base, t, column, lane);
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = x.x[i];
}
template <int C> LA_DEVICE void weigh_operand(u32 (&weighted)[4], const u32 (&a)[4], int t, const Decay<C>& decay,
                                              int lane) {
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
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         base + X::block_piece(row, 2 * d, lane & 15, lane >> 4)),
                     "r"(a[d][0]), "r"(a[d][1]), "r"(a[d][2]), "r"(a[d][3])
                     : "memory");
}
// S += A B, B's panels read across: a is one operand, b the descriptor of its sixteen rows
template <class X, int COLUMNS, int FIRST = 0> LA_DEVICE void write_state(StateRows<1, COLUMNS>& S, const u32 (&a)[4],
                                                                          u64 b) {
    product_AB<FIRST>(S.x[0], a, b, true);
    if constexpr (FIRST + 8 < COLUMNS / 8) write_state<X, COLUMNS, FIRST + 8>(S, a, b + X::panel(1));
}
// Products over all 16-column steps of operands, C = A B^T and C += A B^T (panels X read along): A in shared memory, or
// in registers
template <class X> LA_DEVICE void multiply_ABt(float (&c)[8][4], u64 a, u64 b) {
#pragma unroll
    for (int d = 0; d < X::COLUMNS / 16; d++) product_ABt(c, a + X::along(d), b + X::along(d), d > 0);
}
template <class X, int N> LA_DEVICE void multiply_ABt(float (&c)[8][4], const u32 (&a)[N][4], u64 b) {
#pragma unroll
    for (int d = 0; d < N; d++) product_ABt(c, a[d], b + X::along(d), d > 0);
}
template <class X, int N> LA_DEVICE void add_ABt(float (&c)[8][4], const u32 (&a)[N][4], u64 b) {
#pragma unroll
    for (int d = 0; d < N; d++) product_ABt(c, a[d], b + X::along(d), true);
}
// S += A B for a chunk's operands, sixteen tokens each
template <class X, int N, int COLUMNS> LA_DEVICE void write_chunk(StateRows<1, COLUMNS>& S, const u32 (&a)[N][4],
                                                                  u64 b) {
#pragma unroll
    for (int t = 0; t < N; t++) write_state<X>(S, a[t], b + X::across(t));
}
// a chunk's operands: X^T of this warp's columns, and that times e^{end}
template <class X, int C> LA_DEVICE void load_operands(u32 (&plain)[C / 16][4], u32 (&weighted)[C / 16][4], u32 base,
                                                       const Decay<C>& decay, int column, int lane) {
#pragma unroll
    for (int t = 0; t < C / 16; t++) {
        load_operand<X>(plain[t], base, t * 16, column, lane);
        weigh_operand(weighted[t], plain[t], t * 16, decay, lane);
    }
}
// e^{start} of a lane's columns of the outputs, to be loaded ahead of their products' end
template <int C> struct Starts {
    float2 e[C / 8];
    __device__ __forceinline__ Starts(const Decay<C>& decay, int lane) {
#pragma unroll
        for (int i = 0; i < C / 8; i++) e[i] = decay.starts(i * 8 + (lane & 3) * 2);
    }
    __device__ __forceinline__ void scale(float (&out)[C / 8][4]) const {
#pragma unroll
        for (int i = 0; i < C / 8; i++) {
            out[i][0] *= e[i].x;
            out[i][1] *= e[i].y;
            out[i][2] *= e[i].x;
            out[i][3] *= e[i].y;
        }
    }
};

// waits for the read out^T = S^T Q^T, all products begun; then out^T e^{start} and S^T e^{all}
template <int C, int COLUMNS> LA_DEVICE void end_read(float (&out)[C / 8][4], StateRows<1, COLUMNS>& S,
                                                      const StageDecay<C>& decay, int lane) {
    const Starts<C> starts(decay.sums(), lane);
    products_wait<0>();
    accumulator_fence(out);
    starts.scale(out);
    if (LA_DECAY) {
        const float carry = exp2_approx(decay.all());
        S.each([&](int, int, float& y) { y *= carry; });
    }
}

// <x_t, out_t> over this warp's 16 columns of x, to `dots` (C floats). The token's own write is in it; it is the same
// number in the other pass, from the same rounded entry of P, and both are float32: their difference is without it.
template <class X, int C> LA_DEVICE void dot_outputs(const float (&out)[C / 8][4], u32 x, int column, u32 dots,
                                                     int lane) {
    float sums[C / 4];   // column pairs (2j, 2j + 1) of each 8 tokens
#pragma unroll
    for (int t = 0; t < C / 16; t++) {
        const auto y = load_a_columns<Bfloat16, X>(x, t * 16, column, lane);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float (&o)[4] = out[2 * t + half];
            const u32 y0 = y.x[2 * half], y1 = y.x[2 * half + 1];
            sums[4 * t + 2 * half] = o[0] * low_bf16(y0) + o[2] * low_bf16(y1);
            sums[4 * t + 2 * half + 1] = o[1] * high_bf16(y0) + o[3] * high_bf16(y1);
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
            asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p + (i * 32 + lane) * 16), "r"(a[i][0]),
                         "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3])
                         : "memory");
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
            asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(x[i][0]), "=r"(x[i][1]), "=r"(x[i][2]), "=r"(x[i][3])
                         : "l"(p + (i * 32 + lane) * 16));
#pragma unroll
        for (int i = 0; i < 2 * PIECES; i++) {
            const float (&y)[4] = S.x[0][i];
            const u32 a = x[i / 2][(i & 1) * 2], b = x[i / 2][(i & 1) * 2 + 1];
            sum += y[0] * low_bf16(a) + y[1] * high_bf16(a) + y[2] * low_bf16(b) + y[3] * high_bf16(b);
        }
        return sum;
    }
};

// The roles of a block's threads: GROUPS warpgroups consume the stages of a ring, one more, the last, produces them.
template <int GROUPS, int STAGES, class Produce, class Consume> LA_DEVICE void run_groups(Ring<STAGES> ring,
                                                                                          Produce produce,
                                                                                          Consume consume) {
    constexpr int CONSUMERS = 128 * GROUPS;
    if (threadIdx.x == 0) ring.init(2 * PRODUCERS, CONSUMERS);
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        release_registers<PRODUCER_REGISTERS<GROUPS>>();
        produce(threadIdx.x - CONSUMERS);
    } else {
        claim_registers<CONSUMER_REGISTERS<GROUPS>>();
        consume(threadIdx.x);
    }
}
