// Products of wgmma_rows.cuh with both operands in shared memory, B's panels read across: C += A B and C += A^T B, 64
// or 128 columns.
#pragma once
#include "tile/wgmma_rows.cuh"

// A_COLUMNS 1: A is read across too
template <int A_COLUMNS> LA_DEVICE void add_rows_across(float (&c)[8][4], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" LA_NAMES64 "}, %32, %33, 1, 1, 1, %34, 1;"
                 : LA_TILES4(c, 0), LA_TILES4(c, 4)
                 : "l"(a), "l"(b), "n"(A_COLUMNS));
}
template <int A_COLUMNS> LA_DEVICE void add_rows_across(float (&c)[16][4], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" LA_NAMES128 "}, %64, %65, 1, 1, 1, %66, 1;"
                 : LA_TILES4(c, 0), LA_TILES4(c, 4), LA_TILES4(c, 8), LA_TILES4(c, 12)
                 : "l"(a), "l"(b), "n"(A_COLUMNS));
}

// C += A B^T over the columns of A, C += A B over the rows of B: A 64 rows of panels. C += A^T B over ROWS rows: A a
// panel.
template <class A, class B, int N> LA_DEVICE void add_ABt(float (&c)[N][4], u32 a, u32 b) {
    const u64 from = panel_descriptor(a), with = panel_descriptor(b);
#pragma unroll
    for (int d = 0; d < A::COLUMNS / 16; d++) add_rows_ABt(c, from + A::along(d), with + B::along(d));
}
template <class A, class B, int N> LA_DEVICE void add_AB(float (&c)[N][4], u32 a, u32 b) {
    const u64 from = panel_descriptor(a), with = across_descriptor<B>(b);
#pragma unroll
    for (int d = 0; d < A::COLUMNS / 16; d++) add_rows_across<0>(c, from + A::along(d), with + B::across(d));
}
template <class B, int N> LA_DEVICE void add_AtB(float (&c)[N][4], u32 a, u32 b) {
    const u64 from = panel_descriptor(a), with = across_descriptor<B>(b);
#pragma unroll
    for (int d = 0; d < B::ROWS / 16; d++) add_rows_across<1>(c, from + B::across(d), with + B::across(d));
}
// Products of a warpgroup that add to c, begun and awaited
template <int N, class F> LA_DEVICE void complete_products(float (&c)[N][4], F issue) {
    accumulator_fence(c);
    products_begin();
    issue();
    products_commit();
    products_wait<0>();
    accumulator_fence(c);
}
