// Softmax attention of 128 queries of a head: out and l = log2 of the sum of the exponentials, one tile of keys after the other, the
// nearest first.
//
//     z_ij = scale log2(e) q_i.k_j + log2 of the decay from j to i,    m' = max(m, max_j z_ij),   e_ij = 2^(z_ij - m')
//     l' = 2^(m - m') l + sum_j e_ij,   out' = 2^(m - m') out + sum_j e_ij v_j
//
// With decays a warp finds meanwhile which tiles have no weight (limit.cuh): they are not read. A warpgroup has 64 queries. While the products of a tile with its values run, the next tile's scores become exponentials.
#include "softmax/limit.cuh"
#include "softmax/tiles.cuh"

constexpr int KEYS = 128, STAGES = 2, SURE = 4;   // keys of a tile; tiles in flight; tiles that are read before the limit is known
typedef Panels<WIDTH_K, BLOCK> Queries;
typedef Panels<WIDTH_K, KEYS> Keys;
typedef Panels<WIDTH_V, KEYS> Values;
typedef Panels<WIDTH_V, BLOCK> Outputs;   // where the queries have been
constexpr int QUERIES = Queries::SIZE > Outputs::SIZE ? Queries::SIZE : Outputs::SIZE;
constexpr int AT_K = QUERIES, AT_V = AT_K + STAGES * Keys::SIZE, AT_DECAYS = AT_V + STAGES * Values::SIZE;
constexpr int AT_LIMIT = AT_DECAYS + GATED * STAGES * KEYS * 16, AT_STEPS = AT_LIMIT + 32;   // the least m of eight warps; steps
constexpr int AT_RINGS = AT_LIMIT + GATED * 48, AT_ALL = AT_RINGS + 2 * Ring<STAGES>::BYTES + 32;
static_assert(AT_ALL == LA_SHARED, "linattn_np/softmax/cuda/plan.py");

// The tiles of keys that a block reads, from the last
struct Scan {
    int last, steps;
    __device__ __forceinline__ Scan(const AttentionArguments& a, const Place& place, int i0) {
        const int first = max(place.reach(a, i0).low, 0) / KEYS;
        last = place.reach(a, min(i0 + BLOCK, place.T) - 1).high / KEYS;
        steps = last - first + 1;
    }
    __device__ __forceinline__ int key(int step) const { return (last - step) * KEYS; }   // the first of a tile
};
struct Rings {
    Ring<STAGES> keys, values;
    u32 queries, least, limit;
    __device__ __forceinline__ Rings(u32 shared)
        : keys{shared + AT_RINGS}, values{shared + AT_RINGS + Ring<STAGES>::BYTES}, queries(shared + AT_RINGS + 2 * Ring<STAGES>::BYTES), least(queries + 8), limit(queries + 16) {}
    __device__ __forceinline__ void init() const {
        keys.init(1 + GATED * 2 * ARRIVALS, CONSUMERS / 32 * ARRIVALS);
        values.init(1, CONSUMERS / 32 * ARRIVALS);
        barrier_init(queries, 1);
        barrier_init(least, CONSUMERS / 32 * ARRIVALS);
        barrier_init(limit, ARRIVALS);
        barriers_made();
    }
};
// The steps of a block, of which those from SURE on wait for the limit
struct Steps {
    const u32 shared;
    int known;
    __device__ __forceinline__ Steps(const Scan& scan, u32 shared) : shared(shared), known(GATED ? min(scan.steps, SURE) : scan.steps) {}
    __device__ __forceinline__ bool has(int step) {
        if (GATED && step == SURE && known == SURE) {
            barrier_wait(Rings(shared).limit, 0);
            known = __float_as_int(load_shared(shared + AT_STEPS));
        }
        return step < known;
    }
};

