// One decay a token and key channel in chunks of 16 tokens, by mma.sync, for every dtype: shared by the kernels.
//
//     S_t = diag(a_t) S_(t-1) + k_t^T u_t     a = e^g
//     out_t = scale q_t S_t, with LA_BEFORE scale (q_t S_(t-1) + (q_t . bonus k_t) u_t)
//     Pre_i = a_first ... a_i (LA_BEFORE: to i - 1)     Suf_j = a_(j+1) ... a_last
//     P_ij = scale sum_c q_ic k_jc a_(j+1) ... a_i (LA_BEFORE: to i - 1)
//     u_t = v_t, with LA_ERASE beta_t (v_t - k_t diag(a_t) S_(t-1))
//
// A warp has 16 channels at a time, a lane 8 of them of one token: lane 2 j + h token j, channels 8 h to 8 h + 7. It
// traverses the 16 tokens and multiplies by their decays in turn, so that every decay in [-inf, 0] is exact to
// rounding: nothing is divided, no sum is exponentiated.
#pragma once
#include "attention/tokens.cuh"
#include "tile/vec4.cuh"

#ifndef LA_GATE   // log decays: 0 bfloat16, 1 float16, 2 float32
#define LA_GATE 2
#endif
#ifndef LA_BEFORE   // 1: queries read the state before the token
#define LA_BEFORE 0
#endif
#ifndef LA_BONUS
#define LA_BONUS 0
#endif
#ifndef LA_ERASE   // 1: the delta rule
#define LA_ERASE 0
#endif
#ifndef LA_COLUMNS   // 1: value channels decay too (values.cu)
#define LA_COLUMNS 0
#endif
#ifndef LA_BACK   // 1: from the last chunk to the first
#define LA_BACK 0
#endif
#ifndef LA_LONG   // 1: the decay of a chunk in two terms, the sum of a chunk added to a state at once
#define LA_LONG 0
#endif
#include "arguments/matrix_state/VectorPortableArguments.cuh"

typedef VectorPortableArguments Arguments;
constexpr int K = LA_K, V = LA_V, KIND = LA_DTYPE, WARPS = LA_WARPS, THREADS = 32 * WARPS, C = 16, SPAN = 8;
constexpr int KEYS = round_up(K, 16), VALUES = round_up(V, 16);
constexpr int ROW = 20,
              COLUMN = 24;   // floats of a row of 16 that is read in fours; of one whose pairs are read by eight rows
constexpr float LOG2_OF_E = 1.4426950408889634f;

// the nearest tf32 in the bits that products read; the NaN of arithmetic remains one
LA_DEVICE u32 nearest_tf32(float x) { return (u32)(min(__float_as_int(x), 0x7fffefff) + 0x1000); }

// Products of 16 x 16 by 16 x 8 floats in tf32: 1 or 2 terms of A; of B 2, or 0, its floats as they are (rounded
// before). With 2 and 2 the product of both second terms is left out.
template <int A_TERMS, int B_TERMS> struct Product {
    struct A {
        u32 hi[8], lo[A_TERMS == 2 ? 8 : 1];
    };
    struct B {
        u32 hi[4], lo[B_TERMS == 2 ? 4 : 1];
    };
    static __device__ __forceinline__ A a(const float (&x)[8]) {
        A y;
#pragma unroll
        for (int i = 0; i < 8; i++)
            if constexpr (A_TERMS == 2) split_tf32(x[i], y.hi[i], y.lo[i]);
            else y.hi[i] = nearest_tf32(x[i]);
        return y;
    }
    // 8 columns, row by row from `column` on: the pairs that a lane reads of its column
    static __device__ __forceinline__ B b(const float* column) {
        const float2 first = *(const float2*)column, second = *(const float2*)(column + 8);
        return b({first.x, first.y, second.x, second.y});
    }
    static __device__ __forceinline__ B b(const float (&x)[4]) {
        B y;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if constexpr (B_TERMS == 2) split_tf32(x[i], y.hi[i], y.lo[i]);
            else y.hi[i] = __float_as_uint(x[i]);
        return y;
    }
    static __device__ __forceinline__ float rounded(float x) {
        return B_TERMS == 2 ? x : __uint_as_float(round_tf32(x));
    }   // the rows of B
    static __device__ __forceinline__ void add(float (&c)[4], const A& a, const B& b) {
        if constexpr (A_TERMS == 2) mma_tf32(c, a.lo, b.hi);
        if constexpr (B_TERMS == 2) mma_tf32(c, a.hi, b.lo);
        mma_tf32(c, a.hi, b.hi);
    }
    // 8 of A's columns alone, the first or, at 1, the last
    template <int HALF> static __device__ __forceinline__ void add_half(float (&c)[4], const A& a, const B& b) {
        if constexpr (A_TERMS == 2) half_of<HALF>(c, a.lo, b.hi);
        if constexpr (B_TERMS == 2) half_of<HALF>(c, a.hi, b.lo);
        half_of<HALF>(c, a.hi, b.hi);
    }
    template <int HALF>
    static __device__ __forceinline__ void half_of(float (&c)[4], const u32 (&a)[8], const u32 (&b)[4]) {
        mma_tf32(c, a[4 * HALF], a[4 * HALF + 2], a[4 * HALF + 1], a[4 * HALF + 3], b[2 * HALF], b[2 * HALF + 1]);
    }
};

