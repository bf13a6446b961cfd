// Tokens after a checkpoint S (K, V) of a head, and a log of what each of them wrote: a key k, a value u, a log decay
// g. A reader x of the state after the logged tokens 1..n of a path, with G_i = g_n + ... + g_i:
//
//     x S_n = (x (.) e^{G_1}) S + sum_j x . (k_j (.) e^{G_{j+1}}) u_j
//
// tokens  of each token, on its path through a tree or a chain and then through the ring: x = its erase vector and its
//         queries; u = beta (v - x S), or v; k, u and g go to its slot. S is read once and not written.
// nodes   the same of many tokens, AT_ONCE at a time: what they read of S and the weights of their paths do not depend on
//         any u; then a thread has the sums of a column over a path, and the values u of its block's columns
// fold    S <- e^G S + sum_j (k_j (.) e^{G_{j+1}})^T u_j, of the oldest tokens of the ring
// move    entries of a path through a tree to the end of the ring
//
// Sums go from the last token of a path backwards. What is added to what, and in which order, depends on a token's
// place in the path alone: neither on other tokens of the call, nor on the entry, nor on where in the ring a path is.
// One sum for every WARPS-th entry of a path, one for every GROUPS-th row of S; these are added in their order.
//
// A block has LA_LANES 4 value columns of a head; each of its groups of LA_LANES lanes has every GROUPS-th row of S, in
// registers, and each warp every WARPS-th entry of a path. Blocks of one head write the same k and g.
//
// LA_BITS: S is whole numbers of 8, 12 or 16 bits with a scale for each column (codes.cuh), 0: plain numbers. `tokens`
// has them in registers as they lie in memory; `fold` rounds a column by its largest number, all of which its block has.
#include "ops/element.cuh"
#include "token/codes.cuh"
#include "arguments/matrix_state/LogArguments.cuh"

constexpr int K = LA_K, V = LA_V, W = LA_W, THREADS = LA_THREADS, LANES = LA_LANES, PER = 4, TILE = LANES * PER,
              PARTS = (V + TILE - 1) / TILE, GROUPS = THREADS / LANES, ROWS = (K + GROUPS - 1) / GROUPS,
              WARPS = THREADS / 32, CHANNELS = (K + 31) / 32, DECAYS = W == 1 ? 1 : CHANNELS, STATE = LA_STATE,
              BITS = LA_BITS;
constexpr int CHUNK = 8;   // tokens that a fold has in shared memory
typedef Wide<STATE> Number;
constexpr int AT_ONCE = sizeof(Number) * THREADS >= 4096 ? 1 : 4096 / (sizeof(Number) * THREADS),   // 32 KB of sums
    LONGEST = LA_LONGEST;   // path of a token of `nodes`
static_assert(2 * TILE <= THREADS && 2 * K <= THREADS, "a thread for each column and each channel of two readers");
constexpr int STORED = BITS == 0 ? 8 : BITS;   // of the code that is there without use
static_assert(BITS == 0 || STATE == 2, "scales are float32");
constexpr int TOKEN_BLOCKS = BITS == 0 ? LA_BLOCKS : (BITS == 8 ? 4 : 3) * 256 / THREADS;   // codes: few registers

template <class T> LA_DEVICE T exponential(T x) {
    if constexpr (sizeof(T) == 8) return exp(x);
    else return exp2_approx(x * 1.4426950408889634f);
}
template <class T> LA_DEVICE T sum_of_lanes(T x) {
#pragma unroll
    for (int d = 16; d; d >>= 1) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}
LA_DEVICE void put(char* to, int kind, i64 n, Number x) {
    if (kind == 3) put_element<3>(to, n, x);
    else if (kind == 2) put_element<2>(to, n, x);
    else if (kind == 0) put_element<0>(to, n, x);
    else put_element<1>(to, n, x);
}
LA_DEVICE int wrapped(int slot, int ring) {
    while (slot >= ring) slot -= ring;
    return slot;
}

