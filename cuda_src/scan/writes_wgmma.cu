// Gradients of the writes, dk and dv, in one reverse pass by warpgroup products (sm_90a, bfloat16; erase NONE):
//
//     dS_t = e^{g_{t+1}} dS_{t+1} + write q_t^T dout_t         dk_t = v_t dS_t^T         dv_t = k_t dS_t
//
// dS_t, the gradient of the state S_t, is (key rows, value columns); time runs backward, rows are reversed as they are
// loaded. Inside a chunk, with E_ij = e^{s(j, i)}:  P1 = write (K Q^T) .* E,  P2 = write (V dOut^T) .* E,
//
//     dk^T = (dS V^T) e^{start} + Q^T P2^T     dv^T = (dS^T K^T) e^{start} + dOut^T P1^T
//     dS <- e^{all} dS + (Q e^{end})^T dOut
//
// The producer warpgroup fills a ring of stages. Each consumer holds 64 key rows of dS and computes these rows of dk^T,
// and 64 value rows of dv^T, for which dS goes through shared memory. LA_DOTS 1: also <k_t, dk_t>, and dS before every
// LA_MARK tokens.
#include "arguments/matrix_state/WritesArguments.cuh"
#include "attention/producer.cuh"
#include "attention/group.cuh"
#include "attention/store.cuh"

constexpr int C = LA_C, K = LA_K, V = LA_V, WARPS = LA_WARPS, GROUPS = WARPS / 4, STAGES = LA_STAGES;
constexpr int DOTS = LA_DOTS, CONSUMERS = 32 * WARPS, WIDTH = 64 * GROUPS;
constexpr int CHUNKS_OF_MARK = LA_MARK / C;
static_assert(C == 64 && LA_REVERSE == 1 && LA_TILES == 1 && WIDTH <= 128, "a chunk is the rows of one product");
static_assert(round_up(K, 64) == WIDTH && round_up(V, 64) == WIDTH, "as many key rows as value rows, 64 a group");
typedef Panels<WIDTH, C> Rowed;   // q, dout, k, v: rows of tokens
typedef Panels<WIDTH, WIDTH> State;
typedef Panels<C, C> Gram;
// shared memory: stages of q, dout, k, v; then dS, P1, P2, dots, sums of decays of each stage, the ring,
// addresses of rows
constexpr int STAGE = 4 * Rowed::SIZE, AT_STATE = STAGES * STAGE, AT_GRAMS = AT_STATE + State::SIZE,
              AT_DOTS = AT_GRAMS + 2 * Gram::SIZE;
constexpr int AT_DECAY = AT_DOTS + DOTS * WARPS * C * 4;
constexpr int AT_RING = AT_DECAY + STAGES * StageDecay<C>::BYTES, AT_ADDRESSES = AT_RING + Ring<STAGES>::BYTES;
static_assert(LA_SHARED == AT_ADDRESSES + 112, "LA_SHARED is the size that the launch requests");
static_assert(LA_MARK_BYTES == Marks<WIDTH>::BYTES, "the size that the host allocates by");

typedef Traversal<C, 1, true> ThisTraversal;

LA_DEVICE void producer(const WritesArguments& a, const ThisTraversal& traversal, u32 shared, Ring<STAGES> ring,
                        int thread) {
    const Sequence& sequence = traversal.sequence;
    const u32 q = shared + AT_ADDRESSES, dout = q + 16, k = q + 32, v = q + 48;
    if (thread == 0) {
        store_address(q, rows_of(a.q, sequence, traversal.head), a.q.token);
        store_address(dout, rows_of(a.dout, sequence, traversal.head), a.dout.token);
        store_address(k, rows_of(a.k, sequence, traversal.head), a.k.token);
        store_address(v, rows_of(a.v, sequence, traversal.head), a.v.token);
    }
    group_barrier(GROUPS);
    const Gates<C> gates = {traversal.gates(a.g), a.g.token, {}};
    produce_ring(traversal, gates, shared + AT_DECAY, ring, 1.f, a.write, thread, [&](int step) {
        const u32 at = shared + step % STAGES * STAGE;
        const int token = traversal.token_of(step);
        load_rows_at<Rowed, C, K>(at + 2 * Rowed::SIZE, k, token, sequence.T, 0, thread);
        load_rows_at<Rowed, C, K>(at, q, token, sequence.T, 0, thread);
        load_rows_at<Rowed, C, V>(at + 3 * Rowed::SIZE, v, token, sequence.T, 0, thread);
        load_rows_at<Rowed, C, V>(at + Rowed::SIZE, dout, token, sequence.T, 0, thread);
    });
}

