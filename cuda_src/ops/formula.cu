// Formulas of numbers and of rows: out = f(x, y, z, u; a, b), `how` choosing between forms (ops/cuda/formulas.py);
// transposes with two results write `more` too.
//
// Arrays lie as (batch, head, token, column), of any storage dtype and stride, and are broadcast to the result; rows of
// a formula of rows have widths of their own. Computed in float, or with LA_DOUBLE in double. LA_PER: neighbouring
// columns of a thread, 8 where every array has them at multiples of 16 bytes, or one column for all; LA_KINDS then has
// three bits for each of x y z u out more, its kind. LA_PARTS: warps of a row of products with a matrix.
#include "ops/element.cuh"
#include "ops/number_formulas.cuh"
#include "ops/row_formulas.cuh"

// LA_PER neighbours of an array. KIND: of its numbers, NONE without one, or ANY: known to the call alone, of one column.
enum { ANY = 6, NONE = 7 };
#ifndef LA_KINDS
#define LA_KINDS 0
#endif
#ifndef LA_PARTS
#define LA_PARTS 1
#endif
LA_DEVICE constexpr int kind_of(int n) { return LA_PER == 1 ? ANY : LA_KINDS >> 3 * n & 7; }
template <int KIND> struct Columns {
    Row row;
    Loaded < KIND<ANY ? KIND : 2, LA_PER> raw;
    bool wide;
    __device__ __forceinline__ Columns(const Row& of, int j, bool whole) : row(of), wide(false) {
        if constexpr (KIND < ANY) {
            wide = whole && row.width > 1;
            if (wide) raw.load(row.at + j * row.step);
        }
    }
    __device__ __forceinline__ void get(Real (&x)[LA_PER], int j, int count) const {
        if constexpr (KIND == NONE) {
#pragma unroll
            for (int i = 0; i < LA_PER; i++) x[i] = 0;
        } else if constexpr (KIND == ANY) x[0] = row.number(j, 0);
        else if (wide) raw.get(x);
        else {
            const Real one = row.width == 1 ? (Real)element<KIND>(row.at, 0) : (Real)0;
#pragma unroll
            for (int i = 0; i < LA_PER; i++)
                x[i] = row.width > 1 && i < count ? (Real)element<KIND>(row.at, j + i) : one;
        }
    }
};
template <int KIND> LA_DEVICE void put(const Row& row, const Real (&x)[LA_PER], int j, int count) {
    if constexpr (KIND == ANY) row.put(j, x[0]);
    else if constexpr (KIND < ANY) {
        if (count == LA_PER) store_elements<KIND, LA_PER>(row.at + j * row.step, x);
        else
            for (int i = 0; i < count; i++) put_element<KIND>(row.at, j + i, x[i]);
    }
}

// a thread computes LA_PER numbers of a row
template <class F> LA_DEVICE void of_numbers(const FormulaArguments& a, F f) {
    const u32 each = (a.out.width + LA_PER - 1) / LA_PER;   // threads of a row
    const i64 n = (i64)blockIdx.x * 256 + threadIdx.x, row = a.rows == 1 ? 0 : n / each;
    if (row >= a.rows || n - row * each >= each) return;
    const int j = (int)(n - row * each) * LA_PER, count = min(LA_PER, a.out.width - j);
    const Rows r = rows_at(a, row);
    const bool whole = count == LA_PER;
    const Columns<kind_of(0)> from_x(r.x, j, whole);
    const Columns<kind_of(1)> from_y(r.y, j, whole);
    const Columns<kind_of(2)> from_z(r.z, j, whole);
    const Columns<kind_of(3)> from_u(r.u, j, whole);
    Real x[4][LA_PER], out[LA_PER], more[LA_PER];
    from_x.get(x[0], j, count);
    from_y.get(x[1], j, count);
    from_z.get(x[2], j, count);
    from_u.get(x[3], j, count);
    constexpr bool PAIR = sizeof(f(Numbers())) == sizeof(Two);
#pragma unroll
    for (int i = 0; i < LA_PER; i++) {
        const Numbers in{x[0][i], x[1][i], x[2][i], x[3][i], r.y.given(), r.z.given(), r.u.given()};
        if constexpr (PAIR) {
            const Two both = f(in);
            out[i] = both.out;
            more[i] = both.more;
        } else out[i] = f(in);
    }
    put<kind_of(4)>(r.out, out, j, count);
    if constexpr (PAIR)
        if (r.more.given()) put<kind_of(5)>(r.more, more, j, count);
}
template <class F> LA_DEVICE void of_rows(const FormulaArguments& a, F f) {
    const i64 n = (i64)blockIdx.x * 8 + threadIdx.x / 32, row = LA_PARTS == 1 ? n : n / LA_PARTS;
    if (row < a.rows) f(rows_at(a, row), Lanes{(int)threadIdx.x % 32, (int)(n - row * LA_PARTS), LA_PARTS});
}

// LA_KIND: the place of the formula among these
extern "C" __global__ void __launch_bounds__(256) formula(const __grid_constant__ FormulaArguments a) {
    constexpr Real (*NUMBERS[])(Given, In) = {
        copy,        filled,          scaled,         product,       added,         complement,  complement_vjp,
        log_rest,    log_rest_vjp,    step_size,      step_size_vjp, skip_and_gate, gate_vjp,    capped,
        capped_vjp,  log_forget,      log_forget_vjp, log_decay,     bounded,       log_sigmoid, log_sigmoid_vjp,
        lower_bound, lower_bound_vjp, exponential,    feature,       feature_vjp,   activation,  activation_vjp,
        swiglu,      decayed_sum,     average};
    constexpr Two (*PAIRS[])(Given, In) = {log_decay_vjp, bounded_vjp, exponential_vjp, swiglu_vjp};
    constexpr void (*ROWS[])(const FormulaArguments&, const Rows&, const Lanes&) = {
        appended, quotient, quotient_vjp, normed,      softmax, softmax_vjp, strength,  strength_vjp,  inner,
        cos_sin,  rotated,  rotated_pair, over_length, favor,   fourier,     monomials, monomials_vjp, dpfp};
    constexpr int COUNT = sizeof(NUMBERS) / sizeof(NUMBERS[0]), BEFORE_ROWS = COUNT + sizeof(PAIRS) / sizeof(PAIRS[0]);
    if constexpr (LA_KIND < COUNT) of_numbers(a, [&](In n) { return NUMBERS[LA_KIND](a, n); });
    else if constexpr (LA_KIND < BEFORE_ROWS) of_numbers(a, [&](In n) { return PAIRS[LA_KIND - COUNT](a, n); });
    else of_rows(a, [&](const Rows& r, const Lanes& lanes) { ROWS[LA_KIND - BEFORE_ROWS](a, r, lanes); });
}
