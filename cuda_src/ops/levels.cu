// Log-linear attention around the passes of its core: levels l = first .. first + count - 1 as heads, n = l - first.
//
//     spread      y[t, h count + n] = w(t, h, l) x[t, h];  LA_DOTS: dlam[t, h, l] = <x[t, h], other[t, h count + n]>
//     gather      x[t, h] = base[t, h] + sum over n of w(t, h, l) y[t, h count + n]
//     weigh       y[t, j] = lam_t[level(t, j)] x[t, j], 0 for j > t, of the 64 positions of a chunk
//     weigh_vjp   y[t, j] = lam_t[level(t, j)] other[t, j];  dlam[t, l] = sum over level(t, j) = l of x other, 0 above
//
// Where w is 0 nothing is read. LA_WEIGHT: 0 writes, 1 for positions in the first half of a block of 2^l; 1 reads,
// lam_t[l] (and LA_DOTS) for those in the second half; 2 keeps, 1 for all but the first position of a block, where
// spread stores -inf; 3 one. Without lam its weight is 1. The last level of a state, `levels`, is never read. A group
// of LA_LANES lanes has a row (t, h), LA_PER neighbouring columns a lane. LA_DTYPE: of x and base; LA_OTHER: of y and
// other.
#include "arguments/ops/LevelsArguments.cuh"
#include "ops/numbers.cuh"

#define LA_ENTRY extern "C" __global__ void __launch_bounds__(256)

struct Row {
    i64 row, position;   // (t, h)
    int lane;
    bool valid;
    static __device__ __forceinline__ Row of(const LevelsArguments& a) {
        Row r;
        r.row = (i64)blockIdx.x * (256 / LA_LANES) + threadIdx.x / LA_LANES;
        r.lane = threadIdx.x % LA_LANES;
        r.valid = r.row < a.rows;
        const i64 token = r.valid ? r.row / a.heads : 0;
        r.position = a.positions != nullptr ? a.positions[token] : token % a.T;
        return r;
    }
};

template <int KIND> LA_DEVICE float number(const char* p, i64 i) {
    if (KIND == 2) return ((const float*)p)[i];
    const u32 x = ((const u16*)p)[i];
    return KIND == 0 ? low_bf16(x) : low_f16(x);
}
LA_DEVICE float number(const char* p, i64 i, int kind) {
    return kind == 2 ? number<2>(p, i) : kind == 0 ? number<0>(p, i) : number<1>(p, i);
}
// LA_PER numbers from number i on
template <int KIND> LA_DEVICE void load(float (&x)[LA_PER], const char* p, i64 i) {
    if constexpr (LA_PER == 8) load_numbers<KIND>(x, p, i);
    else x[0] = number<KIND>(p, i);
}
template <int KIND> LA_DEVICE void store(char* p, i64 i, const float (&x)[LA_PER]) {
    if constexpr (LA_PER == 8) store_numbers<KIND>(p, i, x);
    else if constexpr (KIND == 2) ((float*)p)[i] = x[0];
    else ((u16*)p)[i] = (u16)(KIND == 0 ? pack_bf16(x[0], 0.f) : pack_f16(x[0], 0.f));
}
LA_DEVICE float sum_of_row(float x) {
#pragma unroll
    for (int d = LA_LANES / 2; d; d >>= 1) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}

// whether w(t, h, l) is not 0
LA_DEVICE bool counts(const Row& r, int l) {
    if (LA_WEIGHT == 2) return (r.position & (((i64)1 << l) - 1)) != 0;
    if (LA_WEIGHT == 3) return true;
    return ((r.position >> (l - 1)) & 1) == LA_WEIGHT;
}
LA_DEVICE float weight(const LevelsArguments& a, const Row& r, int l) {
    return LA_WEIGHT == 1 && a.lam != nullptr ? number(a.lam, r.row * a.levels + l, a.kind) : 1.f;
}

