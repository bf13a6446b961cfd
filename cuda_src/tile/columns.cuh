// A few columns of a matrix of floats in the registers of one or more warps, and vectors along its rows and columns.
//
// LANES lanes lie side by side and GROUPS = 32 SPLIT / LANES groups of them, of SPLIT warps, one below the other. Lane
// l of group g owns rows 4 g .. 4 g + 3 of every 4 GROUPS rows, and of the LANES PER columns it owns PER: those from
// PER l on if WIDE (one access), else l, LANES + l, ... . A vector along the rows is held alike: each lane has its own
// rows' elements.
//
// Sums down the rows have one order for all LANES and SPLIT, and so the same bits: fours of rows i, i + LEAVES, ... are
// one chain, a leaf; leaves are added to those LEAVES / 2 further on, these sums to those LEAVES / 4 further on, and so
// forth.
#pragma once
#include "tile/vec4.cuh"
#include "tile/cross_warp.cuh"

constexpr int LEAVES = 8;

// 8 and 4 bytes that this kernel may write later; prefetches those beside them to L2, or (ROW) a warp loads 256 itself
template <bool ROW> LA_DEVICE uint2 load_eight_bytes(const void* p) {
    uint2 y;
    if constexpr (ROW)
        asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(y.x), "=r"(y.y) : "l"(p) : "memory");
    else asm volatile("ld.global.L2::256B.v2.u32 {%0, %1}, [%2];" : "=r"(y.x), "=r"(y.y) : "l"(p) : "memory");
    return y;
}
template <bool ROW> LA_DEVICE void store_eight_bytes(void* p, uint2 y) {
    if constexpr (ROW)
        asm volatile("st.global.L1::no_allocate.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(y.x), "r"(y.y) : "memory");
    else *(uint2*)p = y;
}
LA_DEVICE u32 load_four_bytes(const void* p) {
    u32 y;
    asm volatile("ld.global.L2::256B.u32 %0, [%1];" : "=r"(y) : "l"(p) : "memory");
    return y;
}
template <int KIND> LA_DEVICE float low_half(u32 x) { return KIND == 0 ? low_bf16(x) : low_f16(x); }
template <int KIND> LA_DEVICE float high_half(u32 x) { return KIND == 0 ? high_bf16(x) : high_f16(x); }
template <int KIND> LA_DEVICE u32 pack_halves(float lo, float hi) {
    return KIND == 0 ? pack_bf16(lo, hi) : pack_f16(lo, hi);
}

template <int ROWS, int GROUPS> struct RowVector {   // a lane's part of ROWS numbers
    static constexpr int SPAN = 4 * GROUPS, N = (ROWS + SPAN - 1) / SPAN * 4;
    float x[N];
    __device__ __forceinline__ float operator[](int r) const { return x[r]; }
};

template <int KIND, int ROWS, int GROUPS, int WIDE> struct PackedRows {   // the same as loaded
    static constexpr int SPAN = 4 * GROUPS, CHUNKS = (ROWS + SPAN - 1) / SPAN;
    Vec4<KIND> x[CHUNKS];
    __device__ __forceinline__ void load(const char* p, int group) {
        const int row = group * 4;
#pragma unroll
        for (int i = 0; i < CHUNKS; i++)
            x[i].template load<WIDE>(p + (i * SPAN + row) * bytes_of(KIND),
                                     ROWS % SPAN == 0 ? 4 : ROWS - i * SPAN - row);
    }
    __device__ __forceinline__ float operator[](int r) const { return x[r >> 2][r & 3]; }
    __device__ __forceinline__ void multiply(float factor) {   // by a power of 2
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) x[i].multiply(factor);
    }
};

// the same where only the call knows the kind
template <int ROWS, int GROUPS, int WIDE> struct AnyRows {
    static constexpr int SPAN = 4 * GROUPS, CHUNKS = (ROWS + SPAN - 1) / SPAN;
    AnyVec4<WIDE> x[CHUNKS];
    __device__ __forceinline__ void load(const char* p, int kind, int group) {
        p += group * 4 * bytes_of(kind);
#pragma unroll
        for (int i = 0; i < CHUNKS; i++)
            x[i].template load<ROWS % SPAN == 0>(p, i * SPAN, ROWS - i * SPAN - group * 4, kind);
    }
    template <int KIND, class F> __device__ __forceinline__ void unpack(RowVector<ROWS, GROUPS>& to, F f) const {
#pragma unroll
        for (int r = 0; r < 4 * CHUNKS; r++) to.x[r] = f(x[r >> 2].template as<KIND>(r & 3));
    }
    // f of each
    template <class F> __device__ __forceinline__ RowVector<ROWS, GROUPS> as(int kind, F f) const {
        RowVector<ROWS, GROUPS> y;
        if (kind == 2) unpack<2>(y, f);
        else if (kind == 0) unpack<0>(y, f);
        else unpack<1>(y, f);
        return y;
    }
};

