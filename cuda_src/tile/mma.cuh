// Products of register tiles, C (16 x 8) += A (16 x 16) B (16 x 8), for three kinds of elements.
//
// Lane 4 g + j of a warp owns, in every kind:
//     C  c[0..3]  (g, 2j) (g, 2j+1) (g+8, 2j) (g+8, 2j+1)
//     A  a[0..7]  (g, 2j) (g, 2j+1) (g+8, 2j) (g+8, 2j+1), then the same with 8 columns more: two C tiles side by side
//     B  b[0..3]  rows 2j, 2j+1, 2j+8, 2j+9 of column g
// so accumulators are operands as they are. tf32 products take 8 columns at a time and number them 0 4 1 5 2 6 3 7: the
// contraction may be traversed in any order, and in this one 32-bit operands are laid out as 16-bit ones.
#pragma once
#include "tile/mma_sync.cuh"
#include "tile/shared.cuh"

// both halves of 16 columns, operands in the order above
LA_DEVICE void mma_tf32(float (&c)[4], const u32 (&a)[8], const u32 (&b)[4]) {
    mma_tf32(c, a[0], a[2], a[1], a[3], b[0], b[1]);
    mma_tf32(c, a[4], a[6], a[5], a[7], b[2], b[3]);
}

// bfloat16: one product
struct Bfloat16 {
    static constexpr int BYTES = 2, GRAM_BYTES = 2;   // of an element; of an element of a gram matrix in shared memory
    static constexpr bool EXACT = false;
    struct A {
        u32 x[4];
    };
    struct B {
        u32 x[2];
    };
    typedef A Raw;   // an A operand as loaded
    static __device__ __forceinline__ Raw raw(const u32 (&x)[4]) { return {{x[0], x[1], x[2], x[3]}}; }
    static __device__ __forceinline__ float value(const Raw& r, int i) {
        return i & 1 ? high_bf16(r.x[i >> 1]) : low_bf16(r.x[i >> 1]);
    }
    static __device__ __forceinline__ A operand(const Raw& r) { return r; }
    static __device__ __forceinline__ A operand(const float (&f)[8]) {
        return {{pack_bf16(f[0], f[1]), pack_bf16(f[2], f[3]), pack_bf16(f[4], f[5]), pack_bf16(f[6], f[7])}};
    }
    static __device__ __forceinline__ B column(u32 x0, u32 x1) { return {{x0, x1}}; }
    static __device__ __forceinline__ void multiply(float (&c)[4], const A& a, const B& b) { mma_bf16(c, a.x, b.x); }
    static __device__ __forceinline__ u32 pair(float x, float y) { return pack_bf16(x, y); }
};

// float16 as it is, for factors of the order of 1
struct Half {
    static constexpr int BYTES = 2;
    static constexpr bool EXACT = false;
    struct A {
        u32 x[4];
    };
    struct B {
        u32 x[2];
    };
    typedef A Raw;
    static __device__ __forceinline__ Raw raw(const u32 (&x)[4]) { return {{x[0], x[1], x[2], x[3]}}; }
    static __device__ __forceinline__ float value(const Raw& r, int i) {
        return i & 1 ? high_f16(r.x[i >> 1]) : low_f16(r.x[i >> 1]);
    }
    static __device__ __forceinline__ A operand(const float (&f)[8]) {
        return {{pack_f16(f[0], f[1]), pack_f16(f[2], f[3]), pack_f16(f[4], f[5]), pack_f16(f[6], f[7])}};
    }
    static __device__ __forceinline__ A operand(const Raw& r) { return r; }
    static __device__ __forceinline__ B column(u32 x0, u32 x1) { return {{x0, x1}}; }
    static __device__ __forceinline__ void multiply(float (&c)[4], const A& a, const B& b) {
        mma_f16(c, a.x, b.x[0], b.x[1]);
    }
};

