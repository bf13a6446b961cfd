// A product of wgmma.cuh on 128 columns: C (64 x 128) += A (64 x 16) B (16 x 128), A in registers, B two panels read
// across.
#pragma once
#include "tile/wgmma.cuh"

// as panel_descriptor, and the bytes from a panel to the next
template <class X> LA_DEVICE u64 panels_descriptor(u32 a) {
    return (panel_descriptor(a) & ~(0x3fffull << 16)) | (u64)(X::PANEL >> 4) << 16;
}

#define LA_TILE(c, i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define LA_TILES4(c, i) LA_TILE(c, i), LA_TILE(c, i + 1), LA_TILE(c, i + 2), LA_TILE(c, i + 3)
LA_DEVICE void product_AB_wide(float (&c)[16][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
        : LA_TILES4(c, 0), LA_TILES4(c, 4), LA_TILES4(c, 8), LA_TILES4(c, 12)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// The same with A in shared memory, read across: C += A^T B
LA_DEVICE void product_AtB_wide(float (&c)[16][4], u64 a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, 1, 1, 1, 1, 1;"
        : LA_TILES4(c, 0), LA_TILES4(c, 4), LA_TILES4(c, 8), LA_TILES4(c, 12)
        : "l"(a), "l"(b));
}
#undef LA_TILE
#undef LA_TILES4
