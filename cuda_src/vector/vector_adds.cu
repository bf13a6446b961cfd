// The offset of a segment, and its decay, which is diagonal (sm_90a, bfloat16):
//
//     S^T = sum over the segment's chunks of V^T (k times the decay from each token to the segment's end)
//
// The segment is traversed from its end, so that nothing is rescaled and the scan stops once all that is earlier has
// decayed to nothing in float32: exactly. Eight warps scale the keys in place, warp (block, panel) as in decay.cuh;
// each is also a warp of the products.
#include "tile/wgmma_wide.cuh"
#include "attention/state.cuh"
#include "vector/traversal.cuh"
#include "arguments/matrix_state/VectorArguments.cuh"   // after TensorMap

// stages of k, v, log decays; decays of blocks; barriers
constexpr int STAGES = LA_STAGES, STAGE = 2 * Tokens::SIZE + GATES, AT_DECAYS = STAGES * STAGE,
              AT_BARRIERS = AT_DECAYS + 4 * WIDE * 4;
static_assert(LA_SHARED == AT_BARRIERS + 64 && STAGES >= 2 && STAGES <= 8 && LA_WARPS == 8 && LA_TILES == 1,
              "LA_SHARED is the size that the launch requests");

// k times Suf and the later decay, in place: rows from `first` on, from the last of eight
LA_DEVICE void scale_keys(u32 keys, const float2 (&a)[ROWS], float2 later, int lane) {
#pragma unroll
    for (int first = 8; first >= 0; first -= 8) {
        u32 k[8];
#pragma unroll
        for (int r = 0; r < 8; r++) k[r] = load_word(keys + lane_row(first + r, lane));
#pragma unroll
        for (int r = 7; r >= 0; r--) {
            store_word(keys + lane_row(first + r, lane), pack(floats_of(k[r]) * later));
            later *= a[first + r];
        }
    }
}
// The segment from its end: its keys' sum in S, its decay in `all`
LA_DEVICE void add_chunks(float (&S)[16][4], float2& all, const VectorArguments& a, const ChunkTraversal& traversal,
                          u32 shared, int warp, int lane) {
    const int block = warp >> 1, panel = warp & 1;
    const u32 own = panel * PANEL + block * BLOCK_BYTES, decays = shared + AT_DECAYS;
    auto full = [&](int i) { return shared + AT_BARRIERS + i % STAGES * 8; };
    auto load = [&](int i) {   // chunk i from the end
        const u32 at = shared + i % STAGES * STAGE;
        const int token = traversal.token(traversal.first + traversal.steps - 1 - i), head = traversal.head;
        barrier_expect(full(i), STAGE);
        gates_in(at + 2 * Tokens::SIZE, a.g, full(i), (u32)head / (u32)a.group_g, token, traversal.row);
        tile_in(at, a.k, full(i), (u32)head / (u32)a.group_k, token, traversal.row);
        tile_in(at + Tokens::SIZE, a.v, full(i), (u32)head / (u32)a.group_v, token, traversal.row);
    };
    if (threadIdx.x == 0)
        for (int i = 0; i < STAGES - 1 && i < traversal.steps; i++) load(i);
    for (int i = 0; i < traversal.steps; i++) {
        const u32 at = shared + i % STAGES * STAGE;
        barrier_wait(full(i), i / STAGES & 1);
        float2 x[ROWS], d = {1.f, 1.f};
#pragma unroll
        for (int r = 0; r < ROWS; r++) x[r] = load_gate(gates_of(at + 2 * Tokens::SIZE, block, panel, lane), r, lane);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            x[r] = decay_of(x[r]);
            d *= x[r];
        }
        store_decay(decays, d, block, panel, lane);
        products_wait<0>();   // of the chunk before: its stage is free after the barrier
        accumulator_fence(S);
        __syncthreads();
        if (threadIdx.x == 0 && i + STAGES - 1 < traversal.steps) load(i + STAGES - 1);
        const Reach reach = reach_of(decays, d, block, panel, lane);
        scale_keys(at + own, x, all * reach.behind, lane);
        const u32 of = decays + panel * 256 + lane * 8;
        all *= load_shared2(of) * load_shared2(of + 512) * (load_shared2(of + 1024) * load_shared2(of + 1536));
        publish_shared();
        const bool goes_on = __syncthreads_or(fmaxf(all.x, all.y) > 0.f);
        accumulator_fence(S);
        products_begin();
#pragma unroll
        for (int t = 0; t < 4; t++)
            product_AtB_wide(S, panel_descriptor(at + Tokens::SIZE + (warp >> 2) * PANEL) + Tokens::across(t),
                             panels_descriptor<Tokens>(at) + Tokens::across(t));
        products_commit();
        if (!goes_on) {
            for (int n = i + 1; n < i + STAGES && n < traversal.steps; n++)
                barrier_wait(full(n), n / STAGES & 1);   // copies on their way arrive
            break;
        }
    }
    products_wait<0>();
    accumulator_fence(S);
}

extern "C" __global__ void __launch_bounds__(256, LA_BLOCKS) adds(const __grid_constant__ VectorArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const ChunkTraversal traversal(a, a.segments - 1, a.chunks);
    if (traversal.segment >= traversal.last + a.every)
        return;   // nothing reads the offset of the last segment, but other ranks
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) barrier_init(shared + AT_BARRIERS + 8 * s, 1);
        barriers_made();
    }
    __syncthreads();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    StateRows<1, WIDE> S;
    S.clear();
    float2 all = {1.f, 1.f};
    add_chunks(S.x[0], all, a, traversal, shared, warp, lane);
    const i64 slot = traversal.slot * (a.segments - 1) + traversal.segment;
    S.template store<WIDE, WIDE>({a.added, STATE, WIDE, 1}, slot, 16 * warp, lane);
    if (warp < 2) *(float2*)(a.decays + slot * WIDE + 64 * warp + 2 * lane) = all;   // block 0, either panel
}
