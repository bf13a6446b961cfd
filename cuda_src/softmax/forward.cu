// Softmax attention of 128 queries of a head: out and l = log2 of the sum of the exponentials, one tile of keys after
// the other, the nearest first.
//
//     z_ij = scale log2(e) q_i.k_j + log2 of the decay from j to i,    m' = max(m, max_j z_ij),   e_ij = 2^(z_ij - m')
//     l' = 2^(m - m') l + sum_j e_ij,   out' = 2^(m - m') out + sum_j e_ij v_j
//
// With decays a bound of the maximum will do for earlier tiles whose decays differ by SPREAD at most, m' is m unless
// that is SLACK above it, and a warp finds meanwhile which tiles have no weight (limit.cuh): they are not read. A
// warpgroup has 64 queries. While the products of a tile with its values run, the next tile's scores become
// exponentials.
//
// LA_POLYNOMIAL: e_ij is polynomial.cuh's polynomial of z_ij, without a maximum; l is stored as
// 1 / (sum_j e_ij + eps), 0 for 0, or 1 without a denominator.
#include "softmax/limit.cuh"
#include "softmax/polynomial.cuh"
#include "softmax/tiles.cuh"

constexpr int KEYS = 128, STAGES = 2,
              SURE = 4;   // keys of a tile; tiles in flight; tiles that are read before the limit is known
constexpr float SLACK = 8.f,
                SPREAD = LA_DTYPE == 1 ? 1.f : 32.f;   // exponentials are 2^SLACK at most; float16 has few small ones
typedef Panels<WIDTH_K, BLOCK> Queries;
typedef Panels<WIDTH_K, KEYS> Keys;
typedef Panels<WIDTH_V, KEYS> Values;
typedef Panels<WIDTH_V, BLOCK> Outputs;   // where the queries have been
constexpr int QUERIES = Queries::SIZE > Outputs::SIZE ? Queries::SIZE : Outputs::SIZE;
constexpr int AT_K = QUERIES, AT_V = AT_K + STAGES * Keys::SIZE, AT_DECAYS = AT_V + STAGES * Values::SIZE;
constexpr int DECAYS =
    KEYS * 4 + 16;   // of a tile: of each key to the block's start; the largest and least of each half
constexpr int AT_LIMIT = AT_DECAYS + GATED * STAGES * DECAYS,
              AT_STEPS = AT_LIMIT + 32;   // the least m of eight warps; steps
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
        : keys{shared + AT_RINGS},
          values{shared + AT_RINGS + Ring<STAGES>::BYTES},
          queries(shared + AT_RINGS + 2 * Ring<STAGES>::BYTES),
          least(queries + 8),
          limit(queries + 16) {}
    __device__ __forceinline__ void init() const {
        keys.init(1 + GATED * 2 * ARRIVALS, CONSUMERS / 32 * ARRIVALS);
        values.init(1, CONSUMERS / 32 * ARRIVALS);
        barrier_init(queries, 1);
        barrier_init(least, CONSUMERS / 32 * ARRIVALS);
        barrier_init(limit, ARRIVALS);
        barriers_made();
    }
};
// The steps of a block, the steps from SURE on wait for the limit
struct Steps {
    const u32 shared;
    int known;
    __device__ __forceinline__ Steps(const Scan& scan, u32 shared)
        : shared(shared), known(GATED ? min(scan.steps, SURE) : scan.steps) {}
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
                sum = add_squares(
                    sum, {__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w)});
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
            const u32 skipped = __ballot_sync(
                0xffffffffu,
                own < scan.steps && weightless(above, query, sums[scan.key(min(own, scan.steps - 1)) + KEYS - 1]));
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

// Log2 decays from the keys of every tile to the token before the block (of its own keys the negative ones), by two warps
LA_DEVICE void produce_decays(const AttentionArguments& a, const Place& place, const Scan& scan, u32 shared,
                              int thread) {
    const Rings rings(shared);
    const int i0 = place.tile * BLOCK;
    const Decays* const sums = a.sums + place.numbers(a, place.head);
    const Decays before = i0 ? sums[i0 - 1] : Decays{};
    Steps steps(scan, shared);
#pragma unroll 1
    for (int step = 0; steps.has(step); step++) {
        rings.keys.wait_empty(step);
        const int j = scan.key(step) + thread;
        const u32 to = shared + AT_DECAYS + step % STAGES * DECAYS;
        // a NaN becomes minus infinity: later rows have it in their own decays, earlier ones do not read the key
        const float x = fmaxf(decay_between(before, sums[min(j, place.Tk - 1)]), minus_infinity());
        const float y = fmaxf(decay_between(before, sums[min(j + 64, place.Tk - 1)]), minus_infinity());
        const float most = warp_max(fmaxf(x, y)), least = -warp_max(fmaxf(-x, -y));
        store_shared(to + thread * 4, x);
        store_shared(to + (64 + thread) * 4, y);
        if ((thread & 31) == 0) store_shared2(to + KEYS * 4 + thread / 32 * 8, most, least);
        warp_arrive(rings.keys.full(step), thread & 31);
    }
}

