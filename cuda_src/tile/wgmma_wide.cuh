// A product of wgmma.cuh on 128 columns: C (64 x 128) += A (64 x 16) B (16 x 128), A in registers, B two panels read
// across.
#pragma once
#include "tile/wgmma.cuh"

// as panel_descriptor, and the bytes from a panel to the next
template <class X> LA_DEVICE u64 panels_descriptor(u32 a) {
    return (panel_descriptor(a) & ~(0x3fffull << 16)) | (u64)(X::PANEL >> 4) << 16;
}

LA_DEVICE void product_AB_wide(float (&c)[16][4], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" LA_NAMES128
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : LA_TILES4(c, 0), LA_TILES4(c, 4), LA_TILES4(c, 8), LA_TILES4(c, 12)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// The same with A in shared memory, read across: C += A^T B
LA_DEVICE void product_AtB_wide(float (&c)[16][4], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" LA_NAMES128 "}, %64, %65, 1, 1, 1, 1, 1;"
                 : LA_TILES4(c, 0), LA_TILES4(c, 4), LA_TILES4(c, 8), LA_TILES4(c, 12)
                 : "l"(a), "l"(b));
}
