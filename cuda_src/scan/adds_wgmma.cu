// The offset of a segment, by warpgroup products (sm_90a, bfloat16): scan.cu's pass without outputs.
//
//     S = sum over the segment's tokens j of e^{g after j} write k_j^T v_j
//
// The segment is traversed from its end, so that it may stop once all that is earlier has decayed to nothing.
#include "arguments/matrix_state/ScanArguments.cuh"
#include "attention/producer.cuh"
#include "attention/group.cuh"

constexpr int C = LA_C, K = LA_K, V = LA_V, WARPS = LA_WARPS, GROUPS = WARPS / 4, STAGES = LA_STAGES;
static_assert(C == 64 && LA_TILES == 1 && LA_OUTPUTS == 0, "four products a chunk");
constexpr int KP = round_up(K, 64), VB = 64 * GROUPS,
              PARTS = (V + VB - 1) / VB;   // columns of the key tile, value rows of this block
typedef Panels<KP, C> Keys;
typedef Panels<VB, C> Values;
// shared memory: stages of k, v; sums of decays of each; the ring; addresses of rows
constexpr int STAGE = Keys::SIZE + Values::SIZE, AT_DECAY = STAGES * STAGE,
              AT_RING = AT_DECAY + STAGES * StageDecay<C>::BYTES;
constexpr int AT_ADDRESSES = AT_RING + Ring<STAGES>::BYTES;
static_assert(LA_SHARED == AT_ADDRESSES + 64, "LA_SHARED is the size that the launch requests");

typedef Traversal<C, PARTS, !LA_REVERSE> ThisTraversal;

// Both sides add up `later`, the log2 decay from a chunk's end to the segment's, and stop alike: below the floor all
// that is left is multiplied by an exact zero.
LA_DEVICE void producer(const ScanArguments& a, const ThisTraversal& traversal, u32 shared, Ring<STAGES> ring,
                        int thread) {
    const Sequence& sequence = traversal.sequence;
    const char *k = rows_of(a.k, sequence, traversal.head), *v = rows_of(a.v, sequence, traversal.head);
    const int column = traversal.part * VB;
    Gates<C> gates = {traversal.gates(a.g), a.g.token, {}};
    gates.load(traversal, thread >> 5, thread & 31);
    float later = 0.f;
    for (int step = 0; step < traversal.steps && later >= FLOOR_LOG2; step++) {
        const int stage = step % STAGES, token = traversal.token_of(step);
        const u32 at = shared + stage * STAGE, decay = shared + AT_DECAY + stage * StageDecay<C>::BYTES;
        ring.wait_empty(step);
        load_rows<Keys, C, PRODUCERS, K>(at, k, a.k.token, token, sequence.T, 0, thread);
        load_rows<Values, C, PRODUCERS, V>(at + Keys::SIZE, v, a.v.token, token, sequence.T, column, thread);
        gates.store(traversal, step, decay, 1.f, a.write, later, thread);
        ring.arrive_full(step);
        group_barrier(GROUPS);
        later += StageDecay<C>{decay}.all();
    }
    copy_wait<0>();
}

LA_DEVICE void consumer(const ScanArguments& a, const ThisTraversal& traversal, u32 shared, Ring<STAGES> ring,
                        int thread) {
    const int warp = thread >> 5, lane = thread & 31, row = warp * 16;   // of this warp in the block
    StateRows<1, KP> S;
    S.clear();
    float later = 0.f;
    for (int step = 0; step < traversal.steps && later >= FLOOR_LOG2; step++) {
        const u32 keys = shared + step % STAGES * STAGE, values = keys + Keys::SIZE;
        const StageDecay<C> decay = {shared + AT_DECAY + step % STAGES * StageDecay<C>::BYTES};
        ring.wait_full(step);
        publish_shared();
        u32 weighted[C / 16][4];
#pragma unroll
        for (int t = 0; t < C / 16; t++) {
            u32 plain[4];
            load_operand<Values>(plain, values, t * 16, row, lane);
            weigh_operand(weighted[t], plain, t * 16, decay.sums(), lane);
        }
        products_begin();
#pragma unroll
        for (int t = 0; t < C / 16; t++)
            write_state<Keys>(S, weighted[t], panel_descriptor(keys) + Keys::across(t));   // S^T += (V e^{end})^T K
        products_commit();
        later += decay.all();
        products_wait<0>();
        accumulator_fence(S.x[0]);
        ring.arrive_empty(step);
    }
    const i64 slot = traversal.slot * a.segments + traversal.segment;
    S.template store<V, K>(a.end, slot, traversal.part * VB + row, lane);
    if (thread == 0 && traversal.part == 0) a.sums[slot] = later;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS + PRODUCERS, LA_BLOCKS)
    scan(const __grid_constant__ ScanArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const ThisTraversal traversal(a.offsets, a.T, a.heads, a.segments, a.chunks);
    if (traversal.segment > traversal.last || (traversal.is_end() && !a.every))
        return;   // nothing reads the offset of the last segment, but other ranks
    const Ring<STAGES> ring = {shared + AT_RING};
    if (threadIdx.x == 0) ring.init(2 * PRODUCERS, 32 * WARPS);
    __syncthreads();
    if (threadIdx.x >= 32 * WARPS) producer(a, traversal, shared, ring, threadIdx.x - 32 * WARPS);
    else consumer(a, traversal, shared, ring, threadIdx.x);
}
