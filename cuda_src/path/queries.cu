// Gradients of 128 queries of a head as they attend to each group of blocks before them, from the furthest group on
// (place.cuh:EarlierGroups).
//
//     p_ij = 2^(z_ij - l_i),     dz_ij = p_ij (dout_i.v_j - dot_i),
//     dq^(m) = scale sum_j dz_ij k~_j + dq^(m+1) - dq^(m+1) D_m
//
// with z_ij = scale q^(m)_i.k~_j and D_m of group m. With decays also the sums of dz: of each query, and of the whole
// block with all keys before each block of keys. diagonal.cu has the pairs of the block itself.
#include "path/traversal.cuh"
#include "tile/reduce.cuh"

constexpr int KEYS = 64, STAGES = 3,
              TABLE = 128;   // keys of a tile; tiles in flight; blocks of keys whose sums wait in shared memory
typedef Panels<WIDTH_K, KEYS> Keys;
typedef Panels<WIDTH_V, KEYS> Values;
typedef Panels<WIDTH_V, BLOCK> Douts;
constexpr int STAGE = larger(Keys::SIZE + Values::SIZE, Maps::SIZE);   // of keys and values, or of maps
constexpr int AT_DOUT = 2 * Rows128::SIZE, AT_STAGES = AT_DOUT + Douts::SIZE, AT_DECAYS = AT_STAGES + STAGES * STAGE;
constexpr int AT_TABLE = AT_DECAYS + GATED * STAGES * KEYS * 4,
              AT_RINGS = AT_TABLE + GATED * CONSUMERS / 32 * TABLE * 4;
constexpr int AT_READY = AT_RINGS + Ring<STAGES>::BYTES + Ring<2>::BYTES;
static_assert(AT_READY + 16 == LA_SHARED, "linattn_np/softmax/cuda/path_plan.py");

struct Rings {
    Ring<STAGES> items;   // half blocks of keys, and maps
    Ring<2> queries;
    u32 ready;
    __device__ __forceinline__ Rings(u32 shared)
        : items{shared + AT_RINGS}, queries{shared + AT_RINGS + Ring<STAGES>::BYTES}, ready(shared + AT_READY) {}
    __device__ __forceinline__ void init() const {
        items.init(1 + GATED * ARRIVALS, CONSUMERS / 32 * ARRIVALS);
        queries.init(1, CONSUMERS / 32 * ARRIVALS);
        barrier_init(ready, 1);
        barriers_made();
    }
};

LA_DEVICE void produce(const PathArguments& a, const Place& place, const EarlierGroups& earlier, u32 shared, int lane) {
    const Rings rings(shared);
    const Stored stored(a, place, place.head / a.of.group_k);
    const int i0 = place.tile * BLOCK, value_head = place.head / a.of.group_v;
    const Decays* const sums = a.of.sums + place.numbers(a.of, place.head);
    const Decays before = GATED ? sums[i0 - 1] : Decays{};
    int items = 0, groups = 0;
    if (lane == 0) {
        barrier_expect(rings.ready, Douts::SIZE);
        tile_in<Douts>(shared + AT_DOUT, a.of.dout, rings.ready, place, place.head, i0);
    }
    const int all = earlier.all();
    for (GroupTraversal w = GroupTraversal::furthest(earlier); groups < all; w.closer(), groups++) {
        if (groups) {   // its maps, before its keys
            rings.items.wait_empty(items);
            if (lane == 0) {
                barrier_expect(rings.items.full(items), Maps::SIZE);
                run_in(shared + AT_STAGES + items % STAGES * STAGE, stored.maps(w.level, w.number), Maps::SIZE,
                       rings.items.full(items));
            }
            if constexpr (GATED) warp_arrive(rings.items.full(items), lane);
            items++;
        }
        rings.queries.wait_empty(groups);
        if (lane == 0) {
            barrier_expect(rings.queries.full(groups), Rows128::SIZE);
            run_in(shared + (groups & 1) * Rows128::SIZE,
                   a.mapped + stored.tile(place, place.head, earlier.first() + w.nearer()), Rows128::SIZE,
                   rings.queries.full(groups));
        }
        for (int n = 0; n < 2 * w.blocks(); n++, items++) {
            const int block = w.number * w.blocks() + n / 2, j0 = block * BLOCK + n % 2 * KEYS;
            const u32 to = shared + AT_STAGES + items % STAGES * STAGE, full = rings.items.full(items);
            rings.items.wait_empty(items);
            if (lane == 0) {
                barrier_expect(full, Keys::SIZE + Values::SIZE);
#pragma unroll
                for (int p = 0; p < WIDTH_K / 64; p++)
                    run_in(to + p * Keys::PANEL, stored.keys(w.level, block) + p * Rows128::PANEL + n % 2 * KEYS * 128,
                           Keys::PANEL, full);
                tile_in<Values>(to + Keys::SIZE, a.of.v, full, place, value_head, j0);
            }
            if constexpr (GATED) {
                store_key_decays<KEYS>(shared + AT_DECAYS + items % STAGES * KEYS * 4, sums, j0, place.T, false, before,
                                       lane);
                warp_arrive(full, lane);
            }
        }
    }
}

