// Levels of log-linear attention as heads (erase NONE), by warpgroup products (sm_90a, bfloat16). Head h has level
// l = first + h mod count > 6: blocks of 2^(l - 6) chunks of 64 tokens, whose first halves write and second halves
// read.
//
//     write   S^T <- e^{all} S^T + (V e^{end})^T K         read   out^T = (S^T Q^T) e^{start},  S^T <- e^{all} S^T
//
// S = 0 where a block begins. With LA_REVERSE time runs backward and second halves write: with arrays exchanged that is
// dk and dv, and without it dq (scan_wgmma.cu, whose arguments have the same meaning). Rows of chunks that write are
// not stored. LA_DOTS: <x, out>, 0 in chunks that write, and S before every LA_MARK tokens, or its product with those.
#include "arguments/matrix_state/LevelPassArguments.cuh"
#include "attention/producer.cuh"
#include "attention/group.cuh"
#include "attention/store.cuh"

constexpr int C = LA_C, K = LA_K, V = LA_V, WARPS = LA_WARPS, GROUPS = WARPS / 4, STAGES = LA_STAGES, DOTS = LA_DOTS;
constexpr int CHUNKS_OF_MARK = LA_MARK / C;
constexpr int KP = round_up(K, 64), VB = 64 * GROUPS;
static_assert(C == 64 && LA_TILES == 1 && KP <= 128 && round_up(V, 64) == VB, "a chunk is the rows of one product");
typedef Panels<KP, C> Keys;
typedef Panels<VB, C> Values;
// shared memory: stages of k and v, or of q and x; dots of each group, sums of decays of each stage, the ring, addresses
constexpr int STAGE = Keys::SIZE + Values::SIZE, AT_DOTS = STAGES * STAGE, AT_DECAY = AT_DOTS + DOTS * WARPS * C * 4;
constexpr int AT_RING = AT_DECAY + STAGES * StageDecay<C>::BYTES, AT_ADDRESSES = AT_RING + Ring<STAGES>::BYTES;
static_assert(LA_SHARED == AT_ADDRESSES + 64, "LA_SHARED is the size that the launch requests");
static_assert(LA_MARK_BYTES == Marks<KP>::BYTES, "the size that the host allocates by");

typedef Traversal<C, 1, LA_REVERSE> ThisTraversal;

// The blocks of a head's level
struct Level {
    int log2;   // of the chunks of a block
    __device__ __forceinline__ Level(const LevelPassArguments& a, int head) : log2(a.first + head % a.count - 6) {}
    __device__ __forceinline__ bool reads(int chunk) const { return (chunk >> (log2 - 1) & 1) != LA_REVERSE; }
    // of the chunk that a block is entered by
    __device__ __forceinline__ bool begins(int chunk) const { return ((chunk + LA_REVERSE) & ((1 << log2) - 1)) == 0; }
};

LA_DEVICE void producer(const LevelPassArguments& a, const ThisTraversal& traversal, u32 shared, Ring<STAGES> ring,
                        int thread) {
    const Sequence& sequence = traversal.sequence;
    const Level level(a, traversal.head);
    const u32 q = shared + AT_ADDRESSES, k = q + 16, v = q + 32, x = q + 48;
    if (thread == 0) {
        store_address(q, rows_of(a.q, sequence, traversal.head), a.q.token);
        store_address(k, rows_of(a.k, sequence, traversal.head), a.k.token);
        store_address(v, rows_of(a.v, sequence, traversal.head), a.v.token);
        if (DOTS) store_address(x, rows_of(a.x, sequence, traversal.head), a.x.token);
    }
    group_barrier(GROUPS);
    const Gates<C> gates = {traversal.gates(a.g), a.g.token, {}};
    produce_ring(traversal, gates, shared + AT_DECAY, ring, a.read, a.write, thread, [&](int step) {
        const u32 at = shared + step % STAGES * STAGE;
        const int token = traversal.token_of(step);
        const bool reads = level.reads(traversal.chunk_of(step));
        load_rows_at<Keys, C, K>(at, reads ? q : k, token, sequence.T, 0, thread);
        if (DOTS || !reads) load_rows_at<Values, C, V>(at + Keys::SIZE, reads ? x : v, token, sequence.T, 0, thread);
    });
}

// A thread of a consumer: 16 value rows a warp of S^T and of out^T
struct Consumer {
    const LevelPassArguments& a;
    const ThisTraversal& traversal;
    const Level level;
    const u32 shared;
    const Ring<STAGES> ring;
    const int thread, warp, group, lane, row;   // row: of this warp
    const u32 dots;
    const i64 first_mark;
    char* to;
    float* to_dots;
    StateRows<1, KP> S;
    float out[1][C / 8][4];

