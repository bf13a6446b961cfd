// Pairs of a block of 128 tokens with itself, of a head: gradients of its queries and values, and of what the pairs are
// made of.
//
//     E = tril(Q W^T),   z = scale (Q K^T - E X),   P, dZ as for other pairs, dZ times the scale
//     dV += P^T dO,   dK = dZ^T Q,   dX = -E^T dZ,   dE = -tril(dZ X^T + dQ~ U^T),   dU = -E^T dQ~,   dW = dE^T Q
//     dQ = dQ~ + dZ K + dE W
//
// dQ~ is of the queries at the block's start (queries.cu), V's gradient has that of later queries (keys.cu). dK, dX,
// dU, dW have the terms of this head and these pairs alone (factors_adjoint.cu). With decays also the sums of dz of
// each query and key. Two warpgroups of 64 rows.
#include "path/traversal.cuh"

constexpr int SLOT = Pairs::SIZE, AT_Q = 0, AT_W = SLOT, AT_K = 2 * SLOT, AT_X = 3 * SLOT, AT_DOUT = 4 * SLOT,
              AT_V = 5 * SLOT, AT_U = 6 * SLOT;
constexpr int AT_DQ = AT_X, AT_DZ = AT_DOUT, AT_DE = AT_U, AT_P = AT_V,
              AT_E = AT_V;   // in the place of data no longer read
constexpr int AT_DECAYS = 7 * SLOT, AT_BARRIERS = AT_DECAYS + GATED * BLOCK * 16;
static_assert(AT_BARRIERS + 48 == LA_SHARED, "linattn_np/softmax/cuda/path_plan.py");
typedef Panels<WIDTH_V, BLOCK> Values;
enum { OF_SCORES, OF_VALUES, OF_U, OF_DQ };   // barriers

struct Tiles {   // of a block and a head, and their loads
    const PathArguments& a;
    const Place& place;
    const u32 shared;
    const Lane me;
    const Stored stored;
    const int i0, own;
    __device__ __forceinline__ Tiles(const PathArguments& a, const Place& place, u32 shared)
        : a(a),
          place(place),
          shared(shared),
          me(threadIdx.x),
          stored(a, place, place.head / a.of.group_k),
          i0(place.tile * BLOCK),
          own(min(place.T - i0, BLOCK)) {}

    __device__ __forceinline__ u32 barrier(int n) const { return shared + AT_BARRIERS + 8 * n; }
    __device__ __forceinline__ u32 rows(int tile) const {
        return shared + tile + me.group * 64 * 128;
    }   // of this group, read along
    __device__ __forceinline__ void all() const {
        publish_shared();
        __syncthreads();
    }
    __device__ __forceinline__ const char* queries_at_start() const {   // their gradients
        return a.dmapped + stored.tile(place, place.head, EarlierGroups(place.tile, a.levels).first());
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
            run_prefetch(queries_at_start(), Rows128::SIZE);
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
};

struct Own : Tiles {
    using Tiles::Tiles;

    // x = Q B^T
    __device__ __forceinline__ void query_rows(float (&x)[BLOCK / 8][4], int with) const {
        clear_tiles(x);
        complete_products(x, [&] { add_ABt<Rows128, Rows128>(x, rows(AT_Q), shared + with); });
    }
    // scores become p, in shared memory, dout.v becomes dz (times the scale, as operands); sums of dz of queries and keys
    __device__ __forceinline__ void differentiate(u32 (&dz)[BLOCK / 16][4], const float (&s)[BLOCK / 8][4],
                                                  const float (&d)[BLOCK / 8][4]) const {
        const i64 numbers = place.numbers(a.of, place.head) + i0;
        const float c = a.of.scale * LOG2_E;
        float l[2], dot[2], rows[2] = {0.f, 0.f}, columns[2][2];   // of columns: tiles n with n % 8 = lane / 4
        Decays query[2];
        const PairsAt pairs_at(me);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int i = me.row + 8 * h;
            const bool valid = i < own;
            l[h] = valid ? a.of.logs[numbers + i] : -minus_infinity();
            dot[h] = valid && a.of.normalize ? a.of.dots[numbers + i] : 0.f;
            if constexpr (GATED) query[h] = a.of.sums[numbers + min(i, own - 1)];
        }
#pragma unroll
        for (int n = 0; n < BLOCK / 8; n++) {
            float p[4], x[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int j = n * 8 + me.column + (e & 1);
                float z = s[n][e] * c;
                if constexpr (GATED) z += decay_between(query[e >> 1], load_decays(shared + AT_DECAYS + j * 16));
                p[e] = j <= me.row + 8 * (e >> 1) ? exp2_approx(z - l[e >> 1]) : 0.f;
                x[e] = p[e] * (d[n][e] - dot[e >> 1]);
                if constexpr (GATED) rows[e >> 1] += x[e];
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                store_shared_u32(shared + AT_P + pairs_at.at<Pairs>(n, h), pack_bf16(p[2 * h], p[2 * h + 1]));
                dz[n / 2][n % 2 * 2 + h] = pack_bf16(x[2 * h] * a.of.scale, x[2 * h + 1] * a.of.scale);
            }
            if constexpr (GATED)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float sum = x[e] + x[2 + e];
                    sum += __shfl_xor_sync(0xffffffffu, sum, 4);
                    sum += __shfl_xor_sync(0xffffffffu, sum, 8);
                    sum += __shfl_xor_sync(0xffffffffu, sum, 16);
                    if (me.lane >> 2 == n % 8) columns[n / 8][e] = sum;
                }
            if (n % 2) __syncwarp();   // no value waits for later ones in a register
        }
        if constexpr (GATED) store_sums(rows, columns, numbers);
    }
    // sums of dz of each query, with those of earlier keys, and of each key, in the place of the decays
    __device__ __forceinline__ void store_sums(const float (&rows)[2], const float (&columns)[2][2],
                                               i64 numbers) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float sum = row_sum(rows[h]);
            float* const to = a.of.rows + numbers + me.row + 8 * h;
            if ((me.lane & 3) == 0 && me.row + 8 * h < own) *to = place.tile ? *to + sum : sum;
        }
        float all = 0.f;
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            __syncthreads();
            if (me.group == group)
