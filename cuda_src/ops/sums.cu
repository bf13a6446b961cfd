// Sums over the middle axis of a dense x (count, terms, width), `block` terms a block of threads, in a fixed order.
//
// A block has 32 columns or fewer, and terms side by side, which are added in order. LA_DTYPE: of x, LA_OUT: of y
// (count, parts, width). Computed in float, or in double where LA_DTYPE is double.
#include "arguments/ops/SumsArguments.cuh"
#include "ops/element.cuh"

typedef Wide<LA_DTYPE> Real;
constexpr u32 COLUMNS = 32, AHEAD = 4;   // columns of a block; terms that are loaded together

extern "C" __global__ void __launch_bounds__(256) sums(const __grid_constant__ SumsArguments a) {
    __shared__ Real beside[256];
    const u32 tiles = (a.width + COLUMNS - 1) / COLUMNS, first = blockIdx.x % tiles * COLUMNS;
    const u32 columns = min(COLUMNS, a.width - first);
    const u32 rows = 256 / columns, own = threadIdx.x % columns, row = threadIdx.x / columns;
    const u32 part = blockIdx.x / tiles % a.parts, n = blockIdx.x / tiles / a.parts;
    const u32 begin = part * a.block, end = min(begin + a.block, a.terms);
    const i64 from = (i64)n * a.terms * a.width + first + own;
    Real sum = 0;
    if (row < rows)
        for (u32 t = begin + row; t < end; t += AHEAD * rows) {
            Real x[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                x[i] = t + i * rows < end ? element<LA_DTYPE>(a.x, from + (i64)(t + i * rows) * a.width) : (Real)0;
#pragma unroll
            for (int i = 0; i < AHEAD; i++) sum += x[i];
        }
    beside[threadIdx.x] = sum;
    __syncthreads();
    if (row) return;
    for (u32 r = 1; r < rows; r++) sum += beside[r * columns + own];
    put_element<LA_OUT>(a.y, ((i64)n * a.parts + part) * a.width + first + own, sum);
}
