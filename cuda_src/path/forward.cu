// PaTH attention of 128 queries of a head: out and l = log2 of the sum of the exponentials; softmax/forward.cu with
// queries that are mapped from one block or group of blocks of keys (place.cuh) to the one before it.
//
//     own block:  E = tril(Q W^T),  z = scale (Q K^T - E X),  Q <- Q - E U
//     then, with p blocks left, those of the largest group that ends there:  z = scale Q K~^T,  Q <- Q - Q D^T
//
// So a query is mapped at most 7 times for every factor of 8 in the length. Q is held in two terms of 16 bits, of which
// the first multiplies.
#include "path/place.cuh"

constexpr int KEYS = 128, STAGES = 2;   // keys of a tile; tiles in flight
typedef Panels<WIDTH_V, KEYS> Values;
typedef Panels<WIDTH_V, BLOCK> Outputs;   // where the queries have been
constexpr int KEY_STAGE = larger(Rows128::SIZE, Pairs::SIZE);
constexpr int AT_REST = larger(Rows128::SIZE, Outputs::SIZE), AT_K = AT_REST + Rows128::SIZE,
              AT_V = AT_K + STAGES * KEY_STAGE;
constexpr int AT_DECAYS = AT_V + STAGES * Values::SIZE, AT_RINGS = AT_DECAYS + GATED * STAGES * KEYS * 16,
              AT_ALL = AT_RINGS + 2 * Ring<STAGES>::BYTES + 16;
static_assert(AT_ALL == LA_SHARED, "linattn_np/softmax/cuda/path_plan.py");

// Groups of blocks from a block's own to the first
struct Groups {
    int left, levels, level, size;   // blocks before the queries; of the group
    __device__ __forceinline__ Groups(int block, int levels) : left(block), levels(levels) { choose(); }
    __device__ __forceinline__ void choose() {
        level = left ? min((__ffs(left) - 1) / RADIX_BITS, levels - 1) : 0;
        size = 1 << RADIX_BITS * level;
    }
    __device__ __forceinline__ void next() {
        left -= size;
        choose();
    }
    __device__ __forceinline__ int number() const { return (left >> RADIX_BITS * level) - 1; }
    __device__ __forceinline__ bool is_last() const { return left <= size; }
};
struct Rings {
    Ring<STAGES> keys, values;
    u32 queries;
    __device__ __forceinline__ Rings(u32 shared)
        : keys{shared + AT_RINGS},
          values{shared + AT_RINGS + Ring<STAGES>::BYTES},
          queries(shared + AT_RINGS + 2 * Ring<STAGES>::BYTES) {}
    __device__ __forceinline__ void init() const {
        keys.init(1 + GATED * ARRIVALS, CONSUMERS / 32 * ARRIVALS);
        values.init(1, CONSUMERS / 32 * ARRIVALS);
        barrier_init(queries, 1);
        barriers_made();
    }
};

// Fills the rings: of keys with W, K, X, U of the own block, then keys and maps; of values
struct Producer {
    const PathArguments& a;
    const Place& place;
    const u32 shared;
    const int lane;
    const Rings rings;
    const Stored stored;
    const Decays* const sums;
    int items, tiles;   // so far
    __device__ __forceinline__ Producer(const PathArguments& a, const Place& place, u32 shared, int lane)
        : a(a),
          place(place),
          shared(shared),
          lane(lane),
          rings(shared),
          stored(a, place, place.head / a.of.group_k),
          sums(a.of.sums + place.numbers(a.of, place.head)),
          items(0),
          tiles(0) {}

