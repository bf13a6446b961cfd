// Gradients of the keys, directions and strengths of a block of 128 tokens and a head of keys, from those of what
// factors.cu made: dK~ and dD (groups_adjoint.cu) and dX, dU, dW, dK of the block's own pairs (diagonal.cu), summed
// over the heads of queries.
//
//     dX <- dX - tril(W dK~^T, -1),   dU <- dU + W dD^T,   dW <- dW + U dD - X dK~
//     F = (I + diag(beta) N)^-T [dU, dX],     B = diag(beta) F,     B_X <- tril(B_X, -1),
//     dN = -tril(B_U U^T + B_X X^T, -1)
//     dK <- dK + dK~ + B_X^T W,   dW <- dW + B_U + B_X K + (dN + dN^T) W,   dbeta_t = (<F_U, U> + <F_X, X>)_t / beta_t
//
// With halves a and b of 64 tokens, S = (I + diag(beta) N)^-1 of each and Z = W_b W_a^T: F_b = S_b^T dY_b, then
// F_a = S_a^T (dY_a - Z^T B_b). A warpgroup has a half. S is an operand in two terms of 16 bits. No strength is 0 here.
#include "path/traversal.cuh"
#include "path/inverse.cuh"

constexpr int SLOT = Pairs::SIZE, AT_W = 0, AT_K = SLOT, AT_X = 2 * SLOT, AT_U = 3 * SLOT, AT_GK = 4 * SLOT,
              AT_GD = 5 * SLOT, AT_S = 6 * SLOT;
constexpr int AT_DX = AT_GK, AT_DU = AT_GD, AT_DN = AT_K;   // in the place of data no longer read
constexpr int AT_BETA = 7 * SLOT, AT_BARRIERS = AT_BETA + BLOCK * 4;
static_assert(AT_BARRIERS + 16 == LA_SHARED, "linattn_np/softmax/cuda/path_plan.py");

struct Tiles {   // of a block and a head of keys, and their loads
    const PathArguments& a;
    const Place& place;
    unsigned char* const memory_of;
    const u32 shared;
    const Lane me;
    const Stored stored;
    const int i0, own;
    __device__ __forceinline__ Tiles(const PathArguments& a, const Place& place, unsigned char* memory)
        : a(a),
          place(place),
          memory_of(memory),
          shared(shared_address(memory)),
          me(threadIdx.x),
          stored(a, place, place.head),
          i0(place.tile * BLOCK),
          own(min(place.T - i0, BLOCK)) {}

    __device__ __forceinline__ u32 barrier() const { return shared + AT_BARRIERS; }
    __device__ __forceinline__ u32 rows(int tile) const {
        return shared + tile + me.group * 64 * 128;
    }   // of this group, read along
    __device__ __forceinline__ u32 half(int tile, int half) const { return shared + tile + half * 64 * 128; }
    __device__ __forceinline__ const float* beta() const { return (const float*)(memory_of + AT_BETA) + me.group * 64; }
    __device__ __forceinline__ void all() const {
        publish_shared();
        __syncthreads();
    }
    __device__ __forceinline__ void begin_loads() const {   // one thread
        barrier_init(barrier(), 1);
        barriers_made();
        barrier_expect(barrier(), 4 * Rows128::SIZE + Pairs::SIZE + Maps::SIZE);
        tile_in<Rows128>(shared + AT_W, a.w, barrier(), place, place.head, i0);
        tile_in<Rows128>(shared + AT_K, a.of.k, barrier(), place, place.head, i0);
        run_in(shared + AT_X, stored.factors(place.tile), Pairs::SIZE, barrier());
        run_in(shared + AT_U, stored.factors(place.tile) + Pairs::SIZE, Rows128::SIZE, barrier());
        run_in(shared + AT_GK, stored.dkeys(0, place.head, a.key_heads, place.tile), Rows128::SIZE, barrier());
        run_in(shared + AT_GD, stored.map_of(a.dmaps, 0, place.tile), Maps::SIZE, barrier());
        run_prefetch(stored.parts(place.head, place.tile), PARTS);
    }
};

struct Adjoint : Tiles {
    using Tiles::Tiles;

