// The numbers of a recurrence, real or complex, as they are computed: LA_DOUBLE in float64, LA_COMPLEX pairs.
#pragma once
#include "ops/element.cuh"

template <class Real> struct Complex {
    Real re, im;
};
LA_DEVICE float times(float a, float b) { return a * b; }
LA_DEVICE double times(double a, double b) { return a * b; }
LA_DEVICE float times_plus(float a, float h, float x) { return fmaf(a, h, x); }
LA_DEVICE double times_plus(double a, double h, double x) { return fma(a, h, x); }
LA_DEVICE float conjugate(float a) { return a; }
LA_DEVICE double conjugate(double a) { return a; }
LA_DEVICE float plus(float a, float b) { return a + b; }
LA_DEVICE double plus(double a, double b) { return a + b; }
template <class R> LA_DEVICE Complex<R> times(Complex<R> a, Complex<R> b) {
    return {times_plus(a.re, b.re, -(a.im * b.im)), times_plus(a.re, b.im, a.im * b.re)};
}
template <class R> LA_DEVICE Complex<R> times_plus(Complex<R> a, Complex<R> h, Complex<R> x) {
    return {times_plus(a.re, h.re, times_plus(-a.im, h.im, x.re)),
            times_plus(a.re, h.im, times_plus(a.im, h.re, x.im))};
}
template <class R> LA_DEVICE Complex<R> conjugate(Complex<R> a) { return {a.re, -a.im}; }
template <class R> LA_DEVICE Complex<R> plus(Complex<R> a, Complex<R> b) { return {a.re + b.re, a.im + b.im}; }

// a number and its parts, as they lie in memory
template <class R> LA_DEVICE void of_parts(R& x, const R* y) { x = y[0]; }
template <class R> LA_DEVICE void of_parts(Complex<R>& x, const R* y) { x = {y[0], y[1]}; }
template <class R> LA_DEVICE void to_parts(R* y, R x) { y[0] = x; }
template <class R> LA_DEVICE void to_parts(R* y, Complex<R> x) {
    y[0] = x.re;
    y[1] = x.im;
}

// (cos x, sin x) of any x; of a float by its turns in double
LA_DEVICE Complex<float> on_circle(float x) {
    const double half = x * 0.31830988618379067;
    Complex<float> y;
    sincospif((float)(half - 2 * rint(0.5 * half)), &y.im, &y.re);
    return y;
}
LA_DEVICE Complex<double> on_circle(double x) { return {cos(x), sin(x)}; }
template <class R> LA_DEVICE Complex<R> reciprocal(Complex<R> a) {   // scaled, so that no square overflows
    const R most = fmax(fabs(a.re), fabs(a.im)), re = a.re / most, im = a.im / most;
    const R over = 1 / (most * (re * re + im * im));
    return {re * over, -im * over};
}
LA_DEVICE void zero(float& x) { x = 0; }
LA_DEVICE void zero(double& x) { x = 0; }
template <class R> LA_DEVICE void zero(Complex<R>& x) { x = {0, 0}; }
LA_DEVICE void unit(float& x) { x = 1; }
LA_DEVICE void unit(double& x) { x = 1; }
template <class R> LA_DEVICE void unit(Complex<R>& x) { x = {1, 0}; }
LA_DEVICE float real_part(float x) { return x; }
LA_DEVICE double real_part(double x) { return x; }
template <class R> LA_DEVICE R real_part(Complex<R> x) { return x.re; }

template <bool DOUBLE, bool COMPLEX> struct NumberType {
    typedef typename WideType<DOUBLE>::type type;
};
template <bool DOUBLE> struct NumberType<DOUBLE, true> {
    typedef Complex<typename WideType<DOUBLE>::type> type;
};

// N parts that lie together in memory, of kind KIND: streamed loads and stores, which no cache needs to keep
template <int SIZE> LA_DEVICE Part<SIZE> read_once(const char* from) {
    Part<SIZE> x;
    if constexpr (SIZE == 2) x.w = __ldcs((const u16*)from);
    else if constexpr (SIZE == 4) x.w[0] = __ldcs((const u32*)from);
    else if constexpr (SIZE == 8) {
        const uint2 y = __ldcs((const uint2*)from);
        x.w[0] = y.x, x.w[1] = y.y;
    } else {
        const uint4 y = __ldcs((const uint4*)from);
        x.w[0] = y.x, x.w[1] = y.y, x.w[2] = y.z, x.w[3] = y.w;
    }
    return x;
}
template <int SIZE> LA_DEVICE void write_once(char* to, const Part<SIZE>& x) {
    if constexpr (SIZE == 2) __stcs((u16*)to, x.w);
    else if constexpr (SIZE == 4) __stcs((u32*)to, x.w[0]);
    else if constexpr (SIZE == 8) __stcs((uint2*)to, make_uint2(x.w[0], x.w[1]));
    else __stcs((uint4*)to, make_uint4(x.w[0], x.w[1], x.w[2], x.w[3]));
}
template <int KIND, int N> struct Streamed : Loaded<KIND, N> {
    typedef Loaded<KIND, N> Base;
    __device__ __forceinline__ void read(const char* from) {
#pragma unroll
        for (int i = 0; i < Base::COUNT; i++) this->parts[i] = read_once<Base::STEP>(from + i * Base::STEP);
    }
    __device__ __forceinline__ void write(char* to) const {
#pragma unroll
        for (int i = 0; i < Base::COUNT; i++) write_once<Base::STEP>(to + i * Base::STEP, this->parts[i]);
    }
    __device__ __forceinline__ void put(int i, u32 w) {
        if constexpr (Base::SIZE == 2) this->parts[0].w = (u16)w;
        else this->parts[i * 4 / Base::STEP].w[i % (Base::STEP / 4)] = w;
    }
    template <class T> __device__ __forceinline__ void round(const T (&x)[N]) {
#pragma unroll
        for (int i = 0; i < N; i += KIND < 2 ? 2 : 1) {
            const float second = i + 1 < N ? (float)x[i + 1 < N ? i + 1 : i] : 0.f;
            if constexpr (KIND == 3) {
                put(2 * i, low_word((double)x[i]));
                put(2 * i + 1, high_word((double)x[i]));
            } else if constexpr (KIND == 2) put(i, __float_as_uint((float)x[i]));
            else put(i / 2, KIND == 0 ? pack_bf16((float)x[i], second) : pack_f16((float)x[i], second));
        }
    }
    static __device__ __forceinline__ u32 low_word(double x) { return (u32)__double2loint(x); }
    static __device__ __forceinline__ u32 high_word(double x) { return (u32)__double2hiint(x); }
};
