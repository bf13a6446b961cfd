// Gradients of 128 values and of their keys at the ends of each size of groups, from the queries of a head in later
// blocks.
//
//     p_ij = 2^(z_ij - l_i),     dv_j = sum_i p_ij dout_i,     dz_ij = p_ij (dout_i.v_j - dot_i),
//     dk~_j = scale sum_i dz_ij q^(m)_i
//
// The blocks of queries that attend to a size follow one another (place.cuh:Readers). Rows of the products are keys.
// With decays also the sums of dz of each key.
#include "path/traversal.cuh"

constexpr int QUERIES = 64, STAGES = 3;   // queries of a tile; tiles in flight
typedef Panels<WIDTH_V, BLOCK> Values;
typedef Panels<WIDTH_K, QUERIES> Queries;
typedef Panels<WIDTH_V, QUERIES> Douts;
constexpr int AT_V = Rows128::SIZE, AT_STAGES = AT_V + Values::SIZE, STAGE = Queries::SIZE + Douts::SIZE,
              AT_NUMBERS = AT_STAGES + STAGES * STAGE;
constexpr int NUMBERS = QUERIES * 8;   // of each query of a stage: l, less the decay from this block's end, and dot
constexpr int AT_RINGS = AT_NUMBERS + STAGES * NUMBERS, AT_READY = AT_RINGS + Ring<STAGES>::BYTES + Ring<1>::BYTES;
static_assert(AT_READY + 16 == LA_SHARED, "linattn_np/softmax/cuda/path_plan.py");

struct Rings {
    Ring<STAGES> queries;
    Ring<1> keys;
    u32 ready;
    __device__ __forceinline__ Rings(u32 shared)
        : queries{shared + AT_RINGS}, keys{shared + AT_RINGS + Ring<STAGES>::BYTES}, ready(shared + AT_READY) {}
    __device__ __forceinline__ void init() const {
        queries.init(1 + ARRIVALS, CONSUMERS / 32 * ARRIVALS);
        keys.init(1, CONSUMERS / 32 * ARRIVALS);
        barrier_init(ready, 1);
        barriers_made();
    }
};

// l and dot of a tile's queries, by a warp
LA_DEVICE void store_numbers(const PathArguments& a, const Place& place, u32 to, int i0, const Decays& end, int lane) {
    const i64 numbers = place.numbers(a.of, place.head);
#pragma unroll
    for (int n = 0; n < QUERIES / 32; n++) {
        const int r = n * 32 + lane, i = i0 + r;
        float l = -minus_infinity(), dot = 0.f;
        if (i < place.T) {
            l = a.of.logs[numbers + i];
            if (a.of.normalize) dot = a.of.dots[numbers + i];
            if constexpr (GATED) l -= decay_between(a.of.sums[numbers + i], end);
        }
        store_shared2(to + r * 8, l, dot);
    }
}
LA_DEVICE void produce(const PathArguments& a, const Place& place, int blocks, u32 shared, int lane) {
    const Rings rings(shared);
    const Stored stored(a, place, place.head / a.of.group_k);
    const int block = place.tile, j0 = block * BLOCK;
    const Decays end =
        GATED && j0 + BLOCK <= place.T ? a.of.sums[place.numbers(a.of, place.head) + j0 + BLOCK - 1] : Decays{};
    int step = 0, sizes = 0;
    if (lane == 0) {
        barrier_expect(rings.ready, Values::SIZE);
        tile_in<Values>(shared + AT_V, a.of.v, rings.ready, place, place.head / a.of.group_v, j0);
    }
    for (int level = 0; level < a.levels; level++) {
        const int group = block >> RADIX_BITS * level;
        const Readers readers(level, group, a.levels, blocks);
        if (readers.first >= readers.end) continue;
        rings.keys.wait_empty(sizes);
        if (lane == 0) {
            barrier_expect(rings.keys.full(sizes), Rows128::SIZE);
            run_in(shared, stored.keys(level, block), Rows128::SIZE, rings.keys.full(sizes));
        }
        sizes++;
        for (int n = 2 * readers.first; n < 2 * readers.end; n++, step++) {
            const u32 to = shared + AT_STAGES + step % STAGES * STAGE, full = rings.queries.full(step);
            const int i0 = n * QUERIES;
            rings.queries.wait_empty(step);
            if (lane == 0) {
                const EarlierGroups earlier(n / 2, a.levels);
                const char* const from =
                    a.mapped + stored.tile(place, place.head, earlier.first() + earlier.nearer(level, group)) +
                    n % 2 * QUERIES * 128;
                barrier_expect(full, STAGE);
#pragma unroll
                for (int p = 0; p < WIDTH_K / 64; p++)
                    run_in(to + p * Queries::PANEL, from + p * Rows128::PANEL, Queries::PANEL, full);
                tile_in<Douts>(to + Queries::SIZE, a.of.dout, full, place, place.head, i0);
            }
            store_numbers(a, place, shared + AT_NUMBERS + step % STAGES * NUMBERS, i0, end, lane);
            warp_arrive(full, lane);
        }
    }
}