// float16: as tf32, which holds it exactly and has float32's range, so that a state never overflows
struct Float16 {
    static constexpr int BYTES = 2, GRAM_BYTES = 4;
    static constexpr bool EXACT = false;
    struct A {
        u32 x[8];
    };
    struct B {
        u32 x[4];
    };
    struct Raw {
        float x[8];
    };
    static __device__ __forceinline__ Raw raw(const u32 (&x)[4]) {
        return {{low_f16(x[0]), high_f16(x[0]), low_f16(x[1]), high_f16(x[1]), low_f16(x[2]), high_f16(x[2]),
                 low_f16(x[3]), high_f16(x[3])}};
    }
    static __device__ __forceinline__ float value(const Raw& r, int i) { return r.x[i]; }
    static __device__ __forceinline__ A operand(const float (&f)[8]) {
        A a;
#pragma unroll
        for (int i = 0; i < 8; i++) a.x[i] = round_tf32(f[i]);
        return a;
    }
    static __device__ __forceinline__ A operand(const Raw& r) {   // exact as they are
        A a;
#pragma unroll
        for (int i = 0; i < 8; i++) a.x[i] = __float_as_uint(r.x[i]);
        return a;
    }
    static __device__ __forceinline__ B column(const float (&f)[4]) {
        return {{round_tf32(f[0]), round_tf32(f[1]), round_tf32(f[2]), round_tf32(f[3])}};
    }
    static __device__ __forceinline__ B column(u32 x0, u32 x1) {
        return {{__float_as_uint(low_f16(x0)), __float_as_uint(high_f16(x0)), __float_as_uint(low_f16(x1)),
                 __float_as_uint(high_f16(x1))}};
    }
    static __device__ __forceinline__ void multiply(float (&c)[4], const A& a, const B& b) { mma_tf32(c, a.x, b.x); }
    static __device__ __forceinline__ u32 pair(float x, float y) { return pack_f16(x, y); }
};

// float32 in memory, tf32 in products
struct Tfloat32 {
    static constexpr int BYTES = 4, GRAM_BYTES = 4;
    static constexpr bool EXACT = false;
    typedef Float16::A A;
    typedef Float16::B B;
    struct Raw {
        float x[8];
    };
    static __device__ __forceinline__ float value(const Raw& r, int i) { return r.x[i]; }
    static __device__ __forceinline__ A operand(const float (&f)[8]) { return Float16::operand(f); }
    static __device__ __forceinline__ A operand(const Raw& r) { return Float16::operand(r.x); }
    static __device__ __forceinline__ B column(const float (&f)[4]) { return Float16::column(f); }
    static __device__ __forceinline__ void multiply(float (&c)[4], const A& a, const B& b) {
        Float16::multiply(c, a, b);
    }
};

// float32: x = hi + lo in tf32, and A B = lo hi + hi lo + hi hi to 2^-21
struct Float32 {
    static constexpr int BYTES = 4, GRAM_BYTES = 4;
    static constexpr bool EXACT = true;
    struct A {
        u32 hi[8], lo[8];
    };
    struct B {
        u32 hi[4], lo[4];
    };
    struct Raw {
        float x[8];
    };
    static __device__ __forceinline__ float value(const Raw& r, int i) { return r.x[i]; }
    static __device__ __forceinline__ A operand(const float (&f)[8]) {
        A a;
#pragma unroll
        for (int i = 0; i < 8; i++) split_tf32(f[i], a.hi[i], a.lo[i]);
        return a;
    }
    static __device__ __forceinline__ A operand(const Raw& r) { return operand(r.x); }
    static __device__ __forceinline__ B column(const float (&f)[4]) {
        B b;
#pragma unroll
        for (int i = 0; i < 4; i++) split_tf32(f[i], b.hi[i], b.lo[i]);
        return b;
    }
    static __device__ __forceinline__ void multiply(float (&c)[4], const A& a, const B& b) {
        mma_tf32(c, a.lo, b.hi);
        mma_tf32(c, a.hi, b.lo);
        mma_tf32(c, a.hi, b.hi);
    }
};

// C += A B for TILES tiles of 16 rows and the two tiles i, i + 1 of 8 columns.
template <class E, int TILES, int N> LA_DEVICE void multiply_pair(float (&c)[TILES][N][4], int i,
                                                                  const typename E::A (&a)[TILES],
                                                                  const typename E::B (&b)[2]) {
#pragma unroll
    for (int m = 0; m < TILES; m++) {
        E::multiply(c[m][i], a[m], b[0]);
        E::multiply(c[m][i + 1], a[m], b[1]);
    }
}

