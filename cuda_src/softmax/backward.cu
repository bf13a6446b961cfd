// Gradients of 128 keys and values, of one or more heads that share them, and their share of dq: one tile of queries after the other,
// head after head.
//
//     p_ij = 2^(z_ij - l_i),   dv_j = sum_i p_ij dout_i,   dz_ij = p_ij (dout_i.v_j - dot_i),   dk_j = scale sum_i dz_ij q_i,
//     dq_i = scale sum_j dz_ij k_j                                                                              (z, l: forward.cu)
//
// Rows of the first products are keys, columns queries: P^T and dZ^T are operands of dv and dk as they are, and dZ goes through shared
// memory for dq. A tile's dq is added in float32 in global memory by the copy engine, block of keys after block of keys, the last one
// first: `added` counts the blocks that are in, and a block waits until it is next. It waits for blocks of the launch with lower numbers
// alone, which begin earlier. With decays also the sums of dz: of each key, of each query (added as dq is), of each tile.
#include "softmax/tiles.cuh"
#include "tile/reduce.cuh"
#include "tile/wgmma_across.cuh"

constexpr int QUERIES = 64, STAGES_Q = 3, STAGES_DOUT = 2;   // queries of a tile; tiles in flight
typedef Panels<WIDTH_K, BLOCK> Keys;
typedef Panels<WIDTH_V, BLOCK> Values;
typedef Panels<WIDTH_K, QUERIES> Queries;
typedef Panels<WIDTH_V, QUERIES> Douts;
typedef Panels<QUERIES, BLOCK> Weights;   // dz, rows are keys
constexpr int SHARE = WIDTH_K / GROUPS;   // columns of dq of a warpgroup
// With decays the first 8 columns are 1, as further keys of which dz makes the sum. Elsewhere the sums of decays of the queries of near
// tiles: piece 1 + s of a row, of stage s
typedef Panels<64, BLOCK> Ones;
constexpr int NUMBERS = QUERIES * 8, AT_DOTS = QUERIES * 4;   // of the queries of a stage: l (less the decay from this block's end), then dot
constexpr int AT_V = Keys::SIZE, AT_Q = AT_V + Values::SIZE, AT_DOUT = AT_Q + STAGES_Q * Queries::SIZE, AT_DZ = AT_DOUT + STAGES_DOUT * Douts::SIZE;
constexpr int AT_ONES = AT_DZ + 2 * Weights::SIZE, AT_DQ = AT_ONES + GATED * Ones::SIZE, AT_ROWS = AT_DQ + QUERIES * WIDTH_K * 4;
constexpr int AT_NUMBERS = AT_DQ + TILE_DQ * 4, AT_BARRIERS = AT_NUMBERS + STAGES_Q * NUMBERS;
constexpr int AT_ALL = AT_BARRIERS + Ring<STAGES_Q>::BYTES + Ring<STAGES_DOUT>::BYTES + Ring<1>::BYTES + 16;   // and two barriers
static_assert(AT_ALL == LA_SHARED, "linattn_np/softmax/cuda/plan.py");

struct Rings {
    Ring<STAGES_Q> queries;
    Ring<STAGES_DOUT> douts;
    Ring<1> dq;
    u32 keys, whole;
    __device__ __forceinline__ Rings(u32 shared)
        : queries{shared + AT_BARRIERS}, douts{queries.base + Ring<STAGES_Q>::BYTES}, dq{douts.base + Ring<STAGES_DOUT>::BYTES}, keys(dq.base + Ring<1>::BYTES), whole(keys + 8) {}
    __device__ __forceinline__ void init() const {
        queries.init(1 + 2 * ARRIVALS, CONSUMERS / 32 * ARRIVALS);
        douts.init(1, CONSUMERS / 32 * ARRIVALS);
        dq.init(CONSUMERS / 32 * ARRIVALS, ARRIVALS);
        barrier_init(keys, 2);
        barrier_init(whole, 1);
        barriers_made();
    }
};

