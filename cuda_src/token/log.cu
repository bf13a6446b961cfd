// Tokens after a checkpoint S (K, V) of a head, and a log of what each of them wrote: a key k, a value u, a log decay
// g. A reader x of the state after the logged tokens 1..n of a path, with G_i = g_n + ... + g_i:
//
//     x S_n = (x (.) e^{G_1}) S + sum_j x . (k_j (.) e^{G_{j+1}}) u_j
//
// tokens  of each token, on its path through a tree or a chain and then through the ring: x = its erase vector and its
//         queries; u = beta (v - x S), or v; k, u and g go to its slot. S is read once and not written.
// nodes   the same of a tree, AT_ONCE tokens at a time: what they read of S and the weights of their paths do not depend
//         on any u; then a thread has the sums of a column over a path, and the values u of its block's columns
// fold    S <- e^G S + sum_j (k_j (.) e^{G_{j+1}})^T u_j, of the oldest tokens of the ring
// move    entries of a path through a tree to the end of the ring
//
// Sums go from the last token of a path backwards. What is added to what, and in which order, depends on a token's
// place in the path alone: neither on other tokens of the call, nor on the entry, nor on where in the ring a path is.
// One sum for every WARPS-th entry of a path, one for each group of rows of S; these are added in their order.
//
// A block has LA_LANES 4 value columns of a head; each of its groups of LA_LANES lanes has ROWS neighbouring rows of S,
// in registers, and each warp every WARPS-th entry of a path. Blocks of one head write the same k and g. Blocks of
// `fold` have LA_FOLD_LANES 4 columns and sum before they read S.
//
// LA_BITS: S is whole numbers of 8, 12 or 16 bits with a scale for each column (codes.cuh), 0: plain numbers. `tokens`
// has them in registers as they lie in memory; `fold` rounds a column, all of its block, by its largest number.
#include "ops/element.cuh"
#include "token/codes.cuh"
#include "arguments/matrix_state/LogArguments.cuh"

constexpr int K = LA_K, V = LA_V, W = LA_W, THREADS = LA_THREADS, LANES = LA_LANES, PER = 4, TILE = LANES * PER,
              GROUPS = THREADS / LANES, WARPS = THREADS / 32, CHANNELS = (K + 31) / 32, DECAYS = W == 1 ? 1 : CHANNELS,
              STATE = LA_STATE, BITS = LA_BITS;
constexpr int FOLD_THREADS = 256, FOLD_LANES = LA_FOLD_LANES, FOLD_GROUPS = FOLD_THREADS / FOLD_LANES,
              FOLD_TILE = FOLD_LANES * PER, CHUNK = 8;   // tokens that a fold has in shared memory
typedef Wide<STATE> Number;
constexpr int AT_ONCE = LA_AT_ONCE, KEPT = LA_KEPT,   // tokens of `nodes` at a time, and of which it has u at hand
    LONGEST = LA_LONGEST;                             // path of such a token
static_assert(WARPS % AT_ONCE == 0 && KEPT >= AT_ONCE, "a warp or more for each token");
static_assert(THREADS % TILE == 0 && K <= FOLD_THREADS, "a thread for each column of a reader, and for each channel");
constexpr int STORED = BITS == 0 ? 8 : BITS;   // of the code that is there without use
static_assert(BITS == 0 || STATE == 2, "scales are float32");

template <class T> LA_DEVICE T exponential(T x) {
    if constexpr (sizeof(T) == 8) return exp(x);
    else return exp2_approx(x * 1.4426950408889634f);
}
template <class T> LA_DEVICE T sum_of_lanes(T x) {
#pragma unroll
    for (int d = 16; d; d >>= 1) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}
LA_DEVICE int wrapped(int slot, int ring) {
    while (slot >= ring) slot -= ring;
    return slot;
}

struct Task {   // a row of the call, a head, and columns of it, of a block whose rows have so many lanes
    int row, head, part, column, at, start, live;
    i64 entry, state;   // of its slot 0; its matrix
    __device__ __forceinline__ explicit Task(const LogArguments& a, int lanes = LANES) {
        const u32 parts = (V + lanes * PER - 1) / (lanes * PER), task = blockIdx.x / parts;
        row = task / (u32)a.heads;
        head = task - row * a.heads;
        part = blockIdx.x % parts;
        column = (part * lanes + threadIdx.x % lanes) * PER;
        at = a.cursors[row];
        start = wrapped(a.cursors[a.rows + row] + a.shift, a.ring);
        live = a.cursors[2 * a.rows + row] + a.more;
        entry = ((i64)at * a.heads + head) * a.slots;
        state = (i64)(a.dense ? row : at) * a.heads + head;
    }
    __device__ __forceinline__ int end(const LogArguments& a, int n) const { return wrapped(start + live + n, a.ring); }
};
// Slots of a path from its end: nodes of the call, then the oldest `left` tokens of the ring; -1 after them.
struct Path {
    int node, left;
    __device__ __forceinline__ static int parent(const LogArguments& a, const Task& s, int n) {
        return a.parents == nullptr ? n - 1 : a.parents[s.row * a.count + n];
    }
    // the slot of this lane among the next 32, and how many there are
    __device__ __forceinline__ int next(const LogArguments& a, const Task& s, int lane, int& count) {
        const auto slot_of = [&](int n) { return a.tree ? a.ring + n : s.end(a, n); };
        int slot = -1;
        if (a.parents == nullptr) {
            count = min(node + 1, 32);
            if (lane < count) slot = slot_of(node - lane);
            node -= count;
        } else
            for (count = 0; node >= 0 && count < 32; count++) {
                if (count == lane) slot = slot_of(node);
                node = parent(a, s, node);
            }
        const int more = min(left, 32 - count), mine = lane - count;
        if (mine >= 0 && mine < more) slot = wrapped(s.start + left - 1 - mine, a.ring);
        left -= more;
        count += more;
        return slot;
    }
    __device__ __forceinline__ bool ends() const { return node < 0 && left <= 0; }
};

