// Rotated rows that are written twice, one token late (ops/trapezoid.py), and their transpose; R rows a token.
//
//     s_t = s_{t-1} + tanh(angle_t) dt_t        q_t = C_t R(pi s_t),  k_{t+1} = B_t R(pi s_t),  v_{t+1} = w_{t+1} x_t
//     own_t = lambda_t dt_t,  w_t = e^{dt_t A_t} (dt_t - own_t + own_{t-1}),  share_t = scale own_t C_t B_t^T + D
//
// B, C, q, k and v are R rows a token, x_r = m_r x (R = 1: x). Query r has not read the rows s > r of its token in the
// scan: above_t = scale q_t k_t^T above the diagonal, from the rows as the scan reads them.
//
// A block has a head of PART tokens of a sequence. Angles are sums of half turns in double: over each part (angle_sums),
// before it (before_parts), within it token by token, so that those of a token depend on no later one. Backward their
// gradients are sums over later tokens: within a part (late_rows_vjp), after it (after_parts), both (angle_sums_vjp).
#include "arguments/ops/TrapezoidArguments.cuh"
#include "ops/lane_pieces.cuh"

typedef TrapezoidArguments Arguments;
constexpr int R = LA_R, PART = 32, AHEAD = 8;
constexpr double PI = 3.14159265358979323846;
typedef float Pairs[R][R];   // of two rows of a token

union Slot {   // of a token and pair: a sum of half turns, (cosine, sine), or the gradient of the angle
    double sum;
    float2 rotation;
};
typedef Slot Slots[PART + (R > 1)][larger(LA_P, 1)];   // and of the token after the part

// Parts of sequences are one after the other, `parts` of each, or of a ragged batch from offset / PART + sequence on.
LA_DEVICE i64 first_part(const Arguments& a, i64 sequence) {
    return a.offsets == nullptr ? sequence * a.parts : a.offsets[sequence] / PART + sequence;
}
struct Place {   // of a block: a head, and tokens first .. first + count of those begin .. end of a sequence
    u32 head;
    i64 slot, sequence, part, begin, end, first, owner;   // slot: of the part, among those of all sequences
    int count;
    __device__ __forceinline__ explicit Place(const Arguments& a) : Place(a, blockIdx.x / a.H, blockIdx.x % a.H) {}
    __device__ __forceinline__ Place(const Arguments& a, u32 which, u32 h) : head(h), slot(which) {
        if (a.offsets == nullptr) {
            sequence = which / a.parts;
            begin = sequence * a.T;
            end = begin + a.T;
        } else {
            u32 low = 0, high = a.states;   // the last sequence whose first part is not behind the slot
            while (high - low > 1) {
                const u32 middle = (low + high) / 2;
                if (first_part(a, middle) <= slot) low = middle;
                else high = middle;
            }
            sequence = low;
            begin = a.offsets[sequence];
            end = a.offsets[sequence + 1];
        }
        part = slot - first_part(a, sequence);
        first = begin + part * PART;
        count = (int)max((i64)0, min((i64)PART, end - first));
        owner = sequence * a.H + h;
    }
    __device__ __forceinline__ const char* row(const Arguments& a, const Rows& x, i64 token) const {
        const i64 batch = a.offsets == nullptr ? sequence : 0;
        return x.data + batch * x.batch + (token - batch * a.T) * x.token + head / x.group * x.head;
    }
    __device__ __forceinline__ i64 sums(const Arguments& a) const { return (slot * a.H + head) * LA_P; }   // of pair 0
};