    __device__ __forceinline__ Consumer(const LevelPassArguments& a, const ThisTraversal& traversal, u32 shared,
                                        Ring<STAGES> ring, int thread)
        : a(a),
          traversal(traversal),
          level(a, traversal.head),
          shared(shared),
          ring(ring),
          thread(thread),
          warp(thread >> 5),
          group(warp >> 2),
          lane(thread & 31),
          row(warp * 16),
          dots(shared + AT_DOTS + group * 4 * C * 4),
          first_mark((traversal.slot * a.marks * GROUPS + group) * 4 + (warp & 3)) {}

    __device__ __forceinline__ i64 mark(int chunk) const { return first_mark + (i64)(chunk / CHUNKS_OF_MARK) * WARPS; }
    __device__ __forceinline__ StageDecay<C> decay_of(int step) const {
        return {shared + AT_DECAY + step % STAGES * StageDecay<C>::BYTES};
    }
    __device__ __forceinline__ void write(int step) {
        const u32 keys = shared + step % STAGES * STAGE;
        const StageDecay<C> decay = decay_of(step);
        ring.wait_full(step);
        publish_shared();
        u32 weighted[C / 16][4];
#pragma unroll
        for (int t = 0; t < C / 16; t++) {
            u32 plain[4];
            load_operand<Values>(plain, keys + Keys::SIZE, t * 16, row, lane);
            weigh_operand(weighted[t], plain, t * 16, decay.sums(), lane);
        }
        if (LA_DECAY) {
            const float carry = exp2_approx(decay.all());
            S.each([&](int, int, float& y) { y *= carry; });
        }
        products_begin();
        write_chunk<Keys>(S, weighted, panel_descriptor(keys));
        products_commit();
        if constexpr (DOTS) {
            const int r = thread & 127, t = traversal.token_of(step) + (LA_REVERSE ? -r : r);
            if (r < C && (u32)t < (u32)traversal.sequence.T) to_dots[t] = 0.f;
        }
        products_wait<0>();
        accumulator_fence(S.x[0]);
    }
    __device__ __forceinline__ void read(int step) {
        const u32 queries = shared + step % STAGES * STAGE, values = queries + Keys::SIZE;
        const int token = traversal.token_of(step), T = traversal.sequence.T;
        u32 s[KP / 16][4];   // before any product: the state's registers are not touched while products run
        state_operands(s, S, 0);
        ring.wait_full(step);
        publish_shared();
        if (DOTS) group_barrier(group);   // the dots of the chunk before have been read
        products_begin();
        multiply_ABt<Keys>(out[0], s, panel_descriptor(queries));
        products_commit();
        end_read<C>(out[0], S, decay_of(step), lane);
        if constexpr (DOTS) dot_outputs<Values, C>(out[0], values, row, dots + (warp & 3) * C * 4, lane);
        stage_rows<Bfloat16, Values, 1, C>(out, values, row, lane);
        group_barrier(group);
        if (DOTS) store_dots<C, 128, 4>(to_dots, dots, token, T, thread & 127);
        store_group_rows<Values, C, V>(to, a.out.token, values, token, T, group * 64, 0, thread & 127);
    }
    __device__ __forceinline__ void run() {
        S.clear();
        to = own_rows(a.out, traversal.sequence, traversal.head);
        to_dots = a.dots + ((i64)group * a.heads + traversal.head) * a.tokens + traversal.sequence.index;
        for (int step = 0; step < traversal.steps; step++) {
            const int chunk = traversal.chunk_of(step);
            if (level.begins(chunk)) S.clear();
            if (DOTS && !LA_REVERSE && chunk % CHUNKS_OF_MARK == 0) {
                const float product = warp_sum(Marks<KP>::dot(a.states + mark(chunk) * Marks<KP>::BYTES, S, lane));
                if (lane == 0) a.products[mark(chunk)] = product;
            }
            if (level.reads(chunk)) read(step);
            else write(step);
            ring.arrive_empty(step);
            if (DOTS && LA_REVERSE && chunk % CHUNKS_OF_MARK == 0)
                Marks<KP>::store(a.states + mark(chunk) * Marks<KP>::BYTES, S, lane);
        }
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS + PRODUCERS, LA_BLOCKS)
    levels(const __grid_constant__ LevelPassArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const ThisTraversal traversal(a.offsets, a.T, a.heads, 1, 1 << 24);
    const Ring<STAGES> ring = {shared + AT_RING};
    run_groups<GROUPS>(
        ring, [&](int thread) { producer(a, traversal, shared, ring, thread); },
        [&](int thread) { Consumer(a, traversal, shared, ring, thread).run(); });
}
