// Outputs and states, 16 value columns a warp; LA_BACK 1: dv and the gradient of the first state, which are the same
// pass from the last chunk to the first: the keys times Suf read, the queries times Pre write, P is transposed, dout
// takes the place of v.
//
//     out = (q Pre) S + P u     S' = diag(Pre_last) S + (k Suf)^T u
//     u = v, with LA_ERASE u = beta e, e = T (v - (k Pre) S), T = (1 + N beta)^-1
//     du = (k Suf) G + P^T dout     G' = diag(Pre_last) G + (q Pre)^T dout
//     dv = du, with LA_ERASE du = (1 + beta N)^-T ((k Suf) G + P^T dout),
//     N = tril(P of k and k, -1)                                              dv = beta du, and G' has - (k Pre)^T dv
//
// LA_COLUMNS: value channels decay by d = e^gv, S_t = diag(a_t) S_(t-1) diag(d_t) + k_t^T v_t, and states are decayed
// along both axes. A channel of out has the sum over j < i of P_ij d_(j+1) ... d_i v_j. The pairs (i, j) of two
// neighbouring spans of 1, 2, 4 or 8 tokens are one product, decayed from both sides to the boundary between them:
//
//     d_(j+1) ... d_i = after_j upto_i     after_j: of the tokens behind j in its span; upto_i: up to i, from its span
//     on
//
// so that no factor is above 1 and none is divided, for P with the decays a likewise. The states after every LA_MARK
// tokens are stored before the last one's write, and LA_BACK has, without the terms of P_tt in out and dv,
//
//     dgv_t = dgv_(t+1) + dout_t out_t - v_t dv_t     anew at marks, where <S~, G> is summed
//
// On the transposed state, the roles of q and dout, of k and v and of the decays exchanged, the same passes give dq as
// out, dk as dv and dg as dgv.
#include "portable/chunk.cuh"

#ifndef LA_MARK   // tokens from one stored state to the next, with LA_COLUMNS
#define LA_MARK 128
#endif
static_assert(!(LA_COLUMNS && (LA_ERASE || LA_BEFORE || LA_BONUS)), "decays of the value channels stand alone");

typedef Product<1 + (KIND == 2), 2 * (KIND == 2)> Tf32;
constexpr int TILES = KEYS / 8, PASSES = (KEYS / 16 + WARPS - 1) / WARPS,
              ACTIVE = KEYS / 16 < WARPS ? KEYS / 16 : WARPS;
constexpr int SLICES = (V + 16 * WARPS - 1) / (16 * WARPS), BUFFERS = K > 128 || LA_ERASE ? 1 : 2;
constexpr int READ = KEYS + 8,
              SQUARE = C * C;   // floats of a row that reads the state: pairs of eight rows in all banks

// In shared memory, bytes: 8 columns a lane of q, k, g; a warp's rows of q, a (k); P of the warps (and of k and k); P
// (N beta or beta N, T); rows that read; k Pre, as rows that read or columns that write; of each buffer columns that
// write, then Pre_last (in two terms), which is read after the last barrier of a chunk too
constexpr int STAGE_GATE = 2 * pieces_of(KIND) * THREADS * 16, STAGE = STAGE_GATE + pieces_of(LA_GATE) * THREADS * 16;
constexpr int AT_ROWS = PASSES * STAGE, AT_PARTS = AT_ROWS + WARPS * (2 + LA_ERASE) * C * ROW * 4;
constexpr int AT_P = AT_PARTS + (1 + LA_ERASE) * ACTIVE * SQUARE * 4, AT_T = AT_P + C * COLUMN * 4,
              AT_L = AT_T + LA_ERASE * C * COLUMN * 4;
constexpr int AT_READ = AT_L + LA_ERASE * C * ROW * 4, AT_ERASE = AT_READ + C * READ * 4,
              AT_WRITE = AT_ERASE + LA_ERASE * (LA_BACK ? KEYS * COLUMN : C * READ) * 4;
constexpr int LAST = KEYS * COLUMN, BUFFER = LAST + (1 + LA_LONG) * KEYS,   // floats
    AT_BETA = AT_WRITE + BUFFERS * BUFFER * 4;
static_assert(LA_SHARED == AT_BETA + LA_ERASE * C * 4, "LA_SHARED is the size that the launch requests");

