// Passes over the groups that a block of queries attends to, and over the blocks of queries that attend to a group;
// shared by both.
#pragma once
#include "path/place.cuh"
#include "tile/wgmma_across.cuh"

// A group that a block of queries attends to, from the nearest to the furthest or back
struct GroupTraversal {
    const EarlierGroups earlier;
    int level, number;
    static __device__ __forceinline__ GroupTraversal nearest(const EarlierGroups& earlier) {
        GroupTraversal w = {earlier, 0, earlier.end(0) - 1};
        w.skip_up();
        return w;
    }
    static __device__ __forceinline__ GroupTraversal furthest(const EarlierGroups& earlier) {
        GroupTraversal w = {earlier, earlier.levels - 1, 0};
        w.skip_down();
        return w;
    }
    __device__ __forceinline__ int first(int l) const {
        return earlier.end(l) - earlier.count(l);
    }   // the furthest of a size
    __device__ __forceinline__ void skip_up() {   // to a size that has groups left
        while (level < earlier.levels - 1 && number < first(level)) number = earlier.end(++level) - 1;
    }
    __device__ __forceinline__ void skip_down() {
        while (level > 0 && number >= earlier.end(level)) number = first(--level);
    }
    __device__ __forceinline__ void further() {
        number--;
        skip_up();
    }
    __device__ __forceinline__ void closer() {
        number++;
        skip_down();
    }
    __device__ __forceinline__ int blocks() const { return 1 << RADIX_BITS * level; }
    __device__ __forceinline__ int nearer() const { return earlier.nearer(level, number); }   // groups
};

// Bytes from the start of a tile of panels X to a lane's pairs of columns 8 n + its own, derived anew at each use.
struct PairsAt {
    const u32 row, base;
    __device__ __forceinline__ PairsAt(const Lane& me) : row(opaque(me.row)), base(row * 128 + me.column * 2) {}
    template <class X> __device__ __forceinline__ u32 at(int n, int h) const {
        return base + ((n & 7) << 4 ^ (row & 7) << 4) + (n / 8 * X::PANEL + h * 1024);
    }
};
// f(bytes from a tile's start, two numbers, row of two) for a lane's pairs of a warpgroup's 64 rows of panels X
template <class X, class T, int N, class F> LA_DEVICE void each_pair(T (&x)[N][4], const Lane& me, F f) {
    const PairsAt pairs(me);
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int n = i; n < N; n += 8)
#pragma unroll
            for (int h = 0; h < 2; h++) f(pairs.at<X>(n, h), x[n][2 * h], x[n][2 * h + 1], h);
}
template <class X, int N> LA_DEVICE void put_rows(u32 tile, const float (&x)[N][4], float scale, const Lane& me) {
    each_pair<X>(x, me,
                 [&](u32 at, float u, float v, int) { store_shared_u32(tile + at, pack_bf16(u * scale, v * scale)); });
}
template <class X, int N> LA_DEVICE void store_tile(char* tile, const float (&x)[N][4], const Lane& me) {
    each_pair<X>(x, me, [&](u32 at, float u, float v, int) { *(u32*)(tile + at) = pack_bf16(u, v); });
}
// x += sign times a tile in memory, or in shared memory
template <class X, int N> LA_DEVICE void add_tile(float (&x)[N][4], const char* tile, float sign, const Lane& me) {
    each_pair<X>(x, me, [&](u32 at, float& u, float& v, int) {
        const u32 y = *(const u32*)(tile + at);
        u += sign * low_bf16(y);
        v += sign * high_bf16(y);
    });
}
template <class X, int N> LA_DEVICE void add_rows(float (&x)[N][4], u32 tile, const Lane& me) {
    each_pair<X>(x, me, [&](u32 at, float& u, float& v, int) {
        const u32 y = __float_as_uint(load_shared(tile + at));
        u += low_bf16(y);
        v += high_bf16(y);
    });
}
// f(pair of numbers in memory, row of two, tile of columns) of an array (B, T, heads, WIDTH); `left` rows exist
template <int WIDTH, int N, class F> LA_DEVICE void each_of_array(char* array, i64 stride, int left, const Lane& me,
                                                                  F f) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        char* const row = array + (me.row + 8 * h) * stride + me.column * 2;
        if (me.row + 8 * h < left)
#pragma unroll
            for (int n = 0; n < N; n++)
                if (n * 8 < WIDTH) f((u32*)(row + n * 16), h, n);
    }
}
template <int WIDTH, int N> LA_DEVICE void store_array(char* to, i64 stride, int left, const float (&x)[N][4],
                                                       const Lane& me) {
    each_of_array<WIDTH, N>(to, stride, left, me,
                            [&](u32* at, int h, int n) { *at = pack_bf16(x[n][2 * h], x[n][2 * h + 1]); });
}
template <int WIDTH, int N> LA_DEVICE void load_array(float (&x)[N][4], char* from, i64 stride, int left,
                                                      const Lane& me) {
    clear_tiles(x);
    each_of_array<WIDTH, N>(from, stride, left, me, [&](const u32* at, int h, int n) {
        const u32 y = *at;
        x[n][2 * h] = low_bf16(y);
        x[n][2 * h + 1] = high_bf16(y);
    });
}
// Numbers on and above the diagonal, or above it, become 0
template <bool DIAGONAL, int N> LA_DEVICE void keep_lower(float (&x)[N][4], const Lane& me) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int column = n * 8 + me.column + (e & 1), row = me.row + 8 * (e >> 1);
            if (DIAGONAL ? column > row : column >= row) x[n][e] = 0.f;
        }
}
template <int N> LA_DEVICE void negate(float (&x)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        x[n][0] = -x[n][0];
        x[n][1] = -x[n][1];
        x[n][2] = -x[n][2];
        x[n][3] = -x[n][3];
    }
}
