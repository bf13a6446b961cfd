// Recurrences over the tokens of a sequence in one block: a lane has a column, a warp one of SEGMENTS parts of the
// tokens.
//
// Each warp composes the maps of its tokens, applies the compositions of the parts before its own to the first value,
// and traverses its part from there. Parts depend on the length of the sequence alone, so that results do, too.
#pragma once
#include "tile/types.cuh"

constexpr int SEGMENTS = 32, LANES = 32;

struct Segment {   // of a block's sequence and columns; stop <= first: no token
    i64 begin, end, first, stop, column, sequence;
    bool given;
    __device__ __forceinline__ Segment(const i64* offsets, i64 T, i64 columns) {
        const i64 tiles = (columns + LANES - 1) / LANES;
        sequence = blockIdx.x / tiles;
        column = blockIdx.x % tiles * LANES + threadIdx.x % LANES;
        given = column < columns;
        begin = offsets == nullptr ? sequence * T : offsets[sequence];
        end = offsets == nullptr ? begin + T : offsets[sequence + 1];
        const i64 each = (end - begin + SEGMENTS - 1) / SEGMENTS;
        first = min(begin + threadIdx.x / LANES * each, end);
        stop = given ? min(first + each, end) : first;
    }
};

// the value before the own part, or after it where parts are traversed from the last token on (BACK)
template <bool BACK, class Map, class Value, class Apply>
LA_DEVICE Value entering(Map (*maps)[LANES], const Map& own, Value x, Apply apply) {
    const int lane = threadIdx.x % LANES, part = threadIdx.x / LANES;
    maps[part][lane] = own;
    __syncthreads();
    if constexpr (BACK)
        for (int i = SEGMENTS - 1; i > part; i--) x = apply(maps[i][lane], x);
    else
        for (int i = 0; i < part; i++) x = apply(maps[i][lane], x);
    return x;
}
// f(token, numbers of N arrays) of every token of a part, in order; those of TOGETHER tokens are loaded ahead
template <bool BACK, int N, int TOGETHER, class Real, class Load, class F>
LA_DEVICE void traverse(const Segment& s, Load load, F f) {
    for (i64 n = 0; n < s.stop - s.first; n += TOGETHER) {
        Real x[TOGETHER][N];
        const int count = (int)min((i64)TOGETHER, s.stop - s.first - n);
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
            if (i < count) load(BACK ? s.stop - 1 - n - i : s.first + n + i, x[i]);
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
            if (i < count) f(BACK ? s.stop - 1 - n - i : s.first + n + i, x[i]);
    }
}