// numbers of a token and head
struct Token {
    float dt, lambda, own, rate, g;
    __device__ __forceinline__ Token(const Arguments& a, i64 token, u32 head) {
        const i64 n = token * a.H + head;
        dt = a.dt[n];
        lambda = 1.f / (1.f + expf(-a.trap[n]));
        own = lambda * dt;
        rate = a.A[a.rates ? n : head];
        g = dt * rate;
    }
};
struct Numbers {   // of the tokens of a part, and of the one after
    float own[PART + 1], fade[PART + 1], weight[PART + 1];
    __device__ __forceinline__ void load(const Arguments& a, const Place& at, bool writes) {
        const int t = threadIdx.x;
        if (t > at.count) return;
        own[t] = fade[t] = weight[t] = 0.f;
        if (at.first + t >= at.end) return;
        const Token now(a, at.first + t, at.head);
        const bool follows = at.first + t > at.begin;
        const float before = follows ? Token(a, at.first + t - 1, at.head).own : 0.f;
        own[t] = now.own;
        fade[t] = expf(now.g);
        weight[t] = fade[t] * ((now.dt - now.own) + before);
        if (writes && t < at.count)
#pragma unroll
            for (int r = 0; r < R; r++) a.g[((at.first + t) * R + r) * a.H + at.head] = r ? 0.f : now.g;
    }
};
LA_DEVICE double half_turns(const Arguments& a, i64 n, int p) {   // of a token and head n
    return (double)tanhf((float)element<LA_ANGLE>(a.angle, n * LA_P + p)) * (double)a.dt[n];
}
// the rotations of `count` tokens of a part, between barriers of the block
LA_DEVICE void find_rotations(const Arguments& a, const Place& at, Slots& slots, int count) {
    for (int n = threadIdx.x; n < count * LA_P; n += THREADS) {
        const int t = n / larger(LA_P, 1), p = n % larger(LA_P, 1);
        slots[t][p].sum = half_turns(a, (at.first + t) * a.H + at.head, p);
    }
    __syncthreads();
    for (int p = threadIdx.x; p < LA_P; p += THREADS) {
        double s = a.sums == nullptr ? 0 : a.sums[at.sums(a) + p];
        for (int begin = 0; begin < count; begin += AHEAD) {
            double each[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) each[i] = begin + i < count ? slots[begin + i][p].sum : 0;
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (begin + i < count) slots[begin + i][p].sum = s = s + each[i];
        }
    }
    __syncthreads();
    for (int n = threadIdx.x; n < count * LA_P; n += THREADS) {
        Slot& slot = slots[n / larger(LA_P, 1)][n % larger(LA_P, 1)];
        const double s = slot.sum;
        float2 found;
        sincospif((float)(s - 2 * rint(0.5 * s)), &found.y, &found.x);
        slot.rotation = found;
    }
    __syncthreads();
}

LA_DEVICE void rotate(Piece& x, const Slot* slots, int at, bool back) {
#pragma unroll
    for (int i = 0; i < PER; i += 2) {
        const int p = (at + i) / 2;
        if (p >= LA_P) continue;
        const float c = slots[p].rotation.x, s = back ? -slots[p].rotation.y : slots[p].rotation.y, even = x[i],
                    odd = x[i + 1];
        x[i] = even * c - odd * s;
        x[i + 1] = odd * c + even * s;
    }
}
// Gradients of the angles of the pairs of a row x, from d of the row as the core reads it, rotated and rounded: what a
// query adds to a sum over later tokens its keys take from it, but for the rounding of d.
LA_DEVICE void add_angle_grads(double (&angles)[PER / 2], const Piece& x, const Piece& d, const Slot* slots, int at) {
    Piece y;
#pragma unroll
    for (int i = 0; i < PER; i++) y[i] = x[i];
    rotate(y, slots, at, false);
#pragma unroll
    for (int i = 0; i < PER; i++) y[i] = rounded<LA_DTYPE>(y[i]);
#pragma unroll
    for (int i = 0; i < PER; i += 2) angles[i / 2] += (double)y[i] * d[i + 1] - (double)y[i + 1] * d[i];
}
// an end of a sequence without tokens is what was before it
LA_DEVICE void pass_on(const Arguments& a, const Place& at, const float* k, const float* v, float* to_k, float* to_v) {
    if (threadIdx.x >= LA_LANES) return;
    for (int r = 0; r < R; r++)
        pieces([&](int, int n) {
            Piece x;
            load_end<LA_K>(x, k, at.owner * R + r, n);
            store_end<LA_K>(to_k, at.owner * R + r, n, x);
            load_end<LA_V>(x, v, at.owner * R + r, n);
            store_end<LA_V>(to_v, at.owner * R + r, n, x);
        });
}