// Tensor cores truncate their sums, and the truncated parts of a long sum add up. Two remedies for Float32:
// C += A B with the products of second terms, which are small, in a sum of their own: a third of the truncations of C
template <class E> LA_DEVICE void multiply_terms(float (&c)[4], float (&rest)[4], const typename E::A& a,
                                                 const typename E::B& b) {
    if constexpr (E::EXACT) {
        mma_tf32(rest, a.lo, b.hi);
        mma_tf32(rest, a.hi, b.lo);
        mma_tf32(c, a.hi, b.hi);
    } else E::multiply(c, a, b);
}
// tiles i, i + 1 of C += the sums that f(d0, d1) adds to two tiles: with APART f begins with zeros, and its sum is
// added to C rounded
template <bool APART, int N, class F> LA_DEVICE void add_products(float (&c)[N][4], int i, F f) {
    if constexpr (APART) {
        float d[2][4] = {};
        f(d[0], d[1]);
#pragma unroll
        for (int n = 0; n < 8; n++) c[i + (n >> 2)][n & 3] += d[n >> 2][n & 3];
    } else f(c[i], c[i + 1]);
}

// Operands out of shared tiles. `base` is the tile's shared address; rows and columns start at multiples of 16.

// A = X[row.., column..]
template <class E, class X> LA_DEVICE typename E::Raw load_a_rows(u32 base, int row, int column, int lane) {
    if constexpr (X::BYTES == 2) {
        u32 x[4];
        load_matrix(x, base + X::block_piece(row, column / 8, lane & 15, lane >> 4));
        return E::raw(x);
    } else {
        const int r = lane >> 2, c = (lane & 3) * 2;
        const float2 a = load_shared2(base + X::block_at(row, column, r, c)),
                     b = load_shared2(base + X::block_at(row + 8, column, r, c));
        const float2 d = load_shared2(base + X::block_at(row, column + 8, r, c)),
                     e = load_shared2(base + X::block_at(row + 8, column + 8, r, c));
        return {{a.x, a.y, b.x, b.y, d.x, d.y, e.x, e.y}};
    }
}
// A = X[row.., column..]^T: columns of X are the rows of A
template <class E, class X> LA_DEVICE typename E::Raw load_a_columns(u32 base, int row, int column, int lane) {
    if constexpr (X::BYTES == 2) {
        u32 x[4];
        load_matrix_transposed(
            x, base + X::block_piece(row, column / 8, (lane & 7) | ((lane >> 4) << 3), (lane >> 3) & 1));
        return E::raw(x);
    } else {
        const int r = (lane & 3) * 2, c = lane >> 2;
        typename E::Raw a;
#pragma unroll
        for (int i = 0; i < 8; i++)
            a.x[i] = load_shared(base + X::block_at(row + (i & 4) * 2, column + (i & 2) * 4, r + (i & 1), c));
        return a;
    }
}
// a B tile = X[row.., column..]^T of 32-bit elements: 8 rows of X are the columns of B; row is a multiple of 8
template <class E, class X> LA_DEVICE void load_b_row(typename E::B& b, u32 base, int row, int column, int lane) {
    const int r = lane >> 2, c = (lane & 3) * 2;
    const float2 x = load_shared2(base + X::block_at(row, column, r, c)),
                 y = load_shared2(base + X::block_at(row, column + 8, r, c));
    const float f[4] = {x.x, x.y, y.x, y.y};
    b = E::column(f);
}
// two B tiles = X[row.., column..]^T: 16 rows of X are the columns of B
template <class E, class X> LA_DEVICE void load_b_rows(typename E::B (&b)[2], u32 base, int row, int column, int lane) {
    if constexpr (X::BYTES == 2) {
        u32 x[4];
        load_matrix(x, base + X::block_piece(row, column / 8, (lane & 7) | ((lane >> 4) << 3), (lane >> 3) & 1));
        b[0] = E::column(x[0], x[1]);
        b[1] = E::column(x[2], x[3]);
    } else {
        load_b_row<E, X>(b[0], base, row, column, lane);
        load_b_row<E, X>(b[1], base, row + 8, column, lane);
    }
}
// two B tiles = X[row.., column..]
template <class E, class X> LA_DEVICE void load_b_columns(typename E::B (&b)[2], u32 base, int row, int column,
                                                          int lane) {
    if constexpr (X::BYTES == 2) {
        u32 x[4];
        load_matrix_transposed(x, base + X::block_piece(row, column / 8, lane & 15, lane >> 4));
        b[0] = E::column(x[0], x[1]);
        b[1] = E::column(x[2], x[3]);
    } else {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int r = (lane & 3) * 2, c = lane >> 2;
            float f[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                f[i] = load_shared(base + X::block_at(row + (i >> 1) * 8, column + n * 8, r + (i & 1), c));
            b[n] = E::column(f);
        }
    }
}
// Bfloat16 and Float32 have one column() each: load_b_* uses only the one that the tile's width needs.