// How many steps have weights, by a warp. Also a bound of logits for the backward
LA_DEVICE void find_limit(const AttentionArguments& a, const Place& place, const Scan& scan, u32 shared, int lane) {
    const Rings rings(shared);
    const int i0 = place.tile * BLOCK, slot = place.slot(a, place.head);
    const Decays* const sums = a.sums + place.numbers(a, place.head);
    float keys = 0.f, bound = -minus_infinity();
#pragma unroll 1
    for (int n = lane; n <= place.tile; n += 32) keys = max_or_nan(keys, a.norms[slot - place.tile + n]);
    keys = warp_max_or_nan(keys);
    int steps = scan.steps;
    if (keys < -minus_infinity()) {
        float queries = 0.f;
        barrier_wait(rings.queries, 0);
#pragma unroll 1
        for (int row = lane; row < BLOCK; row += 32) {
            float sum = 0.f;
#pragma unroll 2
            for (int p = 0; p < WIDTH_K / 8; p++) {
                const Decays x = load_decays(shared + Queries::piece(row, p));
                sum = add_squares(sum, {__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w)});
            }
            queries = max_or_nan(queries, sum);
        }
        bound = a.scale * LOG2_E * 1.001f * keys * sqrtf(warp_max_or_nan(queries));
        barrier_wait(rings.least, 0);
        const float above = bound - warp_min_or_nan(load_shared(shared + AT_LIMIT + (lane & 7) * 4));
        const Decays query = sums[i0];
#pragma unroll 1
        for (int step = SURE; step < steps; step += 32) {
            const int own = step + lane;
            const u32 skipped = __ballot_sync(0xffffffffu, own < scan.steps && weightless(above, query, sums[scan.key(min(own, scan.steps - 1)) + KEYS - 1]));
            if (skipped) steps = step + __ffs(skipped) - 1;
        }
    }
    if (lane == 0) {
        a.bounds[slot] = bound;
        store_shared(shared + AT_STEPS, __int_as_float(steps));
    }
    warp_arrive(rings.limit, lane);
}

LA_DEVICE void produce(const AttentionArguments& a, const Place& place, const Scan& scan, u32 shared, int lane) {
    const Rings rings(shared);
    const int i0 = place.tile * BLOCK, key_head = place.head / a.group_k, value_head = place.head / a.group_v;
    if (lane == 0) {
        barrier_expect(rings.queries, Queries::SIZE);
        tile_in<Queries>(shared, a.q, rings.queries, place, place.head / a.group_q, i0);
    }
    Steps steps(scan, shared);
    for (int step = 0; steps.has(step); step++) {
        const int stage = step % STAGES, j0 = scan.key(step);
        rings.keys.wait_empty(step);
        if (lane == 0) {
            barrier_expect(rings.keys.full(step), Keys::SIZE);
            tile_in<Keys>(shared + AT_K + stage * Keys::SIZE, a.k, rings.keys.full(step), place, key_head, j0);
        }
        rings.values.wait_empty(step);
        if (lane == 0) {
            barrier_expect(rings.values.full(step), Values::SIZE);
            tile_in<Values>(shared + AT_V + stage * Values::SIZE, a.v, rings.values.full(step), place, value_head, j0);
        }
    }
}

// the decays of the keys of every tile (tiles.cuh), by two warps
LA_DEVICE void produce_decays(const AttentionArguments& a, const Place& place, const Scan& scan, u32 shared, int thread) {
    const Rings rings(shared);
    const int i0 = place.tile * BLOCK;
    const Decays* const sums = a.sums + place.numbers(a, place.head);
    Steps steps(scan, shared);
#pragma unroll 1
    for (int step = 0; steps.has(step); step++) {
        rings.keys.wait_empty(step);
#pragma unroll 2
        for (int n = 0; n < KEYS / 64; n++) {
            const int j0 = scan.key(step), r = n * 64 + thread;
            const u32 to = shared + AT_DECAYS + step % STAGES * KEYS * 16;
            const Decays x = sums[min(j0 + r, place.Tk - 1)];
            if (j0 + KEYS > i0) store_decays(to + r * 16, x);
            else store_shared(to + r * 4, decay_between(sums[i0 - 1], x));
        }
        warp_arrive(rings.keys.full(step), thread & 31);
    }
}

