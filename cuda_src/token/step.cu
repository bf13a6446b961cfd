// A few tokens of a head, as the recurrence is defined, with the state S (K, V) in registers from token to token:
//
//     S~ = diag(e^{g_t}) S_{t-1} diag(e^{gv_t})
//     LA_ERASE 0  S_t = S~ + k_t^T v_t
//              1  S_t = S~ + k_t^T beta_t (v_t - r_t S~)      or r_t S_{t-1} (LA_ERASE_BEFORE)
//              2  S_t = S~ + k_t^T v_t + b_t^T (a_t S_{t-1})
//     LA_READ  1  out_t = read q_t S_t
//              2  out_t = read (q_t S_{t-1} + (q_t (.) u) k_t^T v_t)      u with LA_BONUS
//              0  no queries
//
// States are read as LA_START and written as LA_END says, values as LA_VALUES, outputs as LA_OUT, other vectors as
// LA_DTYPE: 0 bfloat16, 1 float16, 2 float32; states are float32 in between. LA_SPLIT warps own LA_LANES LA_PER value
// columns, each its share of the rows. A state is read and written once. LA_ONE: each sequence has one token, each
// state one query, rows of a state are contiguous, strides fit 32 bits. Arrays are raw projections with these flags:
// LA_UNIT, q and k are divided by their length, r (2) by that of k; LA_RAW_GATE, g is -e^A_log softplus(g + bias) (1)
// or bound sigmoid(e^A_log (g + bias)) (2); LA_SIGMOID, beta is strongest sigmoid(beta). LA_MICRO: a token has `steps`
// rows of k, v and beta; the first decays, the last is read. LA_SUMS: v is multiplied by w, if given, and outputs are
// divided by read q_t z_t + eps (1), or by max(|read q_t z_t|, least) (2), z_t = e^{g_t} z_{t-1} + w_t k_t; 0 of 0.
// LA_ROTATE: the decayed state is rotated by -theta_p in its rows 2 p and 2 p + 1, p < pairs.
#include "attention/tokens.cuh"
#include "ops/formulas.cuh"
#include "tile/columns.cuh"

constexpr int K = LA_K, V = LA_V, WARPS = LA_WARPS, PER = LA_PER, LANES = LA_LANES, WIDE = LA_WIDE, KIND = LA_DTYPE,
              OUT = LA_OUT;
constexpr int SPLIT = LA_SPLIT, TILES = WARPS / SPLIT, TILE = LANES * PER,
              PARTS = (V + TILE * TILES - 1) / (TILE * TILES);
constexpr bool EARLY =
    K <= 128 || SPLIT > 1;   // queries are loaded with the keys, or, for want of registers, when needed
typedef Columns<K, PER, LANES, WIDE, SPLIT> State;
typedef PackedRows<KIND, K, State::GROUPS, WIDE> Keys;
typedef CrossWarpSum<SPLIT, PER> Warps;

// The factor that divides a row by its length: 1 / sqrt(|x|^2 + root^2), 1 for 0. A row whose squares would vanish or
// overflow becomes its multiple by a power of 2 first, `power`. 1 without LA_UNIT.
struct Length {
    float over, power;
    __device__ __forceinline__ Length() : over(1.f), power(1.f) {}
    static __device__ __forceinline__ float square(const Keys& x, Warps& warps, int lane) {
        float sum[PER];
        State::sums<true>(
            sum, warps, lane, [](int, int) { return 0.f; },
            [&](int r, int j, float part) { return j == 0 ? fmaf(x[r], x[r], part) : 0.f; });
        return sum[0];
    }
    __device__ __forceinline__ void divide(Keys& x, Warps& warps, int lane, float root) {
        if constexpr (LA_UNIT) {
            float n = square(x, warps, lane) + root * root;
            power = n < 0x1p-100f ? 0x1p100f : n > 0x1p100f ? 0x1p-75f : 1.f;
            if (KIND != 1 && power != 1.f) {   // in all lanes
                x.multiply(power);
                root *= power;
                n = square(x, warps, lane) + root * root;
            }
            over = n == 0.f ? 1.f : 1.f / sqrtf(n);
            if (n == 0.f) power = 1.f;
        }
    }
};

// A division that does not keep the first load waiting: x = ceil(2^32 / d), 0 for d = 1; exact while n d < 2^32.
struct Inverse {
    u32 x;
    __device__ __forceinline__ u32 divide(u32 n) const { return x ? __umulhi(n, x) : n; }
};
#include "arguments/matrix_state/StepArguments.cuh"

