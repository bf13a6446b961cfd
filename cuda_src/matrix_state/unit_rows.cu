// Rows divided by their length, y = x / |x|, and the gradient, dx = (dy - y <y, dy>) / |x|; a row of zeros stays as it is.
//
// LA_LANES lanes hold a row, LA_PER numbers at a time; up to two arrays (q and k) in one launch. Sums are float32.
#include "attention/tokens.cuh"

constexpr int PIECES = (LA_K + LA_PER * LA_LANES - 1) / (LA_PER * LA_LANES);   // of a lane
constexpr int GRAD_BYTES = LA_GRAD == 2 ? 4 : 2;

struct Array { Rows x; const char* dy; char* y; u32 rows, T, heads, unused; };   // dy, y: contiguous; rows: B T heads
struct Arguments { Array of[2]; u32 first, unused; };                            // blocks of the first array

template <int SIZE> struct alignas(SIZE) Piece { u32 w[SIZE / 4]; };
template <> struct Piece<2> { u16 w; };

template <int DTYPE> LA_DEVICE float number(u32 bits) { return DTYPE == 0 ? low_bf16(bits) : low_f16(bits); }
template <int DTYPE> LA_DEVICE u32 pack(float lo, float hi) { return DTYPE == 0 ? pack_bf16(lo, hi) : pack_f16(lo, hi); }

template <int DTYPE> LA_DEVICE void load(float (&x)[LA_PER], const char* from) {
    constexpr int SIZE = LA_PER * (DTYPE == 2 ? 4 : 2), STEP = SIZE < 16 ? SIZE : 16;
    if constexpr (STEP == 2) x[0] = number<DTYPE>(((const Piece<2>*)from)->w);
    else
#pragma unroll
        for (int n = 0; n < SIZE / STEP; n++) {
            const Piece<STEP> p = ((const Piece<STEP>*)from)[n];
#pragma unroll
            for (int i = 0; i < STEP / 4; i++) {
                const int at = n * STEP / 4 + i;
                if constexpr (DTYPE == 2) x[at] = __uint_as_float(p.w[i]);
                else {
                    x[2 * at] = number<DTYPE>(p.w[i]);
                    x[2 * at + 1] = DTYPE == 0 ? high_bf16(p.w[i]) : high_f16(p.w[i]);
                }
            }
        }
}
template <int DTYPE> LA_DEVICE void store(char* to, const float (&x)[LA_PER]) {
    constexpr int SIZE = LA_PER * (DTYPE == 2 ? 4 : 2);
    if constexpr (SIZE == 2) ((Piece<2>*)to)->w = (u16)pack<DTYPE>(x[0], 0.f);
    else {
        Piece<SIZE> p;
#pragma unroll
        for (int i = 0; i < SIZE / 4; i++) {
            if constexpr (DTYPE == 2) p.w[i] = __float_as_uint(x[i]);
            else p.w[i] = pack<DTYPE>(x[2 * i], x[2 * i + 1]);
        }
        *(Piece<SIZE>*)to = p;
    }
}
LA_DEVICE float row_sum(float x) {
#pragma unroll
    for (int d = LA_LANES / 2; d; d >>= 1) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}

template <bool VJP> LA_DEVICE void divide(const Arguments& a) {
    const bool second = blockIdx.x >= a.first;
    const Array& of = a.of[second];
    const u32 n = (blockIdx.x - (second ? a.first : 0)) * (256 / LA_LANES) + threadIdx.x / LA_LANES;
    const bool mine = n < of.rows;   // all lanes take part in the sums
    const u32 row = mine ? n : 0, lane = threadIdx.x % LA_LANES;
    const u32 head = row % of.heads, token = row / of.heads;
    const char* from = of.x.data + token / of.T * of.x.batch + token % of.T * of.x.token + head * of.x.head;
    float x[PIECES][LA_PER] = {}, dy[VJP ? PIECES : 1][LA_PER] = {}, square = 0.f, product = 0.f;
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        const u32 at = (p * LA_LANES + lane) * LA_PER;
        if (at < LA_K) {
            load<LA_DTYPE>(x[p], from + at * Element::BYTES);
            if constexpr (VJP) load<LA_GRAD>(dy[p], of.dy + ((i64)row * LA_K + at) * GRAD_BYTES);
        }
#pragma unroll
        for (int i = 0; i < LA_PER; i++) {
            square += x[p][i] * x[p][i];
            if constexpr (VJP) product += x[p][i] * dy[p][i];
        }
    }
    square = row_sum(square);
    const float over = square == 0.f ? 1.f : 1.f / sqrtf(square);   // NaN stays NaN
    float share = 0.f;
    if constexpr (VJP) share = -row_sum(product) * over * over;
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        const u32 at = (p * LA_LANES + lane) * LA_PER;
#pragma unroll
        for (int i = 0; i < LA_PER; i++) x[p][i] = (VJP ? share * x[p][i] + dy[VJP ? p : 0][i] : x[p][i]) * over;
        if (mine && at < LA_K) store<LA_DTYPE>(of.y + ((i64)row * LA_K + at) * Element::BYTES, x[p]);
    }
}

extern "C" __global__ void __launch_bounds__(256) unit_rows(const __grid_constant__ Arguments a) { divide<false>(a); }
extern "C" __global__ void __launch_bounds__(256) unit_rows_vjp(const __grid_constant__ Arguments a) { divide<true>(a); }
