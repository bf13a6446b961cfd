// Sums over the middle axis of dense arrays x (count, terms, width), `block` terms a block of threads, in a fixed order.
//
// A block is of one array: of[n].first is the first block of array n. It has 32 columns or fewer, and terms side by
// side, which are added in order. LA_DTYPE: of x; y (count, parts, width) has a kind of its own. Computed in float, or
// in double where LA_DTYPE is double.
#include "arguments/ops/SumsArguments.cuh"
#include "ops/element.cuh"

typedef Wide<LA_DTYPE> Real;
constexpr u32 COLUMNS = 32, AHEAD = 4;   // columns of a block; terms that are loaded together

extern "C" __global__ void __launch_bounds__(256) sums(const __grid_constant__ SumsArguments all) {
    __shared__ Real beside[256];
    u32 which = 0;
    while (which + 1 < all.count && all.of[which + 1].first <= blockIdx.x) which++;
    const SumsPart& a = all.of[which];
    const u32 own_block = blockIdx.x - a.first;
    const u32 tiles = (a.width + COLUMNS - 1) / COLUMNS, first = own_block % tiles * COLUMNS;
    const u32 columns = min(COLUMNS, a.width - first);
    const u32 rows = 256 / columns, own = threadIdx.x % columns, row = threadIdx.x / columns;
    const u32 part = own_block / tiles % a.parts, n = own_block / tiles / a.parts;
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
    put_number(a.y, a.kind, ((i64)n * a.parts + part) * a.width + first + own, sum);
}