LA_ENTRY spread(const __grid_constant__ LevelsArguments a) {
    const Row r = Row::of(a);
    for (int n = 0; n < a.count; n++) {
        const int l = a.first + n;
        const bool some = r.valid && counts(r, l);
        const float w = some ? weight(a, r, l) : 0.f;
        float sum = 0.f;
        for (int d = r.lane * LA_PER; d < a.width && r.valid; d += LA_LANES * LA_PER) {
            const i64 at = (r.row * a.count + n) * a.width + d;
            float x[LA_PER], z[LA_PER];
            if (some) load<LA_DTYPE>(x, a.x, r.row * a.width + d);
            if (LA_DOTS && some) {
                load<LA_OTHER>(z, a.other, at);
#pragma unroll
                for (int i = 0; i < LA_PER; i++) sum = fmaf(x[i], z[i], sum);
            }
#pragma unroll
            for (int i = 0; i < LA_PER; i++) x[i] = some ? w * x[i] : LA_WEIGHT == 2 ? __int_as_float(0xff800000) : 0.f;
            store<LA_OTHER>(a.y, at, x);
        }
        if (LA_DOTS) {
            sum = sum_of_row(sum);
            if (r.valid && r.lane == 0 && l < a.levels) a.dlam[r.row * a.levels + l] = sum;
        }
    }
}

LA_ENTRY gather(const __grid_constant__ LevelsArguments a) {
    const Row r = Row::of(a);
    for (int d = r.lane * LA_PER; d < a.width && r.valid; d += LA_LANES * LA_PER) {
        float sum[LA_PER] = {}, y[LA_PER];
        if (a.base != nullptr) load<LA_DTYPE>(sum, a.base, r.row * a.width + d);
        for (int n = 0; n < a.count; n++) {
            if (!counts(r, a.first + n)) continue;
            const float w = weight(a, r, a.first + n);
            load<LA_OTHER>(y, a.y, (r.row * a.count + n) * a.width + d);
#pragma unroll
            for (int i = 0; i < LA_PER; i++) sum[i] = fmaf(w, y[i], sum[i]);
        }
        store<LA_DTYPE>(a.x, r.row * a.width + d, sum);
    }
}

#if LA_PER == 8 && LA_LANES == 8
constexpr int NEAR = 7;   // levels of a chunk
LA_DEVICE int level(int i, int j) { return 32 - __clz(i ^ j); }

LA_ENTRY weigh(const __grid_constant__ LevelsArguments a) {
    const Row r = Row::of(a);
    if (!r.valid) return;
    const int own = (int)(r.position & 63), j = r.lane * 8;
    float x[8];
    load<LA_DTYPE>(x, a.x, r.row * 64 + j);
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i] = j + i <= own ? x[i] * number(a.lam, r.row * a.levels + level(own, j + i), a.kind) : 0.f;
    store<LA_OTHER>(a.y, r.row * 64 + j, x);
}

LA_ENTRY weigh_vjp(const __grid_constant__ LevelsArguments a) {
    const Row r = Row::of(a);
    const int own = (int)(r.position & 63), j = r.lane * 8;
    float sums[NEAR] = {};
    if (r.valid) {
        float x[8], d[8];
        load<LA_DTYPE>(x, a.x, r.row * 64 + j);
        load<LA_OTHER>(d, a.other, r.row * 64 + j);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const bool some = j + i <= own;
            const int l = some ? level(own, j + i) : 0;
            const float product = some ? x[i] * d[i] : 0.f;
#pragma unroll
            for (int m = 0; m < NEAR; m++) sums[m] += l == m ? product : 0.f;
            d[i] = some ? d[i] * number(a.lam, r.row * a.levels + l, a.kind) : 0.f;
        }
        store<LA_OTHER>(a.y, r.row * 64 + j, d);
    }
#pragma unroll
    for (int m = 0; m < NEAR; m++) sums[m] = sum_of_row(sums[m]);
    if (!r.valid) return;
#pragma unroll
    for (int m = 0; m < NEAR; m++)
        if (m == r.lane && m < a.levels) a.dlam[r.row * a.levels + m] = sums[m];
    for (int l = NEAR + r.lane; l < a.levels; l += 8) a.dlam[r.row * a.levels + l] = 0.f;
}
#endif
