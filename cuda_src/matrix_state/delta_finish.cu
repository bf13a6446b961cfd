// The last of the portable gradients of the delta rule, a warp a token and key head:
//
//     dbeta = (dW . N) / beta^2, in float16 (dW / beta) . (N / beta)
//     dk = the gradient of k as q's scan writes it, less those of k as the other scan reads and writes it, + 2 (dW . N) k
//
// dW is dv, N what the chunks wrote. The scans are of q and dout, and of k and dW; a token's own write is in both results of
// the second and not in the delta rule, so that it is put back here. Where erase vectors of their own read the state before it
// decays (LA_BEFORE), they read what the token before left, and dk is the difference of two parts.
#include "attention/tokens.cuh"
#include "tile/reduce.cuh"

struct Gate { const float* data; i64 batch, token, head; int group, unused; };   // strides in floats

struct Arguments {
    Rows k;                                              // group: unused here, one key head a warp
    const char *written, *reads, *read_back; char* dk;   // (tokens, key heads, K)
    const char *news, *dv, *news_apart, *dv_apart;       // (tokens, heads, V); apart: over beta, or null
    Gate beta; float* dbeta;                             // dbeta: (tokens, heads)
    i64 tokens; int T, heads, key_heads, unused;
};
constexpr float SMALLEST = 1e-8f;

constexpr int PER = LA_ALIGN >= 16 ? 8 / Element::BYTES : 1;   // elements of a lane at a time

// PER neighbouring elements of 2 or 4 bytes
template <int BYTES> struct Several {
    float x[PER];
    __device__ __forceinline__ Several(const char* p, i64 at) {
        union { uint4 w[PER * BYTES / 16 + 1]; uint2 v[2]; u16 h[PER]; float f[PER]; };
        if constexpr (PER * BYTES == 16) w[0] = *(const uint4*)(p + at * BYTES);
        else if constexpr (PER * BYTES == 8) v[0] = *(const uint2*)(p + at * BYTES);
        else if constexpr (BYTES == 4) f[0] = ((const float*)p)[at];
        else h[0] = ((const u16*)p)[at];
#pragma unroll
        for (int i = 0; i < PER; i++) x[i] = BYTES == 4 ? f[i] : LA_DTYPE == 0 ? __uint_as_float((u32)h[i] << 16) : low_f16(h[i]);
    }
    __device__ __forceinline__ void store(char* p, i64 at) const {
        union { uint4 w[PER * BYTES / 16 + 1]; uint2 v[2]; u16 h[PER]; float f[PER]; };
#pragma unroll
        for (int i = 0; i < PER; i++) {
            if constexpr (BYTES == 4) f[i] = x[i];
            else h[i] = (u16)(LA_DTYPE == 0 ? pack_bf16(x[i], 0.f) : pack_f16(x[i], 0.f));
        }
        if constexpr (PER * BYTES == 16) *(uint4*)(p + at * BYTES) = w[0];
        else if constexpr (PER * BYTES == 8) *(uint2*)(p + at * BYTES) = v[0];
        else if constexpr (BYTES == 4) ((float*)p)[at] = f[0];
        else ((u16*)p)[at] = h[0];
    }
};
template <int WIDTH, class F> LA_DEVICE void each_of(int lane, F f) {
#pragma unroll
    for (int c = 0; c < WIDTH; c += 32 * PER)
        if (WIDTH % (32 * PER) == 0 || c + lane * PER < WIDTH) f(c + lane * PER);
}

extern "C" __global__ void __launch_bounds__(128) finish(const __grid_constant__ Arguments a) {
    const i64 n = ((i64)blockIdx.x * 128 + threadIdx.x) >> 5, token = n / a.key_heads;
    const int head = (int)(n % a.key_heads), lane = threadIdx.x & 31, group = a.heads / a.key_heads;
    if (token >= a.tokens) return;
    const i64 row = token / a.T;
    const int t = (int)(token % a.T);
    float all = 0.f;
    for (int h = head * group; h < (head + 1) * group; h++) {
        const i64 at = (token * a.heads + h) * LA_V;
        auto dot = [&](const char* x, const char* y) {
            float sum = 0.f;
            each_of<LA_V>(lane, [&](int c) {
                const Several<Element::BYTES> one(x, at + c), other(y, at + c);
#pragma unroll
                for (int i = 0; i < PER; i++) sum += one.x[i] * other.x[i];
            });
            return warp_sum(sum);
        };
        const float sum = dot(a.news, a.dv);
        const float given = a.beta.data[row * a.beta.batch + t * a.beta.token + h / a.beta.group * a.beta.head], beta = given < SMALLEST ? SMALLEST : given;
        const float dbeta = a.news_apart ? dot(a.news_apart, a.dv_apart) : sum / beta / beta;
        if (lane == 0) a.dbeta[token * a.heads + h] = dbeta;
        all += sum;
    }
    constexpr int PART = LA_PARTS;   // bytes of an element of the parts of dk
    const char* k = a.k.data + row * a.k.batch + t * a.k.token + head * a.k.head;
    const i64 at = n * LA_K;
    each_of<LA_K>(lane, [&](int c) {
        Several<PART> sum(a.written, at + c);
        const Several<PART> z(a.read_back, at + c);
#pragma unroll
        for (int i = 0; i < PER; i++) sum.x[i] -= z.x[i];
        if (!LA_BEFORE) {
            const Several<PART> y(a.reads, at + c);
            const Several<Element::BYTES> own(k, c);
#pragma unroll
            for (int i = 0; i < PER; i++) sum.x[i] += 2.f * all * own.x[i] - y.x[i];
        }
        sum.store(a.dk, at + c);
    });
}