// The tiles of queries that read a block, of every head that shares it
struct Scan {
    int first, tiles, steps;
    __device__ __forceinline__ Scan(const AttentionArguments& a, const Place& place, int j0) {
        first = place.reader(a, j0) / QUERIES;
        tiles = max((place.readers_end(a, min(j0 + BLOCK, place.Tk) - 1) + QUERIES - 1) / QUERIES - first, 0);
        steps = tiles * a.shared;
    }
};
struct Step {
    int n, tile, head;   // of all; of a head
    __device__ __forceinline__ Step(const AttentionArguments& a, const Place& place, const Scan& scan) : n(0), tile(scan.first), head(place.head * a.shared) {}
    __device__ __forceinline__ int query() const { return tile * QUERIES; }   // the first one
    __device__ __forceinline__ bool ends_head(const Scan& scan) const { return tile + 1 == scan.first + scan.tiles; }
    __device__ __forceinline__ void next(const Scan& scan) {
        const bool end = ends_head(scan);
        n++;
        tile = end ? scan.first : tile + 1;
        head += end;
    }
};

// l and dot of the queries of every tile, by two warps; r: the query of a thread
LA_DEVICE void produce_numbers(const AttentionArguments& a, const Place& place, const Scan& scan, u32 shared, int r) {
    const Rings rings(shared);
    for (Step step(a, place, scan); step.n < scan.steps; step.next(scan)) {
        const int i = step.query() + r, end = place.tile * BLOCK + BLOCK - 1;   // of the keys
        const bool near = step.query() <= end;
        float l = -minus_infinity(), dot = 0.f;
        Decays own = {0.f, 0.f, 0.f, 0.f};
        if (i < place.T) {
            const i64 numbers = opaque(place.numbers(a, step.head));
            l = a.logs[numbers + i];
            dot = a.dots[numbers + i];
            if (GATED) own = a.sums[numbers + i];
            if (GATED && !near) l -= decay_between(own, a.sums[numbers + end]);
        }
        rings.queries.wait_empty(step.n);
        const int stage = step.n % STAGES_Q;
        if (GATED && near) store_decays(shared + AT_ONES + Ones::piece(r, 1 + stage), own);
        store_shared(shared + AT_NUMBERS + stage * NUMBERS + r * 4, l);
        store_shared(shared + AT_NUMBERS + stage * NUMBERS + AT_DOTS + r * 4, dot);
        warp_arrive(rings.queries.full(step.n), r & 31);
    }
}
// Copies tiles in, of which rows of another sequence become zeros, by a warp
struct Producer {
    const AttentionArguments& a;
    const Place& place;
    const u32 shared, whole;   // whole: a barrier of tiles that are cleared before they are full
    const int lane;
    int waits;

    template <class X> __device__ __forceinline__ void fill(u32 to, const TensorMap& map, u32 barrier, int head, int token, int left) {
        const bool cut = left < X::ROWS;
        if (lane == 0) {
            barrier_expect(cut ? whole : barrier, X::SIZE);
            tile_in<X>(to, map, cut ? whole : barrier, place, head, token);
        }
        if (!cut) return;
        barrier_wait(whole, waits++ & 1);
#pragma unroll 1
        for (int n = lane; n < X::COLUMNS / 8 * X::ROWS; n += 32)
            if (n % X::ROWS >= left) store_decays(to + X::piece(n % X::ROWS, n / X::ROWS), {0.f, 0.f, 0.f, 0.f});
        publish_shared();
        __syncwarp();
        if (lane == 0) barrier_arrive(barrier);
    }
    __device__ __forceinline__ void run(const Scan& scan) {
        const Rings rings(shared);
        const int j0 = place.tile * BLOCK;
        fill<Keys>(shared, a.k, rings.keys, place.head * a.shared / a.group_k, j0, place.Tk - j0);
        fill<Values>(shared + AT_V, a.v, rings.keys, place.head * a.shared / a.group_v, j0, place.Tk - j0);
        for (Step step(a, place, scan); step.n < scan.steps; step.next(scan)) {
            const int n = step.n, i0 = step.query();
            rings.queries.wait_empty(n);
            fill<Queries>(shared + AT_Q + n % STAGES_Q * Queries::SIZE, a.q, rings.queries.full(n), step.head / a.group_q, i0, place.T - i0);
            rings.douts.wait_empty(n);
            fill<Douts>(shared + AT_DOUT + n % STAGES_DOUT * Douts::SIZE, a.dout, rings.douts.full(n), step.head, i0, place.T - i0);
        }
    }
};