extern "C" __global__ void __launch_bounds__(THREADS) angle_sums(const __grid_constant__ TrapezoidArguments a) {
    const u32 columns = a.H * larger(LA_P, 1), tiles = (columns + THREADS - 1) / THREADS;
    const u32 column = blockIdx.x % tiles * THREADS + threadIdx.x;
    if (column >= columns) return;
    const Place at(a, blockIdx.x / tiles, column / larger(LA_P, 1));
    const int p = column % larger(LA_P, 1);
    double sum = 0;
    for (int begin = 0; begin < at.count; begin += AHEAD) {
        double each[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            each[i] = begin + i < at.count ? half_turns(a, (at.first + begin + i) * a.H + at.head, p) : 0;
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (begin + i < at.count) sum += each[i];
    }
    a.sums[at.sums(a) + p] = sum;
}
// each part's sum becomes that of the parts before it, or after it
template <bool AFTER> LA_DEVICE void add_parts(const Arguments& a) {
    const i64 columns = (i64)a.H * LA_P, n = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (n >= columns * a.states) return;
    const i64 sequence = n / columns,
              length = a.offsets == nullptr ? a.T : a.offsets[sequence + 1] - a.offsets[sequence];
    const int parts = (int)((length + PART - 1) / PART);
    double* own = a.sums + first_part(a, sequence) * columns + n % columns;
    double sum = 0;
    for (int begin = 0; begin < parts; begin += AHEAD) {
        double each[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int k = begin + i;
            if (k < parts) each[i] = own[(AFTER ? parts - 1 - k : k) * columns];
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int k = begin + i;
            if (k >= parts) continue;
            own[(AFTER ? parts - 1 - k : k) * columns] = sum;
            sum += each[i];
        }
    }
}
extern "C" __global__ void __launch_bounds__(THREADS) before_parts(const __grid_constant__ TrapezoidArguments a) {
    add_parts<false>(a);
}
extern "C" __global__ void __launch_bounds__(THREADS) after_parts(const __grid_constant__ TrapezoidArguments a) {
    add_parts<true>(a);
}

// the place of row r of a head and token, whose first row is `row`, and of the pair of rows (r, s) of token and head n
LA_DEVICE i64 row_at(const Arguments& a, i64 row, int r) { return row + (i64)r * a.H; }
LA_DEVICE i64 pair_at(i64 n, int r, int s) { return (n * R + r) * R + s; }
template <bool ABOVE = false> LA_DEVICE void sum_pairs(Pairs& x) {   // ABOVE: those above the diagonal
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int s = ABOVE ? r + 1 : 0; s < R; s++) x[r][s] = row_sum(x[r][s]);
}
LA_DEVICE void round_row(Piece& x) {
#pragma unroll
    for (int i = 0; i < PER; i++) x[i] = rounded<LA_DTYPE>(x[i]);
}
LA_DEVICE void times(Piece& x, float by) {
#pragma unroll
    for (int i = 0; i < PER; i++) x[i] *= by;
}
LA_DEVICE void add_times(Piece& sum, float by, const Piece& x) {
#pragma unroll
    for (int i = 0; i < PER; i++) sum[i] += by * x[i];
}
// y = m_r x, or x without m
LA_DEVICE void spread(const Arguments& a, const Place& at, int r, int c, const Piece& x, Piece& y) {
    if constexpr (LA_SPREAD) load_vector<LA_V>(y, a.m, (i64)at.head * R + r, c);
#pragma unroll
    for (int i = 0; i < PER; i++) y[i] = LA_SPREAD ? y[i] * x[i] : x[i];
}

