// m_t = max(a_t + m_{t-1}, b_t) of a sequence and head, and the gates that it stabilises: a thread each.
//
//     decay_t = a_t + m_{t-1} - m_t        write_t = e^{b_t - m_t}        least_t = e^{-m_t}
//
// The last m is rounded to float, as the state stores it. Arrays are dense (tokens, heads), m_0 (sequences, heads).
#include "arguments/ops/GaugeArguments.cuh"
#include "tile/types.cuh"

extern "C" __global__ void __launch_bounds__(256) gauge(const __grid_constant__ GaugeArguments x) {
    const i64 i = (i64)blockIdx.x * 256 + threadIdx.x, n = i / x.heads, head = i - n * x.heads;
    if (n >= x.sequences) return;
    const i64 first = x.offsets == nullptr ? n * x.T : x.offsets[n],
              stop = x.offsets == nullptr ? first + x.T : x.offsets[n + 1];
    double before = x.m_0[i];
    for (i64 t = first; t < stop; t++) {
        const i64 at = t * x.heads + head;
        const double faded = x.a[at] + before, b = x.b[at];
        double most = b > faded ? b : faded;
        if (t + 1 == stop) most = (float)most;
        x.m[at] = most;
        x.decay[at] = (float)(faded - most);
        x.write[at] = (float)exp(b - most);
        x.least[at] = (float)exp(-most);
        before = most;
    }
}