    // an item of the ring of keys: load(address, barrier), by one lane; its decays, by all
    template <class Load, class More> __device__ __forceinline__ void item(u32 bytes, Load load, More more) {
        const u32 full = rings.keys.full(items);
        rings.keys.wait_empty(items);
        if (lane == 0) {
            barrier_expect(full, bytes);
            load(shared + AT_K + items % STAGES * KEY_STAGE, full);
        }
        if constexpr (GATED) {
            more(shared + AT_DECAYS + items % STAGES * KEYS * 16);
            warp_arrive(full, lane);
        }
        items++;
    }
    __device__ __forceinline__ void run_item(const char* from, u32 bytes) {
        item(bytes, [&](u32 to, u32 full) { run_in(to, from, bytes, full); }, [](u32) {});
    }
    __device__ __forceinline__ void values(int block) {
        const u32 full = rings.values.full(tiles);
        rings.values.wait_empty(tiles);
        if (lane == 0) {
            barrier_expect(full, Values::SIZE);
            tile_in<Values>(shared + AT_V + tiles % STAGES * Values::SIZE, a.of.v, full, place,
                            place.head / a.of.group_v, block * BLOCK);
        }
        tiles++;
    }
    __device__ __forceinline__ void run() {
        const int block = place.tile, i0 = block * BLOCK, key_head = place.head / a.of.group_k;
        const Decays before = GATED && i0 ? sums[i0 - 1] : Decays{};
        if (lane == 0) {
            barrier_expect(rings.queries, Rows128::SIZE);
            tile_in<Rows128>(shared, a.of.q, rings.queries, place, place.head / a.of.group_q, i0);
        }
        item(
            Rows128::SIZE, [&](u32 to, u32 full) { tile_in<Rows128>(to, a.w, full, place, key_head, i0); }, [](u32) {});
        item(
            Rows128::SIZE, [&](u32 to, u32 full) { tile_in<Rows128>(to, a.of.k, full, place, key_head, i0); },
            [](u32) {});
        item(
            Pairs::SIZE, [&](u32 to, u32 full) { run_in(to, stored.factors(block), Pairs::SIZE, full); },
            [&](u32 to) { store_key_decays<KEYS>(to, sums, i0, place.T, true, before, lane); });
        if (block) run_item(stored.factors(block) + Pairs::SIZE, Rows128::SIZE);
        values(block);
        for (Groups g(block, a.levels); g.left; g.next()) {
            for (int j = g.left - 1; j >= g.left - g.size; j--) {
                item(
                    Rows128::SIZE, [&](u32 to, u32 full) { run_in(to, stored.keys(g.level, j), Rows128::SIZE, full); },
                    [&](u32 to) { store_key_decays<KEYS>(to, sums, j * BLOCK, place.T, false, before, lane); });
                values(j);
            }
            if (!g.is_last()) run_item(stored.maps(g.level, g.number()), Maps::SIZE);
        }
    }
};

// Numbers of pairs above the diagonal of the own block become `to`
LA_DEVICE void mask(float (&s)[KEYS / 8][4], float to, const Lane& me) {
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (n * 8 + me.column + (e & 1) > me.row + 8 * (e >> 1)) s[n][e] = to;
}
template <int N> LA_DEVICE void end_products(float (&x)[N][4]) {
    products_wait<0>();
    accumulator_fence(x);
}
template <int N> LA_DEVICE void negate(float (&x)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        x[n][0] = -x[n][0];
        x[n][1] = -x[n][1];
        x[n][2] = -x[n][2];
        x[n][3] = -x[n][3];
    }
}

struct Consumer {
    const PathArguments& a;
    const Place& place;
    const u32 shared;
    const Lane me;
    const Rings rings;
    int items, tiles;
    float m[2], l[2], factor[2], r[2];   // of the two rows: maximum, sum, 2^(m - m'); log2 decay from the block's start
    Decays own[2];

