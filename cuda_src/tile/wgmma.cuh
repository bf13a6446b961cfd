// Products by a warpgroup (four warps, sm_90a): C (64 x N) += A (64 x 16) B (16 x N) of bfloat16, in flight until
// awaited.
//
// Warp w of the group holds rows 16 w .. 16 w + 15 of C and of an A in registers, lane by lane as in mma.cuh, so that
// an accumulator is the next A here too. B is always in shared memory, A may be, as panels:
//
//     panels of 64 columns (128 bytes a row),
//         whose 16-byte pieces are permuted within a row by the row's last three bits
//
// A panel is read along its rows ("rows": the contraction runs over columns) or across them ("columns": over rows).
#pragma once
#include "tile/shared.cuh"

template <int COLUMNS_, int ROWS_> struct Panels {
    static constexpr int COLUMNS = COLUMNS_, ROWS = ROWS_, BYTES = 2, ROW = COLUMNS * BYTES, SPAN = 8;
    static constexpr int PANEL = ROWS * 128, SIZE = ROWS * ROW;   // bytes of a panel, of all
    static_assert(COLUMNS % 64 == 0 && ROWS % 8 == 0, "whole panels of whole permutations");
    static __device__ __forceinline__ u32 piece(int row, int p) {
        return (p >> 3) * PANEL + row * 128 + (((p & 7) ^ (row & 7)) << 4);
    }
    // as Tile's: row a multiple of 16, p of 2, and r < 16, b < 2 a lane's own
    static __device__ __forceinline__ u32 block_piece(int row, int p, int r, int b) {
        return (p >> 3) * PANEL + row * 128 + (r * 128 + (((p & 7) << 4) ^ ((b ^ (r & 7)) << 4)));
    }
    static __device__ __forceinline__ u32 at(int row, int column) { return piece(row, column / 8) + (column % 8) * 2; }
    // steps of a descriptor, in its units of 16 bytes: to columns 16 d.. (rows read along), to rows 16 d.. (read across)
    static constexpr u32 along(int d) { return (d >> 2) * (PANEL >> 4) + (d & 3) * 2; }
    static constexpr u32 across(int d) { return d * 128; }
    static constexpr u32 panel(int p) { return p * (PANEL >> 4); }
};

// the descriptor of a panel: its address, 1024 bytes from 8 rows to the next 8, the permutation
LA_DEVICE u64 panel_descriptor(u32 a) { return (u64)((a & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }

LA_DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
LA_DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> LA_DEVICE void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// accumulator fence: no use of the registers moves across it; after a wait, and before products begin
template <int N> LA_DEVICE void accumulator_fence(float (&c)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])::"memory");
}
// x, which is not negative, is computed before later code: the assembler moves arithmetic behind waits otherwise
LA_DEVICE void settle(float x) {
    asm volatile("{ .reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p nanosleep.u32 0; }" ::"f"(x) : "memory");
}
// shared memory that threads wrote becomes visible to products that follow a barrier
LA_DEVICE void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// waits for the threads of one warpgroup; for THREADS of several
LA_DEVICE void group_barrier(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }
template <int THREADS> LA_DEVICE void groups_barrier(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id + 1), "n"(THREADS) : "memory");
}

// operands of products: registers of tiles i, .. of C as "+f", and their names by the columns of C
#define LA_TILE(c, i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define LA_TILES2(c, i) LA_TILE(c, i), LA_TILE(c, i + 1)
#define LA_TILES4(c, i) LA_TILES2(c, i), LA_TILES2(c, i + 2)
#define LA_NAMES16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define LA_NAMES32 LA_NAMES16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define LA_NAMES48 LA_NAMES32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define LA_NAMES64 LA_NAMES48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define LA_NAMES128                                                                    \
    LA_NAMES64                                                                         \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// Tiles FIRST .. FIRST + 8 of C (64 columns) += A B; `add` false: = A B. COLUMNS 1: B's panel is read across.
template <int FIRST, int COLUMNS, int N>
LA_DEVICE void product(float (&c)[N][4], const u32 (&a)[4], u64 b, bool add) {
    static_assert(FIRST + 8 <= N, "64 columns");
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" LA_NAMES64
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38; }"
        : LA_TILES4(c, FIRST), LA_TILES4(c, FIRST + 4)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add), "n"(COLUMNS));
}
// The same with A in shared memory: A_COLUMNS 1 reads it across.
template <int A_COLUMNS, int B_COLUMNS>
LA_DEVICE void product(float (&c)[8][4], u64 a, u64 b, bool add) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" LA_NAMES64 "}, %32, %33, p, 1, 1, %35, %36; }"
        : LA_TILES4(c, 0), LA_TILES4(c, 4)
        : "l"(a), "l"(b), "r"((int)add), "n"(A_COLUMNS), "n"(B_COLUMNS));
}

// By the order of the operands; a "t" is transposed as it lies in shared memory. A in registers, then in shared memory.
template <int FIRST = 0, int N> LA_DEVICE void product_ABt(float (&c)[N][4], const u32 (&a)[4], u64 b, bool add) {
    product<FIRST, 0>(c, a, b, add);
}
template <int FIRST = 0, int N> LA_DEVICE void product_AB(float (&c)[N][4], const u32 (&a)[4], u64 b, bool add) {
    product<FIRST, 1>(c, a, b, add);
}
LA_DEVICE void product_ABt(float (&c)[8][4], u64 a, u64 b, bool add) { product<0, 0>(c, a, b, add); }
LA_DEVICE void product_AB(float (&c)[8][4], u64 a, u64 b, bool add) { product<0, 1>(c, a, b, add); }
LA_DEVICE void product_AtBt(float (&c)[8][4], u64 a, u64 b, bool add) { product<1, 0>(c, a, b, add); }
LA_DEVICE void product_AtB(float (&c)[8][4], u64 a, u64 b, bool add) { product<1, 1>(c, a, b, add); }