LA_DEVICE int read_count(const int* count) {
    int x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(count) : "memory");
    return x;
}
LA_DEVICE void store_count(int* count, int n) { asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(count), "r"(n) : "memory"); }
// what other blocks added before they counted is there; what this one added is there before it counts
LA_DEVICE void order_counts() { asm volatile("fence.acq_rel.gpu;\nfence.proxy.async.global;" ::: "memory"); }
// Tiles of dq from shared to global memory, by a warp: the first block of keys stores a tile, the others add to it
struct Adder {
    const AttentionArguments& a;
    const Place& place;
    const u32 shared;
    const int lane;

    __device__ __forceinline__ int number(const Step& step) const { return place.tiles(a, step.head) + step.tile; }
    // of a tile: the number of blocks of keys before this one
    __device__ __forceinline__ int before(const Step& step) const { return place.last_block(a, step.query() + QUERIES - 1) - place.tile; }
    __device__ __forceinline__ void sum_rows(int tile) const {   // sums of dz of each query: of the tile
        const float2 x = load_shared2(shared + AT_ROWS + lane * 8);
        const float all = warp_sum(x.x + x.y);
        if (lane == 0) a.crossing[(i64)tile * a.blocks + place.tile] = all;
    }
    __device__ __forceinline__ void run(const Scan& scan) const {
        const Rings rings(shared);
        Step step(a, place, scan);
        int n = before(step), seen = n ? -1 : 0;   // seen: the count of the tile when it was read ahead
        while (step.n < scan.steps) {
            const int tile = number(step), added = n + 1, now = step.n;
            if (lane == 0 && seen != n) {
                while (read_count(a.added + tile) != n) {}
                order_counts();
            }
            __syncwarp();
            rings.dq.wait_full(now);
            if (lane == 0) {
                float* const to = a.dq + (i64)tile * TILE_DQ;
                if (n) run_add(to, shared + AT_DQ, TILE_DQ * 4);
                else run_out(to, shared + AT_DQ, TILE_DQ * 4);
                out_commit();
            }
            step.next(scan);
            n = before(step);
            seen = n ? -1 : 0;
            if (lane == 0 && n && step.n < scan.steps) seen = read_count(a.added + number(step));
            if constexpr (GATED) sum_rows(tile);
            if (lane == 0) out_read();
            warp_arrive(rings.dq.empty(now), lane);
            if (lane == 0) {
                out_done();
                order_counts();
                store_count(a.added + tile, added);
            }
        }
    }
};

struct Consumer {
    const AttentionArguments& a;
    const Place& place;
    const Scan& scan;
    const u32 shared;
    const Lane me;
    const Rings rings;
    const int j0;
    float r[2], sums[2];   // of the two keys: log2 decay to the block's end; sums of dz

