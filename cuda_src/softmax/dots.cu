// <dout, out> of every row (0 without a denominator), of LA_V numbers in pieces of 16 bytes: sixteen lanes a row. And
// what backward.cu begins with: counts of 0, and with decays the end of the queries that give the keys of a block any
// weight.
#include "arguments/ops/Rows.cuh"
#include "softmax/limit.cuh"

#include "arguments/softmax/DotsArguments.cuh"

constexpr int LANES = 16, PIECES = LA_V / 8;
LA_DEVICE float low(u32 x) { return LA_DTYPE == 1 ? low_f16(x) : low_bf16(x); }
LA_DEVICE float high(u32 x) { return LA_DTYPE == 1 ? high_f16(x) : high_bf16(x); }

// Of the blocks of 128 tokens of a head of keys: the end of the blocks of queries that give its keys any weight, not
// before that of an older block. By a block of threads.
LA_DEVICE void find_ends(const DotsArguments& a, int pair) {
    constexpr int BLOCK = 128, WARPS = 8;   // warps of forward.cu that have a least l
    const int key_heads = a.heads / a.shared, sequence = pair / key_heads, key_head = pair % key_heads;
    const i64 from = a.offsets ? a.offsets[sequence] : 0, batch = a.offsets ? 0 : sequence;
    const int T = a.offsets ? (int)(a.offsets[sequence + 1] - from) : a.T, blocks = (T + BLOCK - 1) / BLOCK;
    const i64 first = a.offsets ? from / BLOCK + sequence : (i64)sequence * a.blocks;
    int* const ends = a.ends + (i64)key_head * a.slots + first;
    for (int tile = threadIdx.x; tile < blocks; tile += 256) ends[tile] = tile + 1;
    __syncthreads();
    for (int tile = threadIdx.x; tile < blocks; tile += 256) {
        int low = tile;   // the first block of keys with weights
        for (int head = key_head * a.shared; head < (key_head + 1) * a.shared; head++) {
            const i64 slot = (i64)head * a.slots + first + tile;
            const Decays* const sums = a.sums + (batch * a.heads + head) * a.T + from;
            float least = a.least[slot * WARPS];
            for (int w = 1; w < WARPS; w++) least = min_or_nan(least, a.least[slot * WARPS + w]);
            const float bound = a.bounds[slot] - least;
            const Decays query = sums[tile * BLOCK];
            for (int skipped = 0; skipped < low;) {
                const int middle = (skipped + low) / 2;
                if (weightless(bound, query, sums[middle * BLOCK + BLOCK - 1])) skipped = middle + 1;
                else low = middle;
            }
        }
        atomicMax(ends + low, tile + 1);
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    int end = 0;
    for (int tile = threadIdx.x; tile - (int)threadIdx.x < blocks; tile += 32) {
        end = max(end, tile < blocks ? __ldcg(ends + tile) : 0);
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) end = max(end, __shfl_up_sync(0xffffffffu, end, d));
        if (tile < blocks) ends[tile] = end;
        end = __shfl_sync(0xffffffffu, end, 31);
    }
}

extern "C" __global__ void __launch_bounds__(256) dots(const __grid_constant__ DotsArguments a) {
    if (blockIdx.x < a.pairs) return find_ends(a, blockIdx.x);
    const i64 thread = (i64)(blockIdx.x - a.pairs) * 256 + threadIdx.x,
              row = thread / LANES;   // heads fastest, then tokens
    for (i64 n = thread; n < a.tiles; n += (i64)(gridDim.x - a.pairs) * 256) a.added[n] = 0;
    if (row >= a.rows) return;
    const i64 token = row / a.heads, batch = token / a.T, t = token - batch * a.T, head = row - token * a.heads;
    const char* const x = a.out.data + batch * a.out.batch + t * a.out.token + head * a.out.head;
    const char* const y = a.dout.data + batch * a.dout.batch + t * a.dout.token + head * a.dout.head;
    float sum = 0.f;
#pragma unroll
    for (int p = threadIdx.x % LANES; p < PIECES; p += LANES) {
        const uint4 u = *(const uint4*)(x + p * 16), v = *(const uint4*)(y + p * 16);
        sum += low(u.x) * low(v.x) + high(u.x) * high(v.x) + low(u.y) * low(v.y) + high(u.y) * high(v.y);
        sum += low(u.z) * low(v.z) + high(u.z) * high(v.z) + low(u.w) * low(v.w) + high(u.w) * high(v.w);
    }
#pragma unroll
    for (int d = LANES / 2; d; d >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d, LANES);
    if (threadIdx.x % LANES == 0) a.dots[(batch * a.heads + head) * a.T + t] = a.normalize ? sum : 0.f;
}
