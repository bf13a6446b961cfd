// Gradients of 128 keys and values, of one or more heads that share them: one tile of queries after the other, head after head.
//
//     p_ij = 2^(z_ij - l_i),   dv_j = sum_i p_ij dout_i,   dz_ij = p_ij (dout_i.v_j - dot_i),   dk_j = scale sum_i dz_ij q_i
//
// Rows of the products are keys, columns queries: P^T and dZ^T are operands as they are. With decays also the sums of dz of each key.
#include "softmax/tiles.cuh"

constexpr int QUERIES = 64, STAGES = 3;   // queries of a tile; tiles in flight
typedef Panels<WIDTH_K, BLOCK> Keys;
typedef Panels<WIDTH_V, BLOCK> Values;
typedef Panels<WIDTH_K, QUERIES> Queries;
typedef Panels<WIDTH_V, QUERIES> Douts;
constexpr int AT_V = Keys::SIZE, AT_STAGES = AT_V + Values::SIZE, STAGE = Queries::SIZE + Douts::SIZE, AT_NUMBERS = AT_STAGES + STAGES * STAGE;
// of each query of a stage: l (less the decay from this block's end) and dot, 8 bytes; and of a near one its sums of decays, 16 bytes
constexpr int NUMBERS = QUERIES * 24, AT_SUMS = QUERIES * 8;
constexpr int AT_RING = AT_NUMBERS + STAGES * NUMBERS, AT_READY = AT_RING + Ring<STAGES>::BYTES, AT_ALL = AT_READY + 16;
static_assert(AT_ALL == LA_SHARED, "linattn_np/softmax/cuda/plan.py");

// The tiles of queries that read a block, of every head that shares it
struct Scan {
    int first, tiles, steps;
    __device__ __forceinline__ Scan(const AttentionArguments& a, const Place& place, int j0) {
        first = place.reader(a, j0) / QUERIES;
        tiles = max((place.readers_end(a, min(j0 + BLOCK, place.Tk) - 1) + QUERIES - 1) / QUERIES - first, 0);
        steps = tiles * a.shared;
    }
    __device__ __forceinline__ int query(int step) const { return (first + step % tiles) * QUERIES; }   // the first of a tile
    __device__ __forceinline__ bool ends_head(int step) const { return step % tiles == tiles - 1; }
    __device__ __forceinline__ int head(const AttentionArguments& a, const Place& place, int step) const { return place.head * a.shared + step / tiles; }
};

// l and dot of a tile's queries, by a warp; of decays see above
LA_DEVICE void store_numbers(const AttentionArguments& a, const Place& place, u32 to, int head, int i0, int j0, int lane) {
    const i64 numbers = place.numbers(a, head);
    const bool near = i0 < j0 + BLOCK;
    const Decays end = GATED && !near ? a.sums[numbers + j0 + BLOCK - 1] : Decays{};
#pragma unroll
    for (int n = 0; n < QUERIES / 32; n++) {
        const int r = n * 32 + lane, i = i0 + r;
        float l = -minus_infinity(), dot = 0.f;
        if (i < place.T) {
            l = a.logs[numbers + i];
            if (a.normalize) dot = a.dots[numbers + i];
            if constexpr (GATED) {
                const Decays own = a.sums[numbers + i];
                if (near) store_decays(to + AT_SUMS + r * 16, own);
                else l -= decay_between(own, end);
            }
        } else if (GATED && near) store_decays(to + AT_SUMS + r * 16, {0.f, 0.f, 0.f, 0.f});
        store_shared2(to + r * 8, l, dot);
    }
}
LA_DEVICE void produce(const AttentionArguments& a, const Place& place, const Scan& scan, u32 shared, int lane) {
    const Ring<STAGES> ring = {shared + AT_RING};
    const int j0 = place.tile * BLOCK;
    if (lane == 0) {
        barrier_expect(shared + AT_READY, Keys::SIZE + Values::SIZE);
        tile_in<Keys>(shared, a.k, shared + AT_READY, place, place.head * a.shared / a.group_k, j0);
        tile_in<Values>(shared + AT_V, a.v, shared + AT_READY, place, place.head * a.shared / a.group_v, j0);
    }
    for (int step = 0; step < scan.steps; step++) {
        const int stage = step % STAGES, i0 = scan.query(step), head = scan.head(a, place, step);
        const u32 at = shared + AT_STAGES + stage * STAGE;
        ring.wait_empty(step);
        if (lane == 0) {
            barrier_expect(ring.full(step), STAGE);
            tile_in<Queries>(at, a.q, ring.full(step), place, head / a.group_q, i0);
            tile_in<Douts>(at + Queries::SIZE, a.dout, ring.full(step), place, head, i0);
        }
        store_numbers(a, place, shared + AT_NUMBERS + stage * NUMBERS, head, i0, j0, lane);
        warp_arrive(ring.full(step), lane);
    }
}