    // S of this half: its nearest 16 bits to the second panel of AT_S, the rest to the first
    __device__ __forceinline__ void invert() const {
        const u32 lower = half(AT_S, me.group), other = lower + Pairs::PANEL;
        float* const diagonals = (float*)(memory_of + AT_S + me.group * 64 * 128 + Pairs::PANEL);
        float x[8][4];
        clear_tiles(x);
        complete_products(x, [&] { add_ABt<Rows128, Rows128>(x, rows(AT_W), rows(AT_W)); });
        store_lower<true>(x, lower, diagonals, beta(), me.warp, me.lane);
        group_barrier(me.group);
        if (me.warp < 2)
            invert_diagonal(lower, diagonals + (2 * me.warp + (me.lane >> 4)) * (DIAGONAL / 4),
                            2 * me.warp + (me.lane >> 4), me.lane);
        group_barrier(me.group);
        u32 rest[4][4];
        store_inverse_high<true>(rest, lower, other, beta(), me.warp, me.lane);
        group_barrier(me.group);   // L has been read
#pragma unroll
        for (int i = 0; i < 4; i++) store_block(lower, i, me.warp, rest[i], me.lane);
    }
    // x (+)= of this half S^T times its rows of a tile
    template <class X, int N> __device__ __forceinline__ void solve(float (&x)[N][4], int tile) const {
        const u64 low = panel_descriptor(half(AT_S, me.group)),
                  high = panel_descriptor(half(AT_S, me.group) + Pairs::PANEL), with = across_descriptor<X>(rows(tile));
        clear_tiles(x);
        complete_products(x, [&] {
#pragma unroll
            for (int d = 0; d < 4; d++) add_rows_across<1>(x, high + X::across(d), with + X::across(d));
#pragma unroll
            for (int d = 0; d < 4; d++) add_rows_across<1>(x, low + X::across(d), with + X::across(d));
        });
    }
    // dW without the terms of B; dX and dU to shared memory
    __device__ __forceinline__ void begin_gradients(float (&dw)[WIDTH_K / 8][4], const char* parts) const {
        clear_tiles(dw);
        add_tile<Rows128>(dw, parts + Pairs::SIZE + Rows128::SIZE, 1.f, me);
        {
            u32 x[BLOCK / 16][4];   // -X
#pragma unroll
            for (int d = 0; d < BLOCK / 16; d++) {
                load_matrix(x[d], shared + AT_X + Pairs::block_piece(me.first(), 2 * d, me.lane & 15, me.lane >> 4));
#pragma unroll
                for (int i = 0; i < 4; i++) x[d][i] ^= 0x80008000u;
            }
            complete_products(dw, [&] {
                multiply_rows_AB<Rows128>(dw, x, shared + AT_GK);
                add_AB<Rows128, Maps>(dw, rows(AT_U), shared + AT_GD);
            });
        }
        {
            float dx[BLOCK / 8][4];
            clear_tiles(dx);
            add_tile<Pairs>(dx, parts, -1.f, me);
            complete_products(dx, [&] { add_ABt<Rows128, Rows128>(dx, rows(AT_W), shared + AT_GK); });
            keep_lower<false>(dx, me);
            __syncthreads();   // dK~ has been read
            put_rows<Pairs>(shared + AT_DX, dx, -1.f, me);
        }
        float du[WIDTH_K / 8][4];
        clear_tiles(du);
        add_tile<Rows128>(du, parts + Pairs::SIZE, 1.f, me);
        complete_products(du, [&] { add_ABt<Rows128, Maps>(du, rows(AT_W), shared + AT_GD); });
        __syncthreads();   // dD has been read
        put_rows<Rows128>(shared + AT_DU, du, 1.f, me);
    }
    // dY of the first half less Z^T B of the second
    template <class X, int N> __device__ __forceinline__ void subtract_later(const u32 (&z)[4][4], int tile) const {
        float x[N][4];
        clear_tiles(x);
        add_rows<X>(x, shared + tile, me);
        const u64 with = across_descriptor<X>(half(tile, 1));
        complete_products(x, [&] {
#pragma unroll
            for (int d = 0; d < 4; d++) rows_AB(x, z[d], with + X::across(d));
        });
        put_rows<X>(shared + tile, x, 1.f, me);
        publish_shared();
        group_barrier(me.group);
    }
    // <F, Y> of the two rows, Y in a tile
    template <class X, int N> __device__ __forceinline__ void add_dots(float (&sums)[2], const float (&f)[N][4],
                                                                       int tile) const {
        each_pair<X>(f, me, [&](u32 at, float u, float v, int h) {
            const u32 y = __float_as_uint(load_shared(shared + tile + at));
            sums[h] += u * low_bf16(y) + v * high_bf16(y);
        });
    }
    // F of this half from dY; B in its place and the sum of dW; dbeta
    __device__ __forceinline__ void solve_half(float (&dw)[WIDTH_K / 8][4]) const {
        const int row = me.row & 63;
        const float strength[2] = {beta()[row], beta()[row + 8]};
        float sums[2] = {0.f, 0.f};
        {
            float f[WIDTH_K / 8][4];
            solve<Rows128>(f, AT_DU);
            add_dots<Rows128>(sums, f, AT_U);
#pragma unroll
            for (int n = 0; n < WIDTH_K / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    f[n][e] *= strength[e >> 1];
                    dw[n][e] += f[n][e];
                }
            group_barrier(me.group);   // dY has been read
            put_rows<Rows128>(shared + AT_DU, f, 1.f, me);
        }
        float f[BLOCK / 8][4];
        solve<Pairs>(f, AT_DX);
        keep_lower<false>(f, me);
        add_dots<Pairs>(sums, f, AT_X);
#pragma unroll
        for (int n = 0; n < BLOCK / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) f[n][e] *= strength[e >> 1];
        group_barrier(me.group);
        put_rows<Pairs>(shared + AT_DX, f, 1.f, me);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float sum = row_sum(sums[h]);
            const int i = me.row + 8 * h;
            if ((me.lane & 3) == 0 && i < own)
                a.dbeta[((i64)place.batch * a.of.T + place.first + i0 + i) * a.key_heads + place.head] =
                    sum / strength[h];
        }
    }
    __device__ __forceinline__ void solve_all(float (&dw)[WIDTH_K / 8][4]) const {
        if (me.group == 1) solve_half(dw);
        all();
        if (me.group == 0) {
            u32 z[4][4];
            float x[8][4];
            clear_tiles(x);
            complete_products(x, [&] { add_ABt<Rows128, Rows128>(x, rows(AT_W), half(AT_W, 1)); });
            negate(x);
            pack_operands(z, x);
            subtract_later<Rows128, WIDTH_K / 8>(z, AT_DU);
            subtract_later<Pairs, BLOCK / 8>(z, AT_DX);
            solve_half(dw);
        }
        all();
    }
    // the terms that are linear in B
    __device__ __forceinline__ void finish(float (&dw)[WIDTH_K / 8][4], const char* parts) const {
        const int panel = me.group * Pairs::PANEL;
        complete_products(dw, [&] { add_AB<Pairs, Rows128>(dw, rows(AT_DX), shared + AT_K); });
        {
            float dk[WIDTH_K / 8][4];
            clear_tiles(dk);
            complete_products(dk, [&] { add_AtB<Rows128>(dk, shared + AT_DX + panel, shared + AT_W); });
            add_tile<Rows128>(dk, parts + Pairs::SIZE + 2 * Rows128::SIZE, 1.f, me);
            add_tile<Rows128>(dk, stored.dkeys(0, place.head, a.key_heads, place.tile), 1.f, me);
            store_array<LA_K>(rows_of(a.dk, place, place.head) + i0 * a.dk.token, a.dk.token, own, dk, me);
        }
        float dn[BLOCK / 8][4];
        clear_tiles(dn);
        complete_products(dn, [&] {
            add_ABt<Rows128, Rows128>(dn, rows(AT_DU), shared + AT_U);
            add_ABt<Pairs, Pairs>(dn, rows(AT_DX), shared + AT_X);
        });
        keep_lower<false>(dn, me);
        __syncthreads();   // the keys have been read
        put_rows<Pairs>(shared + AT_DN, dn, -1.f, me);
        all();
        complete_products(dw, [&] {
            add_AB<Pairs, Rows128>(dw, rows(AT_DN), shared + AT_W);
            add_AtB<Rows128>(dw, shared + AT_DN + panel, shared + AT_W);
        });
        store_array<LA_K>(rows_of(a.dw, place, place.head) + i0 * a.dw.token, a.dw.token, own, dw, me);
    }
    __device__ __forceinline__ void run() const {
        const char* const parts = stored.parts(place.head, place.tile);
        float dw[WIDTH_K / 8][4];
        barrier_wait(barrier(), 0);
        if (own < BLOCK) {
            clear_rows_from<Rows128>(shared + AT_W, own);
            clear_rows_from<Rows128>(shared + AT_K, own);
            all();
        }
        invert();
        begin_gradients(dw, parts);
        all();
        solve_all(dw);
        finish(dw, parts);
    }
};

extern "C" __global__ void __launch_bounds__(CONSUMERS, 1) factors_adjoint(const __grid_constant__ PathArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Place place(a.of, a.key_heads);
    if (place.tile * BLOCK >= place.T) return;
    const Adjoint adjoint(a, place, memory);
    if (threadIdx.x == 0) adjoint.begin_loads();
    if (threadIdx.x < BLOCK) {
        float* const beta = (float*)(memory + AT_BETA);
        beta[threadIdx.x] = (int)threadIdx.x < adjoint.own ? strength(a, place, adjoint.i0 + threadIdx.x) : 0.f;
    }
    __syncthreads();
    adjoint.run();
}
