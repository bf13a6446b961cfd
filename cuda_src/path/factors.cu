// Factors of the position maps of a block of 128 tokens and a head of keys (place.cuh): X, U, the keys at its end, D.
//
// With halves a and b of 64 tokens, A = (I + diag(beta) tril(W W^T, -1))^-1 diag(beta) of each, Z = W_b W_a^T:
//
//     X_aa = A_a tril(W_a K_a^T, -1),   X_ba = A_b (W_b K_a^T - Z X_aa),   X_bb = A_b tril(W_b K_b^T, -1)
//     U_a = A_a W_a,   U_b = A_b (W_b - Z U_a),   K~ = K - X^T W,   D = U^T W
//
// A warpgroup has a half. A is an operand in two terms of 16 bits. U takes the place of X, D that of K~, once these are
// on their way.
#include "path/place.cuh"
#include "path/inverse.cuh"

constexpr int AT_W = 0, AT_K = AT_W + Rows128::SIZE, AT_X = AT_K + Rows128::SIZE;
constexpr int AT_BETA = AT_X + Pairs::SIZE, AT_BARRIER = AT_BETA + BLOCK * 4;
static_assert(AT_BARRIER + 16 == LA_SHARED, "linattn_np/softmax/cuda/path_plan.py");
constexpr int PIECES = WIDTH_K / 64;   // of 64 columns

typedef float Tiles[8][4];   // of 64 rows and 64 columns

// A product of a warpgroup with 64 columns, begun and awaited: `begin` issues it
template <class F> LA_DEVICE void complete(Tiles& x, F begin) {
    accumulator_fence(x);
    products_begin();
    begin();
    products_commit();
    products_wait<0>();
    accumulator_fence(x);
}
// x = A B^T over the columns of rows of W, K; addresses of their first rows
LA_DEVICE void rows_product(Tiles& x, u32 a, u32 b) {
    const u64 from = panel_descriptor(a), with = panel_descriptor(b);
    complete(x, [&] {
#pragma unroll
        for (int d = 0; d < WIDTH_K / 16; d++)
            product_ABt(x, from + Rows128::along(d), with + Rows128::along(d), d > 0);
    });
}
// x (+)= A B: A of 64 columns in registers, B 64 rows of a panel
LA_DEVICE void issue_AB(Tiles& x, const u32 (&a)[4][4], u32 b, bool add) {
    const u64 with = panel_descriptor(b);
#pragma unroll
    for (int d = 0; d < 4; d++) product_AB(x, a[d], with + Rows128::across(d), add || d > 0);
}
// x (+)= A^T B over 64 rows of a panel each
LA_DEVICE void issue_AtB(Tiles& x, u32 a, u32 b, bool add) {
    const u64 from = panel_descriptor(a), with = panel_descriptor(b);
#pragma unroll
    for (int d = 0; d < 4; d++) product_AtB(x, from + Rows128::across(d), with + Rows128::across(d), add || d > 0);
}

struct HalfBlock {
    const u32 shared;
    const int group, warp, lane, row, column;   // row, column: the lane's first in 16 x 8
    __device__ __forceinline__ HalfBlock(u32 shared, int thread)
        : shared(shared),
          group(__shfl_sync(0xffffffffu, thread >> 7, 0)),
          warp(__shfl_sync(0xffffffffu, thread >> 5 & 3, 0)),
          lane(thread & 31),
          row(warp * 16 + (lane >> 2)),
          column((lane & 3) * 2) {}

    // rows of a half, in panel p
    __device__ __forceinline__ u32 half_of(u32 tile, int half, int p) const {
        return shared + tile + p * Rows128::PANEL + half * 64 * 128;
    }
    // lane's two elements of row `row` + 8 h, columns 8 n + `column`, of a panel's half
    __device__ __forceinline__ u32 at(u32 half, int n, int h) const {
        return half + (row + 8 * h) * 128 + ((n ^ (row & 7)) << 4) + column * 2;
    }

