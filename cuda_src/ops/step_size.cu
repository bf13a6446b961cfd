// Mamba-2's step size dt: values and log decays from it, the last step of an output, and the gradients of both.
//
//     dt <- clip(dt + bias, or softplus of it);  v = dt x;  g = dt A             step_size
//     out <- (out + D x) silu(z), D of the head or of the row                    finish, finish_vjp
//     dx = dt dv + D dout, and the terms of the gradients of dt, A and D     step_size_vjp
//
// LA_LANES lanes hold a row (a token's head) of LA_K numbers. Sums over tokens are those of sums.cu.
#include "arguments/ops/StepSizeArguments.cuh"
#include "attention/row_pieces.cuh"
#include "ops/formulas.cuh"

struct Row {   // of a lane: which, where, and whether it is one
    u32 n, head, lane;
    bool valid;
    __device__ __forceinline__ explicit Row(const StepSizeArguments& a) {
        n = blockIdx.x * (256 / LA_LANES) + threadIdx.x / LA_LANES;
        valid = n < a.rows;   // all lanes take part in the sums
        if (!valid) n = 0;
        head = n % a.heads;
        lane = threadIdx.x % LA_LANES;
    }
    __device__ __forceinline__ const char* of(const Rows& x, const StepSizeArguments& a) const {
        const u32 token = n / a.heads;
        return x.data + token / a.T * x.batch + token % a.T * x.token + head * x.head;
    }
    __device__ __forceinline__ i64 dense(u32 at) const { return (i64)n * LA_K + at; }
};
template <class F> LA_DEVICE void pieces(const Row& row, F f) {   // f(piece, where it begins), of those that exist
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        const u32 at = (p * LA_LANES + row.lane) * LA_PER;
        if (at < LA_K) f(p, at);
    }
}

struct Step {
    float raw, soft, dt;   // NaN stays NaN
    __device__ __forceinline__ Step(const StepSizeArguments& a, const Row& row) {
        if (a.dt_kind == 2) raw = ((const float*)a.dt)[row.n];
        else raw = a.dt_kind == 0 ? low_bf16(((const u16*)a.dt)[row.n]) : low_f16(((const u16*)a.dt)[row.n]);
        if (a.bias) raw += a.bias[row.head];
        soft = a.soft ? fmaxf(raw, 0.f) + log1pf(expf(-fabsf(raw))) : raw;
        if (raw != raw) soft = raw;
        dt = soft < a.low ? a.low : soft > a.high ? a.high : soft;
    }
};

extern "C" __global__ void __launch_bounds__(256) step_size(const __grid_constant__ StepSizeArguments a) {
    const Row row(a);
    if (!row.valid) return;
    const Step step(a, row);
    const char* from = row.of(a.x, a);
    pieces(row, [&](int, u32 at) {
        float x[LA_PER];
        load<LA_DTYPE>(x, from + at * Element::BYTES);
#pragma unroll
        for (int i = 0; i < LA_PER; i++) x[i] *= step.dt;
        store<LA_DTYPE>(a.y + row.dense(at) * Element::BYTES, x);
    });
    if (row.lane == 0) a.g[row.n] = step.dt * a.A[row.head];
}

// ddt = (<dv, x> + dg A) where dt was not clipped, times sigmoid(raw) behind a softplus
extern "C" __global__ void __launch_bounds__(256) step_size_vjp(const __grid_constant__ StepSizeArguments a) {
    const Row row(a);
    const Step step(a, row);
    const char* from = row.of(a.x, a);
    const float D = a.dout ? a.D[row.head] : 0.f;
    float dot = 0.f, skipped = 0.f;
    pieces(row, [&](int, u32 at) {
        float x[LA_PER], dx[LA_PER], dout[LA_PER];
        load<LA_DTYPE>(x, from + at * Element::BYTES);
        load<LA_GRAD>(dx, a.other + row.dense(at) * GRAD_BYTES);
        if (a.dout) load<LA_DTYPE>(dout, a.dout + row.dense(at) * Element::BYTES);
#pragma unroll
        for (int i = 0; i < LA_PER; i++) {
            dot += dx[i] * x[i];
            dx[i] *= step.dt;
        }
        if (a.dout) {
#pragma unroll
            for (int i = 0; i < LA_PER; i++) {
                skipped += dout[i] * x[i];
                dx[i] += D * dout[i];
            }
        }
        if (row.valid) store<LA_DTYPE>(a.dx + row.dense(at) * Element::BYTES, dx);
    });
    dot = row_sum(dot);
    skipped = row_sum(skipped);
    if (row.lane || !row.valid) return;
    const float dg = a.dg[row.n];
    const bool inside = step.soft >= a.low && step.soft <= a.high;
    const float ddt = inside ? dot + dg * a.A[row.head] : 0.f;
    a.ddt[row.n] = a.soft ? ddt * sigmoid(step.raw) : ddt;
    a.dA[row.n] = dg * step.dt;
    if (a.dout) a.dD[row.n] = skipped;
}

extern "C" __global__ void __launch_bounds__(256) finish(const __grid_constant__ StepSizeArguments a) {
    const Row row(a);
    if (!row.valid) return;
    const float D = a.D ? a.D[a.D_by_rows ? row.n : row.head] : 0.f;
    pieces(row, [&](int, u32 at) {
        float y[LA_PER], x[LA_PER];
        load<LA_GRAD>(y, a.other + row.dense(at) * GRAD_BYTES);
        if (a.D) {
            load<LA_DTYPE>(x, row.of(a.x, a) + at * Element::BYTES);
#pragma unroll
            for (int i = 0; i < LA_PER; i++) y[i] += D * x[i];
        }
        if (a.z.data) {
            load<LA_DTYPE>(x, row.of(a.z, a) + at * Element::BYTES);
#pragma unroll
            for (int i = 0; i < LA_PER; i++) y[i] *= x[i] * sigmoid(x[i]);
        }
        store<LA_DTYPE>(a.y + row.dense(at) * Element::BYTES, y);
    });
}

// y = dout silu(z), dz = dout (out + D x) silu'(z)
extern "C" __global__ void __launch_bounds__(256) finish_vjp(const __grid_constant__ StepSizeArguments a) {
    const Row row(a);
    if (!row.valid) return;
    const float D = a.D ? a.D[a.D_by_rows ? row.n : row.head] : 0.f;
    pieces(row, [&](int, u32 at) {
        float y[LA_PER], x[LA_PER] = {}, z[LA_PER], dz[LA_PER];
        load<LA_DTYPE>(y, a.dout + row.dense(at) * Element::BYTES);
        if (a.D) load<LA_DTYPE>(x, row.of(a.x, a) + at * Element::BYTES);
        load<LA_DTYPE>(z, row.of(a.z, a) + at * Element::BYTES);
        load<LA_GRAD>(dz, a.other + row.dense(at) * GRAD_BYTES);
#pragma unroll
        for (int i = 0; i < LA_PER; i++) {
            const float s = sigmoid(z[i]);
            dz[i] = y[i] * (dz[i] + D * x[i]) * s * (1.f + z[i] * (1.f - s));
            y[i] *= z[i] * s;
        }
        store<LA_DTYPE>(a.dz + row.dense(at) * Element::BYTES, dz);
        store<LA_DTYPE>(a.y + row.dense(at) * Element::BYTES, y);
    });
}
