// A few columns of a matrix of floats in the registers of a warp, and vectors along its rows and columns.
//
// LANES lanes lie side by side and 32 / LANES groups of them one below the other. Lane l of group g owns rows 4 g .. 4 g + 3
// of every 128 / LANES rows, and of the LANES PER columns it owns PER: those from PER l on if WIDE (one access), else
// l, LANES + l, ... . A vector along the rows is held alike: each lane has its own rows' elements.
#pragma once
#include "tile/four.cuh"

template <int ROWS, int LANES> struct RowVector {     // what a lane needs of ROWS numbers
    static constexpr int SPAN = 128 / LANES, N = (ROWS + SPAN - 1) / SPAN * 4;
    float x[N];
    __device__ __forceinline__ float operator[](int r) const { return x[r]; }
};

template <int KIND, int ROWS, int LANES, int WIDE> struct PackedRows {   // the same as loaded
    static constexpr int SPAN = 128 / LANES, CHUNKS = (ROWS + SPAN - 1) / SPAN;
    Four<KIND> x[CHUNKS];
    __device__ __forceinline__ void load(const char* p, int lane) {
        const int row = lane / LANES * 4;
#pragma unroll
        for (int i = 0; i < CHUNKS; i++)
            x[i].template load<WIDE>(p + (i * SPAN + row) * bytes_of(KIND), ROWS % SPAN == 0 ? 4 : ROWS - i * SPAN - row);
    }
    __device__ __forceinline__ float operator[](int r) const { return x[r >> 2][r & 3]; }
};

// the same where only the call knows the kind
template <int ROWS, int LANES, int WIDE> LA_DEVICE void load_rows_of(RowVector<ROWS, LANES>& to, const char* p, int kind, int lane) {
    auto take = [&](const auto& y) {
#pragma unroll
        for (int r = 0; r < RowVector<ROWS, LANES>::N; r++) to.x[r] = y[r];
    };
    if (kind == 2) {
        PackedRows<2, ROWS, LANES, WIDE> y;
        y.load(p, lane);
        take(y);
    } else if (kind == 0) {
        PackedRows<0, ROWS, LANES, WIDE> y;
        y.load(p, lane);
        take(y);
    } else {
        PackedRows<1, ROWS, LANES, WIDE> y;
        y.load(p, lane);
        take(y);
    }
}

// sum over the groups, in all of them
template <int LANES> LA_DEVICE float row_sum(float x) {
#pragma unroll
    for (int d = LANES; d < 32; d <<= 1) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}

template <int ROWS, int PER, int LANES, int WIDE> struct Columns {
    static_assert(PER == 4 || PER == 2, "one access of 16 or 8 bytes");
    static constexpr int SPAN = 128 / LANES, N = RowVector<ROWS, LANES>::N, STEP = WIDE ? 1 : LANES;   // STEP: from one of a lane's columns to the next
    float x[N][PER];

    static __device__ __forceinline__ int first(int lane) { return WIDE ? lane % LANES * PER : lane % LANES; }
    template <class F> __device__ __forceinline__ void each(F f) {   // f(row, column, element)
#pragma unroll
        for (int r = 0; r < N; r++)
#pragma unroll
            for (int j = 0; j < PER; j++) f(r, j, x[r][j]);
    }
    // f(row of registers, row of the matrix less the lane's first) for the rows that exist
    template <class F> static __device__ __forceinline__ void rows(int lane, F f) {
#pragma unroll
        for (int r = 0; r < N; r++) {
            const int row = (r >> 2) * SPAN + (r & 3);
            if (ROWS % SPAN == 0 || lane / LANES * 4 + row < ROWS) f(r, row);
        }
    }
    __device__ __forceinline__ void clear() { each([](int, int, float& y) { y = 0.f; }); }
    // p: the first of the columns in row 0; `columns` of them exist (WIDE: a multiple of PER); zeros for the rest.
    // PAST: past the L1 cache. Four lanes are half of what memory hands out at once: neighbouring warps read the rest.
    template <int PAST> __device__ __forceinline__ void load(const float* p, i64 stride, int columns, int lane) {
        const int column = first(lane);
        p += lane / LANES * 4 * stride + column;
        clear();
        rows(lane, [&](int r, int row) {
            const float* from = p + row * stride;
            if constexpr (WIDE) {
                if (column >= columns) return;
                if constexpr (PER == 2)
                    asm volatile("ld.global.L2::256B.v2.f32 {%0, %1}, [%2];"
                                 : "=f"(x[r][0]), "=f"(x[r][1]) : "l"(from) : "memory");
                else if constexpr (LANES < 8)
                    asm volatile("ld.global.L2::256B.v4.f32 {%0, %1, %2, %3}, [%4];"
                                 : "=f"(x[r][0]), "=f"(x[r][1]), "=f"(x[r][2]), "=f"(x[r][3]) : "l"(from) : "memory");
                else if constexpr (PAST)
                    asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                                 : "=f"(x[r][0]), "=f"(x[r][1]), "=f"(x[r][2]), "=f"(x[r][3]) : "l"(from) : "memory");
                else
                    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                                 : "=f"(x[r][0]), "=f"(x[r][1]), "=f"(x[r][2]), "=f"(x[r][3]) : "l"(from) : "memory");
            } else
#pragma unroll
                for (int j = 0; j < PER; j++)
                    if (column + j * STEP < columns) x[r][j] = from[j * STEP];
        });
    }
    template <int PAST> __device__ __forceinline__ void store(float* p, i64 stride, int columns, int lane) const {
        const int column = first(lane);
        p += lane / LANES * 4 * stride + column;
        rows(lane, [&](int r, int row) {
            float* to = p + row * stride;
            if constexpr (WIDE) {
                if (column >= columns) return;
                if constexpr (PER == 2)
                    asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x[r][0]), "f"(x[r][1]) : "memory");
                else if constexpr (PAST && LANES == 8)
                    asm volatile("st.global.L1::no_allocate.v4.f32 [%0], {%1, %2, %3, %4};"
                                 ::"l"(to), "f"(x[r][0]), "f"(x[r][1]), "f"(x[r][2]), "f"(x[r][3]) : "memory");
                else
                    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
                                 ::"l"(to), "f"(x[r][0]), "f"(x[r][1]), "f"(x[r][2]), "f"(x[r][3]) : "memory");
            } else
#pragma unroll
                for (int j = 0; j < PER; j++)
                    if (column + j * STEP < columns) to[j * STEP] = x[r][j];
        });
    }
    __device__ __forceinline__ void scale(float z) { each([&](int, int, float& y) { y *= z; }); }
    template <class Z> __device__ __forceinline__ void scale_rows(const Z& z) { each([&](int r, int, float& y) { y *= z[r]; }); }
    __device__ __forceinline__ void scale_columns(const float (&z)[PER]) { each([&](int, int j, float& y) { y *= z[j]; }); }
    // this lane's columns of z X, z along the rows
    template <class Z> __device__ __forceinline__ void dot(float (&sum)[PER], const Z& z) const {
#pragma unroll
        for (int j = 0; j < PER; j++) {
            sum[j] = 0.f;
#pragma unroll
            for (int r = 0; r < N; r++) sum[j] = fmaf(z[r], x[r][j], sum[j]);
        }
#pragma unroll
        for (int j = 0; j < PER; j++) sum[j] = row_sum<LANES>(sum[j]);
    }
    // X += y^T z
    template <class Y> __device__ __forceinline__ void add_outer(const Y& y, const float (&z)[PER]) {
        each([&](int r, int j, float& x) { x = fmaf(y[r], z[j], x); });
    }
};
