// One pass over the tokens of a head, in chunks of C, with the state S in registers (erase NONE, decay NONE or SCALAR):
//
//     S_t = e^{g_t} S_{t-1} + write k_t^T v_t          out_t = read q_t S_t
//
// LA_REVERSE runs time backward, with a token's decay after its write: S_t = e^{g_{t+1}} S_{t+1} + write k_t^T v_t. With
// its arrays exchanged the same pass therefore gives every gradient:
//
//     forward      out = scan(q, k, v)        dq = scan(dout, v, k)     state transposed
//     reverse      dv  = scan(k, q, dout)     dk = scan(v, dout, q)     state transposed; S_t is then the gradient of S_t
//
// Inside a chunk, with E_ij = e^{s(j, i)}:  P = (Q K^T) .* E,   out^T = (S^T Q^T) e^{start} + V^T P^T,
// S^T <- e^{all} S^T + (V e^{end})^T K. A warp owns 16 * LA_TILES value rows of S^T and of out^T and shares only P.
//
// LA_OUTPUTS 0  no queries: the state that a segment adds, traversed from its end, so that it may stop once all has decayed
// LA_DOTS    1  also <x_t, out_t> (see STRICT) and, every LA_MARK tokens, states or their inner products
#include "arguments/matrix_state/ScanArguments.cuh"
#include "attention/gram.cuh"
#include "attention/store.cuh"
#include "attention/traversal.cuh"

constexpr int C = LA_C, K = LA_K, V = LA_V, WARPS = LA_WARPS, TILES = LA_TILES, STAGES = LA_STAGES;
constexpr int OUTPUTS = LA_OUTPUTS, DOTS = LA_DOTS, THREADS = 32 * WARPS;
// STRICT: the dots leave the token's own write out. With 16-bit elements it is in both: the same rounded entry of P times
// products that are exact cancels to float32. SEPARATE_X: x has a place of its own, else q's once that is read.
constexpr bool STRICT = DOTS && Element::BYTES == 4, SEPARATE_X = LA_SEPARATE_X;
constexpr int KP = round_up(K, 16), VB = 16 * TILES * WARPS;   // columns of the key tile, value rows of this block
typedef Tile<KP, Element::BYTES> Keys;
typedef Tile<VB, Element::BYTES> Values;
typedef Tile<C, Element::GRAM_BYTES> Gram;
// shared memory
constexpr int KEY_BYTES = C * Keys::ROW, VALUE_BYTES = C * Values::ROW;
// EARLY: outputs leave before the state is written, in the place of the queries, so that fewer registers are in use at once.
constexpr bool EARLY = Element::EXACT && OUTPUTS && !DOTS;
constexpr int ROLL = EARLY ? 4 : 1024;   // copies laid out at once: more would keep their addresses in registers
constexpr int QUERY_BYTES = !OUTPUTS ? 0 : (EARLY || (DOTS && !SEPARATE_X)) && VALUE_BYTES > KEY_BYTES ? VALUE_BYTES : KEY_BYTES;
constexpr int AT_OTHER = KEY_BYTES + VALUE_BYTES + (SEPARATE_X ? QUERY_BYTES : 0);   // x in a stage
constexpr int STAGE = KEY_BYTES + VALUE_BYTES + QUERY_BYTES + (DOTS && SEPARATE_X ? VALUE_BYTES : 0) + C * 4, CHUNKS_OF_MARK = LA_MARK / C;
constexpr int AT_GRAM = STAGES * STAGE, AT_DECAY = AT_GRAM + (OUTPUTS ? C * Gram::ROW : 0);
constexpr int AT_DOTS = AT_DECAY + WARPS * Decay<C>::FLOATS * 4, AT_OWN = AT_DOTS + DOTS * WARPS * C * 4;
static_assert(LA_SHARED == AT_OWN + DOTS * C * 4, "LA_SHARED is what the launch asks for");

static_assert(LA_MARK_BYTES == TILES * KP / 8 * 32 * 16, "the size that the host allocates by");

constexpr int PARTS = (V + VB - 1) / VB;
constexpr bool DOWN = LA_REVERSE == OUTPUTS;   // a segment's sum is traversed from its end

