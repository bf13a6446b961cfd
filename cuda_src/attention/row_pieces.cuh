// Rows of LA_K numbers that LA_LANES lanes hold, LA_PER numbers at a time, in float32; their sums.
//
// LA_DTYPE: of stored rows; LA_GRAD: of gradients.
#pragma once
#include "attention/tokens.cuh"

constexpr int PIECES = (LA_K + LA_PER * LA_LANES - 1) / (LA_PER * LA_LANES);   // of a lane
constexpr int GRAD_BYTES = LA_GRAD == 2 ? 4 : 2;

template <int SIZE> struct alignas(SIZE) Piece {
    u32 w[SIZE / 4];
};
template <> struct Piece<2> {
    u16 w;
};

template <int DTYPE> LA_DEVICE float number(u32 bits) { return DTYPE == 0 ? low_bf16(bits) : low_f16(bits); }
template <int DTYPE> LA_DEVICE u32 pack(float lo, float hi) {
    return DTYPE == 0 ? pack_bf16(lo, hi) : pack_f16(lo, hi);
}

template <int DTYPE> LA_DEVICE void load(float (&x)[LA_PER], const char* from) {
    constexpr int SIZE = LA_PER * (DTYPE == 2 ? 4 : 2), STEP = SIZE < 16 ? SIZE : 16;
    if constexpr (STEP == 2) x[0] = number<DTYPE>(((const Piece<2>*)from)->w);
    else
#pragma unroll
        for (int n = 0; n < SIZE / STEP; n++) {
            const Piece<STEP> p = ((const Piece<STEP>*)from)[n];
#pragma unroll
            for (int i = 0; i < STEP / 4; i++) {
                const int at = n * STEP / 4 + i;
                if constexpr (DTYPE == 2) x[at] = __uint_as_float(p.w[i]);
                else {
                    x[2 * at] = number<DTYPE>(p.w[i]);
                    x[2 * at + 1] = DTYPE == 0 ? high_bf16(p.w[i]) : high_f16(p.w[i]);
                }
            }
        }
}
template <int DTYPE> LA_DEVICE void store(char* to, const float (&x)[LA_PER]) {
    constexpr int SIZE = LA_PER * (DTYPE == 2 ? 4 : 2);
    if constexpr (SIZE == 2) ((Piece<2>*)to)->w = (u16)pack<DTYPE>(x[0], 0.f);
    else {
        Piece<SIZE> p;
#pragma unroll
        for (int i = 0; i < SIZE / 4; i++) {
            if constexpr (DTYPE == 2) p.w[i] = __float_as_uint(x[i]);
            else p.w[i] = pack<DTYPE>(x[2 * i], x[2 * i + 1]);
        }
        *(Piece<SIZE>*)to = p;
    }
}
LA_DEVICE float row_sum(float x) {
#pragma unroll
    for (int d = LA_LANES / 2; d; d >>= 1) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}
