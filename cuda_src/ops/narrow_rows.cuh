// Rows of bfloat16, eight numbers at a time.
#pragma once
#include "tile/types.cuh"

// eight bfloat16 of a row, 0 outside
LA_DEVICE uint4 eight(const char* at, bool valid) { return valid ? *(const uint4*)at : make_uint4(0, 0, 0, 0); }
LA_DEVICE void floats_of(float (&x)[8], const uint4& w) {
    const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = low_bf16(words[i]);
        x[2 * i + 1] = high_bf16(words[i]);
    }
}
LA_DEVICE uint4 packed(const float (&x)[8]) {
    return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
}
// row `row` of a.x, whose rows lie in groups of a.inner
template <class A> LA_DEVICE const char* row_of(const A& a, i64 row) {
    return a.x.data + row / a.inner * a.x.outer + row % a.inner * a.x.inner;
}