// q, k, v, g, shares and above of a part; of the last one keys, values, own and rotation of the last token
extern "C" __global__ void __launch_bounds__(THREADS, LA_SPREAD || LA_DTYPE == 2 ? 1 : 4)
    late_rows(const __grid_constant__ TrapezoidArguments a) {
    __shared__ Slots slots;
    __shared__ Numbers numbers;
    const Place at(a);
    const i64 states = (i64)a.states * a.H;
    if (at.count == 0) {
        if (at.part || at.begin < at.end) return;
        pass_on(a, at, a.past_k, a.past_v, a.end_k, a.end_v);
        if (threadIdx.x == 0) a.end_own[at.owner] = 0.f;
        for (int p = threadIdx.x; p < LA_P; p += THREADS) {
            a.end_rotation[at.owner * LA_P + p] = 1.f;
            a.end_rotation[(states + at.owner) * LA_P + p] = 0.f;
        }
        return;
    }
    numbers.load(a, at, true);
    find_rotations(a, at, slots, at.count + (R > 1 && at.first + at.count < at.end));
    __syncthreads();
    constexpr int BYTES = bytes_of(LA_DTYPE);
    const int group = threadIdx.x / LA_LANES, lane = threadIdx.x % LA_LANES;
    for (int step = 0; step < at.count; step += GROUPS) {   // all lanes take part in the sums
        const bool valid = step + group < at.count;
        const int t = valid ? step + group : 0;
        const i64 token = at.first + t, n = token * a.H + at.head, row = n + token * (R - 1) * a.H,
                  later = row + R * a.H;   // the first rows of the token and of the next one
        const bool reads = a.C.data != nullptr, follows = valid && token + 1 < at.end,
                   begins = valid && token == at.begin;
        const char *from_B = at.row(a, a.B, token), *from_C = at.row(a, a.C, token), *from_x = at.row(a, a.x, token);
        Pairs overlap = {}, above = {}, first = {};   // above of the next token; first: above of the first one
        pieces([&](int, int c) {
            Piece B[R], C[R], x;
            if (c < LA_K)
#pragma unroll
                for (int r = 0; r < R; r++) load_row<LA_DTYPE, LA_K>(B[r], from_B + r * a.B_row, c);
            if (c < LA_K && reads)
#pragma unroll
                for (int r = 0; r < R; r++) load_row<LA_DTYPE, LA_K>(C[r], from_C + r * a.C_row, c);
            if (c < LA_V) load_row<LA_DTYPE, LA_V>(x, from_x, c);
            if (c < LA_K) {
                if (reads)
#pragma unroll
                    for (int r = 0; r < R; r++) {
#pragma unroll
                        for (int s = 0; s < R; s++) overlap[r][s] += dot(C[r], B[s]);
                        rotate(C[r], slots[t], c, false);
                        if (R > 1) round_row(C[r]);
                        if (valid) store_row<LA_DTYPE, LA_K>(a.q + row_at(a, row, r) * LA_K * BYTES, c, C[r]);
                    }
#pragma unroll
                for (int s = 0; s < R; s++) {
                    if (valid && token + 1 == at.end) store_end<LA_K>(a.end_k, at.owner * R + s, c, B[s]);
                    rotate(B[s], slots[t], c, false);
                    if (R > 1) round_row(B[s]);
                    if (follows) store_row<LA_DTYPE, LA_K>(a.k + row_at(a, later, s) * LA_K * BYTES, c, B[s]);
                }
                if (R > 1 && reads && follows)
#pragma unroll
                    for (int r = 0; r < R - 1; r++) {
                        Piece next;
                        load_row<LA_DTYPE, LA_K>(next, from_C + a.C.token + r * a.C_row, c);
                        rotate(next, slots[t + (R > 1)], c, false);
                        round_row(next);
#pragma unroll
                        for (int s = r + 1; s < R; s++) above[r][s] += dot(next, B[s]);
                    }
                if (begins)
#pragma unroll
                    for (int s = 0; s < R; s++) {
                        load_end<LA_K>(B[s], a.past_k, at.owner * R + s, c);
                        if (R > 1) round_row(B[s]);
                        store_row<LA_DTYPE, LA_K>(a.k + row_at(a, row, s) * LA_K * BYTES, c, B[s]);
                        if (reads)
#pragma unroll
                            for (int r = 0; r < s; r++) first[r][s] += dot(C[r], B[s]);
                    }
            }
            if (c < LA_V)
#pragma unroll
                for (int r = 0; r < R; r++) {
                    Piece y;
                    spread(a, at, r, c, x, y);
                    if (valid && token + 1 == at.end) store_end<LA_V>(a.end_v, at.owner * R + r, c, y);
                    times(y, numbers.weight[t + 1]);
                    if (follows) store_row<LA_DTYPE, LA_V>(a.v + row_at(a, later, r) * LA_V * BYTES, c, y);
                    if (begins) {
                        load_end<LA_V>(y, a.past_v, at.owner * R + r, c);
                        times(y, numbers.weight[0]);
                        store_row<LA_DTYPE, LA_V>(a.v + row_at(a, row, r) * LA_V * BYTES, c, y);
                    }
                }
        });
        if (reads) {
            sum_pairs(overlap);
            if (R > 1) sum_pairs<true>(above);
            if (R > 1 && at.part == 0 && step == 0) sum_pairs<true>(first);
        }
        if (!valid) continue;
        if (reads && lane == 0)
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int s = 0; s < R; s++) {
                    const float share = a.scale * numbers.own[t] * overlap[r][s];
                    a.shares[pair_at(n, r, s)] = a.D == nullptr || r != s ? share : share + a.D[at.head];
                    if (R > 1 && follows) a.above[pair_at(n + a.H, r, s)] = a.scale * above[r][s];   // 0 for s <= r
                    if (R > 1 && begins) a.above[pair_at(n, r, s)] = a.scale * first[r][s];
                }
        if (token + 1 < at.end) continue;
        if (lane == 0) a.end_own[at.owner] = numbers.own[t];
        for (int p = lane; p < LA_P; p += LA_LANES) {
            a.end_rotation[at.owner * LA_P + p] = slots[t][p].rotation.x;
            a.end_rotation[(states + at.owner) * LA_P + p] = slots[t][p].rotation.y;
        }
    }
}

