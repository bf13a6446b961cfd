// Pairs of a block of 128 tokens with itself, of a head: gradients of its queries and values, and of what the pairs are made of.
//
//     E = tril(Q W^T),   z = scale (Q K^T - E X),   P, dZ as for other pairs, dZ times the scale
//     dV += P^T dO,   dK = dZ^T Q,   dX = -E^T dZ,   dE = -tril(dZ X^T + dQ~ U^T),   dU = -E^T dQ~,   dW = dE^T Q
//     dQ = dQ~ + dZ K + dE W
//
// dQ~ is of the queries at the block's start (queries.cu), V's gradient has that of later queries (keys.cu). dK, dX, dU, dW are those of
// this head and these terms alone (adjoint.cu). With decays also the sums of dz of each query and key. Two warpgroups of 64 rows.
#include "path/walk.cuh"

constexpr int SLOT = Pairs::SIZE, AT_Q = 0, AT_W = SLOT, AT_K = 2 * SLOT, AT_X = 3 * SLOT, AT_DOUT = 4 * SLOT, AT_V = 5 * SLOT, AT_U = 6 * SLOT;
constexpr int AT_DQ = AT_X, AT_DZ = AT_DOUT, AT_DE = AT_DOUT, AT_P = AT_V, AT_E = AT_V;   // in the place of what is done with
constexpr int AT_DECAYS = 7 * SLOT, AT_BARRIERS = AT_DECAYS + GATED * BLOCK * 16;
static_assert(AT_BARRIERS + 48 == LA_SHARED, "linattn_np/softmax/cuda/path_plan.py");
typedef Panels<WIDTH_V, BLOCK> Values;
enum { OF_SCORES, OF_VALUES, OF_U, OF_DQ };   // barriers

struct Own {
    const PathArguments& a;
    const Place& place;
    const u32 shared;
    const Lane me;
    const Stored stored;
    const int i0, own;
    __device__ __forceinline__ Own(const PathArguments& a, const Place& place, u32 shared)
        : a(a), place(place), shared(shared), me(threadIdx.x), stored(a, place, place.head / a.of.group_k), i0(place.tile * BLOCK), own(min(place.T - i0, BLOCK)) {}

    __device__ __forceinline__ u32 barrier(int n) const { return shared + AT_BARRIERS + 8 * n; }
    __device__ __forceinline__ u32 rows(int tile) const { return shared + tile + me.group * 64 * 128; }   // of this group, read along
    __device__ __forceinline__ void all() const {
        publish_shared();
        __syncthreads();
    }
    __device__ __forceinline__ void begin_loads() const {   // one thread
        const int key_head = stored.head;
        for (int n = 0; n < 4; n++) barrier_init(barrier(n), 1);
        barriers_made();
        barrier_expect(barrier(OF_SCORES), 3 * Rows128::SIZE + Pairs::SIZE);
        tile_in<Rows128>(shared + AT_Q, a.of.q, barrier(OF_SCORES), place, place.head / a.of.group_q, i0);
        tile_in<Rows128>(shared + AT_W, a.w, barrier(OF_SCORES), place, key_head, i0);
        tile_in<Rows128>(shared + AT_K, a.of.k, barrier(OF_SCORES), place, key_head, i0);
        run_in(shared + AT_X, stored.factors(place.tile), Pairs::SIZE, barrier(OF_SCORES));
        barrier_expect(barrier(OF_VALUES), 2 * Values::SIZE);
        tile_in<Values>(shared + AT_DOUT, a.of.dout, barrier(OF_VALUES), place, place.head, i0);
        tile_in<Values>(shared + AT_V, a.of.v, barrier(OF_VALUES), place, place.head / a.of.group_v, i0);
        if (place.tile) {
            barrier_expect(barrier(OF_U), Rows128::SIZE);
            run_in(shared + AT_U, stored.factors(place.tile) + Pairs::SIZE, Rows128::SIZE, barrier(OF_U));
        }
    }
    // tokens past the end become zeros
    __device__ __forceinline__ void wait_loads() const {
        barrier_wait(barrier(OF_SCORES), 0);
        if (own == BLOCK) return;
        barrier_wait(barrier(OF_VALUES), 0);
        clear_rows_from<Rows128>(shared + AT_Q, own);
        clear_rows_from<Rows128>(shared + AT_W, own);
        clear_rows_from<Rows128>(shared + AT_K, own);
        clear_rows_from<Values>(shared + AT_DOUT, own);
        clear_rows_from<Values>(shared + AT_V, own);
        all();
    }
    // x = Q B^T
    __device__ __forceinline__ void query_rows(float (&x)[BLOCK / 8][4], int with) const {
        clear_tiles(x);
        complete_products(x, [&] { add_ABt<Rows128, Rows128>(x, rows(AT_Q), shared + with); });
    }
    // scores become p, dout.v becomes dz
    __device__ __forceinline__ void differentiate(float (&s)[BLOCK / 8][4], float (&d)[BLOCK / 8][4]) const {
        const i64 numbers = place.numbers(a.of, place.head) + i0;
        const float c = a.of.scale * LOG2_E;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int i = me.row + 8 * h;
            const bool valid = i < own;
            const float l = valid ? a.of.logs[numbers + i] : -minus_infinity(), dot = valid && a.of.normalize ? a.of.dots[numbers + i] : 0.f;
            const Decays query = GATED ? a.of.sums[numbers + min(i, own - 1)] : Decays{};
#pragma unroll
            for (int n = 0; n < BLOCK / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int j = n * 8 + me.column + e;
                    float z = s[n][2 * h + e] * c;
                    if constexpr (GATED) z += decay_between(query, load_decays(shared + AT_DECAYS + j * 16));
                    const float p = j <= i ? exp2_approx(z - l) : 0.f;
                    s[n][2 * h + e] = p;
                    d[n][2 * h + e] = p * (d[n][2 * h + e] - dot);
                }
        }
    }
    // sums of dz of each query, with those of earlier keys, and of each key; `scratch` is free
    __device__ __forceinline__ void sum_pairs(const float (&d)[BLOCK / 8][4], u32 scratch) const {
        const i64 numbers = place.numbers(a.of, place.head) + i0;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = 0.f;
#pragma unroll
            for (int n = 0; n < BLOCK / 8; n++) sum += d[n][2 * h] + d[n][2 * h + 1];
            sum = row_sum(sum);
            float* const to = a.of.rows + numbers + me.row + 8 * h;
            if ((me.lane & 3) == 0 && me.row + 8 * h < own) *to = place.tile ? *to + sum : sum;
        }