// Four columns of a row; zeros past V
template <int KIND> LA_DEVICE void load_columns(Number (&y)[PER], const char* from, i64 row, int column) {
    if constexpr (LA_WIDE) {
        Loaded<KIND, PER> x;
        if (column < V) x.load(from + (row * V + column) * bytes_of(KIND));
        else x.zero();
        x.get(y);
    } else
#pragma unroll
        for (int j = 0; j < PER; j++)
            y[j] = column + j < V ? (Number)element<KIND>(from, row * V + column + j) : (Number)0;
}
constexpr int LOG = sizeof(Number) == 8 ? 3 : 2;   // the kind of the log

// Neighbouring rows of S, four columns of each; every group of LANES lanes has its own
template <int LANES, int GROUPS> struct RowsOfState {
    static constexpr int ROWS = (K + GROUPS - 1) / GROUPS;
    __device__ __forceinline__ static int row(int i) { return threadIdx.x / LANES * ROWS + i; }
    __device__ __forceinline__ static bool is_row(int i) { return ROWS * GROUPS == K || row(i) < K; }
};

template <int LANES, int GROUPS> struct CodeRows : RowsOfState<LANES, GROUPS> {   // as they lie in memory
    typedef RowsOfState<LANES, GROUPS> Rows;
    Codes<STORED> x[Rows::ROWS];
    float scale[PER];
    __device__ __forceinline__ void load(const LogArguments& a, const Task& s) {
#pragma unroll
        for (int i = 0; i < Rows::ROWS; i++)
            if (Rows::is_row(i)) x[i].template load<V, LA_WIDE>(a.state, a.low, s.state * K + Rows::row(i), s.column);
#pragma unroll
        for (int j = 0; j < PER; j++) scale[j] = s.column + j < V ? a.scales[s.state * V + s.column + j] : 0.f;
    }
    // codes += z S, S without its scales, of two readers of N tokens; z is 0 where there is one
    template <int N>
    __device__ __forceinline__ void add_reads(float (&codes)[N][2][PER], const float (*z)[K][2], int) const {
#pragma unroll
        for (int i = 0; i < Rows::ROWS; i++) {
            if (!Rows::is_row(i)) continue;
            float y[PER];
            x[i].opaque_copy().get(y);
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int j = 0; j < PER; j++) {
                    codes[n][0][j] += z[n][Rows::row(i)][0] * y[j];
                    codes[n][1][j] += z[n][Rows::row(i)][1] * y[j];
                }
        }
    }
    __device__ __forceinline__ float scale_of(int j) const { return scale[j]; }
    __device__ __forceinline__ void get(Number (&y)[PER], const LogArguments&, const Task&, int i) const {
        x[i].get(y);
#pragma unroll
        for (int j = 0; j < PER; j++) y[j] *= scale[j];
    }
};

template <int LANES, int GROUPS> struct NumberRows : RowsOfState<LANES, GROUPS> {   // the same as numbers
    typedef RowsOfState<LANES, GROUPS> Rows;
    Number x[Rows::ROWS][PER];
    __device__ __forceinline__ void load(const LogArguments& a, const Task& s) {
#pragma unroll
        for (int i = 0; i < Rows::ROWS; i++)
            if (Rows::is_row(i)) get(x[i], a, s, i);
    }
    template <int N>
    __device__ __forceinline__ void add_reads(Number (&sum)[N][2][PER], const Number (*z)[K][2], int readers) const {
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int y = 0; y < 2; y++) {
                if (y >= readers) continue;
#pragma unroll
                for (int i = 0; i < Rows::ROWS; i++)
                    if (Rows::is_row(i))
#pragma unroll
                        for (int j = 0; j < PER; j++) sum[n][y][j] += z[n][Rows::row(i)][y] * x[i][j];
            }
    }
    __device__ __forceinline__ Number scale_of(int) const { return 1; }
    __device__ __forceinline__ static void get(Number (&y)[PER], const LogArguments& a, const Task& s, int i) {
        load_columns<STATE>(y, a.state, s.state * K + Rows::row(i), s.column);
    }
};
template <bool CODES, int LANES, int GROUPS> struct Held {
    typedef NumberRows<LANES, GROUPS> type;
};
template <int LANES, int GROUPS> struct Held<true, LANES, GROUPS> {
    typedef CodeRows<LANES, GROUPS> type;
};