LA_DEVICE i64 place_of(const void* slots, int slot_bytes, u32 n) {
    return slots == nullptr ? n : slot_bytes == 4 ? ((const int*)slots)[n] : ((const i64*)slots)[n];
}
struct TokenVectors {   // one array along the tokens of a sequence and head
    const char* at;
    i64 token;
    __device__ __forceinline__ TokenVectors(const char* data, const Vectors& x, const Sequence& s, int head) {
        const int h = x.group.divide(head);
        if constexpr (LA_ONE) at = data + multiply_add(h, (int)x.head, multiply_add((int)s.row, (int)x.batch, 0));
        else at = data + s.row * x.batch + s.first * x.token + h * x.head;
        token = x.token;
    }
    __device__ __forceinline__ const char* operator()(int t) const { return LA_ONE ? at : at + t * token; }
};
// a head's state, and the way from a row to the next
template <class P> LA_DEVICE P state_at(P states, i64 place, int head, i64 by_place, i64 by_head) {
    if constexpr (LA_ONE) return states + multiply_add(head, (int)by_head, multiply_add((int)place, (int)by_place, 0));
    else return states + place * by_place + head * by_head;
}
LA_DEVICE i64 row_stride(i64 by_row) { return LA_ONE ? V : by_row; }

LA_DEVICE float decay_of(float g) { return exp2_approx(g * 1.4426950408889634f); }   // e^g
LA_DEVICE float decay_of_raw(float a, float rate, float bound) {
    return decay_of(gate<LA_RAW_GATE == 2>(a, rate, bound));
}

// The sum of the weights of what a head has written: a row z (K) beside its state.
struct Sums {
    PackedRows<2, K, State::GROUPS, WIDE> z;
    __device__ __forceinline__ void load(const float* p, bool begins, int group) {
        if (begins)
#pragma unroll
            for (int r = 0; r < State::N; r++) z.x[r >> 2].x[r & 3] = 0;
        else z.load((const char*)p, group);
    }
    __device__ __forceinline__ void add(float decay, float w, const Keys& k) {
#pragma unroll
        for (int r = 0; r < State::N; r++) z.x[r >> 2].x[r & 3] = __float_as_uint(fmaf(w, k[r], decay * z[r]));
    }
    // q z, in the first warp
    __device__ __forceinline__ float dot(const Keys& q, Warps& warps, int lane) const {
        float sum[PER];
        State::sums<false>(
            sum, warps, lane, [](int, int) { return 0.f; },
            [&](int r, int j, float part) { return j == 0 ? fmaf(q[r], z[r], part) : 0.f; });
        return sum[0];
    }
    __device__ __forceinline__ void store(float* p, int thread) const {
        State::rows(thread, [&](int r, int row) { p[thread / LANES * 4 + row] = z[r]; });
    }
};

// Decays of key channels from raw projections: of a group's rows, its lanes compute LANES at a time and exchange them.
struct RawDecays {
    static constexpr int SHARE = (State::N + LANES - 1) / LANES;
    AnyElement g[SHARE];
    float bias[SHARE];
    __device__ __forceinline__ void load(const char* p, int kind, const float* biases, int thread) {
#pragma unroll
        for (int n = 0; n < SHARE; n++) {
            const int r = n * LANES + thread % LANES, row = (r >> 2) * State::SPAN + thread / LANES * 4 + (r & 3);
            g[n].x = 0;
            bias[n] = 0.f;
            if (r >= State::N || row >= K) continue;
            g[n].load(p + row * bytes_of(kind), kind);
            if (biases != nullptr) bias[n] = biases[row];
        }
    }
    __device__ __forceinline__ RowVector<K, State::GROUPS> decays(int kind, float rate, float bound, int lane) const {
        float own[SHARE];
        RowVector<K, State::GROUPS> y;
#pragma unroll
        for (int n = 0; n < SHARE; n++) own[n] = decay_of_raw(g[n].as(kind) + bias[n], rate, bound);
#pragma unroll
        for (int r = 0; r < State::N; r++)
            y.x[r] = __shfl_sync(0xffffffffu, own[r / LANES], lane / LANES * LANES + r % LANES);
        return y;
    }
};

