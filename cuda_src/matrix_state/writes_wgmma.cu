// Gradients of what was written, dk and dv, in one reverse pass by warpgroup products (sm_90a, bfloat16; erase NONE):
//
//     R_t = e^{g_{t+1}} R_{t+1} + write q_t^T dout_t         dk_t = v_t R_t^T         dv_t = k_t R_t
//
// R_t, the gradient of the state S_t, is (key rows, value columns); time runs backward, rows are reversed as they are loaded.
// Inside a chunk, with D_ij = e^{s(j, i)}:  P1 = write (K Q^T) .* D,  P2 = write (V dOut^T) .* D,
//
//     dk^T = (R V^T) e^{start} + Q^T P2^T       dv^T = (R^T K^T) e^{start} + dOut^T P1^T       R <- e^{all} R + (Q e^{end})^T dOut
//
// One warpgroup fills a ring of stages. Each of the others holds 64 key rows of R and makes those of dk^T, and 64 value rows
// of dv^T, for which R goes through shared memory. LA_DOTS 1: also <k_t, dk_t>, and R before every LA_MARK tokens.
#include "attention/fill.cuh"
#include "attention/group.cuh"
#include "attention/store.cuh"

constexpr int C = LA_C, K = LA_K, V = LA_V, WARPS = LA_WARPS, GROUPS = WARPS / 4, STAGES = LA_STAGES;
constexpr int DOTS = LA_DOTS, USERS = 32 * WARPS, WIDTH = 64 * GROUPS;
constexpr int CHUNKS_OF_MARK = LA_MARK / C;
static_assert(C == 64 && LA_REVERSE == 1 && LA_TILES == 1 && WIDTH <= 128, "a chunk is the rows of one product");
static_assert(round_up(K, 64) == WIDTH && round_up(V, 64) == WIDTH, "as many key rows as value rows, 64 a group");
typedef Panels<WIDTH, C> Rowed;         // q, dout, k, v: rows of tokens
typedef Panels<WIDTH, WIDTH> State;
typedef Panels<C, C> Gram;
// shared memory: stages of q, dout, k, v; then R, P1, P2, dots, sums of decays of each stage, the ring,
// where rows lie
constexpr int STAGE = 4 * Rowed::SIZE, AT_STATE = STAGES * STAGE, AT_GRAMS = AT_STATE + State::SIZE, AT_DOTS = AT_GRAMS + 2 * Gram::SIZE;
constexpr int AT_DECAY = AT_DOTS + DOTS * WARPS * C * 4;
constexpr int AT_RING = AT_DECAY + STAGES * StageDecay<C>::BYTES, AT_KEPT = AT_RING + Ring<STAGES>::BYTES;
static_assert(LA_SHARED == AT_KEPT + 112, "LA_SHARED is what the launch asks for");

struct Arguments {
    Rows q, k, v, dout, dk, dv;
    const float* g; i64 g_batch, g_token, g_head; int g_group, unused;
    const i64* offsets;
    States start, end; int start_group, end_group;   // R after the last token (or at each segment's end), before the first
    float* dots; char* states; i64 marks;
    i64 tokens;
    int T, heads, segments, chunks;
    float write; int unused2;
};

typedef Walk<C, 1, true> ThisWalk;

LA_DEVICE void fill(const Arguments& a, const ThisWalk& walk, u32 shared, Ring<STAGES> ring, int thread) {
    const Sequence& sequence = walk.sequence;
    const u32 q = shared + AT_KEPT, dout = q + 16, k = q + 32, v = q + 48;
    if (thread == 0) {
        keep(q, rows_of(a.q, sequence, walk.head), a.q.token);
        keep(dout, rows_of(a.dout, sequence, walk.head), a.dout.token);
        keep(k, rows_of(a.k, sequence, walk.head), a.k.token);
        keep(v, rows_of(a.v, sequence, walk.head), a.v.token);
    }
    group_barrier(GROUPS);
    const Gates<C> gates = {walk.gates(a.g, a.g_batch, a.g_token, a.g_head, a.g_group), a.g_token, {}};
    fill_ring<STAGE>(walk, gates, shared, shared + AT_DECAY, ring, 1.f, a.write, thread, [&](u32 at, int token) {
        load_kept<Rowed, C, K>(at + 2 * Rowed::SIZE, k, token, sequence.T, 0, thread);
        load_kept<Rowed, C, K>(at, q, token, sequence.T, 0, thread);
        load_kept<Rowed, C, V>(at + 3 * Rowed::SIZE, v, token, sequence.T, 0, thread);
        load_kept<Rowed, C, V>(at + Rowed::SIZE, dout, token, sequence.T, 0, thread);
    });
}

