// Gradients of 128 queries of a head: one tile of keys after the other, the first one first.
//
//     p_ij = 2^(z_ij - l_i),   dz_ij = p_ij (dout_i.v_j - dot_i),   dq_i = scale sum_j dz_ij k_j          (z, l: forward.cu)
//
// With decays also the sums of dz: of each query, and of the whole block with all keys before each block of keys.
#include "softmax/tiles.cuh"
#include "tile/reduce.cuh"

constexpr int KEYS = 64, STAGES = 3, TABLE = 128;   // keys of a tile; tiles in flight; blocks of keys whose sums wait in shared memory
typedef Panels<WIDTH_K, BLOCK> Queries;
typedef Panels<WIDTH_V, BLOCK> Douts;
typedef Panels<WIDTH_K, KEYS> Keys;
typedef Panels<WIDTH_V, KEYS> Values;
constexpr int AT_DOUT = Queries::SIZE, AT_STAGES = AT_DOUT + Douts::SIZE, STAGE = Keys::SIZE + Values::SIZE, AT_DECAYS = AT_STAGES + STAGES * STAGE;
constexpr int AT_TABLE = AT_DECAYS + GATED * STAGES * KEYS * 16, AT_RING = AT_TABLE + GATED * CONSUMERS / 32 * TABLE * 4;
constexpr int AT_READY = AT_RING + Ring<STAGES>::BYTES, AT_ALL = AT_READY + 16;
static_assert(AT_ALL == LA_SHARED, "linattn_np/softmax/cuda/plan.py");

// The tiles of keys that a block reads
struct Scan {
    int first, steps;
    __device__ __forceinline__ Scan(const AttentionArguments& a, const Place& place, int i0) {
        first = max(place.reach(a, i0).low, 0) / KEYS;
        steps = place.reach(a, min(i0 + BLOCK, place.T) - 1).high / KEYS - first + 1;
    }
    __device__ __forceinline__ int key(int step) const { return (first + step) * KEYS; }   // the first of a tile
};

LA_DEVICE void produce(const AttentionArguments& a, const Place& place, const Scan& scan, u32 shared, int lane) {
    const Ring<STAGES> ring = {shared + AT_RING};
    const int i0 = place.tile * BLOCK, key_head = place.head / a.group_k, value_head = place.head / a.group_v;
    const Decays* const sums = a.sums + place.numbers(a, place.head);
    const Decays before = GATED && i0 ? sums[i0 - 1] : Decays{};
    if (lane == 0) {
        barrier_expect(shared + AT_READY, Queries::SIZE + Douts::SIZE);
        tile_in<Queries>(shared, a.q, shared + AT_READY, place, place.head / a.group_q, i0);
        tile_in<Douts>(shared + AT_DOUT, a.dout, shared + AT_READY, place, place.head, i0);
    }
    for (int step = 0; step < scan.steps; step++) {
        const int stage = step % STAGES, j0 = scan.key(step);
        const u32 at = shared + AT_STAGES + stage * STAGE;
        ring.wait_empty(step);
        if (lane == 0) {
            barrier_expect(ring.full(step), STAGE);
            tile_in<Keys>(at, a.k, ring.full(step), place, key_head, j0);
            tile_in<Values>(at + Keys::SIZE, a.v, ring.full(step), place, value_head, j0);
        }
        if constexpr (GATED) {
            store_key_decays<KEYS>(shared + AT_DECAYS + stage * KEYS * 16, sums, j0, place.Tk, j0 + KEYS > i0, before, lane);
            warp_arrive(ring.full(step), lane);
        }
    }
}

struct Consumer {
    const AttentionArguments& a;
    const Place& place;
    const Scan& scan;
    const u32 shared;
    const Lane me;
    const Ring<STAGES> ring;
    const int i0;
    float l[2], dot[2], r[2], sums[2];   // of the two rows; log2 decay from the block's start; sums of dz
    Decays own[2];

