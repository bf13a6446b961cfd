// The systems of a SOLVED read-out for a chunk of LA_C tokens and a head, by conjugate gradients:
//
//     x_i (Z_i + diag(ridge_i)) = q_i,   p_i Z_i = e^{b_i} p_i Z + sum_{j <= i} e^{b_i - b_j} (p_i . k_j) beta_j k_j
//
// Z: before the chunk, by states.cu; b: sums of log decays. A warp has 16 tokens and goes its own way once Z and the
// keys are in shared memory: no row waits for, or depends on, another. p is an operand of LA_TERMS bfloat16 a number
// (terms.cuh), which is what p is: no error comes of it. x and r are float32 in shared memory, each pair of a lane's
// own.
//
// A row stops where |r|^2 <= enough |q|^2. Keys have LA_KEY_TERMS terms: bfloat16 keys are one.
#include "arguments/matrix_state/SystemsArguments.cuh"
#include "systems/place.cuh"
#include "systems/terms.cuh"
#include "attention/decay.cuh"

constexpr int K = LA_K, WIDTH = K <= 64 ? 64 : 128, C = LA_C, WARPS = C / 16, THREADS = 32 * WARPS;
constexpr int TERMS = LA_TERMS, KEY_TERMS = LA_KEY_TERMS, TILES = WIDTH / 8, STEPS = WIDTH / 16, BLOCK = 32;
static_assert(K <= 128 && C % BLOCK == 0, "sizes");

typedef Tile<WIDTH, 2> Matrix;   // rows of Z, or of keys
constexpr u32 Z_BYTES = WIDTH * WIDTH * 2, KEY_BYTES = C * WIDTH * 2, OWN_BYTES = 16 * WIDTH * 4;
constexpr u32 KEYS = TERMS * Z_BYTES, X = KEYS + KEY_TERMS * KEY_BYTES, R = X + WARPS * OWN_BYTES,
              NUMBERS = R + WARPS * OWN_BYTES, SHARED = NUMBERS + 3 * C * 4;
static_assert(SHARED == LA_SHARED, "the plan's bytes");

// rows of float32 as N terms: row r, column c is from(r)[c], zeros past K and where from(r) is null
template <int N, int ROWS, class F> LA_DEVICE void bring(char* to, u32 term_bytes, F from) {
    constexpr int PAIRS = WIDTH / 2;
#pragma unroll 4
    for (int at = threadIdx.x; at < ROWS * PAIRS; at += THREADS) {
        const int r = at / PAIRS, c = at % PAIRS * 2;
        const float* row = from(r);
        float2 x = {0.f, 0.f};
        if (row != nullptr && c < K) {
            if constexpr (LA_PAIRS) x = *(const float2*)(row + c);
            else x = {row[c], c + 1 < K ? row[c + 1] : 0.f};
        }
        u32 terms[N];
        split(x.x, x.y, terms);
#pragma unroll
        for (int t = 0; t < N; t++) *(u32*)(to + t * term_bytes + Matrix::at(r, c)) = terms[t];
    }
}

// sums of log2 decays up to each token in two floats (decay.cuh says why), and beta
struct Numbers {
    const float* base;
    __device__ __forceinline__ float2 upto(int i) const { return {base[i], base[C + i]}; }
    __device__ __forceinline__ float beta(int i) const { return base[2 * C + i]; }
};
LA_DEVICE void set_numbers(float* to, const float* g, i64 g_stride, const float* beta, i64 beta_stride, int T) {
    if (threadIdx.x >= 32) return;
    constexpr int N = C / 32;
    const int first = threadIdx.x * N;
    double x[N], sum = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = first + i < T ? (double)log2_decay(g[(first + i) * g_stride]) : 0.;
        sum += x[i];
    }
    double upto = prefix_sum(sum, threadIdx.x) - sum;
#pragma unroll
    for (int i = 0; i < N; i++) {
        upto += x[i];
        to[first + i] = (float)upto;
        to[C + first + i] = (float)(upto - (double)(float)upto);
        to[2 * C + first + i] = first + i < T ? beta[(first + i) * beta_stride] : 0.f;
    }
}

