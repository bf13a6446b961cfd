// Eight neighbouring numbers of a dense array as floats, moved 16 bytes at a time. KIND: 0 bfloat16, 1 float16, 2
// float32.
#pragma once
#include "tile/types.cuh"

constexpr int PER = 8;

template <int KIND> LA_DEVICE void load_numbers(float (&x)[PER], const char* from, i64 first) {
    constexpr int BYTES = KIND == 2 ? 4 : 2;
    u32 w[PER * BYTES / 4];
#pragma unroll
    for (int i = 0; i < PER * BYTES / 16; i++) *(uint4*)(w + 4 * i) = *(const uint4*)(from + first * BYTES + 16 * i);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        if constexpr (KIND == 2) x[i] = __uint_as_float(w[i]);
        else if constexpr (KIND == 0) x[i] = i & 1 ? high_bf16(w[i / 2]) : low_bf16(w[i / 2]);
        else x[i] = i & 1 ? high_f16(w[i / 2]) : low_f16(w[i / 2]);
    }
}
template <int KIND> LA_DEVICE void store_numbers(char* to, i64 first, const float (&x)[PER]) {
    constexpr int BYTES = KIND == 2 ? 4 : 2;
    u32 w[PER * BYTES / 4];
#pragma unroll
    for (int i = 0; i < PER; i += KIND == 2 ? 1 : 2) {
        if constexpr (KIND == 2) w[i] = __float_as_uint(x[i]);
        else w[i / 2] = KIND == 0 ? pack_bf16(x[i], x[i + 1]) : pack_f16(x[i], x[i + 1]);
    }
#pragma unroll
    for (int i = 0; i < PER * BYTES / 16; i++) *(uint4*)(to + first * BYTES + 16 * i) = *(const uint4*)(w + 4 * i);
}