    __device__ __forceinline__ void fence() const {   // the group's stores are visible to its products
        publish_shared();
        group_barrier(group);
    }
    // 64 x 64 numbers to a panel's half
    __device__ __forceinline__ void put(u32 half, const Tiles& x) const {
#pragma unroll
        for (int n = 0; n < 8; n++) {
            store_shared_u32(at(half, n, 0), pack_bf16(x[n][0], x[n][1]));
            store_shared_u32(at(half, n, 1), pack_bf16(x[n][2], x[n][3]));
        }
    }
    // x = the old value + sign x
    __device__ __forceinline__ void add_there(u32 half, Tiles& x, float sign) const {
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 y = __float_as_uint(load_shared(at(half, n, h)));
                x[n][2 * h] = low_bf16(y) + sign * x[n][2 * h];
                x[n][2 * h + 1] = high_bf16(y) + sign * x[n][2 * h + 1];
            }
    }
    __device__ __forceinline__ void pack_negative(u32 (&to)[4][4], const Tiles& x) const {
#pragma unroll
        for (int d = 0; d < 4; d++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                to[d][i] = pack_bf16(-x[2 * d + (i >> 1)][2 * (i & 1)], -x[2 * d + (i >> 1)][2 * (i & 1) + 1]);
    }
    // A of this half: L, its inverse, then operands; X serves as scratch
    __device__ __forceinline__ void invert(u32 (&high)[4][4], u32 (&low)[4][4], const float* beta,
                                           float* diagonals) const {
        const u32 lower = shared + AT_X + group * 64 * 128, other = lower + Pairs::PANEL;
        Tiles x;
        rows_product(x, half_of(AT_W, group, 0), half_of(AT_W, group, 0));
        store_lower<false>(x, lower, diagonals, beta, warp, lane);
        group_barrier(group);
        if (warp < 2)
            invert_diagonal(lower, diagonals + (2 * warp + (lane >> 4)) * (DIAGONAL / 4), 2 * warp + (lane >> 4), lane);
        group_barrier(group);
        u32 rest[4][4];
        store_inverse_high<false>(rest, lower, other, beta, warp, lane);
        group_barrier(group);   // L has been read
#pragma unroll
        for (int i = 0; i < 4; i++) store_block(lower, i, warp, rest[i], lane);
        group_barrier(group);
#pragma unroll
        for (int d = 0; d < 4; d++) {
            load_matrix(high[d], other + rows_at(16 * warp, 16 * d, lane));
            load_matrix(low[d], lower + rows_at(16 * warp, 16 * d, lane));
        }
        group_barrier(group);   // X is free
    }
    // A times 64 rows of a panel, in their place
    __device__ __forceinline__ void apply_in_place(const u32 (&high)[4][4], const u32 (&low)[4][4], u32 half) const {
        Tiles x;
        fence();
        complete(x, [&] {
            issue_AB(x, high, half, false);
            issue_AB(x, low, half, true);
        });
        group_barrier(group);   // all have read it
        put(half, x);
    }
};

// Factors of the products of a half: A in two terms, -Z; where the blocks of X are, and the half's own
struct Operands {
    u32 high[4][4], low[4][4], cross[4][4];
    u32 x_own, x_aa, x_ba, x_bb;
};

