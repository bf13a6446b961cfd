// The pass of scan.cu by warpgroup products (sm_90a, bfloat16): the same equations, arguments and results.
//
// The producer warpgroup fills a ring of stages; LA_WARPS / 4 consumers hold 64 value rows of S^T each and read them, each at
// its own pace. Operands A, the state and the values, come from registers; operands B, q, k and P, from shared memory.
#include "arguments/matrix_state/ScanArguments.cuh"
#include "attention/producer.cuh"
#include "attention/group.cuh"
#include "attention/store.cuh"

constexpr int C = LA_C, K = LA_K, V = LA_V, WARPS = LA_WARPS, GROUPS = WARPS / 4, STAGES = LA_STAGES, DOTS = LA_DOTS;
constexpr int CHUNKS_OF_MARK = LA_MARK / C;
static_assert(C == 64 && (GROUPS == 1 || GROUPS == 2) && LA_TILES == 1, "a chunk is the rows of one product");
constexpr int KP = round_up(K, 64), VB = 64 * GROUPS, PARTS = (V + VB - 1) / VB;   // columns of the key tile, value rows of this block
static_assert(KP <= 128, "a wider state leaves no registers");
typedef Panels<KP, C> Keys;
typedef Panels<VB, C> Values;
typedef Panels<C, C> Gram;
// shared memory: stages of k, v, q, x; then P and dots of each group, sums of decays of each stage, the ring, addresses of rows
constexpr int STAGE = 2 * Keys::SIZE + Values::SIZE * (1 + DOTS), AT_GRAM = STAGES * STAGE, AT_DOTS = AT_GRAM + GROUPS * Gram::SIZE;
constexpr int AT_DECAY = AT_DOTS + DOTS * WARPS * C * 4;
constexpr int AT_RING = AT_DECAY + STAGES * StageDecay<C>::BYTES, AT_ADDRESSES = AT_RING + Ring<STAGES>::BYTES;
static_assert(LA_SHARED == AT_ADDRESSES + 64, "LA_SHARED is what the launch asks for");
static_assert(LA_MARK_BYTES == Marks<KP>::BYTES, "the size that the host allocates by");

typedef Traversal<C, PARTS, LA_REVERSE> ThisTraversal;

LA_DEVICE void producer(const ScanArguments& a, const ThisTraversal& traversal, u32 shared, Ring<STAGES> ring, int thread) {
    const Sequence& sequence = traversal.sequence;
    const u32 q = shared + AT_ADDRESSES, k = q + 16, v = q + 32, x = q + 48;
    if (thread == 0) {
        store_address(q, rows_of(a.q, sequence, traversal.head), a.q.token);
        store_address(k, rows_of(a.k, sequence, traversal.head), a.k.token);
        store_address(v, rows_of(a.v, sequence, traversal.head), a.v.token);
        if (DOTS) store_address(x, rows_of(a.x, sequence, traversal.head), a.x.token);
    }
    group_barrier(GROUPS);
    const int column = traversal.part * VB;
    const Gates<C> gates = {traversal.gates(a.g), a.g.token, {}};
    produce_ring<STAGE>(traversal, gates, shared, shared + AT_DECAY, ring, a.read, a.write, thread, [&](u32 at, int token) {
        load_rows_at<Keys, C, K>(at + Keys::SIZE + Values::SIZE, q, token, sequence.T, 0, thread);
        load_rows_at<Keys, C, K>(at, k, token, sequence.T, 0, thread);
        load_rows_at<Values, C, V>(at + Keys::SIZE, v, token, sequence.T, column, thread);
        if constexpr (DOTS) load_rows_at<Values, C, V>(at + 2 * Keys::SIZE + Values::SIZE, x, token, sequence.T, column, thread);
    });
}

