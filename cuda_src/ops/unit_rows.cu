// Rows divided by their length, y = x / n, and the gradient, dx = (dy - y <y, dy>) / n, n = sqrt(|x|^2 + root^2); n = 0
// counts as 1.
//
// LA_LANES lanes hold a row, LA_PER numbers at a time; up to two arrays (q and k) in one launch. Sums are float32; a
// row whose squares would vanish or overflow is multiplied by a power of 2 first.
#include "arguments/ops/UnitRowsArguments.cuh"
#include "attention/row_pieces.cuh"

// |x|^2 and, of a gradient, <x, dy> of a row
template <bool VJP>
LA_DEVICE void row_sums(const float (&x)[PIECES][LA_PER], const float (&dy)[VJP ? PIECES : 1][LA_PER], float& square,
                        float& product) {
    square = product = 0.f;
#pragma unroll
    for (int p = 0; p < PIECES; p++)
#pragma unroll
        for (int i = 0; i < LA_PER; i++) {
            square += x[p][i] * x[p][i];
            if constexpr (VJP) product += x[p][i] * dy[p][i];
        }
    square = row_sum(square);
    if constexpr (VJP) product = row_sum(product);
}

template <bool VJP> LA_DEVICE void divide(const UnitRowsArguments& a) {
    const bool second = blockIdx.x >= a.first;
    const UnitRowsArray& of = a.of[second];
    const u32 n = (blockIdx.x - (second ? a.first : 0)) * (256 / LA_LANES) + threadIdx.x / LA_LANES;
    const bool valid = n < of.rows;   // all lanes take part in the sums
    const u32 row = valid ? n : 0, lane = threadIdx.x % LA_LANES;
    const u32 head = row % of.heads, token = row / of.heads;
    const char* from = of.x.data + token / of.T * of.x.batch + token % of.T * of.x.token + head * of.x.head;
    float x[PIECES][LA_PER] = {}, dy[VJP ? PIECES : 1][LA_PER] = {}, square, product;
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        const u32 at = (p * LA_LANES + lane) * LA_PER;
        if (at < LA_K) {
            load<LA_DTYPE>(x[p], from + at * Element::BYTES);
            if constexpr (VJP) load<LA_GRAD>(dy[p], of.dy + ((i64)row * LA_K + at) * GRAD_BYTES);
        }
    }
    row_sums<VJP>(x, dy, square, product);
    square += a.root * a.root;
    float factor = square < 0x1p-100f  ? 0x1p100f
                   : square > 0x1p100f ? 0x1p-75f
                                       : 1.f;       // the same in all lanes of a row
    if (__any_sync(0xffffffffu, factor != 1.f)) {   // all lanes of a warp take part in the sums
#pragma unroll
        for (int p = 0; p < PIECES; p++)
#pragma unroll
            for (int i = 0; i < LA_PER; i++) x[p][i] *= factor;
        row_sums<VJP>(x, dy, square, product);
        square += a.root * factor * (a.root * factor);
        if (square == 0.f) factor = 1.f;
    }
    const float over = square == 0.f ? 1.f : 1.f / sqrtf(square);   // NaN stays NaN
    float share = 0.f;
    if constexpr (VJP) share = -product * over * over;
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        const u32 at = (p * LA_LANES + lane) * LA_PER;
#pragma unroll
        for (int i = 0; i < LA_PER; i++)
            x[p][i] = (VJP ? (share * x[p][i] + dy[VJP ? p : 0][i]) * over * factor : x[p][i] * over);
        if (valid && at < LA_K) store<LA_DTYPE>(of.y + ((i64)row * LA_K + at) * Element::BYTES, x[p]);
    }
}

extern "C" __global__ void __launch_bounds__(256) unit_rows(const __grid_constant__ UnitRowsArguments a) {
    divide<false>(a);
}
extern "C" __global__ void __launch_bounds__(256) unit_rows_vjp(const __grid_constant__ UnitRowsArguments a) {
    divide<true>(a);
}
