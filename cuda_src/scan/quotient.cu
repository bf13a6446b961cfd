// Rows of a NORMALISED read-out divided by their sums of weights, and the gradients of both.
//
//     out = num / D        D = s + eps, or max(|s|, least); out is 0 where D is
//     dnum = dout / D      c = -<dnum, num> / D: the gradient of s; times the sign of s, and 0 where `least` is larger
//     dv = w dv'           dw += <v, dv'>: values v' = w v
//
// A warp has a row, four columns a lane at a time.
#include "arguments/matrix_state/QuotientArguments.cuh"
#include "attention/tokens.cuh"
#include "tile/reduce.cuh"
#include "tile/vec4.cuh"

#ifndef LA_WIDE   // 1: four elements of a row are one access
#define LA_WIDE 1
#endif
constexpr int V = LA_V, KIND = LA_DTYPE, PIECES = (V + 127) / 128, WARPS = 8;

struct Row {
    i64 batch, token, index;
    int head, lane;
    bool given;
    __device__ __forceinline__ Row(const QuotientArguments& a) {
        index = (i64)blockIdx.x * WARPS + threadIdx.x / 32;
        lane = threadIdx.x % 32;
        given = index < a.rows;
        head = index % a.heads;
        token = index / a.heads % a.T;
        batch = index / a.heads / a.T;
    }
    __device__ __forceinline__ char* of(const Rows& x, int piece) const {
        return x.data + batch * x.batch + token * x.token + (u32)head / (u32)x.group * x.head +
               at(piece) * bytes_of(KIND);
    }
    __device__ __forceinline__ int at(int piece) const { return piece * 128 + lane * 4; }
    __device__ __forceinline__ void load(Vec4<KIND> (&x)[PIECES], const Rows& from) const {
#pragma unroll
        for (int n = 0; n < PIECES; n++) x[n].template load<LA_WIDE>(of(from, n), V - at(n));
    }
    __device__ __forceinline__ void store(const Rows& to, const Vec4<KIND> (&x)[PIECES], float factor) const {
#pragma unroll
        for (int n = 0; n < PIECES; n++) {
            float y[4];
#pragma unroll
            for (int j = 0; j < 4; j++) y[j] = factor == 0.f ? 0.f : factor * x[n][j];
            if (LA_WIDE && at(n) < V) store_vec4<KIND>(of(to, n), y);
            if constexpr (!LA_WIDE)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (at(n) + j < V) store_element<KIND>(of(to, n) + j * bytes_of(KIND), y[j]);
        }
    }
    __device__ __forceinline__ i64 number(const QuotientArguments& a, int group) const {   // of heads / group numbers
        return (batch * a.T + token) * (a.heads / group) + head / group;
    }
};
LA_DEVICE float inner(const Vec4<KIND> (&x)[PIECES], const Vec4<KIND> (&y)[PIECES]) {
    float sum = 0.f;
#pragma unroll
    for (int n = 0; n < PIECES; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) sum += x[n][j] * y[n][j];
    return warp_sum(sum);
}
struct Divisor {
    float inverse, slope;   // 1 / D, 0 of 0; dD / ds
    __device__ __forceinline__ Divisor(const QuotientArguments& a, const Row& row) {
        const float s = a.sums[row.index];
        float D = s + a.eps;
        slope = 1.f;
        if (a.least != nullptr) {
            const float least = a.least[row.number(a, a.group)], size = fabsf(s);
            slope = size > least ? (s < 0.f ? -1.f : 1.f) : 0.f;
            D = size < least ? least : size;
        }
        inverse = D == 0.f ? 0.f : 1.f / D;
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) quotient(const __grid_constant__ QuotientArguments a) {
    const Row row(a);
    if (!row.given) return;
    Vec4<KIND> x[PIECES];
    row.load(x, a.x);
    row.store(a.y, x, Divisor(a, row).inverse);
}
extern "C" __global__ void __launch_bounds__(32 * WARPS) quotient_vjp(const __grid_constant__ QuotientArguments a) {
    const Row row(a);
    if (!row.given) return;
    Vec4<KIND> x[PIECES], u[PIECES];
    row.load(x, a.x);
    row.load(u, a.u);
    const Divisor D(a, row);
    row.store(a.y, x, D.inverse);
    const float along = inner(x, u);
    if (row.lane == 0) a.numbers[row.index] = D.inverse == 0.f ? 0.f : -D.slope * (D.inverse * along) * D.inverse;
}
extern "C" __global__ void __launch_bounds__(32 * WARPS) weights_vjp(const __grid_constant__ QuotientArguments a) {
    const Row row(a);
    if (!row.given) return;
    Vec4<KIND> x[PIECES], u[PIECES];
    row.load(x, a.x);
    row.load(u, a.u);
    row.store(a.y, x, a.sums[row.index]);
    const float along = inner(x, u);
    if (row.lane == 0) a.numbers[row.index] += along;
}