#pragma unroll
        for (int n = 0; n < BLOCK / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float sum = d[n][e] + d[n][2 + e];
                sum += __shfl_xor_sync(0xffffffffu, sum, 4);
                sum += __shfl_xor_sync(0xffffffffu, sum, 8);
                sum += __shfl_xor_sync(0xffffffffu, sum, 16);
                if (me.lane < 4) store_shared(scratch + ((me.group * 4 + me.warp) * BLOCK + n * 8 + me.column + e) * 4, sum);
            }
        __syncthreads();
        if (threadIdx.x < own) {
            float sum = 0.f;
#pragma unroll
            for (int w = 0; w < CONSUMERS / 32; w++) sum += load_shared(scratch + (w * BLOCK + threadIdx.x) * 4);
            a.of.near[numbers + threadIdx.x] = sum;
        }
        __syncthreads();
    }
    // -E as operands, p and dz (times the scale)
    __device__ __forceinline__ void pairs(u32 (&e)[BLOCK / 16][4], float (&s)[BLOCK / 8][4], float (&d)[BLOCK / 8][4]) const {
        query_rows(s, AT_W);
        keep_lower<true>(s, me);
        negate(s);
        pack_operands(e, s);
        query_rows(s, AT_K);
        complete_products(s, [&] { multiply_rows_AB<Pairs>(s, e, shared + AT_X); });
        barrier_wait(barrier(OF_VALUES), 0);
        clear_tiles(d);
        complete_products(d, [&] { add_ABt<Values, Values>(d, rows(AT_DOUT), shared + AT_V); });
        differentiate(s, d);
        __syncthreads();   // the values have been read
        if constexpr (GATED) sum_pairs(d, shared + AT_V);
#pragma unroll
        for (int n = 0; n < BLOCK / 8; n++) { d[n][0] *= a.of.scale; d[n][1] *= a.of.scale; d[n][2] *= a.of.scale; d[n][3] *= a.of.scale; }
    }
    __device__ __forceinline__ void put_operands(u32 tile, const u32 (&x)[BLOCK / 16][4]) const {
#pragma unroll
        for (int d = 0; d < BLOCK / 16; d++)
#pragma unroll
            for (int i = 0; i < 4; i++) store_shared_u32(tile + Pairs::at(me.row + 8 * (i & 1), d * 16 + (i >> 1) * 8 + me.column), x[d][i]);
    }
    // P, then dZ and -E to shared memory; dV and dK on their way
    __device__ __forceinline__ void sums_over_queries(const u32 (&e)[BLOCK / 16][4], const float (&s)[BLOCK / 8][4], const u32 (&dz)[BLOCK / 16][4], char* parts) const {
        const int panel = me.group * Pairs::PANEL;   // the group's keys
        put_rows<Pairs>(shared + AT_P, s, 1.f, me);
        all();
        {
            float dv[WIDTH_V / 8][4];
            clear_tiles(dv);
            complete_products(dv, [&] { add_AtB<Values>(dv, shared + AT_P + panel, shared + AT_DOUT); });
            store_array<LA_V, true>(rows_of(a.of.other, place, place.head) + i0 * a.of.other.token, a.of.other.token, own, dv, me);
        }
        __syncthreads();   // P and dO have been read
        put_operands(shared + AT_DZ, dz);
        put_operands(shared + AT_E, e);
        all();
        float dk[WIDTH_K / 8][4];
        clear_tiles(dk);
        complete_products(dk, [&] { add_AtB<Rows128>(dk, shared + AT_DZ + panel, shared + AT_Q); });
        store_tile<Rows128>(parts + Pairs::SIZE + 2 * Rows128::SIZE, dk, me);
    }
    __device__ __forceinline__ void run() const {
        char* const parts = stored.parts(place.head, place.tile);
        const int panel = me.group * Pairs::PANEL;
        float de[BLOCK / 8][4], dq[WIDTH_K / 8][4];
        wait_loads();
        {
            u32 e[BLOCK / 16][4], dz[BLOCK / 16][4];
            float s[BLOCK / 8][4];
            pairs(e, s, de);
            pack_operands(dz, de);
            sums_over_queries(e, s, dz, parts);
        }
        clear_tiles(de);
        complete_products(de, [&] { add_ABt<Pairs, Pairs>(de, rows(AT_DZ), shared + AT_X); });
        clear_tiles(dq);
        complete_products(dq, [&] { add_AB<Pairs, Rows128>(dq, rows(AT_DZ), shared + AT_K); });
        __syncthreads();   // X has been read
        if (threadIdx.x == 0 && place.tile) {
            barrier_expect(barrier(OF_DQ), Rows128::SIZE);
            run_in(shared + AT_DQ, a.dmet + stored.tile(place, place.head, Met(place.tile, a.levels).first()), Rows128::SIZE, barrier(OF_DQ));
        }
        {
            float dx[BLOCK / 8][4];
            clear_tiles(dx);
            complete_products(dx, [&] { add_AtB<Pairs>(dx, shared + AT_E + panel, shared + AT_DZ); });
            keep_lower<false>(dx, me);
            store_tile<Pairs>(parts, dx, me);
        }
        {
            float du[WIDTH_K / 8][4];
            clear_tiles(du);
            if (place.tile) {
                barrier_wait(barrier(OF_U), 0);
                barrier_wait(barrier(OF_DQ), 0);
                complete_products(de, [&] { add_ABt<Rows128, Rows128>(de, rows(AT_DQ), shared + AT_U); });
                complete_products(du, [&] { add_AtB<Rows128>(du, shared + AT_E + panel, shared + AT_DQ); });
                add_rows<Rows128>(dq, shared + AT_DQ, me);
            }
            store_tile<Rows128>(parts + Pairs::SIZE, du, me);
        }
        keep_lower<true>(de, me);
        __syncthreads();   // dZ has been read
        put_rows<Pairs>(shared + AT_DE, de, -1.f, me);
        all();
        complete_products(dq, [&] { add_AB<Pairs, Rows128>(dq, rows(AT_DE), shared + AT_W); });
        store_array<LA_K, false>(rows_of(a.of.out, place, place.head) + i0 * a.of.out.token, a.of.out.token, own, dq, me);
        clear_tiles(dq);
        complete_products(dq, [&] { add_AtB<Rows128>(dq, shared + AT_DE + panel, shared + AT_Q); });
        store_tile<Rows128>(parts + Pairs::SIZE + Rows128::SIZE, dq, me);
    }
};

extern "C" __global__ void __launch_bounds__(CONSUMERS, 1) own(const __grid_constant__ PathArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const Place place(a.of, a.of.heads);
    if (place.tile * BLOCK >= place.T) return;
    const Own own(a, place, shared);
    if (threadIdx.x == 0) own.begin_loads();
    if (GATED && threadIdx.x < BLOCK)
        store_decays(shared + AT_DECAYS + threadIdx.x * 16, a.of.sums[place.numbers(a.of, place.head) + min(own.i0 + (int)threadIdx.x, place.T - 1)]);
    __syncthreads();
    own.run();
}