struct Task {   // a row of the call, a head, and columns of it
    int row, head, column, at, start, live;
    i64 entry, state;   // of its slot 0; its matrix
    __device__ __forceinline__ Task(const LogArguments& a) {
        const int task = blockIdx.x / PARTS;
        row = task / a.heads;
        head = task % a.heads;
        column = blockIdx.x % PARTS * TILE + threadIdx.x % LANES * PER;
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
        int slot = -1;
        for (count = 0; node >= 0 && count < 32; count++) {
            if (count == lane) slot = a.tree ? a.ring + node : s.end(a, node);
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

struct CodeRows {   // every GROUPS-th row of four columns, as it lies in memory
    Codes<STORED> x[ROWS];
    float scale[PER];
    __device__ __forceinline__ void load(const LogArguments& a, const Task& s) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int row = threadIdx.x / LANES + i * GROUPS;
            if (K % GROUPS == 0 || row < K) x[i].template load<V, LA_WIDE>(a.state, a.low, s.state * K + row, s.column);
        }
#pragma unroll
        for (int j = 0; j < PER; j++) scale[j] = s.column + j < V ? a.scales[s.state * V + s.column + j] : 0.f;
    }
    // codes += z S, S without its scales, of two readers; z is 0 where there is one
    __device__ __forceinline__ void add_reads(float (&codes)[2][PER], const float (&z)[K][2], int) const {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int row = threadIdx.x / LANES + i * GROUPS;
            if (K % GROUPS && row >= K) continue;
            float y[PER];
            x[i].opaque_copy().get(y);
#pragma unroll
            for (int j = 0; j < PER; j++) {
                codes[0][j] += z[row][0] * y[j];
                codes[1][j] += z[row][1] * y[j];
            }
        }
    }
    __device__ __forceinline__ float scale_of(int j) const { return scale[j]; }
};

struct StateRows {   // the same as numbers
    Number x[ROWS][PER];
    __device__ __forceinline__ void load(const LogArguments& a, const Task& s) {
        if constexpr (BITS != 0) {
            CodeRows codes;
            codes.load(a, s);
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                if (K % GROUPS && threadIdx.x / LANES + i * GROUPS >= K) continue;
                codes.x[i].get(x[i]);
#pragma unroll
                for (int j = 0; j < PER; j++) x[i][j] *= codes.scale[j];
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int row = threadIdx.x / LANES + i * GROUPS;
            if (K % GROUPS == 0 || row < K) load_columns<STATE>(x[i], a.state, s.state * K + row, s.column);
        }
    }
    __device__ __forceinline__ void store(const LogArguments& a, const Task& s) const {
        if constexpr (BITS != 0) {
            store_codes(a, s);
            return;
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int row = threadIdx.x / LANES + i * GROUPS;
            if (K % GROUPS && row >= K) continue;
            const i64 n = (s.state * K + row) * V + s.column;
            if constexpr (LA_WIDE && STATE == 2) {
                if (s.column < V) *(float4*)(a.state + n * 4) = {x[i][0], x[i][1], x[i][2], x[i][3]};
            } else if constexpr (LA_WIDE && STATE < 2) {
                const auto two = [](float lo, float hi) { return STATE == 0 ? pack_bf16(lo, hi) : pack_f16(lo, hi); };
                if (s.column < V) *(uint2*)(a.state + n * 2) = {two(x[i][0], x[i][1]), two(x[i][2], x[i][3])};
            } else
#pragma unroll
                for (int j = 0; j < PER; j++)
                    if (s.column + j < V) put_element<STATE>(a.state, n + j, x[i][j]);
        }
    }
    // The nearest codes. A column with inf or NaN has the scale NaN and the codes 0: it is read as NaN.
    __device__ __forceinline__ void store_codes(const LogArguments& a, const Task& s) const {
        __shared__ float columns[GROUPS][TILE];
        constexpr float MOST = (1 << (STORED - 1)) - 1, FINITE = 3.402823466e38f;
        const int group = threadIdx.x / LANES, first = threadIdx.x % LANES * PER;
        float largest[PER] = {};
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (K % GROUPS && group + i * GROUPS >= K) continue;
#pragma unroll
            for (int j = 0; j < PER; j++) {
                const float y = fabsf(x[i][j]);
                largest[j] = fmaxf(largest[j], y <= FINITE ? y : __int_as_float(0x7f800000));
            }
        }
#pragma unroll
        for (int j = 0; j < PER; j++) columns[group][first + j] = largest[j];
        __syncthreads();
#pragma unroll
        for (int j = 0; j < PER; j++)
            for (int i = 0; i < GROUPS; i++) largest[j] = fmaxf(largest[j], columns[i][first + j]);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int row = group + i * GROUPS;
            if (K % GROUPS && row >= K) continue;
            int codes[PER];
#pragma unroll
            for (int j = 0; j < PER; j++)
                codes[j] = largest[j] > 0.f && largest[j] <= FINITE ? (int)rintf(x[i][j] / largest[j] * MOST) : 0;
            Codes<STORED>::template store<V, LA_WIDE>(a.state, a.low, s.state * K + row, s.column, codes);
        }
