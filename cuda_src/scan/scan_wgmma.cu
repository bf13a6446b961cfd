// The pass of scan.cu by warpgroup products (sm_90a, bfloat16): the same equations, arguments and results.
//
// The producer warpgroup fills a ring of stages; LA_WARPS / 4 consumers hold 64 value rows of S^T each and read them,
// each at its own pace. Operands A, the state and the values, come from registers; operands B, q, k and P, from shared
// memory.
#include "arguments/matrix_state/ScanArguments.cuh"
#include "attention/producer.cuh"
#include "attention/group.cuh"
#include "attention/store.cuh"

constexpr int C = LA_C, K = LA_K, V = LA_V, WARPS = LA_WARPS, GROUPS = WARPS / 4, STAGES = LA_STAGES, DOTS = LA_DOTS;
constexpr int CHUNKS_OF_MARK = LA_MARK / C;
static_assert(C == 64 && (GROUPS == 1 || GROUPS == 2) && LA_TILES == 1, "a chunk is the rows of one product");
constexpr int KP = round_up(K, 64), VB = 64 * GROUPS,
              PARTS = (V + VB - 1) / VB;   // columns of the key tile, value rows of this block
static_assert(KP <= 128, "a wider state leaves no registers");
typedef Panels<KP, C> Keys;
typedef Panels<VB, C> Values;
typedef Panels<C, C> Gram;
// shared memory: stages of k, v, q, x; then P and dots of each group, sums of decays of each stage, the ring, addresses
// of rows
constexpr int STAGE = 2 * Keys::SIZE + Values::SIZE * (1 + DOTS), AT_GRAM = STAGES * STAGE,
              AT_DOTS = AT_GRAM + GROUPS * Gram::SIZE;
constexpr int AT_DECAY = AT_DOTS + DOTS * WARPS * C * 4;
constexpr int AT_RING = AT_DECAY + STAGES * StageDecay<C>::BYTES, AT_ADDRESSES = AT_RING + Ring<STAGES>::BYTES;
static_assert(LA_SHARED == AT_ADDRESSES + 64, "LA_SHARED is the size that the launch requests");
static_assert(LA_MARK_BYTES == Marks<KP>::BYTES, "the size that the host allocates by");

typedef Traversal<C, PARTS, LA_REVERSE> ThisTraversal;

LA_DEVICE void producer(const ScanArguments& a, const ThisTraversal& traversal, u32 shared, Ring<STAGES> ring,
                        int thread) {
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
    produce_ring(traversal, gates, shared + AT_DECAY, ring, a.read, a.write, thread, [&](int step) {
        const u32 at = shared + step % STAGES * STAGE;
        const int token = traversal.token_of(step);
        load_rows_at<Keys, C, K>(at + Keys::SIZE + Values::SIZE, q, token, sequence.T, 0, thread);
        load_rows_at<Keys, C, K>(at, k, token, sequence.T, 0, thread);
        load_rows_at<Values, C, V>(at + Keys::SIZE, v, token, sequence.T, column, thread);
        if constexpr (DOTS)
            load_rows_at<Values, C, V>(at + 2 * Keys::SIZE + Values::SIZE, x, token, sequence.T, column, thread);
    });
}

// A thread of a consumer: 16 value rows a warp of S^T and of out^T
struct Consumer {
    const ScanArguments& a;
    const ThisTraversal& traversal;
    const u32 shared;
    const Ring<STAGES> ring;
    const int thread, warp, group, lane, row, column;   // row: of this warp in the block, column: of the block in V
    const u32 gram, dots;
    const i64 first_mark;
    char* to;
    float* to_dots;
    StateRows<1, KP> S;
    float p[C / 8][4], out[1][C / 8][4];
    u32 plain[C / 16][4], weighted[C / 16][4];   // operands of the values

    __device__ __forceinline__ Consumer(const ScanArguments& a, const ThisTraversal& traversal, u32 shared,
                                        Ring<STAGES> ring, int thread)
        : a(a),
          traversal(traversal),
          shared(shared),
          ring(ring),
          thread(thread),
          warp(thread >> 5),
          group(warp >> 2),
          lane(thread & 31),
          row(warp * 16),
          column(traversal.part * VB),
          gram(shared + AT_GRAM + group * Gram::SIZE),
          dots(shared + AT_DOTS + group * 4 * C * 4),
          first_mark(((traversal.slot * a.marks * PARTS + traversal.part) * GROUPS + group) * 4 + (warp & 3)) {}

