// Monomials of up to two channels of rows x of bfloat16, stored in bfloat16, and their transpose; a thread has a row.
// Up to two arrays x (q and k) in one launch.
//
//     phi = [constant;  linear x_i;  quadratic x_i^2, quadratic sqrt(2) x_i x_j, i < j], i by i, then zeros
//     dx_i = linear dphi_i + quadratic (2 dphi_ii x_i + sqrt(2) sum_j dphi_ij x_j)
//
// LA_DEGREES: bits 0 to 2, which degrees there are. Rows of LA_WIDTH features go through shared memory, so that
// neighbouring threads move neighbouring pieces of 16 bytes.
#include "arguments/ops/MonomialsArguments.cuh"
#include "ops/narrow_rows.cuh"

constexpr int K = LA_K, WIDTH = LA_WIDTH, ROWS = 64, PIECES = WIDTH / 8, PITCH = 16 * (PIECES | 1);
constexpr int COUNT = (LA_DEGREES & 1) + (LA_DEGREES >> 1 & 1) * K + (LA_DEGREES >> 2) * (K * (K + 1) / 2);
constexpr float ROOT = 1.41421356f;
static_assert(K % 8 == 0 && WIDTH % 8 == 0 && COUNT <= WIDTH, "whole pieces of 16 bytes");

LA_DEVICE void load_row(float (&x)[K], const FeatureRows& a, i64 row) {
    const bool valid = row < a.rows;
    const char* from = row_of(a, valid ? row : 0);
#pragma unroll
    for (int p = 0; p < K / 8; p++) {
        float part[8];
        floats_of(part, eight(from + 16 * p, valid));
#pragma unroll
        for (int i = 0; i < 8; i++) x[8 * p + i] = part[i];
    }
}

extern "C" __global__ void __launch_bounds__(ROWS, 8) monomials(const __grid_constant__ MonomialsArguments a) {
    extern __shared__ __align__(128) char memory[];
    const bool second = blockIdx.x >= a.first;
    const FeatureRows& of = a.of[second];
    const i64 begin = (i64)(blockIdx.x - (second ? a.first : 0)) * ROWS;
    const int thread = threadIdx.x, rows = (int)(of.rows - begin < ROWS ? of.rows - begin : ROWS);
    float x[K], y[8];
    load_row(x, of, begin + thread);
    char* own = memory + thread * PITCH;
    int n = 0;   // features so far
    const auto put = [&](float value) {
        y[n % 8] = value;
        if (n++ % 8 == 7) *(uint4*)(own + 2 * (n - 8)) = packed(y);
    };
    if constexpr (LA_DEGREES & 1) put(a.constant);
    if constexpr (LA_DEGREES & 2) {
#pragma unroll
        for (int i = 0; i < K; i++) put(a.linear * x[i]);
    }
    if constexpr (LA_DEGREES & 4) {
#pragma unroll
        for (int i = 0; i < K; i++) {
            const float one = a.quadratic * x[i], both = ROOT * one;
            put(one * x[i]);
#pragma unroll
            for (int j = i + 1; j < K; j++) put(both * x[j]);
        }
    }
#pragma unroll
    for (int i = COUNT; i < WIDTH; i++) put(0.f);
    __syncthreads();
    char* to = of.phi + begin * (2 * WIDTH);
    for (int i = thread; i < rows * PIECES; i += ROWS)
        *(uint4*)(to + 16 * (i64)i) = *(const uint4*)(memory + i / PIECES * PITCH + i % PIECES * 16);
}

extern "C" __global__ void __launch_bounds__(ROWS, 8) monomials_vjp(const __grid_constant__ MonomialsArguments a) {
    extern __shared__ __align__(128) char memory[];
    const bool second = blockIdx.x >= a.first;
    const FeatureRows& of = a.of[second];
    const i64 begin = (i64)(blockIdx.x - (second ? a.first : 0)) * ROWS;
    const int thread = threadIdx.x, rows = (int)(of.rows - begin < ROWS ? of.rows - begin : ROWS);
    const char* from = of.dphi + begin * (2 * WIDTH);
    for (int i = thread; i < rows * PIECES; i += ROWS)
        *(uint4*)(memory + i / PIECES * PITCH + i % PIECES * 16) = *(const uint4*)(from + 16 * (i64)i);
    float x[K], dx[K] = {}, sum[K] = {}, y[8];
    load_row(x, of, begin + thread);
    __syncthreads();
    if (thread >= rows) return;
    const char* own = memory + thread * PITCH;
    int n = LA_DEGREES & 1;   // features so far
    if (n % 8) floats_of(y, *(const uint4*)own);
    const auto take = [&]() {
        if (n % 8 == 0) floats_of(y, *(const uint4*)(own + 2 * n));
        return y[n++ % 8];
    };
    if constexpr (LA_DEGREES & 2) {
#pragma unroll
        for (int i = 0; i < K; i++) dx[i] = a.linear * take();
    }
    if constexpr (LA_DEGREES & 4) {
#pragma unroll
        for (int i = 0; i < K; i++) {
            sum[i] += ROOT * (take() * x[i]);
#pragma unroll
            for (int j = i + 1; j < K; j++) {
                const float d = take();
                sum[i] += d * x[j];
                sum[j] += d * x[i];
            }
        }
#pragma unroll
        for (int i = 0; i < K; i++) dx[i] += a.quadratic * ROOT * sum[i];
    }
    char* to = of.dx + (begin + thread) * (2 * K);
#pragma unroll
    for (int p = 0; p < K / 8; p++) {
        float part[8];
#pragma unroll
        for (int i = 0; i < 8; i++) part[i] = dx[8 * p + i];
        *(uint4*)(to + 16 * p) = packed(part);
    }
}