template <int ROWS, int PER, int LANES, int WIDE, int SPLIT> struct Columns {
    static_assert(PER == 4 || PER == 2, "one access of 16 or 8 bytes");
    static constexpr int GROUPS = 32 * SPLIT / LANES, SPAN = 4 * GROUPS, N = RowVector<ROWS, GROUPS>::N;
    static constexpr int STEP = WIDE ? 1 : LANES;   // from one of a lane's columns to the next
    static constexpr int HELD = LEAVES / GROUPS;    // leaves of a lane; its row r is in leaf(r) of them
    static __device__ __forceinline__ constexpr int leaf(int r) { return (r >> 2) % HELD; }
    static_assert(GROUPS <= LEAVES && LEAVES % GROUPS == 0, "a lane has whole leaves");
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
    __device__ __forceinline__ void clear() {
        each([](int, int, float& y) { y = 0.f; });
    }
    // p: the first of the columns in row 0; `columns` of them exist (WIDE: a multiple of PER); zeros for the rest.
    // PAST: past the L1 cache, of floats. Vec4 lanes are half a memory transaction: neighbouring warps read
    // the rest. KIND: how elements are stored; 16 bits are widened here, and rounded, to nearest even, in `store`.
    template <int PAST, int KIND>
    __device__ __forceinline__ void load(const typename StoredAs<KIND>::type* p, i64 stride, int columns, int lane) {
        const int column = first(lane);
        p += lane / LANES * 4 * stride + column;
        clear();
        rows(lane, [&](int r, int row) {
            const typename StoredAs<KIND>::type* from = p + row * stride;
            if constexpr (KIND != 2) load_narrow<KIND>(x[r], from, columns - column);
            else if constexpr (WIDE) {
                if (column >= columns) return;
                if constexpr (PER == 2)
                    asm volatile("ld.global.L2::256B.v2.f32 {%0, %1}, [%2];"
                                 : "=f"(x[r][0]), "=f"(x[r][1])
                                 : "l"(from)
                                 : "memory");
                else if constexpr (LANES < 8)
                    asm volatile("ld.global.L2::256B.v4.f32 {%0, %1, %2, %3}, [%4];"
                                 : "=f"(x[r][0]), "=f"(x[r][1]), "=f"(x[r][2]), "=f"(x[r][3])
                                 : "l"(from)
                                 : "memory");
                else if constexpr (PAST)
                    asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                                 : "=f"(x[r][0]), "=f"(x[r][1]), "=f"(x[r][2]), "=f"(x[r][3])
                                 : "l"(from)
                                 : "memory");
                else
                    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                                 : "=f"(x[r][0]), "=f"(x[r][1]), "=f"(x[r][2]), "=f"(x[r][3])
                                 : "l"(from)
                                 : "memory");
            } else
#pragma unroll
                for (int j = 0; j < PER; j++)
                    if (column + j * STEP < columns) x[r][j] = from[j * STEP];
        });
    }
    template <int PAST, int KIND>
    __device__ __forceinline__ void store(typename StoredAs<KIND>::type* p, i64 stride, int columns, int lane) const {
        const int column = first(lane);
        p += lane / LANES * 4 * stride + column;
        rows(lane, [&](int r, int row) {
            typename StoredAs<KIND>::type* to = p + row * stride;
            if constexpr (KIND != 2) store_narrow<KIND>(to, x[r], columns - column);
            else if constexpr (WIDE) {
                if (column >= columns) return;
                if constexpr (PER == 2)
                    asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x[r][0]), "f"(x[r][1]) : "memory");
                else if constexpr (PAST && LANES == 8)
                    asm volatile("st.global.L1::no_allocate.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[r][0]),
                                 "f"(x[r][1]), "f"(x[r][2]), "f"(x[r][3])
                                 : "memory");
                else
                    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[r][0]), "f"(x[r][1]),
                                 "f"(x[r][2]), "f"(x[r][3])
                                 : "memory");
            } else
