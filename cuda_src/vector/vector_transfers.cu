// What the inner segments of a sequence do to the state under the delta rule with a vector decay: S -> S M + added, value row by key
// column, as delta_adds.cu, whose matrices delta_segments.cu multiplies.
//
//     E = V^T - S Kc^T        U = E beta + (E beta) N^T        S <- S D + U Kd
//
// from a state of zeros (in the first segment from the initial state, so that its `added` is what the next begins with), and without
// values from the rows of the identity. -Kc, Kd, D and N are those of vector_inverse.cu: no row is scaled here. A block is one
// warpgroup on 64 rows of one of the two. Kc and Kd have one place each, that is filled again once they have been read.
#include "vector/products.cuh"

constexpr int FACTORS = 2 * Tokens::SIZE + WIDE * 4, AT_WRITERS = Tokens::SIZE, AT_PAIRS = 2 * Tokens::SIZE;   // -Kc; Kd; two of v, N and strengths, D
constexpr int HALF = PANEL, AT_DECAY = HALF + LA_INVERSE, PAIR = AT_DECAY + WIDE * 4, AT_BARRIERS = AT_PAIRS + 2 * 17408;
static_assert(PAIR <= 17408 && LA_SHARED == AT_BARRIERS + 64 && LA_WARPS == 8 && LA_TILES == 1, "LA_SHARED is what the launch asks for");

struct Source {   // by one thread: what comes in
    const VectorArguments& a;
    const ChunkTraversal& traversal;
    u32 shared;
    int half;   // of the values, or -1
    __device__ __forceinline__ u32 pair(int step) const { return shared + AT_PAIRS + (step & 1) * 17408; }
    __device__ __forceinline__ u32 bar(int n) const { return shared + AT_BARRIERS + 8 * n; }   // Kc, Kd, pairs
    __device__ __forceinline__ const char* factors(int step) const { return a.factors + (traversal.stored + traversal.first + step) * FACTORS; }
    __device__ __forceinline__ void readers(int step) const {
        barrier_expect(bar(0), Tokens::SIZE);
        run_in(shared, factors(step), Tokens::SIZE, bar(0));
    }
    __device__ __forceinline__ void writers(int step) const {
        barrier_expect(bar(1), Tokens::SIZE);
        run_in(shared + AT_WRITERS, factors(step) + Tokens::SIZE, Tokens::SIZE, bar(1));
    }
    __device__ __forceinline__ void others(int step) const {
        const int chunk = traversal.first + step;
        const u32 at = pair(step), full = bar(2 + (step & 1));
        barrier_expect(full, (half < 0 ? 0 : HALF) + LA_INVERSE + WIDE * 4);
        if (half >= 0) box_in(at, a.v, full, 64 * half, (u32)traversal.head / (u32)a.group_v, traversal.token(chunk), traversal.row);
        run_in(at + HALF, a.inverses + (traversal.stored + chunk) * LA_INVERSE, LA_INVERSE, full);
        run_in(at + AT_DECAY, factors(step) + 2 * Tokens::SIZE, WIDE * 4, full);
    }
};

extern "C" __global__ void __launch_bounds__(128, LA_BLOCKS) transfers(const __grid_constant__ VectorArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const int half = blockIdx.x & 1, segments = a.segments - 1, warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    const bool transfer = blockIdx.x & 2, one = threadIdx.x == 0;
    const ChunkTraversal traversal(a, segments, a.chunks, blockIdx.x >> 2);
    if (traversal.segment >= traversal.last || (transfer && traversal.segment == 0)) return;
    const Source source = {a, traversal, shared, transfer ? -1 : half};
    if (one) {
        for (int n = 0; n < 4; n++) barrier_init(source.bar(n), 1);
        barriers_made();
        source.readers(0);
        source.others(0);
        source.writers(0);
    }
    __syncthreads();
    const int row = 64 * half + 16 * warp;
    StateRows<1, WIDE> state;
    float (&S)[16][4] = state.x[0];
    state.clear();
    if (transfer) state.each([&](int r, int c, float& y) { y = row + r + (lane >> 2) == c + (lane & 3) * 2 ? 1.f : 0.f; });
    else if (traversal.segment == 0 && a.start.data) state.template load<LA_V, LA_K>(a.start, traversal.slot / a.start_group, row, lane);
    for (int step = 0; step < traversal.steps; step++) {
        const bool more = step + 1 < traversal.steps;
        const u32 at = source.pair(step);
        float x[8][4];
        u32 operands[8][4], news[4][4];
        state_operands(operands, state, 0);
        if (one && more) source.others(step + 1);
        __syncwarp();
        barrier_wait(source.bar(2 + (step & 1)), step >> 1 & 1);
        scale_state(S, at + AT_DECAY, lane);   // before products begin
        if (!transfer) load_values(x, at, 16 * warp, lane);
        barrier_wait(source.bar(0), step & 1);
        begin_product<Tokens>(x, operands, shared, !transfer);   // E
        end_product<0>(x);
        group_barrier(0);
        if (one && more) source.readers(step + 1);
        __syncwarp();
        solve_errors(x, news, at + HALF, at + HALF + Square::SIZE, lane, [] {});   // U
        barrier_wait(source.bar(1), step & 1);
        accumulator_fence(S);
        products_begin();
#pragma unroll
        for (int d = 0; d < 4; d++) product_AB_wide(S, news[d], panels_descriptor<Tokens>(shared + AT_WRITERS) + Tokens::across(d));   // S D + U Kd
        products_commit();
        end_product<0>(S);
        group_barrier(0);
        if (one && more) source.writers(step + 1);
        __syncwarp();
    }
    if (transfer && a.transposed) state.template store<WIDE, WIDE>({a.transposed, STATE, 1, WIDE}, traversal.slot * segments + traversal.segment, row, lane);
    state.template store<WIDE, WIDE>({transfer ? a.transfers : a.added, STATE, WIDE, 1}, traversal.slot * segments + traversal.segment, row, lane);
}
