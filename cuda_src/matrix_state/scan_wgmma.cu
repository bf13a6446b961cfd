// The pass of scan.cu by warpgroup products (sm_90a, bfloat16): the same equations, arguments and results.
//
// LA_WARPS / 4 warpgroups of a block hold 64 value rows of S^T each. Operands A, the state and the values, come from
// registers; operands B, q, k and P, from shared memory. Each group makes its share of the columns of P.
#include "attention/group.cuh"
#include "attention/store.cuh"
#include "attention/walk.cuh"

constexpr int C = LA_C, K = LA_K, V = LA_V, WARPS = LA_WARPS, GROUPS = WARPS / 4, STAGES = LA_STAGES;
constexpr int OUTPUTS = LA_OUTPUTS, DOTS = LA_DOTS, THREADS = 32 * WARPS;
static_assert(C == 64 && (GROUPS == 1 || GROUPS == 2) && LA_TILES == 1, "a chunk is the rows of one product");
constexpr int KP = round_up(K, 64), VB = 64 * GROUPS;   // columns of the key tile, value rows of this block
constexpr int TILES = C / GROUPS / 8;                   // of P, a group
typedef Panels<KP, C> Keys;
typedef Panels<VB, C> Values;
typedef Panels<C, C> Gram;
// shared memory of a stage: k, v, q, x, g; then P, sums of decays, dots, the diagonal of P
constexpr int STAGE = Keys::SIZE * (1 + OUTPUTS) + Values::SIZE * (1 + DOTS), AT_GATES = STAGES * STAGE;
constexpr int AT_GRAM = round_up(AT_GATES + STAGES * C * 4, 1024), AT_DECAY = AT_GRAM + OUTPUTS * Gram::SIZE;
constexpr int AT_DOTS = AT_DECAY + WARPS * Decay<C>::FLOATS * 4, AT_OWN = AT_DOTS + DOTS * WARPS * C * 4;
static_assert(LA_SHARED == AT_OWN + DOTS * C * 4, "LA_SHARED is what the launch asks for");
constexpr int PARTS = (V + VB - 1) / VB;
constexpr bool DOWN = LA_REVERSE == OUTPUTS;   // a segment's sum is walked from its end
constexpr int AT_ONCE = KP > 128 ? 64 : KP;    // columns of the state that are operands at a time
constexpr bool LATE = KP > 128;                // weigh values after the outputs: a wide state leaves no registers for both

extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS) scan(const __grid_constant__ ScanArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    int thread = threadIdx.x, lane = thread & 31;
    const int warp = thread >> 5, group = warp >> 2;
    const Walk<C, PARTS, DOWN> walk(a.offsets, a.T, a.heads, a.segments, a.chunks);
    const Sequence& sequence = walk.sequence;
    const int head = walk.head, segment = walk.segment, steps = walk.steps;
    const i64 slot = walk.slot;
    if (segment > walk.last) return;
    if (!OUTPUTS && walk.is_end()) return;   // nothing needs what the last segment adds
    const char *q = OUTPUTS ? rows_of(a.q, sequence, head) : nullptr, *k = rows_of(a.k, sequence, head), *v = rows_of(a.v, sequence, head);
    const char* x = DOTS ? rows_of(a.x, sequence, head) : nullptr;
    const float* g = walk.gates(a.g, a.g_batch, a.g_token, a.g_head, a.g_group);
    const int row = warp * 16, column = walk.part * VB;   // of this warp in the block, of the block in V

    auto load = [&](int step) {
        const int slot = step % STAGES, token = walk.token_of(step);
        const u32 at = shared + slot * STAGE;
        load_rows<Keys, C, THREADS, K>(at, k, a.k.token, token, sequence.T, 0, thread);
        load_rows<Values, C, THREADS, V>(at + Keys::SIZE, v, a.v.token, token, sequence.T, column, thread);
        if constexpr (OUTPUTS) load_rows<Keys, C, THREADS, K>(at + Keys::SIZE + Values::SIZE, q, a.q.token, token, sequence.T, 0, thread);
        if constexpr (DOTS) load_rows<Values, C, THREADS, V>(at + 2 * Keys::SIZE + Values::SIZE, x, a.x.token, token, sequence.T, column, thread);
        load_gates<C, THREADS>(shared + AT_GATES + slot * C * 4, g, a.g_token, token, sequence.T, thread);
    };
    auto write_dots = [&](int step) {   // of the chunk before
        store_dots<C, THREADS, WARPS>(a.dots + ((i64)walk.part * a.heads + head) * a.tokens + sequence.index, shared + AT_DOTS, walk.token_of(step), sequence.T, thread);
    };
    auto marked = [&](int step) { return DOTS && step < steps && walk.chunk_of(step) % LA_MARK == 0; };
    auto mark = [&](int step) { return ((slot * a.marks + walk.chunk_of(step) / LA_MARK) * PARTS + walk.part) * WARPS + warp; };

    StateRows<1, KP> S;
    if (OUTPUTS && a.start.data)
        S.template load<V, K>(a.start, a.start_group ? slot / a.start_group : slot * a.segments + segment, column + row, lane);
    else S.clear();
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < steps) load(s);
        copy_commit();
    }
    if (OUTPUTS) clear_gram<Gram, THREADS>(shared + AT_GRAM, thread);
    auto write_product = [&](int step) {   // of the state before a chunk and its gradient
        const i64 at = mark(step);
        const float product = warp_sum(Marks<KP>::dot(a.states + at * Marks<KP>::BYTES, S, lane));
        if (lane == 0) a.products[at] = product;
    };
    if (!LA_REVERSE && marked(0)) write_product(0);

    const Decay<C> decay = {shared + AT_DECAY + warp * Decay<C>::FLOATS * 4};
    float later = 0.f;   // OUTPUTS 0: log2 decay from this chunk's end to the segment's
    for (int step = 0; step < steps; step++) {
        const u32 keys = shared + (step % STAGES) * STAGE, values = keys + Keys::SIZE, queries = values + Values::SIZE, others = queries + Keys::SIZE;
        const u64 b_keys = panel_descriptor(keys), b_queries = panel_descriptor(queries), b_gram = panel_descriptor(shared + AT_GRAM);
        u32 s[AT_ONCE / 16][4];   // before any product: the state's registers are not touched while products run
        if constexpr (OUTPUTS) state_operands(s, S, 0);
        copy_wait<STAGES - 2>();
        publish_shared();
        __syncthreads();
        asm volatile("" : "+r"(lane), "+r"(thread));   // addresses are made anew in each chunk: kept over the loop they would spill
        if (DOTS && step) write_dots(step - 1);

        float p[TILES][4], out[1][C / 8][4];
        if constexpr (OUTPUTS) {
            products_begin();
#pragma unroll
            for (int d = 0; d < KP / 16; d++)   // P = Q K^T
                product<0, 0>(p, b_queries + Keys::along(d), b_keys + group * (TILES * 64) + Keys::along(d), d > 0);
            products_commit();
            products_begin();
#pragma unroll
            for (int d = 0; d < AT_ONCE / 16; d++) product<0, 0>(out[0], s[d], b_queries + Keys::along(d), d > 0);   // out^T = S^T Q^T
            products_commit();
        }
        if (step + STAGES - 1 < steps) load(step + STAGES - 1);
        if (!LA_REVERSE && marked(step + 1)) Marks<KP>::prefetch(a.states + mark(step + 1) * Marks<KP>::BYTES, lane);
        copy_commit();
        const float all = decay.set(shared + AT_GATES + (step % STAGES) * C * 4, a.read, a.write, later, lane);
        __syncwarp();
        if constexpr (OUTPUTS) {
            products_wait<1>();
            products_done(p);
            store_gram<DOTS, Gram>(p, shared + AT_GRAM, shared + AT_OWN, decay, a.read * a.write, group * TILES, warp & 3, lane);
            publish_shared();
        }
        u32 plain[C / 16][4], weighted[C / 16][4];
#pragma unroll
        for (int t = 0; t < C / 16; t++) {
            load_operand<Values>(plain[t], values, t * 16, row, lane);
            if (!LATE) weigh_operand(weighted[t], plain[t], t * 16, decay, lane);
        }
        if constexpr (OUTPUTS) {
            products_wait<0>();
            products_done(out[0]);
#pragma unroll
            for (int d0 = AT_ONCE / 16; d0 < KP / 16; d0 += AT_ONCE / 16) {
                state_operands(s, S, d0);
                products_begin();
#pragma unroll
                for (int d = 0; d < AT_ONCE / 16; d++) product<0, 0>(out[0], s[d], b_queries + Keys::along(d0 + d), true);
                products_commit();
                products_wait<0>();
                products_done(out[0]);
            }
            scale_starts<C>(out[0], decay, lane);
            if (LA_DECAY) {
                const float carry = exp2_approx(all);
                S.each([&](int, int, float& y) { y *= carry; });
            }
            __syncthreads();   // P is whole
        }
        auto finish = [&] {   // what remains of the outputs after their products
            products_done(out[0]);
            if constexpr (DOTS) dot_outputs<Values, C>(out[0], plain, others, row, shared + AT_OWN, shared + AT_DOTS + warp * C * 4, lane);
        };
        products_begin();
        if constexpr (OUTPUTS) {
#pragma unroll
            for (int t = 0; t < C / 16; t++) product<0, 0>(out[0], plain[t], b_gram + Gram::along(t), true);   // out^T += V^T P^T
            products_commit();
        }
        if constexpr (LATE) {
            if constexpr (OUTPUTS) {
                products_wait<0>();
                finish();
            }
#pragma unroll
            for (int t = 0; t < C / 16; t++) weigh_operand(weighted[t], plain[t], t * 16, decay, lane);
            products_begin();
        }
#pragma unroll
        for (int t = 0; t < C / 16; t++) write_state<Keys>(S, weighted[t], b_keys + Keys::across(t));   // S^T += (V e^{end})^T K
        products_commit();
        if constexpr (OUTPUTS) {
            if constexpr (!LATE) {
                products_wait<1>();
                finish();
            }
            stage_rows<Bfloat16, Values, 1, C>(out, values, row, lane);
            group_barrier(group);
            store_rows<Values, C, 64, V, 128>(own_rows(a.out, sequence, head), a.out.token, values, walk.token_of(step), sequence.T, group * 64, column, thread & 127);
        }
        products_wait<0>();
        products_done(S.x[0]);
        if (!LA_REVERSE && marked(step + 1)) write_product(step + 1);
        if (LA_REVERSE && marked(step)) Marks<KP>::store(a.states + mark(step) * Marks<KP>::BYTES, S, lane);
        if (!OUTPUTS) {
            later += all;
            if (later < FLOOR_LOG2) break;   // all that is earlier is multiplied by an exact zero
        }
    }
    copy_wait<0>();
    if (DOTS && steps > 0) {
        __syncthreads();
        write_dots(steps - 1);
    }
    if (!OUTPUTS) {
        S.template store<V, K>(a.end, slot * a.segments + segment, column + row, lane);
        if (thread == 0 && walk.part == 0) a.sums[slot * a.segments + segment] = later;
    } else if (a.end.data && walk.is_end() && head % a.end_group == 0)
        S.template store<V, K>(a.end, slot / a.end_group, column + row, lane);
}
