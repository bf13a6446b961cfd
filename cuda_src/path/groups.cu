// Groups of 8 blocks, or of 8 groups, as one: their keys at the group's end, and D (place.cuh).
//
//     M_7 = D_7,   M_c = D_c + M_(c+1) - D_c M_(c+1),   keys of the part c times I - M_(c+1),   D of the group = M_0
//
// The parts from the last to the first; a warpgroup has 64 rows of every tile.
#include "path/place.cuh"

constexpr int STAGES = 3, STAGE = Rows128::SIZE;
constexpr int AT_M = STAGES * STAGE, AT_RING = AT_M + Maps::SIZE, AT_ALL = AT_RING + Ring<STAGES>::BYTES + 16;
static_assert(AT_ALL == LA_SHARED, "linattn_np/softmax/cuda/path_plan.py");
constexpr int PIECES = WIDTH_K / 64;

typedef float Tiles[PIECES][8][4];   // 64 rows of a tile

// The tiles of a group from the last: of each part its keys, then its D; `level` >= 1
struct Items {
    int level, group, per, all;   // blocks of a part; tiles
    __device__ __forceinline__ Items(int level, int group)
        : level(level), group(group), per(1 << RADIX_BITS * (level - 1)), all(RADIX * (per + 1)) {}
    __device__ __forceinline__ int part(int item) const { return RADIX - 1 - item / (per + 1); }
    __device__ __forceinline__ bool is_map(int item) const { return item % (per + 1) == per; }
    __device__ __forceinline__ int block(int item) const {
        return (group * RADIX + part(item)) * per + item % (per + 1);
    }
};
LA_DEVICE void produce(const Stored& stored, const Items& items, u32 shared) {
    const Ring<STAGES> ring = {shared + AT_RING};
    for (int n = 0; n < items.all; n++) {
        const u32 to = shared + n % STAGES * STAGE, full = ring.full(n),
                  bytes = items.is_map(n) ? Maps::SIZE : Rows128::SIZE;
        ring.wait_empty(n);
        barrier_expect(full, bytes);
        run_in(to,
               items.is_map(n) ? stored.maps(items.level - 1, items.group * RADIX + items.part(n))
                               : stored.keys(items.level - 1, items.block(n)),
               bytes, full);
    }
}

struct Consumer {
    const Stored& stored;
    const Items& items;
    const u32 shared;
    const Lane me;
    const Ring<STAGES> ring;
    __device__ __forceinline__ Consumer(const Stored& stored, const Items& items, u32 shared, int thread)
        : stored(stored), items(items), shared(shared), me(thread), ring{shared + AT_RING} {}

    // x = rows of a tile times M
    template <class X> __device__ __forceinline__ void multiply(Tiles& x, u32 tile) const {
        const u64 from = panel_descriptor(tile + me.group * 64 * 128);
#pragma unroll
        for (int p = 0; p < PIECES; p++) accumulator_fence(x[p]);
        products_begin();
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            const u64 with = panel_descriptor(shared + AT_M + p * Maps::PANEL);
#pragma unroll
            for (int d = 0; d < WIDTH_K / 16; d++) product_AB(x[p], from + X::along(d), with + Maps::across(d), d > 0);
        }
        products_commit();
        products_wait<0>();
#pragma unroll
        for (int p = 0; p < PIECES; p++) accumulator_fence(x[p]);
    }
    // f(address of two numbers, two numbers) for all of x
    template <class X, class F> __device__ __forceinline__ void each(Tiles& x, u32 tile, F f) const {
#pragma unroll
        for (int p = 0; p < PIECES; p++)
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    f(tile + X::at(me.row + 8 * h, p * 64 + n * 8 + me.column), x[p][n][2 * h], x[p][n][2 * h + 1]);
    }
    __device__ __forceinline__ void release(int item) const { warp_arrive(ring.empty(item), me.lane); }
    __device__ __forceinline__ void all() const {
        publish_shared();
        groups_barrier<CONSUMERS>(GROUPS + 1);
    }
    // the keys of a tile at the group's end, in their place and on their way; the keys of the last part are there
    __device__ __forceinline__ void map_keys(int item) const {
        const u32 tile = shared + item % STAGES * STAGE;
        if (items.part(item) < RADIX - 1) {
            Tiles x;
            multiply<Rows128>(x, tile);
            group_barrier(me.group);   // all have read them
            each<Rows128>(x, tile, [](u32 at, float u, float v) {
                const u32 y = __float_as_uint(load_shared(at));
                store_shared_u32(at, pack_bf16(low_bf16(y) - u, high_bf16(y) - v));
            });
            all();
        }
        if (threadIdx.x == 0) {
            run_out(stored.keys(items.level, items.block(item)), tile, Rows128::SIZE);
            out_commit();
            out_read();
        }
        release(item);
    }
    // M with the map of the next part
    __device__ __forceinline__ void extend(int item) const {
        const u32 tile = shared + item % STAGES * STAGE;
        const bool owns = me.group < PIECES, first = items.part(item) == RADIX - 1;
        Tiles x;
        if (owns && !first) multiply<Maps>(x, tile);
        if (threadIdx.x == 0) out_read();
        all();   // M has been read
        if (owns)
            each<Maps>(x, 0, [&](u32 at, float u, float v) {
                const u32 d = __float_as_uint(load_shared(tile + at)),
                          m = __float_as_uint(load_shared(shared + AT_M + at));
                const u32 y = first ? d : pack_bf16(low_bf16(d) + low_bf16(m) - u, high_bf16(d) + high_bf16(m) - v);
                store_shared_u32(shared + AT_M + at, y);
            });
        all();
        release(item);
        if (threadIdx.x == 0 && stored.a.chain) {
            run_out(stored.map_of(stored.a.chain, items.level - 1, items.group * RADIX + items.part(item)),
                    shared + AT_M, Maps::SIZE);
            out_commit();
        }
    }
    __device__ __forceinline__ void run() const {
        for (int n = 0; n < items.all; n++) {
            ring.wait_full(n);
            if (items.is_map(n)) extend(n);
            else map_keys(n);
        }
        if (threadIdx.x == 0) {
            run_out(stored.maps(items.level, items.group), shared + AT_M, Maps::SIZE);
            out_commit();
            out_read();
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) groups(const __grid_constant__ PathArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const Place place(a.of, a.key_heads);                                                    // its tiles are groups
    if ((place.tile + 1) << RADIX_BITS * a.level >= (place.T + BLOCK - 1) / BLOCK) return;   // no block reads it
    if (threadIdx.x == 0) {
        Ring<STAGES>{shared + AT_RING}.init(1, CONSUMERS / 32 * ARRIVALS);
        barriers_made();
    }
    __syncthreads();
    const Stored stored(a, place, place.head);
    const Items items(a.level, place.tile);
    run_roles(
        [&](int lane) {
            if (lane == 0) produce(stored, items, shared);
        },
        [&](int thread) { Consumer(stored, items, shared, thread).run(); });
}
