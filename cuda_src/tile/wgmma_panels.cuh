// Products of wgmma.cuh whose operands are both read across their panels, of bfloat16 or (LA_DTYPE 1) float16: C = A^T B.
#pragma once
#include "tile/wgmma.cuh"

#if defined(LA_DTYPE) && LA_DTYPE == 1
#define LA_KINDS "k16.f32.f16.f16 "
#else
#define LA_KINDS "k16.f32.bf16.bf16 "
#endif
// 64 or 32 columns; `add` false: C is not read
LA_DEVICE void across_AtB(float (&c)[8][4], u64 a, u64 b, bool add) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64" LA_KINDS "{" LA_NAMES64 "}, %32, %33, p, 1, 1, 1, 1; }"
        : LA_TILES4(c, 0), LA_TILES4(c, 4)
        : "l"(a), "l"(b), "r"((int)add));
}
LA_DEVICE void across_AtB(float (&c)[4][4], u64 a, u64 b, bool add) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32" LA_KINDS "{" LA_NAMES32 "}, %16, %17, p, 1, 1, 1, 1; }"
        : LA_TILES4(c, 0)
        : "l"(a), "l"(b), "r"((int)add));
}
LA_DEVICE void across_AtB(float (&c)[1][4], u64 a, u64 b, bool add) {   // 8
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %6, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8" LA_KINDS "{%0, %1, %2, %3}, %4, %5, p, 1, 1, 1, 1; }"
        : LA_TILE(c, 0)
        : "l"(a), "l"(b), "r"((int)add));
}
LA_DEVICE void across_AtB(float (&c)[8][4], float (&d)[1][4], u64 a, u64 b, bool add) {   // 64 and 8 of the next panel
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %38, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n72" LA_KINDS "{" LA_NAMES64
        ", %32, %33, %34, %35}, %36, %37, p, 1, 1, 1, 1; }"
        : LA_TILES4(c, 0), LA_TILES4(c, 4), LA_TILE(d, 0)
        : "l"(a), "l"(b), "r"((int)add));
}
#undef LA_KINDS

// two panels read across, the second one anywhere behind the first
LA_DEVICE u64 panels_descriptor(u32 a, u32 next) {
    return (panel_descriptor(a) & ~(0x3fffull << 16)) | (u64)((next - a) >> 4) << 16;
}
