// Pairs of channels of heads rotated by angles of their token, and the gradient of the angles.
//
//     (a, b) -> (a c - b s, b c + a s)      LA_BACK: by the opposite angles
//     dangle = y_a dy_b - y_b dy_a, the sum over the heads that share it
//
// Pairs are (p, P + p), or (2 p, 2 p + 1) with LA_INTERLEAVED; channels from 2 P on stay. A thread has LA_PER pairs of
// up to HEADS heads of a token: their angles are read once.
#include "arguments/ops/RotaryArguments.cuh"
#include "ops/element.cuh"

#if LA_DOUBLE
typedef double Real;
#else
typedef float Real;
#endif
constexpr int HEADS = 4, PER = LA_PER, ANGLE_KIND = LA_DOUBLE ? 3 : 2;
constexpr int FIRST = LA_INTERLEAVED ? 2 * PER : PER;   // neighbours that are moved together
typedef Real Numbers[PER];

template <int KIND> struct Pairs {   // of a head
    Loaded<KIND, FIRST> one;
    Loaded<KIND, LA_INTERLEAVED ? 1 : PER> other;
    __device__ __forceinline__ void load(const char* head, int p, int P) {
        one.load(head + p * (LA_INTERLEAVED ? 2 : 1) * bytes_of(KIND));
        if constexpr (!LA_INTERLEAVED) other.load(head + (P + p) * bytes_of(KIND));
    }
    __device__ __forceinline__ void get(Numbers& a, Numbers& b) const {
        if constexpr (LA_INTERLEAVED) {
            Real x[FIRST];
            one.get(x);
#pragma unroll
            for (int i = 0; i < PER; i++) {
                a[i] = x[2 * i];
                b[i] = x[LA_INTERLEAVED ? 2 * i + 1 : 0];
            }
        } else {
            one.get(a);
            other.get(b);
        }
    }
};
struct Rotation {
    Numbers c, s;
    __device__ __forceinline__ void load(const RotaryArguments& a, u32 token, u32 head, int p) {
        const i64 at = (i64)(token % a.period) * a.step + (i64)head * a.P + p;
        load_elements<ANGLE_KIND, PER>(c, (const char*)a.cos + at * bytes_of(ANGLE_KIND));
        load_elements<ANGLE_KIND, PER>(s, (const char*)a.sin + at * bytes_of(ANGLE_KIND));
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (LA_BACK) s[i] = -s[i];
    }
};

extern "C" __global__ void __launch_bounds__(256) rotate(const __grid_constant__ RotaryArguments a) {
    const u32 packets = a.P / PER, each = packets + (a.K - 2 * a.P) / PER, groups = (a.heads + HEADS - 1) / HEADS;
    const i64 n = (i64)blockIdx.x * 256 + threadIdx.x, row = n / each;
    const u32 packet = (u32)(n % each), first = (u32)(row % groups) * HEADS, token = (u32)(row / groups);
    if (row >= (i64)a.tokens * groups) return;
    const char* from = a.x.data + token * a.x.outer + first * a.x.inner;
    char* to = a.y + ((i64)token * a.heads + first) * a.K * bytes_of(LA_DTYPE);
    const int count = min(HEADS, (int)(a.heads - first)), size = a.K * bytes_of(LA_DTYPE);
    if (packet >= packets) {   // channels that stay
        const int at = (2 * a.P + (packet - packets) * PER) * bytes_of(LA_DTYPE);
        for (int h = 0; h < count; h++) {
            Numbers x;
            load_elements<LA_DTYPE, PER>(x, from + h * a.x.inner + at);
            store_elements<LA_DTYPE, PER>(to + h * size + at, x);
        }
        return;
    }
    const int p = packet * PER;
    Pairs<LA_DTYPE> x[HEADS];
    Rotation rotation;
#pragma unroll
    for (int h = 0; h < HEADS; h++)
        if (h < count) x[h].load(from + h * a.x.inner, p, a.P);
    rotation.load(a, token, a.angle_heads == 1 ? 0 : first, p);
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        if (h >= count) return;
        if (h && a.angle_heads > 1) rotation.load(a, token, first + h, p);
        Numbers one, other;
        Real both[2 * PER];
        x[h].get(one, other);
#pragma unroll
        for (int i = 0; i < PER; i++) {
            const Real u = one[i] * rotation.c[i] - other[i] * rotation.s[i],
                       v = other[i] * rotation.c[i] + one[i] * rotation.s[i];
            both[LA_INTERLEAVED ? 2 * i : i] = u;
            both[LA_INTERLEAVED ? 2 * i + 1 : PER + i] = v;
        }
        if constexpr (LA_INTERLEAVED)
            store_elements<LA_DTYPE, 2 * PER>(to + h * size + 2 * p * bytes_of(LA_DTYPE), both);
        else {
            store_elements<LA_DTYPE, PER>(to + h * size + p * bytes_of(LA_DTYPE), *(const Numbers*)both);
            store_elements<LA_DTYPE, PER>(to + h * size + (a.P + p) * bytes_of(LA_DTYPE),
                                          *(const Numbers*)(both + PER));
        }
    }
}

// A thread has LA_PER angles, and adds the heads that share them in order.
extern "C" __global__ void __launch_bounds__(256) angles(const __grid_constant__ RotaryArguments a) {
    const u32 packets = a.P / PER, share = a.heads / a.angle_heads;
    const i64 n = (i64)blockIdx.x * 256 + threadIdx.x, row = n / packets;
    const int p = (int)(n % packets) * PER;
    if (row >= (i64)a.tokens * a.angle_heads) return;
    const u32 token = (u32)(row / a.angle_heads), own = (u32)(row % a.angle_heads);
    Rotation rotation;
    rotation.load(a, token, own, p);
    Numbers sum = {};
    for (u32 h = 0; h < share; h++) {
        Pairs<LA_DTYPE> x;
        Pairs<LA_GRAD> dy;
        Numbers one, other, done, dother;
        x.load(a.x.data + token * a.x.outer + (own + h) * a.x.inner, p, a.P);
        dy.load(a.dy.data + token * a.dy.outer + (own + h) * a.dy.inner, p, a.P);
        x.get(one, other);
        dy.get(done, dother);
#pragma unroll
        for (int i = 0; i < PER; i++) {
            const Real u = one[i] * rotation.c[i] - other[i] * rotation.s[i],
                       v = other[i] * rotation.c[i] + one[i] * rotation.s[i];
            sum[i] += u * dother[i] - v * done[i];
        }
    }
    store_elements<ANGLE_KIND, PER>(a.y + (row * a.P + p) * bytes_of(ANGLE_KIND), sum);
}
