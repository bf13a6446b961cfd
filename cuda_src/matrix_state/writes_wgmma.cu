// Gradients of what was written, dk and dv, in one reverse pass by warpgroup products (sm_90a, bfloat16; erase NONE):
//
//     R_t = e^{g_{t+1}} R_{t+1} + write q_t^T dout_t         dk_t = v_t R_t^T         dv_t = k_t R_t
//
// R_t, the gradient of the state S_t, is (key rows, value columns); time runs backward, rows are reversed as they are loaded.
// Inside a chunk, with D_ij = e^{s(j, i)}:  P1 = write (K Q^T) .* D,  P2 = write (V dOut^T) .* D,
//
//     dk^T = (R V^T) e^{start} + Q^T P2^T       dv^T = (R^T K^T) e^{start} + dOut^T P1^T       R <- e^{all} R + (Q e^{end})^T dOut
//
// A warpgroup holds 64 key rows of R and makes those of dk^T, and 64 value rows of dv^T, for which R goes through shared
// memory. LA_DOTS 1: also <k_t, dk_t less the token's own write>, and R at every LA_MARK-th chunk's start.
#include "attention/group.cuh"
#include "attention/store.cuh"
#include "attention/walk.cuh"

constexpr int C = LA_C, K = LA_K, V = LA_V, WARPS = LA_WARPS, GROUPS = WARPS / 4, STAGES = LA_STAGES;
constexpr int DOTS = LA_DOTS, THREADS = 32 * WARPS, WIDTH = 64 * GROUPS;
static_assert(C == 64 && LA_REVERSE == 1 && LA_TILES == 1 && WIDTH <= 128, "a chunk is the rows of one product");
static_assert(round_up(K, 64) == WIDTH && round_up(V, 64) == WIDTH, "as many key rows as value rows, 64 a group");
constexpr int TILES = C / GROUPS / 8;   // of P1 and P2, a group
typedef Panels<WIDTH, C> Rowed;         // q, dout, k, v: rows of tokens
typedef Panels<WIDTH, WIDTH> State;
typedef Panels<C, C> Gram;
// shared memory of a stage: q, dout, k, v, g; then R, P1, P2, sums of decays, dots, the diagonal of P2
constexpr int STAGE = 4 * Rowed::SIZE, AT_STATE = STAGES * STAGE, AT_GRAMS = AT_STATE + State::SIZE, AT_GATES = AT_GRAMS + 2 * Gram::SIZE;
constexpr int AT_DECAY = AT_GATES + STAGES * C * 4, AT_DOTS = AT_DECAY + WARPS * Decay<C>::FLOATS * 4, AT_OWN = AT_DOTS + DOTS * WARPS * C * 4;
constexpr int AT_KEPT = AT_OWN + DOTS * C * 4;
static_assert(LA_SHARED == AT_KEPT + 128, "LA_SHARED is what the launch asks for");

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

extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS) writes(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    int thread = threadIdx.x, lane = thread & 31;
    const int warp = thread >> 5, group = warp >> 2, row = warp * 16;   // of this warp in R
    const Walk<C, 1, true> walk(a.offsets, a.T, a.heads, a.segments, a.chunks);
    const Sequence& sequence = walk.sequence;
    const int head = walk.head, segment = walk.segment, steps = walk.steps;
    const i64 slot = walk.slot;
    if (segment > walk.last) return;
    if (thread == 0) {   // own_rows and rows_of of this head, kept
        keep(shared + AT_KEPT, rows_of(a.q, sequence, head), a.q.token);
        keep(shared + AT_KEPT + 16, rows_of(a.dout, sequence, head), a.dout.token);
        keep(shared + AT_KEPT + 32, rows_of(a.k, sequence, head), a.k.token);
        keep(shared + AT_KEPT + 48, rows_of(a.v, sequence, head), a.v.token);
        keep(shared + AT_KEPT + 64, own_rows(a.dk, sequence, head), a.dk.token);
        keep(shared + AT_KEPT + 80, own_rows(a.dv, sequence, head), a.dv.token);
        keep(shared + AT_KEPT + 96, (const char*)walk.gates(a.g, a.g_batch, a.g_token, a.g_head, a.g_group), a.g_token);
        keep(shared + AT_KEPT + 112, (const char*)(a.dots + (i64)head * a.tokens + sequence.index), 0);
    }
    __syncthreads();

    auto load = [&](int step) {
        const int slot = step % STAGES, token = walk.token_of(step);
        const u32 at = shared + slot * STAGE;
        const Kept q = kept(shared + AT_KEPT), dout = kept(shared + AT_KEPT + 16), k = kept(shared + AT_KEPT + 32), v = kept(shared + AT_KEPT + 48);
        load_rows<Rowed, C, THREADS, K>(at, q.rows, q.stride, token, sequence.T, 0, thread);
        load_rows<Rowed, C, THREADS, V>(at + Rowed::SIZE, dout.rows, dout.stride, token, sequence.T, 0, thread);
        load_rows<Rowed, C, THREADS, K>(at + 2 * Rowed::SIZE, k.rows, k.stride, token, sequence.T, 0, thread);
        load_rows<Rowed, C, THREADS, V>(at + 3 * Rowed::SIZE, v.rows, v.stride, token, sequence.T, 0, thread);
        const Kept g = kept(shared + AT_KEPT + 96);
        load_gates<C, THREADS>(shared + AT_GATES + slot * C * 4, (const float*)g.rows, g.stride, token, sequence.T, thread);
    };
    auto write_dots = [&](int step) {   // of the chunk before
        store_dots<C, THREADS, WARPS>((float*)kept(shared + AT_KEPT + 112).rows, shared + AT_DOTS, walk.token_of(step), sequence.T, thread);
    };

    StateRows<1, WIDTH> R;
    if (a.start.data) R.template load<K, V>(a.start, a.start_group ? slot / a.start_group : slot * a.segments + segment, row, lane);
    else R.clear();
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < steps) load(s);
        copy_commit();
    }
    clear_gram<Gram, THREADS>(shared + AT_GRAMS, thread);
    clear_gram<Gram, THREADS>(shared + AT_GRAMS + Gram::SIZE, thread);

    const Decay<C> decay = {shared + AT_DECAY + warp * Decay<C>::FLOATS * 4};
    for (int step = 0; step < steps; step++) {
        const u32 queries = shared + (step % STAGES) * STAGE, douts = queries + Rowed::SIZE, keys = douts + Rowed::SIZE, values = keys + Rowed::SIZE;
        const u64 b_queries = panel_descriptor(queries), b_douts = panel_descriptor(douts), b_keys = panel_descriptor(keys), b_values = panel_descriptor(values);
        const u64 b_grams = panel_descriptor(shared + AT_GRAMS), state = panel_descriptor(shared + AT_STATE);
        u32 r[WIDTH / 16][4];   // before any product: the state's registers are not touched while products run
        state_operands(r, R, 0);
        copy_wait<STAGES - 2>();
        publish_shared();
        __syncthreads();
        asm volatile("" : "+r"(lane), "+r"(thread));   // addresses are made anew in each chunk: kept over the loop they would spill
        if (DOTS && step) write_dots(step - 1);

        float p1[TILES][4], p2[TILES][4], dk[1][C / 8][4], dv[1][C / 8][4];
        products_begin();
#pragma unroll
        for (int d = 0; d < WIDTH / 16; d++) product<0, 0>(p1, b_keys + Rowed::along(d), b_queries + group * (TILES * 64) + Rowed::along(d), d > 0);
#pragma unroll
        for (int d = 0; d < WIDTH / 16; d++) product<0, 0>(p2, b_values + Rowed::along(d), b_douts + group * (TILES * 64) + Rowed::along(d), d > 0);
        products_commit();
#pragma unroll
        for (int d = 0; d < WIDTH / 16; d++) product<0, 0>(dk[0], r[d], b_values + Rowed::along(d), d > 0);   // dk^T = R V^T
        products_commit();
        if (step + STAGES - 1 < steps) load(step + STAGES - 1);
        copy_commit();
        store_state<State>(shared + AT_STATE, r, row, lane);
        const float all = decay.set(shared + AT_GATES + (step % STAGES) * C * 4, 1.f, a.write, 0.f, lane);
        __syncwarp();
        products_wait<1>();
        products_done(p1);
        products_done(p2);
        store_gram<false, Gram>(p1, shared + AT_GRAMS, 0, decay, a.write, group * TILES, warp & 3, lane);
        store_gram<DOTS, Gram>(p2, shared + AT_GRAMS + Gram::SIZE, shared + AT_OWN, decay, a.write, group * TILES, warp & 3, lane);
        publish_shared();   // R too
        u32 from_q[C / 16][4], from_dout[C / 16][4], weighted[C / 16][4];
#pragma unroll
        for (int t = 0; t < C / 16; t++) {
            load_operand<Rowed>(from_q[t], queries, t * 16, row, lane);
            weigh_operand(weighted[t], from_q[t], t * 16, decay, lane);
        }
        products_wait<0>();
        products_done(dk[0]);
        scale_starts<C>(dk[0], decay, lane);
        if (LA_DECAY) {
            const float carry = exp2_approx(all);
            R.each([&](int, int, float& y) { y *= carry; });
        }
        __syncthreads();   // P1, P2 and R are whole
        products_begin();
#pragma unroll
        for (int d = 0; d < WIDTH / 16; d++)   // dv^T = R^T K^T
            product<1, 0>(dv[0], state + State::panel(group) + State::across(d), b_keys + Rowed::along(d), d > 0);
        products_commit();
#pragma unroll
        for (int t = 0; t < C / 16; t++) product<0, 0>(dk[0], from_q[t], b_grams + (Gram::SIZE >> 4) + Gram::along(t), true);   // += Q^T P2^T
        products_commit();
#pragma unroll
        for (int t = 0; t < C / 16; t++) load_operand<Rowed>(from_dout[t], douts, t * 16, row, lane);
        products_wait<1>();
        products_done(dv[0]);
        scale_starts<C>(dv[0], decay, lane);
        products_begin();
#pragma unroll
        for (int t = 0; t < C / 16; t++) product<0, 0>(dv[0], from_dout[t], b_grams + Gram::along(t), true);   // += dOut^T P1^T
        products_commit();
#pragma unroll
        for (int t = 0; t < C / 16; t++) write_state<Rowed>(R, weighted[t], b_douts + Rowed::across(t));   // R += (Q e^{end})^T dOut
        products_commit();
        products_wait<2>();
        products_done(dk[0]);
        if constexpr (DOTS) dot_outputs<Rowed, C>(dk[0], from_q, keys, row, shared + AT_OWN, shared + AT_DOTS + warp * C * 4, lane);
        stage_rows<Bfloat16, Rowed, 1, C>(dk, queries, row, lane);
        group_barrier(group);
        const Kept to_dk = kept(shared + AT_KEPT + 64), to_dv = kept(shared + AT_KEPT + 80);
        store_rows<Rowed, C, 64, K, 128>(to_dk.rows, to_dk.stride, queries, walk.token_of(step), sequence.T, group * 64, 0, thread & 127);
        products_wait<1>();
        products_done(dv[0]);
        group_barrier(group);   // this group has read its panel of R: dv goes there
        typedef Panels<64, C> Half;
        const u32 half = shared + AT_STATE + group * State::PANEL;
        stage_rows<Bfloat16, Half, 1, C>(dv, half, (warp & 3) * 16, lane);
        group_barrier(group);
        store_rows<Half, C, 64, V, 128>(to_dv.rows, to_dv.stride, half, walk.token_of(step), sequence.T, 0, group * 64, thread & 127);
        products_wait<0>();
        products_done(R.x[0]);
        if (DOTS && walk.chunk_of(step) % LA_MARK == 0)
            Marks<WIDTH>::store(a.states + ((slot * a.marks + walk.chunk_of(step) / LA_MARK) * WARPS + warp) * Marks<WIDTH>::BYTES, R, lane);
    }
    copy_wait<0>();
    if (DOTS && steps > 0) {
        __syncthreads();
        write_dots(steps - 1);
    }
    if (a.end.data && walk.is_end() && head % a.end_group == 0) R.template store<K, V>(a.end, slot / a.end_group, row, lane);
}
