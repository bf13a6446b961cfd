// The delta rule with one decay a token and key channel: the factors of a chunk that need no state, chunk by chunk
// in parallel.
//
//     1 + N = (1 + strict lower of beta_i (k_i . k_j decayed from j to i))^-1
//
// One block of eight warps a chunk and head; four of them form the inverse of the gram matrix that all have formed. N
// takes the place of the keys, with beta behind it (strengths.cuh). LA_FACTORS: also what the transfer of a segment
// takes, W = (1 + N) beta Kc first. Where a block of 16 rows decays by more than quotients can bear, the chunk is
// reloaded and inverted exactly.
#include "vector/strengths.cuh"
#include "vector/rows.cuh"
#include "vector/inverse.cuh"

constexpr int AT_GATES = Tokens::SIZE, AT_SCRATCH = AT_GATES + GATES;
constexpr int EXACT_AT_ONCE = 2, AT_DECAYS = AT_SCRATCH + Scratch<0>::SIZE;
constexpr int AT_NUMBERS = AT_DECAYS + 4 * WIDE * 4,
              AT_BARRIER = AT_NUMBERS + 2 * C * 4;     // numbers: roots of beta, rho
constexpr int FACTORS = 2 * Tokens::SIZE + WIDE * 4;   // -W, Kd, decay of the chunk
static_assert(LA_INVERSE == Square::SIZE + STRENGTHS && LA_SHARED == AT_BARRIER + 32 && 4 * DIAGONAL <= PANEL &&
                  LA_BEFORE == 0,
              "LA_SHARED is the size that the launch requests");
static_assert(LA_INVERSE <= Scratch<0>::SIZE && EXACT_AT_ONCE * EXACT_BYTES <= Scratch<0>::SIZE,
              "these lie in the scratch");
constexpr float SMALLEST = 1e-8f;   // of beta: its gradient divides by beta

LA_DEVICE float root_of_beta(const VectorArguments& a, const ChunkTraversal& traversal, int token) {
    if (token >= traversal.sequence.T) return sqrtf(SMALLEST);
    const Gate& x = a.beta;
    const float beta = x.data[traversal.sequence.row * x.batch + (traversal.sequence.first + token) * x.token +
                              (u32)traversal.head / (u32)x.group * x.head];
    return sqrtf(beta < SMALLEST ? SMALLEST : beta);   // NaN stays NaN
}

