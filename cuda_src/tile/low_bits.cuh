// Floats in 20 bits: the nearest bfloat16, and four bits n of the rest,
//
//     x = hi + (n - 8) u / 16 to u / 32,       u: a unit in hi's last place
//
// and to u / 16 where n would be 16. A bfloat16 is x = hi. It is the upper half of a float's bits: n is the rounded
// upper end of the lower half.
#pragma once
#include "tile/types.cuh"

// A float's bits, one less where it is half way between two bfloat16 and rounds towards 0, to the even one
LA_DEVICE u32 below_ties(float x) {
    const u32 bits = __float_as_uint(x);
    return bits - ((bits & 0x1ffffu) == 0x8000u);
}
LA_DEVICE u32 least_of_halves(u32 x, u32 y) {   // as whole numbers of 16 bits with signs
    u32 r;
    asm("min.s16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
    return r;
}
// n of eight floats: of the pairs of an operand of 16 columns
LA_DEVICE u32 low_bits(const float (&x)[4], const float (&y)[4]) {
    u32 word = 0x88888888u;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float (&from)[4] = i < 2 ? x : y;
        const u32 halves = __byte_perm(below_ties(from[2 * (i & 1)]), below_ties(from[2 * (i & 1) + 1]), 0x5410);
        const u32 rounded =
            least_of_halves(halves, 0x77fe77feu) + 0x08000800u;   // and no carry makes 0x8000 of an upper half
        word ^= rounded >> 4 * i & 0xf000f000u >> 4 * i;
    }
    return word;
}
// pair i of bfloat16 with its bits, as floats
LA_DEVICE float2 with_low_bits(u32 pair, u32 word, int i) {
    const u32 low = word << 4 * i & 0xf000f000u;
    return {__uint_as_float(__byte_perm(low, pair, 0x5410) - 0x8000u),
            __uint_as_float(__byte_perm(low, pair, 0x7632) - 0x8000u)};
}

// Of a matrix of 128 x 128 that eight warps hold, 16 rows each: bytes of 64 columns, four words a lane, by warps and
// lanes; of all
constexpr int LOW_BITS_PANEL = 8 * 32 * 16, LOW_BITS_SIZE = 2 * LOW_BITS_PANEL;
LA_DEVICE void store_low_bits(char* to, const float (&x)[16][4], int panels, int warp, int lane) {
#pragma unroll
    for (int p = 0; p < panels; p++) {
        u32 w[4];
#pragma unroll
        for (int d = 0; d < 4; d++) w[d] = low_bits(x[8 * p + 2 * d], x[8 * p + 2 * d + 1]);
        *(uint4*)(to + p * LOW_BITS_PANEL + (warp * 32 + lane) * 16) = {w[0], w[1], w[2], w[3]};
    }
}
