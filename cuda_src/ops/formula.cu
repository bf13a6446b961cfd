// Formulas of numbers and of rows: out = f(x, y, z, u; a, b), `how` choosing between forms (ops/cuda/formulas.py);
// transposes with two results write `more` too.
//
// Arrays lie as (batch, head, token, column), of any storage dtype and stride, and are broadcast to the result; rows of
// a formula of rows have widths of their own. Computed in float, or with LA_DOUBLE in double. LA_PER: neighbouring
// columns of a thread, 8 where every array has them at multiples of 16 bytes, or one column for all.
#include "ops/number_formulas.cuh"
#include "ops/row_formulas.cuh"

struct Columns {   // LA_PER neighbours of an array
    static constexpr int WORDS = LA_PER == 1 ? 1 : LA_PER * (LA_DOUBLE ? 2 : 1);
    Row row;
    u32 w[WORDS];
    bool wide;
    __device__ __forceinline__ Columns(const Row& of, int j, bool whole) : row(of), wide(false) {
        if constexpr (LA_PER > 1) {
            wide = whole && row.given() && row.width > 1;
            const int words = row.kind < 2 ? LA_PER / 2 : row.kind == 2 ? LA_PER : 2 * LA_PER;
#pragma unroll
            for (int i = 0; i < WORDS; i += 4)
                if (wide && i < words) *(uint4*)(w + i) = ((const uint4*)(row.at + j * row.step))[i / 4];
        }
    }
    __device__ __forceinline__ void get(Real (&x)[LA_PER], int j, int count) const {
        if (wide) {
            if constexpr (LA_PER > 1) {
#pragma unroll
                for (int i = 0; i < LA_PER; i++) {
                    const u32 half = w[i / 2];
                    if (row.kind == 2) x[i] = __uint_as_float(w[i]);
                    else if (row.kind == 0) x[i] = i & 1 ? high_bf16(half) : low_bf16(half);
                    else if (row.kind == 1) x[i] = i & 1 ? high_f16(half) : low_f16(half);
                    else if constexpr (LA_DOUBLE) x[i] = __hiloint2double((int)w[2 * i + 1], (int)w[2 * i]);
                }
            }
            return;
        }
        const Real one = row.given() && row.width == 1 ? row[0] : (Real)0;
#pragma unroll
        for (int i = 0; i < LA_PER; i++) x[i] = row.given() && row.width > 1 && i < count ? row[j + i] : one;
    }
};
LA_DEVICE void put(const Row& row, const Real (&x)[LA_PER], int j, int count) {
    if constexpr (LA_PER > 1)
        if (count == LA_PER && row.kind < 3) {
            u32 w[LA_PER];
#pragma unroll
            for (int i = 0; i < LA_PER; i++) {
                if (row.kind == 2) w[i] = __float_as_uint((float)x[i]);
                else if (i % 2 == 0)
                    w[i / 2] = row.kind == 0 ? pack_bf16((float)x[i], (float)x[i + 1])
                                             : pack_f16((float)x[i], (float)x[i + 1]);
            }
            uint4* to = (uint4*)(row.at + j * row.step);
#pragma unroll
            for (int i = 0; i < LA_PER / 4; i++)
                if (i == 0 || row.kind == 2) to[i] = *(const uint4*)(w + 4 * i);
            return;
        }
    for (int i = 0; i < count; i++) row.put(j + i, x[i]);
}

// a thread computes LA_PER numbers of a row
template <class F> LA_DEVICE void of_numbers(const FormulaArguments& a, F f) {
    const u32 each = (a.out.width + LA_PER - 1) / LA_PER;   // threads of a row
    const i64 n = (i64)blockIdx.x * 256 + threadIdx.x, row = a.rows == 1 ? 0 : n / each;
    if (row >= a.rows || n - row * each >= each) return;
    const int j = (int)(n - row * each) * LA_PER, count = min(LA_PER, a.out.width - j);
    const Rows r = rows_at(a, row);
    const bool whole = count == LA_PER;
    const Columns from[] = {{r.x, j, whole}, {r.y, j, whole}, {r.z, j, whole}, {r.u, j, whole}};
    Real x[4][LA_PER], out[LA_PER], more[LA_PER];
#pragma unroll
    for (int i = 0; i < 4; i++) from[i].get(x[i], j, count);
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
    put(r.out, out, j, count);
    if constexpr (PAIR)
        if (r.more.given()) put(r.more, more, j, count);
}
template <class F> LA_DEVICE void of_rows(const FormulaArguments& a, F f) {
    const i64 row = (i64)blockIdx.x * 8 + threadIdx.x / 32;
    if (row < a.rows) f(rows_at(a, row), Lanes{(int)threadIdx.x % 32});
}

// LA_KIND: the place of the formula among these
extern "C" __global__ void __launch_bounds__(256) formula(const __grid_constant__ FormulaArguments a) {
    constexpr Real (*NUMBERS[])(Given, In) = {
        copy,           filled,      scaled,          product,        added,           complement,
        complement_vjp, log_rest,    log_rest_vjp,    step_size,      step_size_vjp,   skip_and_gate,
        gate_vjp,       capped,      capped_vjp,      log_forget,     log_forget_vjp,  log_decay,
        bounded,        log_sigmoid, log_sigmoid_vjp, lower_bound,    lower_bound_vjp, exponential,
        feature,        feature_vjp, activation,      activation_vjp, swiglu};
    constexpr Two (*PAIRS[])(Given, In) = {log_decay_vjp, bounded_vjp, exponential_vjp, swiglu_vjp};
    constexpr void (*ROWS[])(const FormulaArguments&, const Rows&, const Lanes&) = {
        appended, quotient, quotient_vjp, normed,      softmax, softmax_vjp, strength,  strength_vjp, inner,
        turn,     rotated,  rotated_pair, over_length, favor,   fourier,     monomials, dpfp};
    constexpr int COUNT = sizeof(NUMBERS) / sizeof(NUMBERS[0]), BEFORE_ROWS = COUNT + sizeof(PAIRS) / sizeof(PAIRS[0]);
    if constexpr (LA_KIND < COUNT) of_numbers(a, [&](In n) { return NUMBERS[LA_KIND](a, n); });
    else if constexpr (LA_KIND < BEFORE_ROWS) of_numbers(a, [&](In n) { return PAIRS[LA_KIND - COUNT](a, n); });
    else of_rows(a, [&](const Rows& r, const Lanes& lanes) { ROWS[LA_KIND - BEFORE_ROWS](a, r, lanes); });
}