    __device__ __forceinline__ Consumer(const PathArguments& a, const Place& place, u32 shared, int thread)
        : a(a), place(place), shared(shared), me(thread), rings(shared), items(0), tiles(0) {
        const int i0 = place.tile * BLOCK;
        const Decays* const sums = a.of.sums + place.numbers(a.of, place.head);
        const Decays before = GATED && i0 ? sums[i0 - 1] : Decays{};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            m[h] = minus_infinity();
            l[h] = r[h] = 0.f;
            if constexpr (GATED) {
                own[h] = sums[min(i0 + me.row + 8 * h, place.T - 1)];
                r[h] = decay_between(own[h], before);
            }
        }
    }
    __device__ __forceinline__ u32 key_stage() const { return shared + AT_K + items % STAGES * KEY_STAGE; }
    __device__ __forceinline__ void release_keys() { warp_arrive(rings.keys.empty(items++), me.lane); }

    // x = Q B^T of the next item, begun
    template <class B, int N> __device__ __forceinline__ void begin_rows(float (&x)[N][4]) {
        rings.keys.wait_full(items);
        products_begin();
        multiply_rows_ABt<Rows128, B>(x, shared + me.group * 64 * 128, key_stage());
        products_commit();
    }
    // out += P V, begun; values of another sequence become zeros
    __device__ __forceinline__ void begin_values(float (&out)[WIDTH_V / 8][4], const u32 (&p)[KEYS / 16][4]) {
        const u32 values = shared + AT_V + tiles % STAGES * Values::SIZE;
        rings.values.wait_full(tiles);
        if (tiles == 0 && place.T - place.tile * BLOCK < KEYS) {
            clear_rows_from<Values>(values, place.T - place.tile * BLOCK);
            rows_cleared();
        }
        accumulator_fence(out);
        products_begin();
        multiply_rows_AB<Values>(out, p, values);
        products_commit();
    }
    __device__ __forceinline__ void end_values() { warp_arrive(rings.values.empty(tiles++), me.lane); }

    // Q <- Q - x, the queries of this group
    template <bool FIRST> __device__ __forceinline__ void subtract(const float (&x)[WIDTH_K / 8][4]) {
        group_barrier(me.group);   // all have read them
#pragma unroll
        for (int n = 0; n < WIDTH_K / 8; n++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 at = shared + Rows128::at(me.row + 8 * h, n * 8 + me.column),
                          rest = shared + AT_REST + ((n * 2 + h) * CONSUMERS + threadIdx.x) * 4;
                const u32 q = __float_as_uint(load_shared(at)), more = FIRST ? 0 : __float_as_uint(load_shared(rest));
                const float u = (low_bf16(q) - x[n][2 * h]) + low_bf16(more),
                            v = (high_bf16(q) - x[n][2 * h + 1]) + high_bf16(more);
                const u32 y = pack_bf16(u, v);
                store_shared_u32(at, y);
                store_shared_u32(rest, pack_bf16(u - low_bf16(y), v - high_bf16(y)));
            }
        publish_shared();
        group_barrier(me.group);
    }
    // z and decays of the own block, or of a block before it
    template <bool OWN> __device__ __forceinline__ void add_decays(float (&s)[KEYS / 8][4]) {
        const u32 decays = shared + AT_DECAYS + items % STAGES * KEYS * 16;
        const float c = a.of.scale * LOG2_E;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
            if constexpr (OWN) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const Decays key = load_decays(decays + (n * 8 + me.column + e) * 16);
                    s[n][e] = s[n][e] * c + decay_between(own[0], key);
                    s[n][2 + e] = s[n][2 + e] * c + decay_between(own[1], key);
                }
            } else {
                const float2 x = load_shared2(decays + (n * 8 + me.column) * 4);
                s[n][0] = s[n][0] * c + x.x;
                s[n][1] = s[n][1] * c + x.y;
                s[n][2] = s[n][2] * c + x.x;
                s[n][3] = s[n][3] * c + x.y;
            }
    }
    // scores of a tile of keys become exponentials; it is free then
    template <bool OWN> __device__ __forceinline__ void exponentiate(float (&s)[KEYS / 8][4]) {
        const float c = a.of.scale * LOG2_E;
        if constexpr (GATED) add_decays<OWN>(s);
        release_keys();
        if (OWN) mask(s, minus_infinity(), me);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float most = s[0][2 * h], sum = 0.f;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) most = fmaxf(most, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
            most = row_max(most);
            const float far = GATED && !OWN ? r[h] : 0.f;
            most = fmaxf(m[h], GATED ? most + far : most * c);
            const float finite = most == minus_infinity() ? 0.f : most, shift = finite - far;
            factor[h] = exp2_approx(m[h] - finite);
            m[h] = most;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& y = s[n][2 * h + e];
                    y = exp2_approx(GATED ? y - shift : y * c - shift);
                    sum += y;
                }
            l[h] = l[h] * factor[h] + sum;
        }
    }
    // the denominator: 1 / l; l becomes its logarithm
    __device__ __forceinline__ void finish(float (&f)[2]) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            l[h] = row_sum(l[h]);
            f[h] = a.of.normalize ? 1.f / l[h] : exp2_approx(m[h]);
            l[h] = a.of.normalize ? m[h] + log2_approx(l[h]) : 0.f;
        }
    }
    __device__ __forceinline__ void store(const float (&out)[WIDTH_V / 8][4], const float (&f)[2]) {
        const int i0 = place.tile * BLOCK, left = place.T - i0;
        groups_barrier<CONSUMERS>(GROUPS + 1);   // all have read the queries
        store_rows<Outputs, LA_V>(rows_of(a.of.out, place, place.head) + i0 * a.of.out.token, a.of.out.token, left,
                                  shared, out, f, me);
        float* const logs = a.of.logs + place.numbers(a.of, place.head) + i0;
#pragma unroll
        for (int h = 0; h < 2; h++)
            if ((me.lane & 3) == 0 && me.row + 8 * h < left) logs[me.row + 8 * h] = l[h];
    }
    // p = exponentials of the own block; queries are mapped to its start
    __device__ __forceinline__ void own_block(u32 (&p)[KEYS / 16][4], float (&s)[KEYS / 8][4]) {
        begin_rows<Rows128>(s);   // E
        end_products(s);
        release_keys();
        mask(s, 0.f, me);
        negate(s);
        pack_operands(p, s);
        begin_rows<Rows128>(s);
        end_products(s);
        release_keys();
        rings.keys.wait_full(items);
        products_begin();
        multiply_rows_AB<Pairs>(s, p, key_stage());
        products_commit();
        end_products(s);
        if (place.tile == 0) {
            exponentiate<true>(s);
        } else {
            float x[WIDTH_K / 8][4];
            clear_tiles(x);
            exponentiate<true>(s);
            rings.keys.wait_full(items);
            accumulator_fence(x);
            products_begin();
            multiply_rows_AB<Rows128>(x, p, key_stage());
            products_commit();
            end_products(x);
            release_keys();
            negate(x);
            subtract<true>(x);
        }
        pack_operands(p, s);
    }
    __device__ __forceinline__ void run() {
        float out[WIDTH_V / 8][4], s[KEYS / 8][4], f[2];
        u32 p[KEYS / 16][4];
        barrier_wait(rings.queries, 0);
        own_block(p, s);
        clear_tiles(out);
        for (Groups g(place.tile, a.levels); g.left; g.next()) {
            for (int n = 0; n < g.size; n++) {
                begin_rows<Rows128>(s);
                begin_values(out, p);
                products_wait<1>();
                accumulator_fence(s);
                exponentiate<false>(s);
                products_wait<0>();
                accumulator_fence(out);
                end_values();
#pragma unroll
                for (int n = 0; n < WIDTH_V / 8; n++) {
                    out[n][0] *= factor[0];
                    out[n][1] *= factor[0];
                    out[n][2] *= factor[1];
                    out[n][3] *= factor[1];
                }
                pack_operands(p, s);
            }
            if (!g.is_last()) {
                float x[WIDTH_K / 8][4];
                begin_rows<Maps>(x);
                end_products(x);
                release_keys();
                subtract<false>(x);
            }
        }
        begin_values(out, p);
        finish(f);
        end_products(out);
        store(out, f);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ PathArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    Place place(a.of, a.of.heads);
    place.tile = a.of.blocks - 1 - place.tile;   // those with most keys first
    if (place.tile * BLOCK >= place.T) return;
    if (threadIdx.x == 0) Rings(shared).init();
    __syncthreads();
    run_roles([&](int lane) { Producer(a, place, shared, lane).run(); },
              [&](int thread) { Consumer(a, place, shared, thread).run(); });
}
