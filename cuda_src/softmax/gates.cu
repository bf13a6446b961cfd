// Sums of log decays of the tokens of a head, and the gradient of the log decays.
#include "softmax/owner.cuh"
#include "tile/reduce.cuh"

constexpr double LOG2_OF_E = 1.4426950408889634, RESET = -16384.;   // a log2 decay from which on a token is a reset

// The sum since the last reset, and the number of resets
struct Segment {
    double sum;
    int resets;
    __device__ __forceinline__ Segment then(const Segment& later) const {
        return {later.resets ? later.sum : sum + later.sum, resets + later.resets};
    }
    __device__ __forceinline__ Segment up(int lanes) const {
        return {__shfl_up_sync(0xffffffffu, sum, lanes), __shfl_up_sync(0xffffffffu, resets, lanes)};
    }
};
LA_DEVICE Segment segment_of(float g) {
    const double x = g * LOG2_OF_E;
    return x <= RESET ? Segment{0., 1} : Segment{x, 0};
}

LA_DEVICE bool is_finite(float x) { return x - x == 0.f; }
LA_DEVICE float4 split(const Segment& x) {
    const float hi = (float)x.sum;
    return {hi, (float)(x.sum - hi), __int_as_float(x.resets), 0.f};
}

// sums (batch, heads, tokens) of each head of each sequence: a block each, 1024 tokens at a time. readers: of the
// tokens before, as a query without its own log decay reads them, but for resets by -inf and NaN
extern "C" __global__ void __launch_bounds__(256) decays(const __grid_constant__ GateArguments a) {
    constexpr int OWN = 4, WARPS = 8;
    __shared__ Segment warps[WARPS];
    const Owner owner(a, blockIdx.x);
    const char* const g = owner.gates(a.g);
    float4 *const to = a.sums + owner.numbers(a), *const readers = a.readers ? a.readers + owner.numbers(a) : 0;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    Segment all = {0., 0};   // of the tokens before
    for (int t0 = 0; t0 < owner.T; t0 += 256 * OWN) {
        Segment x[OWN];
        const int t = t0 + threadIdx.x * OWN;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const Segment y = t + i < owner.T ? segment_of(*(const float*)(g + (t + i) * a.g.token)) : Segment{0., 0};
            x[i] = i ? x[i - 1].then(y) : y;
        }
        Segment sum = x[OWN - 1];
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            const Segment y = sum.up(d);
            if (lane >= d) sum = y.then(sum);
        }
        if (lane == 31) warps[warp] = sum;
        __syncthreads();
        Segment before = all;
        for (int w = 0; w < warp; w++) before = before.then(warps[w]);
        for (int w = 0; w < WARPS; w++) all = all.then(warps[w]);
        const Segment y = sum.up(1);
        if (lane) before = before.then(y);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const Segment z = before.then(x[i]);
            if (t + i >= owner.T) continue;
            to[t + i] = split(z);
            if (readers)
                readers[t + i] =
                    split(is_finite(*(const float*)(g + (t + i) * a.g.token)) ? i ? before.then(x[i - 1]) : before : z);
        }
    }
}

// Inclusive sums over the threads of a block, in shared memory x
LA_DEVICE float sum_before(float* x, float y) {
    x[threadIdx.x] = y;
    __syncthreads();
#pragma unroll
    for (int d = 1; d < BLOCK; d <<= 1) {
        const float z = threadIdx.x >= d ? x[threadIdx.x - d] : 0.f;
        __syncthreads();
        x[threadIdx.x] += z;
        __syncthreads();
    }
    return x[threadIdx.x];
}
// A thread's share of the sums of dz of later queries and all keys before a block, by tiles of 64 queries and a block
// of keys
LA_DEVICE float sum_tiles(const GateArguments& a, i64 slot, const int* ends, int tile, int T) {
    float sum = 0.f;
    for (int later = 2 * (tile + 1) + threadIdx.x / 32; later < (T + 63) / 64; later += BLOCK / 32) {   // by a warp
        const i64 out = 64ll * later - (BLOCK - 1) - a.window;   // they read blocks of keys that begin after it
        for (int block = (out < 0 ? 0 : (int)(out / BLOCK) + 1) + threadIdx.x % 32; block < tile; block += 32)
            if (later / 2 < ends[block]) sum += a.tiles[(2 * slot + later) * a.blocks + block];
    }
    return sum;
}
// the same by blocks of queries, with all those keys
LA_DEVICE float sum_blocks(const GateArguments& a, int pair, int tile, int blocks) {
    float sum = 0.f;
    for (int later = tile + 1 + threadIdx.x; later < blocks; later += BLOCK)
        if (tile * (i64)BLOCK >
            max((i64)later * BLOCK - a.window + 1, (i64)0) / BLOCK * BLOCK)   // it reads keys before this block
            for (int part = 0; part < a.parts; part++)
                sum += a.crossing[(((i64)pair * a.parts + part) * a.blocks + later) * a.blocks + tile];
    return sum;
}
// dg_s = sum of dz_ij over j < s <= i. Of the pairs with i in the block of s: the queries from s on, all their keys,
// less the near keys from s on. Of those with j in it and i in later blocks: the keys before s. And of those on both
// sides of it.
extern "C" __global__ void __launch_bounds__(BLOCK) gates(const __grid_constant__ GateArguments a) {
    __shared__ float x[BLOCK];
    const int pairs = a.sequences * a.heads, pair = blockIdx.x % pairs, tile = blockIdx.x / pairs;
    const Owner owner(a, pair);
    const int blocks = (owner.T + BLOCK - 1) / BLOCK, i = tile * BLOCK + threadIdx.x;
    if (tile >= blocks) return;
    const i64 numbers = owner.numbers(a) + i;
    const bool valid = i < owner.T;
    const i64 slot = owner.slot(a, owner.head);
    const float crossing = a.pitch ? sum_tiles(a, slot, a.ends + owner.slot(a, owner.head / a.shared), tile, owner.T)
                                   : sum_blocks(a, pair, tile, blocks);
    const float row = !valid ? 0.f : a.pitch ? a.dq[(2 * slot + i / 64 + 1) * a.pitch - 64 + i % 64] : a.rows[numbers];
    const float own = valid ? row - a.near[numbers] : 0.f, from = valid ? a.far[numbers] : 0.f;
    const float up = sum_before(x, own), all = x[BLOCK - 1];
    __syncthreads();
    const float keys = sum_before(x, from) - from;
    __syncthreads();
    sum_before(x, crossing);
    const float past = x[BLOCK - 1];
    if (!valid) return;
    const bool reset = segment_of(*(const float*)(owner.gates(a.g) + i * a.g.token)).resets;
    a.dg[((owner.batch * a.T) + owner.first + i) * a.heads + owner.head] = reset ? 0.f : (all - up) + own + keys + past;
}
