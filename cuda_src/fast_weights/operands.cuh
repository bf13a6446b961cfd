// Operands of products out of rows in shared memory, ROW floats apart. LA_EXACT 1: products of float32, else of tf32.
// ROUNDED: the numbers are those of tf32 already.
#pragma once
#include "tile/mma.cuh"

#if LA_EXACT
typedef Float32 Element;
#else
typedef Tfloat32 Element;
#endif
typedef Element::A OperandA;
typedef Element::B OperandB;

struct Lane {   // the place of a lane in operands
    int g, j;
};
LA_DEVICE Lane own_place() { return {(int)threadIdx.x % 32 / 4, (int)threadIdx.x % 4}; }

template <bool ROUNDED> LA_DEVICE OperandB column_of(const float (&f)[4]) {
#if !LA_EXACT
    if constexpr (ROUNDED)
        return {{__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]), __float_as_uint(f[3])}};
#endif
    return Element::column(f);
}
// A = x (16 rows, 16 columns)
template <int ROW> LA_DEVICE OperandA rows_a(const float* x, const Lane& l) {
    const float* from = x + l.g * ROW + 2 * l.j;
    const float2 a = *(const float2*)from, b = *(const float2*)(from + 8 * ROW), c = *(const float2*)(from + 8),
                 d = *(const float2*)(from + 8 * ROW + 8);
    const float f[8] = {a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y};
    return Element::operand(f);
}
// A = x^T
template <int ROW> LA_DEVICE OperandA columns_a(const float* x, const Lane& l) {
    float f[8];
#pragma unroll
    for (int i = 0; i < 8; i++) f[i] = x[(2 * l.j + (i & 1) + (i & 4) * 2) * ROW + l.g + (i & 2) * 4];
    return Element::operand(f);
}
// A = two accumulators side by side
LA_DEVICE OperandA operand_of(const float (&x)[4], const float (&y)[4]) {
    const float f[8] = {x[0], x[1], x[2], x[3], y[0], y[1], y[2], y[3]};
    return Element::operand(f);
}
// B = x^T (16 columns of x, 8 rows)
template <int ROW, bool ROUNDED = false> LA_DEVICE OperandB rows_b(const float* x, const Lane& l) {
    const float* from = x + l.g * ROW + 2 * l.j;
    const float2 a = *(const float2*)from, b = *(const float2*)(from + 8);
    const float f[4] = {a.x, a.y, b.x, b.y};
    return column_of<ROUNDED>(f);
}
// B = x (16 rows, 8 columns)
template <int ROW, bool ROUNDED = false> LA_DEVICE OperandB columns_b(const float* x, const Lane& l) {
    const float* from = x + 2 * l.j * ROW + l.g;
    const float f[4] = {from[0], from[ROW], from[8 * ROW], from[9 * ROW]};
    return column_of<ROUNDED>(f);
}