struct Consumer {
    const AttentionArguments& a;
    const Place& place;
    const Scan& scan;
    const u32 shared;
    const Lane me;
    const Rings rings;
    const int i0;
    float m[2], l[2], factor[2], r[2];   // of the two rows: maximum, sum, 2^(m - m'); log2 decay from the block's start
    Decays own[2];

    __device__ __forceinline__ Consumer(const AttentionArguments& a, const Place& place, const Scan& scan, u32 shared, int thread)
        : a(a), place(place), scan(scan), shared(shared), me(thread), rings(shared), i0(place.tile * BLOCK) {
        const Decays* const sums = a.sums + place.numbers(a, place.head);
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
    // scores of a tile, begun
    __device__ __forceinline__ void begin_scores(float (&s)[KEYS / 8][4], int step) {
        rings.keys.wait_full(step);
        products_begin();
        multiply_rows_ABt<Queries, Keys>(s, shared + me.group * 64 * 128, shared + AT_K + step % STAGES * Keys::SIZE);
        products_commit();
    }
    // out += P V, begun; values of another sequence become zeros
    __device__ __forceinline__ void begin_values(float (&out)[WIDTH_V / 8][4], const u32 (&p)[KEYS / 16][4], int step) {
        const u32 values = shared + AT_V + step % STAGES * Values::SIZE;
        rings.values.wait_full(step);
        const int own = place.Tk - scan.key(step);
        if (own < KEYS) {
            clear_rows_from<Values>(values, own);
            rows_cleared();
        }
        products_begin();
        multiply_rows_AB<Values>(out, p, values);
        products_commit();
    }
    // scores and decays; the keys are free then
    __device__ __forceinline__ void add_decays(float (&s)[KEYS / 8][4], int step) {
        const u32 decays = shared + AT_DECAYS + step % STAGES * KEYS * 16;
        const float c = a.scale * LOG2_E;
        if (scan.key(step) + KEYS > i0) {
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
                if (scan.key(step) + n * 8 > i0 + me.first() + 15) continue;   // later than the warp's queries: masked below
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const Decays key = load_decays(decays + (n * 8 + me.column + e) * 16);
                    s[n][e] = s[n][e] * c + decay_between(own[0], key);
                    s[n][2 + e] = s[n][2 + e] * c + decay_between(own[1], key);
                }
            }
        } else
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
                const float2 x = load_shared2(decays + (n * 8 + me.column) * 4);
                s[n][0] = s[n][0] * c + x.x; s[n][1] = s[n][1] * c + x.y; s[n][2] = s[n][2] * c + x.x; s[n][3] = s[n][3] * c + x.y;
            }
    }
    __device__ __forceinline__ void mask(float (&s)[KEYS / 8][4], int step) const {
        const int j0 = scan.key(step);
        const Reach x = place.reach(a, i0 + me.row), y = place.reach(a, i0 + me.row + 8);
        if (j0 + KEYS - 1 <= place.reach(a, i0 + me.first()).high && j0 >= place.reach(a, i0 + me.first() + 15).low) return;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int j = j0 + n * 8 + me.column + (e & 1);
                const Reach& z = e < 2 ? x : y;
                if (j > z.high || j < z.low) s[n][e] = minus_infinity();
            }
    }
    // scores become exponentials
    __device__ __forceinline__ void exponentiate(float (&s)[KEYS / 8][4], int step) {
        const float c = a.scale * LOG2_E;
        if constexpr (GATED) add_decays(s, step);
        warp_arrive(rings.keys.empty(step), me.lane);
        mask(s, step);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float most = s[0][2 * h], sum = 0.f;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) most = fmaxf(most, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
            most = row_max(most);
            const float far = GATED && scan.key(step) + KEYS <= i0 ? r[h] : 0.f;
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
    // the sink, the denominator: 1 / l (times what the sink takes away); l becomes its logarithm
    __device__ __forceinline__ void finish(float (&f)[2]) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            l[h] = row_sum(l[h]);
            if (!a.normalize) {
                f[h] = exp2_approx(m[h]);
                l[h] = 0.f;
                continue;
            }
            const float sink = a.sinks ? a.sinks[place.head / a.group_s] * LOG2_E : minus_infinity(), most = fmaxf(m[h], sink);
            const float finite = most == minus_infinity() ? 0.f : most, less = exp2_approx(m[h] - finite);
            const float all = l[h] * less + exp2_approx(sink - finite), sum = most == minus_infinity() ? 1.f : all;
            f[h] = less / sum;
            l[h] = finite + log2_approx(sum);
        }
    }
    // of the warp's rows
    __device__ __forceinline__ float least(const float (&x)[2]) const { return warp_min_or_nan(min_or_nan(x[0], x[1])); }
    __device__ __forceinline__ void store(const float (&out)[WIDTH_V / 8][4], const float (&f)[2]) {
        const int left = place.T - i0;
        group_barrier(me.group);   // all have read the queries
        store_rows<Outputs, LA_V>(rows_of(a.out, place, place.head) + i0 * a.out.token, a.out.token, left, shared, out, f, me);
        float* const logs = a.logs + place.numbers(a, place.head) + i0;
#pragma unroll
        for (int h = 0; h < 2; h++)
            if ((me.lane & 3) == 0 && me.row + 8 * h < left) logs[me.row + 8 * h] = l[h];
        if constexpr (GATED) {
            const float x = least(l);
            if (me.lane == 0) a.least[(i64)place.slot(a, place.head) * (CONSUMERS / 32) + me.first() / 16] = x;
        }
    }
    __device__ __forceinline__ void run() {
        float out[WIDTH_V / 8][4], s[KEYS / 8][4], f[2];
        u32 p[KEYS / 16][4];
        clear_tiles(out);
        barrier_wait(rings.queries, 0);
        begin_scores(s, 0);
        products_wait<0>();
        accumulator_fence(s);
        exponentiate(s, 0);
        pack_operands(p, s);
        if constexpr (GATED) {
            const float x = least(m);
            if (me.lane == 0) store_shared(shared + AT_LIMIT + me.first() / 16 * 4, x);
            warp_arrive(rings.least, me.lane);
        }
        Steps steps(scan, shared);
        for (int step = 1; steps.has(step); step++) {
            begin_scores(s, step);
            begin_values(out, p, step - 1);
            products_wait<1>();
            accumulator_fence(s);
            exponentiate(s, step);
            products_wait<0>();
            accumulator_fence(out);
            warp_arrive(rings.values.empty(step - 1), me.lane);
#pragma unroll
            for (int n = 0; n < WIDTH_V / 8; n++) { out[n][0] *= factor[0]; out[n][1] *= factor[0]; out[n][2] *= factor[1]; out[n][3] *= factor[1]; }
            pack_operands(p, s);
        }
        begin_values(out, p, steps.known - 1);
        finish(f);
        products_wait<0>();
        accumulator_fence(out);
        store(out, f);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ AttentionArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    Place place(a, a.heads);
    place.tile = a.blocks - 1 - place.tile;   // those with most keys first
    if (place.tile * BLOCK >= place.T) return;
    const Scan scan(a, place, place.tile * BLOCK);
    if (threadIdx.x == 0) Rings(shared).init();
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        release_registers<24>();
        const int thread = threadIdx.x - CONSUMERS;
        if (thread < 32) produce(a, place, scan, shared, thread);
        if (GATED && thread >= 32 && thread < 64) find_limit(a, place, scan, shared, thread - 32);
        if (GATED && thread >= 64) produce_decays(a, place, scan, shared, thread - 64);
    } else {
        claim_registers<240>();
        Consumer(a, place, scan, shared, threadIdx.x).run();
    }
}