// The rotation of neighbouring rows (2 p, 2 p + 1) by -theta_p: cosines and sines of a lane's pairs, each computed by
// one lane of a group.
struct Rotation {
    static constexpr int PAIRS = State::N / 2, SHARE = (PAIRS + LANES - 1) / LANES;
    float cosine[PAIRS], sine[PAIRS];
    __device__ __forceinline__ void load(const float* theta, int count, int thread, int lane) {
        float c[SHARE], s[SHARE];
#pragma unroll
        for (int n = 0; n < SHARE; n++) {
            const int i = n * LANES + thread % LANES, p = (i >> 1) * (State::SPAN / 2) + thread / LANES * 2 + (i & 1);
            sincospif(i < PAIRS && p < count ? theta[p] * 0.31830988618379067f : 0.f, &s[n], &c[n]);
        }
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const int from = lane / LANES * LANES + i % LANES;
            cosine[i] = __shfl_sync(0xffffffffu, c[i / LANES], from);
            sine[i] = __shfl_sync(0xffffffffu, s[i / LANES], from);
        }
    }
    __device__ __forceinline__ void rotate(State& S) const {
#pragma unroll
        for (int i = 0; i < PAIRS; i++)
#pragma unroll
            for (int j = 0; j < PER; j++) {
                float &even = S.x[2 * i][j], &odd = S.x[2 * i + 1][j];
                const float first = even;
                even = fmaf(sine[i], odd, cosine[i] * first);
                odd = fmaf(-sine[i], first, cosine[i] * odd);
            }
    }
};

// A lane's value columns of a token: v as loaded; gv, of a kind that the call knows; out.
struct Values {
    static constexpr bool VEC4 = WIDE && PER == 4;
    Vec4<LA_VALUES> vec;
    float single[PER];
    __device__ __forceinline__ void load(const char* p, int column) {
        if constexpr (VEC4) vec.template load<1>(p + column * bytes_of(LA_VALUES), V % TILE ? V - column : 4);
        else
#pragma unroll
            for (int j = 0; j < PER; j++) {
                const int c = column + j * State::STEP;
                single[j] = c < V ? load_element<LA_VALUES>(p + c * bytes_of(LA_VALUES)) : 0.f;
            }
    }
    __device__ __forceinline__ float operator[](int j) const {
        if constexpr (VEC4) return vec[j];
        else return single[j];
    }
};
struct Gates {
    AnyElement x[PER];
    __device__ __forceinline__ void load(const char* p, int column, int kind) {
#pragma unroll
        for (int j = 0; j < PER; j++) {
            const int c = column + j * State::STEP;
            x[j].x = 0;
            if (c < V) x[j].load(p + c * bytes_of(kind), kind);
        }
    }
};
LA_DEVICE void store_values(char* p, const float (&x)[PER], int column) {
    if constexpr (WIDE && PER == 4) {
        if (column < V) store_vec4<OUT>(p + column * bytes_of(OUT), x);
    } else
#pragma unroll
        for (int j = 0; j < PER; j++)
            if (column + j * State::STEP < V) store_element<OUT>(p + (column + j * State::STEP) * bytes_of(OUT), x[j]);
}

