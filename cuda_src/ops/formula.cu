// Formulas of numbers and of rows: out = f(x, y, z, u; a, b), `how` choosing between forms (ops/cuda/formulas.py).
//
// Arrays lie as (batch, head, token, column), of any storage dtype and stride, and are broadcast to the result; rows of
// a formula of rows have widths of their own. Computed in float, or with LA_DOUBLE in double.
#include "ops/formulas.cuh"
#include "arguments/ops/FormulaArguments.cuh"

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
    Row x, y, z, u, out;
    __device__ __forceinline__ Rows(const FormulaArguments& a, u32 token, u32 head, u32 batch)
        : x(a.x, batch, head, token),
          y(a.y, batch, head, token),
          z(a.z, batch, head, token),
          u(a.u, batch, head, token),
          out(a.out, batch, head, token) {}
    __device__ __forceinline__ Rows(const FormulaArguments& a, i64 n)
        : Rows(a, (u32)(n % a.tokens), (u32)(n / a.tokens % a.heads), (u32)(n / a.tokens / a.heads)) {}
};
// a thread computes a number
template <class F> LA_DEVICE void of_numbers(const FormulaArguments& a, F f) {
    const i64 n = (i64)blockIdx.x * 256 + threadIdx.x, row = n / a.out.width;
    if (row >= a.rows) return;
    const int j = (int)(n - row * a.out.width);
    const Rows r(a, row);
    r.out.put(j, f(r, j));
}
// a warp computes a row
struct Lanes {
    int lane;
    template <class F> __device__ __forceinline__ void each(int n, F f) const {
        for (int j = lane; j < n; j += 32) f(j);
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
template <class F> LA_DEVICE void of_rows(const FormulaArguments& a, F f) {
    const i64 row = (i64)blockIdx.x * 8 + threadIdx.x / 32;
    if (row < a.rows) f(Rows(a, row), Lanes{(int)threadIdx.x % 32});
}

struct Numbers {   // of a column; 0 where an array is not given
    Real x, y, z, u;
    bool has_y, has_z, has_u;
    __device__ __forceinline__ Numbers(const Rows& r, int j)
        : x(r.x.number(j, 0)),
          y(r.y.number(j, 0)),
          z(r.z.number(j, 0)),
          u(r.u.number(j, 0)),
          has_y(r.y.given()),
          has_z(r.z.given()),
          has_u(r.u.given()) {}
};
LA_DEVICE Real cap(Real x, Real most) { return most > 0 ? most * tanh(x / most) : x; }

LA_DEVICE Real copy(const FormulaArguments& a, const Numbers& n) { return n.x; }
LA_DEVICE Real filled(const FormulaArguments& a, const Numbers&) { return (Real)a.a; }
LA_DEVICE Real scaled(const FormulaArguments& a, const Numbers& n) { return (Real)a.a * n.x; }
LA_DEVICE Real product(const FormulaArguments& a, const Numbers& n) { return n.has_z ? n.x * n.y * n.z : n.x * n.y; }
LA_DEVICE Real complement(const FormulaArguments& a, const Numbers& n) {
    return n.has_y ? -expm1(n.x) * n.y : -expm1(n.x);
}   // (1 - e^x) y
LA_DEVICE Real complement_vjp(const FormulaArguments& a, const Numbers& n) { return n.y - exp(n.x) * n.z; }
LA_DEVICE Real log_rest(const FormulaArguments& a, const Numbers& n) {
    return log1p(n.x >= 1 ? (Real)-1 : -n.x);
}   // log(1 - x)
LA_DEVICE Real step_size(const FormulaArguments& a,
                         const Numbers& n) {   // x + y, or (how) its softplus, from a to b; NaN stays NaN
    const Real step = a.how ? softplus(n.x + n.y) : n.x + n.y;
    return step<(Real)a.a ? (Real)a.a : step>(Real) a.b ? (Real)a.b : step;
}
LA_DEVICE Real step_size_vjp(const FormulaArguments& a, const Numbers& n) {   // z times the slope of step_size
    const Real raw = n.x + n.y, step = a.how ? softplus(raw) : raw;
    return step >= (Real)a.a && step <= (Real)a.b ? (a.how ? n.z * sigmoid(raw) : n.z) : (Real)0;
}
LA_DEVICE Real skip_and_gate(const FormulaArguments& a, const Numbers& n) {   // (x + y z) silu(u)
    const Real sum = n.has_y ? n.x + n.y * n.z : n.x;
    return n.has_u ? sum * n.u * sigmoid(n.u) : sum;
}
LA_DEVICE Real gate_vjp(const FormulaArguments& a, const Numbers& n) {   // x y silu'(z)
    const Real s = sigmoid(n.z);
    return n.x * n.y * s * (1 + n.z * (1 - s));
}
LA_DEVICE Real capped(const FormulaArguments& a, const Numbers& n) {
    return cap(n.x, (Real)a.a);
}   // a tanh(x / a); a = 0: x
LA_DEVICE Real log_forget(const FormulaArguments& a,
                          const Numbers& n) {   // log sigmoid of it, or (how) itself; at least b
    const Real y = cap(n.x, (Real)a.a), log_f = a.how ? y : -softplus(-y);
    return log_f < (Real)a.b ? (Real)a.b : log_f;
}
LA_DEVICE Real log_decay(const FormulaArguments& a, const Numbers& n) {
    return gate<false>(n.x + n.y, exp(n.z), (Real)0);
}
LA_DEVICE Real bounded(const FormulaArguments& a, const Numbers& n) {
    return gate<true>(n.x + n.y, n.has_z ? exp(n.z) : (Real)1, (Real)a.a);
}

// features of a channel: how 0 x + 1 where x > 0 and e^x elsewhere, 1 max(x, 0), 2 e^x, 3 silu; and y times the slope
LA_DEVICE Real feature(const FormulaArguments& a, const Numbers& n) {
    if (a.how == 0) return n.x > 0 ? n.x + 1 : exp(n.x);
    if (a.how == 1) return n.x > 0 ? n.x : (Real)0;
    return a.how == 2 ? exp(n.x) : n.x * sigmoid(n.x);
}
LA_DEVICE Real feature_vjp(const FormulaArguments& a, const Numbers& n) {
    if (a.how == 0) return n.x > 0 ? n.y : n.y * exp(n.x);
    if (a.how == 1) return n.x > 0 ? n.y : (Real)0;
    const Real s = sigmoid(n.x);
    return a.how == 2 ? n.y * exp(n.x) : n.y * s * (1 + n.x * (1 - s));
}

LA_DEVICE void appended(const FormulaArguments& a, const Rows& r,
                        const Lanes& lanes) {   // u [x, y], y and u 1 where they are not given
    const Real factor = r.u.number(0, 1);
    lanes.each(r.x.width, [&](int j) { r.out.put(j, factor * r.x[j]); });
    if (lanes.lane == 0) r.out.put(r.x.width, factor * r.y.number(0, 1));
}
LA_DEVICE void quotient(
    const FormulaArguments& a, const Rows& r,
    const Lanes& lanes) {   // x_1 .. x_n over x_{n+1} + a, or over max(|x_{n+1}|, y); 0 where that is 0
    const int n = r.out.width;
    const Real last = r.x[n], total = r.y.given() ? (fabs(last) < r.y[0] ? r.y[0] : fabs(last)) : last + (Real)a.a;
    lanes.each(n, [&](int j) { r.out.put(j, total == 0 ? (Real)0 : r.x[j] / total); });
}
LA_DEVICE void normed(const FormulaArguments& a, const Rows& r,
                      const Lanes& lanes) {   // y (x - m) sqrt(n) / sqrt(|x - m|^2 + a^2) + z, m = mean x
    const int n = r.out.width;
    const Real mean = lanes.sum(n, [&](int j) { return r.x[j]; }) / n;
    const Real most = lanes.most(n, [&](int j) { return fabs(r.x[j] - mean); });
    const Real factor = most > (Real)1e15 ? (Real)0x1p-75f : most < (Real)1e-15 ? (Real)0x1p75f : 1;
    const Real root = (Real)a.a * factor, square = lanes.sum(n, [&](int j) {
        const Real d = (r.x[j] - mean) * factor;
        return d * d;
    }) + root * root;
    const Real over = square == 0 ? (Real)1 : sqrt((Real)n / square);
    lanes.each(n, [&](int j) { r.out.put(j, (r.x[j] - mean) * factor * over * r.y.number(j, 1) + r.z.number(j, 0)); });
}
LA_DEVICE void softmax(const FormulaArguments& a, const Rows& r, const Lanes& lanes) {   // e^{x_j} over their sum
    const int n = r.out.width;
    const Real most = lanes.most(n, [&](int j) { return r.x[j]; });
    const Real total = lanes.sum(n, [&](int j) { return exp(r.x[j] - most); });
    lanes.each(n, [&](int j) { r.out.put(j, exp(r.x[j] - most) / total); });
}
LA_DEVICE void softmax_vjp(const FormulaArguments& a, const Rows& r,
                           const Lanes& lanes) {   // x (y - <x, y>), x = softmax
    const int n = r.out.width;
    const Real along = lanes.sum(n, [&](int j) { return r.x[j] * r.y[j]; });
    lanes.each(n, [&](int j) { r.out.put(j, r.x[j] * (r.y[j] - along)); });
}
LA_DEVICE void strength(const FormulaArguments& a, const Rows& r,
                        const Lanes& lanes) {   // s = |x|^2: (1 - e^{-y s}) / s, y for s = 0; `how`: y / (1 + y s)
    const Real y = r.y[0], step = y * lanes.sum(r.x.width, [&](int j) { return r.x[j] * r.x[j]; });
    if (lanes.lane == 0) r.out.put(0, a.how ? y / (1 + step) : step == 0 ? y : y * (-expm1(-step) / step));
}
LA_DEVICE void turn(const FormulaArguments& a, const Rows& r, const Lanes& lanes) {   // cos(x y), then sin(x y)
    const int n = r.x.width;
    lanes.each(n, [&](int j) {
        const Real angle = r.x[j] * r.y[0];
        r.out.put(j, cos(angle));
        r.out.put(n + j, sin(angle));
    });
}
// Pairs (2 p, 2 p + 1) of a row, rotated by their angles, y the cosines and z the sines; `how`: by the opposite ones
LA_DEVICE void rotated(const FormulaArguments& a, const Rows& r, const Lanes& lanes) {
    const int P = r.y.width;
    lanes.each(P, [&](int p) {
        const Real even = r.x[2 * p], odd = r.x[2 * p + 1], c = r.y[p], s = a.how ? -r.z[p] : r.z[p];
        r.out.put(2 * p, even * c - odd * s);
        r.out.put(2 * p + 1, even * s + odd * c);
    });
    lanes.each(r.out.width - 2 * P, [&](int j) { r.out.put(2 * P + j, r.x[2 * P + j]); });
}
LA_DEVICE void rotated_pair(const FormulaArguments& a, const Rows& r,
                            const Lanes& lanes) {   // two rows of one width side by side, rotated by one angle
    const int n = r.out.width / 2;
    const Real c = r.y[0], s = a.how ? -r.z[0] : r.z[0];
    lanes.each(n, [&](int j) {
        const Real even = r.x[j], odd = r.x[n + j];
        r.out.put(j, even * c - odd * s);
        r.out.put(n + j, even * s + odd * c);
    });
}
// x / sqrt(|y|^2 + a^2), x where that is 0
LA_DEVICE void over_length(const FormulaArguments& a, const Rows& r, const Lanes& lanes) {
    const Real most = lanes.most(r.y.width, [&](int j) { return fabs(r.y[j]); });
    const Real factor = most > (Real)1e15 ? (Real)0x1p-75f : most < (Real)1e-15 ? (Real)0x1p75f : (Real)1;
    const Real root = (Real)a.a * factor;
    const Real square = root * root + lanes.sum(r.y.width, [&](int j) {
        const Real y = r.y[j] * factor;
        return y * y;
    });
    const Real over = square == 0 ? (Real)1 : factor / sqrt(square);
    lanes.each(r.out.width, [&](int j) { r.out.put(j, r.x[j] * over); });
}
// <x, y_j>, y_j column j of y (K, n), row by row
LA_DEVICE Real projection(const Rows& r, int j, int n) {
    Real sum = 0;
    for (int i = 0; i < r.x.width; i++) sum += r.x[i] * r.y[i * n + j];
    return sum;
}
// positive random features e^{w_j . x - |a x|^2 / 2 - b}, y the columns w; how: of w, then of -w
LA_DEVICE void favor(const FormulaArguments& a, const Rows& r, const Lanes& lanes) {
    const int n = a.how ? r.out.width / 2 : r.out.width;
    const Real less = (Real)(a.a * a.a) / 2 * lanes.sum(r.x.width, [&](int i) { return r.x[i] * r.x[i]; }) + (Real)a.b;
    lanes.each(n, [&](int j) {
        const Real angle = projection(r, j, n);
        r.out.put(j, exp(angle - less));
        if (a.how) r.out.put(n + j, exp(-angle - less));
    });
}
// a [sin(w_j . x), cos(w_j . x)], y the columns w
LA_DEVICE void fourier(const FormulaArguments& a, const Rows& r, const Lanes& lanes) {
    const int n = r.out.width / 2;
    lanes.each(n, [&](int j) {
        const Real angle = projection(r, j, n);
        r.out.put(j, (Real)a.a * sin(angle));
        r.out.put(n + j, (Real)a.a * cos(angle));
    });
}
// products of up to two channels times weights y: channels z_j and u_j of a x, 1 for -1
LA_DEVICE void monomials(const FormulaArguments& a, const Rows& r, const Lanes& lanes) {
    lanes.each(r.out.width, [&](int j) {
        const int first = (int)r.z[j], second = (int)r.u[j];
        const Real x = first < 0 ? (Real)1 : (Real)a.a * r.x[first], y = second < 0 ? (Real)1 : (Real)a.a * r.x[second];
        r.out.put(j, r.y[j] * x * y);
    });
}

// LA_KIND: the place of the formula among these
extern "C" __global__ void __launch_bounds__(256) formula(const __grid_constant__ FormulaArguments a) {
    constexpr Real (*NUMBERS[])(const FormulaArguments&, const Numbers&) = {
        copy,          filled,   scaled, product,    complement, complement_vjp, log_rest, step_size,  step_size_vjp,
        skip_and_gate, gate_vjp, capped, log_forget, log_decay,  bounded,        feature,  feature_vjp};
    constexpr void (*ROWS[])(const FormulaArguments&, const Rows&, const Lanes&) = {
        appended, quotient,     normed,      softmax, softmax_vjp, strength, turn,
        rotated,  rotated_pair, over_length, favor,   fourier,     monomials};
    constexpr int COUNT = sizeof(NUMBERS) / sizeof(NUMBERS[0]);
    if constexpr (LA_KIND < COUNT)
        of_numbers(a, [&](const Rows& r, int j) { return NUMBERS[LA_KIND](a, Numbers(r, j)); });
    else of_rows(a, [&](const Rows& r, const Lanes& lanes) { ROWS[LA_KIND - COUNT](a, r, lanes); });
}