#pragma unroll
                for (int n = 0; n < 2; n++)
                    store_shared2(shared + AT_DECAYS + (me.warp * BLOCK + n * 64 + (me.lane >> 2) * 8 + me.column) * 4,
                                  columns[n][0], columns[n][1]);
            __syncthreads();
            if (threadIdx.x < BLOCK)
#pragma unroll
                for (int w = 0; w < 4; w++) all += load_shared(shared + AT_DECAYS + (w * BLOCK + threadIdx.x) * 4);
        }
        if (threadIdx.x < own) a.of.near[numbers + threadIdx.x] = all;
    }
    // -E and dz (times the scale) as operands; p in shared memory
    __device__ __forceinline__ void pairs(u32 (&e)[BLOCK / 16][4], u32 (&dz)[BLOCK / 16][4]) const {
        float s[BLOCK / 8][4], d[BLOCK / 8][4];
        query_rows(s, AT_W);
        keep_lower<true>(s, me);
        negate(s);
        pack_operands(e, s);
        query_rows(s, AT_K);
        complete_products(s, [&] { multiply_rows_AB<Pairs>(s, e, shared + AT_X); });
        barrier_wait(barrier(OF_VALUES), 0);
        clear_tiles(d);
        complete_products(d, [&] { add_ABt<Values, Values>(d, rows(AT_DOUT), shared + AT_V); });
        __syncthreads();   // the values have been read
        differentiate(dz, s, d);
        all();
    }
    __device__ __forceinline__ void put_operands(u32 tile, const u32 (&x)[BLOCK / 16][4]) const {
        const PairsAt pairs_at(me);
#pragma unroll
        for (int d = 0; d < BLOCK / 16; d++)
#pragma unroll
            for (int i = 0; i < 4; i++) store_shared_u32(tile + pairs_at.at<Pairs>(2 * d + (i >> 1), i & 1), x[d][i]);
    }
    // dV from P, dZ and -E to shared memory, dK
    __device__ __forceinline__ void sums_over_queries(const u32 (&e)[BLOCK / 16][4], const u32 (&dz)[BLOCK / 16][4],
                                                      char* parts) const {
        const int panel = me.group * Pairs::PANEL;   // the group's keys
        {
            float dv[WIDTH_V / 8][4];
            char* const to = rows_of(a.of.other, place, place.head) + i0 * a.of.other.token;
            load_array<LA_V>(dv, to, a.of.other.token, own, me);
            complete_products(dv, [&] { add_AtB<Values>(dv, shared + AT_P + panel, shared + AT_DOUT); });
            store_array<LA_V>(to, a.of.other.token, own, dv, me);
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
        float de[BLOCK / 8][4];
        wait_loads();
        {
            u32 e[BLOCK / 16][4], dz[BLOCK / 16][4];
            pairs(e, dz);
            sums_over_queries(e, dz, parts);
        }
        clear_tiles(de);
        complete_products(de, [&] { add_ABt<Pairs, Pairs>(de, rows(AT_DZ), shared + AT_X); });
        __syncthreads();   // X has been read
        if (threadIdx.x == 0 && place.tile) {
            barrier_expect(barrier(OF_DQ), Rows128::SIZE);
            run_in(shared + AT_DQ, queries_at_start(), Rows128::SIZE, barrier(OF_DQ));
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
            }
            store_tile<Rows128>(parts + Pairs::SIZE, du, me);
        }
        keep_lower<true>(de, me);
        __syncthreads();   // U has been read
        put_rows<Pairs>(shared + AT_DE, de, -1.f, me);
        all();
        float x[WIDTH_K / 8][4];
        clear_tiles(x);
        complete_products(x, [&] {
            add_AB<Pairs, Rows128>(x, rows(AT_DZ), shared + AT_K);
            add_AB<Pairs, Rows128>(x, rows(AT_DE), shared + AT_W);
        });
        if (place.tile) add_rows<Rows128>(x, shared + AT_DQ, me);
        store_array<LA_K>(rows_of(a.of.out, place, place.head) + i0 * a.of.out.token, a.of.out.token, own, x, me);
        clear_tiles(x);
        complete_products(x, [&] { add_AtB<Rows128>(x, shared + AT_DE + panel, shared + AT_Q); });
        store_tile<Rows128>(parts + Pairs::SIZE + Rows128::SIZE, x, me);
    }
};

extern "C" __global__ void __launch_bounds__(CONSUMERS, 1) diagonal(const __grid_constant__ PathArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const Place place(a.of, a.of.heads);
    if (place.tile * BLOCK >= place.T) return;
    const Own own(a, place, shared);
    if (threadIdx.x == 0) own.begin_loads();
    if (GATED && threadIdx.x < BLOCK)
        store_decays(shared + AT_DECAYS + threadIdx.x * 16,
                     a.of.sums[place.numbers(a.of, place.head) + min(own.i0 + (int)threadIdx.x, place.T - 1)]);
    __syncthreads();
    own.run();
}
