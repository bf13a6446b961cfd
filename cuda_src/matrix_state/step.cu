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
// A warp owns LA_LANES LA_PER value columns and all rows, so that no warp waits for another. A state is read and written once.
#include "attention/tokens.cuh"
#include "tile/columns.cuh"

constexpr int K = LA_K, V = LA_V, WARPS = LA_WARPS, PER = LA_PER, LANES = LA_LANES, WIDE = LA_WIDE, KIND = LA_DTYPE;
constexpr int TILE = LANES * PER, PARTS = (V + TILE * WARPS - 1) / (TILE * WARPS);
constexpr bool EARLY = K <= 128;   // queries are loaded with the keys, or, for want of registers, when they are needed
typedef Columns<K, PER, LANES, WIDE> State;
typedef PackedRows<KIND, K, LANES, WIDE> Keys;

// A division that does not keep the first load waiting: x = ceil(2^32 / d), 0 for d = 1; exact while n d < 2^32.
struct Inverse {
    u32 x;
    __device__ __forceinline__ u32 divide(u32 n) const { return x ? __umulhi(n, x) : n; }
};
struct Vectors {       // strides in bytes; heads of the states (of the outputs, for q and out) that share one; kind of element
    i64 batch, token, head;
    Inverse group;
    int kind;
};
struct Arguments {
    const char *q, *k, *v, *g, *gv, *r, *beta, *a, *b, *u;
    char* out;
    const float* start;          // null: zeros
    float* end;                  // null: not kept
    const void *start_slots, *end_slots;   // the place of each sequence's state, else null
    const i64* offsets;          // of a ragged batch, else null
    Vectors at_q, at_k, at_v, at_g, at_gv, at_r, at_beta, at_a, at_b, at_u, at_out;
    i64 start_slot, start_head, start_row, end_slot, end_head, end_row;   // in floats
    i64 places;                  // slots that there are: a number outside is read as zeros and not kept
    int T, heads, readers, slot_bytes; Inverse heads_inverse;   // heads of the state, queries that read one
    float read; int past;        // 1: states go past the L1 cache
};

struct Walk {          // one array along the tokens of a sequence and head
    const char* at;
    i64 token;
    __device__ __forceinline__ Walk(const char* data, const Vectors& x, const Sequence& s, int head)
        : at(data + s.row * x.batch + s.first * x.token + x.group.divide(head) * x.head), token(x.token) {}
    __device__ __forceinline__ const char* operator()(int t) const { return at + t * token; }
};

LA_DEVICE float decay_of(float g) { return exp2_approx(g * 1.4426950408889634f); }   // e^g

