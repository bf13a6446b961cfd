// The state of a chunk in memory, as a product that sums over its value rows reads it: 8 x 8 blocks, one after the
// other, a row of blocks being 8 value rows of all KP key columns. Elements are as in gram matrices. A block of
// 16-bit elements is stored row by row; one of floats in rows 0 2 4 6 1 3 5 7, so that a warp's four even rows (its
// four odd rows) are in different banks.
#pragma once
#include "attention/state.cuh"
#include "tile/copy.cuh"

template <int VP, int KP> struct ChunkState {
    static constexpr int BYTES = Element::GRAM_BYTES, BLOCK = 64 * BYTES, ROW = KP / 8 * BLOCK, SIZE = VP / 8 * ROW;
    static_assert(SIZE == LA_STATE, "the size that the host allocates by");

    // a warp's 16 value rows of a state, from row `row` on
    template <class E> static __device__ __forceinline__ void store(char* to, const float (&x)[KP / 8][4], int row,
                                                                    int lane) {
        const int at = BYTES == 2 ? lane * 4 : ((lane >> 3) + ((lane >> 2) & 1) * 4) * 32 + (lane & 3) * 8;
        char* p = to + row / 8 * ROW + at;
#pragma unroll
        for (int i = 0; i < KP / 8; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                if constexpr (BYTES == 2)
                    asm volatile("st.global.b32 [%0], %1;" ::"l"(p + h * ROW + i * BLOCK),
                                 "r"(E::pair(x[i][2 * h], x[i][2 * h + 1]))
                                 : "memory");
                else
                    asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(p + h * ROW + i * BLOCK), "f"(x[i][2 * h]),
                                 "f"(x[i][2 * h + 1])
                                 : "memory");
            }
    }
};

// COLUMNS key columns of all VP value rows in shared memory, blocks as above
template <int VP, int KP, int COLUMNS> struct StateColumns {
    typedef ChunkState<VP, KP> Whole;
    static constexpr int ROW = COLUMNS / 8 * Whole::BLOCK, SIZE = VP / 8 * ROW;

    // columns COLUMNS * piece and on; zeros past KP
    template <int THREADS> static __device__ __forceinline__ void load(u32 to, const char* from, int piece,
                                                                       int thread) {
#pragma unroll
        for (int n = 0; n < (SIZE / 16 + THREADS - 1) / THREADS; n++) {
            const int i = n * THREADS + thread, row = i / (ROW / 16), c = piece * (ROW / 16) + i % (ROW / 16);
            if (SIZE / 16 % THREADS == 0 || i < SIZE / 16)
                copy_in<16>(to + i * 16, from + row * Whole::ROW + c * 16, KP % COLUMNS == 0 || c < Whole::ROW / 16);
        }
    }
    // a thread's own pieces of 16 bytes, and their inner product with the same of a piece in shared memory
    template <int THREADS, int N> static __device__ __forceinline__ void read(uint4 (&x)[N], const char* from,
                                                                              int piece, int thread) {
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int i = n * THREADS + thread, row = i / (ROW / 16), c = piece * (ROW / 16) + i % (ROW / 16);
            const bool valid =
                (SIZE / 16 % THREADS == 0 || i < SIZE / 16) && (KP % COLUMNS == 0 || c < Whole::ROW / 16);
            x[n] = make_uint4(0, 0, 0, 0);
            if (valid) x[n] = *(const uint4*)(from + row * Whole::ROW + c * 16);
        }
    }
    template <int THREADS, int N> static __device__ __forceinline__ float dot(const uint4 (&x)[N], u32 base,
                                                                              int thread) {
        float sum = 0.f;
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int i = n * THREADS + thread;
            if (SIZE / 16 % THREADS && i >= SIZE / 16) continue;
            const float2 y[2] = {load_shared2(base + i * 16), load_shared2(base + i * 16 + 8)};
            const u32 u[4] = {x[n].x, x[n].y, x[n].z, x[n].w};
            const float v[4] = {y[0].x, y[0].y, y[1].x, y[1].y};
#pragma unroll
            for (int m = 0; m < 4; m++) {
                const u32 w = __float_as_uint(v[m]);
                sum += Whole::BYTES == 4 ? __uint_as_float(u[m]) * v[m]
                                         : low_bf16(u[m]) * low_bf16(w) + high_bf16(u[m]) * high_bf16(w);
            }
        }
        return sum;
    }
    // two B tiles: 16 value rows from `row`, 16 columns from `column`
    template <class E> static __device__ __forceinline__ void operands(typename E::B (&b)[2], u32 base, int row,
                                                                       int column, int lane) {
        const u32 at = base + row / 8 * ROW + column / 8 * Whole::BLOCK;
        if constexpr (Whole::BYTES == 2) {
            u32 x[4];
            load_matrix_transposed(x, at + ((lane >> 3) & 1) * ROW + (lane >> 4) * Whole::BLOCK + (lane & 7) * 16);
            b[0] = E::column(x[0], x[1]);
            b[1] = E::column(x[2], x[3]);
        } else {
            const u32 own = at + (lane & 3) * 32 + (lane >> 2) * 4;
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const u32 p = own + n * Whole::BLOCK;
                const float f[4] = {load_shared(p), load_shared(p + 128), load_shared(p + ROW),
                                    load_shared(p + ROW + 128)};
                b[n] = E::column(f);
            }
        }
    }
};