// A thread of a consumer: 16 key rows a warp of dS and of dk^T, 16 value rows of dv^T
struct Consumer {
    static constexpr int GRAMS = 3 - GROUPS;   // each group makes one of P1 and P2, a single group both
    const WritesArguments& a;
    const ThisTraversal& traversal;
    const u32 shared;
    const Ring<STAGES> ring;
    const int thread, warp, group, lane, row;   // row: of this warp in dS
    const u32 dots, to_dk, to_dv, to_dots;      // dots of the group, addresses of rows
    const i64 first_mark;
    StateRows<1, WIDTH> dS;
    float p[GRAMS][C / 8][4], dk[1][C / 8][4];
    u32 from_q[C / 16][4], weighted[C / 16][4], r[WIDTH / 16][4];

    __device__ __forceinline__ Consumer(const WritesArguments& a, const ThisTraversal& traversal, u32 shared,
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
          dots(shared + AT_DOTS + group * 4 * C * 4),
          to_dk(shared + AT_ADDRESSES + 64),
          to_dv(to_dk + 16),
          to_dots(to_dv + 16),
          first_mark((traversal.slot * a.marks * GROUPS + group) * 4 + (warp & 3)) {}

    __device__ __forceinline__ StageDecay<C> decay_of(int step) const {
        return {shared + AT_DECAY + step % STAGES * StageDecay<C>::BYTES};
    }
    __device__ __forceinline__ void store_addresses() const {
        const Sequence& sequence = traversal.sequence;
        if (thread == 0) {
            store_address(to_dk, own_rows(a.dk, sequence, traversal.head), a.dk.token);
            store_address(to_dv, own_rows(a.dv, sequence, traversal.head), a.dv.token);
            store_address(to_dots, (const char*)(a.dots + (i64)traversal.head * a.tokens + sequence.index),
                          a.heads * a.tokens);
        }
        groups_barrier<CONSUMERS>(GROUPS + 1);
    }
    // load, gram and read, begun: P1 = K Q^T, P2 = V dOut^T, dk^T = dS V^T
    __device__ __forceinline__ void begin_products(int step) {
        const u32 queries = shared + step % STAGES * STAGE, keys = queries + 2 * Rowed::SIZE;
        state_operands(r, dS, 0);   // before any product: the state's registers are not touched while products run
        ring.wait_full(step);
        publish_shared();
        products_begin();
#pragma unroll
        for (int n = 0; n < GRAMS; n++) {
            const u32 next = (group + n) * Rowed::SIZE;   // dout follows q, v follows k
            multiply_ABt<Rowed>(p[n], panel_descriptor(keys + next), panel_descriptor(queries + next));
        }
        products_commit();
        multiply_ABt<Rowed>(dk[0], r, panel_descriptor(keys + Rowed::SIZE));
        products_commit();
    }
    // dS, P1, P2 in shared memory, dk^T e^{start}, dS e^{all}, operands of q
    __device__ __forceinline__ void end_products(int step) {
        float f[C / 8][4];
        gram_factors(f, decay_of(step), a.write, warp & 3, lane);
        groups_barrier<CONSUMERS>(GROUPS + 1);   // all have read P1, P2 and dS of the chunk before
        store_state<State>(shared + AT_STATE, r, row, lane);
        products_wait<1>();
#pragma unroll
        for (int n = 0; n < GRAMS; n++) {
            accumulator_fence(p[n]);
            store_gram<Gram, C>(p[n], f, shared + AT_GRAMS + (group + n) * Gram::SIZE, warp & 3, lane);
        }
        publish_shared();   // dS too
        load_operands<Rowed>(from_q, weighted, shared + step % STAGES * STAGE, decay_of(step).sums(), row, lane);
        end_read<C>(dk[0], dS, decay_of(step), lane);
    }
    // dv^T = (dS^T K^T) e^{start} + dOut^T P1^T, dk^T += Q^T P2^T; dS += (Q e^{end})^T dOut; both gradients staged
    __device__ __forceinline__ void write(int step) {
        const u32 queries = shared + step % STAGES * STAGE, douts = queries + Rowed::SIZE, keys = douts + Rowed::SIZE,
                  values = keys + Rowed::SIZE;
        const u64 b_grams = panel_descriptor(shared + AT_GRAMS), b_keys = panel_descriptor(keys),
                  state = panel_descriptor(shared + AT_STATE + group * State::PANEL);
        float dv[1][C / 8][4];
        u32 from_dout[C / 16][4];
        groups_barrier<CONSUMERS>(GROUPS + 1);   // P1, P2 and dS are whole, v has been read
        products_begin();
#pragma unroll
        for (int d = 0; d < WIDTH / 16; d++)
            product_AtBt(dv[0], state + State::across(d), b_keys + Rowed::along(d), d > 0);
        products_commit();
        add_ABt<Gram>(dk[0], from_q, b_grams + (Gram::SIZE >> 4));
        products_commit();
#pragma unroll
        for (int t = 0; t < C / 16; t++) load_operand<Rowed>(from_dout[t], douts, t * 16, row, lane);
        const Starts<C> starts(decay_of(step).sums(), lane);
        products_wait<1>();
        accumulator_fence(dv[0]);
        starts.scale(dv[0]);
        products_begin();
        add_ABt<Gram>(dv[0], from_dout, b_grams);
        products_commit();
        write_chunk<Rowed>(dS, weighted, panel_descriptor(douts));
        products_commit();
        products_wait<2>();
        accumulator_fence(dk[0]);
        if constexpr (DOTS) dot_outputs<Rowed, C>(dk[0], keys, row, dots + (warp & 3) * C * 4, lane);
        stage_rows<Bfloat16, Rowed, 1, C>(dk, queries, row, lane);
        products_wait<1>();
        accumulator_fence(dv[0]);
        stage_rows<Bfloat16, Rowed, 1, C>(dv, values, row, lane);
        group_barrier(group);
    }
    // gradients that are staged, and dS at a mark
    __device__ __forceinline__ void store(int step) {
        const u32 queries = shared + step % STAGES * STAGE, values = queries + 3 * Rowed::SIZE;
        const int token = traversal.token_of(step), T = traversal.sequence.T, chunk = traversal.chunk_of(step);
        const RowsAddress k = load_address(to_dk), v = load_address(to_dv), d = load_address(to_dots);
        if (DOTS) store_dots<C, 128, 4>((float*)d.rows + group * d.stride, dots, token, T, thread & 127);
        store_group_rows<Rowed, C, K>(k.rows, k.stride, queries, token, T, group * 64, 0, thread & 127);
        store_group_rows<Rowed, C, V>(v.rows, v.stride, values, token, T, group * 64, 0, thread & 127);
        products_wait<0>();
        accumulator_fence(dS.x[0]);
        if (DOTS && chunk % CHUNKS_OF_MARK == 0)
            Marks<WIDTH>::store(a.states + (first_mark + (i64)(chunk / CHUNKS_OF_MARK) * WARPS) * Marks<WIDTH>::BYTES,
                                dS, lane);
    }
    __device__ __forceinline__ void run() {
        load_start<K, V>(dS, a, traversal, row, lane);
        store_addresses();
        if (traversal.steps > 0) {
            add_position<K, V>(dS, a, position_after(a, traversal.sequence, traversal.chunk_of(0)), traversal, row,
                               lane);
            begin_products(0);
            end_products(0);
            for (int step = 0;; step++) {
                write(step);
                store(step);
                if (step + 1 == traversal.steps) break;
                ring.arrive_empty(step);
                add_position<K, V>(dS, a, position_after(a, traversal.sequence, traversal.chunk_of(step + 1)),
                                   traversal, row, lane);
                begin_products(step + 1);
                end_products(step + 1);
            }
        }
        store_end<K, V>(dS, a, traversal, traversal.is_end(), row, lane);
    }
};

extern "C" __global__ void __launch_bounds__(CONSUMERS + PRODUCERS, LA_BLOCKS)
    writes(const __grid_constant__ WritesArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const ThisTraversal traversal(a.offsets, a.T, a.heads, a.segments, a.chunks);
    if (traversal.segment > traversal.last) return;
    const Ring<STAGES> ring = {shared + AT_RING};
    run_groups<GROUPS>(
        ring, [&](int thread) { producer(a, traversal, shared, ring, thread); },
        [&](int thread) { Consumer(a, traversal, shared, ring, thread).run(); });
}
