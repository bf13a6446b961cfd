// Products of wgmma.cuh on 64 or 128 columns at once, of bfloat16 or (LA_DTYPE 1) float16, named by the order of the
// operands.
#pragma once
#include "tile/wgmma.cuh"

#if defined(LA_DTYPE) && LA_DTYPE == 1
#define LA_KINDS "k16.f32.f16.f16 "
#else
#define LA_KINDS "k16.f32.bf16.bf16 "
#endif
// the descriptor of panels that are read across: as panel_descriptor, and the bytes from a panel to the next
template <class X> LA_DEVICE u64 across_descriptor(u32 a) {
    return (panel_descriptor(a) & ~(0x3fffull << 16)) | (u64)(X::PANEL >> 4) << 16;
}

#define LA_GIVEN(c, i) "=f"(c[i][0]), "=f"(c[i][1]), "=f"(c[i][2]), "=f"(c[i][3])
#define LA_GIVEN4(c, i) LA_GIVEN(c, i), LA_GIVEN(c, i + 1), LA_GIVEN(c, i + 2), LA_GIVEN(c, i + 3)
// C = A B^T, which does not read the registers of C, and C += A B^T: both in shared memory, read along their rows
LA_DEVICE void rows_ABt(float (&c)[8][4], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64" LA_KINDS "{" LA_NAMES64 "}, %32, %33, 0, 1, 1, 0, 0;"
                 : LA_GIVEN4(c, 0), LA_GIVEN4(c, 4)
                 : "l"(a), "l"(b));
}
LA_DEVICE void rows_ABt(float (&c)[16][4], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128" LA_KINDS "{" LA_NAMES128 "}, %64, %65, 0, 1, 1, 0, 0;"
                 : LA_GIVEN4(c, 0), LA_GIVEN4(c, 4), LA_GIVEN4(c, 8), LA_GIVEN4(c, 12)
                 : "l"(a), "l"(b));
}
LA_DEVICE void add_rows_ABt(float (&c)[8][4], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64" LA_KINDS "{" LA_NAMES64 "}, %32, %33, 1, 1, 1, 0, 0;"
                 : LA_TILES4(c, 0), LA_TILES4(c, 4)
                 : "l"(a), "l"(b));
}
LA_DEVICE void add_rows_ABt(float (&c)[16][4], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128" LA_KINDS "{" LA_NAMES128 "}, %64, %65, 1, 1, 1, 0, 0;"
                 : LA_TILES4(c, 0), LA_TILES4(c, 4), LA_TILES4(c, 8), LA_TILES4(c, 12)
                 : "l"(a), "l"(b));
}
// C += A B: A in registers, B's panels read across
LA_DEVICE void rows_AB(float (&c)[8][4], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64" LA_KINDS "{" LA_NAMES64
                 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : LA_TILES4(c, 0), LA_TILES4(c, 4)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
LA_DEVICE void rows_AB(float (&c)[16][4], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128" LA_KINDS "{" LA_NAMES128
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : LA_TILES4(c, 0), LA_TILES4(c, 4), LA_TILES4(c, 8), LA_TILES4(c, 12)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef LA_GIVEN
#undef LA_GIVEN4
#undef LA_KINDS

// C = A B^T over all columns of panels A and B, addresses of their first rows; C += A B over the 16 N rows of B
template <class A, class B, int N> LA_DEVICE void multiply_rows_ABt(float (&c)[N][4], u32 a, u32 b) {
    static_assert(A::COLUMNS == B::COLUMNS, "one inner width");
    const u64 from = panel_descriptor(a), with = panel_descriptor(b);
    rows_ABt(c, from, with);
#pragma unroll
    for (int d = 1; d < A::COLUMNS / 16; d++) add_rows_ABt(c, from + A::along(d), with + B::along(d));
}
template <class B, int M, int N> LA_DEVICE void multiply_rows_AB(float (&c)[M][4], const u32 (&a)[N][4], u32 b) {
    static_assert(B::COLUMNS == 8 * M, "all columns");
    const u64 with = across_descriptor<B>(b);
#pragma unroll
    for (int t = 0; t < N; t++) rows_AB(c, a[t], with + B::across(t));
}
