// After a few tokens read a cache: the parts of their outputs as one, in the order of the pieces; and the cache after
// them. A block has a row of the output, or a token, or THREADS PER gates of the cache.
#include "softmax_portable/portable.cuh"
#include "tile/reduce.cuh"

constexpr int THREADS = 128, PER = 8;

// by a warp for every fourth piece; each has the weights of two pieces a lane
LA_DEVICE void combine(const PortableArguments& a, int n) {
    constexpr int WARPS = THREADS / 32, COLUMNS = (LA_V + 31) / 32;
    __shared__ float sums[WARPS][COLUMNS * 32];
    const int head = n % a.heads, t = n / a.heads % a.few, sequence = n / a.heads / a.few, lane = threadIdx.x & 31,
              warp = threadIdx.x >> 5;
    const Owner own(a, sequence, seen_of(a, a.counts[sequence]));
    if (!own.is_short() || t >= own.T) return;
    const int pieces = own.pieces(a);
    const i64 first = part_row(a, own, 0, head, t), apart = (i64)a.tokens * a.heads;
    const float2* const maxima = (const float2*)a.maxima + first;
    const float2 none = {minus_infinity(), 0.f}, x = lane < pieces ? maxima[lane * apart] : none,
                 y = lane + 32 < pieces ? maxima[(lane + 32) * apart] : none;
    float most = fmaxf(x.x, y.x), out[COLUMNS] = {}, log;
#pragma unroll
    for (int d = 16; d; d >>= 1) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
    const float shift = most == minus_infinity() ? 0.f : most, f0 = exp2_approx(x.x - shift),
                f1 = exp2_approx(y.x - shift), all = warp_sum(x.y * f0 + y.y * f1);
#pragma unroll 4
    for (int p = warp; p < pieces; p += WARPS) {
        const float f = __shfl_sync(0xffffffffu, p < 32 ? f0 : f1, p & 31), *const part =
                                                                                a.parts + (first + p * apart) * LA_V;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            if (c * 32 + lane < LA_V) out[c] += part[c * 32 + lane] * f;
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) sums[warp][c * 32 + lane] = out[c];
    __syncthreads();
    const float f = normalised(a, head, most, all, log);
    if (a.logs && threadIdx.x == 0) a.logs[own.number(a, head, t)] = log;
    char* const to = own.token(a.out, head, t);
    for (int c = threadIdx.x; c < LA_V; c += THREADS) {
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += sums[w][c];
        store_element<LA_INPUT>(to + c * bytes_of(LA_INPUT), sum * f);
    }
}
// One row, or several heads' rows, of a token
template <int WIDTH> LA_DEVICE void append_rows(const PortableArguments& a, const Owner& own, const Rows& past,
                                                const Rows& tokens, int t) {
    const int heads = a.heads / tokens.group, slot = (own.seen + t) % a.slots;
    for (int n = threadIdx.x; n < heads * WIDTH; n += THREADS) {
        const int head = n / WIDTH * tokens.group, c = n % WIDTH;
        store_element<LA_CACHE>(own.slot(past, head, slot) + c * bytes_of(LA_CACHE),
                                element_at<LA_INPUT>(own.token(tokens, head, t), c));
    }
}
LA_DEVICE void append(const PortableArguments& a, int n) {
    const int t = n % a.longest, sequence = n / a.longest;
    const Owner own(a, sequence, seen_of(a, a.counts[sequence]));
    if (t >= own.Tk) return;
    if (own.Tk - t <= a.slots) {   // else forgotten within the call
        append_rows<LA_K>(a, own, a.past_k, a.k, t);
        append_rows<LA_V>(a, own, a.past_v, a.v, t);
    }
    if (t == own.Tk - 1 && threadIdx.x == 0) a.lengths[sequence] = a.counts[sequence] + own.Tk;
}
// b of every slot after the call
LA_DEVICE void fade(const PortableArguments& a, int n) {
    constexpr float LN_2 = 0.6931471805599453f;
    const int heads = a.heads / a.b.group, each = a.slots * heads,
              blocks = (each + THREADS * PER - 1) / (THREADS * PER), sequence = n / blocks;
    const Owner own(a, sequence, seen_of(a, a.counts[sequence]));
    if (!own.T) return;
    for (int i = 0; i < PER; i++) {
        const int at = (n % blocks * PER + i) * THREADS + threadIdx.x, slot = at / heads, head = at % heads * a.b.group;
        if (at >= each) return;
        const int last = own.seen + own.T - 1, back = (last - slot) % a.slots,
                  p = last - (back < 0 ? back + a.slots : back);
        const Decays all = ((const Decays*)a.sums)[own.number(a, head, own.T - 1)];
        float* const b = (float*)own.slot(a.b, head, slot);
        if (p < 0) *b = 0.f;
        else if (p < own.seen) *b += decay_between(all, {0.f, 0.f, 0.f, 0.f}) * LN_2;
        else *b = decay_between(all, ((const Decays*)a.sums)[own.number(a, head, p - own.seen)]) * LN_2;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) cache(const __grid_constant__ PortableArguments a) {
    int n = blockIdx.x;
    if (n < a.outputs) return combine(a, n);
    n -= a.outputs;
    if (n < a.appends) return append(a, n);
    if constexpr (GATED) fade(a, n - a.appends);
}