// Where the parts of shared memory are
struct Places {
    unsigned char* memory;
    u32 shared;
    __device__ __forceinline__ Tiles tiles() const {
        return {shared, shared, shared + AT_GATES, shared + AT_SCRATCH, shared + AT_DECAYS, 0, 0, 0};
    }
    __device__ __forceinline__ float* roots() const { return (float*)(memory + AT_NUMBERS); }
    __device__ __forceinline__ float* diagonals() const { return (float*)(memory + AT_GATES + PANEL); }
    __device__ __forceinline__ u32 barrier() const { return shared + AT_BARRIER; }
    __device__ __forceinline__ i64* stored() const { return (i64*)(memory + AT_BARRIER + 8); }   // number of the chunk
    __device__ __forceinline__ int* count() const { return (int*)(memory + AT_BARRIER + 16); }
    __device__ __forceinline__ int* inner() const {
        return (int*)(memory + AT_BARRIER + 20);
    }   // whether its segment has a transfer: all but the last, or every one
};
// By the first 64 threads: a chunk's rows on their way, roots of beta, and values for all
LA_DEVICE void load_chunk(const VectorArguments& a, const ChunkTraversal& traversal, int chunk, Places at, int thread) {
    if (thread == 0) {
        const Tiles t = at.tiles();
        const int token = traversal.token(chunk), head = traversal.head;
        barrier_expect(at.barrier(), Tokens::SIZE + GATES);
        gates_in<true>(t.gates, a.g, at.barrier(), (u32)head / (u32)a.group_g, token, traversal.row);
        tile_in<true>(t.k, a.k, at.barrier(), (u32)head / (u32)a.group_k, token, traversal.row);
        *at.count() = traversal.count(chunk);
        *at.stored() = traversal.stored + chunk;
        if (LA_FACTORS) *at.inner() = chunk / a.chunks < traversal.last / a.chunks + a.every;
    }
    at.roots()[thread] = root_of_beta(a, traversal, chunk * C + thread);
}
// The same of the block's own chunk
LA_DEVICE void load_own_chunk(const VectorArguments& a, Places at, int thread) {
    const ChunkTraversal traversal(a, a.segments * a.chunks, 1);
    if (traversal.steps > 0) load_chunk(a, traversal, traversal.first, at, thread);
    else if (thread == 0) *at.count() = 0;
}
// Returns whether the chunk has to be inverted exactly instead
template <bool EXACT> LA_DEVICE bool invert_chunk(const VectorArguments& a, Places at, int warp, int lane) {
    const Tiles t = at.tiles();
    float *roots = at.roots(), *rhos = roots + C, *diagonals = at.diagonals();
    const int count = *at.count();
    barrier_wait(at.barrier(), EXACT);
    if (count < C) clear_tail(t, 0, count, warp, lane);
    ExactBlock exact = {};
    if constexpr (EXACT) exact = exact_block<EXACT_AT_ONCE, 1>(t, warp, lane);
    const bool far = __any_sync(
        0xffffffffu,
        scale_keys<EXACT>(t, LA_FACTORS && *at.inner() ? a.factors + *at.stored() * FACTORS : nullptr, warp, lane));
    const bool any = __syncthreads_or(far);
    if (!EXACT && any) return true;
    store_lower<EXACT>(t, roots, diagonals, exact, warp, lane);
    __syncthreads();
    if (warp < 2) {
        const int number = 2 * warp + (lane >> 4);
        const float* diagonal = diagonals + number * (DIAGONAL / 4);
        invert_diagonal(t.gates, diagonal, number, lane);
        store_rho(rhos, diagonal, roots, roots, number, lane);
    }
    __syncthreads();
    const u32 inverse = LA_FACTORS ? t.scratch : t.k;   // W is formed from the keys
    if (warp < 4) store_inverse<true>(t.gates, inverse, rhos, roots, roots, warp, lane);
    if (warp == 4) store_strengths(inverse + Square::SIZE, roots, rhos, lane);
    publish_shared();
    __syncthreads();
    if (threadIdx.x == 0) run_out(a.inverses + *at.stored() * LA_INVERSE, inverse, LA_INVERSE);
    if (LA_FACTORS && *at.inner()) {
        __syncwarp();
        store_erasers(t.gates, t, inverse, inverse + Square::SIZE, warp, lane);
        publish_shared();
        __syncthreads();
        if (threadIdx.x == 0) run_out(a.factors + *at.stored() * FACTORS, t.gates, Tokens::SIZE);
    }
    if (threadIdx.x == 0) {
        out_commit();
        out_read();
    }
    return false;
}

// Not inlined, so that it takes no registers from its caller
__device__ __noinline__ void invert_exactly(const VectorArguments& a, unsigned char* memory) {
    const Places at = {memory, shared_address(memory)};
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    publish_shared();   // copies follow the stores
    __syncthreads();
    if (warp < 2) load_own_chunk(a, at, threadIdx.x);
    __syncthreads();
    invert_chunk<true>(a, at, warp, lane);
}

extern "C" __global__ void __launch_bounds__(256, LA_BLOCKS) inverse(const __grid_constant__ VectorArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Places at = {memory, shared_address(memory)};
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        barrier_init(at.barrier(), 1);
        barriers_made();
    }
    if (warp < 2) load_own_chunk(a, at, threadIdx.x);
    __syncthreads();
    if (*at.count() <= 0 || !invert_chunk<false>(a, at, warp, lane)) return;
    invert_exactly(a, memory);
}
