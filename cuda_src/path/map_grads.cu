// Gradients of the maps D of one size of groups from the queries that pass them, of all heads that share the keys:
//
//     q' = q - q D^T,   dD = -sum over the queries of dq'^T q
//
// One block of queries after the other, head after head. The first group of a sequence is passed by none.
#include "path/traversal.cuh"

constexpr int STAGES = 3, STAGE = 2 * Rows128::SIZE, AT_RING = STAGES * STAGE;
static_assert(AT_RING + Ring<STAGES>::BYTES + 16 == LA_SHARED, "linattn_np/softmax/cuda/path_plan.py");

LA_DEVICE void produce(const PathArguments& a, const Place& place, const Readers& readers, const Stored& stored,
                       u32 shared) {
    const Ring<STAGES> ring = {shared + AT_RING};
    int step = 0;
    for (int n = 0; n < a.of.group_k; n++)
        for (int i = readers.first; i < readers.end; i++, step++) {
            const EarlierGroups earlier(i, a.levels);
            const i64 own = earlier.first() + earlier.nearer(a.level, place.tile);
            const int head = place.head * a.of.group_k + n;
            const u32 to = shared + step % STAGES * STAGE;
            ring.wait_empty(step);
            barrier_expect(ring.full(step), STAGE);
            run_in(to, a.mapped + stored.tile(place, head, own), Rows128::SIZE, ring.full(step));
            run_in(to + Rows128::SIZE, a.dmapped + stored.tile(place, head, own + 1), Rows128::SIZE, ring.full(step));
        }
}
LA_DEVICE void consume(const PathArguments& a, const Place& place, const Readers& readers, const Stored& stored,
                       u32 shared) {
    const Ring<STAGES> ring = {shared + AT_RING};
    const Lane me(threadIdx.x);
    float x[WIDTH_K / 8][4];
    clear_tiles(x);
    const int steps = place.tile ? max(readers.end - readers.first, 0) * a.of.group_k : 0;
    for (int step = 0; step < steps; step++) {
        const u32 at = shared + step % STAGES * STAGE;
        ring.wait_full(step);
        if (me.group < WIDTH_K / 64)
            complete_products(x, [&] { add_AtB<Rows128>(x, at + Rows128::SIZE + me.group * Rows128::PANEL, at); });
        warp_arrive(ring.empty(step), me.lane);
    }
    negate(x);
    if (me.group < WIDTH_K / 64) store_tile<Maps>(stored.map_of(a.dmaps, a.level, place.tile), x, me);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) map_grads(const __grid_constant__ PathArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const Place place(a.of, a.key_heads);   // its tiles are groups
    const int blocks = (place.T + BLOCK - 1) / BLOCK;
    if (place.tile + 1 << RADIX_BITS * a.level > blocks) return;
    if (threadIdx.x == 0) {
        Ring<STAGES>{shared + AT_RING}.init(1, CONSUMERS / 32 * ARRIVALS);
        barriers_made();
    }
    __syncthreads();
    const Stored stored(a, place, place.head);
    const Readers readers(a.level, place.tile, a.levels, blocks);
    run_roles(
        [&](int lane) {
            if (lane == 0 && place.tile) produce(a, place, readers, stored, shared);
        },
        [&](int) { consume(a, place, readers, stored, shared); });
}