typedef float State[TILES][4];   // its transpose: value rows, key columns

// Products of a chunk's tokens with each other and with the state
struct Chunk {
    const Arguments& a;
    const Place& at;
    char* shared;
    int warp, lane;
    __device__ __forceinline__ float* floats(int bytes) const { return (float*)(shared + bytes); }
    __device__ __forceinline__ float* rows(int n) const {
        return floats(AT_ROWS) + (warp * (2 + LA_ERASE) + n) * C * ROW;
    }

    __device__ __forceinline__ void request_block(int pass, int token) const {
        const int channel = (warp + pass * WARPS) * 16 + (lane & 1) * SPAN, own = token + lane / 2;
        char* const to = shared + pass * STAGE;
        request<KIND, K>(to, rows_of(a.q, at.s, at.head), a.q.token, own, at.s.T, channel);
        request<KIND, K>(to + pieces_of(KIND) * THREADS * 16, rows_of(a.k, at.s, at.head), a.k.token, own, at.s.T,
                         channel);
        request<LA_GATE, K>(to + STAGE_GATE, rows_of(a.g, at.s, at.head), a.g.token, own, at.s.T, channel);
    }
    // all that 16 channels are in the chunk's products; `next`: the token of the next chunk, which is requested
    __device__ __forceinline__ void scale_block(int pass, int next, float* writes) const {
        const int block = warp + pass * WARPS, j = lane / 2, half = (lane & 1) * SPAN, channel = block * 16 + half;
        float q[SPAN], k[SPAN], decay[SPAN], x[SPAN], g[SPAN];
        const char* const from = shared + pass * STAGE;
        receive<KIND>(q, from);
        receive<KIND>(k, from + pieces_of(KIND) * THREADS * 16);
        receive<LA_GATE>(g, from + STAGE_GATE);
#pragma unroll
        for (int c = 0; c < SPAN; c++) decay[c] = g[c];
        decays(decay);
        fill8(x, a.scale);
        scale8(q, x);
        float* const mine = rows(0) + j * ROW + half;
        __syncwarp();
        store8(mine, q);
        store8(mine + C * ROW, decay);
        if constexpr (LA_ERASE) store8(mine + 2 * C * ROW, k);
        __syncwarp();
        request_block(pass, next);
        float own = LA_BEFORE ? 0.f : dot8(q, k);
        if constexpr (LA_BONUS) {
            const float* const u = a.u + (i64)(at.head / a.group_u) * K;
            for (int c = 0; c < SPAN; c++) own = channel + c < K ? fmaf(q[c] * k[c], u[channel + c], own) : own;
        }
        prefixes(decay, writes + LAST + channel);
        if constexpr (LA_LONG) refine(writes + LAST + block * 16, KEYS, g, lane);
        store_prefix(decay, q, k, writes, channel, j);
#pragma unroll
        for (int c = 0; c < SPAN; c++) x[c] = k[c];
        float* const part = floats(AT_PARTS) + warp * SQUARE + j;
#pragma unroll 4
        for (int i = 0; i < C; i++) {
            float step[SPAN], other[SPAN];
            load8(step, rows(1) + i * ROW + half);
            load8(other, rows(0) + i * ROW + half);
            if (!LA_BEFORE && i > j) scale8(x, step);
            const float s = dot8(other, x);
            add_part(part + i * C, i == j ? own : s, pass);
            if constexpr (LA_ERASE) {
                load8(other, rows(2) + i * ROW + half);
                add_part(part + ACTIVE * SQUARE + i * C, dot8(other, x), pass);
            }
            if (LA_BEFORE && i > j) scale8(x, step);
        }
        if constexpr (LA_BACK) store_rounded(floats(AT_READ) + j * READ + channel, x);
        else store_column(writes, x, channel, j);
    }
    // The same as scale_block by products of spans (LA_COLUMNS), in the layout of an operand A
    __device__ __forceinline__ void multiply_block(int pass, int next, float* writes) const {
        const int block = warp + pass * WARPS, row = lane >> 2, column = (lane & 3) * 2;
        float q[SPAN], k[SPAN], g[SPAN], upto[SPAN], after[SPAN];   // upto after: the decay of the span
        const char* const from = shared + pass * STAGE;
        __syncwarp();
        receive_operand<KIND>(q, from, warp, lane);
        receive_operand<KIND>(k, from + pieces_of(KIND) * THREADS * 16, warp, lane);
        receive_operand<LA_GATE>(g, from + STAGE_GATE, warp, lane);
        __syncwarp();
        request_block(pass, next);
        float own[2] = {};
#pragma unroll
        for (int n = 0; n < SPAN; n++) {
            q[n] *= a.scale;
            own[n >> 1 & 1] = fmaf(q[n], k[n], own[n >> 1 & 1]);
            upto[n] = exp2_approx(g[n] * LOG2_OF_E);
            after[n] = 1.f;
        }
        float p[3][2] = {};   // pairs of the first 8 tokens, of the last 8 with them, of the last 8
#pragma unroll
        for (int span = 1; span <= 8; span *= 2) {
            float x[SPAN], y[SPAN], c[2][4] = {};
#pragma unroll
            for (int n = 0; n < SPAN; n++) {
                x[n] = q[n] * upto[n];
                y[n] = Tf32::rounded(k[n] * after[n]);
            }
            const Tf32::A reads = Tf32::a(x);
            Tf32::add(c[0], reads, Tf32::b({y[0], y[1], y[4], y[5]}));
            if (span < 8) Tf32::add(c[1], reads, Tf32::b({y[2], y[3], y[6], y[7]}));
#pragma unroll
            for (int n = 0; n < 2; n++) {
                if (span == 8) p[1][n] = c[0][2 + n];
                else if ((row ^ (column + n)) / span == 1) {
                    p[0][n] = c[0][n];
                    p[2][n] = c[1][2 + n];
                }
            }
            if (span < 8)
#pragma unroll
                for (int n = 0; n < SPAN; n++) {
                    const float other = __shfl_xor_sync(0xffffffffu, upto[n] * after[n], 4 * span);
                    if (row & span) upto[n] *= other;
                    else after[n] *= other;
                }
            else
#pragma unroll
                for (int n = 0; n < SPAN; n++)
                    if ((n & 2) == 0) {
                        const float first = upto[n] * after[n];
                        after[n] *= upto[n + 2] * after[n + 2];
                        upto[n + 2] *= first;
                    }
        }
        float* const part = floats(AT_PARTS) + warp * SQUARE + row * C + column;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            own[h] += __shfl_xor_sync(0xffffffffu, own[h], 1);
            own[h] += __shfl_xor_sync(0xffffffffu, own[h], 2);
#pragma unroll
            for (int n = 0; n < 2; n++)
                if (row == column + n) p[2 * h][n] = own[h];
        }
#pragma unroll
        for (int m = 0; m < 3; m++) {
            float2& to = *(float2*)(part + (m > 0) * 8 * C + (m > 1) * 8);
            to = pass ? float2{to.x + p[m][0], to.y + p[m][1]} : float2{p[m][0], p[m][1]};
        }
        store_decays(writes + LAST + block * 16 + column, upto, after, g);
#pragma unroll
        for (int n = 0; n < SPAN; n++) {
            q[n] = Tf32::rounded(q[n] * upto[n]);
            k[n] = Tf32::rounded(k[n] * after[n]);
        }
        const float (&reads)[SPAN] = LA_BACK ? k : q, (&written)[SPAN] = LA_BACK ? q : k;
#pragma unroll
        for (int n = 0; n < SPAN; n++) {
            const int token = row + (n & 2) * 4, channel = block * 16 + column + (n & 4) * 2;
            if (n % 2 == 0) *(float2*)(floats(AT_READ) + token * READ + channel) = {reads[n], reads[n + 1]};
            writes[(channel + n % 2) * COLUMN + token] = written[n];
        }
    }
    // Pre_last of a lane's channels, in the layout of an operand
    __device__ __forceinline__ void store_decays(float* last, const float (&upto)[SPAN], const float (&after)[SPAN],
                                                 const float (&g)[SPAN]) const {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int n = c % 2 + c / 2 * 4;   // of the first tokens
            float first = upto[n] * after[n], rest = 0.f;
            if constexpr (LA_LONG) {
                float sum = g[n] + g[n + 2];
#pragma unroll
                for (int d = 4; d < 32; d <<= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
                in_two_terms(sum, first, rest);
            }
            if (lane >> 2) continue;
            last[c % 2 + c / 2 * 8] = first;
            if constexpr (LA_LONG) last[KEYS + c % 2 + c / 2 * 8] = rest;
        }
    }
    // decays of tokens become Pre; Pre_last is stored
    __device__ __forceinline__ void prefixes(float (&x)[SPAN], float* last) const {
        const int j = lane / 2;
#pragma unroll
        for (int c = 0; c < SPAN; c++) {
#pragma unroll
            for (int d = 1; d < C; d <<= 1) {
                const float y = __shfl_up_sync(0xffffffffu, x[c], 2 * d);
                if (j >= d) x[c] *= y;
            }
        }
        if (j == C - 1) store8(last, x);
        if constexpr (LA_BEFORE)
#pragma unroll
            for (int c = 0; c < SPAN; c++) {
                const float y = __shfl_up_sync(0xffffffffu, x[c], 2);
                x[c] = j ? y : 1.f;
            }
    }
    __device__ __forceinline__ void add_part(float* to, float s, int pass) const {
        s += __shfl_xor_sync(0xffffffffu, s, 1);
        if ((lane & 1) == 0) *to = pass ? *to + s : s;
    }
    static __device__ __forceinline__ void store_rounded(float* to, float (&x)[SPAN]) {
#pragma unroll
        for (int c = 0; c < SPAN; c++) x[c] = Tf32::rounded(x[c]);
        store8(to, x);
    }
    static __device__ __forceinline__ void store_column(float* writes, const float (&x)[SPAN], int channel, int j) {
#pragma unroll
        for (int c = 0; c < SPAN; c++) writes[(channel + c) * COLUMN + j] = Tf32::rounded(x[c]);
    }
    // x: Pre of the token
    __device__ __forceinline__ void store_prefix(const float (&x)[SPAN], float (&q)[SPAN], const float (&k)[SPAN],
                                                 float* writes, int channel, int j) const {
        scale8(q, x);
        if constexpr (LA_BACK) store_column(writes, q, channel, j);
        else store_rounded(floats(AT_READ) + j * READ + channel, q);
        if constexpr (LA_ERASE) {
            float y[SPAN];
#pragma unroll
            for (int c = 0; c < SPAN; c++) y[c] = k[c] * x[c];
            if constexpr (LA_BACK) store_column(floats(AT_ERASE), y, channel, j);
            else store_rounded(floats(AT_ERASE) + j * READ + channel, y);
        }
    }
    __device__ __forceinline__ float sum_parts(int entry) const {
        return sum_over_warps<ACTIVE>(floats(AT_PARTS) + entry);
    }
    // P as rows that a product reads, of queries, or LA_BACK of keys
    __device__ __forceinline__ void sum_pairs(int token) const {
        for (int entry = threadIdx.x; entry < SQUARE; entry += THREADS) {
            const int i = entry / C, j = entry % C;
            const float s = j <= i ? sum_parts(entry) : 0.f;
            floats(AT_P)[LA_BACK ? j * COLUMN + i : i * COLUMN + j] = Tf32::rounded(s);
            if constexpr (LA_ERASE) {
                const int of = LA_BACK ? i : j;
                const bool valid = token + of < at.s.T;
                const float beta =
                    valid ? *(const float*)(rows_of(a.beta, at.s, at.head) + (token + of) * a.beta.token) : 0.f;
                floats(AT_L)[i * ROW + j] = j < i ? beta * sum_parts(ACTIVE * SQUARE + entry) : 0.f;
                if ((LA_BACK ? j : i) == 0) floats(AT_BETA)[of] = beta;
            }
        }
    }
    // T, a column a lane, by substitution; LA_BACK its transpose
    __device__ __forceinline__ void invert() const {
        if (warp || lane >= C) return;
        float t[C];
#pragma unroll
        for (int i = 0; i < C; i++) {
            float s = i == lane ? 1.f : 0.f;
#pragma unroll
            for (int m = 0; m < i; m++) s = fmaf(-floats(AT_L)[i * ROW + m], t[m], s);
            t[i] = s;
        }
#pragma unroll
        for (int i = 0; i < C; i++) floats(AT_T)[LA_BACK ? lane * COLUMN + i : i * COLUMN + lane] = Tf32::rounded(t[i]);
    }
};

