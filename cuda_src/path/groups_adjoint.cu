// From the gradients of one size of groups to the gradients of their eight parts: the adjoint of groups.cu, from the
// first part to the last.
//
//     dM_0 = dD,   dK_c += dK - dK M_(c+1)^T,   dD_c += dM_c - dM_c M_(c+1)^T,   dM_(c+1) = dM_c - D_c^T dM_c - K_c^T dK
//
// dK of a part's keys at the group's end; of the last part dK_7 += dK, dD_7 += dM_7. A warpgroup has 64 rows of every
// tile; dM stays in registers in float32.
#include "path/traversal.cuh"

constexpr int SLOT = Rows128::SIZE > Maps::SIZE ? Rows128::SIZE : Maps::SIZE;
constexpr int AT_M = 0, AT_D = SLOT, AT_DM = 2 * SLOT, AT_K = 3 * SLOT, AT_DK = 5 * SLOT,
              AT_BARRIERS = 7 * SLOT;   // two of K and dK each
static_assert(AT_BARRIERS + 32 == LA_SHARED, "linattn_np/softmax/cuda/path_plan.py");

struct Parts {
    const PathArguments& a;
    const Stored& stored;
    const u32 shared;
    const Lane me;
    const int group, per;   // blocks of a part
    float dm[WIDTH_K / 8][4], sums[WIDTH_K / 8][4];
    __device__ __forceinline__ Parts(const PathArguments& a, const Stored& stored, u32 shared, int group)
        : a(a), stored(stored), shared(shared), me(threadIdx.x), group(group), per(1 << RADIX_BITS * (a.level - 1)) {}

    __device__ __forceinline__ u32 barrier(int n) const {
        return shared + AT_BARRIERS + 8 * n;
    }   // of maps; of a block's tiles
    __device__ __forceinline__ bool owns() const { return me.group < WIDTH_K / 64; }   // rows of maps
    __device__ __forceinline__ void all() const {
        publish_shared();
        __syncthreads();
    }
    __device__ __forceinline__ void load_maps(int part) const {   // M of the next part, and D
        barrier_expect(barrier(2), 2 * Maps::SIZE);
        run_in(shared + AT_M, stored.map_of(a.chain, a.level - 1, group * RADIX + part + 1), Maps::SIZE, barrier(2));
        run_in(shared + AT_D, stored.maps(a.level - 1, group * RADIX + part), Maps::SIZE, barrier(2));
        run_prefetch(stored.map_of(a.dmaps, a.level - 1, group * RADIX + part), Maps::SIZE);
    }
    __device__ __forceinline__ void load_block(int n) const {   // the group's n-th
        const int block = group * RADIX * per + n, at = n & 1;
        barrier_expect(barrier(at), 2 * Rows128::SIZE);
        run_in(shared + AT_K + at * SLOT, stored.keys(a.level - 1, block), Rows128::SIZE, barrier(at));
        run_in(shared + AT_DK + at * SLOT, stored.dkeys(a.level, stored.head, a.key_heads, block), Rows128::SIZE,
               barrier(at));
        run_prefetch(stored.dkeys(a.level - 1, stored.head, a.key_heads, block), Rows128::SIZE);
    }
    // sums += K^T dK;  dK_c += dK - dK M^T
    __device__ __forceinline__ void add_block(int n, bool last) {
        const u32 k = shared + AT_K + (n & 1) * SLOT, dk = shared + AT_DK + (n & 1) * SLOT;
        char* const to = stored.dkeys(a.level - 1, stored.head, a.key_heads, group * RADIX * per + n);
        float x[WIDTH_K / 8][4];
        barrier_wait(barrier(n & 1), n >> 1 & 1);
        clear_tiles(x);
        if (!last) {
            complete_products(x, [&] { add_ABt<Rows128, Maps>(x, dk + me.group * 64 * 128, shared + AT_M); });
            if (owns()) complete_products(sums, [&] { add_AtB<Rows128>(sums, k + me.group * Rows128::PANEL, dk); });
        }
        negate(x);
        add_rows<Rows128>(x, dk, me);
        add_tile<Rows128>(x, to, 1.f, me);
        store_tile<Rows128>(to, x, me);
    }
    // dD of a part; dM of the next
    __device__ __forceinline__ void pass_maps(int part) {
        char* const to = stored.map_of(a.dmaps, a.level - 1, group * RADIX + part);
        const bool last = part == RADIX - 1;
        float x[WIDTH_K / 8][4];
        if (!last) {
            if (owns()) put_rows<Maps>(shared + AT_DM, dm, 1.f, me);
            all();
        }
        if (!owns()) return;
        clear_tiles(x);
        if (!last)
            complete_products(x, [&] { add_ABt<Maps, Maps>(x, shared + AT_DM + me.group * 64 * 128, shared + AT_M); });
#pragma unroll
        for (int n = 0; n < WIDTH_K / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) x[n][e] = dm[n][e] - x[n][e];
        add_tile<Maps>(x, to, 1.f, me);
        store_tile<Maps>(to, x, me);
        if (last) return;
        complete_products(sums, [&] { add_AtB<Maps>(sums, shared + AT_D + me.group * Maps::PANEL, shared + AT_DM); });
#pragma unroll
        for (int n = 0; n < WIDTH_K / 8; n++) {
            dm[n][0] -= sums[n][0];
            dm[n][1] -= sums[n][1];
            dm[n][2] -= sums[n][2];
            dm[n][3] -= sums[n][3];
        }
    }
    __device__ __forceinline__ void run() {
        clear_tiles(dm);
        if (owns()) add_tile<Maps>(dm, stored.map_of(a.dmaps, a.level, group), 1.f, me);
        if (threadIdx.x == 0) {
            load_maps(0);
            load_block(0);
            load_block(1);
        }
        for (int part = 0, n = 0; part < RADIX; part++) {
            const bool last = part == RADIX - 1;
            clear_tiles(sums);
            if (!last) barrier_wait(barrier(2), part & 1);
            for (int b = 0; b < per; b++, n++) {
                add_block(n, last);
                __syncthreads();   // its tiles have been read
                if (threadIdx.x == 0 && n + 2 < RADIX * per) load_block(n + 2);
            }
            pass_maps(part);
            __syncthreads();   // M, D and dM have been read
            if (threadIdx.x == 0 && part + 2 < RADIX) load_maps(part + 1);
        }
    }
};

extern "C" __global__ void __launch_bounds__(CONSUMERS, 1) groups_adjoint(const __grid_constant__ PathArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const Place place(a.of, a.key_heads);                                                    // its tiles are groups
    if ((place.tile + 1) << RADIX_BITS * a.level >= (place.T + BLOCK - 1) / BLOCK) return;   // no block reads it
    const Stored stored(a, place, place.head);
    Parts parts(a, stored, shared, place.tile);
    if (threadIdx.x == 0) {
        for (int n = 0; n < 3; n++) barrier_init(parts.barrier(n), 1);
        barriers_made();
    }
    __syncthreads();
    parts.run();
}
