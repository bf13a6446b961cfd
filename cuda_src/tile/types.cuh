// Short names, and single instructions with the width that the name says.
#pragma once
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define LA_DEVICE static __device__ __forceinline__
constexpr int larger(int a, int b) { return a > b ? a : b; }

// shared address of a generic pointer
LA_DEVICE u32 shared_address(const void* p) {
    u32 r;
    asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(r) : "l"(p));
    return r;
}

// a b + c in one instruction, which a compiler does not see
LA_DEVICE i64 multiply_add(int a, int b, i64 c) {
    i64 r;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(r) : "r"(a), "r"(b), "l"(c));
    return r;
}

// 2^x, exactly 0 from x = -150 down
LA_DEVICE float exp2_approx(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// 1 / x, 0 of x from 2^126 up
LA_DEVICE float reciprocal_approx(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// two floats as two bfloat16, the first in the low half
LA_DEVICE u32 pack_bf16(float lo, float hi) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
LA_DEVICE u32 pack_f16(float lo, float hi) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
LA_DEVICE float low_bf16(u32 x) { return __uint_as_float(x << 16); }
LA_DEVICE float high_bf16(u32 x) { return __uint_as_float(x & 0xffff0000u); }
// the rounding errors of two floats in bfloat16, rounded: the second terms of operands of two terms
LA_DEVICE u32 rest_of(float x, float y) {
    const u32 first = pack_bf16(x, y);
    return pack_bf16(x - low_bf16(first), y - high_bf16(first));
}
LA_DEVICE float low_f16(u32 x) {
    float r;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(r) : "r"(x));
    return r;
}
LA_DEVICE float high_f16(u32 x) {
    float r;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }" : "=f"(r) : "r"(x));
    return r;
}
// the nearest tf32 (10 bits after the point) as the bits of a float
LA_DEVICE u32 round_tf32(float x) {
    u32 r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
    return r;
}

// x = hi + lo: hi the nearest tf32, lo the rest; products read of it the first 10 bits after the point. In three
// operations; a NaN is one in lo, inf becomes NaN
LA_DEVICE void split_tf32(float x, u32& hi, u32& lo) {
    hi = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    lo = __float_as_uint(x - __uint_as_float(hi));
}

// asks the L2 cache for the line of an address
LA_DEVICE void ask_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

LA_DEVICE u16 load_u16(const void* p) {
    u16 r;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(r) : "l"(p));
    return r;
}
LA_DEVICE float load_shared(u32 a) {
    float r;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(r) : "r"(a));
    return r;
}
LA_DEVICE float2 load_shared2(u32 a) {
    float2 r;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(r.x), "=f"(r.y) : "r"(a));
    return r;
}
LA_DEVICE void store_shared(u32 a, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(x) : "memory"); }
LA_DEVICE void store_shared2(u32 a, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(a), "f"(x), "f"(y) : "memory");
}
LA_DEVICE void store_shared_u32(u32 a, u32 x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(a), "r"(x) : "memory"); }

// an opaque copy of a value: values derived from it are recomputed where they are used, not held over a loop
LA_DEVICE u32 opaque(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}
LA_DEVICE i64 opaque64(i64 x) {
    asm volatile("" : "+l"(x));
    return x;
}