// Values of a warp's rows
struct Block : Chunk {
    int value;   // of the first row
    // element n of an operand or accumulator of 16 values and 16 tokens
    __device__ __forceinline__ int value_of(int n) const { return value + lane / 4 + (n & 2) * 4; }
    __device__ __forceinline__ int token_of(int n) const { return (lane & 3) * 2 + (n & 1) + (n & 4) * 2; }
    __device__ __forceinline__ int place(int n) const { return token_of(n) * ROW + lane / 4 + (n & 2) * 4; }
    template <int KIND_>
    __device__ __forceinline__ void load_values(float (&x)[8], const Rows& rows, int token) const {
        const char* const from = rows_of(rows, at.s, at.head);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const int t = token + token_of(n);
            x[n] = (u32)t < (u32)at.s.T && value_of(n) < V
                       ? load_element<KIND_>(from + t * rows.token + value_of(n) * bytes_of(KIND_))
                       : 0.f;
        }
    }
    template <int KIND_> __device__ __forceinline__ void store_values(const float (&x)[2][4], const Rows& rows,
                                                                      int token) const {
        char* const to = own_rows(rows, at.s, at.head);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const int t = token + token_of(n);
            if (t < at.s.T && value_of(n) < V)
                store_element<KIND_>(to + t * rows.token + value_of(n) * bytes_of(KIND_), x[n / 4][n % 4]);
        }
    }
    // out += S rows^T, 16 columns of the keys
    __device__ __forceinline__ void read(float (&out)[2][4], const Tf32::A& s, int bytes, int tile) const {
        const float* const from = floats(bytes) + (lane >> 2) * READ + tile * 8 + (lane & 3) * 2;
        Tf32::add(out[0], s, Tf32::b(from));
        Tf32::add(out[1], s, Tf32::b(from + 8 * READ));
    }
    // out = S (q Pre)^T (and of k), S = S diag(Pre_last)
    __device__ __forceinline__ void read_state(State& S, float (&out)[2][4], float (&erased)[2][4],
                                               const float* decay) const {
#pragma unroll
        for (int tile = 0; tile < TILES; tile += 2) {
            const float x[8] = {S[tile][0],     S[tile][1],     S[tile][2],     S[tile][3],
                                S[tile + 1][0], S[tile + 1][1], S[tile + 1][2], S[tile + 1][3]};
            const Tf32::A s = Tf32::a(x);
            read(out, s, AT_READ, tile);
            if constexpr (LA_ERASE && !LA_BACK) read(erased, s, AT_ERASE, tile);
            if constexpr (!LA_LONG)
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const float2 last = *(const float2*)(decay + (tile + n) * 8 + (lane & 3) * 2);
                    S[tile + n][0] *= last.x;
                    S[tile + n][1] *= last.y;
                    S[tile + n][2] *= last.x;
                    S[tile + n][3] *= last.y;
                }
        }
    }
    // c = x rows^T of 16 x 16 floats
    __device__ __forceinline__ void multiply(float (&c)[2][4], const Tf32::A& x, int bytes) const {
        const float* const from = floats(bytes) + (lane >> 2) * COLUMN + (lane & 3) * 2;
        Tf32::add(c[0], x, Tf32::b(from));
        Tf32::add(c[1], x, Tf32::b(from + 8 * COLUMN));
    }
    // c = beta x rows^T, x rows^T stored
    __device__ __forceinline__ void solve(float (&c)[2][4], const float (&x)[8], const Rows& rows, int token) const {
        multiply(c, Tf32::a(x), AT_T);
        if (rows.data) store_values<2>(c, rows, token);
#pragma unroll
        for (int n = 0; n < 8; n++) c[n / 4][n % 4] *= floats(AT_BETA)[token_of(n)];
    }
    // S += columns x^T; decays: of S decayed, with LA_LONG, which else has been before
    __device__ __forceinline__ void write(State& S, const Tf32::A& x, const float* columns, const float* decay,
                                          bool decays) const {
        const float* const from = columns + (lane >> 2) * COLUMN + (lane & 3) * 2;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const Tf32::B y = Tf32::b(from + tile * 8 * COLUMN);
            if constexpr (LA_LONG) {
                float c[4] = {};
                Tf32::add(c, x, y);
                const float* const last = decay + tile * 8 + (lane & 3) * 2;
                const float2 first = *(const float2*)last, rest = *(const float2*)(last + KEYS);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    S[tile][i] = decays ? add_to(S[tile][i], c[i], i & 1 ? first.y : first.x, i & 1 ? rest.y : rest.x)
                                        : S[tile][i] + c[i];
            } else Tf32::add(S[tile], x, y);
        }
    }
    // out of the state and of the chunk's tokens but their own, the state, and x, to be written, decayed along the
    // value axis
    __device__ __forceinline__ void decay_columns(State& S, const float (&v)[8], float (&x)[8], float (&out)[2][4],
                                                  const float (&g)[8]) const {
        float upto[8], after[8];   // upto after: the decay of the span
#pragma unroll
        for (int n = 0; n < 8; n++) {
            upto[n] = exp2_approx(g[n] * LOG2_OF_E);
            after[n] = 1.f;
            x[n] = 0.f;
        }
        if (LA_BACK)   // for dgv
#pragma unroll
            for (int n = 0; n < 8; n++) rows(1)[place(n)] = upto[n];
        const float* const from = floats(AT_P) + (lane >> 2) * COLUMN + (lane & 3) * 2;
        const float2 pairs[3] = {// P of the first 8 tokens, of the last 8 with them, of the last 8
                                 *(const float2*)from, *(const float2*)(from + (LA_BACK ? 8 : 8 * COLUMN)),
                                 *(const float2*)(from + 8 * COLUMN + 8)};
#pragma unroll
        for (int span = 1; span <= 8; span *= 2) {
            add_span(x, v, upto, after, pairs, span);
#pragma unroll
            for (int n = 0; n < 8; n += 2) {   // two neighbouring tokens, from the second span on in one
                if (span == 1) {
                    after[n] = upto[n + 1];
                    upto[n + 1] *= upto[n];
                } else if (span < 8) {
                    const float other = __shfl_xor_sync(0xffffffffu, upto[n + 1] * after[n + 1], span / 2);
                    const bool second = lane & span / 2;
                    if (second) upto[n] *= other, upto[n + 1] *= other;
                    else after[n] *= other, after[n + 1] *= other;
                } else if (n < 4) {
                    const float first = upto[n + 1] * after[n + 1], last = upto[n + 5] * after[n + 5];
                    after[n] *= last, after[n + 1] *= last;
                    upto[n + 4] *= first, upto[n + 5] *= first;
                }
            }
        }
        float all[2] = {upto[1] * after[1], upto[3] * after[3]};
#pragma unroll
        for (int n = 0; n < 8; n++) {
            float& o = out[n / 4][n % 4];
            o = fmaf(o, LA_BACK ? after[n] : upto[n], x[n]);
            x[n] = v[n] * (LA_BACK ? upto[n] : after[n]);
        }
        float rest[2] = {};
        if constexpr (LA_LONG)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float sum = (g[2 * c] + g[2 * c + 1]) + (g[2 * c + 4] + g[2 * c + 5]);
                sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                in_two_terms(sum, all[c], rest[c]);
            }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float& s = S[tile][i];
                s = LA_LONG ? fmaf(s, all[i / 2], s * rest[i / 2]) : s * all[i / 2];
            }
    }
    // z += the pairs of neighbouring spans of so many tokens
    __device__ __forceinline__ void add_span(float (&z)[8], const float (&v)[8], const float (&upto)[8],
                                             const float (&after)[8], const float2 (&pairs)[3], int span) const {
        float x[8], c[2][4] = {};
#pragma unroll
        for (int n = 0; n < 8; n++) x[n] = v[n] * (LA_BACK ? upto[n] : after[n]);
        const Tf32::A written = Tf32::a(x);
        if (span == 8) {
            const float2 p = pairs[1];
            if constexpr (LA_BACK) Tf32::template add_half<1>(c[0], written, Tf32::b({0.f, 0.f, p.x, p.y}));
            else Tf32::template add_half<0>(c[1], written, Tf32::b({p.x, p.y, 0.f, 0.f}));
        } else {
            const float2 p = pairs[0], r = pairs[2];
            const int reader = lane >> 2, writer = (lane & 3) * 2;
            const bool even = (reader ^ writer) / span == 1, odd = (reader ^ (writer + 1)) / span == 1;
            Tf32::template add_half<0>(c[0], written, Tf32::b({even ? p.x : 0.f, odd ? p.y : 0.f, 0.f, 0.f}));
            Tf32::template add_half<1>(c[1], written, Tf32::b({0.f, 0.f, even ? r.x : 0.f, odd ? r.y : 0.f}));
        }
#pragma unroll
        for (int n = 0; n < 8; n++) z[n] = fmaf(LA_BACK ? after[n] : upto[n], c[n / 4][n % 4], z[n]);
    }
    // the terms of P_tt
    __device__ __forceinline__ void add_own(float (&out)[2][4], const float (&v)[8]) const {
#pragma unroll
        for (int n = 0; n < 8; n++)
            out[n / 4][n % 4] = fmaf(floats(AT_P)[token_of(n) * (COLUMN + 1)], v[n], out[n / 4][n % 4]);
    }
    // dgv of a chunk, of out in y; later: that of the token after it, a channel a lane
    __device__ __forceinline__ void store_gates(const float (&y)[8], const float (&v)[8], const float (&du)[2][4],
                                                const float (&dout)[8], float& later, int token, bool marked) const {
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const bool ends = marked && token + token_of(n) == min(token + C, at.s.T) - 1;
            rows(0)[place(n)] = y[n] * dout[n] - (ends ? 0.f : v[n] * du[n / 4][n % 4]);
        }
        __syncwarp();
        if (lane < C)
