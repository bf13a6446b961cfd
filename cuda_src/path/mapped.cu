// Queries of 128 tokens of a head as they attend to each group of blocks before them (place.cuh:EarlierGroups): the
// bits of forward.cu.
//
//     E = tril(Q W^T),   Q <- Q - E U,   then past each group:   Q <- Q - Q D^T
//
// Two warpgroups of 64 rows; Q in two terms of 16 bits, the second in registers.
#include "path/place.cuh"
#include "path/traversal.cuh"

constexpr int AT_Q = 0, AT_STAGES = Rows128::SIZE, AT_BARRIERS = AT_STAGES + 2 * Rows128::SIZE;
static_assert(AT_BARRIERS + 32 == LA_SHARED, "linattn_np/softmax/cuda/path_plan.py");

struct Mapper {
    const PathArguments& a;
    const Place& place;
    const u32 shared;
    const Lane me;
    const Stored stored;
    const EarlierGroups earlier;
    u32 rest[WIDTH_K / 8][2];   // the second term
    __device__ __forceinline__ Mapper(const PathArguments& a, const Place& place, u32 shared)
        : a(a),
          place(place),
          shared(shared),
          me(threadIdx.x),
          stored(a, place, place.head / a.of.group_k),
          earlier(place.tile, a.levels) {}

    __device__ __forceinline__ u32 stage(int n) const { return shared + AT_STAGES + (n & 1) * Rows128::SIZE; }
    __device__ __forceinline__ u32 barrier(int n) const { return shared + AT_BARRIERS + 8 * n; }
    __device__ __forceinline__ void all() const {
        publish_shared();
        __syncthreads();
    }
    // the maps of the group that is n-th from the block, to the stage of item n
    __device__ __forceinline__ void load_map(const GroupTraversal& traversal, int n) const {
        barrier_expect(barrier(n & 1), Maps::SIZE);
        run_in(stage(n), stored.maps(traversal.level, traversal.number), Maps::SIZE, barrier(n & 1));
    }
    template <bool FIRST> __device__ __forceinline__ void subtract(const float (&x)[WIDTH_K / 8][4]) {
#pragma unroll
        for (int n = 0; n < WIDTH_K / 8; n++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 at = shared + Rows128::at(me.row + 8 * h, n * 8 + me.column);
                const u32 q = __float_as_uint(load_shared(at)), more = FIRST ? 0 : rest[n][h];
                const float u = (low_bf16(q) - x[n][2 * h]) + low_bf16(more),
                            v = (high_bf16(q) - x[n][2 * h + 1]) + high_bf16(more);
                const u32 y = pack_bf16(u, v);
                store_shared_u32(at, y);
                rest[n][h] = pack_bf16(u - low_bf16(y), v - high_bf16(y));
            }
    }
    __device__ __forceinline__ void put_out(int n) const {   // the queries that attend to the n-th group
        all();
        if (threadIdx.x == 0) {
            run_out(a.mapped + stored.tile(place, place.head, earlier.first() + n), shared, Rows128::SIZE);
            out_commit();
        }
    }
    __device__ __forceinline__ void to_start() {
        float x[WIDTH_K / 8][4], s[BLOCK / 8][4];
        u32 p[BLOCK / 16][4];
        products_begin();
        multiply_rows_ABt<Rows128, Rows128>(s, shared + me.group * 64 * 128, stage(0));
        products_commit();
        products_wait<0>();
        accumulator_fence(s);
#pragma unroll
        for (int n = 0; n < BLOCK / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[n][e] = n * 8 + me.column + (e & 1) > me.row + 8 * (e >> 1) ? 0.f : -s[n][e];
        pack_operands(p, s);
        clear_tiles(x);
        complete_products(x, [&] { multiply_rows_AB<Rows128>(x, p, stage(1)); });
#pragma unroll
        for (int n = 0; n < WIDTH_K / 8; n++) {
            x[n][0] = -x[n][0];
            x[n][1] = -x[n][1];
            x[n][2] = -x[n][2];
            x[n][3] = -x[n][3];
        }
        all();   // the operands have been read
        subtract<true>(x);
    }
    __device__ __forceinline__ void run() {
        const int own = place.T - place.tile * BLOCK, last = earlier.all() - 1;   // maps to pass
        GroupTraversal ahead = GroupTraversal::nearest(earlier);
        barrier_wait(barrier(2), 0);
        if (own < BLOCK) {
            clear_rows_from<Rows128>(shared, own);
            clear_rows_from<Rows128>(stage(0), own);
        }
        all();
        to_start();
        if (threadIdx.x == 0)
            for (int n = 0; n < min(last, 2); n++, ahead.further()) load_map(ahead, n);
        put_out(0);
        for (int n = 0; n < last; n++) {
            float x[WIDTH_K / 8][4];
            barrier_wait(barrier(n & 1), n >> 1 & 1);
            products_begin();
            multiply_rows_ABt<Rows128, Maps>(x, shared + me.group * 64 * 128, stage(n));
            products_commit();
            products_wait<0>();
            accumulator_fence(x);
            if (threadIdx.x == 0) out_read();
            __syncthreads();   // the operands have been read, and the tile that is on its way
            if (threadIdx.x == 0 && n + 2 < last) {
                load_map(ahead, n + 2);
                ahead.further();
            }
            subtract<false>(x);
            put_out(n + 1);
        }
        if (threadIdx.x == 0) out_read();
    }
};

extern "C" __global__ void __launch_bounds__(CONSUMERS, 2) mapped(const __grid_constant__ PathArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    Place place(a.of, a.of.heads);
    place.tile = a.of.blocks - 1 - place.tile;   // those with most groups first
    if (place.tile == 0 || place.tile * BLOCK >= place.T) return;
    Mapper mapper(a, place, shared);
    if (threadIdx.x == 0) {
        for (int n = 0; n < 3; n++) barrier_init(mapper.barrier(n), 1);
        barriers_made();
        const int key_head = place.head / a.of.group_k, i0 = place.tile * BLOCK;
        barrier_expect(mapper.barrier(2), 3 * Rows128::SIZE);
        tile_in<Rows128>(shared, a.of.q, mapper.barrier(2), place, place.head / a.of.group_q, i0);
        tile_in<Rows128>(mapper.stage(0), a.w, mapper.barrier(2), place, key_head, i0);
        run_in(mapper.stage(1), mapper.stored.factors(place.tile) + Pairs::SIZE, Rows128::SIZE, mapper.barrier(2));
    }
    __syncthreads();
    mapper.run();
}
