// m_t = max(a_t + m_{t-1}, b_t) of a sequence and head, and the gates that it stabilises.
//
//     decay_t = a_t + m_{t-1} - m_t        write_t = e^{b_t - m_t}        least_t = e^{-m_t}
//
// The last m is rounded to float, as the state stores it. Arrays are dense (tokens, heads), m_0 (sequences, heads).
#include "arguments/ops/GaugeArguments.cuh"
#include "ops/segments.cuh"

struct Faded {   // m -> max(sum + m, most)
    double sum, most;
};
LA_DEVICE double larger_of(double b, double faded) { return b > faded ? b : faded; }

extern "C" __global__ void __launch_bounds__(SEGMENTS* LANES) gauge(const __grid_constant__ GaugeArguments x) {
    __shared__ Faded maps[SEGMENTS][LANES];
    const Segment s(x.offsets, x.T, x.heads);
    const auto load = [&](i64 t, double (&in)[2]) {
        in[0] = x.a[t * x.heads + s.column];
        in[1] = x.b[t * x.heads + s.column];
    };
    Faded own{0, -(double)__int_as_float(0x7f800000)};
    traverse<false, 2, 2, double>(
        s, load, [&](i64, const double (&in)[2]) { own = {own.sum + in[0], larger_of(in[1], in[0] + own.most)}; });
    double before = s.given ? (double)x.m_0[s.sequence * x.heads + s.column] : 0;
    before =
        entering<false>(maps, own, before, [](const Faded& map, double m) { return larger_of(map.most, map.sum + m); });
    traverse<false, 2, 2, double>(s, load, [&](i64 t, const double (&in)[2]) {
        const i64 at = t * x.heads + s.column;
        const double faded = in[0] + before;
        double most = larger_of(in[1], faded);
        if (t + 1 == s.end) most = (float)most;
        x.m[at] = most;
        x.decay[at] = (float)(faded - most);
        x.write[at] = (float)exp(in[1] - most);
        x.least[at] = (float)exp(-most);
        before = most;
    });
}