// A sequence and head, and the number of its rows where rows are dense
struct Place {
    Sequence s;
    i64 slot, first;
    int head;
    __device__ __forceinline__ Place(const Arguments& a, i64 of)
        : s(sequence_of(a.offsets, (int)(of / a.heads), a.T)), slot(of), head((int)(of % a.heads)) {
        first = a.offsets == nullptr ? (of / a.heads) * a.T : s.first;
    }
    __device__ __forceinline__ i64 row(const Arguments& a, int token) const { return (first + token) * a.heads + head; }
    __device__ __forceinline__ int chunks() const { return (s.T + C - 1) / C; }
};

// 8 columns of a token on their way to a lane: pieces of 16 bytes, the pieces of a block side by side. Zeros where
// there are none.
constexpr int pieces_of(int kind) { return SPAN * bytes_of(kind) / 16; }
template <int KIND_, int WIDTH>
LA_DEVICE void request(char* to, const char* rows, i64 step, int token, int T, int column) {
    constexpr int BYTES = bytes_of(KIND_);
    const char* from = rows + token * step + column * BYTES;
    const u32 at = shared_address(to) + threadIdx.x * 16;
    const bool is_row = (u32)token < (u32)T;
#pragma unroll
    for (int b = 0; b < SPAN * BYTES; b += LA_ALIGN)
        copy_in<LA_ALIGN>(at + b / 16 * (THREADS * 16) + b % 16, from + b,
                          is_row && column * BYTES + b < WIDTH * BYTES);
}
// The same as the operand A of a product has them, of all 16 columns of a warp: element n of token lane / 4 + (n & 2) 4
// and column (lane & 3) 2 + (n & 1) + (n & 4) 2. Other lanes have requested them: a barrier of the warp is before it
template <int KIND_> LA_DEVICE void receive_operand(float (&x)[SPAN], const char* from, int warp, int lane) {
#pragma unroll
    for (int n = 0; n < SPAN; n += 2) {
        const char* const at = from + (warp * 32 + (lane >> 2) * 2 + (n & 2) * 8 + n / 4) * 16;
        if constexpr (KIND_ == 2) {
            const float2 y = *(const float2*)(at + (lane >> 1 & 1) * (THREADS * 16) + (lane & 1) * 8);
            x[n] = y.x;
            x[n + 1] = y.y;
        } else {
            const u32 y = *(const u32*)(at + (lane & 3) * 4);
            x[n] = KIND_ == 0 ? low_bf16(y) : low_f16(y);
            x[n + 1] = KIND_ == 0 ? high_bf16(y) : high_f16(y);
        }
    }
}
// 4 floats of memory and a lane's: arrays of a lane are aligned as floats are, which matters where they lie in memory
LA_DEVICE void load4(float* x, const char* from) {
    const float4 y = *(const float4*)from;
    x[0] = y.x;
    x[1] = y.y;
    x[2] = y.z;
    x[3] = y.w;
}
template <int KIND_> LA_DEVICE void receive(float (&x)[SPAN], const char* from) {
    from += threadIdx.x * 16;
    if constexpr (KIND_ == 2) {
        load4(x, from);
        load4(x + 4, from + THREADS * 16);
    } else {
        const uint4 y = *(const uint4*)from;
        const u32 two[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[2 * i] = KIND_ == 0 ? low_bf16(two[i]) : low_f16(two[i]);
            x[2 * i + 1] = KIND_ == 0 ? high_bf16(two[i]) : high_f16(two[i]);
        }
    }
}
LA_DEVICE void load8(float (&x)[SPAN], const float* from) {
    load4(x, (const char*)from);
    load4(x + 4, (const char*)(from + 4));
}
LA_DEVICE void store8(float* to, const float (&x)[SPAN]) {
    *(float4*)to = {x[0], x[1], x[2], x[3]};
    *(float4*)(to + 4) = {x[4], x[5], x[6], x[7]};
}
LA_DEVICE float dot8(const float (&x)[SPAN], const float (&y)[SPAN]) {
    float s = 0.f;
#pragma unroll
    for (int i = 0; i < SPAN; i++) s = fmaf(x[i], y[i], s);
    return s;
}
LA_DEVICE void scale8(float (&x)[SPAN], const float (&y)[SPAN]) {
#pragma unroll
    for (int i = 0; i < SPAN; i++) x[i] *= y[i];
}
LA_DEVICE void add8(float (&x)[SPAN], float factor, const float (&y)[SPAN]) {
#pragma unroll
    for (int i = 0; i < SPAN; i++) x[i] = fmaf(factor, y[i], x[i]);
}
LA_DEVICE void fill8(float (&x)[SPAN], float y) {
#pragma unroll
    for (int i = 0; i < SPAN; i++) x[i] = y;
}
LA_DEVICE void decays(float (&a)[SPAN]) {   // e^g of log decays
#pragma unroll
    for (int i = 0; i < SPAN; i++) a[i] = exp2_approx(a[i] * LOG2_OF_E);
}

