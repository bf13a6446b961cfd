// One pass over the tokens of a head, in chunks of C, with the state S in registers (erase NONE, decay NONE or SCALAR):
//
//     S_t = e^{g_t} S_{t-1} + write k_t^T v_t          out_t = read q_t S_t
//
// LA_REVERSE runs time backward, with a token's decay after its write: S_t = e^{g_{t+1}} S_{t+1} + write k_t^T v_t.
// With its arrays exchanged the same pass therefore gives every gradient:
//
//     forward      out = scan(q, k, v)        dq = scan(dout, v, k)     state transposed
//     reverse     dv  = scan(k, q, dout)     dk = scan(v, dout, q)
//     state transposed; S_t is then the gradient of S_t
//
// Inside a chunk, with E_ij = e^{s(j, i)}:  P = (Q K^T) .* E,   out^T = (S^T Q^T) e^{start} + V^T P^T,
// S^T <- e^{all} S^T + (V e^{end})^T K. A warp owns 16 * LA_TILES value rows of S^T and of out^T and shares only P.
//
// LA_OUTPUTS 0  no queries: the state that a segment adds, traversed from its end, so that it may stop once all has
// decayed LA_DOTS    1  also <x_t, out_t> (see STRICT) and, every LA_MARK tokens, states or their inner products
#include "arguments/matrix_state/ScanArguments.cuh"
#include "attention/gram.cuh"
#include "attention/store.cuh"
#include "attention/traversal.cuh"

constexpr int C = LA_C, K = LA_K, V = LA_V, WARPS = LA_WARPS, TILES = LA_TILES, STAGES = LA_STAGES;
constexpr int OUTPUTS = LA_OUTPUTS, DOTS = LA_DOTS, THREADS = 32 * WARPS;
// STRICT: the dots leave the token's own write out. With 16-bit elements it is in both: the same rounded entry of P
// times products that are exact cancels to float32. SEPARATE_X: x has a place of its own, else q's once that is read.
constexpr bool STRICT = DOTS && Element::BYTES == 4, SEPARATE_X = LA_SEPARATE_X;
constexpr int KP = round_up(K, 16), VB = 16 * TILES * WARPS;   // columns of the key tile, value rows of this block
typedef Tile<KP, Element::BYTES> Keys;
typedef Tile<VB, Element::BYTES> Values;
typedef Tile<C, Element::GRAM_BYTES> Gram;
// shared memory
constexpr int KEY_BYTES = C * Keys::ROW, VALUE_BYTES = C * Values::ROW;
// EARLY: outputs leave before the state is written, in the place of the queries, so that fewer registers are in use at
// once.
constexpr bool EARLY = Element::EXACT && OUTPUTS && !DOTS;
constexpr int ROLL = EARLY ? 4 : 1024;   // copies laid out at once: more would keep their addresses in registers
constexpr int QUERY_BYTES = !OUTPUTS                                                      ? 0
                            : (EARLY || (DOTS && !SEPARATE_X)) && VALUE_BYTES > KEY_BYTES ? VALUE_BYTES
                                                                                          : KEY_BYTES;
constexpr int AT_OTHER = KEY_BYTES + VALUE_BYTES + (SEPARATE_X ? QUERY_BYTES : 0);   // x in a stage
constexpr int STAGE = KEY_BYTES + VALUE_BYTES + QUERY_BYTES + (DOTS && SEPARATE_X ? VALUE_BYTES : 0) + C * 4,
              CHUNKS_OF_MARK = LA_MARK / C;
constexpr int AT_GRAM = STAGES * STAGE, AT_DECAY = AT_GRAM + (OUTPUTS ? C * Gram::ROW : 0);
constexpr int AT_DOTS = AT_DECAY + WARPS * Decay<C>::FLOATS * 4, AT_OWN = AT_DOTS + DOTS * WARPS * C * 4;
static_assert(LA_SHARED == AT_OWN + DOTS * C * 4, "LA_SHARED is the size that the launch requests");

static_assert(LA_MARK_BYTES == TILES * KP / 8 * 32 * 16, "the size that the host allocates by");

constexpr int PARTS = (V + VB - 1) / VB;
constexpr bool DOWN = LA_REVERSE == OUTPUTS;   // a segment's sum is traversed from its end