// Blocks of a multiprocessor that registers are allotted for; compute capability 80 needs a few more of them.
#ifdef __CUDA_ARCH__
constexpr int BLOCKS = __CUDA_ARCH__ < 900 && LA_BLOCKS > 1 ? LA_BLOCKS - 1 : LA_BLOCKS;
#else
constexpr int BLOCKS = LA_BLOCKS;
#endif
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) step(const __grid_constant__ StepArguments a) {
    const int thread = threadIdx.x % (32 * SPLIT), lane = thread & 31,
              group = thread / LANES;   // of the warps of a tile
    const int in_block = threadIdx.x / (32 * SPLIT);
    const u32 block = blockIdx.x / PARTS, part = blockIdx.x % PARTS;
    const u32 guess = a.heads_inverse.divide(block), n = guess - (guess * a.heads > block), head = block - n * a.heads;
    const int tile = (part * TILES + in_block) * TILE, column = tile + State::first(thread);
    if (V % (TILE * TILES) && tile >= V) return;
    const int columns = V % TILE ? V - tile : TILE, readers = LA_ONE ? 1 : a.readers;
    const Sequence s = LA_ONE ? Sequence{n, 0, n, 1} : sequence_of(a.offsets, n, a.T);

    __shared__ typename Warps::Part places[TILES][2][SPLIT][32];      // not there with one warp
    Warps warps = {places[in_block], thread >> 5, in_block + 1, 0};   // barrier 0 is that of the block
    State S;
    const i64 from = place_of(a.start_slots, a.slot_bytes, n), to = a.end_slots == nullptr ? n : from;
    const bool begins = a.start == nullptr || (u64)from >= (u64)a.places || (a.fresh != nullptr && a.fresh[n]);
    const StoredAs<LA_START>::type* start = state_at(a.start, from, head, a.start_slot, a.start_head) + tile;
    if (begins) S.clear();
    else if (!LA_ONE && LANES == 8 && a.past)
        S.template load<1, LA_START>(start, row_stride(a.start_row), columns, thread);
    else S.template load<0, LA_START>(start, row_stride(a.start_row), columns, thread);
    const TokenVectors k_of(a.k, a.at_k, s, head), v_of(a.v, a.at_v, s, head), q_of(a.q, a.at_q, s, head * readers);
    const TokenVectors g_of(a.g, a.at_g, s, head), gv_of(a.gv, a.at_gv, s, head), r_of(a.r, a.at_r, s, head);
    const TokenVectors beta_of(a.beta, a.at_beta, s, head), a_of(a.a, a.at_a, s, head), b_of(a.b, a.at_b, s, head);
    const TokenVectors w_of(a.w, a.at_w, s, head), least_of(a.least, a.at_least, s, head);
    const TokenVectors out_of(a.out, a.at_out, s, head * readers);

    float rate = 1.f, bias = 0.f;   // of the formula of log decays; bias: of one for all channels
    if constexpr (LA_RAW_GATE) {
        if (a.A_log != nullptr) rate = expf(a.A_log[head]);
        if (LA_DECAY == 1 && a.bias != nullptr) bias = a.bias[head];
    }
    Sums sums;
    if constexpr (LA_SUMS) sums.load(a.z + (i64)block * K, begins || a.z == nullptr, group);
    Rotation rotation;
    if constexpr (LA_ROTATE) rotation.load(a.theta, a.pairs, thread, lane);
    auto store_state = [&] {
        if (a.end == nullptr || (a.end_slots != nullptr && (u64)to >= (u64)a.places)) return;
        StoredAs<LA_END>::type* end = state_at(a.end, to, head, a.end_slot, a.end_head) + tile;
        if (!LA_ONE && LANES == 8 && a.past) S.template store<1, LA_END>(end, row_stride(a.end_row), columns, thread);
        else S.template store<0, LA_END>(end, row_stride(a.end_row), columns, thread);
    };
    auto store_sums = [&] {
        if (tile == 0 && thread % LANES == 0) sums.store(a.z_end + (i64)block * K, thread);
    };
    auto token = [&](int t) {
        const int whole = LA_MICRO ? t / a.steps : t;
        const bool decays = !LA_MICRO || t == whole * a.steps, reads = !LA_MICRO || t + 1 == (whole + 1) * a.steps;
        Keys k, q, x, b;   // x: the erase vector, r or a
        Length length, length_q;
        Values v_in;
        Gates gv_in;
        AnyElement beta_in, all_in, w_in, least_in;
        w_in.x = 0x3f800000u;   // 1
        AnyRows<K, State::GROUPS, WIDE> decay_in, u_in;
        RawDecays raw_in;
        k.load(k_of(t), group);
        if constexpr (LA_ERASE == 1 && LA_SEPARATE_ERASE_KEY) x.load(r_of(t), group);
        if constexpr (LA_ERASE == 2) {
            x.load(a_of(t), group);
            b.load(b_of(t), group);
        }
        if constexpr (LA_DECAY == 1) all_in.load(g_of(whole), a.at_g.kind);
        if constexpr (LA_DECAY == 2 && LA_RAW_GATE)
            raw_in.load(g_of(whole), a.at_g.kind, a.bias == nullptr ? nullptr : a.bias + head * K, thread);
        else if constexpr (LA_DECAY == 2) decay_in.load(g_of(whole), a.at_g.kind, group);
        if constexpr (LA_ERASE == 1) beta_in.load(beta_of(t), a.at_beta.kind);
        if constexpr (LA_SUMS)
            if (a.w != nullptr) w_in.load(w_of(t), 2);
        if constexpr (LA_SUMS == 2) least_in.load(least_of(t), 2);
        v_in.load(v_of(t), column);
        if constexpr (LA_VALUE_DECAY) gv_in.load(gv_of(t), column, a.at_gv.kind);
        if constexpr (LA_READ && EARLY) q.load(q_of(whole), group);
        if constexpr (LA_BONUS) u_in.load(a.u + a.at_u.group.divide(head) * a.at_u.head, a.at_u.kind, group);

        length.divide(k, warps, lane, a.root);   // while the state is on its way
        if constexpr (LA_READ && EARLY) length_q.divide(q, warps, lane, a.root);
        float v[PER], predicted[PER];
#pragma unroll
        for (int j = 0; j < PER; j++) v[j] = v_in[j];
        if constexpr (LA_SUMS)
#pragma unroll
            for (int j = 0; j < PER; j++) v[j] *= w_in.as<2>();
        if constexpr (LA_UNIT && LA_ERASE != 1)
#pragma unroll
            for (int j = 0; j < PER; j++) v[j] *= length.over;   // k is divided where it is multiplied by them
        const float erase_over = LA_ERASE == 1 && !LA_SEPARATE_ERASE_KEY ? length.over
                                 : LA_UNIT == 2                          ? length.over * length.power
                                                                         : 1.f;   // of the erase vector
        auto read = [&](int reader) {
            float out[PER];
            if (reader || !EARLY) {
                q.load(q_of(whole) + reader * a.at_q.head, group);
                length_q.divide(q, warps, lane, a.root);
            }
            if constexpr (LA_BONUS) {
                const RowVector<K, State::GROUPS> u = u_in.as(a.at_u.kind, [](float u) { return u; });
                float own[State::HELD] = {};   // (q (.) u) . k of the rows of a leaf
#pragma unroll
                for (int r = 0; r < State::N; r++) own[State::leaf(r)] = fmaf(q[r] * u[r], k[r], own[State::leaf(r)]);
                S.template dot<false>(out, q, warps, lane, [&](int leaf, int j) { return fmaf(own[leaf], v[j], 0.f); });
            } else S.template dot<false>(out, q, warps, lane);
#pragma unroll
            for (int j = 0; j < PER; j++) out[j] *= a.read * length_q.over;
            if constexpr (LA_SUMS) {
                const float sum = a.read * sums.dot(q, warps, lane);
                const float total = LA_SUMS == 1                    ? sum + a.eps
                                    : fabsf(sum) < least_in.as<2>() ? least_in.as<2>()
                                                                    : fabsf(sum);
#pragma unroll
                for (int j = 0; j < PER; j++) out[j] = total == 0.f ? 0.f : out[j] / total;
            }
            if (thread < LANES) store_values((char*)out_of(whole) + reader * a.at_out.head, out, column);
        };
        if constexpr (LA_READ == 2)
            for (int reader = 0; reader < readers; reader++) read(reader);
        if constexpr (LA_ERASE == 2 || (LA_ERASE == 1 && LA_ERASE_BEFORE)) {
            if constexpr (LA_ERASE == 2 || LA_SEPARATE_ERASE_KEY) S.template dot<true>(predicted, x, warps, lane);
            else S.template dot<true>(predicted, k, warps, lane);
        }
        if (decays) {
            if constexpr (LA_DECAY == 1 && LA_RAW_GATE)
                S.scale(decay_of_raw(all_in.as(a.at_g.kind) + bias, rate, a.bound));
            else if constexpr (LA_DECAY == 1) S.scale(decay_of(all_in.as(a.at_g.kind)));
            if constexpr (LA_DECAY == 2 && LA_RAW_GATE) S.scale_rows(raw_in.decays(a.at_g.kind, rate, a.bound, lane));
            else if constexpr (LA_DECAY == 2)
                S.scale_rows(decay_in.as(a.at_g.kind, [](float g) { return decay_of(g); }));
        }
        if constexpr (LA_SUMS) sums.add(LA_DECAY == 1 ? decay_of(all_in.as(a.at_g.kind)) : 1.f, w_in.as<2>(), k);
        if constexpr (LA_ROTATE) rotation.rotate(S);
        if constexpr (LA_VALUE_DECAY) {
            float gv[PER];
#pragma unroll
            for (int j = 0; j < PER; j++) gv[j] = decay_of(gv_in.x[j].as(a.at_gv.kind));
            S.scale_columns(gv);
        }
        if constexpr (LA_ERASE == 1) {
            if constexpr (!LA_ERASE_BEFORE) {
                if constexpr (LA_SEPARATE_ERASE_KEY) S.template dot<true>(predicted, x, warps, lane);
                else S.template dot<true>(predicted, k, warps, lane);
            }
            float beta = beta_in.as(a.at_beta.kind);
            if constexpr (LA_SIGMOID) beta = a.strongest * sigmoid(beta);
            float written[PER];
#pragma unroll
            for (int j = 0; j < PER; j++) written[j] = beta * (v[j] - predicted[j] * erase_over) * length.over;
            S.add_outer(k, written);
        } else S.add_outer(k, v);
        if constexpr (LA_ERASE == 2) S.add_outer(b, predicted);
        if constexpr (LA_SUMS && LA_ONE) store_sums();
        if constexpr (LA_ONE) store_state();   // on its way while the output is summed
        if constexpr (LA_READ == 1)
            for (int reader = 0; reads && reader < readers; reader++) read(reader);
    };
    if constexpr (LA_ONE) token(0);
    else {
        for (int t = 0; t < s.T; t++) token(t);
        if constexpr (LA_SUMS) store_sums();
        store_state();
    }
}