LA_DEVICE void store_columns(const LogArguments& a, const Task& s, int row, const Number (&x)[PER]) {
    const i64 n = (s.state * K + row) * V + s.column;
    if constexpr (LA_WIDE && STATE == 2) {
        if (s.column < V) *(float4*)(a.state + n * 4) = {(float)x[0], (float)x[1], (float)x[2], (float)x[3]};
    } else if constexpr (LA_WIDE && STATE < 2) {
        const auto two = [](float lo, float hi) { return STATE == 0 ? pack_bf16(lo, hi) : pack_f16(lo, hi); };
        if (s.column < V) *(uint2*)(a.state + n * 2) = {two(x[0], x[1]), two(x[2], x[3])};
    } else
#pragma unroll
        for (int j = 0; j < PER; j++)
            if (s.column + j < V) put_element<STATE>(a.state, n + j, x[j]);
}
// x y of less than 2^22, to the nearest whole number: the lower bits of 1.5 2^23 + x y, which has no digits after the
// point. The product is rounded by itself, as that of `pack_state` is: no fused operation
LA_DEVICE int nearest(float x, float y) {
    constexpr u32 BASE = 0x4b400000;
    return (int)(__float_as_uint(__fadd_rn(__fmul_rn(x, y), __uint_as_float(BASE))) - BASE);
}
// x / size, rounded once: a product with rounded = 1 / size, and two corrections. |x| <= size, from 2^-80 to 2^80
LA_DEVICE float quotient(float x, float size, float rounded) {
    float q = x * rounded;
#pragma unroll
    for (int i = 0; i < 2; i++) q = fmaf(fmaf(-q, size, x), rounded, q);
    return q;
}
// The nearest codes of all rows of a column. One with inf or NaN has the scale NaN and the codes 0: it is read as NaN.
template <int ROWS>
LA_DEVICE void store_codes(const LogArguments& a, const Task& s, const Number (&x)[ROWS][PER]) {
    typedef RowsOfState<FOLD_LANES, FOLD_GROUPS> Rows;
    __shared__ __align__(16) u32 columns[FOLD_GROUPS][FOLD_TILE];
    __shared__ __align__(16) float factors[FOLD_TILE], sizes[FOLD_TILE], reciprocals[FOLD_TILE];
    constexpr float MOST = (1 << (STORED - 1)) - 1, FINITE = 3.402823466e38f;
    const int thread = threadIdx.x, group = thread / FOLD_LANES, first = thread % FOLD_LANES * PER;
    u32 bits[PER] = {};   // of the largest magnitude: those of inf and NaN are larger
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        if (Rows::is_row(i))
#pragma unroll
            for (int j = 0; j < PER; j++) bits[j] = max(bits[j], __float_as_uint(x[i][j]) & 0x7fffffff);
#pragma unroll
    for (int j = 0; j < PER; j++) columns[group][first + j] = bits[j];
    __syncthreads();
    if (thread < FOLD_TILE) {   // a column: it is divided by a size that is neither small nor large
        u32 most = 0;
#pragma unroll
        for (int i = 0; i < FOLD_GROUPS; i++) most = max(most, columns[i][thread]);
        const float largest = __uint_as_float(most);
        const float factor = largest < 0x1p-80f ? 0x1p100f : largest > 0x1p80f ? 0x1p-100f : 1.f;
        factors[thread] = factor;
        sizes[thread] = largest * factor;
        reciprocals[thread] = largest > 0.f && largest <= FINITE ? 1.f / (largest * factor) : 0.f;
        const int column = s.part * FOLD_TILE + thread;
        if (column < V)
            a.scales[s.state * V + column] = largest <= FINITE ? largest / MOST : __int_as_float(0x7fffffff);
    }
    __syncthreads();
    const auto store = [&](auto quotient_of) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (!Rows::is_row(i)) continue;
            int codes[PER];
#pragma unroll
            for (int j = 0; j < PER; j++) codes[j] = nearest(quotient_of(i, j), MOST);
            Codes<STORED>::template store<V, LA_WIDE>(a.state, a.low, s.state * K + Rows::row(i), s.column, codes);
        }
    };
    float factor[PER], size[PER], reciprocal[PER];
    bool plain = true;
#pragma unroll
    for (int j = 0; j < PER; j++) {
        factor[j] = factors[first + j], size[j] = sizes[first + j], reciprocal[j] = reciprocals[first + j];
        plain = plain && factor[j] == 1.f && reciprocal[j] != 0.f;
    }
    if (plain) store([&](int i, int j) { return quotient(x[i][j], size[j], reciprocal[j]); });
    else
        store([&](int i, int j) {
            return reciprocal[j] == 0.f ? 0.f : quotient(x[i][j] * factor[j], size[j], reciprocal[j]);
        });
}