// out^T += V^T P^T for sixteen tokens
LA_DEVICE void accumulate_PV(float (&out)[TILES][C / 8][4], const Element::Raw (&raw)[TILES], u32 gram, int t,
                             int lane) {
#pragma unroll
    for (int m = 0; m < TILES; m++) {
        const auto plain = Element::operand(raw[m]);
#pragma unroll
        for (int i = t; i < C; i += 16) {
            typename Element::B b[2];
            load_b_rows<Element, Gram>(b, gram, i, t, lane);
            Element::multiply(out[m][i / 8], plain, b[0]);
            Element::multiply(out[m][i / 8 + 1], plain, b[1]);
        }
    }
}
// write: S^T += (V e^{end})^T K for sixteen tokens; in float32 S^T decays with the first of them
LA_DEVICE void accumulate_state(StateRows<TILES, KP>& S, const Element::Raw (&raw)[TILES], u32 keys,
                                const Decay<C>& decay, float carry, int t, int lane) {
    const float2 e = decay.ends(t + (lane & 3) * 2), f = decay.ends(t + 8 + (lane & 3) * 2);
    typename Element::A weighted[TILES];
#pragma unroll
    for (int m = 0; m < TILES; m++) {
        const float y[8] = {Element::value(raw[m], 0) * e.x, Element::value(raw[m], 1) * e.y,
                            Element::value(raw[m], 2) * e.x, Element::value(raw[m], 3) * e.y,
                            Element::value(raw[m], 4) * f.x, Element::value(raw[m], 5) * f.y,
                            Element::value(raw[m], 6) * f.x, Element::value(raw[m], 7) * f.y};
        weighted[m] = Element::operand(y);
    }
#pragma unroll
    for (int d = 0; d < KP; d += 16) {
        typename Element::B b[2];
        load_b_columns<Element, Keys>(b, keys, t, d, lane);
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                float (&to)[4] = S.x[m][d / 8 + n];
                if constexpr (Element::EXACT) {   // matrix units cut sums off: these are summed apart, then added rounded
                    float add[4] = {};
                    Element::multiply(add, weighted[m], b[n]);
#pragma unroll
                    for (int i = 0; i < 4; i++) to[i] = t ? to[i] + add[i] : fmaf(carry, to[i], add[i]);
                } else Element::multiply(to, weighted[m], b[n]);
            }
    }
}

// A thread of a block: 16 LA_TILES value rows a warp of S^T and of out^T
typedef Traversal<C, PARTS, DOWN> ThisTraversal;

struct Pass {
    const ScanArguments& a;
    const ThisTraversal& traversal;
    const u32 shared;
    const int thread, warp, row, column;   // row: of this warp in the block, column: of the block in V
    int lane;
    const char *q, *k, *v, *x;
    const float* g;
    const Decay<C> decay;
    u32 keys, values, queries;   // of the chunk, in shared memory

    __device__ __forceinline__ Pass(const ScanArguments& a, const ThisTraversal& traversal, u32 shared)
        : a(a),
          traversal(traversal),
          shared(shared),
          thread(threadIdx.x),
          warp(thread >> 5),
          row(warp * 16 * TILES),
          column(traversal.part * VB),
          lane(thread & 31),
          q(OUTPUTS ? rows_of(a.q, traversal.sequence, traversal.head) : nullptr),
          k(rows_of(a.k, traversal.sequence, traversal.head)),
          v(rows_of(a.v, traversal.sequence, traversal.head)),
          x(DOTS ? rows_of(a.x, traversal.sequence, traversal.head) : nullptr),
          g(traversal.gates(a.g)),
          decay({shared + AT_DECAY + warp * Decay<C>::FLOATS * 4}) {}

    __device__ __forceinline__ bool marked(int step) const {
        return DOTS && traversal.chunk_of(step) % CHUNKS_OF_MARK == 0;
    }
    __device__ __forceinline__ i64 mark(int step) const {
        return ((traversal.slot * a.marks + traversal.chunk_of(step) / CHUNKS_OF_MARK) * PARTS + traversal.part) *
                   WARPS +
               warp;
    }
    __device__ __forceinline__ float4* state_at_mark(i64 mark) const {
        return (float4*)a.states + mark * (TILES * KP / 8 * 32);
    }