    __device__ __forceinline__ bool marked(int step) const {
        return DOTS && step < traversal.steps && traversal.chunk_of(step) % CHUNKS_OF_MARK == 0;
    }
    __device__ __forceinline__ i64 mark(int step) const {
        return first_mark + (i64)(traversal.chunk_of(step) / CHUNKS_OF_MARK) * (PARTS * WARPS);
    }
    // of the state before a chunk and its gradient
    __device__ __forceinline__ void store_product(int step) {
        const i64 at = mark(step);
        const float product = warp_sum(Marks<KP>::dot(a.states + at * Marks<KP>::BYTES, S, lane));
        if (lane == 0) a.products[at] = product;
    }
    // <S, D> with the gradient D of a position joins the dots of the token before it, by the thread that has stored them
    __device__ __forceinline__ void dot_position(int step) {
        const int index = position_after(a, traversal.sequence, traversal.chunk_of(step));
        if (!has_position(a, index, traversal.head)) return;
        float sum = 0.f;
        S.template each_at<V, K>(a.at, position_slot(a, index, traversal), column + row, lane,
                                 [&](const float* p, const float& y, bool valid) {
                                     if (valid) sum += y * *p;
                                 });
        sum = warp_sum(sum);
        const int token = traversal.token_of(step), last = min(C, traversal.sequence.T - token) - 1;
        group_barrier(group);   // the dots have been read
        if (lane == 0) store_shared(dots + (warp & 3) * 4, sum);
        group_barrier(group);
        if ((thread & 127) == last) {
            const float2 x = load_shared2(dots), y = load_shared2(dots + 8);
            to_dots[token + last] += x.x + x.y + (y.x + y.y);
        }
    }
    // load, gram and read, begun: P = Q K^T, out^T = S^T Q^T
    __device__ __forceinline__ void begin_products(int step) {
        const u32 keys = shared + step % STAGES * STAGE;
        const u64 b_keys = panel_descriptor(keys), b_queries = panel_descriptor(keys + Keys::SIZE + Values::SIZE);
        u32 s[KP / 16][4];   // before any product: the state's registers are not touched while products run
        state_operands(s, S, 0);
        ring.wait_full(step);
        publish_shared();
        products_begin();
        multiply_ABt<Keys>(p, b_queries, b_keys);
        products_commit();
        multiply_ABt<Keys>(out[0], s, b_queries);
        products_commit();
    }
    // P in shared memory, out^T e^{start}, S^T e^{all}, operands of the values
    __device__ __forceinline__ void end_products(int step) {
        const u32 values = shared + step % STAGES * STAGE + Keys::SIZE;
        const StageDecay<C> decay = {shared + AT_DECAY + step % STAGES * StageDecay<C>::BYTES};
        float f[C / 8][4];
        gram_factors(f, decay, a.read * a.write, warp & 3, lane);
        products_wait<1>();
        accumulator_fence(p);
        store_gram<Gram, C>(p, f, gram, warp & 3, lane);
        publish_shared();
        load_operands<Values>(plain, weighted, values, decay.sums(), row, lane);
        end_read<C>(out[0], S, decay, lane);
    }
    // out^T += V^T P^T, stored; S^T += (V e^{end})^T K
    __device__ __forceinline__ void write(int step) {
        const u32 keys = shared + step % STAGES * STAGE, values = keys + Keys::SIZE,
                  others = values + Values::SIZE + Keys::SIZE;
        group_barrier(group);   // P is whole
        products_begin();
        add_ABt<Gram>(out[0], plain, panel_descriptor(gram));
        products_commit();
        write_chunk<Keys>(S, weighted, panel_descriptor(keys));
        products_commit();
        if (!LA_REVERSE && marked(step + 1)) Marks<KP>::prefetch(a.states + mark(step + 1) * Marks<KP>::BYTES, lane);
        products_wait<1>();
        accumulator_fence(out[0]);
        if constexpr (DOTS) dot_outputs<Values, C>(out[0], others, row, dots + (warp & 3) * C * 4, lane);
        stage_rows<Bfloat16, Values, 1, C>(out, values, row, lane);
        group_barrier(group);   // P has been read too
        if (DOTS) store_dots<C, 128, 4>(to_dots, dots, traversal.token_of(step), traversal.sequence.T, thread & 127);
        store_group_rows<Values, C, V>(to, a.out.token, values, traversal.token_of(step), traversal.sequence.T,
                                       group * 64, column, thread & 127);
        products_wait<0>();
        accumulator_fence(S.x[0]);
        if (!LA_REVERSE && marked(step + 1)) store_product(step + 1);
        if (LA_REVERSE && marked(step)) Marks<KP>::store(a.states + mark(step) * Marks<KP>::BYTES, S, lane);
        if constexpr (DOTS) dot_position(step);
        else
            store_position<V, K>(S, a, position_after(a, traversal.sequence, traversal.chunk_of(step)), traversal,
                                 column + row, lane);
    }
    __device__ __forceinline__ void run() {
        load_start<V, K>(S, a, traversal, column + row, lane);
        if (!LA_REVERSE && marked(0)) store_product(0);
        to = own_rows(a.out, traversal.sequence, traversal.head);
        to_dots = a.dots + ((i64)(traversal.part * GROUPS + group) * a.heads + traversal.head) * a.tokens +
                  traversal.sequence.index;
        if (traversal.steps > 0) {
            begin_products(0);
            end_products(0);
            for (int step = 0;; step++) {
                write(step);
                if (step + 1 == traversal.steps) break;
                ring.arrive_empty(step);
                begin_products(step + 1);
                end_products(step + 1);
            }
        }
        store_end<V, K>(S, a, traversal, traversal.is_end(), column + row, lane);
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS + PRODUCERS, LA_BLOCKS)
    scan(const __grid_constant__ ScanArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const ThisTraversal traversal(a.offsets, a.T, a.heads, a.segments, a.chunks);
    if (traversal.segment > traversal.last) return;
    const Ring<STAGES> ring = {shared + AT_RING};
    run_groups<GROUPS>(
        ring, [&](int thread) { producer(a, traversal, shared, ring, thread); },
        [&](int thread) { Consumer(a, traversal, shared, ring, thread).run(); });
}
