// A warp's rows of the state, transposed (value row, key column), as accumulators of mma.cuh; and its places in memory.
#pragma once
#include "arguments/matrix_state/States.cuh"
#include "attention/config.cuh"

// TILES tiles of 16 rows and COLUMNS columns, from row `first`; rows past ROWS and columns past WIDTH are zeros
template <int TILES, int COLUMNS> struct StateRows {
    float x[TILES][COLUMNS / 8][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < TILES * COLUMNS / 2; n++) x[n / (COLUMNS / 2)][(n >> 2) % (COLUMNS / 8)][n & 3] = 0.f;
    }
    template <class F> __device__ __forceinline__ void each(F f) {   // f(row, column, value)
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int i = 0; i < COLUMNS / 8; i++)
#pragma unroll
                for (int n = 0; n < 4; n++) f(m * 16 + (n >> 1) * 8, i * 8 + (n & 1), x[m][i][n]);
    }
    // rows of whole blocks and whole tiles of columns need no test
    template <int ROWS, int WIDTH> static __device__ __forceinline__ bool inside(int row, int column) {
        return (ROWS % (16 * TILES * LA_WARPS) == 0 || row < ROWS) && (WIDTH == COLUMNS || column < WIDTH);
    }
    // f(pointer, value, inside) of every element, one 8 columns after the other: few addresses live at once
    template <int ROWS, int WIDTH, class F> __device__ __forceinline__ void each_at(const States& s, i64 slot,
                                                                                    int first, int lane, F f) {
        const int row = first + (lane >> 2), column = (lane & 3) * 2;
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            float* p = s.data + slot * s.slot + (row + m * 16) * s.row + column * s.column;
#pragma unroll
            for (int i = 0; i < COLUMNS / 8; i++) {
                asm volatile("" : "+l"(p));
#pragma unroll
                for (int n = 0; n < 4; n++)
                    f(p + (n >> 1) * 8 * s.row + (n & 1) * s.column, x[m][i][n],
                      inside<ROWS, WIDTH>(row + m * 16 + (n >> 1) * 8, column + i * 8 + (n & 1)));
                p += 8 * s.column;
            }
        }
    }
    template <int ROWS, int WIDTH> __device__ __forceinline__ void load(const States& s, i64 slot, int first,
                                                                        int lane) {
        each_at<ROWS, WIDTH>(s, slot, first, lane, [](const float* p, float& y, bool valid) { y = valid ? *p : 0.f; });
    }
    template <int ROWS, int WIDTH> __device__ __forceinline__ void store(const States& s, i64 slot, int first,
                                                                         int lane) {
        each_at<ROWS, WIDTH>(s, slot, first, lane, [](float* p, float& y, bool valid) {
            if (valid) *p = y;
        });
    }
    // the same as blocks of registers, lane by lane: COLUMNS / 8 * TILES pieces of 16 bytes a lane
    __device__ __forceinline__ void store_registers(float4* p, int lane) const {
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int i = 0; i < COLUMNS / 8; i++) {
                const float (&y)[4] = x[m][i];
                asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p + (m * (COLUMNS / 8) + i) * 32 + lane),
                             "f"(y[0]), "f"(y[1]), "f"(y[2]), "f"(y[3])
                             : "memory");
            }
    }
    // that again, if another block has written it too
    __device__ __forceinline__ void load_registers(const float4* p, int lane) {
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int i = 0; i < COLUMNS / 8; i++) {
                float (&y)[4] = x[m][i];
                asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                             : "=f"(y[0]), "=f"(y[1]), "=f"(y[2]), "=f"(y[3])
                             : "l"(p + (m * (COLUMNS / 8) + i) * 32 + lane)
                             : "memory");
            }
    }
    // this lane's part of the inner product with the rows that store_registers wrote
    __device__ __forceinline__ float dot_registers(const float4* p, int lane) const {
        float sum = 0.f;
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int i = 0; i < COLUMNS / 8; i++) {
                const float4 y = p[(m * (COLUMNS / 8) + i) * 32 + lane];
                sum += x[m][i][0] * y.x + x[m][i][1] * y.y + x[m][i][2] * y.z + x[m][i][3] * y.w;
            }
        return sum;
    }
};