// What queries beside the scan add to gradients of a token with its first row and place n: to rows s of keys or values,
// those r < s.
LA_DEVICE void add_to_keys(const Arguments& a, i64 row, i64 n, int c, Piece (&dk)[R]) {
#pragma unroll
    for (int r = 0; r < R - 1; r++) {
        Piece q;
        load_row<LA_DTYPE, LA_K>(q, a.q + row_at(a, row, r) * LA_K * bytes_of(LA_DTYPE), c);
#pragma unroll
        for (int s = r + 1; s < R; s++) add_times(dk[s], a.scale * a.dabove[pair_at(n, r, s)], q);
    }
}
LA_DEVICE void add_to_values(const Arguments& a, i64 row, i64 n, int c, Piece (&dv)[R]) {
#pragma unroll
    for (int r = 0; r < R - 1; r++) {
        Piece d;
        load_row<LA_GRAD, LA_V>(d, a.dout + row_at(a, row, r) * LA_V * bytes_of(LA_GRAD), c);
#pragma unroll
        for (int s = r + 1; s < R; s++) add_times(dv[s], a.above[pair_at(n, r, s)], d);
    }
}
LA_DEVICE void add_to_queries(const Arguments& a, i64 row, i64 n, int c, Piece (&dq)[R]) {
#pragma unroll
    for (int s = 1; s < R; s++) {
        Piece k;
        load_row<LA_DTYPE, LA_K>(k, a.k + row_at(a, row, s) * LA_K * bytes_of(LA_DTYPE), c);
#pragma unroll
        for (int r = 0; r < s; r++) add_times(dq[r], a.scale * a.dabove[pair_at(n, r, s)], k);
    }
}