// The decay of a chunk, the last of Pre, has two terms: a state is multiplied by it at every chunk, and a factor near 1
// that is always rounded the same way is off by as much as all chunks together. last, of 16 channels of a warp: the
// first terms, as products of decays; at `rest` the second.
LA_DEVICE float expm1_of(float sum) {   // e^sum - 1 of a sum above SLOW
    float m = 1.f;
#pragma unroll
    for (int n = 9; n > 1; n--) m = fmaf(m, sum * (1.f / n), 1.f);
    return m * sum;
}
constexpr float SLOW = -0.5f;   // sum of a channel's log decays from which on e^sum - 1 is a series
LA_DEVICE void in_two_terms(float sum, float& first, float& rest) {   // first remains where the sum is not above SLOW
    const float m = expm1_of(sum);
    if (sum > SLOW) first = 1.f + m;
    rest = sum > SLOW ? m - (first - 1.f) : 0.f;
}
template <int N> LA_DEVICE void halve(
    float (&x)[SPAN], int lane, int bit) {   // sums with the lane of another `bit`, of a half of the channels each
#pragma unroll
    for (int c = 0; c < N; c++) {
        const float other = __shfl_xor_sync(0xffffffffu, lane & bit ? x[c] : x[c + N], bit);
        x[c] = (lane & bit ? x[c + N] : x[c]) + other;
    }
}
LA_DEVICE void refine(float* last, int rest, float (&g)[SPAN], int lane) {
    halve<4>(g, lane, 16);
    halve<2>(g, lane, 8);
    halve<1>(g, lane, 4);
    const float sum = g[0] + __shfl_xor_sync(0xffffffffu, g[0], 2);
    const int channel = (lane & 1) * SPAN + (lane >> 4) * 4 + (lane >> 3 & 1) * 2 + (lane >> 2 & 1);
    __syncwarp();
    if (lane & 2) return;
    in_two_terms(sum, last[channel], last[rest + channel]);
}
// S = decay S + added, where sums of tensor cores, which truncate, begin from zero with every chunk
LA_DEVICE float add_to(float x, float added, float first, float rest) { return fmaf(x, first, fmaf(x, rest, added)); }
// sum of an entry of C x C floats of every warp
template <int N> LA_DEVICE float sum_over_warps(const float* parts) {
    float s = 0.f;
#pragma unroll
    for (int w = 0; w < N; w++) s += parts[w * C * C];
    return s;
}
