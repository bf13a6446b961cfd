// Formulas of rows: out = f(x, y, z, u; a, b), `how` choosing between forms; a warp computes a row.
#pragma once
#include "ops/formulas.cuh"
#include "ops/row.cuh"

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
// [y / m, -sign(d) <y / m, n> / m where |d| > z] of x = [n, d], m = max(|d|, z); 0 for m = 0
LA_DEVICE void quotient_vjp(const FormulaArguments& a, const Rows& r, const Lanes& lanes) {
    const int n = r.y.width;
    const Real d = r.x[n], size = fabs(d), most = size > r.z[0] ? size : r.z[0], share = most > 0 ? 1 / most : (Real)0;
    const Real along = lanes.sum(n, [&](int j) { return share * r.y[j] * r.x[j]; }) * share;
    lanes.each(n, [&](int j) { r.out.put(j, share * r.y[j]); });
    if (lanes.lane == 0) r.out.put(n, size > r.z[0] ? (d < 0 ? along : -along) : (Real)0);
}
LA_DEVICE void inner(const FormulaArguments& a, const Rows& r, const Lanes& lanes) {   // <x, y> + z u; no z 0, no u 1
    const Real sum = lanes.sum(r.y.width, [&](int j) { return r.x[j] * r.y[j]; });
    if (lanes.lane == 0) r.out.put(0, sum + r.z.number(0, 0) * r.u.number(0, 1));
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
LA_DEVICE void softmax(const FormulaArguments& a, const Rows& r,
                       const Lanes& lanes) {   // e^{x_j} over their sum, `how`: of -x
    const int n = r.out.width;
    const Real sign = a.how ? (Real)-1 : (Real)1;
    const Real most = lanes.most(n, [&](int j) { return sign * r.x[j]; });
    const Real total = lanes.sum(n, [&](int j) { return exp(sign * r.x[j] - most); });
    lanes.each(n, [&](int j) { r.out.put(j, exp(sign * r.x[j] - most) / total); });
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
// z times the derivatives of strength by y, and twice that by s
LA_DEVICE void strength_vjp(const FormulaArguments& a, const Rows& r, const Lanes& lanes) {
    const Real y = r.y[0], step = y * lanes.sum(r.x.width, [&](int j) { return r.x[j] * r.x[j]; });
    if (lanes.lane) return;
    const Real b = y / (1 + step), z = r.z[0];
    r.out.put(0, z * (a.how ? 1 / ((1 + step) * (1 + step)) : exp(-step)));
    r.more.put(0, z * (a.how ? -2 * b * b : 2 * y * y * flow_slope(step)));
}
LA_DEVICE void cos_sin(const FormulaArguments& a, const Rows& r, const Lanes& lanes) {   // cos(x y), then sin(x y)
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
#pragma unroll 8
    for (int i = 0; i < r.x.width; i++) sum += r.x[i] * r.y[i * n + j];
    return sum;
}
// positive random features e^{w_j . x - |a x|^2 / 2 - b}, y the columns w; how: of w, then of -w
LA_DEVICE void favor(const FormulaArguments& a, const Rows& r, const Lanes& lanes) {
    const int n = a.how ? r.out.width / 2 : r.out.width;
    const Real less = (Real)(a.a * a.a) / 2 * lanes.sum(r.x.width, [&](int i) { return r.x[i] * r.x[i]; }) + (Real)a.b;
    lanes.each_of_part(n, [&](int j) {
        const Real angle = projection(r, j, n);
        r.out.put(j, exp(angle - less));
        if (a.how) r.out.put(n + j, exp(-angle - less));
    });
}
// a [sin(w_j . x), cos(w_j . x)], y the columns w
LA_DEVICE void fourier(const FormulaArguments& a, const Rows& r, const Lanes& lanes) {
    const int n = r.out.width / 2;
    lanes.each_of_part(n, [&](int j) {
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
// the transpose of monomials for y: a y_i of degree 1 and b times (2 y_ii x_i + sqrt(2) sum_j y_ij x_j) of degree 2.
// how: bits 0 to 2, which degrees y has
LA_DEVICE void monomials_vjp(const FormulaArguments& a, const Rows& r, const Lanes& lanes) {
    const int K = r.out.width, first = a.how & 1, pairs = first + (a.how & 2 ? K : 0);
    lanes.each(K, [&](int i) {
        Real sum = 0;
        if (a.how & 4) {
            for (int j = 0; j < K; j++) {
                const int low = i < j ? i : j, high = i < j ? j : i;
                const Real d = r.y[pairs + low * K - low * (low - 1) / 2 + high - low] * r.x[j];
                sum += i == j ? (Real)1.41421356237309505 * d : d;
            }
        }
        r.out.put(i, (Real)a.b * (Real)1.41421356237309505 * sum + (a.how & 2 ? (Real)a.a * r.y[first + i] : (Real)0));
    });
}

// r_i r_{i-1}, then r_i r_{i-2}, ..., r_i r_{i-how}, of r = [max(x, 0), max(-x, 0)]; before r_0 is the last r
LA_DEVICE void dpfp(const FormulaArguments& a, const Rows& r, const Lanes& lanes) {
    const int n = r.x.width;
    const auto entry = [&](int i) {
        const Real x = i < n ? r.x[i] : -r.x[i - n];
        return x > 0 ? x : (Real)0;
    };
    lanes.each(r.out.width, [&](int j) {
        const int i = j % (2 * n), before = i - j / (2 * n) - 1;
        r.out.put(j, entry(i) * entry(before < 0 ? before + 2 * n : before));
    });
}