// Asks the L2 cache for what a block reads of its state and of its log.
template <int THREADS, int TILE> LA_DEVICE void ask_for(const LogArguments& a, const Task& s) {
    constexpr int EACH = BITS == 0    ? bytes_of(STATE)
                         : BITS == 16 ? 2
                                      : 1,
                  PARTS = (V + TILE - 1) / TILE, LINES = (K * V * EACH + 127) / 128,
                  LOW = BITS == 12 ? (K * ((V + 1) / 2) + 127) / 128 : 0;
    for (int i = s.part * THREADS + threadIdx.x; i < LINES; i += PARTS * THREADS)
        ask_line(a.state + s.state * (K * V * EACH) + i * 128);
    for (int i = s.part * THREADS + threadIdx.x; i < LOW; i += PARTS * THREADS)
        ask_line(a.low + s.state * (K * ((V + 1) / 2)) + i * 128);
    constexpr int LINE = 128 / sizeof(Number), OF_K = (K + LINE - 1) / LINE, OF_W = (W + LINE - 1) / LINE,
                  OF_TILE = (TILE + LINE - 1) / LINE, ALL = OF_K + OF_W + OF_TILE;
    for (int i = threadIdx.x; i < s.live * ALL; i += THREADS) {
        const i64 at = s.entry + wrapped(s.start + i / ALL, a.ring);
        const int k = i % ALL, w = k - OF_K, u = w - OF_W, column = s.part * TILE + u * LINE;
        if (w < 0) ask_line((const Number*)a.log_k + at * K + k * LINE);
        else if (u < 0) ask_line((const Number*)a.log_g + at * W + w * LINE);
        else if (column < V) ask_line((const Number*)a.log_u + at * V + column);
    }
}
template <class T> LA_DEVICE T fused(T x, T y, T z) {   // one rounding, in every kernel
    if constexpr (sizeof(T) == 8) return fma(x, y, z);
    else return fmaf(x, y, z);
}
// What a reader sees of a log and of rows of S
LA_DEVICE Number joined(Number log, Number read, Number scale) {
    return BITS == 0 ? log + read : fused(scale, read, log);
}
// A term of what a query reads of its own token
LA_DEVICE Number own_term(const LogArguments& a, const Task& s, int c, Number query, Number key, Number sum) {
    if (a.bonus != nullptr) key *= ((const Number*)a.bonus)[s.head * K + c];
    return fused(query, key, sum);
}

LA_DEVICE const char* row_of(const Rows& x, const Task& s, int token, int head) {
    return x.data + s.row * x.batch + token * x.token + (x.group == 1 ? head : head / (u32)x.group) * x.head;
}
// Asks the L2 cache for rows of tokens, a warp a row.
LA_DEVICE void ask_for_tokens(const LogArguments& a, const Task& s, int from, int count) {
    for (int i = threadIdx.x / 32; i < count * 4; i += WARPS) {
        const int token = from + i / 4, which = i % 4, line = threadIdx.x % 32 * 128;
        const Rows& x = which == 0 ? a.k : which == 1 ? a.v : which == 2 ? a.erase : a.q;
        const int kind = which == 0 ? a.kind_k : which == 1 ? a.kind_v : which == 2 ? a.kind_erase : a.kind_q;
        if (x.data != nullptr && line < (which == 1 ? V : K) * (kind < 2 ? 2 : kind == 2 ? 4 : 8))
            ask_line(row_of(x, s, token, which == 3 ? s.head * a.queries : s.head) + line);
    }
}

