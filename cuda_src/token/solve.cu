// The systems of a SOLVED read-out for one token: one block a head.
//
//     Z_t = e^g Z_{t-1} + beta k^T k        x (Z_t + diag(ridge)) = q
//
// LA_ITERATIONS 0: by elimination, without pivots, for the matrix is positive definite; else that many steps of
// conjugate gradients at most, from x = 0, until |q - x A|^2 <= enough |q|^2. All arrays are dense: rows (heads, K),
// numbers (heads). M in shared memory is the transpose of the matrix: row j is column j of it, K + 1 or K + 2
// floats, an odd number.
#include "tile/types.cuh"
#include "arguments/matrix_state/SolveArguments.cuh"

constexpr int K = LA_K, LD = K | 1, THREADS = 256, WARPS = THREADS / 32;

LA_DEVICE float warp_total(float x) {
#pragma unroll
    for (int n = 16; n; n /= 2) x += __shfl_xor_sync(0xffffffffu, x, n);
    return x;
}
// the sum over the block, in all threads
LA_DEVICE float total(float x, float* parts) {
    x = warp_total(x);
    __syncthreads();   // parts have been read
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += parts[w];
    return sum;
}
LA_DEVICE float over(float x, float y) { return x / (y == 0.f ? 1.f : y); }

// x of this thread; b: its q
LA_DEVICE float eliminate(float* M, float* b) {
    const int row = threadIdx.x / 32, column = threadIdx.x % 32;
    for (int c = 0; c < K; c++) {
        __syncthreads();
        const float pivot = 1.f / M[c * LD + c];
        for (int r = c + 1 + row; r < K; r += WARPS) {
            const float f = M[r * LD + c] * pivot;
            for (int j = c + 1 + column; j < K; j += 32) M[r * LD + j] -= f * M[c * LD + j];
            if (column == 0) b[r] -= f * b[c];
        }
    }
    for (int c = K - 1; c >= 0; c--) {
        __syncthreads();
        const float x = b[c] / M[c * LD + c];
        if (threadIdx.x < c) b[threadIdx.x] -= M[threadIdx.x * LD + c] * x;
    }
    __syncthreads();
    return threadIdx.x < K ? b[threadIdx.x] / M[threadIdx.x * LD + threadIdx.x] : 0.f;
}
LA_DEVICE float iterate(const float* M, float* shared_p, float* parts, float q, float enough) {
    const bool own = threadIdx.x < K;
    float x = 0.f, r = q, p = q, rr = total(r * r, parts);
    enough *= rr;
    for (int n = 0; n < LA_ITERATIONS; n++) {
        if (rr <= enough) break;   // NaN goes on
        __syncthreads();
        if (own) shared_p[threadIdx.x] = p;
        __syncthreads();
        float pA = 0.f;
        if (own)
#pragma unroll 8
            for (int i = 0; i < K; i++) pA = fmaf(shared_p[i], M[threadIdx.x * LD + i], pA);
        const float step = over(rr, total(p * pA, parts)), before = rr;
        x += step * p;
        r -= step * pA;
        rr = total(r * r, parts);
        p = r + over(rr, before) * p;
    }
    return x;
}

extern "C" __global__ void __launch_bounds__(THREADS) solve(const __grid_constant__ SolveArguments a) {
    extern __shared__ float M[];
    __shared__ float q[K], k[K], parts[WARPS];
    const i64 head = blockIdx.x, first = head * K;
    const int t = threadIdx.x;
    if (t < K) q[t] = a.q[first + t], k[t] = a.k[first + t];
    __syncthreads();
    const float decay = a.g == nullptr ? 1.f : expf(a.g[head]), beta = a.beta[head];
    for (int n = t; n < K * K; n += THREADS) {
        const int r = n / K, c = n % K;
        const float begin = a.start == nullptr ? 0.f : decay * a.start[first * K + n],
                    z = fmaf(k[r], beta * k[c], begin);
        a.end[first * K + n] = z;
        M[c * LD + r] = r == c ? z + a.ridge[first + r] : z;
    }
    __syncthreads();
    const float x = LA_ITERATIONS ? iterate(M, k, parts, t < K ? q[t] : 0.f, a.enough) : eliminate(M, q);
    if (t < K) a.x[first + t] = x;
}
