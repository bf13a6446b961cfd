// Products of wgmma.cuh on some of the columns: tiles FIRST .. FIRST + TILES of C += A B, both operands in shared
// memory. A_COLUMNS, B_COLUMNS 1: the panel is read across.
#pragma once
#include "tile/wgmma.cuh"

template <int FIRST, int TILES, int A_COLUMNS, int B_COLUMNS, int N>
LA_DEVICE void product_part(float (&c)[N][4], u64 a, u64 b, bool add) {
    static_assert(FIRST + TILES <= N && TILES % 2 == 0 && TILES <= 8, "16 to 64 columns");
    if constexpr (TILES == 2)
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %10, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {" LA_NAMES16 "}, %8, %9, p, 1, 1, %11, %12; }"
            : LA_TILES2(c, FIRST)
            : "l"(a), "l"(b), "r"((int)add), "n"(A_COLUMNS), "n"(B_COLUMNS));
    else if constexpr (TILES == 4)
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %18, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" LA_NAMES32 "}, %16, %17, p, 1, 1, %19, %20; }"
            : LA_TILES4(c, FIRST)
            : "l"(a), "l"(b), "r"((int)add), "n"(A_COLUMNS), "n"(B_COLUMNS));
    else if constexpr (TILES == 6)
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %26, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {" LA_NAMES48 "}, %24, %25, p, 1, 1, %27, %28; }"
            : LA_TILES4(c, FIRST), LA_TILES2(c, FIRST + 4)
            : "l"(a), "l"(b), "r"((int)add), "n"(A_COLUMNS), "n"(B_COLUMNS));
    else
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" LA_NAMES64 "}, %32, %33, p, 1, 1, %35, %36; }"
            : LA_TILES4(c, FIRST), LA_TILES4(c, FIRST + 4)
            : "l"(a), "l"(b), "r"((int)add), "n"(A_COLUMNS), "n"(B_COLUMNS));
}
