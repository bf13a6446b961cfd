// AdamW on vectors, in place, and the norm of the gradient before it; linattn_np/ops/optimisers.py has the equations.
//
// `squares`: sums of squares of g in double, one of each block. `scaled`, one block: the norm, and what g is multiplied
// by, min(1, most / norm). `adamw`: m, v, the parameters p, and where these have 16 bits (LA_DTYPE < 2) their float
// masters, of which p is the nearest. The order of all sums depends on `size` alone. Where the norm is not finite,
// `adamw` writes nothing.
//
// The numbers of a step lie in memory, so that a CUDA graph repeats it with others: rate, first = 1 / (1 - a^t), second
// = (1 - b^t)^{-1/2}, most; norm, scale. LA_PER: numbers that a thread moves together, 1 where addresses are not
// multiples of 16.
#include "arguments/ops/OptimiserArguments.cuh"
#include "ops/element.cuh"

constexpr int THREADS = 256;
constexpr double LARGEST = 0x1.fffffffffffffp1023;
typedef Wide<LA_DTYPE> Real;
constexpr int MASTER = LA_DTYPE == 3 ? 3 : 2;   // the kind of m, v and masters
enum { RATE, FIRST, SECOND, MOST, NORM, SCALE };

template <int KIND> LA_DEVICE const char* at(const char* from, i64 n) { return from + n * bytes_of(KIND); }
template <int KIND> LA_DEVICE char* at(char* to, i64 n) { return to + n * bytes_of(KIND); }

// the sum over a block of N threads, in thread 0
template <int N> LA_DEVICE double block_sum(double x) {
    __shared__ double beside[N];
    beside[threadIdx.x] = x;
    for (int half = N / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) beside[threadIdx.x] += beside[threadIdx.x + half];
    }
    return beside[0];
}

template <int N> LA_DEVICE void add_squares(double& sum, const char* g, i64 n) {
    double x[N];
    load_elements<LA_GRAD, N>(x, at<LA_GRAD>(g, n));
#pragma unroll
    for (int i = 0; i < N; i++) sum = fma(x[i], x[i], sum);
}

extern "C" __global__ void __launch_bounds__(THREADS) squares(const __grid_constant__ OptimiserArguments a) {
    const i64 first = (i64)blockIdx.x * THREADS + threadIdx.x, whole = a.size / LA_PER;
    double sum = 0;
    for (i64 n = first; n < whole; n += (i64)gridDim.x * THREADS) add_squares<LA_PER>(sum, a.g, n * LA_PER);
    if (whole * LA_PER + first < a.size) add_squares<1>(sum, a.g, whole * LA_PER + first);
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0) a.sums[blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) scaled(const __grid_constant__ OptimiserArguments a) {
    double sum = 0;
    for (u32 n = threadIdx.x; n < a.blocks; n += THREADS) sum += a.sums[n];
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x) return;
    const double norm = sqrt(sum), most = a.numbers[MOST];
    a.numbers[NORM] = norm;
    a.numbers[SCALE] = norm > most ? most / norm : 1;
}

// the factors of a step, the same of all numbers
struct Step {
    Real scale, keep, rate, second;
};

template <int N> LA_DEVICE void step(const OptimiserArguments& a, const Step& s, i64 n) {
    Real p[N], g[N], m[N], v[N];
    char* const master = LA_DTYPE < 2 ? a.master : a.p;
    load_elements<MASTER, N>(p, at<MASTER>(master, n));
    load_elements<LA_GRAD, N>(g, at<LA_GRAD>(a.g, n));
    load_elements<MASTER, N>(m, at<MASTER>(a.m, n));
    load_elements<MASTER, N>(v, at<MASTER>(a.v, n));
#pragma unroll
    for (int i = 0; i < N; i++) {
        const Real x = s.scale * g[i];
        m[i] += (Real)a.a * (x - m[i]);
        v[i] += (Real)a.b * (x * x - v[i]);
        p[i] = (n + i < a.decaying ? s.keep : (Real)1) * p[i] - s.rate * m[i] / (sqrt(v[i]) * s.second + (Real)a.eps);
    }
    store_elements<MASTER, N>(at<MASTER>(master, n), p);
    store_elements<MASTER, N>(at<MASTER>(a.m, n), m);
    store_elements<MASTER, N>(at<MASTER>(a.v, n), v);
    if constexpr (LA_DTYPE < 2) store_elements<LA_DTYPE, N>(at<LA_DTYPE>(a.p, n), p);
}

extern "C" __global__ void __launch_bounds__(THREADS) adamw(const __grid_constant__ OptimiserArguments a) {
    if (!(a.numbers[NORM] <= LARGEST)) return;
    const double rate = a.numbers[RATE];
    const Step s = {(Real)a.numbers[SCALE], (Real)(1 - rate * a.decay), (Real)(rate * a.numbers[FIRST]),
                    (Real)a.numbers[SECOND]};
    const i64 first = (i64)blockIdx.x * THREADS + threadIdx.x, whole = a.size / LA_PER;
    if (first < whole) step<LA_PER>(a, s, first * LA_PER);
    else if (whole * LA_PER + first - whole < a.size) step<1>(a, s, whole * LA_PER + first - whole);
}
