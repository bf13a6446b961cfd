// The backward's shared memory, the order of its tiles, and the warps that copy them in (backward.cu).
#pragma once
#include "softmax/tiles.cuh"

constexpr int QUERIES = 64, STAGES_Q = 3, STAGES_DOUT = 2;   // queries of a tile; tiles in flight
typedef Panels<WIDTH_K, BLOCK> Keys;
typedef Panels<WIDTH_V, BLOCK> Values;
typedef Panels<WIDTH_K, QUERIES> Queries;
typedef Panels<WIDTH_V, QUERIES> Douts;
typedef Panels<QUERIES, BLOCK> Weights;   // dz, rows are keys
constexpr int SHARE = WIDTH_K / GROUPS;   // columns of dq of a warpgroup
// With decays the first 8 columns are 1, as further keys, so that dz gets the sum. Elsewhere the sums of decays of the
// queries of near tiles: piece 1 + s of a row, of stage s
typedef Panels<64, BLOCK> Ones;
constexpr int NUMBERS = QUERIES * 8,
              AT_DOTS = QUERIES * 4;   // of the queries of a stage: l (less the decay from this block's end), then dot
constexpr int AT_V = Keys::SIZE, AT_Q = AT_V + Values::SIZE, AT_DOUT = AT_Q + STAGES_Q * Queries::SIZE,
              AT_DZ = AT_DOUT + STAGES_DOUT * Douts::SIZE;
constexpr int AT_ONES = AT_DZ + 2 * Weights::SIZE, AT_DQ = AT_ONES + GATED * Ones::SIZE,
              AT_ROWS = AT_DQ + QUERIES * WIDTH_K * 4;
constexpr int AT_NUMBERS = AT_DQ + TILE_DQ * 4, AT_BARRIERS = AT_NUMBERS + STAGES_Q * NUMBERS;
constexpr int AT_ALL =
    AT_BARRIERS + Ring<STAGES_Q>::BYTES + Ring<STAGES_DOUT>::BYTES + Ring<1>::BYTES + 16;   // and two barriers
static_assert(AT_ALL == LA_SHARED, "linattn_np/softmax/cuda/plan.py");

struct Rings {
    Ring<STAGES_Q> queries;
    Ring<STAGES_DOUT> douts;
    Ring<1> dq;
    u32 keys, whole;
    __device__ __forceinline__ Rings(u32 shared)
        : queries{shared + AT_BARRIERS},
          douts{queries.base + Ring<STAGES_Q>::BYTES},
          dq{douts.base + Ring<STAGES_DOUT>::BYTES},
          keys(dq.base + Ring<1>::BYTES),
          whole(keys + 8) {}
    __device__ __forceinline__ void init() const {
        queries.init(1 + 2 * ARRIVALS, CONSUMERS / 32 * ARRIVALS);
        douts.init(1, CONSUMERS / 32 * ARRIVALS);
        dq.init(CONSUMERS / 32 * ARRIVALS, ARRIVALS);
        barrier_init(keys, 2);
        barrier_init(whole, 1);
        barriers_made();
    }
};

// The tiles of queries that read a block, of every head that shares it; with decays those that give it any weight
// (dots.cu)
struct Scan {
    int first, tiles, steps;
    __device__ __forceinline__ Scan(const AttentionArguments& a, const Place& place, int j0) {
        first = place.reader(a, j0) / QUERIES;
        tiles = max((place.readers_end(a, min(j0 + BLOCK, place.Tk) - 1) + QUERIES - 1) / QUERIES - first, 0);
        if constexpr (GATED) tiles = min(tiles, a.ends[place.slot(a, place.head)] * (BLOCK / QUERIES) - first);
        steps = tiles * a.shared;
    }
};
struct Step {
    int n, tile, head;   // of all; of a head
    __device__ __forceinline__ Step(const AttentionArguments& a, const Place& place, const Scan& scan)
        : n(0), tile(scan.first), head(place.head * a.shared) {}
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
        float l = POLYNOMIAL ? 0.f : -minus_infinity(), dot = 0.f;
        Decays own = {0.f, 0.f, 0.f, 0.f};
        if (i < place.T) {
            const i64 numbers = opaque64(place.numbers(a, step.head));
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
// Copies tiles in, by a warp; rows of another sequence become zeros
struct Producer {
    const AttentionArguments& a;
    const Place& place;
    const u32 shared, whole;   // whole: a barrier of tiles that are cleared before they are full
    const int lane;
    int waits;

    template <class X> __device__ __forceinline__ void fill(u32 to, const TensorMap& map, u32 barrier, int head,
                                                            int token, int left) {
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
            fill<Queries>(shared + AT_Q + n % STAGES_Q * Queries::SIZE, a.q, rings.queries.full(n),
                          step.head / a.group_q, i0, place.T - i0);
            rings.douts.wait_empty(n);
            fill<Douts>(shared + AT_DOUT + n % STAGES_DOUT * Douts::SIZE, a.dout, rings.douts.full(n), step.head, i0,
                        place.T - i0);
        }
    }
};
