// Arrays (batch, head, token, column) of any storage dtype and stride, broadcast to the result; lanes that hold a row.
#pragma once
#include "arguments/ops/FormulaArguments.cuh"
#include "tile/types.cuh"

#if LA_DOUBLE
typedef double Real;
#else
typedef float Real;
#endif

struct Row {   // of an array: where it begins; null: not given
    char* at;
    i64 step;
    int kind, width;
    __device__ __forceinline__ Row(const FormulaArray& x, u32 batch, u32 head, u32 token)
        : at(x.data == nullptr ? nullptr : x.data + batch * x.batch + head * x.head + token * x.token),
          step(x.column),
          kind(x.kind),
          width(x.width) {}
    __device__ __forceinline__ bool given() const { return at != nullptr; }
    __device__ __forceinline__ Real operator[](int j) const {
        const char* p = at + j * step;
        if (kind == 2) return (Real) * (const float*)p;
        if (kind == 3) return (Real) * (const double*)p;
        const u32 bits = *(const u16*)p;
        return kind == 0 ? low_bf16(bits) : low_f16(bits);
    }
    __device__ __forceinline__ Real number(int j, Real otherwise) const {   // of one column for all, or of its own
        return given() ? (*this)[width == 1 ? 0 : j] : otherwise;
    }
    __device__ __forceinline__ void put(int j, Real x) const {
        char* p = at + j * step;
        if (kind == 2) *(float*)p = (float)x;
        else if (kind == 3) *(double*)p = (double)x;
        else *(u16*)p = (u16)(kind == 0 ? pack_bf16((float)x, 0.f) : pack_f16((float)x, 0.f));
    }
};
struct Rows {
    Row x, y, z, u, out, more;
    __device__ __forceinline__ Rows(const FormulaArguments& a, u32 token, u32 head, u32 batch)
        : x(a.x, batch, head, token),
          y(a.y, batch, head, token),
          z(a.z, batch, head, token),
          u(a.u, batch, head, token),
          out(a.out, batch, head, token),
          more(a.more, batch, head, token) {}
    __device__ __forceinline__ Rows(const FormulaArguments& a, u32 row, u32 tokens)
        : Rows(a, row % tokens, row / tokens % a.heads, row / tokens / a.heads) {}
};
LA_DEVICE Rows rows_at(const FormulaArguments& a, i64 n) {
    if (a.rows == 1) return Rows(a, 0, 0, 0);
    if (a.rows >> 32 == 0) return Rows(a, (u32)n, a.tokens);
    return Rows(a, (u32)(n % a.tokens), (u32)(n / a.tokens % a.heads), (u32)(n / a.tokens / a.heads));
}

struct Lanes {   // a warp computes a row, or every parts-th 32 columns of it
    int lane, part, parts;
    template <class F> __device__ __forceinline__ void each(int n, F f) const {
        for (int j = lane; j < n; j += 32) f(j);
    }
    template <class F> __device__ __forceinline__ void each_of_part(int n, F f) const {
        for (int j = 32 * part + lane; j < n; j += 32 * parts) f(j);
    }
    template <class F> __device__ __forceinline__ Real sum(int n, F f) const {
        Real total = 0;
        each(n, [&](int j) { total += f(j); });
#pragma unroll
        for (int d = 16; d; d >>= 1) total += __shfl_xor_sync(0xffffffffu, total, d);
        return total;
    }
    template <class F> __device__ __forceinline__ Real most(int n, F f) const {
        Real found = -(Real)__int_as_float(0x7f800000);
        each(n, [&](int j) { found = fmax(found, f(j)); });
#pragma unroll
        for (int d = 16; d; d >>= 1) found = fmax(found, __shfl_xor_sync(0xffffffffu, found, d));
        return found;
    }
};