struct Consumer {
    const PathArguments& a;
    const Place& place;
    const u32 shared;
    const Lane me;
    const Rings rings;
    const Stored stored;
    const int j0;
    int step, sizes;
    float r[2], sums[2];   // of the two keys: log2 decay to the block's end; sums of dz

    __device__ __forceinline__ Consumer(const PathArguments& a, const Place& place, u32 shared, int thread)
        : a(a),
          place(place),
          shared(shared),
          me(thread),
          rings(shared),
          stored(a, place, place.head / a.of.group_k),
          j0(place.tile * BLOCK),
          step(0),
          sizes(0) {
        const Decays* const own = a.of.sums + place.numbers(a.of, place.head);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sums[h] = r[h] = 0.f;
            if constexpr (GATED)
                r[h] = decay_between(own[min(j0 + BLOCK, place.T) - 1], own[min(j0 + me.row + 8 * h, place.T - 1)]);
        }
    }
    __device__ __forceinline__ u32 stage(int step) const { return shared + AT_STAGES + step % STAGES * STAGE; }
    // scores^T and (dout.v)^T, begun; queries past the end become zeros (mapped queries are)
    __device__ __forceinline__ void begin_products(float (&s)[QUERIES / 8][4], float (&d)[QUERIES / 8][4], int step,
                                                   int i0) {
        rings.queries.wait_full(step);
        if (place.T - i0 < QUERIES) {
            clear_rows_from<Douts>(stage(step) + Queries::SIZE, place.T - i0);
            rows_cleared();
        }
        products_begin();
        multiply_rows_ABt<Rows128, Queries>(s, shared + me.group * 64 * 128, stage(step));
        products_commit();
        multiply_rows_ABt<Values, Douts>(d, shared + AT_V + me.group * 64 * 128, stage(step) + Queries::SIZE);
        products_commit();
    }
    // dv += P^T dO, dk += dZ^T Q of a tile, begun
    __device__ __forceinline__ void begin_sums(float (&dk)[WIDTH_K / 8][4], float (&dv)[WIDTH_V / 8][4],
                                               float (&s)[QUERIES / 8][4], float (&d)[QUERIES / 8][4]) {
        u32 p[QUERIES / 16][4], dz[QUERIES / 16][4];
        const u32 numbers = shared + AT_NUMBERS + step % STAGES * NUMBERS + me.column * 8;
        const float c = a.of.scale * LOG2_E;
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++) {
            const Decays x = load_decays(numbers + n * 64);   // l, dot of two queries
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float z = GATED ? s[n][e] * c + r[e >> 1] : s[n][e] * c;
                s[n][e] = exp2_approx(z - (e & 1 ? x.z : x.x));
            }
        }
        pack_operands(p, s);
        products_begin();
        multiply_rows_AB<Douts>(dv, p, stage(step) + Queries::SIZE);
        products_commit();
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++) {
            const Decays x = load_decays(numbers + n * 64);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                d[n][e] = s[n][e] * (d[n][e] - (e & 1 ? x.w : x.y));
                if constexpr (GATED) sums[e >> 1] += d[n][e];
            }
        }
        pack_operands(dz, d);
        products_begin();
        multiply_rows_AB<Queries>(dk, dz, stage(step));
        products_commit();
        products_wait<1>();   // the registers of P are free, with decays dZ's too
        accumulator_fence(dv);
    }
    // the queries of blocks first .. end
    __device__ __forceinline__ void pass(float (&dk)[WIDTH_K / 8][4], float (&dv)[WIDTH_V / 8][4],
                                         const Readers& readers) {
        float s[QUERIES / 8][4], d[QUERIES / 8][4];
        rings.keys.wait_full(sizes);
        begin_products(s, d, step, readers.first * BLOCK);
        products_wait<0>();
        accumulator_fence(s);
        accumulator_fence(d);
        for (int n = 2 * readers.first + 1; n < 2 * readers.end; n++) {
            begin_sums(dk, dv, s, d);
            begin_products(s, d, step + 1, n * QUERIES);
            products_wait<0>();
            accumulator_fence(s);
            accumulator_fence(d);
            accumulator_fence(dk);
            warp_arrive(rings.queries.empty(step++), me.lane);
        }
        begin_sums(dk, dv, s, d);
        products_wait<0>();
        accumulator_fence(dk);
        warp_arrive(rings.queries.empty(step++), me.lane);
    }
    // the gradients of the keys of a size, by way of the keys' place
    __device__ __forceinline__ void put_out(const float (&dk)[WIDTH_K / 8][4], char* to) {
        group_barrier(me.group);   // all have read the keys
        put_rows<Rows128>(shared, dk, a.of.scale, me);
        publish_shared();
        group_barrier(me.group);
        if ((threadIdx.x & 127) == 0) {
#pragma unroll
            for (int p = 0; p < WIDTH_K / 64; p++) {
                const u32 from = p * Rows128::PANEL + me.group * 64 * 128;
                run_out(to + from, shared + from, 64 * 128);
            }
            out_commit();
            out_read();
        }
        warp_arrive(rings.keys.empty(sizes++), me.lane);
    }
    __device__ __forceinline__ void run(int blocks) {
        float dk[WIDTH_K / 8][4], dv[WIDTH_V / 8][4];
        clear_tiles(dv);
        barrier_wait(rings.ready, 0);
        for (int level = 0; level < a.levels; level++) {
            const Readers readers(level, place.tile >> RADIX_BITS * level, a.levels, blocks);
            char* const to = stored.dkeys(level, place.head, a.of.heads, place.tile);
            clear_tiles(dk);
            if (readers.first < readers.end) {
                pass(dk, dv, readers);
                put_out(dk, to);
            } else store_tile<Rows128>(to, dk, me);
        }
        store_array<LA_V>(rows_of(a.of.other, place, place.head) + j0 * a.of.other.token, a.of.other.token,
                          place.T - j0, dv, me);
        if constexpr (GATED) {
            float* const far = a.of.far + place.numbers(a.of, place.head) + j0;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float sum = row_sum(sums[h]);
                if ((me.lane & 3) == 0 && j0 + me.row + 8 * h < place.T) far[me.row + 8 * h] = sum;
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) keys(const __grid_constant__ PathArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const Place place(a.of, a.of.heads);   // those with most queries first
    if (place.tile * BLOCK >= place.T) return;
    const int blocks = (place.T + BLOCK - 1) / BLOCK;
    if (threadIdx.x == 0) Rings(shared).init();
    __syncthreads();
    run_roles([&](int lane) { produce(a, place, blocks, shared, lane); },
              [&](int thread) { Consumer(a, place, shared, thread).run(blocks); });
}
