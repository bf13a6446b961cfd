// N_t = N_{t-1} + e^{s_t} of a sequence and column, without overflow, the shares of the tokens in it, and the transpose.
//
//     share_t = e^{s_t} / N_t        g_t = log(N_{t-1} / N_t)        both 0 while N_t = 0
//     own_t = dg_t + share_t dshare_t        y_t = dg_t - e^{g_t} own_t + e^{g_t} y_{t+1}
//     ds_t = share_t (dshare_t + y_{t+1} - own_t)        begin = y of the first token
//
// Arrays are dense (tokens, columns), N_0 and begin (sequences, columns); s of kind LA_DTYPE, all others of LA_WIDE.
#include "arguments/ops/SharesArguments.cuh"
#include "ops/element.cuh"
#include "ops/segments.cuh"

typedef Wide<LA_WIDE> Real;
constexpr Real FAR = 8;   // how much a term may exceed the reference of a sum

// sum e^level; 0: sum = 0. The sum is in double, so that a running one loses nothing
struct Sum {
    Real level;
    double sum;
};
LA_DEVICE Sum with(Sum x, Real s) {
    if (s == -(Real)__int_as_float(0x7f800000)) return x;
    if (x.sum == 0) return {s, 1};
    if (s > x.level + FAR) x = {s, x.sum * (double)exp(x.level - s)};
    x.sum += (double)exp(s - x.level);
    return x;
}
LA_DEVICE Sum merged(Sum x, const Sum& y) {
    if (y.sum == 0) return x;
    if (x.sum == 0) return y;
    if (y.level > x.level + FAR) return {y.level, x.sum * exp((double)(x.level - y.level)) + y.sum};
    return {x.level, x.sum + y.sum * exp((double)(y.level - x.level))};
}
LA_DEVICE Sum first_of(Real N) {
    if (N <= 0) return {0, 0};
    const Real level = log(N);
    return {level, (double)N * exp(-(double)level)};
}

extern "C" __global__ void __launch_bounds__(SEGMENTS* LANES) shares(const __grid_constant__ SharesArguments a) {
    __shared__ Sum maps[SEGMENTS][LANES];
    const Segment s(a.offsets, a.T, a.columns);
    const auto load = [&](i64 t, Real(&in)[1]) { in[0] = (Real)element<LA_DTYPE>(a.s, t * a.columns + s.column); };
    Sum own{0, 0};
    traverse<false, 1, 4, Real>(s, load, [&](i64, const Real(&in)[1]) { own = with(own, in[0]); });
    Sum x{0, 0};
    if (s.given) x = first_of(element<LA_WIDE>(a.begin, s.sequence * a.columns + s.column));
    x = entering<false>(maps, own, x, [](const Sum& map, const Sum& before) { return merged(before, map); });
    traverse<false, 1, 4, Real>(s, load, [&](i64 t, const Real(&in)[1]) {
        const i64 at = t * a.columns + s.column;
        const Sum before = x;
        x = with(x, in[0]);
        Real share = 0, g = 0;
        if (x.sum != 0) {   // NaN too
            share = exp(in[0] - x.level) / (Real)x.sum;
            if (share < (Real)0.5) g = log1p(-share);
            else if (before.sum == 0) g = -(Real)__int_as_float(0x7f800000);
            else g = before.level - x.level + log((Real)(before.sum / x.sum));
        }
        put_element<LA_WIDE>(a.share, at, share);
        put_element<LA_WIDE>(a.g, at, g);
        put_element<LA_WIDE>(a.N, at, (Real)x.sum * exp(x.level));
    });
}

struct Affine {   // y -> first + factor y
    Real factor, first;
};
extern "C" __global__ void __launch_bounds__(SEGMENTS* LANES) shares_vjp(const __grid_constant__ SharesArguments a) {
    __shared__ Affine maps[SEGMENTS][LANES];
    const Segment s(a.offsets, a.T, a.columns);
    const auto load = [&](i64 t, Real(&in)[4]) {
        const i64 at = t * a.columns + s.column;
        in[0] = element<LA_WIDE>(a.share, at);
        in[1] = exp(element<LA_WIDE>(a.g, at));
        in[2] = element<LA_WIDE>(a.dshare, at);
        in[3] = element<LA_WIDE>(a.dg, at);
    };
    const auto own_of = [](const Real(&in)[4]) { return in[3] + in[0] * in[2]; };
    Affine own{1, 0};
    traverse<true, 4, 2, Real>(s, load, [&](i64, const Real(&in)[4]) {
        own = {own.factor * in[1], in[3] - in[1] * own_of(in) + in[1] * own.first};
    });
    Real y = entering<true>(maps, own, (Real)0,
                            [](const Affine& map, Real after) { return map.first + map.factor * after; });
    traverse<true, 4, 2, Real>(s, load, [&](i64 t, const Real(&in)[4]) {
        const Real d = own_of(in);
        put_element<LA_WIDE>(a.ds, t * a.columns + s.column, in[0] * (in[2] + y - d));
        y = in[3] - in[1] * d + in[1] * y;
    });
    if (s.given && threadIdx.x < LANES) put_element<LA_WIDE>(a.dbegin, s.sequence * a.columns + s.column, y);
}
