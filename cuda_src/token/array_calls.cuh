// Parts of the kernels of array calls (runtime/cuda/fusion.py): loads, stores and functions of numbers.
//
// Each function rounds once, as an array call does: nothing is contracted. 16-bit numbers are floats between load and
// store. A warp computes a row; a host compiler (tests) makes one lane of it.
#pragma once
#include "tile/types.cuh"

#ifdef __CUDA_ARCH__
#define LA_WIDTH 32
#define LA_SHUFFLE(x, n) __shfl_xor_sync(0xffffffffu, x, n)
#define LA_SYNC() __syncthreads()
#else
#define LA_SYNC()
#define LA_WIDTH 1
#define LA_SHUFFLE(x, n) (x)
#endif

#ifndef LA_HOST
#define LA_INF bits_as(0x7f800000u)
#define LA_NAN bits_as(0x7fc00000u)
LA_DEVICE float bits_as(u32 x) { return __uint_as_float(x); }
LA_DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
LA_DEVICE double bits_as64(u64 x) { return __longlong_as_double((i64)x); }
LA_DEVICE float f_add(float x, float y) { return __fadd_rn(x, y); }
LA_DEVICE float f_sub(float x, float y) { return __fsub_rn(x, y); }
LA_DEVICE float f_mul(float x, float y) { return __fmul_rn(x, y); }
LA_DEVICE float f_div(float x, float y) { return __fdiv_rn(x, y); }
LA_DEVICE double f_add(double x, double y) { return __dadd_rn(x, y); }
LA_DEVICE double f_sub(double x, double y) { return __dsub_rn(x, y); }
LA_DEVICE double f_mul(double x, double y) { return __dmul_rn(x, y); }
LA_DEVICE double f_div(double x, double y) { return __ddiv_rn(x, y); }
LA_DEVICE float from_f16(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
LA_DEVICE u16 to_f16(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
#endif

#define LA_FUNCTION(name, f32, f64)                  \
    LA_DEVICE float name(float x) { return f32(x); } \
    LA_DEVICE double name(double x) { return f64(x); }
LA_FUNCTION(f_exp, expf, exp)
LA_FUNCTION(f_expm1, expm1f, expm1)
LA_FUNCTION(f_log, logf, log)
LA_FUNCTION(f_log1p, log1pf, log1p)
LA_FUNCTION(f_sqrt, sqrtf, sqrt)
LA_FUNCTION(f_abs, fabsf, fabs)
LA_FUNCTION(f_sin, sinf, sin)
LA_FUNCTION(f_cos, cosf, cos)
LA_FUNCTION(f_tanh, tanhf, tanh)
LA_FUNCTION(f_neg, -, -)
#undef LA_FUNCTION
LA_DEVICE float f_pow(float x, float y) { return powf(x, y); }
LA_DEVICE double f_pow(double x, double y) { return pow(x, y); }
template <class T> LA_DEVICE T f_sign(T x) { return x > 0 ? (T)1 : x < 0 ? (T)-1 : x; }
template <class T> LA_DEVICE T f_max(T x, T y) { return x != x || x > y ? x : y; }   // NaN stays
template <class T> LA_DEVICE T f_min(T x, T y) { return x != x || x < y ? x : y; }
template <class T> LA_DEVICE bool f_isnan(T x) { return x != x; }
template <class T> LA_DEVICE bool f_isinf(T x) { return x == x && x - x != x - x; }
template <class T> LA_DEVICE bool f_isfinite(T x) { return x - x == x - x; }

LA_DEVICE i64 f_add(i64 x, i64 y) { return x + y; }
LA_DEVICE i64 f_sub(i64 x, i64 y) { return x - y; }
LA_DEVICE i64 f_mul(i64 x, i64 y) { return x * y; }

LA_DEVICE u16 to_bf16(float x) {
    const u32 u = bits_of(x);
    return x != x ? (u16)((u >> 16) | 0x40) : (u16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
LA_DEVICE float from_bf16(u16 x) { return bits_as((u32)x << 16); }
LA_DEVICE float round_bf16(float x) { return from_bf16(to_bf16(x)); }
LA_DEVICE float round_f16(float x) { return from_f16(to_f16(x)); }

LA_DEVICE float load_bf16(const void* p, i64 n) { return from_bf16(((const u16*)p)[n]); }
LA_DEVICE float load_f16(const void* p, i64 n) { return from_f16(((const u16*)p)[n]); }
template <class T> LA_DEVICE T load_as(const void* p, i64 n) { return ((const T*)p)[n]; }
LA_DEVICE void store_bf16(void* p, i64 n, float x) { ((u16*)p)[n] = to_bf16(x); }
LA_DEVICE void store_f16(void* p, i64 n, float x) { ((u16*)p)[n] = to_f16(x); }
template <class T> LA_DEVICE void store_as(void* p, i64 n, T x) { ((T*)p)[n] = x; }

// of all lanes, in a fixed order
template <class T> LA_DEVICE T warp_sum(T x) {
#pragma unroll
    for (int n = LA_WIDTH / 2; n; n /= 2) x = f_add(x, LA_SHUFFLE(x, n));
    return x;
}
template <class T> LA_DEVICE T warp_max(T x) {
#pragma unroll
    for (int n = LA_WIDTH / 2; n; n /= 2) x = f_max(x, LA_SHUFFLE(x, n));
    return x;
}
template <class T> LA_DEVICE T warp_min(T x) {
#pragma unroll
    for (int n = LA_WIDTH / 2; n; n /= 2) x = f_min(x, LA_SHUFFLE(x, n));
    return x;
}