LA_DEVICE void use(const Arguments& a, const ThisWalk& walk, u32 shared, Ring<STAGES> ring, int thread) {
    const Sequence& sequence = walk.sequence;
    const int warp = thread >> 5, group = warp >> 2, lane = thread & 31, row = warp * 16;   // of this warp in R
    const u32 dots = shared + AT_DOTS + group * 4 * C * 4;
    const u64 b_grams = panel_descriptor(shared + AT_GRAMS), state = panel_descriptor(shared + AT_STATE + group * State::PANEL);
    const i64 first_mark = (walk.slot * a.marks * GROUPS + group) * 4 + (warp & 3);

    StateRows<1, WIDTH> R;
    load_start<K, V>(R, a, walk, row, lane);
    const u32 to_dk = shared + AT_KEPT + 64, to_dv = to_dk + 16, to_dots = to_dv + 16;   // where rows lie
    if (thread == 0) {
        keep(to_dk, own_rows(a.dk, sequence, walk.head), a.dk.token);
        keep(to_dv, own_rows(a.dv, sequence, walk.head), a.dv.token);
        keep(to_dots, (const char*)(a.dots + (i64)walk.head * a.tokens + sequence.index), a.heads * a.tokens);
    }
    groups_barrier<USERS>(GROUPS + 1);

    constexpr int GRAMS = 3 - GROUPS;   // each group makes one of P1 and P2, a single group both
    if (walk.steps > 0) {
        float p[GRAMS][C / 8][4], dk[1][C / 8][4];
        u32 from_q[C / 16][4], weighted[C / 16][4];
        u32 r[WIDTH / 16][4];
        auto begin_products = [&](int step) {   // P1 = K Q^T, P2 = V dOut^T, dk^T = R V^T
            const u32 queries = shared + step % STAGES * STAGE, keys = queries + 2 * Rowed::SIZE;
            const u64 b_values = panel_descriptor(keys + Rowed::SIZE);
            state_operands(r, R, 0);   // before any product: the state's registers are not touched while products run
            ring.wait_full(step);
            publish_shared();
            products_begin();
#pragma unroll
            for (int n = 0; n < GRAMS; n++) {
                const u32 next = (group + n) * Rowed::SIZE;   // dout follows q, v follows k
                const u64 b_first = panel_descriptor(keys + next), b_second = panel_descriptor(queries + next);
#pragma unroll
                for (int d = 0; d < WIDTH / 16; d++) product<0, 0>(p[n], b_first + Rowed::along(d), b_second + Rowed::along(d), d > 0);
            }
            products_commit();
#pragma unroll
            for (int d = 0; d < WIDTH / 16; d++) product<0, 0>(dk[0], r[d], b_values + Rowed::along(d), d > 0);
            products_commit();
        };
        auto end_products = [&](int step) {   // R, P1, P2 in shared memory, dk^T e^{start}, R e^{all}, operands of q
            const u32 queries = shared + step % STAGES * STAGE;
            const StageDecay<C> decay = {shared + AT_DECAY + step % STAGES * StageDecay<C>::BYTES};
            float f[C / 8][4];
            gram_factors(f, decay, a.write, warp & 3, lane);
            groups_barrier<USERS>(GROUPS + 1);   // all have read P1, P2 and R of the chunk before
            store_state<State>(shared + AT_STATE, r, row, lane);
            products_wait<1>();
#pragma unroll
            for (int n = 0; n < GRAMS; n++) {
                products_done(p[n]);
                store_gram<Gram, C>(p[n], f, shared + AT_GRAMS + (group + n) * Gram::SIZE, warp & 3, lane);
            }
            publish_shared();   // R too
#pragma unroll
            for (int t = 0; t < C / 16; t++) {
                load_operand<Rowed>(from_q[t], queries, t * 16, row, lane);
                weigh_operand(weighted[t], from_q[t], t * 16, decay.sums(), lane);
            }
            const Starts<C> starts(decay.sums(), lane);
            products_wait<0>();
            products_done(dk[0]);
            starts.scale(dk[0]);
            if (LA_DECAY) {
                const float carry = exp2_approx(decay.all());
                R.each([&](int, int, float& y) { y *= carry; });
            }
        };
        auto store = [&](int step) {   // gradients that are staged
            const u32 queries = shared + step % STAGES * STAGE, values = queries + 3 * Rowed::SIZE;
            const Kept k = kept(to_dk), v = kept(to_dv), d = kept(to_dots);
            if (DOTS) store_dots<C, 128, 4>((float*)d.rows + group * d.stride, dots, walk.token_of(step), sequence.T, thread & 127);
            store_group_rows<Rowed, C, K>(k.rows, k.stride, queries, walk.token_of(step), sequence.T, group * 64, 0, thread & 127);
            store_group_rows<Rowed, C, V>(v.rows, v.stride, values, walk.token_of(step), sequence.T, group * 64, 0, thread & 127);
        };
        begin_products(0);
        end_products(0);
        for (int step = 0;; step++) {
            const u32 queries = shared + step % STAGES * STAGE, douts = queries + Rowed::SIZE, keys = douts + Rowed::SIZE, values = keys + Rowed::SIZE;
            const u64 b_douts = panel_descriptor(douts), b_keys = panel_descriptor(keys);
            const StageDecay<C> decay = {shared + AT_DECAY + step % STAGES * StageDecay<C>::BYTES};
            float dv[1][C / 8][4];
            u32 from_dout[C / 16][4];
            groups_barrier<USERS>(GROUPS + 1);   // P1, P2 and R are whole, v has been read
            products_begin();
#pragma unroll
            for (int d = 0; d < WIDTH / 16; d++) product<1, 0>(dv[0], state + State::across(d), b_keys + Rowed::along(d), d > 0);   // dv^T = R^T K^T
            products_commit();
#pragma unroll
            for (int t = 0; t < C / 16; t++) product<0, 0>(dk[0], from_q[t], b_grams + (Gram::SIZE >> 4) + Gram::along(t), true);   // += Q^T P2^T
            products_commit();
#pragma unroll
            for (int t = 0; t < C / 16; t++) load_operand<Rowed>(from_dout[t], douts, t * 16, row, lane);
            const Starts<C> starts(decay.sums(), lane);
            products_wait<1>();
            products_done(dv[0]);
            starts.scale(dv[0]);
            products_begin();
#pragma unroll
            for (int t = 0; t < C / 16; t++) product<0, 0>(dv[0], from_dout[t], b_grams + Gram::along(t), true);   // += dOut^T P1^T
            products_commit();
#pragma unroll
            for (int t = 0; t < C / 16; t++) write_state<Rowed>(R, weighted[t], b_douts + Rowed::across(t));   // R += (Q e^{end})^T dOut
            products_commit();
            products_wait<2>();
            products_done(dk[0]);
            if constexpr (DOTS) dot_outputs<Rowed, C>(dk[0], keys, row, dots + (warp & 3) * C * 4, lane);
            stage_rows<Bfloat16, Rowed, 1, C>(dk, queries, row, lane);
            products_wait<1>();
            products_done(dv[0]);
            stage_rows<Bfloat16, Rowed, 1, C>(dv, values, row, lane);
            group_barrier(group);
            store(step);
            products_wait<0>();
            products_done(R.x[0]);
            if (DOTS && walk.chunk_of(step) % CHUNKS_OF_MARK == 0)
                Marks<WIDTH>::store(a.states + (first_mark + (i64)(walk.chunk_of(step) / CHUNKS_OF_MARK) * WARPS) * Marks<WIDTH>::BYTES, R, lane);
            if (step + 1 == walk.steps) break;
            ring.used(step);
            begin_products(step + 1);
            end_products(step + 1);
        }
    }
    store_end<K, V>(R, a, walk, walk.is_end(), row, lane);
}

extern "C" __global__ void __launch_bounds__(USERS + FILLERS, LA_BLOCKS) writes(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const ThisWalk walk(a.offsets, a.T, a.heads, a.segments, a.chunks);
    if (walk.segment > walk.last) return;
    const Ring<STAGES> ring = {shared + AT_RING};
    if (threadIdx.x == 0) ring.init(2 * FILLERS, 32 * WARPS);
    __syncthreads();
    if (threadIdx.x >= USERS) {
        give_registers<FILL_REGISTERS<GROUPS>>();
        fill(a, walk, shared, ring, threadIdx.x - USERS);
    } else {
        take_registers<USE_REGISTERS<GROUPS>>();
        use(a, walk, shared, ring, threadIdx.x);
    }
}
