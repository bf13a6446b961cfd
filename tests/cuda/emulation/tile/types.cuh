// In front of cuda_src/tile/types.cuh: its single instructions of conversions, in C++.
#pragma once
#define shared_address device_shared_address
#define exp2_approx device_exp2_approx
#define reciprocal_approx device_reciprocal_approx
#define pack_bf16 device_pack_bf16
#define pack_f16 device_pack_f16
#define low_f16 device_low_f16
#define high_f16 device_high_f16
#define round_tf32 device_round_tf32
#define ask_line device_ask_line
#define load_u16 device_load_u16
#define opaque device_opaque
#define opaque64 device_opaque64
#include_next "tile/types.cuh"
#undef shared_address
#undef exp2_approx
#undef reciprocal_approx
#undef pack_bf16
#undef pack_f16
#undef low_f16
#undef high_f16
#undef round_tf32
#undef ask_line
#undef load_u16
#undef opaque
#undef opaque64

LA_DEVICE u32 shared_address(const void* p) { return (u32)((const char*)p - memory); }
LA_DEVICE float exp2_approx(float x) { return exp2f(x); }
LA_DEVICE float reciprocal_approx(float x) { return 1.f / x; }
LA_DEVICE u32 rounded_bf16(float x) {   // to the nearest, ties to even
    const u32 bits = __float_as_uint(x);
    return x != x ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}
LA_DEVICE u32 rounded_f16(float x) { return x != x ? 0x7fffu : bits_as<u16>((_Float16)x); }
LA_DEVICE u32 pack_bf16(float lo, float hi) { return rounded_bf16(lo) | rounded_bf16(hi) << 16; }
LA_DEVICE u32 pack_f16(float lo, float hi) { return rounded_f16(lo) | rounded_f16(hi) << 16; }
LA_DEVICE float low_f16(u32 x) { return (float)bits_as<_Float16>((u16)x); }
LA_DEVICE float high_f16(u32 x) { return low_f16(x >> 16); }
LA_DEVICE void ask_line(const void*) {}
LA_DEVICE u16 load_u16(const void* p) { return *(const u16*)p; }
LA_DEVICE u32 opaque(u32 x) { return x; }
LA_DEVICE i64 opaque64(i64 x) { return x; }
LA_DEVICE u32 round_tf32(float x) { return x != x ? 0x7fffffffu : (__float_as_uint(x) + 0x1000u) & 0xffffe000u; }
