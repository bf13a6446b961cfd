// Rows of a table, y_n = W_{ids_n}, and the gradient of the table, dW_v = the sum of dy_n over all n with ids_n = v.
//
// The numbers n are sorted by id, in the order of n where ids are one, 8 bits a pass: `digits` counts, `offsets` adds
// up, `place` moves. A thread of `runs` then adds LA_PER channels of CHUNK neighbours of that order. A run of one id
// that lies within a chunk is a row of dW; what a run adds at the begin and at the end of a chunk is stored, and
// `joined` adds these parts in order. Ids outside of the table have rows of NaN, and no gradient. Kinds: LA_DTYPE of x,
// LA_OUT of y; the table has no row of y that is not written before (zeros).
#include "arguments/ops/EmbeddingArguments.cuh"
#include "ops/element.cuh"

#if LA_DOUBLE
typedef double Real;
#else
typedef float Real;
#endif
constexpr int THREADS = 256, WARPS = 8, ROUNDS = 8, TILE = THREADS * ROUNDS;   // numbers that a block sorts
constexpr int DIGITS = 256, CHUNK = 32, AHEAD = 4;
typedef Real Numbers[LA_PER];

struct Place {   // of a thread: a row or a chunk, and the first channel
    i64 row;
    u32 d;
    __device__ __forceinline__ explicit Place(const EmbeddingArguments& a) {
        const u32 each = a.D / LA_PER;
        const i64 n = (i64)blockIdx.x * THREADS + threadIdx.x;
        row = n / each;
        d = (u32)(n % each) * LA_PER;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) gather(const __grid_constant__ EmbeddingArguments a) {
    const Place at(a);
    if (at.row >= a.N) return;
    const i64 id = a.ids[at.row];
    Numbers x;
#pragma unroll
    for (int v = 0; v < LA_PER; v++) x[v] = (Real)__int_as_float(0x7fffffff);
    if (id >= 0 && id < a.V) load_elements<LA_DTYPE, LA_PER>(x, a.x.data + id * a.x.outer + at.d * bytes_of(LA_DTYPE));
    store_elements<LA_OUT, LA_PER>(a.y + (at.row * a.D + at.d) * bytes_of(LA_OUT), x);
}

// The sort

struct Digit {   // of number n: its key, the digit of this pass, the lanes of the warp that have it too
    u32 key, digit, peers;
    bool there;
    __device__ __forceinline__ Digit(const EmbeddingArguments& a, u32 n) {
        there = n < a.N;
        key = 0;
        if (there) {
            const i64 id = a.first ? a.ids[n] : 0;
            key = !a.first ? a.from_keys[n] : id >= 0 && id < a.V ? (u32)id : a.V;
        }
        digit = key >> a.shift & (DIGITS - 1);
        peers = __ballot_sync(0xffffffffu, there);
#pragma unroll
        for (int bit = 0; bit < 8; bit++) {
            const u32 set = __ballot_sync(0xffffffffu, digit >> bit & 1);
            peers &= digit >> bit & 1 ? set : ~set;
        }
    }
    __device__ __forceinline__ u32 before() const { return __popc(peers & ((1u << threadIdx.x % 32) - 1)); }
};
LA_DEVICE u32 number_of(int round) {
    return blockIdx.x * TILE + threadIdx.x / 32 * 32 * ROUNDS + round * 32 + threadIdx.x % 32;
}
typedef u32 Counts[WARPS][DIGITS];
LA_DEVICE void count_digits(const EmbeddingArguments& a, Counts& counts) {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int w = 0; w < WARPS; w++) counts[w][threadIdx.x] = 0;
    __syncthreads();
    for (int round = 0; round < ROUNDS; round++) {
        const Digit x(a, number_of(round));
        if (x.there && x.before() == 0) counts[warp][x.digit] += __popc(x.peers);
        __syncwarp();
    }
    __syncthreads();
}
extern "C" __global__ void __launch_bounds__(THREADS) digits(const __grid_constant__ EmbeddingArguments a) {
    __shared__ Counts counts;
    count_digits(a, counts);
    u32 sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += counts[w][threadIdx.x];
    a.counts[threadIdx.x * a.blocks + blockIdx.x] = sum;
}
// counts become the sums of all before them; one block
extern "C" __global__ void __launch_bounds__(1024) offsets(const __grid_constant__ EmbeddingArguments a) {
    __shared__ u32 sums[1024];
    const u32 count = DIGITS * a.blocks, each = (count + 1023) / 1024;
    const u32 begin = min(threadIdx.x * each, count), end = min(begin + each, count);
    u32 own = 0;
    for (u32 n = begin; n < end; n++) own += a.counts[n];
    sums[threadIdx.x] = own;
    for (u32 d = 1; d < 1024; d *= 2) {
        __syncthreads();
        const u32 more = threadIdx.x >= d ? sums[threadIdx.x - d] : 0;
        __syncthreads();
        sums[threadIdx.x] += more;
    }
    u32 sum = sums[threadIdx.x] - own;
    for (u32 n = begin; n < end; n++) {
        const u32 now = a.counts[n];
        a.counts[n] = sum;
        sum += now;
    }
}
extern "C" __global__ void __launch_bounds__(THREADS) place(const __grid_constant__ EmbeddingArguments a) {
    __shared__ Counts counts;
    count_digits(a, counts);
    u32 sum = a.counts[threadIdx.x * a.blocks + blockIdx.x];
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const u32 now = counts[w][threadIdx.x];
        counts[w][threadIdx.x] = sum;
        sum += now;
    }
    __syncthreads();
    for (int round = 0; round < ROUNDS; round++) {
        const u32 n = number_of(round);
        const Digit x(a, n);
        u32& next = counts[threadIdx.x / 32][x.digit];
        if (x.there) {
            const u32 to = next + x.before();
            a.to_keys[to] = x.key;
            a.to_order[to] = a.first ? n : a.from_order[n];
        }
        __syncwarp();
        if (x.there && x.before() == 0) next += __popc(x.peers);
        __syncwarp();
    }
}