// sixteen columns of accumulators, tiles i and i + 1, as an operand A
LA_DEVICE void flatten(float (&f)[8], const float (&x)[4], const float (&y)[4]) {
#pragma unroll
    for (int i = 0; i < 8; i++) f[i] = i < 4 ? x[i] : y[i - 4];
}
template <int TILES, int N> LA_DEVICE void clear_tiles(float (&x)[TILES][N][4]) {
#pragma unroll
    for (int i = 0; i < TILES * N * 4; i++) x[i / (N * 4)][(i >> 2) % N][i & 3] = 0.f;
}
// tile m of accumulators, 16 columns from tile i on, as an operand A
template <int TILES, int N> LA_DEVICE Element::A operand_of(const float (&x)[TILES][N][4], int m, int i) {
    float f[8];
    flatten(f, x[m][i], x[m][i + 1]);
    return Element::operand(f);
}
// c += S X^T: a warp's rows of the state by RUN rows of a tile from row `first`
template <int RUN, class X, int TILES, int KP> LA_DEVICE void read_state(float (&c)[TILES][RUN / 8][4],
                                                                         const StateRows<TILES, KP>& S, u32 x,
                                                                         int first, int lane) {
#pragma unroll
    for (int d = 0; d < KP; d += 16) {
        typename Element::A s[TILES];
#pragma unroll
        for (int m = 0; m < TILES; m++) s[m] = operand_of(S.x, m, d / 8);
#pragma unroll
        for (int i = 0; i < RUN; i += 16) {
            typename Element::B b[2];
            load_b_rows<Element, X>(b, x, first + i, d, lane);
            multiply_pair<Element>(c, i / 8, s, b);
        }
    }
}

// States at positions: those that a pass goes by at the ends of some chunks are stored, or gradients of them added.
#ifndef LA_AT   // 1: the arguments name positions; 2: of a ragged batch
#define LA_AT 0
#endif
// the number of the position at the end of a chunk, -1 if there is none; in a ragged batch a chunk is known by its
// first token
template <class Arguments, class S> LA_DEVICE int position_after(const Arguments& a, const S& sequence, int chunk) {
    return LA_AT ? __ldg(a.at_chunks + (LA_AT == 2 ? (int)sequence.first + chunk * 64 : chunk)) : -1;
}

// heads that share a state have one slot, of the first of them; sequences are batch rows
template <class Arguments> LA_DEVICE bool has_position(const Arguments& a, int index, int head) {
    return LA_AT && index >= 0 && (u32)head % (u32)a.at_group == 0;
}
template <class Arguments, class W> LA_DEVICE i64 position_slot(const Arguments& a, int index, const W& traversal) {
    return ((i64)(int)traversal.sequence.row * a.at_count + index) * ((u32)a.heads / (u32)a.at_group) +
           (u32)traversal.head / (u32)a.at_group;
}
template <int ROWS, int WIDTH, class X, class Arguments, class W> LA_DEVICE void store_position(
    X& state, const Arguments& a, int index, const W& traversal, int row, int lane) {
    if (has_position(a, index, traversal.head))
        state.template store<ROWS, WIDTH>(a.at, position_slot(a, index, traversal), row, lane);
}
template <int ROWS, int WIDTH, class X, class Arguments, class W> LA_DEVICE void add_position(
    X& dstate, const Arguments& a, int index, const W& traversal, int row, int lane) {
    if (has_position(a, index, traversal.head))
        dstate.template each_at<ROWS, WIDTH>(a.at, position_slot(a, index, traversal), row, lane,
                                             [](const float* p, float& y, bool valid) {
                                                 if (valid) y += *p;
                                             });
}