// Two rows of scores of a lane, which become exponentials
struct Scores {
    const AttentionArguments& a;
    const Place& place;
    const Scan& scan;
    const u32 shared;
    const Lane me;
    const Rings rings;
    const int i0;
    float m[2], l[2], factor[2], r[2];   // of the two rows: maximum, sum, 2^(m - m'); log2 decay from the block's start

    __device__ __forceinline__ Scores(const AttentionArguments& a, const Place& place, const Scan& scan, u32 shared,
                                      int thread)
        : a(a), place(place), scan(scan), shared(shared), me(thread), rings(shared), i0(place.tile * BLOCK) {
        const Decays* const sums = a.sums + place.numbers(a, place.head);
        const Decays before = GATED && i0 ? sums[i0 - 1] : Decays{};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            m[h] = minus_infinity();
            l[h] = r[h] = 0.f;
            if constexpr (GATED) r[h] = decay_between(sums[min(i0 + me.row + 8 * h, place.T - 1)], before);
        }
    }
    __device__ __forceinline__ u32 decays(int step) const { return shared + AT_DECAYS + step % STAGES * DECAYS; }
    // Whether the decays between a row's own keys are not differences of those to the block's start: a reset is among
    // them, or many digits are lost. No later row has a say in it
    __device__ __forceinline__ bool is_steep(int h) const { return !(r[h] >= -512.f); }
    // scores of the own tile become logits where rows are steep
    __device__ __forceinline__ void add_decays(float (&s)[KEYS / 8][4]) const {
        const float c = a.scale * LOG2_E;
        const int last = place.T - 1 - i0;
        const Decays* const sums = a.sums + place.numbers(a, place.head) + i0;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (!is_steep(h)) continue;
            const Decays own = sums[min(me.row + 8 * h, last)];
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; e++)
                    s[n][e] = s[n][e] * c + decay_between(own, sums[min(n * 8 + me.column + (e & 1), last)]);
        }
    }
    __device__ __forceinline__ void mask(float (&s)[KEYS / 8][4], int step) const {
        const int j0 = scan.key(step);
        const Reach x = place.reach(a, i0 + me.row), y = place.reach(a, i0 + me.row + 8);
        if (j0 + KEYS - 1 <= place.reach(a, i0 + me.first()).high && j0 >= place.reach(a, i0 + me.first() + 15).low)
            return;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int j = j0 + n * 8 + me.column + (e & 1);
                const Reach& z = e < 2 ? x : y;
                if (j > z.high || j < z.low) s[n][e] = unread();
            }
    }
    __device__ __forceinline__ float largest(const float (&s)[KEYS / 8][4], int h) const {   // score of a lane's row h
        float most = s[0][2 * h];
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) most = fmaxf(most, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
        return most;
    }
    // Factors of the scores of a lane's two rows, decays from keys n * 8 + column and the next one to the block's
    // start, from there to the rows: 1 and 0 where the scores are logits
    template <bool STEEP> __device__ __forceinline__ float factor_of(int h) const {
        return STEEP && is_steep(h) ? 1.f : a.scale * LOG2_E;
    }
    template <bool STEEP> __device__ __forceinline__ float key_decay(const float2& x, int e) const {
        return STEEP && is_steep(e >> 1) ? 0.f : e & 1 ? x.y : x.x;
    }
    template <bool STEEP> __device__ __forceinline__ float row_decay(int h) const {
        return STEEP && is_steep(h) ? 0.f : r[h];
    }
    // an upper bound of the logits of a lane's two rows, less the decays from the block's start to the rows
    template <bool STEEP> __device__ __forceinline__ void bound(float (&most)[2], const float (&s)[KEYS / 8][4],
                                                                int step) const {
        const Decays ends = load_decays(decays(step) + KEYS * 4);
        const float nearest = fmaxf(ends.x, ends.z);
        if (step == 0 || !(nearest - fminf(ends.y, ends.w) <=
                           SPREAD)) {   // exactly; of the own keys, since they often have most weight
            most[0] = most[1] = minus_infinity();
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
                const float2 x = load_shared2(decays(step) + (n * 8 + me.column) * 4);
#pragma unroll
                for (int e = 0; e < 4; e++)
                    most[e >> 1] = fmaxf(most[e >> 1], s[n][e] * factor_of<STEEP>(e >> 1) + key_decay<STEEP>(x, e));
            }
        } else