LA_DEVICE void consumer(const ScanArguments& a, const ThisTraversal& traversal, u32 shared, Ring<STAGES> ring, int thread) {
    const Sequence& sequence = traversal.sequence;
    const int warp = thread >> 5, group = warp >> 2, lane = thread & 31, row = warp * 16, column = traversal.part * VB;
    const u32 gram = shared + AT_GRAM + group * Gram::SIZE, dots = shared + AT_DOTS + group * 4 * C * 4;
    const u64 b_gram = panel_descriptor(gram);
    const i64 first_mark = ((traversal.slot * a.marks * PARTS + traversal.part) * GROUPS + group) * 4 + (warp & 3);
    auto marked = [&](int step) { return DOTS && step < traversal.steps && traversal.chunk_of(step) % CHUNKS_OF_MARK == 0; };
    auto mark = [&](int step) { return first_mark + (i64)(traversal.chunk_of(step) / CHUNKS_OF_MARK) * (PARTS * WARPS); };

    StateRows<1, KP> S;
    load_start<V, K>(S, a, traversal, column + row, lane);
    auto write_product = [&](int step) {   // of the state before a chunk and its gradient
        const i64 at = mark(step);
        const float product = warp_sum(Marks<KP>::dot(a.states + at * Marks<KP>::BYTES, S, lane));
        if (lane == 0) a.products[at] = product;
    };
    if (!LA_REVERSE && marked(0)) write_product(0);
    char* to = own_rows(a.out, sequence, traversal.head);
    float* to_dots = a.dots + ((i64)(traversal.part * GROUPS + group) * a.heads + traversal.head) * a.tokens + sequence.index;

    if (traversal.steps > 0) {
        float p[C / 8][4], out[1][C / 8][4];
        u32 plain[C / 16][4], weighted[C / 16][4];
        auto begin_products = [&](int step) {   // P = Q K^T, out^T = S^T Q^T
            const u32 keys = shared + step % STAGES * STAGE;
            const u64 b_keys = panel_descriptor(keys), b_queries = panel_descriptor(keys + Keys::SIZE + Values::SIZE);
            u32 s[KP / 16][4];   // before any product: the state's registers are not touched while products run
            state_operands(s, S, 0);
            ring.wait_full(step);
            publish_shared();
            products_begin();
#pragma unroll
            for (int d = 0; d < KP / 16; d++) product_ABt(p, b_queries + Keys::along(d), b_keys + Keys::along(d), d > 0);
            products_commit();
#pragma unroll
            for (int d = 0; d < KP / 16; d++) product_ABt(out[0], s[d], b_queries + Keys::along(d), d > 0);
            products_commit();
        };
        auto end_products = [&](int step) {   // P in shared memory, out^T e^{start}, S^T e^{all}, operands of the values
            const u32 values = shared + step % STAGES * STAGE + Keys::SIZE;
            const StageDecay<C> decay = {shared + AT_DECAY + step % STAGES * StageDecay<C>::BYTES};
            float f[C / 8][4];
            gram_factors(f, decay, a.read * a.write, warp & 3, lane);
            products_wait<1>();
            accumulator_fence(p);
            store_gram<Gram, C>(p, f, gram, warp & 3, lane);
            publish_shared();
#pragma unroll
            for (int t = 0; t < C / 16; t++) {
                load_operand<Values>(plain[t], values, t * 16, row, lane);
                weigh_operand(weighted[t], plain[t], t * 16, decay.sums(), lane);
            }
            const Starts<C> starts(decay.sums(), lane);
            products_wait<0>();
            accumulator_fence(out[0]);
            starts.scale(out[0]);
            if (LA_DECAY) {
                const float carry = exp2_approx(decay.all());
                S.each([&](int, int, float& y) { y *= carry; });
            }
        };
        auto store = [&](int step) {   // outputs that are staged
            if (DOTS) store_dots<C, 128, 4>(to_dots, dots, traversal.token_of(step), sequence.T, thread & 127);
            store_group_rows<Values, C, V>(to, a.out.token, shared + step % STAGES * STAGE + Keys::SIZE, traversal.token_of(step), sequence.T, group * 64, column, thread & 127);
        };
        begin_products(0);
        end_products(0);
        for (int step = 0;; step++) {
            const u32 keys = shared + step % STAGES * STAGE, values = keys + Keys::SIZE, others = values + Values::SIZE + Keys::SIZE;
            group_barrier(group);   // P is whole
            products_begin();
#pragma unroll
            for (int t = 0; t < C / 16; t++) product_ABt(out[0], plain[t], b_gram + Gram::along(t), true);   // out^T += V^T P^T
            products_commit();
#pragma unroll
            for (int t = 0; t < C / 16; t++) write_state<Keys>(S, weighted[t], panel_descriptor(keys) + Keys::across(t));   // S^T += (V e^{end})^T K
            products_commit();
            if (!LA_REVERSE && marked(step + 1)) Marks<KP>::prefetch(a.states + mark(step + 1) * Marks<KP>::BYTES, lane);
            products_wait<1>();
            accumulator_fence(out[0]);
            if constexpr (DOTS) dot_outputs<Values, C>(out[0], others, row, dots + (warp & 3) * C * 4, lane);
            stage_rows<Bfloat16, Values, 1, C>(out, values, row, lane);
            group_barrier(group);   // P has been read too
            store(step);
            products_wait<0>();
            accumulator_fence(S.x[0]);
            if (!LA_REVERSE && marked(step + 1)) write_product(step + 1);
            if (LA_REVERSE && marked(step)) Marks<KP>::store(a.states + mark(step) * Marks<KP>::BYTES, S, lane);
            if (step + 1 == traversal.steps) break;
            ring.arrive_empty(step);
            begin_products(step + 1);
            end_products(step + 1);
        }
    }
    store_end<V, K>(S, a, traversal, traversal.is_end(), column + row, lane);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS + PRODUCERS, LA_BLOCKS) scan(const __grid_constant__ ScanArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const ThisTraversal traversal(a.offsets, a.T, a.heads, a.segments, a.chunks);
    if (traversal.segment > traversal.last) return;
    const Ring<STAGES> ring = {shared + AT_RING};
    if (threadIdx.x == 0) ring.init(2 * PRODUCERS, 32 * WARPS);
    __syncthreads();
    if (threadIdx.x >= 32 * WARPS) {
        release_registers<PRODUCER_REGISTERS<GROUPS>>();
        producer(a, traversal, shared, ring, threadIdx.x - 32 * WARPS);
    } else {
        claim_registers<CONSUMER_REGISTERS<GROUPS>>();
        consumer(a, traversal, shared, ring, threadIdx.x);
    }
}