#pragma unroll
                for (int j = 0; j < PER; j++)
                    if (column + j * STEP < columns) to[j * STEP] = x[r][j];
        });
    }
    // A row of a lane's columns in 16 bits; `count` columns exist from its first on.
    template <int KIND> static __device__ __forceinline__ void load_narrow(float (&y)[PER], const u16* from,
                                                                           int count) {
        if constexpr (WIDE) {
            if (count <= 0) return;
            u32 packed[2];
            if constexpr (PER == 2) packed[0] = load_four_bytes(from);
            else {
                const uint2 both = load_eight_bytes<LANES == 32>(from);
                packed[0] = both.x;
                packed[1] = both.y;
            }
#pragma unroll
            for (int j = 0; j < PER; j += 2) {
                y[j] = low_half<KIND>(packed[j >> 1]);
                y[j + 1] = high_half<KIND>(packed[j >> 1]);
            }
        } else
#pragma unroll
            for (int j = 0; j < PER; j++)
                if (j * STEP < count) y[j] = low_half<KIND>(from[j * STEP]);
    }
    template <int KIND> static __device__ __forceinline__ void store_narrow(u16* to, const float (&y)[PER], int count) {
        if constexpr (WIDE) {
            if (count <= 0) return;
            if constexpr (PER == 2) *(u32*)to = pack_halves<KIND>(y[0], y[1]);
            else store_eight_bytes<LANES == 32>(to, {pack_halves<KIND>(y[0], y[1]), pack_halves<KIND>(y[2], y[3])});
        } else
#pragma unroll
            for (int j = 0; j < PER; j++)
                if (j * STEP < count) to[j * STEP] = (u16)pack_halves<KIND>(y[j], 0.f);
    }
    __device__ __forceinline__ void scale(float z) {
        each([&](int, int, float& y) { y *= z; });
    }
    template <class Z> __device__ __forceinline__ void scale_rows(const Z& z) {
        each([&](int r, int, float& y) { y *= z[r]; });
    }
    __device__ __forceinline__ void scale_columns(const float (&z)[PER]) {
        each([&](int, int j, float& y) { y *= z[j]; });
    }
    // PER sums down the rows: leaves begin with start(leaf of the lane, j), row r is added by add(r, j, part); in all
    // warps or, without ALL, in the first.
    template <bool ALL, class F, class G>
    static __device__ __forceinline__ void sums(float (&sum)[PER], CrossWarpSum<SPLIT, PER>& warps, int lane, F start,
                                                G add) {
        float part[HELD][PER];
#pragma unroll
        for (int m = 0; m < HELD; m++)
#pragma unroll
            for (int j = 0; j < PER; j++) {
                part[m][j] = start(m, j);
#pragma unroll
                for (int r = 0; r < N; r++)
                    if (leaf(r) == m) part[m][j] = add(r, j, part[m][j]);
            }
#pragma unroll
        for (int d = HELD / 2; d; d >>= 1)
#pragma unroll
            for (int m = 0; m < d; m++)
#pragma unroll
                for (int j = 0; j < PER; j++) part[m][j] += part[m + d][j];
#pragma unroll
        for (int j = 0; j < PER; j++) sum[j] = part[0][j];
        warps.template sum<ALL>(sum, lane);
        if (ALL || warps.warp == 0)
#pragma unroll
            for (int j = 0; j < PER; j++)
#pragma unroll
                for (int d = 16; d >= LANES; d >>= 1) sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], d);
    }
    // This lane's columns of z X, z along the rows
    template <bool ALL, class Z, class F>
    __device__ __forceinline__ void dot(float (&sum)[PER], const Z& z, CrossWarpSum<SPLIT, PER>& warps, int lane,
                                        F start) const {
        sums<ALL>(sum, warps, lane, start, [&](int r, int j, float part) { return fmaf(z[r], x[r][j], part); });
    }
    template <bool ALL, class Z>
    __device__ __forceinline__ void dot(float (&sum)[PER], const Z& z, CrossWarpSum<SPLIT, PER>& warps,
                                        int lane) const {
        dot<ALL>(sum, z, warps, lane, [](int, int) { return 0.f; });
    }
    // X += y^T z
    template <class Y> __device__ __forceinline__ void add_outer(const Y& y, const float (&z)[PER]) {
        each([&](int r, int j, float& x) { x = fmaf(y[r], z[j], x); });
    }
};