#pragma unroll
            for (int h = 0; h < 2; h++) most[h] = largest(s, h) * factor_of<false>(h) + nearest;
    }
    // Scores become their polynomials
    __device__ __forceinline__ void evaluate(float (&s)[KEYS / 8][4], int step) {
        warp_arrive(rings.keys.empty(step), me.lane);
        mask(s, step);
        float sum[2] = {0.f, 0.f};
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[n][e] = weight_of(a, s[n][e]);
                sum[e >> 1] += s[n][e];
            }
#pragma unroll
        for (int h = 0; h < 2; h++) l[h] += sum[h];
    }
    // Scores become exponentials. STEEP: some row of the warp is, in the own tile
    template <bool STEEP = false> __device__ __forceinline__ void exponentiate(float (&s)[KEYS / 8][4], int step) {
        if constexpr (POLYNOMIAL) return evaluate(s, step);
        constexpr int ROWS = 1 + GATED;   // at once
        float most[2], shift[2], sum[2] = {0.f, 0.f};
        if constexpr (STEEP) add_decays(s);
        if constexpr (!GATED) warp_arrive(rings.keys.empty(step), me.lane);
        mask(s, step);
        if constexpr (GATED) bound<STEEP>(most, s, step);
#pragma unroll
        for (int h0 = 0; h0 < 2; h0 += ROWS) {
#pragma unroll
            for (int h = h0; h < h0 + ROWS; h++) {
                const float far = row_decay<STEEP>(h),
                            x = GATED ? row_max(most[h]) + far : row_max(largest(s, h)) * factor_of<false>(h);
                const float next = !GATED             ? fmaxf(m[h], x)
                                   : x > m[h] + SLACK ? x
                                                      : m[h],
                            finite = next == minus_infinity() ? 0.f : next;
                factor[h] = exp2_approx(m[h] - finite);
                m[h] = next;
                shift[h] = GATED ? finite - far : finite;
            }
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
                float2 x;
                if constexpr (GATED) x = load_shared2(decays(step) + (n * 8 + me.column) * 4);
#pragma unroll
                for (int e = 2 * h0; e < 2 * (h0 + ROWS); e++) {
                    const int h = e >> 1;
                    s[n][e] = exp2_approx(s[n][e] * factor_of<STEEP>(h) +
                                          (GATED ? key_decay<STEEP>(x, e) - shift[h] : -shift[h]));
                    sum[h] += s[n][e];
                }
            }
#pragma unroll
            for (int h = h0; h < h0 + ROWS; h++) l[h] = l[h] * factor[h] + sum[h];
        }
        if constexpr (GATED) warp_arrive(rings.keys.empty(step), me.lane);
    }
};

struct Consumer : Scores {
    using Scores::Scores;
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
    // the sink, the denominator: 1 / l (times the sink's factor); l becomes its logarithm
    __device__ __forceinline__ void finish(float (&f)[2]) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            l[h] = row_sum(l[h]);
            if constexpr (POLYNOMIAL) {
                const float sum = l[h] + a.eps;
                f[h] = l[h] = !a.normalize ? 1.f : sum == 0.f ? 0.f : 1.f / sum;
                continue;
            }
            if (!a.normalize) {
                f[h] = exp2_approx(m[h]);
                l[h] = 0.f;
                continue;
            }
            const float sink = a.sinks ? a.sinks[place.head / a.group_s] * LOG2_E : minus_infinity(),
                        most = fmaxf(m[h], sink);
            const float finite = most == minus_infinity() ? 0.f : most, less = exp2_approx(m[h] - finite);
            const float all = l[h] * less + exp2_approx(sink - finite), sum = most == minus_infinity() ? 1.f : all;
            f[h] = less / sum;
            l[h] = finite + log2_approx(sum);
        }
    }
    // of the warp's rows
    __device__ __forceinline__ float least(const float (&x)[2]) const {
        return warp_min_or_nan(min_or_nan(x[0], x[1]));
    }
    __device__ __forceinline__ void store(const float (&out)[WIDTH_V / 8][4], const float (&f)[2]) {
        const int left = place.T - i0;
        group_barrier(me.group);   // all have read the queries
        store_rows<Outputs, LA_V>(rows_of(a.out, place, place.head) + i0 * a.out.token, a.out.token, left, shared, out,
                                  f, me);
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
        if (GATED && __any_sync(0xffffffffu, is_steep(0) || is_steep(1))) exponentiate<GATED>(s, 0);
        else exponentiate(s, 0);
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
            if constexpr (GATED) settle(l[0] + l[1]);   // the exponentials
            products_wait<0>();
            accumulator_fence(out);
            warp_arrive(rings.values.empty(step - 1), me.lane);
            if (!POLYNOMIAL && (!GATED || __any_sync(0xffffffffu, factor[0] != 1.f || factor[1] != 1.f)))
#pragma unroll
                for (int n = 0; n < WIDTH_V / 8; n++) {
                    out[n][0] *= factor[0];
                    out[n][1] *= factor[0];
                    out[n][2] *= factor[1];
                    out[n][3] *= factor[1];
                }
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