// Gradients of B, C, x and the last tokens, of w and own, and sums of those of the angles over later tokens of a part,
// of m over the tokens of a part
extern "C" __global__ void __launch_bounds__(THREADS, LA_SPREAD ? 1 : 2)
    late_rows_vjp(const __grid_constant__ TrapezoidArguments a) {
    __shared__ Slots slots;
    __shared__ Numbers numbers;
    const Place at(a);
    const bool begun = a.dpast_k != nullptr, ended = a.dend_k != nullptr, reads = a.C.data != nullptr;
    Piece dm[R][PIECES] = {};
    if (at.count == 0) {
        if (begun && at.part == 0 && at.begin == at.end) pass_on(a, at, a.dend_k, a.dend_v, a.dpast_k, a.dpast_v);
        for (int p = threadIdx.x; p < LA_P; p += THREADS)
            if (a.sums != nullptr) a.sums[at.sums(a) + p] = 0;
        for (int i = threadIdx.x; i < R * LA_V; i += THREADS)
            if (LA_SPREAD) a.dm[(i64)blockIdx.x * R * LA_V + i] = 0.f;
        return;
    }
    numbers.load(a, at, false);
    find_rotations(a, at, slots, at.count);
    __syncthreads();
    constexpr int BYTES = bytes_of(LA_GRAD);
    const int group = threadIdx.x / LA_LANES, lane = threadIdx.x % LA_LANES;
    for (int step = 0; step < at.count; step += GROUPS) {
        const bool valid = step + group < at.count;
        const int t = valid ? step + group : 0;
        const i64 token = at.first + t, n = token * a.H + at.head, next = n + a.H, row = n + token * (R - 1) * a.H,
                  later = row + R * a.H;   // the first rows of the token and of the next one
        const bool follows = token + 1 < at.end;
        Piece B[PIECES][R] = {}, C[PIECES][R] = {}, x[PIECES] = {}, dq[PIECES][R] = {}, dk[PIECES][R] = {},
              dv[PIECES][R] = {}, dout[PIECES][R] = {};
        const char *from_B = at.row(a, a.B, token), *from_C = at.row(a, a.C, token), *from_x = at.row(a, a.x, token);
        Pairs overlap = {}, read = {};
        float dw = 0.f, first = 0.f;   // first: the gradient of w of the first token
        pieces([&](int i, int c) {
            if (c < LA_K) {
#pragma unroll
                for (int r = 0; r < R; r++) {
                    load_row<LA_DTYPE, LA_K>(B[i][r], from_B + r * a.B_row, c);
                    if (follows) load_row<LA_GRAD, LA_K>(dk[i][r], a.dk + row_at(a, later, r) * LA_K * BYTES, c);
                    else load_end<LA_K>(dk[i][r], a.dend_k, at.owner * R + r, c);
                    if (reads) {
                        load_row<LA_DTYPE, LA_K>(C[i][r], from_C + r * a.C_row, c);
                        load_row<LA_GRAD, LA_K>(dq[i][r], a.dq + row_at(a, row, r) * LA_K * BYTES, c);
                    }
                }
                if (R > 1 && reads) {
                    if (follows) add_to_keys(a, later, next, c, dk[i]);
                    add_to_queries(a, row, n, c, dq[i]);
                }
            }
            if (c < LA_V) {
                load_row<LA_DTYPE, LA_V>(x[i], from_x, c);
#pragma unroll
                for (int r = 0; r < R; r++) {
                    if (follows) load_row<LA_GRAD, LA_V>(dv[i][r], a.dv + row_at(a, later, r) * LA_V * BYTES, c);
                    else load_end<LA_V>(dv[i][r], a.dend_v, at.owner * R + r, c);
                    if (reads) load_row<LA_GRAD, LA_V>(dout[i][r], a.dout + row_at(a, row, r) * LA_V * BYTES, c);
                }
                if (R > 1 && reads && follows) add_to_values(a, later, next, c, dv[i]);
            }
#pragma unroll
            for (int s = 0; s < R; s++) {
                Piece y;
                spread(a, at, s, c, x[i], y);
#pragma unroll
                for (int r = 0; r < R; r++) {
                    overlap[r][s] += dot(C[i][r], B[i][s]);
                    read[r][s] += dot(dout[i][r], y);
                }
                dw += dot(dv[i][s], y);
            }
            if (begun && token == at.begin) {
                Piece d[R];
                if (c < LA_K) {
#pragma unroll
                    for (int r = 0; r < R; r++)
                        load_row<LA_GRAD, LA_K>(d[r], a.dk + row_at(a, row, r) * LA_K * BYTES, c);
                    if (R > 1 && reads) add_to_keys(a, row, n, c, d);
#pragma unroll
                    for (int r = 0; r < R; r++)
                        if (valid) store_end<LA_K>(a.dpast_k, at.owner * R + r, c, d[r]);
                }
                if (c < LA_V) {
#pragma unroll
                    for (int r = 0; r < R; r++)
                        load_row<LA_GRAD, LA_V>(d[r], a.dv + row_at(a, row, r) * LA_V * BYTES, c);
                    if (R > 1 && reads) add_to_values(a, row, n, c, d);
#pragma unroll
                    for (int r = 0; r < R; r++) {
                        Piece past;
                        load_end<LA_V>(past, a.past_v, at.owner * R + r, c);
                        first += dot(d[r], past);
                        times(d[r], numbers.weight[0]);
                        if (valid) store_end<LA_V>(a.dpast_v, at.owner * R + r, c, d[r]);
                    }
                }
            }
        });
        sum_pairs(overlap);
        sum_pairs(read);
        dw = row_sum(dw);
        first = row_sum(first);
        if (!valid) continue;
        const float own = numbers.own[t], weight = follows ? numbers.weight[t + 1] : 1.f;
        float along = 0.f;   // of own
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int s = 0; s < R; s++) {
                overlap[r][s] *= a.scale;
                along += overlap[r][s] * read[r][s];
            }
        pieces([&](int i, int c) {
            if (c < LA_K) {
                double angles[PER / 2] = {};   // gradients of those of the pairs; that of the last key has none
#pragma unroll
                for (int r = 0; r < R; r++) {
                    if (reads) add_angle_grads(angles, C[i][r], dq[i][r], slots[t], c);
                    if (follows) add_angle_grads(angles, B[i][r], dk[i][r], slots[t], c);
                    if (follows) rotate(dk[i][r], slots[t], c, true);
                    rotate(dq[i][r], slots[t], c, true);
                }
#pragma unroll
                for (int j = 0; j < PER; j += 2)
                    if (c + j < 2 * LA_P) slots[t][(c + j) / 2].sum = angles[j / 2];
#pragma unroll
                for (int r = 0; r < R; r++)
#pragma unroll
                    for (int s = 0; s < R; s++) {
                        add_times(dk[i][s], a.scale * own * read[r][s], C[i][r]);
                        add_times(dq[i][r], a.scale * own * read[r][s], B[i][s]);
                    }
#pragma unroll
                for (int r = 0; r < R; r++) {
                    const i64 to = row_at(a, row, r) * LA_K * bytes_of(LA_KEYS);
                    store_row<LA_KEYS, LA_K>(a.dB + to, c, dk[i][r]);
                    if (reads) store_row<LA_KEYS, LA_K>(a.dC + to, c, dq[i][r]);
                }
            }
            if (c < LA_V) {
                Piece dx = {};
#pragma unroll
                for (int s = 0; s < R; s++) {
                    times(dv[i][s], weight);
#pragma unroll
                    for (int r = 0; r < R; r++) {
                        const float share = own * overlap[r][s];
                        add_times(dv[i][s], a.D == nullptr || r != s ? share : share + a.D[at.head], dout[i][r]);
                    }
                    Piece y;
                    spread(a, at, s, c, dv[i][s], y);
#pragma unroll
                    for (int j = 0; j < PER; j++) {
                        dx[j] += y[j];
                        if (LA_SPREAD) dm[s][i][j] += x[i][j] * dv[i][s][j];
                    }
                }
                store_row<LA_DTYPE, LA_V>(a.dx + n * LA_V * bytes_of(LA_DTYPE), c, dx);
            }
        });
        if (lane) continue;
        float down = along;
        if (follows) {
            a.dw[next] = dw;
            down += numbers.fade[t + 1] * dw;
        } else if (ended) down += a.dend_own[at.owner];
        if (token == at.begin) a.dw[n] = first;
        a.down[n] = down;
        float written = 0.f;
#pragma unroll
        for (int r = 0; r < R; r++) written += read[r][r];
        if (reads) a.written[n] = written;
    }
    if (LA_SPREAD) {
        __shared__ Sums sums;
#pragma unroll
        for (int r = 0; r < R; r++) column_sums<LA_V>(sums, dm[r], a.dm + ((i64)blockIdx.x * R + r) * LA_V);
    }
    __syncthreads();
    for (int p = threadIdx.x; p < LA_P; p += THREADS) {
        double sum = ended && at.first + at.count == at.end ? a.dend_theta[at.owner * LA_P + p] : 0;
        for (int begin = 0; begin < at.count; begin += AHEAD) {
            double each[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) each[i] = begin + i < at.count ? slots[at.count - 1 - begin - i][p].sum : 0;
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (begin + i < at.count) {
                    sum += each[i];
                    a.later[((at.first + at.count - 1 - begin - i) * a.H + at.head) * LA_P + p] = (float)sum;
                }
        }
        if (a.sums != nullptr) a.sums[at.sums(a) + p] = sum;
    }
}