// A row of numbers, lane by lane; SAME: one number, for all lanes
template <int WIDTH, bool SAME, int N> LA_DEVICE void load_row(Number (&x)[N], const char* from, int kind) {
    const auto load = [&](auto at) {
#pragma unroll
        for (int m = 0; m < N; m++) {
            const int c = SAME ? 0 : m * 32 + threadIdx.x % 32;
            x[m] = SAME || WIDTH % 32 == 0 || c < WIDTH ? (Number)at(c) : (Number)0;
        }
    };
    if (kind == 2) load([&](int c) { return element<2>(from, c); });
    else if (kind == 0) load([&](int c) { return element<0>(from, c); });
    else if (kind == 1) load([&](int c) { return element<1>(from, c); });
    else load([&](int c) { return element<3>(from, c); });
}
// Two readers of a token from number `first` on, in a warp. One warp of a token, that `keeps` it, writes its key and
// its decay to its slot, and what queries read of it to `own`.
LA_DEVICE void load_readers(Number (&readers)[2][CHANNELS], Number* own, const LogArguments& a, const Task& s,
                            int token, i64 slot, int first, bool keeps) {
    const int lane = threadIdx.x % 32, all = a.erases + a.queries;
    Number decay[DECAYS] = {}, key[CHANNELS] = {};   // all are asked for before one is used
    if (a.g.data != nullptr) load_row<W, W == 1>(decay, row_of(a.g, s, token, s.head), a.kind_g);
    if (keeps) load_row<K, false>(key, row_of(a.k, s, token, s.head), a.kind_k);
#pragma unroll
    for (int x = 0; x < 2; x++) {
        const int query = first + x - a.erases;
        if (query < 0) load_row<K, false>(readers[x], row_of(a.erase, s, token, s.head), a.kind_erase);
        else if (first + x < all)
            load_row<K, false>(readers[x], row_of(a.q, s, token, s.head * a.queries + query), a.kind_q);
        else
#pragma unroll
            for (int m = 0; m < CHANNELS; m++) readers[x][m] = 0;
    }
    if (keeps) {
        Number terms[2] = {};
#pragma unroll
        for (int m = 0; m < CHANNELS; m++) {
            const int c = m * 32 + lane;
            if (K % 32 && c >= K) continue;
            if (first == 0) ((Number*)a.log_k)[slot * K + c] = key[m];
#pragma unroll
            for (int x = 0; x < 2; x++) terms[x] = own_term(a, s, c, readers[x][m], key[m], terms[x]);
        }
#pragma unroll
        for (int x = 0; x < 2; x++) {
            const Number sum = sum_of_lanes(terms[x]);
            if (lane == 0) own[x] = sum;
        }
        if (first == 0)
#pragma unroll
            for (int m = 0; m < DECAYS; m++)
                if (m * 32 + lane < W) ((Number*)a.log_g)[slot * W + m * 32 + lane] = decay[m];
    }
#pragma unroll
    for (int m = 0; m < DECAYS; m++) decay[m] = exponential(decay[m]);
#pragma unroll
    for (int x = 0; x < 2; x++)
        if (first + x < a.erases ? !a.early : a.updated)
#pragma unroll
            for (int m = 0; m < CHANNELS; m++) readers[x][m] *= decay[W == 1 ? 0 : m];
}
// The entries of the path of token n, from its end; every EACH-th one from `part` on is this warp's: begin(slot) before,
// add(place, slot, the weights that two readers give it) after. Returns how many; total: all log decays of the path.
template <int EACH, class Begin, class Add>
LA_DEVICE int walk(const LogArguments& a, const Task& s, int n, int part, const Number (&readers)[2][CHANNELS],
                   Number (&total)[DECAYS], Begin begin, Add add) {
    constexpr bool AHEAD = DECAYS <= 4;   // more of them leave no registers for keys of the next entry
    constexpr int MOST = AHEAD ? 4 : 1, TOGETHER = EACH < MOST ? EACH : MOST;
    const int lane = threadIdx.x % 32;
    const Number *log_k = (const Number*)a.log_k + s.entry * K, *log_g = (const Number*)a.log_g + s.entry * W;
    Path path = {Path::parent(a, s, n), s.live};
    int done = 0;
    while (!path.ends()) {
        int count;
        const int found = path.next(a, s, lane, count);
        const auto load_key = [&](Number(&key)[CHANNELS], int at) {
#pragma unroll
            for (int m = 0; m < CHANNELS; m++) {
                const int c = m * 32 + lane;
                key[m] = K % 32 == 0 || c < K ? log_k[at * K + c] : (Number)0;
            }
        };
        Number next[CHANNELS], fade = 1;
        if (AHEAD && part < count) load_key(next, __shfl_sync(0xffffffffu, found, part));
        if constexpr (W == 1) {   // of this lane's entry: the sum of those before it
            Number sum = found >= 0 ? log_g[found] : (Number)0;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const Number before = __shfl_up_sync(0xffffffffu, sum, d);
                if (lane >= d) sum += before;
            }
            const Number before = __shfl_up_sync(0xffffffffu, sum, 1);
            fade = exponential(lane ? total[0] + before : total[0]);
            total[0] += __shfl_sync(0xffffffffu, sum, 31);
        }
        for (int first = 0; first < count; first += EACH) {   // so many entries, one of them of this warp
            Number before[DECAYS];
            if constexpr (W > 1)
#pragma unroll(AHEAD ? EACH : 2)
                for (int from = 0; from < EACH; from += TOGETHER) {
                    Number g[TOGETHER][DECAYS];   // all are asked for before one is used
#pragma unroll
                    for (int i = 0; i < TOGETHER; i++) {
                        const int n = first + from + i, slot = __shfl_sync(0xffffffffu, found, n & 31);
#pragma unroll
                        for (int m = 0; m < DECAYS; m++) {
                            const int c = m * 32 + lane;
                            g[i][m] = n < count && c < W ? log_g[slot * W + c] : (Number)0;
                        }
                    }
#pragma unroll
                    for (int i = 0; i < TOGETHER; i++)
#pragma unroll
                        for (int m = 0; m < DECAYS; m++) {
                            if (from + i == part) before[m] = total[m];
                            total[m] += g[i][m];
                        }
                }
            const int j = first + part;
            if (j >= count) continue;
            const int at = __shfl_sync(0xffffffffu, found, j);
            begin(at);
            Number key[CHANNELS], dots[2] = {};
            if constexpr (AHEAD) {
#pragma unroll
                for (int m = 0; m < CHANNELS; m++) key[m] = next[m];
                if (j + EACH < count) load_key(next, __shfl_sync(0xffffffffu, found, j + EACH));
            } else load_key(key, at);
#pragma unroll
            for (int m = 0; m < CHANNELS; m++) {
                if constexpr (W > 1) key[m] *= exponential(before[m]);
#pragma unroll
                for (int x = 0; x < 2; x++) dots[x] = fused(readers[x][m], key[m], dots[x]);
            }
            const Number weight = W == 1 ? __shfl_sync(0xffffffffu, fade, j) : (Number)1;
#pragma unroll
            for (int x = 0; x < 2; x++) dots[x] = weight * sum_of_lanes(dots[x]);
            add(done + j, at, dots);
        }
        done += count;
    }
    return done;
}
// to = readers after all log decays of their path, by EACH warps
template <int EACH>
LA_DEVICE void fade(Number (&to)[K][2], const Number (&readers)[2][CHANNELS], const Number (&total)[DECAYS], int part) {
#pragma unroll
    for (int m = 0; m < CHANNELS; m++) {
        const int c = m * 32 + threadIdx.x % 32;
        if (m % EACH != part || (K % 32 && c >= K)) continue;
        const Number decay = exponential(total[W == 1 ? 0 : m]);
#pragma unroll
        for (int x = 0; x < 2; x++) to[c][x] = readers[x][m] * decay;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS) tokens(const __grid_constant__ LogArguments a) {
    constexpr int EACH = 2 * TILE > THREADS ? 2 : 1;   // of the sums, of a thread
    __shared__ __align__(16) Number faded[K][2], sums[2][GROUPS][TILE];
    __shared__ Number written[TILE], own[2];
    const Task s(a);
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int in_tile = thread % TILE, column = s.part * TILE + in_tile;   // of sums
    typename Held<BITS != 0, LANES, GROUPS>::type S;
    S.load(a, s);
    ask_for<THREADS, TILE>(a, s);
    for (int n = 0; n < a.count; n++) {
        const int token = a.first + n, all = a.erases + a.queries;
        const i64 slot = s.entry + (a.tree ? a.ring + n : s.end(a, n));
        for (int first = 0; first == 0 || first < all; first += 2) {   // two readers at a time
            const int readers_here = min(2, all - first);
            Number readers[2][CHANNELS], value = 0, beta = 1;
            if (first == 0 && thread < TILE && column < V) {   // of the column that this thread writes
                value = parameter<Number>(row_of(a.v, s, token, s.head), a.kind_v, column);
                if (a.erases) beta = parameter<Number>(row_of(a.beta, s, token, s.head), a.kind_beta, 0);
            }
            load_readers(readers, own, a, s, token, slot, first, warp == 0);
            Number sum[2][PER] = {}, total[DECAYS] = {}, u[PER];
            if (readers_here > 0)
                walk<WARPS>(
                    a, s, n, warp, readers, total,
                    [&](int at) { load_columns<LOG>(u, a.log_u, s.entry + at, s.column); },
                    [&](int, int, const Number(&dots)[2]) {
#pragma unroll
                        for (int x = 0; x < 2; x++)
#pragma unroll
                            for (int i = 0; i < PER; i++)
                                if (lane < LANES) sum[x][i] = fused(dots[x], u[i], sum[x][i]);
                    });
            fade<WARPS>(faded, readers, total, warp);
            __syncthreads();
            Number reads[1][2][PER] = {};
            if (readers_here > 0) S.add_reads(reads, &faded, readers_here);
#pragma unroll
            for (int x = 0; x < 2; x++)
#pragma unroll
                for (int j = 0; j < PER; j++)
                    sums[x][thread / LANES][thread % LANES * PER + j] =
                        joined(sum[x][j], reads[0][x][j], S.scale_of(j));
            __syncthreads();

            Number seen[EACH] = {};
#pragma unroll
            for (int m = 0; m < EACH; m++) {
                const int x = (thread + m * THREADS) / TILE;
                if (x < 2)
#pragma unroll
                    for (int i = 0; i < GROUPS; i++) seen[m] += sums[x][i][in_tile];
            }
            if (first == 0 && thread < TILE && column < V) {
                const Number u = a.erases ? beta * (value - seen[0]) : value;
                written[in_tile] = u;
                ((Number*)a.log_u)[slot * V + column] = u;
            }
            __syncthreads();
#pragma unroll
            for (int m = 0; m < EACH; m++) {
                const int x = (thread + m * THREADS) / TILE, query = first + x - a.erases;
                if (x >= 2 || query < 0 || query >= a.queries || column >= V) continue;
                if (a.updated || a.bonus != nullptr) seen[m] = fused(own[x], written[in_tile], seen[m]);
                const i64 place = ((i64)s.row * a.tokens + token) * a.heads + s.head;
                put_number(a.out, a.kind_out, (place * a.queries + query) * V + column, (Number)a.scale * seen[m]);
            }
            __syncthreads();
        }
    }
}

struct Nodes {   // what warps of `nodes` tell each other
    Number sums[AT_ONCE][2][GROUPS][TILE], faded[AT_ONCE][K][2], written[KEPT][TILE], weights[AT_ONCE][2][LONGEST],
        own[AT_ONCE][2], betas[AT_ONCE];
    int slots[AT_ONCE][LONGEST], lengths[AT_ONCE];   // ~m: row m of `written`
};
static_assert(sizeof(Nodes) <= LA_NODES, "the memory that the host asks for");

extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS) nodes(const __grid_constant__ LogArguments a) {
    constexpr int SHARE = GROUPS / WARPS, EACH = WARPS / AT_ONCE,   // groups of a warp, warps of a token
        PAIR = BITS != 0 && AT_ONCE % 2 == 0 ? 2 : 1;
    extern __shared__ __align__(16) char memory[];
    Nodes& held = *(Nodes*)memory;
    auto& sums = held.sums;
    auto& faded = held.faded;
    auto& written = held.written;
    auto& weights = held.weights;
    auto& own = held.own;
    auto& slots = held.slots;
    auto& betas = held.betas;
    auto& lengths = held.lengths;
    const Task s(a);
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, mine = warp / EACH, part = warp % EACH;
    Number* log_u = (Number*)a.log_u;
    const int in_tile = thread % TILE, column = s.part * TILE + in_tile;   // of sums
    const Number scale = BITS != 0 && column < V ? (Number)a.scales[s.state * V + column] : (Number)0;
    const int all = a.erases + a.queries;
    typename Held<BITS != 0, LANES, GROUPS>::type S;
    S.load(a, s);
    ask_for<THREADS, TILE>(a, s);
    for (int n = 0; n < a.count; n += AT_ONCE) {
        const int many = min(AT_ONCE, a.count - n);
        const auto slot_of = [&](int m) { return s.entry + (a.tree ? a.ring + n + m : s.end(a, n + m)); };
        for (int first = 0; first == 0 || first < all; first += 2) {   // two readers at a time
            const auto is_read = [&](int x) { return first + x < all; };
            Number readers[2][CHANNELS];   // of token `mine`
            if (mine < many)
                load_readers(readers, own[mine], a, s, a.first + n + mine, slot_of(mine), first, part == 0);
            if (first == 0) {
                for (int i = thread; i < many * TILE; i += THREADS) {   // the values, in the place of u
                    const int m = i / TILE, token = a.first + n + m;
                    if (column < V)
                        written[(n + m) % KEPT][in_tile] =
                            parameter<Number>(row_of(a.v, s, token, s.head), a.kind_v, column);
                }
                if (a.erases && thread < many)
                    betas[thread] = parameter<Number>(row_of(a.beta, s, a.first + n + thread, s.head), a.kind_beta, 0);
            }
            __syncthreads();
            if (first == 0) ask_for_tokens(a, s, a.first + n + many, min(AT_ONCE, a.count - n - many));
            if (mine < many) {
                Number total[DECAYS] = {};
                const auto add = [&](int place, int at, const Number(&dots)[2]) {
                    if (lane) return;
                    const int node = a.tree ? at - a.ring : n + mine - 1 - place;   // of this call
                    slots[mine][place] = node < 0 || node < n + AT_ONCE - KEPT ? at : ~(node % KEPT);
                    weights[mine][0][place] = dots[0];
                    weights[mine][1][place] = dots[1];
                };
                int length = 0;
                if (is_read(0)) length = walk<EACH>(a, s, n + mine, part, readers, total, [](int) {}, add);
                if (part == 0 && lane == 0) lengths[mine] = length;
                fade<EACH>(faded[mine], readers, total, part);
            }
            __syncthreads();
#pragma unroll 1
            for (int m = 0; m < many; m += PAIR) {   // codes are made numbers for a pair of tokens
                Number reads[PAIR][2][PER] = {};
                if (is_read(0)) S.add_reads(reads, &faded[m], is_read(1) ? 2 : 1);
#pragma unroll
                for (int p = 0; p < PAIR; p++)
#pragma unroll
                    for (int x = 0; x < 2; x++)
#pragma unroll
                        for (int j = 0; j < PER; j++)
                            sums[m + p][x][thread / LANES][thread % LANES * PER + j] = reads[p][x][j];
            }
            __syncthreads();

            const auto seen_by = [&](int m, int x) {
                Number logged[WARPS] = {}, seen = 0;
                const int length = lengths[m];
                for (int j = 0; j < length; j += WARPS) {
                    Number u[WARPS];   // all are asked for before one is used
#pragma unroll
                    for (int i = 0; i < WARPS; i++) {
                        const int at = j + i < length ? slots[m][j + i] : ~0;
                        u[i] = *(at < 0 ? &written[~at][in_tile] : &log_u[(s.entry + at) * V + column]);
                    }
#pragma unroll
                    for (int i = 0; i < WARPS; i++)
                        if (j + i < length) logged[i] = fused(weights[m][x][j + i], u[i], logged[i]);
                }
#pragma unroll
                for (int i = 0; i < WARPS; i++)
#pragma unroll 1
                    for (int y = 0; y < SHARE; y++)
                        seen += joined(y == 0 ? logged[i] : (Number)0, sums[m][x][i * SHARE + y][in_tile], scale);
                return seen;
            };
            if (first == 0 && thread < TILE && column < V)   // u of one token after the other, each of its own column
#pragma unroll 1
                for (int m = 0; m < many; m++) {
                    Number u = written[(n + m) % KEPT][in_tile];
                    if (a.erases) u = betas[m] * (u - seen_by(m, 0));
                    written[(n + m) % KEPT][in_tile] = log_u[slot_of(m) * V + column] = u;
                }
            __syncthreads();
            const int from = max(a.erases - first, 0), each = min(2, all - first) - from;   // queries of a token
#pragma unroll 1
            for (int i = thread / TILE; i < many * each && column < V; i += THREADS / TILE) {
                const int m = i / each, x = from + i % each, query = first + x - a.erases;
                Number seen = seen_by(m, x);
                if (a.updated || a.bonus != nullptr) seen = fused(own[m][x], written[(n + m) % KEPT][in_tile], seen);
                const i64 place = ((i64)s.row * a.tokens + a.first + n + m) * a.heads + s.head;
                put_number(a.out, a.kind_out, (place * a.queries + query) * V + column, (Number)a.scale * seen);
            }
            __syncthreads();
        }
    }
}