struct Consumer {
    const AttentionArguments& a;
    const Place& place;
    const Scan& scan;
    const u32 shared;
    const Lane me;
    const Ring<STAGES> ring;
    const int j0;
    float r[2], sums[2];   // of the two keys: log2 decay to the block's end; sums of dz

    __device__ __forceinline__ Consumer(const AttentionArguments& a, const Place& place, const Scan& scan, u32 shared, int thread)
        : a(a), place(place), scan(scan), shared(shared), me(thread), ring{shared + AT_RING}, j0(place.tile * BLOCK) {
        begin_head(place.head * a.shared);
    }
    __device__ __forceinline__ const Decays& decays(int head, int r) const {   // of row r of the block, or of the last key
        return a.sums[place.numbers(a, head) + min(j0 + r, place.Tk - 1)];
    }
    __device__ __forceinline__ void begin_head(int head) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sums[h] = r[h] = 0.f;
            if constexpr (GATED) r[h] = decay_between(decays(head, BLOCK - 1), decays(head, me.row + 8 * h));
        }
    }
    __device__ __forceinline__ u32 stage(int step) const { return shared + AT_STAGES + step % STAGES * STAGE; }
    __device__ __forceinline__ u32 numbers(int step) const { return shared + AT_NUMBERS + step % STAGES * NUMBERS; }
    __device__ __forceinline__ bool is_near(int step) const { return scan.query(step) < j0 + BLOCK; }
    // scores^T and (dout.v)^T, begun; queries of another sequence become zeros
    __device__ __forceinline__ void begin_products(float (&s)[QUERIES / 8][4], float (&d)[QUERIES / 8][4], int step) {
        ring.wait_full(step);
        const int left = place.T - scan.query(step);
        if (left < QUERIES) {
            clear_rows_from<Queries>(stage(step), left);
            clear_rows_from<Douts>(stage(step) + Queries::SIZE, left);
            rows_cleared();
        }
        products_begin();
        multiply_rows_ABt<Keys, Queries>(s, shared + me.group * 64 * 128, stage(step));
        products_commit();
        multiply_rows_ABt<Values, Douts>(d, shared + AT_V + me.group * 64 * 128, stage(step) + Queries::SIZE);
        products_commit();
    }
    // scores become p
    template <bool NEAR> __device__ __forceinline__ void exponentiate(float (&s)[QUERIES / 8][4], int step) const {
        const float c = a.scale * LOG2_E;
        const int head = scan.head(a, place, step);
        const Decays own = NEAR ? decays(head, me.row) : Decays{}, other = NEAR ? decays(head, me.row + 8) : Decays{};
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++) {
            const Decays x = load_decays(numbers(step) + (n * 8 + me.column) * 8);   // l, dot of two queries
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float l = e ? x.z : x.x;
                float u = r[0], v = r[1];
                if constexpr (NEAR) {
                    const Decays query = load_decays(numbers(step) + AT_SUMS + (n * 8 + me.column + e) * 16);
                    u = decay_between(query, own);
                    v = decay_between(query, other);
                }
                s[n][e] = exp2_approx(GATED ? s[n][e] * c + u - l : s[n][e] * c - l);
                s[n][2 + e] = exp2_approx(GATED ? s[n][2 + e] * c + v - l : s[n][2 + e] * c - l);
            }
        }
    }
    __device__ __forceinline__ void mask(float (&s)[QUERIES / 8][4], int step) const {
        if (!a.causal) return;
        const int i0 = scan.query(step), from = j0 + me.first() - a.offset;   // the first query that reads the warp's first key
        if (i0 >= from + 15 && i0 + QUERIES - 1 < from + a.window) return;
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int age = i0 + n * 8 + me.column + (e & 1) + a.offset - (j0 + me.row + (e >> 1) * 8);
                if (age < 0 || age >= a.window) s[n][e] = 0.f;
            }
    }
    // p and dout.v become dz
    __device__ __forceinline__ void differentiate(float (&d)[QUERIES / 8][4], const float (&p)[QUERIES / 8][4], int step) {
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++) {
            const Decays x = load_decays(numbers(step) + (n * 8 + me.column) * 8);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                d[n][e] = p[n][e] * (d[n][e] - (e & 1 ? x.w : x.y));
                if constexpr (GATED) sums[e >> 1] += d[n][e];
            }
        }
    }
    __device__ __forceinline__ void store_sums(float* to, int head) {
        to += place.numbers(a, head) + j0;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float x = row_sum(sums[h]);
            if ((me.lane & 3) == 0 && j0 + me.row + 8 * h < place.Tk) to[me.row + 8 * h] = x;
            sums[h] = 0.f;
        }
    }
    // after the last tile of near queries, and of a head: the sums of dz are whole
    __device__ __forceinline__ void end_tile(int step) {
        const bool last = scan.ends_head(step);
        if (!last && is_near(step) == is_near(step + 1)) return;
        const int head = scan.head(a, place, step);
        store_sums(is_near(step) ? a.near : a.far, head);
        if (!last) return;
        if (is_near(step)) store_sums(a.far, head);
        if (step + 1 < scan.steps) begin_head(head + 1);
    }
    template <class X, int WIDTH, int N> __device__ __forceinline__ void store(const Rows& to, u32 at, const float (&x)[N][4], float scale) {
        const float f[2] = {scale, scale};
        store_rows<X, WIDTH>(rows_of(to, place, place.head) + j0 * to.token, to.token, place.Tk - j0, at, x, f, me);
    }
    // dv += P^T dO, dk += dZ^T Q of a tile, begun
    __device__ __forceinline__ void begin_sums(float (&dk)[WIDTH_K / 8][4], float (&dv)[WIDTH_V / 8][4], float (&s)[QUERIES / 8][4], float (&d)[QUERIES / 8][4], int step) {
        u32 p[QUERIES / 16][4], dz[QUERIES / 16][4];
        if (GATED && is_near(step)) exponentiate<true>(s, step);
        else exponentiate<false>(s, step);
        mask(s, step);
        pack_operands(p, s);
        products_begin();
        multiply_rows_AB<Douts>(dv, p, stage(step) + Queries::SIZE);
        products_commit();
        differentiate(d, s, step);
        pack_operands(dz, d);
        products_begin();
        multiply_rows_AB<Queries>(dk, dz, stage(step));
        products_commit();
        products_wait<GATED ? 0 : 1>();   // the registers of P are free, with decays those of dZ too
        accumulator_fence(dv);
        if constexpr (GATED) end_tile(step);
    }
    __device__ __forceinline__ void run() {
        float dk[WIDTH_K / 8][4], dv[WIDTH_V / 8][4], s[QUERIES / 8][4], d[QUERIES / 8][4];
        clear_tiles(dk);
        clear_tiles(dv);
        barrier_wait(shared + AT_READY, 0);
        if (scan.steps > 0) {
            begin_products(s, d, 0);
            products_wait<0>();
            accumulator_fence(s);
            accumulator_fence(d);
            for (int step = 0; step < scan.steps - 1; step++) {
                begin_sums(dk, dv, s, d, step);
                begin_products(s, d, step + 1);
                products_wait<0>();
                accumulator_fence(s);
                accumulator_fence(d);
                accumulator_fence(dk);
                warp_arrive(ring.empty(step), me.lane);
            }
            begin_sums(dk, dv, s, d, scan.steps - 1);
            products_wait<0>();
            accumulator_fence(dk);
        }
        group_barrier(me.group);   // all have read the keys and values
        store<Keys, LA_K>(a.out, shared, dk, a.scale);
        store<Values, LA_V>(a.other, shared + AT_V, dv, 1.f);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) keys(const __grid_constant__ AttentionArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const Place place(a, a.heads / a.shared);   // those with most queries first
    if (place.tile * BLOCK >= place.Tk) return;
    const Scan scan(a, place, place.tile * BLOCK);
    if (threadIdx.x == 0) {
        Ring<STAGES>{shared + AT_RING}.init(1 + ARRIVALS, CONSUMERS / 32 * ARRIVALS);
        barrier_init(shared + AT_READY, 1);
        barriers_made();
    }
    __syncthreads();
    run_roles([&](int lane) { produce(a, place, scan, shared, lane); }, [&](int thread) { Consumer(a, place, scan, shared, thread).run(); });
}