    __device__ __forceinline__ Consumer(const AttentionArguments& a, const Place& place, const Scan& scan, u32 shared, int thread)
        : a(a), place(place), scan(scan), shared(shared), me(thread), rings(shared), j0(place.tile * BLOCK) {
        begin_head(place.head * a.shared);
    }
    __device__ __forceinline__ const Decays& decays(int head, int r) const {   // of row r of the block, or of the last key
        return a.sums[place.numbers(a, head) + min(j0 + r, place.Tk - 1)];
    }
    __device__ __forceinline__ void begin_head(int head) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sums[h] = r[h] = 0.f;
            if constexpr (GATED) r[h] = decay_between(decays(head, BLOCK - 1), decays(head, opaque((u32)me.row) + 8 * h));
        }
    }
    __device__ __forceinline__ u32 queries(int n) const { return shared + AT_Q + n % STAGES_Q * Queries::SIZE; }
    __device__ __forceinline__ u32 douts(int n) const { return shared + AT_DOUT + n % STAGES_DOUT * Douts::SIZE; }
    __device__ __forceinline__ u32 numbers(int n) const { return shared + AT_NUMBERS + n % STAGES_Q * NUMBERS; }
    __device__ __forceinline__ u32 weights(int n) const { return shared + AT_DZ + (n & 1) * Weights::SIZE; }
    __device__ __forceinline__ bool is_near(const Step& step) const { return step.query() < j0 + BLOCK; }

    // scores^T, begun
    __device__ __forceinline__ void begin_scores(float (&s)[QUERIES / 8][4], int n) const {
        products_begin();
        multiply_rows_ABt<Keys, Queries>(s, opaque(shared) + me.group * 64 * 128, queries(n));
        products_commit();
    }
    // (dout.v)^T, begun
    __device__ __forceinline__ void begin_dots(float (&d)[QUERIES / 8][4], int step) const {
        rings.douts.wait_full(step);
        products_begin();
        multiply_rows_ABt<Values, Douts>(d, opaque(shared) + AT_V + me.group * 64 * 128, douts(step));
        products_commit();
    }
    // scores become p; near: of queries of the block's own tokens
    static constexpr int SPLIT = 6;   // tiles of columns whose registers are free beside those of dZ
    template <int FROM, int TO> __device__ __forceinline__ void exponentiate(float (&s)[QUERIES / 8][4], int step) const {
        const float c = a.scale * LOG2_E;
#pragma unroll
        for (int n = FROM; n < TO; n++) {
            const float2 x = load_shared2(numbers(step) + (n * 8 + me.column) * 4);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float l = e & 1 ? x.y : x.x;
                s[n][e] = exp2_approx(GATED ? s[n][e] * c + r[e >> 1] - l : s[n][e] * c - l);
            }
        }
    }
    __device__ __forceinline__ void exponentiate_near(float (&s)[QUERIES / 8][4], const Step& step) const {
        const float c = a.scale * LOG2_E;
        const int row = opaque((u32)me.row);
        const Decays own = decays(step.head, row), other = decays(step.head, row + 8);
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int i = n * 8 + me.column + e;
                const Decays query = load_decays(shared + AT_ONES + Ones::piece(i, 1 + step.n % STAGES_Q));
                const float l = load_shared(numbers(step.n) + i * 4);
                s[n][e] = exp2_approx(s[n][e] * c + decay_between(query, own) - l);
                s[n][2 + e] = exp2_approx(s[n][2 + e] * c + decay_between(query, other) - l);
            }
    }
    // 0 for the pairs that are not read, and for keys of another sequence
    __device__ __forceinline__ void mask(float (&s)[QUERIES / 8][4], int i0) const {
        const int from = j0 + me.first() - a.offset;   // the first query that reads the warp's first key
        const bool all = !a.causal || (i0 >= from + 15 && i0 + QUERIES - 1 < from + a.window);
        if (all && j0 + me.first() + 16 <= place.Tk) return;
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int j = j0 + me.row + (e >> 1) * 8, age = i0 + n * 8 + me.column + (e & 1) + a.offset - j;
                if (j >= place.Tk || (a.causal && (age < 0 || age >= a.window))) s[n][e] = 0.f;
            }
    }
    // p and dout.v become dz, rounded; the sums of near queries are of rounded numbers, as their sums over keys are, which cancel
    __device__ __forceinline__ void differentiate(u32 (&dz)[QUERIES / 16][4], float (&d)[QUERIES / 8][4], const float (&p)[QUERIES / 8][4], const Step& step) {
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++) {
            const float2 x = load_shared2(numbers(step.n) + AT_DOTS + (n * 8 + me.column) * 4);
#pragma unroll
            for (int e = 0; e < 4; e++) d[n][e] = p[n][e] * (d[n][e] - (e & 1 ? x.y : x.x));
        }
        pack_operands(dz, d);
        if constexpr (!GATED) return;
        if (is_near(step)) {
#pragma unroll
            for (int n = 0; n < QUERIES / 16; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) sums[e & 1] += low_half(dz[n][e]) + high_half(dz[n][e]);
        } else {
#pragma unroll
            for (int n = 0; n < QUERIES / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) sums[e >> 1] += d[n][e];
        }
    }
    __device__ __forceinline__ void store_sums(float* to, int head) {
        const int row = opaque((u32)me.row);
        to += place.numbers(a, head) + j0 + row;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float x = row_sum(sums[h]);
            if ((me.lane & 3) == 0 && j0 + row + 8 * h < place.Tk) to[8 * h] = x;
            sums[h] = 0.f;
        }
    }
    // after the last tile of near queries, and of a head: the sums of dz are whole
    __device__ __forceinline__ void end_tile(const Step& step) {
        const bool last = step.ends_head(scan), near = is_near(step);
        if (!last && near == (step.query() + QUERIES < j0 + BLOCK)) return;
        store_sums(near ? a.near : a.far, step.head);
        if (!last) return;
        if (near) store_sums(a.far, step.head);
        if (step.n + 1 < scan.steps) begin_head(step.head + 1);
    }
    // dq = dZ K of the tile on the group's columns, begun; with decays also the sums of dz of each query
    template <int N> __device__ __forceinline__ void begin_dq(float (&dq)[N][4], float (&rows)[1][4], int step) const {
        constexpr bool WIDE = N == 8;   // a panel, and another with the ones
        const u32 base = opaque(shared), keys = base + (WIDE ? me.group * Keys::PANEL : me.group * SHARE * 2), ones = base + AT_ONES;
        const u64 dz = panel_descriptor(weights(step)), with = GATED && WIDE ? panels_descriptor(keys, ones) : panel_descriptor(keys);
        products_begin();
#pragma unroll
        for (int t = 0; t < BLOCK / 16; t++) {
            const u64 x = dz + Weights::across(t), y = with + Keys::across(t);
            if constexpr (GATED && WIDE) across_AtB(dq, rows, x, y, t > 0);
            else across_AtB(dq, x, y, t > 0);
        }
        if constexpr (GATED && !WIDE)
#pragma unroll
            for (int t = 0; t < BLOCK / 16; t++) across_AtB(rows, dz + Weights::across(t), panel_descriptor(ones) + Ones::across(t), t > 0);
        products_commit();
    }
    // the tile of dq for the engine, in the order of the threads: 16 bytes of each for every eight columns
    __device__ __forceinline__ void store_dq(const float (&dq)[SHARE / 8][4], const float (&rows)[1][4], int step) const {
        rings.dq.wait_empty(step);
        const u32 to = shared + AT_DQ + (me.group * (SHARE / 8) * 128 + me.warp * 32 + me.lane) * 16;
#pragma unroll
        for (int n = 0; n < SHARE / 8; n++) store_decays(to + n * 128 * 16, {dq[n][0], dq[n][1], dq[n][2], dq[n][3]});
        if (GATED && me.group == 0 && (me.lane & 3) == 0) {
            const u32 at = shared + AT_ROWS + (me.warp * 16 + (me.lane >> 2)) * 4;
            store_shared(at, rows[0][0]);
            store_shared(at + 32, rows[0][2]);
        }
        publish_shared();
        warp_arrive(rings.dq.full(step), me.lane);
    }
    template <class X, int WIDTH, int N> __device__ __forceinline__ void store(const Rows& to, u32 at, const float (&x)[N][4], float scale) {
        const float f[2] = {scale, scale};
        store_rows<X, WIDTH>(rows_of(to, place, place.head) + j0 * to.token, to.token, place.Tk - j0, at, x, f, me);
    }
    __device__ __forceinline__ void store_weights(const u32 (&dz)[QUERIES / 16][4], int step) const {
#pragma unroll
        for (int d = 0; d < QUERIES / 16; d++)
            store_matrix(weights(step) + Weights::block_piece(me.first(), 2 * d, me.lane & 15, me.lane >> 4), dz[d][0], dz[d][1], dz[d][2], dz[d][3]);
        publish_shared();
        groups_barrier<CONSUMERS>(GROUPS + 1);
    }
    // Every product runs beside other work of its warpgroup: dout.v and dk of the tile before beside the exponentials, dv beside dz, the
    // scores of the next tile (of the last one: of any bytes) beside the store of dq
    __device__ __forceinline__ void run() {
        float dk[WIDTH_K / 8][4], dv[WIDTH_V / 8][4], s[QUERIES / 8][4];
        clear_tiles(dk);
        clear_tiles(dv);
        barrier_wait(rings.keys, 0);
        Step step(a, place, scan);
        if (scan.steps > 0) rings.queries.wait_full(0);
        begin_scores(s, 0);
        products_wait<0>();
        accumulator_fence(s);
        while (step.n < scan.steps) {
            float d[QUERIES / 8][4], dq[SHARE / 8][4], rows[1][4];
            u32 p[QUERIES / 16][4], dz[QUERIES / 16][4];
            const int n = step.n;
            begin_dots(d, n);
            if (GATED && is_near(step)) {
                products_wait<1>();
                exponentiate_near(s, step);
            } else {
                exponentiate<0, SPLIT>(s, n);
                products_wait<1>();
                exponentiate<SPLIT, QUERIES / 8>(s, n);
            }
            accumulator_fence(dk);
            mask(s, step.query());
            if (n) warp_arrive(rings.queries.empty(n - 1), me.lane);
            pack_operands(p, s);
            products_begin();
            multiply_rows_AB<Douts>(dv, p, douts(n));
            products_commit();
            products_wait<1>();
            accumulator_fence(d);
            differentiate(dz, d, s, step);
            store_weights(dz, n);
            products_wait<0>();
            accumulator_fence(dv);
            warp_arrive(rings.douts.empty(n), me.lane);
            begin_dq(dq, rows, n);
            if constexpr (GATED) end_tile(step);
            step.next(scan);
            if (step.n < scan.steps) rings.queries.wait_full(step.n);
            begin_scores(s, step.n);
            products_begin();
            multiply_rows_AB<Queries>(dk, dz, queries(n));
            products_commit();
            products_wait<2>();
            accumulator_fence(dq);
            accumulator_fence(rows);
            store_dq(dq, rows, n);
            products_wait<1>();
            accumulator_fence(s);
        }
        products_wait<0>();
        accumulator_fence(dk);
        groups_barrier<CONSUMERS>(GROUPS + 1);   // all have read the keys and values
        store<Keys, LA_K>(a.out, shared, dk, a.scale);
        store<Values, LA_V>(a.other, shared + AT_V, dv, 1.f);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward(const __grid_constant__ AttentionArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    Place place(a, a.heads / a.shared);
    place.tile = a.blocks - 1 - place.tile;
    if (place.tile * BLOCK >= place.Tk) return;
    const Scan scan(a, place, place.tile * BLOCK);
    if (threadIdx.x == 0) Rings(shared).init();
    if (GATED && threadIdx.x < BLOCK) {
        const float two = __uint_as_float(pack_pair(1.f, 1.f));
        store_decays(shared + AT_ONES + Ones::piece(threadIdx.x, 0), {two, two, two, two});
    }
    publish_shared();
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        release_registers<24>();
        const int warp = (threadIdx.x - CONSUMERS) >> 5, lane = threadIdx.x & 31;
        if (warp == 0) Producer{a, place, shared, Rings(shared).whole, lane, 0}.run(scan);
        if (warp >= 2) produce_numbers(a, place, scan, shared, threadIdx.x - CONSUMERS - 64);
        if (warp == 1) Adder{a, place, shared, lane}.run(scan);
    } else {
        claim_registers<240>();
        Consumer(a, place, scan, shared, threadIdx.x).run();
    }
}