#pragma unroll
        for (int j = 0; j < PER; j++)
            if (group == 0 && s.column + j < V)
                a.scales[s.state * V + s.column + j] =
                    largest[j] <= FINITE ? largest[j] / MOST : __int_as_float(0x7fffffff);
    }
    __device__ __forceinline__ void add_reads(Number (&sum)[2][PER], const Number (&z)[K][2], int readers) const {
#pragma unroll
        for (int y = 0; y < 2; y++) {
            if (y >= readers) continue;
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                const int row = threadIdx.x / LANES + i * GROUPS;
                if (K % GROUPS == 0 || row < K)
#pragma unroll
                    for (int j = 0; j < PER; j++) sum[y][j] += z[row][y] * x[i][j];
            }
        }
    }
    __device__ __forceinline__ Number scale_of(int) const { return 1; }
};
template <bool> struct Held {
    typedef StateRows type;
};
template <> struct Held<true> {
    typedef CodeRows type;
};

// Asks the L2 cache for what the first token reads of the log.
LA_DEVICE void ask_for_log(const LogArguments& a, const Task& s) {
    constexpr int LINE = 128 / sizeof(Number), OF_K = (K + LINE - 1) / LINE, OF_W = (W + LINE - 1) / LINE,
                  OF_TILE = (TILE + LINE - 1) / LINE, ALL = OF_K + OF_W + OF_TILE;
    for (int i = threadIdx.x; i < s.live * ALL; i += THREADS) {
        const i64 at = s.entry + wrapped(s.start + i / ALL, a.ring);
        const int k = i % ALL, w = k - OF_K, u = w - OF_W, column = blockIdx.x % PARTS * TILE + u * LINE;
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
    return x.data + s.row * x.batch + token * x.token + head / (u32)x.group * x.head;
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

extern "C" __global__ void __launch_bounds__(THREADS, TOKEN_BLOCKS) tokens(const __grid_constant__ LogArguments a) {
    __shared__ Number plain[2][K], readers[2][K], faded[K][2], keys[K], sums[2][GROUPS][TILE], written[TILE], own[2];
    const Task s(a);
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    Number *log_k = (Number*)a.log_k, *log_u = (Number*)a.log_u, *log_g = (Number*)a.log_g;
    const int in_tile = thread % TILE, column = s.column - thread % LANES * PER + in_tile;   // of sums
    typename Held<BITS != 0>::type S;
    S.load(a, s);
    ask_for_log(a, s);
    for (int n = 0; n < a.count; n++) {
        const int token = a.first + n, all = a.erases + a.queries;
        const i64 slot = s.entry + (a.tree ? a.ring + n : s.end(a, n));
        const char *k = row_of(a.k, s, token, s.head), *g = row_of(a.g, s, token, s.head);
        const auto decay_of = [&](int c) {
            return a.g.data == nullptr ? (Number)0 : parameter<Number>(g, a.kind_g, W == 1 ? 0 : c);
        };
        for (int first = 0; first == 0 || first < all; first += 2) {   // two readers at a time
            const auto is_read = [&](int x) { return first + x < all; };
            const int x_own = thread / K, c_own = thread % K;   // of the number of a reader that this thread has
            Number key = 0, decay = 0, reader = 0, value = 0, beta = 1;   // all are asked for before one is used
            if (thread < 2 * K) {
                decay = decay_of(c_own);
                if (first + x_own < a.erases)
                    reader = parameter<Number>(row_of(a.erase, s, token, s.head), a.kind_erase, c_own);
                else if (is_read(x_own)) {
                    const int query = first + x_own - a.erases;
                    reader = parameter<Number>(row_of(a.q, s, token, s.head * a.queries + query), a.kind_q, c_own);
                }
            }
            if (first == 0 && thread < K) key = parameter<Number>(k, a.kind_k, thread);
            if (first == 0 && thread < TILE && column < V) {   // of the column that this thread writes
                value = parameter<Number>(row_of(a.v, s, token, s.head), a.kind_v, column);
                if (a.erases) beta = parameter<Number>(row_of(a.beta, s, token, s.head), a.kind_beta, 0);
            }
            if (thread < 2 * K) {
                plain[x_own][c_own] = reader;
                if (first + x_own < a.erases ? !a.early : a.updated) reader *= exponential(decay);
                readers[x_own][c_own] = reader;
            }
            if (first == 0 && thread < K) {
                keys[thread] = log_k[slot * K + thread] = key;
                if (thread < W) log_g[slot * W + thread] = decay;
            }
            __syncthreads();
            if (warp == 2 || warp == 3) {   // what a query reads of its own token
                const int x = warp - 2;
                Number sum = 0;
                if (is_read(x) && first + x >= a.erases && (a.updated || a.bonus != nullptr))
                    for (int c = lane; c < K; c += 32) sum = own_term(a, s, c, plain[x][c], keys[c], sum);
                sum = sum_of_lanes(sum);
                if (lane == 0) own[x] = sum;
            }

            Number sum[2][PER] = {}, total[DECAYS] = {};
            Path path = {Path::parent(a, s, n), s.live};
            while (is_read(0) && !path.ends()) {
                int count;
                const int slots = path.next(a, s, lane, count);
                const Number decays =
                    W == 1 && slots >= 0 ? log_g[s.entry + slots] : (Number)0;   // of this lane's slot
                for (int j = 0; j < count; j++) {
                    const int at = __shfl_sync(0xffffffffu, slots, j);
                    Number before[DECAYS];
#pragma unroll
                    for (int m = 0; m < DECAYS; m++) {
                        const int c = m * 32 + lane;
                        before[m] = total[m];
                        if constexpr (W == 1) total[m] += __shfl_sync(0xffffffffu, decays, j);
                        else total[m] += c < W ? log_g[(s.entry + at) * W + c] : (Number)0;
                    }
                    if (j % WARPS != warp) continue;
                    Number u[PER], dots[2] = {};
                    load_columns<LOG>(u, a.log_u, s.entry + at, s.column);
#pragma unroll
                    for (int m = 0; m < CHANNELS; m++) {
                        const int c = m * 32 + lane;
                        if (K % 32 && c >= K) continue;
                        Number y = log_k[(s.entry + at) * K + c];
                        if constexpr (W > 1) y *= exponential(before[m]);
#pragma unroll
                        for (int x = 0; x < 2; x++) dots[x] = fused(readers[x][c], y, dots[x]);
                    }
#pragma unroll
                    for (int x = 0; x < 2; x++) {
                        dots[x] = sum_of_lanes(dots[x]);
                        if constexpr (W == 1) dots[x] *= exponential(before[0]);
#pragma unroll
                        for (int i = 0; i < PER; i++)
                            if (lane < LANES) sum[x][i] = fused(dots[x], u[i], sum[x][i]);
                    }
                }
            }
            if (warp == 0)
#pragma unroll
                for (int m = 0; m < CHANNELS; m++) {
                    const int c = m * 32 + lane;
                    const Number decay = exponential(total[W == 1 ? 0 : m]);
                    if (c < K) faded[c][0] = readers[0][c] * decay;
                    if (c < K) faded[c][1] = readers[1][c] * decay;
                }
            __syncthreads();
            Number reads[2][PER] = {};
            if (is_read(0)) S.add_reads(reads, faded, is_read(1) ? 2 : 1);
#pragma unroll
            for (int x = 0; x < 2; x++)
#pragma unroll
                for (int j = 0; j < PER; j++)
                    sums[x][thread / LANES][thread % LANES * PER + j] = joined(sum[x][j], reads[x][j], S.scale_of(j));
            __syncthreads();

            const int x = thread / TILE;
            Number seen = 0;
            if (x < 2)
                for (int i = 0; i < GROUPS; i++) seen += sums[x][i][in_tile];
            if (first == 0 && x == 0 && column < V) {
                const Number u = a.erases ? beta * (value - seen) : value;
                written[in_tile] = u;
                log_u[slot * V + column] = u;
            }
            __syncthreads();
            const int query = first + x - a.erases;
            if (x < 2 && query >= 0 && query < a.queries && column < V) {
                if (a.updated || a.bonus != nullptr) seen = fused(own[x], written[in_tile], seen);
                const i64 place = ((i64)s.row * a.tokens + token) * a.heads + s.head;
                put(a.out, a.kind_out, (place * a.queries + query) * V + column, (Number)a.scale * seen);
            }
            __syncthreads();
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, TOKEN_BLOCKS) nodes(const __grid_constant__ LogArguments a) {
    constexpr int SHARE = GROUPS / WARPS, EACH = WARPS / AT_ONCE;   // groups of a warp, warps of a token
    __shared__ Number faded[AT_ONCE][K][2], sums[AT_ONCE][2][GROUPS][TILE], weights[AT_ONCE][2][LONGEST],
        written[AT_ONCE][TILE], own[AT_ONCE][2], betas[AT_ONCE];
    __shared__ int slots[AT_ONCE][LONGEST], lengths[AT_ONCE];   // ~m: token m of these AT_ONCE
    const Task s(a);
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, mine = warp / EACH, part = warp % EACH;
    Number *log_k = (Number*)a.log_k, *log_u = (Number*)a.log_u, *log_g = (Number*)a.log_g;
    const int in_tile = thread % TILE, column = s.column - thread % LANES * PER + in_tile;   // of sums
    const Number scale = BITS != 0 && column < V ? (Number)a.scales[s.state * V + column] : (Number)0;
    const int all = a.erases + a.queries;
    typename Held<BITS != 0>::type S;
    S.load(a, s);
    ask_for_log(a, s);
    for (int n = 0; n < a.count; n += AT_ONCE) {
        const int many = min(AT_ONCE, a.count - n);
        const auto slot_of = [&](int m) { return s.entry + (a.tree ? a.ring + n + m : s.end(a, n + m)); };
        for (int first = 0; first == 0 || first < all; first += 2) {   // two readers at a time
            const auto is_read = [&](int x) { return first + x < all; };
            Number readers[2][CHANNELS] = {};   // of token `mine`
            if (mine < many) {
                const int token = a.first + n + mine;
                const char *k = row_of(a.k, s, token, s.head), *g = row_of(a.g, s, token, s.head);
                const auto decay_of = [&](int c) {
                    return a.g.data == nullptr ? (Number)0 : parameter<Number>(g, a.kind_g, W == 1 ? 0 : c);
                };
                Number decay[DECAYS] = {};
#pragma unroll
                for (int m = 0; m < DECAYS; m++)   // all are asked for before one is used
                    if (W == 1 || m * 32 + lane < W) decay[m] = decay_of(m * 32 + lane);
#pragma unroll
                for (int x = 0; x < 2; x++) {
                    if (!is_read(x)) continue;
                    const bool is_query = first + x >= a.erases;
                    const char* row = is_query ? row_of(a.q, s, token, s.head * a.queries + first + x - a.erases)
                                               : row_of(a.erase, s, token, s.head);
#pragma unroll
                    for (int m = 0; m < CHANNELS; m++)
                        if (K % 32 == 0 || m * 32 + lane < K)
                            readers[x][m] = parameter<Number>(row, is_query ? a.kind_q : a.kind_erase, m * 32 + lane);
                }
                if (part == 0) {
                    Number terms[2] = {};
#pragma unroll
                    for (int m = 0; m < CHANNELS; m++) {
                        const int c = m * 32 + lane;
                        if (K % 32 && c >= K) continue;
                        const Number key = parameter<Number>(k, a.kind_k, c);
                        if (first == 0) log_k[slot_of(mine) * K + c] = key;
#pragma unroll
                        for (int x = 0; x < 2; x++) terms[x] = own_term(a, s, c, readers[x][m], key, terms[x]);
                    }
#pragma unroll
                    for (int x = 0; x < 2; x++) {
                        const Number sum = sum_of_lanes(terms[x]);
                        if (lane == 0) own[mine][x] = sum;
                    }
                    if (first == 0)
#pragma unroll
                        for (int m = 0; m < DECAYS; m++)
                            if (m * 32 + lane < W) log_g[slot_of(mine) * W + m * 32 + lane] = decay[m];
                }
#pragma unroll
                for (int m = 0; m < CHANNELS; m++)
#pragma unroll
                    for (int x = 0; x < 2; x++)
                        if (first + x < a.erases ? !a.early : a.updated)
                            readers[x][m] *= exponential(decay[W == 1 ? 0 : m]);
            }
            if (first == 0) {
                for (int i = thread; i < many * TILE; i += THREADS) {   // the values, in the place of u
                    const int m = i / TILE, token = a.first + n + m;
                    if (column < V)
                        written[m][in_tile] = parameter<Number>(row_of(a.v, s, token, s.head), a.kind_v, column);
                }
                if (a.erases && thread < many)
                    betas[thread] = parameter<Number>(row_of(a.beta, s, a.first + n + thread, s.head), a.kind_beta, 0);
            }
            __syncthreads();
            if (first == 0) ask_for_tokens(a, s, a.first + n + many, min(AT_ONCE, a.count - n - many));
            if (mine < many) {
                Number total[DECAYS] = {};
                Path path = {Path::parent(a, s, n + mine), s.live};
                int done = 0;
                while (is_read(0) && !path.ends()) {
                    int count;
                    const int found = path.next(a, s, lane, count),
                              late = a.tree ? found - a.ring - n : mine - 1 - done - lane;
                    if (part == 0 && lane < count) slots[mine][done + lane] = late < 0 ? found : ~late;
                    const Number decays =
                        W == 1 && found >= 0 ? log_g[s.entry + found] : (Number)0;   // of this lane's slot
                    for (int j = 0; j < count; j++) {
                        const int at = __shfl_sync(0xffffffffu, found, j);
                        Number before[DECAYS];
#pragma unroll
                        for (int m = 0; m < DECAYS; m++) {
                            const int c = m * 32 + lane;
                            before[m] = total[m];
                            if constexpr (W == 1) total[m] += __shfl_sync(0xffffffffu, decays, j);
                            else total[m] += c < W ? log_g[(s.entry + at) * W + c] : (Number)0;
                        }
                        if (j % EACH != part) continue;
                        Number dots[2] = {};
#pragma unroll
                        for (int m = 0; m < CHANNELS; m++) {
                            const int c = m * 32 + lane;
                            if (K % 32 && c >= K) continue;
                            Number y = log_k[(s.entry + at) * K + c];
                            if constexpr (W > 1) y *= exponential(before[m]);
#pragma unroll
                            for (int x = 0; x < 2; x++) dots[x] = fused(readers[x][m], y, dots[x]);
                        }
#pragma unroll
                        for (int x = 0; x < 2; x++) {
                            dots[x] = sum_of_lanes(dots[x]);
                            if constexpr (W == 1) dots[x] *= exponential(before[0]);
                            if (lane == 0) weights[mine][x][done + j] = dots[x];
                        }
                    }
                    done += count;
                }
                if (part == 0) {
                    if (lane == 0) lengths[mine] = done;
#pragma unroll
                    for (int m = 0; m < CHANNELS; m++) {
                        const int c = m * 32 + lane;
                        const Number decay = exponential(total[W == 1 ? 0 : m]);
                        if (c < K) faded[mine][c][0] = readers[0][m] * decay;
                        if (c < K) faded[mine][c][1] = readers[1][m] * decay;
                    }
                }
            }
            __syncthreads();
#pragma unroll 1
            for (int m = 0; m < many; m++) {
                Number reads[2][PER] = {};
                if (is_read(0)) S.add_reads(reads, faded[m], is_read(1) ? 2 : 1);
#pragma unroll
                for (int x = 0; x < 2; x++)
#pragma unroll
                    for (int j = 0; j < PER; j++) sums[m][x][thread / LANES][thread % LANES * PER + j] = reads[x][j];
            }
            __syncthreads();

            const auto seen_by = [&](int m, int x) {
                Number logged[WARPS] = {}, seen = 0;
                const int length = lengths[m];
                for (int j = 0; j < length; j += WARPS)
#pragma unroll
                    for (int i = 0; i < WARPS; i++) {
                        if (j + i >= length) continue;
                        const int at = slots[m][j + i];
                        Number u = 0;
                        if (at < 0) u = written[~at][in_tile];
                        else if (column < V) u = log_u[(s.entry + at) * V + column];
                        logged[i] = fused(weights[m][x][j + i], u, logged[i]);
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
                    Number u = written[m][in_tile];
                    if (a.erases) u = betas[m] * (u - seen_by(m, 0));
                    written[m][in_tile] = log_u[slot_of(m) * V + column] = u;
                }
            __syncthreads();
            const int from = max(a.erases - first, 0), each = min(2, all - first) - from;   // queries of a token
#pragma unroll 1
            for (int i = thread / TILE; i < many * each && column < V; i += THREADS / TILE) {
                const int m = i / each, x = from + i % each, query = first + x - a.erases;
                Number seen = seen_by(m, x);
                if (a.updated || a.bonus != nullptr) seen = fused(own[m][x], written[m][in_tile], seen);
                const i64 place = ((i64)s.row * a.tokens + a.first + n + m) * a.heads + s.head;
                put(a.out, a.kind_out, (place * a.queries + query) * V + column, (Number)a.scale * seen);
            }
            __syncthreads();
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS) fold(const __grid_constant__ LogArguments a) {
    __shared__ Number faded[CHUNK][K], decay[K];
    const Task s(a);
    const int thread = threadIdx.x;
    if (s.live == 0) return;   // not rounded again
    const Number *log_k = (const Number*)a.log_k, *log_g = (const Number*)a.log_g;
    ask_for_log(a, s);
    StateRows S;
    S.load(a, s);
    Number product = 0;   // the logarithm of all decays of channel `thread`: K threads or more
    for (int last = s.live - 1; last >= 0; last -= 32) {
        const auto decay_of = [&](int i, int c) { return log_g[(s.entry + wrapped(s.start + i, a.ring)) * W + c]; };
        const int lane = thread % 32, count = min(last + 1, 32);
        const Number decays = W == 1 && lane < count ? decay_of(last - lane, 0) : (Number)0;   // of this lane's token
#pragma unroll 8
        for (int i = 0; i < count; i++) {
            if constexpr (W == 1) product += __shfl_sync(0xffffffffu, decays, i);
            else product += thread < W ? decay_of(last - i, thread) : (Number)0;
        }
    }
    if (thread < K) decay[thread] = exponential(product);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int row = thread / LANES + i * GROUPS;
        if (K % GROUPS == 0 || row < K)
#pragma unroll
            for (int j = 0; j < PER; j++) S.x[i][j] *= decay[row];
    }
    Number total = 0;   // the same of later tokens
    for (int last = s.live - 1; last >= 0; last -= CHUNK) {
        if (thread < K)
#pragma unroll
            for (int i = 0; i < CHUNK; i++) {
                if (last - i < 0) continue;
                const i64 at = s.entry + wrapped(s.start + last - i, a.ring);
                faded[i][thread] = log_k[at * K + thread] * exponential(total);
                total += log_g[at * W + (W == 1 ? 0 : thread)];
            }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            if (last - i < 0) break;
            Number u[PER];
            load_columns<LOG>(u, a.log_u, s.entry + wrapped(s.start + last - i, a.ring), s.column);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const int row = thread / LANES + r * GROUPS;
                if (K % GROUPS == 0 || row < K)
#pragma unroll
                    for (int j = 0; j < PER; j++) S.x[r][j] += faded[i][row] * u[j];
            }
        }
        __syncthreads();
    }
    S.store(a, s);
}

extern "C" __global__ void __launch_bounds__(THREADS) move(const __grid_constant__ LogArguments a) {
    const Task s(a);
    if (s.column >= TILE) return;   // one block of a head moves all of it
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