// gradients of the angles, of dt, A and trap
extern "C" __global__ void __launch_bounds__(THREADS) angle_sums_vjp(const __grid_constant__ TrapezoidArguments a) {
    constexpr int EACH = THREADS / PART;
    const Place at(a);
    const int t = threadIdx.x / EACH, lane = threadIdx.x % EACH;
    const bool valid = t < at.count;
    const i64 token = at.first + (valid ? t : 0), n = token * a.H + at.head;
    double ddt = 0;
    if (valid)
        for (int p = lane; p < LA_P; p += EACH) {
            const double after = a.sums == nullptr ? 0 : a.sums[at.sums(a) + p];
            const double d = PI * (after + (double)a.later[n * LA_P + p]);
            const float slope = tanhf((float)element<LA_ANGLE>(a.angle, n * LA_P + p));
            put_element<LA_ANGLE>(a.dangle, n * LA_P + p, (1.f - slope * slope) * a.dt[n] * (float)d);
            ddt += d * slope;
        }
#pragma unroll
    for (int by = EACH / 2; by; by /= 2) ddt += __shfl_xor_sync(~0u, ddt, by);
    if (!valid || lane) return;
    const Token now(a, token, at.head);
    const float before = token > at.begin ? Token(a, token - 1, at.head).own : 0.f, fade = expf(now.g);
    const float dw = a.dw[n], down = a.down[n], following = fade * dw;
    const float dg = a.dg[token * R * a.H + at.head] + fade * ((now.dt - now.own) + before) * dw;
    a.ddt[n] = (float)ddt + now.lambda * down + (1.f - now.lambda) * following + now.rate * dg;
    a.dtrap[n] = now.lambda * (1.f - now.lambda) * now.dt * (down - following);
    a.dA[n] = now.dt * dg;
}

