// The delta rule with one decay a token and key channel: what a chunk can know before it sees a state, chunk by chunk in parallel.
//
//     A = sqrt(beta_i) (1 + strict lower of L)^-1 sqrt(beta_j)
//
// One block of eight warps a chunk and head; four of them make the inverse of what all have made of the keys. A takes the place of
// the keys. With LA_EXACT a block redoes every LA_PIECES-th chunk of a head, in segments that the chain has flagged.
#include "vector/rows.cuh"
#include "vector/inverse.cuh"

constexpr int AT_GATES = Tokens::SIZE, AT_SCRATCH = AT_GATES + GATES, AT_DECAYS = AT_SCRATCH + Scratch<0>::SIZE;
constexpr int AT_NUMBERS = AT_DECAYS + 4 * WIDE * 4, AT_BARRIER = AT_NUMBERS + 2 * C * 4;   // roots of beta, rho
static_assert(LA_SHARED == AT_BARRIER + 16 && 4 * DIAGONAL <= PANEL && LA_BEFORE == 0, "LA_SHARED is what the launch asks for");
constexpr float SMALLEST = 1e-8f;   // of beta: its gradient divides by beta

LA_DEVICE float root_of_beta(const VectorArguments& a, const ChunkTraversal& traversal, int token) {
    if (token >= traversal.sequence.T) return sqrtf(SMALLEST);
    const Gate& x = a.beta;
    const float beta = x.data[traversal.sequence.row * x.batch + (traversal.sequence.first + token) * x.token + (u32)traversal.head / (u32)x.group * x.head];
    return sqrtf(beta < SMALLEST ? SMALLEST : beta);   // NaN stays NaN
}

LA_DEVICE void invert_chunk(const VectorArguments& a, const ChunkTraversal& traversal, int chunk, unsigned char* memory, u32 shared, int parity, int warp, int lane) {
    const Tiles t = {shared, shared, shared + AT_GATES, shared + AT_SCRATCH, shared + AT_DECAYS, 0, 0, 0};
    float *roots = (float*)(memory + AT_NUMBERS), *rhos = roots + C, *diagonals = (float*)(memory + AT_GATES + PANEL);
    const u32 barrier = shared + AT_BARRIER;
    const int thread = threadIdx.x, token = traversal.token(chunk), count = traversal.count(chunk);
    if (thread == 0) {
        barrier_expect(barrier, Tokens::SIZE + GATES);
        gates_in(t.gates, a.g, barrier, (u32)traversal.head / (u32)a.group_g, token, traversal.row);
        tile_in(t.k, a.k, barrier, (u32)traversal.head / (u32)a.group_k, token, traversal.row);
    }
    if (thread < C) roots[thread] = root_of_beta(a, traversal, chunk * C + thread);
    barrier_wait(barrier, parity);
    if (count < C) clear_tail(t, 0, count, warp, lane);
    const bool far = __any_sync(0xffffffffu, scale_keys(t, warp, lane));   // a barrier within: roots are there
    __syncthreads();
    RawBlock raw = {};
    if (LA_EXACT) raw = raw_block(a, a.k_rows, traversal, chunk, warp, lane);
    store_lower(t, roots, diagonals, far, raw, warp, lane);
    __syncthreads();
    if (warp < 2) {
        const int number = 2 * warp + (lane >> 4);
        const float* diagonal = diagonals + number * (DIAGONAL / 4);
        invert_diagonal(t.gates, diagonal, number, lane);
        store_rho(rhos, diagonal, roots, roots, number, lane);
    }
    __syncthreads();
    if (warp < 4) store_inverse(t.gates, t.k, rhos, roots, roots, warp, lane);
    publish_shared();
    __syncthreads();
    if (thread == 0) {
        run_out(a.inverses + traversal.stored(a, chunk) * Square::SIZE, t.k, Square::SIZE);
        out_commit();
        out_read();
    }
}

extern "C" __global__ void __launch_bounds__(256, LA_BLOCKS) inverse(const __grid_constant__ VectorArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    const int pieces = LA_EXACT ? LA_PIECES : a.segments * a.chunks;
    const ChunkTraversal traversal(a, pieces, 1);
    const int total = (traversal.sequence.T + C - 1) / C;
    if (traversal.first >= total || (LA_EXACT && a.segments == 1 && a.flags[traversal.slot] == 0)) return;
    if (threadIdx.x == 0) {
        barrier_init(shared + AT_BARRIER, 1);
        barriers_made();
    }
    __syncthreads();
    int parity = 0;
    for (int chunk = traversal.first; chunk < total; chunk += pieces) {
        if (LA_EXACT && a.flags[traversal.slot * a.segments + chunk / a.chunks] == 0) continue;
        invert_chunk(a, traversal, chunk, memory, shared, parity, warp, lane);
        parity ^= 1;
    }
}