extern "C" __global__ void __launch_bounds__(FOLD_THREADS, LA_FOLD_BLOCKS)
    fold(const __grid_constant__ LogArguments a) {
    typedef typename Held<BITS != 0, FOLD_LANES, FOLD_GROUPS>::type State;
    constexpr int ROWS = State::ROWS, MINE = (CHUNK * FOLD_TILE + FOLD_THREADS - 1) / FOLD_THREADS;
    __shared__ __align__(16) Number keys[CHUNK][FOLD_GROUPS * ROWS], values[CHUNK][FOLD_TILE];
    __shared__ Number decay[K];
    const Task s(a, FOLD_LANES);
    const int thread = threadIdx.x, lane = thread % FOLD_LANES, in_tile = thread % FOLD_TILE,
              column = s.part * FOLD_TILE + in_tile;
    if (s.live == 0) return;   // not rounded again
    const Number *log_k = (const Number*)a.log_k + s.entry * K + thread,
                 *log_g = (const Number*)a.log_g + s.entry * W + (W == 1 ? 0 : thread),
                 *log_u = (const Number*)a.log_u + s.entry * V + column;
    ask_for<FOLD_THREADS, FOLD_TILE>(a, s);
    Number x[ROWS][PER] = {}, total = 0;   // the log decays of later tokens, of channel `thread`
    Number k[CHUNK], g[CHUNK], u[MINE];    // of the next tokens
    const auto load = [&](int last) {
        const auto at = [&](int i) {   // of the ring
            const int slot = s.start + last - i;
            return slot < a.ring ? slot : slot - a.ring;
        };
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            const bool is_there = thread < K && last - i >= 0;
            k[i] = is_there ? log_k[at(i) * K] : (Number)0;
            g[i] = is_there ? log_g[at(i) * W] : (Number)0;
        }
#pragma unroll
        for (int m = 0; m < MINE; m++) {
            const int i = (thread + m * FOLD_THREADS) / FOLD_TILE;
            u[m] = i < CHUNK && last - i >= 0 && column < V ? log_u[at(i) * V] : (Number)0;
        }
    };
    for (int last = s.live - 1; last >= 0; last -= CHUNK) {
        load(last);
        if (thread < K)
#pragma unroll
            for (int i = 0; i < CHUNK; i++) {
                keys[i][thread] = k[i] * exponential(total);
                total += g[i];
            }
#pragma unroll
        for (int m = 0; m < MINE; m++) {
            const int i = (thread + m * FOLD_THREADS) / FOLD_TILE;
            if (i < CHUNK) values[i][in_tile] = u[m];
        }
        __syncthreads();
#pragma unroll 2
        for (int i = 0; i < min(CHUNK, last + 1); i++) {
            Number y[PER];
#pragma unroll
            for (int j = 0; j < PER; j++) y[j] = values[i][lane * PER + j];
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int j = 0; j < PER; j++) x[r][j] = fused(keys[i][thread / FOLD_LANES * ROWS + r], y[j], x[r][j]);
        }
        __syncthreads();
    }
    if (thread < K) decay[thread] = exponential(total);
    State S;
    if constexpr (BITS != 0) S.load(a, s);
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (!State::is_row(r)) continue;
        Number y[PER];
        S.get(y, a, s, r);
#pragma unroll
        for (int j = 0; j < PER; j++) x[r][j] = fused(decay[State::row(r)], y[j], x[r][j]);
        if constexpr (BITS == 0) store_columns(a, s, State::row(r), x[r]);
    }
    if constexpr (BITS != 0) store_codes(a, s, x);
}

extern "C" __global__ void __launch_bounds__(THREADS) move(const __grid_constant__ LogArguments a) {
    const Task s(a);
    if (s.part) return;   // one block of a head moves all of it
    Number *log_k = (Number*)a.log_k, *log_u = (Number*)a.log_u, *log_g = (Number*)a.log_g;
    for (int n = 0; n < a.count; n++) {
        const int from = a.parents[s.row * a.count + n];
        if (from < 0) continue;
        const i64 x = s.entry + from, y = s.entry + s.end(a, n);
        for (int c = threadIdx.x; c < K; c += THREADS) log_k[y * K + c] = log_k[x * K + c];
        for (int c = threadIdx.x; c < V; c += THREADS) log_u[y * V + c] = log_u[x * V + c];
        for (int c = threadIdx.x; c < W; c += THREADS) log_g[y * W + c] = log_g[x * W + c];
    }
}
