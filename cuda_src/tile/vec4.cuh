// Vec4 neighbouring elements of memory in the registers of one lane. KIND: 0 bfloat16, 1 float16, 2 float32.
#pragma once
#include "tile/types.cuh"

constexpr int bytes_of(int kind) { return kind == 2 ? 4 : 2; }
template <int KIND> struct StoredAs {
    typedef u16 type;
};
template <> struct StoredAs<2> {
    typedef float type;
};

template <int KIND> LA_DEVICE float load_element(const char* p) {
    if constexpr (KIND == 2) return *(const float*)p;
    else return KIND == 0 ? low_bf16(load_u16(p)) : low_f16(load_u16(p));
}
// As loaded: 16-bit elements stay packed until they are used.
template <int KIND> struct Vec4 {
    u32 x[KIND == 2 ? 4 : 2];

    // WIDE: all four or none, in one access; else the first `count`, one by one. Zeros for the rest.
    template <int WIDE> __device__ __forceinline__ void load(const char* p, int count) {
        if constexpr (WIDE) {
            if constexpr (KIND == 2) {
                const uint4 y = count > 0 ? *(const uint4*)p : uint4{0, 0, 0, 0};
                x[0] = y.x;
                x[1] = y.y;
                x[2] = y.z;
                x[3] = y.w;
            } else {
                const uint2 y = count > 0 ? *(const uint2*)p : uint2{0, 0};
                x[0] = y.x;
                x[1] = y.y;
            }
        } else if constexpr (KIND == 2) {
#pragma unroll
            for (int j = 0; j < 4; j++) x[j] = j < count ? ((const u32*)p)[j] : 0;
        } else {
#pragma unroll
            for (int j = 0; j < 2; j++)
                x[j] = (2 * j < count ? load_u16(p + 4 * j) : 0u) |
                       (2 * j + 1 < count ? (u32)load_u16(p + 4 * j + 2) << 16 : 0u);
        }
    }
    __device__ __forceinline__ float operator[](int j) const {
        if constexpr (KIND == 2) return __uint_as_float(x[j]);
        else if constexpr (KIND == 0) return j & 1 ? high_bf16(x[j >> 1]) : low_bf16(x[j >> 1]);
        else return j & 1 ? high_f16(x[j >> 1]) : low_f16(x[j >> 1]);
    }
    __device__ __forceinline__ void multiply(float factor) {
        float y[4];
#pragma unroll
        for (int j = 0; j < 4; j++) y[j] = (*this)[j] * factor;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if constexpr (KIND == 2) x[j] = __float_as_uint(y[j]);
            else if (j % 2 == 0) x[j / 2] = KIND == 0 ? pack_bf16(y[j], y[j + 1]) : pack_f16(y[j], y[j + 1]);
        }
    }
};

// The same where only the call knows the kind. Loads that stand in no branch: nothing waits before `as`.
struct AnyElement {
    u32 x;
    __device__ __forceinline__ void load(const char* p, int kind) {
        asm volatile(
            "{ .reg .pred wide;\n"
            "setp.eq.s32 wide, %2, 2;\n"
            "@wide ld.global.u32 %0, [%1];\n"
            "@!wide ld.global.u16 %0, [%1]; }"
            : "=r"(x)
            : "l"(p), "r"(kind));
    }
    template <int KIND> __device__ __forceinline__ float as() const {
        return KIND == 2 ? __uint_as_float(x) : KIND == 0 ? low_bf16(x) : low_f16(x);
    }
    __device__ __forceinline__ float as(int kind) const { return kind == 2 ? as<2>() : kind == 0 ? as<0>() : as<1>(); }
};
template <int WIDE> struct AnyVec4 {
    u32 x[4];
    // The elements from `at` on: all four (ALL), or as Vec4 does.
    template <bool ALL> __device__ __forceinline__ void load(const char* p, int at, int count, int kind) {
        if constexpr (!ALL) x[0] = x[1] = x[2] = x[3] = 0;
        if constexpr (WIDE && ALL)
            asm volatile(
                "{ .reg .pred wide, narrow;\n"
                "setp.eq.s32 wide|narrow, %6, 2;\n"
                "@wide ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                "@narrow ld.global.v2.u32 {%0, %1}, [%5]; }"
                : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                : "l"(p + at * 4), "l"(p + at * 2), "r"(kind));
        else if constexpr (WIDE)
            asm volatile(
                "{ .reg .pred some, wide, narrow;\n"
                "setp.gt.s32 some, %6, 0;\n"
                "setp.eq.and.s32 wide|narrow, %7, 2, some;\n"
                "@wide ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                "@narrow ld.global.v2.u32 {%0, %1}, [%5]; }"
                : "+r"(x[0]), "+r"(x[1]), "+r"(x[2]), "+r"(x[3])
                : "l"(p + at * 4), "l"(p + at * 2), "r"(count), "r"(kind));
        else
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (ALL || j < count) {
                    AnyElement y;
                    y.load(p + (at + j) * bytes_of(kind), kind);
                    x[j] = y.x;
                }
    }
    template <int KIND> __device__ __forceinline__ float as(int j) const {
        if constexpr (!WIDE) return AnyElement{x[j]}.as<KIND>();
        else if constexpr (KIND == 2) return __uint_as_float(x[j]);
        else if constexpr (KIND == 0) return j & 1 ? high_bf16(x[j >> 1]) : low_bf16(x[j >> 1]);
        else return j & 1 ? high_f16(x[j >> 1]) : low_f16(x[j >> 1]);
    }
};

// one float, and four in one access, rounded, to p
template <int KIND> LA_DEVICE void store_element(char* p, float x) {
    if constexpr (KIND == 2) *(float*)p = x;
    else *(u16*)p = (u16)(KIND == 0 ? pack_bf16(x, 0.f) : pack_f16(x, 0.f));
}
template <int KIND> LA_DEVICE void store_vec4(char* p, const float* x) {
    if constexpr (KIND == 2) *(float4*)p = {x[0], x[1], x[2], x[3]};
    else if constexpr (KIND == 0) *(uint2*)p = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3])};
    else *(uint2*)p = {pack_f16(x[0], x[1]), pack_f16(x[2], x[3])};
}
