// The decay of one chunk of C tokens, in base 2, from log decays g (natural logarithms) in shared memory.
//
//     s(j, i) = sum of g between row j and row i        gram      2^s(j, i)
//     start   2^(sum up to row i)                       from_start
//     end     2^(sum from row j to the chunk's end)     to_end
//     all     2^(sum of the chunk)                      carry
//
// A log decay under -160 / log2(e) gives an exact 0 in float32 and is taken as that, so that sums stay finite and
// g = -inf is only a number. In reverse time a row's own g acts after its write: the sum excludes it.
#pragma once
#include "attention/config.cuh"
#include "tile/reduce.cuh"

constexpr float LOG2_E = 1.4426950408889634f, FLOOR_LOG2 = -160.f;

LA_DEVICE float log2_decay(float g) {
    const float x = g * LOG2_E;
    return x < FLOOR_LOG2 ? FLOOR_LOG2 : x;   // NaN stays NaN
}

// A chunk's sums of decays in a warp's shared memory; float32 keeps sums in two floats, since differences of long sums
// cancel.
template <int C> struct Decay {
    static constexpr int FLOATS = (Element::EXACT ? 4 : 3) * C;
    u32 base;

    // `later`: log2 decay from the chunk's end to where the written values are wanted. Returns the sum over the chunk.
    __device__ __forceinline__ float set(u32 g, float read, float write, float later, int lane) const {
        float x[C / 32];
#pragma unroll
        for (int i = 0; i < C / 32; i++) x[i] = LA_DECAY ? load_shared(g + (lane * (C / 32) + i) * 4) : 0.f;
        return set(x, read, write, later, lane);
    }
    // from log decays in registers: rows lane * C / 32 and on
    __device__ __forceinline__ float set(const float (&g)[C / 32], float read, float write, float later,
                                         int lane) const {
        if constexpr (Element::EXACT) return store_sums<double>(g, read, write, later, lane);
        else return store_sums<float>(g, read, write, later, lane);
    }
    template <class F>
    __device__ __forceinline__ float store_sums(const float (&g)[C / 32], float read, float write, float later,
                                                int lane) const {
        constexpr int N = C / 32;
        F x[N], sum = 0;
#pragma unroll
        for (int i = 0; i < N; i++) {
            x[i] = LA_DECAY ? (F)log2_decay(g[i]) : (F)0;
            sum += x[i];
        }
        F upto = prefix_sum(sum, lane);
        const F all = __shfl_sync(0xffffffffu, upto, 31);
        upto -= sum;
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (!LA_REVERSE) upto += x[i];
            const u32 at = base + (lane * N + i) * 4;
            store_shared(at, (float)upto);
            store_shared(at + C * 4, read * exp2_approx(fminf((float)upto, 0.f)));
            store_shared(at + 2 * C * 4, write * exp2_approx(later + fminf((float)(all - upto), 0.f)));
            if constexpr (Element::EXACT) store_shared(at + 3 * C * 4, (float)(upto - (F)(float)upto));
            if (LA_REVERSE) upto += x[i];
        }
        return (float)all;
    }
    // sums up to a row, and up to rows j and j + 1 (j even): two floats each
    __device__ __forceinline__ float2 upto(int i) const {
        return {load_shared(base + i * 4), Element::EXACT ? load_shared(base + (3 * C + i) * 4) : 0.f};
    }
    __device__ __forceinline__ void upto(int j, float2 (&s)[2]) const {
        const float2 x = load_shared2(base + j * 4),
                     y = Element::EXACT ? load_shared2(base + (3 * C + j) * 4) : float2{};
        s[0] = {x.x, y.x};
        s[1] = {x.y, y.y};
    }
    // 2^s(j, i), 1 without decay; j <= i
    static __device__ __forceinline__ float between(float2 j, float2 i) {
        return LA_DECAY ? exp2_approx(Element::EXACT ? (i.x - j.x) + (i.y - j.y) : i.x - j.x) : 1.f;
    }
    __device__ __forceinline__ float start(int i) const { return load_shared(base + (C + i) * 4); }
    __device__ __forceinline__ float end(int j) const { return load_shared(base + (2 * C + j) * 4); }
    __device__ __forceinline__ float2 starts(int i) const { return load_shared2(base + (C + i) * 4); }
    __device__ __forceinline__ float2 ends(int j) const { return load_shared2(base + (2 * C + j) * 4); }
};