LA_DEVICE void clear_tail(u32 shared, int own) {
    if (own < BLOCK) {
        clear_rows_from<Rows128>(shared + AT_W, own);
        clear_rows_from<Rows128>(shared + AT_K, own);
        publish_shared();
    }
}
// X of a half with itself, zeros above; -Z
LA_DEVICE void make_own_pairs(const HalfBlock& me, Operands& by) {
    Tiles x;
    rows_product(x, me.half_of(AT_W, me.group, 0), me.half_of(AT_K, me.group, 0));
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (n * 8 + me.column + (e & 1) >= me.row + 8 * (e >> 1)) x[n][e] = 0.f;
    me.put(by.x_own, x);
    me.apply_in_place(by.high, by.low, by.x_own);
    if (me.group == 0) {
#pragma unroll
        for (int n = 0; n < 8; n++) x[n][0] = x[n][1] = x[n][2] = x[n][3] = 0.f;
        me.put(me.shared + AT_X + Pairs::PANEL, x);
    } else {
        rows_product(x, me.half_of(AT_W, 1, 0), me.half_of(AT_W, 0, 0));
        me.pack_negative(by.cross, x);
    }
    publish_shared();
    __syncthreads();
}
// X of the second half with the first
LA_DEVICE void make_cross_pairs(const HalfBlock& me, const Operands& by) {
    if (me.group == 1) {
        Tiles x;
        rows_product(x, me.half_of(AT_W, 1, 0), me.half_of(AT_K, 0, 0));
        complete(x, [&] { issue_AB(x, by.cross, by.x_aa, true); });
        me.put(by.x_ba, x);
        me.apply_in_place(by.high, by.low, by.x_ba);
    }
    publish_shared();
    __syncthreads();
}
// The keys at the end, in their place
LA_DEVICE void map_keys(const HalfBlock& me, const Operands& by) {
    Tiles x;
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        complete(x, [&] {
            issue_AtB(x, me.group ? by.x_bb : by.x_aa, me.half_of(AT_W, me.group, p), false);
            if (me.group == 0) issue_AtB(x, by.x_ba, me.half_of(AT_W, 1, p), true);
        });
        me.add_there(me.half_of(AT_K, me.group, p), x, -1.f);
        me.put(me.half_of(AT_K, me.group, p), x);
    }
    publish_shared();
    __syncthreads();
}
// U in the place of X
LA_DEVICE void make_u(const HalfBlock& me, const Operands& by) {
    Tiles x;
    if (me.group == 0)
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            complete(x, [&] {
                issue_AB(x, by.high, me.half_of(AT_W, 0, p), false);
                issue_AB(x, by.low, me.half_of(AT_W, 0, p), true);
            });
            me.put(me.half_of(AT_X, 0, p), x);
        }
    publish_shared();
    __syncthreads();
    if (me.group == 1)
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            complete(x, [&] { issue_AB(x, by.cross, me.half_of(AT_X, 0, p), false); });
            me.add_there(me.half_of(AT_W, 1, p), x, 1.f);
            me.put(me.half_of(AT_X, 1, p), x);
            me.apply_in_place(by.high, by.low, me.half_of(AT_X, 1, p));
        }
    publish_shared();
    __syncthreads();
}
// D in the place of the keys
LA_DEVICE void make_map(const HalfBlock& me) {
    Tiles x;
    if (me.group < PIECES)
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            complete(x, [&] {
                issue_AtB(x, me.half_of(AT_X, 0, me.group), me.half_of(AT_W, 0, p), false);
                issue_AtB(x, me.half_of(AT_X, 1, me.group), me.half_of(AT_W, 1, p), true);
            });
            me.put(me.shared + AT_K + p * Maps::PANEL + me.group * 64 * 128, x);
        }
    publish_shared();
    __syncthreads();
}
LA_DEVICE void compute(const Stored& stored, int block, unsigned char* memory, int own) {
    const u32 shared = shared_address(memory);
    const HalfBlock me(shared, threadIdx.x);
    float* const beta = (float*)(memory + AT_BETA) + me.group * 64;
    float* const diagonals = (float*)(memory + AT_X + me.group * 64 * 128 + Pairs::PANEL);
    clear_tail(shared, own);
    __syncthreads();   // beta is there
    Operands by;
    me.invert(by.high, by.low, beta, diagonals);
    by.x_own = shared + AT_X + me.group * (Pairs::PANEL + 64 * 128);
    by.x_aa = shared + AT_X;
    by.x_ba = by.x_aa + 64 * 128;
    by.x_bb = by.x_ba + Pairs::PANEL;
    make_own_pairs(me, by);
    make_cross_pairs(me, by);
    map_keys(me, by);
    if (threadIdx.x == 0) {
        run_out(stored.keys(0, block), shared + AT_K, Rows128::SIZE);
        run_out(stored.factors(block), shared + AT_X, Pairs::SIZE);
        out_commit();
        out_read();
    }
    __syncthreads();   // X and K~ are free
    make_u(me, by);
    make_map(me);
    if (threadIdx.x == 0) {
        run_out(stored.factors(block) + Pairs::SIZE, shared + AT_X, Rows128::SIZE);
        run_out(stored.maps(0, block), shared + AT_K, Maps::SIZE);
        out_commit();
        out_read();
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS, 2) factors(const __grid_constant__ PathArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory), barrier = shared + AT_BARRIER;
    const Place place(a.of, a.key_heads);
    const int i0 = place.tile * BLOCK, own = min(place.T - i0, BLOCK);
    if (own <= 0) return;
    if (threadIdx.x == 0) {
        barrier_init(barrier, 1);
        barriers_made();
        barrier_expect(barrier, 2 * Rows128::SIZE);
        tile_in<Rows128>(shared + AT_W, a.w, barrier, place, place.head, i0);
        tile_in<Rows128>(shared + AT_K, a.of.k, barrier, place, place.head, i0);
    }
    if (threadIdx.x < BLOCK)
        ((float*)(memory + AT_BETA))[threadIdx.x] = threadIdx.x < own ? strength(a, place, i0 + threadIdx.x) : 0.f;
    __syncthreads();
    barrier_wait(barrier, 0);
    compute(Stored(a, place, place.head), place.tile, memory, own);
}