struct Consumer {
    const PathArguments& a;
    const Place& place;
    const EarlierGroups& earlier;
    const u32 shared;
    const Lane me;
    const Rings rings;
    const Stored stored;
    int items, groups;
    float l[2], dot[2], sums[2];   // of the two rows: l less the decay from the block's start; sums of dz

    __device__ __forceinline__ Consumer(const PathArguments& a, const Place& place, const EarlierGroups& earlier,
                                        u32 shared, int thread)
        : a(a),
          place(place),
          earlier(earlier),
          shared(shared),
          me(thread),
          rings(shared),
          stored(a, place, place.head / a.of.group_k),
          items(0),
          groups(0) {
        const int i0 = place.tile * BLOCK;
        const i64 numbers = place.numbers(a.of, place.head);
        const Decays before = GATED ? a.of.sums[numbers + i0 - 1] : Decays{};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int i = i0 + me.row + 8 * h;
            l[h] = i < place.T ? a.of.logs[numbers + i] : -minus_infinity();
            dot[h] = i < place.T && a.of.normalize ? a.of.dots[numbers + i] : 0.f;
            sums[h] = 0.f;
            if constexpr (GATED)
                if (i < place.T) l[h] -= decay_between(a.of.sums[numbers + i], before);
        }
    }
    __device__ __forceinline__ u32 stage() const { return shared + AT_STAGES + items % STAGES * STAGE; }
    __device__ __forceinline__ u32 queries() const { return shared + (groups & 1) * Rows128::SIZE; }
    __device__ __forceinline__ void release() { warp_arrive(rings.items.empty(items++), me.lane); }
    // scores and dout.v of a tile
    __device__ __forceinline__ void begin_products(float (&s)[KEYS / 8][4], float (&d)[KEYS / 8][4], u32 stage) {
        products_begin();
        multiply_rows_ABt<Rows128, Keys>(s, queries() + me.group * 64 * 128, stage);
        multiply_rows_ABt<Douts, Values>(d, shared + AT_DOUT + me.group * 64 * 128, stage + Keys::SIZE);
        products_commit();
    }
    // dq += dZ K of a tile, begun
    __device__ __forceinline__ void begin_sum(float (&dq)[WIDTH_K / 8][4], float (&s)[KEYS / 8][4],
                                              const float (&d)[KEYS / 8][4]) {
        u32 dz[KEYS / 16][4];
        const u32 decays = shared + AT_DECAYS + items % STAGES * KEYS * 4;
        const float c = a.of.scale * LOG2_E;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
            const float2 x = GATED ? load_shared2(decays + (n * 8 + me.column) * 4) : float2{0.f, 0.f};
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float z = GATED ? s[n][e] * c + (e & 1 ? x.y : x.x) : s[n][e] * c;
                s[n][e] = exp2_approx(z - l[e >> 1]) * (d[n][e] - dot[e >> 1]);
                if constexpr (GATED) sums[e >> 1] += s[n][e];
            }
        }
        pack_operands(dz, s);
        products_begin();
        multiply_rows_AB<Keys>(dq, dz, stage());
        products_commit();
    }
    // after a block of keys: the sums so far
    __device__ __forceinline__ void cross(int block) {
        const float all = warp_sum(sums[0] + sums[1]);
        const u32 table = shared + AT_TABLE;
        if (me.lane == 0) store_shared(table + ((me.group * 4 + me.warp) * TABLE + block % TABLE) * 4, all);
        if (block % TABLE < TABLE - 1 && block < place.tile - 1) return;
        groups_barrier<CONSUMERS>(GROUPS + 1);
        const int n = block / TABLE * TABLE + threadIdx.x;   // of a block of keys
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < CONSUMERS / 32; w++) sum += load_shared(table + (w * TABLE + threadIdx.x % TABLE) * 4);
        if (threadIdx.x < TABLE && n <= block)
            a.of.crossing[(((i64)place.sequence * a.of.heads + place.head) * a.of.blocks + place.tile) * a.of.blocks +
                          n + 1] = sum;
        groups_barrier<CONSUMERS>(GROUPS + 1);
    }
    // the copy of the group before has read its queries' place
    __device__ __forceinline__ void end_copy() {
        if (groups == 0) return;
        if ((threadIdx.x & 127) == 0) out_read();
        warp_arrive(rings.queries.empty(groups - 1), me.lane);
    }
    // the gradients of the queries that attend to a group, to its queries' place and on their way
    __device__ __forceinline__ void put_out(const float (&dq)[WIDTH_K / 8][4], int nearer) {
        group_barrier(me.group);   // all have read the queries
        put_rows<Rows128>(queries(), dq, a.of.scale, me);
        publish_shared();
        group_barrier(me.group);
        if ((threadIdx.x & 127) == 0) {
            char* const to = a.dmapped + stored.tile(place, place.head, earlier.first() + nearer);
#pragma unroll
            for (int p = 0; p < WIDTH_K / 64; p++) {
                const u32 from = p * Rows128::PANEL + me.group * 64 * 128;
                run_out(to + from, queries() + from, 64 * 128);
            }
            out_commit();
        }
        groups++;
    }
    // back past the maps of the next group
    __device__ __forceinline__ void map_back(float (&dq)[WIDTH_K / 8][4]) {
        float x[WIDTH_K / 8][4];
        u32 p[WIDTH_K / 16][4];
        pack_operands(p, dq);
        clear_tiles(x);
        rings.items.wait_full(items);
        complete_products(x, [&] { multiply_rows_AB<Maps>(x, p, stage()); });
        release();
#pragma unroll
        for (int n = 0; n < WIDTH_K / 8; n++) {
            dq[n][0] -= x[n][0];
            dq[n][1] -= x[n][1];
            dq[n][2] -= x[n][2];
            dq[n][3] -= x[n][3];
        }
    }
    __device__ __forceinline__ void group(float (&dq)[WIDTH_K / 8][4], const GroupTraversal& w) {
        float s[KEYS / 8][4], d[KEYS / 8][4];
        const int tiles = 2 * w.blocks();
        rings.queries.wait_full(groups);
        rings.items.wait_full(items);
        begin_products(s, d, stage());
        end_copy();
        products_wait<0>();
        accumulator_fence(s);
        accumulator_fence(d);
        for (int n = 0; n < tiles - 1; n++) {
            begin_sum(dq, s, d);
            rings.items.wait_full(items + 1);
            begin_products(s, d, shared + AT_STAGES + (items + 1) % STAGES * STAGE);
            if (GATED && n % 2) cross(w.number * w.blocks() + n / 2);
            products_wait<0>();
            accumulator_fence(s);
            accumulator_fence(d);
            accumulator_fence(dq);
            release();
        }
        begin_sum(dq, s, d);
        if constexpr (GATED) cross((w.number + 1) * w.blocks() - 1);
        products_wait<0>();
        accumulator_fence(dq);
        release();
    }
    __device__ __forceinline__ void run() {
        float dq[WIDTH_K / 8][4];
        clear_tiles(dq);
        const int left = place.T - place.tile * BLOCK;
        barrier_wait(rings.ready, 0);
        if (left < BLOCK) {
            clear_rows_from<Douts>(shared + AT_DOUT, left);
            rows_cleared();
        }
        GroupTraversal w = GroupTraversal::furthest(earlier);
        for (int n = earlier.all() - 1; n >= 0; n--, w.closer()) {
            if (groups) map_back(dq);
            group(dq, w);
            put_out(dq, n);
        }
        if ((threadIdx.x & 127) == 0) out_read();
        if constexpr (GATED) {
            float* const rows = a.of.rows + place.numbers(a.of, place.head) + place.tile * BLOCK;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float sum = row_sum(sums[h]);
                if ((me.lane & 3) == 0 && me.row + 8 * h < left) rows[me.row + 8 * h] = sum;
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) queries(const __grid_constant__ PathArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    Place place(a.of, a.of.heads);
    place.tile = a.of.blocks - 1 - place.tile;   // those with most keys first
    if (place.tile == 0 || place.tile * BLOCK >= place.T) return;
    const EarlierGroups earlier(place.tile, a.levels);
    if (threadIdx.x == 0) Rings(shared).init();
    __syncthreads();
    run_roles<40>([&](int lane) { produce(a, place, earlier, shared, lane); },
                  [&](int thread) { Consumer(a, place, earlier, shared, thread).run(); });
}