    __device__ __forceinline__ void load(int step) const {
        const u32 at = shared + (step % STAGES) * STAGE;
        const int token = traversal.token_of(step), T = traversal.sequence.T;
        load_rows<Keys, C, THREADS, K, ROLL>(at, k, a.k.token, token, T, 0, thread);
        if constexpr (OUTPUTS)
            load_rows<Keys, C, THREADS, K, ROLL>(at + KEY_BYTES + VALUE_BYTES, q, a.q.token, token, T, 0, thread);
        load_rows<Values, C, THREADS, V, ROLL>(at + KEY_BYTES, v, a.v.token, token, T, column, thread);
        if constexpr (DOTS && SEPARATE_X)
            load_rows<Values, C, THREADS, V, ROLL>(at + AT_OTHER, x, a.x.token, token, T, column, thread);
        load_gates<C, THREADS>(at + STAGE - C * 4, g, a.g.token, token, T, thread);
    }
    __device__ __forceinline__ void begin_loads() const {
        if constexpr (STAGES > 1)
#pragma unroll
            for (int s = 0; s < STAGES - 1; s++) {
                if (s < traversal.steps) load(s);
                copy_commit();
            }
    }
    // sums over the warps of the chunk before
    __device__ __forceinline__ void write_dots(int step) const {
        store_dots<C, THREADS, WARPS>(
            a.dots + ((i64)traversal.part * a.heads + traversal.head) * a.tokens + traversal.sequence.index,
            shared + AT_DOTS, traversal.token_of(step), traversal.sequence.T, thread);
    }
    // the chunk of a step is there, and one later on its way
    __device__ __forceinline__ void await(int step) {
        keys = shared + (step % STAGES) * STAGE;
        values = keys + KEY_BYTES;
        queries = values + VALUE_BYTES;
        copy_wait<(STAGES > 1 ? STAGES - 2 : 0)>();
        __syncthreads();
        asm volatile(
            ""
            : "+r"(lane));   // opaque: addresses are recomputed in each chunk; held over the loop they would spill
        if (DOTS && step) write_dots(step - 1);
        if constexpr (STAGES > 1) {
            if (step + STAGES - 1 < traversal.steps) load(step + STAGES - 1);
            copy_commit();
        } else {
            load(step);
            copy_commit();
            copy_wait<0>();
            __syncthreads();
        }
    }
    // the inner product of the state before a chunk and its gradient
    __device__ __forceinline__ void store_product(const StateRows<TILES, KP>& S, i64 mark) const {
        const float product = warp_sum(S.dot_registers(state_at_mark(mark), lane));
        if (lane == 0) a.products[mark] = product;
    }
    // gram and read: P; out^T = (S^T Q^T) e^{start}; S^T e^{all}
    __device__ __forceinline__ void read(float (&out)[TILES][C / 8][4], StateRows<TILES, KP>& S, int step,
                                         float carry) const {
        gram_matrix<Element, WARPS, C, KP, STRICT, Keys, Gram>(queries, keys, shared + AT_GRAM, shared + AT_OWN, decay,
                                                               a.read * a.write, warp, lane);
        clear_tiles(out);
        read_state<C, Keys>(out, S, queries, 0, lane);
#pragma unroll
        for (int i = 0; i < C / 8; i++) {
            const float2 e = decay.starts(i * 8 + (lane & 3) * 2);
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                out[m][i][0] *= e.x;
                out[m][i][1] *= e.y;
                out[m][i][2] *= e.x;
                out[m][i][3] *= e.y;
            }
        }
        if (LA_DECAY && !Element::EXACT) S.each([&](int, int, float& y) { y *= carry; });
        __syncthreads();   // P is whole, Q has been read
        if constexpr (DOTS && !SEPARATE_X) {
            load_rows<Values, C, THREADS, V>(queries, x, a.x.token, traversal.token_of(step), traversal.sequence.T,
                                             column, thread);
            copy_commit();
        }
    }
    // sixteen tokens' values
    __device__ __forceinline__ void values_of(typename Element::Raw (&raw)[TILES], int t) const {
#pragma unroll
        for (int m = 0; m < TILES; m++) raw[m] = load_a_columns<Element, Values>(values, t, row + m * 16, lane);
    }
    __device__ __forceinline__ void store_output(const float (&out)[TILES][C / 8][4], u32 buffer, int step) const {
        stage_rows<Element, Values, TILES, C>(out, buffer, row, lane);
        store_rows<Values, C, 16 * TILES, V>(own_rows(a.out, traversal.sequence, traversal.head), a.out.token, buffer,
                                             traversal.token_of(step), traversal.sequence.T, row, column, lane);
    }
    // out^T += V^T P^T; write: S^T += (V e^{end})^T K
    __device__ __forceinline__ void write(float (&out)[TILES][C / 8][4], StateRows<TILES, KP>& S, int step,
                                          float carry) const {
#pragma unroll
        for (int t = 0; t < C; t += 16) {
            typename Element::Raw raw[TILES];
            values_of(raw, t);
            if constexpr (OUTPUTS) accumulate_PV(out, raw, shared + AT_GRAM, t, lane);
            if constexpr (!Element::EXACT) accumulate_state(S, raw, keys, decay, carry, t, lane);
        }
        if constexpr (EARLY) store_output(out, queries, step);
        if constexpr (Element::EXACT) {
#pragma unroll
            for (int t = 0; t < C; t += 16) {
                typename Element::Raw raw[TILES];
                values_of(raw, t);
                accumulate_state(S, raw, keys, decay, carry, t, lane);
            }
        }
    }
    // <x_t, out_t> over this warp's columns; STRICT: then the token's own write is added to out
    __device__ __forceinline__ void dot_outputs(float (&out)[TILES][C / 8][4]) const {
        float sums[C / 4] = {};   // column pairs (2j, 2j + 1) of each 8 tokens
#pragma unroll
        for (int t = 0; t < C; t += 16)
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                const auto y = load_a_columns<Element, Values>(keys + AT_OTHER, t, row + m * 16, lane);
#pragma unroll
                for (int i = 0; i < 8; i++)
                    sums[(t / 8 + (i >> 2)) * 2 + (i & 1)] += out[m][t / 8 + (i >> 2)][i & 3] * Element::value(y, i);
                if constexpr (STRICT) {
                    const auto own = load_a_columns<Element, Values>(values, t, row + m * 16, lane);
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        const int tile = t / 8 + (i >> 2);
                        out[m][tile][i & 3] +=
                            load_shared(shared + AT_OWN + (tile * 8 + (lane & 3) * 2 + (i & 1)) * 4) *
                            Element::value(own, i);
                    }
                }
            }
        column_sums<C / 4>(sums, lane);