LA_DEVICE float row_sum(float x) {   // of a row's four lanes
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
LA_DEVICE float over(float x, float y) { return x / (y == 0.f ? 1.f : y); }

// a pair of numbers of a row in memory; column is even
LA_DEVICE float2 pair_of(const float* row, int column) {
    if (column >= K) return {0.f, 0.f};
    if constexpr (LA_PAIRS) return __ldg((const float2*)(row + column));
    return {__ldg(row + column), column + 1 < K ? __ldg(row + column + 1) : 0.f};
}
LA_DEVICE void put_pair(float* row, int column, float2 x) {
    if (column >= K) return;
    if constexpr (LA_PAIRS) {
        *(float2*)(row + column) = x;
    } else {
        row[column] = x.x;
        if (column + 1 < K) row[column + 1] = x.y;
    }
}

struct Rows16 {   // of a warp: lane 4 g + j has rows g and g + 8 and, of each tile of 8 columns, 2 j and 2 j + 1
    u32 Z, keys;
    Numbers numbers;
    int first, lane;   // token of row 0
    const float* ridge[2];

    // c = p (Z_i + diag(ridge_i))
    __device__ __forceinline__ void multiply(float (&c)[TILES][4], const Operand<TERMS> (&p)[STEPS]) const {
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) c[n][e] = 0.f;
#pragma unroll
        for (int s = 0; s < STEPS; s++) add<TERMS>(c, p[s], Z, Z_BYTES, 16 * s);
        const int row[2] = {first + lane / 4, first + lane / 4 + 8};
        const float2 upto[2] = {numbers.upto(row[0]), numbers.upto(row[1])};
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float decay = exp2_approx(upto[e].x + upto[e].y);
#pragma unroll
            for (int n = 0; n < TILES; n++) c[n][2 * e] *= decay, c[n][2 * e + 1] *= decay;
        }
        for (int j = 0; j < first + 16; j += BLOCK) {   // keys of the tokens up to these
            float pk[BLOCK / 8][4] = {};
#pragma unroll
            for (int s = 0; s < STEPS; s++)
                multiply_terms_of<TERMS, KEY_TERMS, BLOCK / 16>(pk, 0, p[s], [&](int t, int m, Bfloat16::B(&b)[2]) {
                    load_b_rows<Bfloat16, Matrix>(b, keys + t * KEY_BYTES, j + 16 * m, 16 * s, lane);
                });
#pragma unroll
            for (int n = 0; n < BLOCK / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int from = j + 8 * n + lane % 4 * 2 + e % 2, to = row[e / 2];
                    const float2 before = numbers.upto(from);
                    const float weight =
                        numbers.beta(from) * exp2_approx((upto[e / 2].x - before.x) + (upto[e / 2].y - before.y));
                    pk[n][e] = from <= to ? pk[n][e] * weight : 0.f;
                }
#pragma unroll
            for (int s = 0; s < BLOCK / 16; s++) {
                Operand<TERMS> x;
#pragma unroll
                for (int i = 0; i < 4; i++) x.set(i, pk[2 * s + i / 2][i % 2 * 2], pk[2 * s + i / 2][i % 2 * 2 + 1]);
                add<KEY_TERMS>(c, x, keys, KEY_BYTES, j + 16 * s);
            }
        }
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float2 d = pair_of(ridge[e], 8 * n + lane % 4 * 2), x = p[n / 2].get(n % 2 * 2 + e);
                c[n][2 * e] = fmaf(d.x, x.x, c[n][2 * e]);
                c[n][2 * e + 1] = fmaf(d.y, x.y, c[n][2 * e + 1]);
            }
    }
    // c += x Y[row..] for an operand x of 16 columns and 16 rows of Y, which has B_TERMS terms
    template <int B_TERMS>
    __device__ __forceinline__ void add(float (&c)[TILES][4], const Operand<TERMS>& x, u32 Y, u32 term_bytes,
                                        int row) const {
#pragma unroll
        for (int n = 0; n < TILES; n += 4)
            multiply_terms_of<TERMS, B_TERMS, 2>(c, n, x, [&](int t, int m, Bfloat16::B(&b)[2]) {
                load_b_columns<Bfloat16, Matrix>(b, Y + t * term_bytes, row, 8 * n + 16 * m, lane);
            });
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS) iterate(const __grid_constant__ SystemsArguments a) {
    extern __shared__ __align__(1024) char memory[];
    const i64 slot = blockIdx.x / (u32)a.heads;
    const u32 head = blockIdx.x % (u32)a.heads, state_head = head / (u32)a.group;
    const int n = sequence_of_slot(a.offsets, slot, a.chunks, a.sequences);
    Sequence s = sequence_of(a.offsets, n, a.T);
    const int start = (int)(slot - first_slot(a.offsets, n, a.chunks)) * C, T = min(s.T - start, C);
    if (T <= 0) return;
    s.first += start;
    float* numbers = (float*)(memory + NUMBERS);
    set_numbers(numbers, numbers_of(a.g, s, state_head), a.g.token, numbers_of(a.beta, s, state_head), a.beta.token, T);
    const float* Z = a.states + (slot * (a.heads / a.group) + state_head) * (i64)(K * K);
    bring<TERMS, WIDTH>(memory, Z_BYTES, [&](int r) { return r < K ? Z + r * K : nullptr; });
    const char* keys = rows_of(a.k, s, head);
    bring<KEY_TERMS, C>(memory + KEYS, KEY_BYTES,
                        [&](int r) { return r < T ? (const float*)(keys + r * a.k.token) : nullptr; });
    __syncthreads();

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // rows of more and of fewer keys side by side: warps 0 and 4 share a part of the multiprocessor
    const int first = 16 * (WARPS == 8 && warp > 3 ? 11 - warp : warp);
    const int row[2] = {first + lane / 4, first + lane / 4 + 8};
    if (first >= T) return;   // no barrier follows
    const char* ridge = rows_of(a.ridge, s, head);
    const u32 base = shared_address(memory);
    const Rows16 rows = {base,
                         base + KEYS,
                         {numbers},
                         first,
                         lane,
                         {(const float*)(ridge + min(row[0], T - 1) * a.ridge.token),
                          (const float*)(ridge + min(row[1], T - 1) * a.ridge.token)}};
    float2 *x = (float2*)(memory + X + warp * OWN_BYTES) + lane, *r = (float2*)(memory + R + warp * OWN_BYTES) + lane;
    Operand<TERMS> p[STEPS];
    float rr[2] = {};
    const char* q = rows_of(a.q, s, head);
#pragma unroll
    for (int i = 0; i < TILES * 2; i++) {   // pair i: of tile i / 2, row i % 2
        const int e = i % 2, column = i / 2 * 8 + lane % 4 * 2;
        const float2 y = row[e] < T ? pair_of((const float*)(q + row[e] * a.q.token), column) : float2{0.f, 0.f};
        x[32 * i] = {0.f, 0.f};
        r[32 * i] = y;
        p[i / 4].set(i % 4, y.x, y.y);
        rr[e] = fmaf(y.x, y.x, fmaf(y.y, y.y, rr[e]));
    }
    rr[0] = row_sum(rr[0]), rr[1] = row_sum(rr[1]);
    const float enough[2] = {a.enough * rr[0], a.enough * rr[1]};
    for (int step = 0; step < a.iterations; step++) {
        const bool going[2] = {!(rr[0] <= enough[0]), !(rr[1] <= enough[1])};   // NaN goes on
        if (!__any_sync(0xffffffffu, going[0] || going[1])) break;
        float c[TILES][4];
        rows.multiply(c, p);
        float along[2] = {}, before[2] = {rr[0], rr[1]};
#pragma unroll
        for (int i = 0; i < TILES * 2; i++) {
            const int e = i % 2;
            const float2 y = p[i / 4].get(i % 4);
            along[e] = fmaf(y.x, c[i / 2][2 * e], fmaf(y.y, c[i / 2][2 * e + 1], along[e]));
        }
        float far[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            along[e] = row_sum(along[e]);
            far[e] = going[e] ? over(rr[e], along[e]) : 0.f;
            rr[e] = 0.f;
        }
#pragma unroll
        for (int i = 0; i < TILES * 2; i++) {
            const int e = i % 2;
            const float2 y = p[i / 4].get(i % 4), at = x[32 * i];
            float2 rest = r[32 * i];
            x[32 * i] = {fmaf(far[e], y.x, at.x), fmaf(far[e], y.y, at.y)};
            if (going[e]) rest = {fmaf(-far[e], c[i / 2][2 * e], rest.x), fmaf(-far[e], c[i / 2][2 * e + 1], rest.y)};
            r[32 * i] = rest;
            c[i / 2][2 * e] = rest.x, c[i / 2][2 * e + 1] = rest.y;
            rr[e] = fmaf(rest.x, rest.x, fmaf(rest.y, rest.y, rr[e]));
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float sum = row_sum(rr[e]);
            rr[e] = going[e] ? sum : before[e];
        }
        const float ratio[2] = {over(rr[0], before[0]), over(rr[1], before[1])};
#pragma unroll
        for (int i = 0; i < TILES * 2; i++) {
            const int e = i % 2;
            const float2 y = p[i / 4].get(i % 4);
            const float2 next = {fmaf(ratio[e], y.x, c[i / 2][2 * e]), fmaf(ratio[e], y.y, c[i / 2][2 * e + 1])};
            p[i / 4].set(i % 4, going[e] ? next.x : y.x, going[e] ? next.y : y.y);
        }
    }
    char* out = rows_of(a.x, s, head);
#pragma unroll
    for (int i = 0; i < TILES * 2; i++)
        if (row[i % 2] < T) put_pair((float*)(out + row[i % 2] * a.x.token), i / 2 * 8 + lane % 4 * 2, x[32 * i]);
}
