// Numbers in memory by kind, 0 bfloat16, 1 float16, 2 float32, 3 float64: one, or N neighbours 16 bytes at a time; the
// type that they are computed in, float, or double of float64.
#pragma once
#include "tile/types.cuh"

template <bool> struct WideType {
    typedef float type;
};
template <> struct WideType<true> {
    typedef double type;
};
template <int KIND> using Wide = typename WideType<KIND == 3>::type;
LA_DEVICE constexpr int bytes_of(int kind) { return kind < 2 ? 2 : kind == 2 ? 4 : 8; }

template <int KIND> LA_DEVICE Wide<KIND> element(const char* from, i64 n) {
    if constexpr (KIND == 3) return ((const double*)from)[n];
    else if constexpr (KIND == 2) return ((const float*)from)[n];
    else return KIND == 0 ? low_bf16(((const u16*)from)[n]) : low_f16(((const u16*)from)[n]);
}
template <int KIND, class T> LA_DEVICE void put_element(char* to, i64 n, T x) {
    if constexpr (KIND == 3) ((double*)to)[n] = x;
    else if constexpr (KIND == 2) ((float*)to)[n] = (float)x;
    else ((u16*)to)[n] = (u16)(KIND == 0 ? pack_bf16((float)x, 0.f) : pack_f16((float)x, 0.f));
}
// x as a number of a kind stores it
template <int KIND> LA_DEVICE Wide<KIND> rounded(Wide<KIND> x) {
    if constexpr (KIND >= 2) return x;
    else return KIND == 0 ? low_bf16(pack_bf16(x, 0.f)) : low_f16(pack_f16(x, 0.f));
}
// a number of any kind, as parameters have it
template <class T> LA_DEVICE T parameter(const char* from, int kind, i64 n) {
    if (kind == 3) return (T)element<3>(from, n);
    if (kind == 2) return (T)element<2>(from, n);
    return (T)(kind == 0 ? element<0>(from, n) : element<1>(from, n));
}
template <class T> LA_DEVICE void put_number(char* to, int kind, i64 n, T x) {
    if (kind == 3) put_element<3>(to, n, x);
    else if (kind == 2) put_element<2>(to, n, x);
    else if (kind == 0) put_element<0>(to, n, x);
    else put_element<1>(to, n, x);
}

// N neighbours as they lie in memory; a piece of up to 16 bytes is one load
template <int SIZE> struct alignas(SIZE) Part {
    u32 w[SIZE / 4];
};
template <> struct alignas(2) Part<2> {
    u16 w;
};
template <int KIND, int N> struct Loaded {
    static constexpr int SIZE = N * bytes_of(KIND), STEP = SIZE < 16 ? SIZE : 16, COUNT = SIZE / STEP;
    Part<STEP> parts[COUNT];
    __device__ __forceinline__ void load(const char* from) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) parts[i] = ((const Part<STEP>*)from)[i];
    }
    __device__ __forceinline__ void zero() {
        u32* w = (u32*)parts;
        if constexpr (SIZE == 2) parts[0].w = 0;
        else
#pragma unroll
            for (int i = 0; i < SIZE / 4; i++) w[i] = 0;
    }
    template <class T> __device__ __forceinline__ void get(T (&x)[N]) const {
        if constexpr (SIZE == 2) x[0] = KIND == 0 ? low_bf16(parts[0].w) : low_f16(parts[0].w);
        else
#pragma unroll
            for (int i = 0; i < N; i++) {
                if constexpr (KIND == 3) x[i] = (T)__hiloint2double((int)word(2 * i + 1), (int)word(2 * i));
                else if constexpr (KIND == 2) x[i] = (T)__uint_as_float(word(i));
                else {
                    const u32 both = word(i / 2);
                    if constexpr (KIND == 0) x[i] = (T)(i & 1 ? high_bf16(both) : low_bf16(both));
                    else x[i] = (T)(i & 1 ? high_f16(both) : low_f16(both));
                }
            }
    }
    __device__ __forceinline__ u32 word(int i) const { return parts[i * 4 / STEP].w[i % (STEP / 4)]; }
};
template <int KIND, int N, class T> LA_DEVICE void load_elements(T (&x)[N], const char* from) {
    Loaded<KIND, N> raw;
    raw.load(from);
    raw.get(x);
}
template <int KIND, int N, class T> LA_DEVICE void store_elements(char* to, const T (&x)[N]) {
    constexpr int SIZE = N * bytes_of(KIND), STEP = SIZE < 16 ? SIZE : 16;
    if constexpr (N == 1 || KIND == 3) {
#pragma unroll
        for (int i = 0; i < N; i++) put_element<KIND>(to, i, x[i]);
    } else {
        u32 w[SIZE / 4];
#pragma unroll
        for (int i = 0; i < N; i += KIND == 2 ? 1 : 2) {
            if constexpr (KIND == 2) w[i] = __float_as_uint((float)x[i]);
            else
                w[i / 2] = KIND == 0 ? pack_bf16((float)x[i], (float)x[i + 1]) : pack_f16((float)x[i], (float)x[i + 1]);
        }
#pragma unroll
        for (int i = 0; i < SIZE / STEP; i++) {
            Part<STEP> part;
#pragma unroll
            for (int j = 0; j < STEP / 4; j++) part.w[j] = w[i * STEP / 4 + j];
            ((Part<STEP>*)to)[i] = part;
        }
    }
}