// The sums

LA_DEVICE Real* part_of(const EmbeddingArguments& a, i64 chunk, int which, u32 d) {
    return (Real*)a.parts + (chunk * 2 + which) * a.D + d;
}
LA_DEVICE void store_row(const EmbeddingArguments& a, u32 id, u32 d, const Numbers& x) {
    if (id < a.V) store_elements<LA_OUT, LA_PER>(a.y + ((i64)id * a.D + d) * bytes_of(LA_OUT), x);
}
extern "C" __global__ void __launch_bounds__(THREADS) runs(const __grid_constant__ EmbeddingArguments a) {
    const Place at(a);
    const i64 first = at.row * CHUNK;
    if (first >= a.N) return;
    const int count = (int)min((i64)CHUNK, (i64)a.N - first);
    const u32* const keys = a.from_keys + first;
    bool within = first == 0 || a.from_keys[first - 1] != keys[0];   // whether the run begins in this chunk
    const bool goes_on = first + count < a.N && keys[count - 1] == keys[count];
    u32 id = keys[0];
    Numbers sum = {};
    for (int n = 0; n < count; n += AHEAD) {
        Loaded<LA_DTYPE, LA_PER> rows[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            if (n + k < count)
                rows[k].load(a.x.data + a.from_order[first + n + k] * a.x.outer + at.d * bytes_of(LA_DTYPE));
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (n + k >= count) break;
            const u32 now = keys[n + k];
            if (now != id) {
                if (within) store_row(a, id, at.d, sum);
                else
#pragma unroll
                    for (int v = 0; v < LA_PER; v++) part_of(a, at.row, 0, at.d)[v] = sum[v];
#pragma unroll
                for (int v = 0; v < LA_PER; v++) sum[v] = 0;
                id = now;
                within = true;
            }
            Numbers x;
            rows[k].get(x);
#pragma unroll
            for (int v = 0; v < LA_PER; v++) sum[v] += x[v];
        }
    }
    if (within && !goes_on) store_row(a, id, at.d, sum);
    else
#pragma unroll
        for (int v = 0; v < LA_PER; v++) part_of(a, at.row, within, at.d)[v] = sum[v];
}
// the rows of runs that begin in a chunk and end in another one
extern "C" __global__ void __launch_bounds__(THREADS) joined(const __grid_constant__ EmbeddingArguments a) {
    const Place at(a);
    const i64 first = at.row * CHUNK, next = first + CHUNK;
    if (next >= a.N) return;
    const u32* const keys = a.from_keys;
    const u32 id = keys[next];
    if (keys[next - 1] != id || (keys[first] == id && first > 0 && keys[first - 1] == id)) return;
    i64 low = next, high = a.N;   // the run ends after `low`, before `high`
    while (high - low > 1) {
        const i64 middle = (low + high) / 2;
        if (keys[middle] == id) low = middle;
        else high = middle;
    }
    Numbers sum;
#pragma unroll
    for (int v = 0; v < LA_PER; v++) sum[v] = part_of(a, at.row, 1, at.d)[v];
#pragma unroll 4
    for (i64 chunk = at.row + 1; chunk <= low / CHUNK; chunk++)
#pragma unroll
        for (int v = 0; v < LA_PER; v++) sum[v] += part_of(a, chunk, 0, at.d)[v];
    store_row(a, id, at.d, sum);
}