    __device__ __forceinline__ Consumer(const AttentionArguments& a, const Place& place, const Scan& scan, u32 shared, int thread)
        : a(a), place(place), scan(scan), shared(shared), me(thread), ring{shared + AT_RING}, i0(place.tile * BLOCK) {
        const i64 numbers = place.numbers(a, place.head);
        const Decays before = GATED && i0 ? a.sums[numbers + i0 - 1] : Decays{};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int i = i0 + me.row + 8 * h;
            l[h] = i < place.T ? a.logs[numbers + i] : -minus_infinity();
            dot[h] = i < place.T && a.normalize ? a.dots[numbers + i] : 0.f;
            sums[h] = r[h] = 0.f;
            if constexpr (GATED) {
                own[h] = a.sums[numbers + min(i, place.T - 1)];
                r[h] = decay_between(own[h], before);
            }
        }
    }
    __device__ __forceinline__ u32 stage(int step) const { return shared + AT_STAGES + step % STAGES * STAGE; }
    // scores and dout.v, begun; keys of another sequence become zeros
    __device__ __forceinline__ void begin_products(float (&s)[KEYS / 8][4], float (&d)[KEYS / 8][4], int step) {
        ring.wait_full(step);
        const int left = place.Tk - scan.key(step);
        if (left < KEYS) {
            clear_rows_from<Keys>(stage(step), left);
            rows_cleared();
        }
        products_begin();
        multiply_rows_ABt<Queries, Keys>(s, shared + me.group * 64 * 128, stage(step));
        multiply_rows_ABt<Douts, Values>(d, shared + AT_DOUT + me.group * 64 * 128, stage(step) + Keys::SIZE);
        products_commit();
    }
    // scores become z - l
    __device__ __forceinline__ void add_decays(float (&s)[KEYS / 8][4], int step) const {
        const u32 decays = shared + AT_DECAYS + step % STAGES * KEYS * 16;
        const float c = a.scale * LOG2_E, x = l[0] - r[0], y = l[1] - r[1];
        if (!GATED) {
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) { s[n][0] = s[n][0] * c - l[0]; s[n][1] = s[n][1] * c - l[0]; s[n][2] = s[n][2] * c - l[1]; s[n][3] = s[n][3] * c - l[1]; }
        } else if (scan.key(step) + KEYS > i0) {
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
                if (scan.key(step) + n * 8 > i0 + me.first() + 15) continue;   // later than the warp's queries: 0 below
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const Decays key = load_decays(decays + (n * 8 + me.column + e) * 16);
                    s[n][e] = s[n][e] * c + decay_between(own[0], key) - l[0];
                    s[n][2 + e] = s[n][2 + e] * c + decay_between(own[1], key) - l[1];
                }
            }
        } else
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
                const float2 z = load_shared2(decays + (n * 8 + me.column) * 4);
                s[n][0] = s[n][0] * c + z.x - x; s[n][1] = s[n][1] * c + z.y - x; s[n][2] = s[n][2] * c + z.x - y; s[n][3] = s[n][3] * c + z.y - y;
            }
    }
    __device__ __forceinline__ bool is_whole(int step) const {   // all of the warp's queries read all keys
        const int j0 = scan.key(step);
        return j0 + KEYS - 1 <= place.reach(a, i0 + me.first()).high && j0 >= place.reach(a, i0 + me.first() + 15).low;
    }
    // scores become dz
    template <bool WHOLE> __device__ __forceinline__ void differentiate(float (&s)[KEYS / 8][4], const float (&d)[KEYS / 8][4], int step) {
        const Reach x = place.reach(a, i0 + me.row), y = place.reach(a, i0 + me.row + 8);
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int j = scan.key(step) + n * 8 + me.column + (e & 1);
                const Reach& z = e < 2 ? x : y;
                const float dz = exp2_approx(s[n][e]) * (d[n][e] - dot[e >> 1]);
                s[n][e] = WHOLE || (j <= z.high && j >= z.low) ? dz : 0.f;
                if constexpr (GATED) sums[e >> 1] += s[n][e];
            }
    }
    // after a tile of a block before this one: at the block's end, the sums so far
    __device__ __forceinline__ void cross(int key) {
        const int block = key / BLOCK;
        if (key % BLOCK + KEYS < BLOCK || block >= place.tile) return;
        const float all = warp_sum(sums[0] + sums[1]);
        const u32 table = shared + AT_TABLE;
        if (me.lane == 0) store_shared(table + ((me.group * 4 + me.warp) * TABLE + block % TABLE) * 4, all);
        if (block % TABLE < TABLE - 1 && block < place.tile - 1) return;
        groups_barrier<CONSUMERS>(GROUPS + 1);
        const int n = block / TABLE * TABLE + threadIdx.x;   // of a block of keys
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < CONSUMERS / 32; w++) sum += load_shared(table + (w * TABLE + threadIdx.x % TABLE) * 4);
        if (threadIdx.x < TABLE && n <= block && n >= scan.key(0) / BLOCK)
            a.crossing[(((i64)place.sequence * a.heads + place.head) * a.blocks + place.tile) * a.blocks + n + 1] = sum;
        groups_barrier<CONSUMERS>(GROUPS + 1);
    }
    __device__ __forceinline__ void store(const float (&dq)[WIDTH_K / 8][4]) {
        const int left = place.T - i0;
        const float f[2] = {a.scale, a.scale};
        group_barrier(me.group);   // all have read the queries
        store_rows<Queries, LA_K>(rows_of(a.out, place, place.head) + i0 * a.out.token, a.out.token, left, shared, dq, f, me);
        if constexpr (GATED) {
            float* const rows = a.rows + place.numbers(a, place.head) + i0;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float sum = row_sum(sums[h]);
                if ((me.lane & 3) == 0 && me.row + 8 * h < left) rows[me.row + 8 * h] = sum;
            }
        }
    }
    // dq += dZ K of a tile, begun
    __device__ __forceinline__ void begin_sum(float (&dq)[WIDTH_K / 8][4], float (&s)[KEYS / 8][4], const float (&d)[KEYS / 8][4], int step) {
        u32 dz[KEYS / 16][4];
        add_decays(s, step);
        if (is_whole(step)) differentiate<true>(s, d, step);
        else differentiate<false>(s, d, step);
        pack_operands(dz, s);
        products_begin();
        multiply_rows_AB<Keys>(dq, dz, stage(step));
        products_commit();
    }
    __device__ __forceinline__ void run() {
        float dq[WIDTH_K / 8][4], s[KEYS / 8][4], d[KEYS / 8][4];
        clear_tiles(dq);
        barrier_wait(shared + AT_READY, 0);
        begin_products(s, d, 0);
        products_wait<0>();
        accumulator_fence(s);
        accumulator_fence(d);
        for (int step = 0; step < scan.steps - 1; step++) {
            begin_sum(dq, s, d, step);
            begin_products(s, d, step + 1);
            if constexpr (GATED) cross(scan.key(step));
            products_wait<0>();
            accumulator_fence(s);
            accumulator_fence(d);
            accumulator_fence(dq);
            warp_arrive(ring.empty(step), me.lane);
        }
        begin_sum(dq, s, d, scan.steps - 1);
        products_wait<0>();
        accumulator_fence(dq);
        store(dq);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) queries(const __grid_constant__ AttentionArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    Place place(a, a.heads);
    place.tile = a.blocks - 1 - place.tile;   // those with most keys first
    if (place.tile * BLOCK >= place.T) return;
    const Scan scan(a, place, place.tile * BLOCK);
    if (threadIdx.x == 0) {
        Ring<STAGES>{shared + AT_RING}.init(1 + GATED * ARRIVALS, CONSUMERS / 32 * ARRIVALS);
        barrier_init(shared + AT_READY, 1);
        barriers_made();
    }
    __syncthreads();
    run_roles([&](int lane) { produce(a, place, scan, shared, lane); }, [&](int thread) { Consumer(a, place, scan, shared, thread).run(); });
}
