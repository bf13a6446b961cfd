// What a segment adds to the state, by warpgroup products (sm_90a, bfloat16): scan.cu's pass without outputs.
//
//     S = sum over the segment's tokens j of e^{g after j} write k_j^T v_j
//
// The segment is walked from its end, so that it may stop once all that is earlier has decayed to nothing.
#include "attention/group.cuh"
#include "attention/walk.cuh"

constexpr int C = LA_C, K = LA_K, V = LA_V, WARPS = LA_WARPS, GROUPS = WARPS / 4, STAGES = LA_STAGES, THREADS = 32 * WARPS;
static_assert(C == 64 && LA_TILES == 1 && LA_OUTPUTS == 0, "four products a chunk");
constexpr int KP = round_up(K, 64), VB = 64 * GROUPS, PARTS = (V + VB - 1) / VB;   // columns of the key tile, value rows of this block
typedef Panels<KP, C> Keys;
typedef Panels<VB, C> Values;
// shared memory: stages of k, v; their log decays; each warp's sums of decays
constexpr int STAGE = Keys::SIZE + Values::SIZE, AT_GATES = STAGES * STAGE, AT_DECAY = AT_GATES + STAGES * C * 4;
static_assert(LA_SHARED == AT_DECAY + WARPS * Decay<C>::FLOATS * 4, "LA_SHARED is what the launch asks for");

extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS) scan(const __grid_constant__ ScanArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const Walk<C, PARTS, !LA_REVERSE> walk(a.offsets, a.T, a.heads, a.segments, a.chunks);
    const Sequence& sequence = walk.sequence;
    if (walk.segment > walk.last || walk.is_end()) return;   // nothing needs what the last segment adds
    const char *k = rows_of(a.k, sequence, walk.head), *v = rows_of(a.v, sequence, walk.head);
    const float* g = walk.gates(a.g, a.g_batch, a.g_token, a.g_head, a.g_group);
    const int row = warp * 16, column = walk.part * VB, steps = walk.steps;   // of this warp in the block, of the block in V

    auto load = [&](int step) {
        const int stage = step % STAGES, token = walk.token_of(step);
        const u32 at = shared + stage * STAGE;
        load_rows<Keys, C, THREADS, K>(at, k, a.k.token, token, sequence.T, 0, thread);
        load_rows<Values, C, THREADS, V>(at + Keys::SIZE, v, a.v.token, token, sequence.T, column, thread);
        load_gates<C, THREADS>(shared + AT_GATES + stage * C * 4, g, a.g_token, token, sequence.T, thread);
    };
    StateRows<1, KP> S;
    S.clear();
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < steps) load(s);
        copy_commit();
    }
    const Decay<C> decay = {shared + AT_DECAY + warp * Decay<C>::FLOATS * 4};
    float later = 0.f;   // log2 decay from this chunk's end to the segment's
    for (int step = 0; step < steps && later >= FLOOR_LOG2; step++) {   // below the floor all that is left is an exact zero
        const u32 keys = shared + step % STAGES * STAGE, values = keys + Keys::SIZE;
        copy_wait<STAGES - 2>();
        publish_shared();
        __syncthreads();
        if (step + STAGES - 1 < steps) load(step + STAGES - 1);
        copy_commit();
        later += decay.set(shared + AT_GATES + step % STAGES * C * 4, 1.f, a.write, later, lane);
        __syncwarp();
        u32 weighted[C / 16][4];
#pragma unroll
        for (int t = 0; t < C / 16; t++) {
            u32 plain[4];
            load_operand<Values>(plain, values, t * 16, row, lane);
            weigh_operand(weighted[t], plain, t * 16, decay, lane);
        }
        products_begin();
#pragma unroll
        for (int t = 0; t < C / 16; t++) write_state<Keys>(S, weighted[t], panel_descriptor(keys) + Keys::across(t));   // S^T += (V e^{end})^T K
        products_commit();
        products_wait<0>();
        products_done(S.x[0]);
    }
    copy_wait<0>();
    const i64 slot = walk.slot * a.segments + walk.segment;
    S.template store<V, K>(a.end, slot, column + row, lane);
    if (thread == 0 && walk.part == 0) a.sums[slot] = later;
}