// a lane's value columns of a token: v, gv, out
LA_DEVICE void load_values(float (&x)[PER], const char* p, int column, int kind) {
#pragma unroll
    for (int j = 0; j < PER; j++) {
        const int c = column + j * State::STEP;
        x[j] = c < V ? load_element(p + c * (kind == 2 ? 4 : 2), kind) : 0.f;
    }
}
LA_DEVICE void load_values(float (&x)[PER], const char* p, int column) {
    if constexpr (WIDE && PER == 4) {
        Four<KIND> y;
        y.template load<1>(p + column * bytes_of(KIND), V - column);
#pragma unroll
        for (int j = 0; j < PER; j++) x[j] = y[j];
    } else load_values(x, p, column, KIND);
}
LA_DEVICE void store_values(char* p, const float (&x)[PER], int column) {
    if constexpr (WIDE && PER == 4) {
        if (column < V) store_four<KIND>(p + column * bytes_of(KIND), x);
    } else
#pragma unroll
        for (int j = 0; j < PER; j++)
            if (column + j * State::STEP < V) store_element<KIND>(p + (column + j * State::STEP) * bytes_of(KIND), x[j]);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) step(const __grid_constant__ Arguments a) {
    const int lane = threadIdx.x & 31;
    const u32 block = blockIdx.x / PARTS, part = blockIdx.x % PARTS;
    const u32 guess = a.heads_inverse.divide(block), n = guess - (guess * a.heads > block), head = block - n * a.heads;
    const int tile = (part * WARPS + (threadIdx.x >> 5)) * TILE, column = tile + State::first(lane);
    if (tile >= V) return;
    const Sequence s = sequence_of(a.offsets, n, a.T);
    auto slot_of = [&](const void* slots) -> i64 {
        return slots == nullptr ? n : a.slot_bytes == 4 ? ((const int*)slots)[n] : ((const i64*)slots)[n];
    };

    State S;
    const i64 from = slot_of(a.start_slots);
    const float* start = a.start + from * a.start_slot + head * a.start_head + tile;
    if (a.start == nullptr || (u64)from >= (u64)a.places) S.clear();
    else if (LANES == 8 && a.past) S.template load<1>(start, a.start_row, V - tile, lane);
    else S.template load<0>(start, a.start_row, V - tile, lane);
    const Walk k_of(a.k, a.at_k, s, head), v_of(a.v, a.at_v, s, head), q_of(a.q, a.at_q, s, head * a.readers);
    const Walk g_of(a.g, a.at_g, s, head), gv_of(a.gv, a.at_gv, s, head), r_of(a.r, a.at_r, s, head);
    const Walk beta_of(a.beta, a.at_beta, s, head), a_of(a.a, a.at_a, s, head), b_of(a.b, a.at_b, s, head);
    const Walk out_of(a.out, a.at_out, s, head * a.readers);

    for (int t = 0; t < s.T; t++) {
        Keys k, q, x, b;             // x: what erases, r or a
        float v[PER], gv[PER], recalled[PER], beta = 0.f, all = 1.f;
        RowVector<K, LANES> fade;
        k.load(k_of(t), lane);
        if constexpr (LA_ERASE == 1 && LA_OWN) x.load(r_of(t), lane);
        if constexpr (LA_ERASE == 2) {
            x.load(a_of(t), lane);
            b.load(b_of(t), lane);
        }
        if constexpr (LA_READ && EARLY) q.load(q_of(t), lane);
        load_values(v, v_of(t), column);
        if constexpr (LA_ERASE == 1) beta = load_element(beta_of(t), a.at_beta.kind);
        if constexpr (LA_DECAY == 1) all = decay_of(load_element(g_of(t), a.at_g.kind));
        if constexpr (LA_DECAY == 2) {
            load_rows_of<K, LANES, WIDE>(fade, g_of(t), a.at_g.kind, lane);
#pragma unroll
            for (int r = 0; r < RowVector<K, LANES>::N; r++) fade.x[r] = decay_of(fade.x[r]);
        }
        if constexpr (LA_VALUE_DECAY) {
            load_values(gv, gv_of(t), column, a.at_gv.kind);
#pragma unroll
            for (int j = 0; j < PER; j++) gv[j] = decay_of(gv[j]);
        }
        auto read = [&](int reader) {
            float out[PER];
            if (reader || !EARLY) q.load(q_of(t) + reader * a.at_q.head, lane);
            S.dot(out, q);
            if constexpr (LA_BONUS) {
                RowVector<K, LANES> u;
                load_rows_of<K, LANES, WIDE>(u, a.u + a.at_u.group.divide(head) * a.at_u.head, a.at_u.kind, lane);
                float own = 0.f;
#pragma unroll
                for (int r = 0; r < RowVector<K, LANES>::N; r++) own = fmaf(q[r] * u[r], k[r], own);
                own = row_sum<LANES>(own);
#pragma unroll
                for (int j = 0; j < PER; j++) out[j] = fmaf(own, v[j], out[j]);
            }
#pragma unroll
            for (int j = 0; j < PER; j++) out[j] *= a.read;
            if (lane < LANES) store_values((char*)out_of(t) + reader * a.at_out.head, out, column);
        };
        if constexpr (LA_READ == 2)
            for (int reader = 0; reader < a.readers; reader++) read(reader);
        if constexpr (LA_ERASE == 2 || (LA_ERASE == 1 && LA_ERASE_BEFORE)) {
            if constexpr (LA_ERASE == 2 || LA_OWN) S.dot(recalled, x);
            else S.dot(recalled, k);
        }
        if constexpr (LA_DECAY == 1) S.scale(all);
        if constexpr (LA_DECAY == 2) S.scale_rows(fade);
        if constexpr (LA_VALUE_DECAY) S.scale_columns(gv);
        if constexpr (LA_ERASE == 1) {
            if constexpr (!LA_ERASE_BEFORE) {
                if constexpr (LA_OWN) S.dot(recalled, x);
                else S.dot(recalled, k);
            }
            float written[PER];
#pragma unroll
            for (int j = 0; j < PER; j++) written[j] = beta * (v[j] - recalled[j]);
            S.add_outer(k, written);
        } else S.add_outer(k, v);
        if constexpr (LA_ERASE == 2) S.add_outer(b, recalled);
        if constexpr (LA_READ == 1)
            for (int reader = 0; reader < a.readers; reader++) read(reader);
    }
    const i64 to = slot_of(a.end_slots);
    if (a.end == nullptr || (u64)to >= (u64)a.places) return;
    float* end = a.end + to * a.end_slot + head * a.end_head + tile;
    if (LANES == 8 && a.past) S.template store<1>(end, a.end_row, V - tile, lane);
    else S.template store<0>(end, a.end_row, V - tile, lane);
}
