// The delta rule by warpgroup products: the part that one block traverses, the checkpoint of a chunk, operands and
// products.
//
// Chunks of 64 tokens; keys and values are in tiles of 128 columns, zeros past LA_K and LA_V. States are transposed,
// value row by key column. With b the running sum of log decays of a chunk in base 2, e_i = 2^b_i, d_j = 2^(b_end -
// b_j), E_ij = 2^(b_i - b_j) for j <= i, and S the state before the chunk:
//
//     A = E . sqrt(beta_i) T_inv sqrt(beta_j),   T_inv = (1 + strict lower of sqrt(beta_i) k_i.k_j sqrt(beta_j))^-1
//     U = (V^T - e S K^T) A^T                new values, transposed
//     out^T = scale e S Q^T + U P^T,         P = scale E . lower of Q K^T
//     S <- e_last S + (U d) K
//
// With LA_UNIT q and k stand for q^ = q / |q| and k^ = k / |k|, and the tiles hold them as they came: their lengths are
// factors of rows, rq_i = 1 / |q_i| and rk_i = 1 / |k_i|, where |x| is sqrt(x.x + eps). k has its factor in e and d, (e
// rk) and (d rk) in the checkpoint; q's is found from its tile.
#pragma once
#include "attention/group.cuh"
#include "tile/bulk.cuh"
#include "tile/wgmma_wide.cuh"
#include "arguments/matrix_state/DeltaArguments.cuh"   // after TensorMap

#ifndef LA_UNIT   // 1: q and k are divided by their length
#define LA_UNIT 0
#endif

#ifndef LA_STEPS   // tokens have so many steps; the first decays, the last reads: q, g, out have a row a
                   // token
#define LA_STEPS 1
#endif

constexpr int C = 64, WIDE = 128;
static_assert(C % LA_STEPS == 0, "a chunk holds whole tokens");
typedef Panels<WIDE, C> Tokens;   // q, k, v, dout, ... of a chunk
typedef Panels<C, C> Square;      // A, P, ... of a chunk
static_assert(LA_K <= WIDE && LA_V <= WIDE && Element::BYTES == 2, "a tile holds whole rows");

// One sequence and head, cut into segments of chunks
struct DeltaTraversal {
    Sequence sequence;
    int head, segment, first, steps, last,
        row;           // first chunk, number of chunks; the sequence's last segment; batch row
    i64 slot, block;   // of the sequence and head; number of its first chunk among all

    __device__ __forceinline__ DeltaTraversal(const DeltaArguments& a, int number, int pieces, int length) {
        segment = number % pieces;
        number /= pieces;
        head = number % a.heads;
        const int n = number / a.heads;
        sequence = sequence_of(a.offsets, n, a.T);
        row = (int)sequence.row;
        const int total = (sequence.T + C - 1) / C;
        last = max(total - 1, 0) / length;
        slot = (i64)n * a.heads + head;
        block = head * a.slots + (a.offsets ? sequence.first / C + n : (i64)n * ((a.T + C - 1) / C));
        place(segment, length);
    }
    __device__ __forceinline__ void place(int of, int length) {
        segment = of;
        first = of * length;
        steps = min((sequence.T + C - 1) / C - first, length);
    }
    __device__ __forceinline__ int token(int chunk) const { return (int)sequence.first + chunk * C; }   // in the tensor
    // tokens of a chunk that are the sequence's own; the others are cleared where they are another sequence's
    __device__ __forceinline__ int own(const DeltaArguments& a, int chunk) const {
        return a.offsets ? min(C, sequence.T - chunk * C) : C;
    }
};

// The checkpoint of a chunk: A as the products read it, then e, d, b and beta, 64 floats each; with LA_UNIT e rk, d rk,
// b, rk, beta and, once the chain in reverse has been there, rq
constexpr int AT_E = Square::SIZE, AT_D = AT_E + C * 4, AT_B = AT_D + C * 4, AT_KEY = AT_B + C * 4,
              AT_BETA = AT_KEY + LA_UNIT * C * 4;
constexpr int AT_QUERY = AT_BETA + C * 4, CHECKPOINT = AT_QUERY + LA_UNIT * C * 4,
              CHECKPOINT_SUMS = AT_B + 2 * C * 4;   // CHECKPOINT_SUMS: as far as the fourth
constexpr int STATE = WIDE * WIDE;                  // floats of a state of a segment
constexpr int END = WIDE * WIDE * 2;                // bytes of a state of a chunk in bfloat16: two panels of 128 rows
constexpr int ENDS = END + 8 * C * 4;               // and behind it dW_i.v_i, over 16 value columns each
static_assert(LA_CHECKPOINT == CHECKPOINT && LA_ENDS == ENDS && LA_STATE == STATE, "sizes that the host allocates by");