#pragma unroll
        for (int i = 0; i < C / 32; i++) {
            const int m = column_eighth(lane) * (C / 32) + i;
            store_shared(shared + AT_DOTS + (warp * C + (m >> 1) * 8 + (lane & 3) * 2 + (m & 1)) * 4, sums[i]);
        }
    }
    // later: of a segment's sum, log2 decay from this chunk's end to the segment's; returns the sum of the chunk
    __device__ __forceinline__ float run_chunk(StateRows<TILES, KP>& S, int step, float later) {
        await(step);
        const bool is_marked = marked(step);
        const i64 at = mark(step);
        if (!LA_REVERSE && is_marked) store_product(S, at);
        const float all = decay.set(keys + STAGE - C * 4, a.read, a.write, later, lane);
        __syncwarp();
        const float carry = OUTPUTS && LA_DECAY ? exp2_approx(all) : 1.f;
        float out[TILES][C / 8][4];
        if constexpr (OUTPUTS) read(out, S, step, carry);
        write(out, S, step, carry);
        if constexpr (DOTS) {
            if constexpr (!SEPARATE_X) {
                copy_wait<0>();
                __syncthreads();   // x is there
            }
            dot_outputs(out);
            if (LA_REVERSE && is_marked) S.store_registers(state_at_mark(at), lane);
        }
        if constexpr (OUTPUTS && !EARLY) store_output(out, values, step);
        return all;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS) scan(const __grid_constant__ ScanArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const ThisTraversal traversal(a.offsets, a.T, a.heads, a.segments, a.chunks);
    if (traversal.segment > traversal.last) return;
    if (!OUTPUTS && traversal.is_end() && !a.every)
        return;   // nothing reads the offset of the last segment, but other ranks
    Pass pass(a, traversal, shared_address(memory));
    StateRows<TILES, KP> S;
    if (OUTPUTS) load_start<V, K>(S, a, traversal, pass.column + pass.row, pass.lane);
    else S.clear();
    pass.begin_loads();
    float later = 0.f;
    for (int step = 0; step < traversal.steps; step++) {
        const float all = pass.run_chunk(S, step, later);
        if constexpr (!OUTPUTS) {
            later += all;
            if (later < FLOOR_LOG2) break;   // all that is earlier is multiplied by an exact zero
        }
    }
    copy_wait<0>();
    if (DOTS && traversal.steps > 0) {
        __syncthreads();
        pass.write_dots(traversal.steps - 1);
    }
    if (!OUTPUTS) {
        const i64 slot = traversal.slot * a.segments + traversal.segment;
        S.template store<V, K>(a.end, slot, pass.column + pass.row, pass.lane);
        if (pass.thread == 0 && traversal.part == 0) a.sums[slot] = later;
    } else store_end<V, K>(S, a, traversal, traversal.is_end(), pass.column + pass.row, pass.lane);
}