// out^T += V^T P^T for sixteen tokens
LA_DEVICE void accumulate_PV(float (&out)[TILES][C / 8][4], const Element::Raw (&raw)[TILES], u32 gram, int t, int lane) {
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
LA_DEVICE void accumulate_state(StateRows<TILES, KP>& S, const Element::Raw (&raw)[TILES], u32 keys, const Decay<C>& decay, float carry, int t, int lane) {
    const float2 e = decay.ends(t + (lane & 3) * 2), f = decay.ends(t + 8 + (lane & 3) * 2);
    typename Element::A weighted[TILES];
#pragma unroll
    for (int m = 0; m < TILES; m++) {
        const float y[8] = {Element::value(raw[m], 0) * e.x, Element::value(raw[m], 1) * e.y, Element::value(raw[m], 2) * e.x,
                            Element::value(raw[m], 3) * e.y, Element::value(raw[m], 4) * f.x, Element::value(raw[m], 5) * f.y,
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

extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS) scan(const __grid_constant__ ScanArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const int thread = threadIdx.x, warp = thread >> 5;
    int lane = thread & 31;
    const Traversal<C, PARTS, DOWN> traversal(a.offsets, a.T, a.heads, a.segments, a.chunks);
    const Sequence& sequence = traversal.sequence;
    const int head = traversal.head, part = traversal.part, segment = traversal.segment, steps = traversal.steps;
    const i64 slot = traversal.slot;
    if (segment > traversal.last) return;
    if (!OUTPUTS && traversal.is_end()) return;   // nothing needs what the last segment adds
    const char *q = OUTPUTS ? rows_of(a.q, sequence, head) : nullptr, *k = rows_of(a.k, sequence, head), *v = rows_of(a.v, sequence, head);
    const char* x = DOTS ? rows_of(a.x, sequence, head) : nullptr;
    const float* g = traversal.gates(a.g);
    const int row = warp * 16 * TILES, column = part * VB;        // of this warp in the block, of the block in V

    auto load = [&](int step) {
        const u32 at = shared + (step % STAGES) * STAGE;
        const int token = traversal.token_of(step);
        load_rows<Keys, C, THREADS, K, ROLL>(at, k, a.k.token, token, sequence.T, 0, thread);
        if constexpr (OUTPUTS) load_rows<Keys, C, THREADS, K, ROLL>(at + KEY_BYTES + VALUE_BYTES, q, a.q.token, token, sequence.T, 0, thread);
        load_rows<Values, C, THREADS, V, ROLL>(at + KEY_BYTES, v, a.v.token, token, sequence.T, column, thread);
        if constexpr (DOTS && SEPARATE_X) load_rows<Values, C, THREADS, V, ROLL>(at + AT_OTHER, x, a.x.token, token, sequence.T, column, thread);
        load_gates<C, THREADS>(at + STAGE - C * 4, g, a.g.token, token, sequence.T, thread);
    };
    auto write_dots = [&](int step) {   // sums over the warps of the chunk before
        store_dots<C, THREADS, WARPS>(a.dots + ((i64)part * a.heads + head) * a.tokens + sequence.index, shared + AT_DOTS, traversal.token_of(step), sequence.T, thread);
    };

    StateRows<TILES, KP> S;
    if (OUTPUTS) load_start<V, K>(S, a, traversal, column + row, lane);
    else S.clear();
    if constexpr (STAGES > 1)
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++) {
            if (s < steps) load(s);
            copy_commit();
        }

    const Decay<C> decay = {shared + AT_DECAY + warp * Decay<C>::FLOATS * 4};
    float later = 0.f;   // OUTPUTS 0: log2 decay from this chunk's end to the segment's
    for (int step = 0; step < steps; step++) {
        const u32 keys = shared + (step % STAGES) * STAGE, values = keys + KEY_BYTES, queries = values + VALUE_BYTES;
        copy_wait<(STAGES > 1 ? STAGES - 2 : 0)>();
        __syncthreads();
        asm volatile("" : "+r"(lane));   // opaque: addresses are recomputed in each chunk; held over the loop they would spill
        if (DOTS && step) write_dots(step - 1);
        if constexpr (STAGES > 1) {
            if (step + STAGES - 1 < steps) load(step + STAGES - 1);
            copy_commit();
        } else {
            load(step);
            copy_commit();
            copy_wait<0>();
            __syncthreads();
        }
        const bool marked = DOTS && traversal.chunk_of(step) % CHUNKS_OF_MARK == 0;
        const i64 marked_at = ((slot * a.marks + traversal.chunk_of(step) / CHUNKS_OF_MARK) * PARTS + part) * WARPS + warp;
        if (!LA_REVERSE && marked) {
            const float product = warp_sum(S.dot_registers((float4*)a.states + marked_at * (TILES * KP / 8 * 32), lane));
            if (lane == 0) a.products[marked_at] = product;
        }

        const float all = decay.set(keys + STAGE - C * 4, a.read, a.write, later, lane);
        __syncwarp();
        const float carry = OUTPUTS && LA_DECAY ? exp2_approx(all) : 1.f;
        float out[TILES][C / 8][4];
        if constexpr (OUTPUTS) {
            gram_matrix<Element, WARPS, C, KP, STRICT, Keys, Gram>(queries, keys, shared + AT_GRAM, shared + AT_OWN, decay, a.read * a.write, warp, lane);
#pragma unroll
            for (int i = 0; i < TILES * C / 2; i++) out[i / (C / 2)][(i >> 2) % (C / 8)][i & 3] = 0.f;
#pragma unroll
            for (int d = 0; d < KP; d += 16) {   // out^T = S^T Q^T
                typename Element::A s[TILES];
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    const float (&lo)[4] = S.x[m][d / 8], (&hi)[4] = S.x[m][d / 8 + 1];
                    const float f[8] = {lo[0], lo[1], lo[2], lo[3], hi[0], hi[1], hi[2], hi[3]};
                    s[m] = Element::operand(f);
                }
#pragma unroll
                for (int i = 0; i < C; i += 16) {
                    typename Element::B b[2];
                    load_b_rows<Element, Keys>(b, queries, i, d, lane);
                    multiply_pair<Element>(out, i / 8, s, b);
                }
            }
#pragma unroll
            for (int i = 0; i < C / 8; i++) {
                const float2 e = decay.starts(i * 8 + (lane & 3) * 2);
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    out[m][i][0] *= e.x; out[m][i][1] *= e.y; out[m][i][2] *= e.x; out[m][i][3] *= e.y;
                }
            }
            if (LA_DECAY && !Element::EXACT) S.each([&](int, int, float& y) { y *= carry; });
            __syncthreads();   // P is whole, Q has been read
            if constexpr (DOTS && !SEPARATE_X) {
                load_rows<Values, C, THREADS, V>(queries, x, a.x.token, traversal.token_of(step), sequence.T, column, thread);
                copy_commit();
            }
        }
        // sixteen tokens at a time
        auto values_of = [&](typename Element::Raw (&raw)[TILES], int t) {
#pragma unroll
            for (int m = 0; m < TILES; m++) raw[m] = load_a_columns<Element, Values>(values, t, row + m * 16, lane);
        };
        auto store_output = [&](u32 buffer) {
            stage_rows<Element, Values, TILES, C>(out, buffer, row, lane);
            store_rows<Values, C, 16 * TILES, V>(own_rows(a.out, sequence, head), a.out.token, buffer, traversal.token_of(step), sequence.T, row, column, lane);
        };
#pragma unroll
        for (int t = 0; t < C; t += 16) {
            typename Element::Raw raw[TILES];
            values_of(raw, t);
            if constexpr (OUTPUTS) accumulate_PV(out, raw, shared + AT_GRAM, t, lane);
            if constexpr (!Element::EXACT) accumulate_state(S, raw, keys, decay, carry, t, lane);
        }
        if constexpr (EARLY) store_output(queries);
        if constexpr (Element::EXACT) {
#pragma unroll
            for (int t = 0; t < C; t += 16) {
                typename Element::Raw raw[TILES];
                values_of(raw, t);
                accumulate_state(S, raw, keys, decay, carry, t, lane);
            }
        }
        if constexpr (DOTS) {
            if constexpr (!SEPARATE_X) {
                copy_wait<0>();
                __syncthreads();   // x is there
            }
            float sums[C / 4] = {};   // column pairs (2j, 2j + 1) of each 8 tokens
#pragma unroll
            for (int t = 0; t < C; t += 16)
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    const auto y = load_a_columns<Element, Values>(keys + AT_OTHER, t, row + m * 16, lane);
#pragma unroll
                    for (int i = 0; i < 8; i++) sums[(t / 8 + (i >> 2)) * 2 + (i & 1)] += out[m][t / 8 + (i >> 2)][i & 3] * Element::value(y, i);
                    if constexpr (STRICT) {
                        const auto own = load_a_columns<Element, Values>(values, t, row + m * 16, lane);
#pragma unroll
                        for (int i = 0; i < 8; i++) {
                            const int tile = t / 8 + (i >> 2);
                            out[m][tile][i & 3] += load_shared(shared + AT_OWN + (tile * 8 + (lane & 3) * 2 + (i & 1)) * 4) * Element::value(own, i);
                        }
                    }
                }
            column_sums<C / 4>(sums, lane);
#pragma unroll
            for (int i = 0; i < C / 32; i++) {
                const int m = column_eighth(lane) * (C / 32) + i;
                store_shared(shared + AT_DOTS + (warp * C + (m >> 1) * 8 + (lane & 3) * 2 + (m & 1)) * 4, sums[i]);
            }
            if (LA_REVERSE && marked) S.store_registers((float4*)a.states + marked_at * (TILES * KP / 8 * 32), lane);
        }
        if constexpr (OUTPUTS && !EARLY) store_output(values);
        if constexpr (!OUTPUTS) {
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
        if (thread == 0 && part == 0) a.sums[slot * a.segments + segment] = later;
    } else store_end<V, K>(S, a, traversal, traversal.is_end(), column + row, lane);
}