// a chunk's rows of a tensor, both panels
LA_DEVICE void tile_in(u32 to, const TensorMap& map, u32 barrier, int head, int token, int batch) {
    box_in(to, map, barrier, 0, head, token, batch);
    box_in(to + Tokens::PANEL, map, barrier, 64, head, token, batch);
}
// the same of q or dout
LA_DEVICE void token_tile_in(u32 to, const TensorMap& map, u32 barrier, int head, int token, int batch) {
#if LA_STEPS > 1
    box_in_steps(to, map, barrier, 0, head, LA_STEPS, token, batch);
    box_in_steps(to + Tokens::PANEL, map, barrier, 64, head, LA_STEPS, token, batch);
#else
    tile_in(to, map, barrier, head, token, batch);
#endif
}
// rows of an array with a row a token, so that step t's, where it is a token's last, is t steps of a.token further
LA_DEVICE char* token_rows(const Rows& x, const Sequence& s, int head) {
    return own_rows(x, s, head) - (LA_STEPS - 1) * x.token;
}

// rows from `own` on of PANELS panels become zeros
template <int THREADS, int PANELS, int ROLL = 16> LA_DEVICE void clear_rows(u32 panels, int own, int thread) {
#pragma unroll ROLL
    for (int i = own * 8 + thread; i < C * 8; i += THREADS)
#pragma unroll
        for (int p = 0; p < PANELS; p++)
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(panels + p * Tokens::PANEL + i * 16), "r"(0)
                         : "memory");
}

LA_DEVICE float2 pair_at(const float* x, int i) { return *(const float2*)(x + i); }
// 1 / sqrt(square + eps); without eps a row of zeros stays as it is
LA_DEVICE float over_length(float square, float eps) {
    square += eps;
    return square == 0.f ? 1.f : rsqrtf(square);
}
// e_last from e and d of a chunk
LA_DEVICE float last_decay(const float* e) { return LA_UNIT ? __fdividef(e[C - 1], e[2 * C - 1]) : e[C - 1]; }
LA_DEVICE float decay_between(float bi, float bj) { return exp2_approx(fminf(bi - bj, 0.f)); }
template <int N> LA_DEVICE void scale_tiles(float (&x)[N][4], float y) {
#pragma unroll
    for (int i = 0; i < N * 4; i++) x[i >> 2][i & 3] *= y;
}
// accumulators (row, token) as operands of 16 tokens each, token j times f_j; f points at this lane's column
LA_DEVICE void token_operands(u32 (&a)[4][4], const float (&x)[8][4], const float* f, float sign = 1.f) {
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float2 y = pair_at(f, 16 * k + 8 * h);
            const float (&z)[4] = x[2 * k + h];
            a[k][2 * h] = pack_bf16(sign * y.x * z[0], sign * y.y * z[1]);
            a[k][2 * h + 1] = pack_bf16(sign * y.x * z[2], sign * y.y * z[3]);
        }
}
LA_DEVICE void token_operands(u32 (&a)[4][4], const float (&x)[8][4]) {
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            a[k][2 * h] = pack_bf16(x[2 * k + h][0], x[2 * k + h][1]);
            a[k][2 * h + 1] = pack_bf16(x[2 * k + h][2], x[2 * k + h][3]);
        }
}
// operands V^T - e S K^T of a warp's 16 value rows; predicted is S K^T, e points at this lane's column
LA_DEVICE void error_operands(u32 (&a)[4][4], const float (&predicted)[8][4], u32 values, int column, const float* e,
                              int lane, bool with_values = true) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 v[4] = {0, 0, 0, 0};
        if (with_values) load_operand<Tokens>(v, values, k * 16, column, lane);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float2 y = pair_at(e, 16 * k + 8 * h);
            const float (&z)[4] = predicted[2 * k + h];
            a[k][2 * h] = pack_bf16(low_bf16(v[2 * h]) - y.x * z[0], high_bf16(v[2 * h]) - y.y * z[1]);
            a[k][2 * h + 1] = pack_bf16(low_bf16(v[2 * h + 1]) - y.x * z[2], high_bf16(v[2 * h + 1]) - y.y * z[3]);
        }
    }
}
// products with N operands of 16 columns each: C = A B (panels read across), C += A B
template <int N> LA_DEVICE void multiply_AB(float (&c)[8][4], const u32 (&a)[N][4], u64 b) {
#pragma unroll
    for (int k = 0; k < N; k++) product_AB(c, a[k], b + Tokens::across(k), k > 0);
}
template <int N> LA_DEVICE void add_AB(float (&c)[8][4], const u32 (&a)[N][4], u64 b) {
#pragma unroll
    for (int k = 0; k < N; k++) product_AB(c, a[k], b + Tokens::across(k), true);
}
LA_DEVICE void add_AB_wide(float (&c)[16][4], const u32 (&a)[4][4], u64 b) {
#pragma unroll
    for (int k = 0; k < 4; k++) product_AB_wide(c, a[k], b + Tokens::across(k));
}