// S = P rotated back, + own k^T v of the last token
extern "C" __global__ void __launch_bounds__(THREADS) settle(const __grid_constant__ TrapezoidArguments a) {
    constexpr int UNITS = LA_K - LA_P;   // pairs of rows, then rows
    const i64 n = (i64)blockIdx.x * THREADS + threadIdx.x, states = (i64)a.states * a.H;
    if (n >= states * UNITS * LA_V) return;
    const int column = (int)(n % LA_V), unit = (int)(n / LA_V % UNITS);
    const i64 owner = n / LA_V / UNITS;
    const float own = a.end_own[owner];
    float k[2] = {};   // of the row, or of both rows of a pair, times v
    const int row = unit < LA_P ? 2 * unit : LA_P + unit;
    const i64 to = (owner * LA_K + row) * LA_V + column;
#pragma unroll
    for (int r = 0; r < R; r++) {
        const float value = own * a.end_v[(owner * R + r) * LA_V + column];
        const float* from = a.end_k + (owner * R + r) * LA_K + row;
        k[0] += from[0] * value;
        if (unit < LA_P) k[1] += from[1] * value;
    }
    if (unit >= LA_P) {
        a.S[to] = a.late[to] + k[0];
        return;
    }
    const float c = a.end_rotation[owner * LA_P + unit], s = a.end_rotation[(states + owner) * LA_P + unit];
    const float even = a.late[to], odd = a.late[to + LA_V];
    a.S[to] = even * c + odd * s + k[0];
    a.S[to + LA_V] = odd * c - even * s + k[1];
}