#pragma unroll
            for (int t = C - 1; t >= 0; t--) {
                later += rows(0)[t * ROW + lane];
                if (rows(1)[t * ROW + lane] == 0.f) later = 0.f;
                rows(0)[t * ROW + lane] = later;
            }
        __syncwarp();
        float dg[2][4];
#pragma unroll
        for (int n = 0; n < 8; n++) dg[n / 4][n % 4] = rows(0)[place(n)];
        store_values<LA_GATE>(dg, a.dg, token);
        __syncwarp();   // before the rows of the next chunk
    }
    // <S~, G> of a mark, a channel a lane
    __device__ __forceinline__ float restart(State& G, i64 mark) const {
        float sums[2] = {};
        each(G, mark, [&](float& x, i64 i, int n) { sums[n >> 1 & 1] = fmaf(x, a.marks[i], sums[n >> 1 & 1]); });
#pragma unroll
        for (int d = 1; d < 4; d <<= 1) {
            sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], d);
            sums[1] += __shfl_xor_sync(0xffffffffu, sums[1], d);
        }
        const float low = __shfl_sync(0xffffffffu, sums[0], (lane & 7) * 4),
                    high = __shfl_sync(0xffffffffu, sums[1], (lane & 7) * 4);
        return lane & 8 ? high : low;
    }
    // f(element, at, its number) for the warp's part of a state in memory
    template <class F> __device__ __forceinline__ void each(State& S, i64 slot, F f) const {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const int key = tile * 8 + (lane & 3) * 2 + (n & 1);
                if (key < K && value_of(n) < V) f(S[tile][n], (slot * K + key) * V + value_of(n), n);
            }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS)
    values(const __grid_constant__ VectorPortableArguments a) {
    extern __shared__ __align__(16) char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const Place at(a, blockIdx.x / SLICES);
    const Block block = {{a, at, shared, warp, lane}, ((int)(blockIdx.x % SLICES) * WARPS + warp) * 16};
    const int chunks = at.chunks();
    const auto token_of = [&](int n) { return (LA_BACK ? chunks - 1 - n : n) * C; };
    State S = {};
    if (a.start) block.each(S, at.slot, [&](float& x, i64 i, int) { x = a.start[i]; });
    for (int pass = 0; pass < PASSES; pass++)
        if ((warp + pass * WARPS) * 16 < KEYS) block.request_block(pass, chunks ? token_of(0) : 0);
    copy_commit();
    float later = 0.f;
    for (int n = 0; n < chunks; n++) {
        const int token = token_of(n), next = n + 1 < chunks ? token_of(n + 1) : at.s.T;
        float *const writes = block.floats(AT_WRITE) + n % BUFFERS * BUFFER, *const last = writes + LAST;
        float x[8], v[8], g[8], out[2][4] = {}, erased[2][4] = {};
        const bool marked = LA_COLUMNS && ((token + C) % LA_MARK == 0 || token + C >= at.s.T);
        const i64 mark = at.slot * a.marks_of_sequence + token / LA_MARK;
        if (LA_BACK && marked && a.marks) later = block.restart(S, mark);
        if constexpr (!LA_COLUMNS) block.load_values<KIND>(x, LA_BACK ? a.dout : a.v, token);
        copy_wait<0>();
#pragma unroll 1
        for (int pass = 0; pass < PASSES; pass++)
            if ((warp + pass * WARPS) * 16 < KEYS) {
                if constexpr (LA_COLUMNS) block.multiply_block(pass, next, writes);
                else block.scale_block(pass, next, writes);
            }
        copy_commit();
        if constexpr (LA_COLUMNS) {   // not before: registers
            block.load_values<KIND>(v, LA_BACK ? a.dout : a.v, token);
            block.load_values<LA_GATE>(g, a.gv, token);
        }
        __syncthreads();
        block.sum_pairs(token);
        if constexpr (LA_ERASE) {
            __syncthreads();
            block.invert();
        }
        block.read_state(S, out, erased, last);
        __syncthreads();
        if constexpr (LA_ERASE && !LA_BACK) {
            float u[2][4] = {};
#pragma unroll
            for (int i = 0; i < 8; i++) x[i] -= erased[i / 4][i % 4];
            block.solve(u, x, a.error, token);
#pragma unroll
            for (int i = 0; i < 8; i++) x[i] = u[i / 4][i % 4];
        }
        if constexpr (LA_COLUMNS) block.decay_columns(S, v, x, out, g);
        const Tf32::A own = Tf32::a(x);
        if constexpr (!LA_COLUMNS) block.multiply(out, own, AT_P);
        if constexpr (LA_ERASE && LA_BACK) {
            float dv[2][4] = {};
#pragma unroll
            for (int i = 0; i < 8; i++) x[i] = out[i / 4][i % 4];
            block.solve(dv, x, a.du, token);
            block.store_values<KIND>(dv, a.dv, token);
#pragma unroll
            for (int i = 0; i < 8; i++) x[i] = -dv[i / 4][i % 4];
            block.write(S, Tf32::a(x), block.floats(AT_ERASE), last, true);
        } else if (!LA_COLUMNS && (LA_BACK || !LA_ERASE || a.out.data))
            block.store_values<KIND>(out, LA_BACK ? a.dv : a.out, token);
        if constexpr (LA_COLUMNS && LA_BACK) {
            float y[8], values[8];
            if (a.dg.data) {
                block.load_values<2>(y, a.error, token);
                block.load_values<KIND>(values, a.v, token);
            }
            block.write(S, own, writes, last, true);
            if (a.dg.data) block.store_gates(y, values, out, v, later, token, marked);
        } else if constexpr (LA_COLUMNS) {   // at a mark first all but the last token's write: S~
            const int end = marked ? min(C, at.s.T - token) - 1 : C;   // also where nothing is stored: the same bits
#pragma unroll 1
            for (int part = 0; part < 1 + marked; part++) {
                float y[8];
#pragma unroll
                for (int i = 0; i < 8; i++) y[i] = (block.token_of(i) == end) == part ? x[i] : 0.f;
                block.write(S, Tf32::a(y), writes, last, part == 0);
                if (marked && !part && a.marks) block.each(S, mark, [&](float& x, i64 i, int) { a.marks[i] = x; });
            }
            if (a.error.data) block.store_values<2>(out, a.error, token);
        } else block.write(S, own, writes, last, !(LA_ERASE && LA_BACK));
        if constexpr (LA_COLUMNS) {
            block.add_own(out, v);
            block.store_values<KIND>(out, LA_BACK ? a.dv : a.out, token);
        }
        if (BUFFERS == 1) __syncthreads();
    }
    if (a.end) block.each(S, at.slot, [&](float& x, i64 i, int) { a.end[i] = x; });
}