// the same, begun: accumulators that nothing else reads or writes until the products have been waited for
template <int N> LA_DEVICE void begin_ABt(float (&c)[8][4], const u32 (&a)[N][4], u64 b) {
    accumulator_fence(c);
    products_begin();
    multiply_ABt<Tokens>(c, a, b);
    products_commit();
}
template <int N> LA_DEVICE void begin_AB(float (&c)[8][4], const u32 (&a)[N][4], u64 b) {
    accumulator_fence(c);
    products_begin();
    multiply_AB(c, a, b);
    products_commit();
}
LA_DEVICE void begin_add_AB(float (&c)[16][4], const u32 (&a)[4][4], u64 b) {
    accumulator_fence(c);
    products_begin();
    add_AB_wide(c, a, b);
    products_commit();
}
// waits for all but N groups of products; the last one waited for is in c
template <int N, int TILES> LA_DEVICE void end_products(float (&c)[TILES][4]) {
    products_wait<N>();
    accumulator_fence(c);
}

// 1 / |x| of the rows of a warp's 16 that a lane has in accumulators, and of row lane / 2
struct Lengths {
    float own, of[2];
    __device__ __forceinline__ Lengths(u32 tile, float eps, int warp, int lane) {
        const u32 row = tile + (lane & 1) * Tokens::PANEL + (16 * warp + (lane >> 1)) * 128;
        float square = 0.f;
#pragma unroll
        for (int p = 0; p < 8; p++) {
            u32 x[4];
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                         : "r"(row + ((p + lane) & 7) * 16));
#pragma unroll
            for (int i = 0; i < 4; i++) square += low_bf16(x[i]) * low_bf16(x[i]) + high_bf16(x[i]) * high_bf16(x[i]);
        }
        own = over_length(square + __shfl_xor_sync(0xffffffffu, square, 1), eps);
#pragma unroll
        for (int m = 0; m < 2; m++) of[m] = __shfl_sync(0xffffffffu, own, 2 * ((lane >> 2) + 8 * m));
    }
};

// P_ij = scale E_ij q_i.k_j for j <= i, 0 above, by a warpgroup; sums: the b_i. With LA_UNIT P has rq_i and rk_j, which
// is in the checkpoint `block`, e_i rq_i takes the place of b_i, and rq goes to the checkpoint with STORES_LENGTHS.
template <bool STORES_LENGTHS> LA_DEVICE void gram_of_chunk(u32 q, u32 k, u32 gram, float* sums,
                                                            const DeltaArguments& a, int warp, int lane, char* block) {
    const u64 left = panel_descriptor(q), right = panel_descriptor(k);
    const int row = lane >> 2, column = (lane & 3) * 2;
#if LA_UNIT
    float2 keys[8];   // rk, loaded early
#pragma unroll
    for (int n = 0; n < 8; n++) keys[n] = pair_at((const float*)(block + AT_KEY), 8 * n + column);
#endif
    float p[8][4];
    accumulator_fence(p);
    products_begin();
    multiply_ABt<Tokens>(p, left, right);
    products_commit();
    const float bi[2] = {sums[16 * warp + row], sums[16 * warp + row + 8]};
    float to[2] = {a.scale, a.scale};
#if LA_UNIT
    const Lengths lengths(q, a.eps, warp, lane);
    if (STORES_LENGTHS && !(lane & 1)) ((float*)(block + AT_QUERY))[16 * warp + (lane >> 1)] = lengths.own;
    to[0] *= lengths.of[0];
    to[1] *= lengths.of[1];
#endif
    end_products<0>(p);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 x[4] = {0, 0, 0, 0};
        if (j <= warp)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float2 bj = pair_at(sums, 16 * j + 8 * h + column);
#if LA_UNIT
                const float2 rk = keys[2 * j + h];
#else
                const float2 rk = {1.f, 1.f};
#endif
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    const float (&y)[4] = p[2 * j + h];
                    const float u = y[2 * m] * (to[m] * rk.x) * decay_between(bi[m], bj.x),
                                v = y[2 * m + 1] * (to[m] * rk.y) * decay_between(bi[m], bj.y);
                    const int ahead = 8 * h + column - row - 8 * m;   // of the row's own column
                    x[2 * h + m] = pack_bf16(j < warp || ahead <= 0 ? u : 0.f, j < warp || ahead < 0 ? v : 0.f);
                }
            }
        store_matrix(gram + Square::block_piece(16 * warp, 2 * j, lane & 15, lane >> 4), x[0], x[1], x[2], x[3]);
    }
#if LA_UNIT
    group_barrier(2);   // all have read the sums
    if ((lane & 3) == 0)
#pragma unroll
        for (int m = 0; m < 2; m++) sums[16 * warp + row + 8 * m] = exp2_approx(fminf(bi[m], 0.f)) * lengths.of[m];
#endif
}
