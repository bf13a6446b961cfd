// The share of dq of a block of keys: dZ through shared memory, the product with K, and the sum over blocks in global
// memory (backward.cu).
#pragma once
#include "softmax/counts.cuh"
#include "softmax/stages.cuh"
#include "tile/reduce.cuh"
#include "tile/wgmma_panels.cuh"

LA_DEVICE u32 weights(u32 shared, int step) { return shared + AT_DZ + (step & 1) * Weights::SIZE; }
// dz, which both groups read for dq
LA_DEVICE void store_weights(const u32 (&dz)[QUERIES / 16][4], u32 shared, const Lane& me, int step) {
#pragma unroll
    for (int d = 0; d < QUERIES / 16; d++)
        store_matrix(weights(shared, step) + Weights::block_piece(me.first(), 2 * d, me.lane & 15, me.lane >> 4),
                     dz[d][0], dz[d][1], dz[d][2], dz[d][3]);
    publish_shared();
    groups_barrier<CONSUMERS>(GROUPS + 1);
}
// dq = dZ K of the tile on the group's columns, begun; with decays also the sums of dz of each query
template <int N> LA_DEVICE void begin_dq(float (&dq)[N][4], float (&rows)[1][4], u32 shared, const Lane& me, int step) {
    constexpr bool WIDE = N == 8;   // a panel, and another with the ones
    const u32 base = opaque(shared), keys = base + (WIDE ? me.group * Keys::PANEL : me.group * SHARE * 2),
              ones = base + AT_ONES;
    const u64 dz = panel_descriptor(weights(shared, step)),
              with = GATED && WIDE ? panels_descriptor(keys, ones) : panel_descriptor(keys);
    products_begin();
#pragma unroll
    for (int t = 0; t < BLOCK / 16; t++) {
        const u64 x = dz + Weights::across(t), y = with + Keys::across(t);
        if constexpr (GATED && WIDE) across_AtB(dq, rows, x, y, t > 0);
        else across_AtB(dq, x, y, t > 0);
    }
    if constexpr (GATED && !WIDE)
#pragma unroll
        for (int t = 0; t < BLOCK / 16; t++)
            across_AtB(rows, dz + Weights::across(t), panel_descriptor(ones) + Ones::across(t), t > 0);
    products_commit();
}
// the tile of dq for the engine, in the order of the threads: 16 bytes of each for every eight columns
LA_DEVICE void store_dq(const float (&dq)[SHARE / 8][4], const float (&rows)[1][4], u32 shared, const Lane& me,
                        int step) {
    const Ring<1> ring = Rings(shared).dq;
    ring.wait_empty(step);
    const u32 to = shared + AT_DQ + (me.group * (SHARE / 8) * 128 + me.warp * 32 + me.lane) * 16;
#pragma unroll
    for (int n = 0; n < SHARE / 8; n++) store_decays(to + n * 128 * 16, {dq[n][0], dq[n][1], dq[n][2], dq[n][3]});
    if (GATED && me.group == 0 && (me.lane & 3) == 0) {
        const u32 at = shared + AT_ROWS + (me.warp * 16 + (me.lane >> 2)) * 4;
        store_shared(at, rows[0][0]);
        store_shared(at + 32, rows[0][2]);
    }
    publish_shared();
    warp_arrive(ring.full(step), me.lane);
}

// the sums of blocks that have counted are visible; the sums of this one are visible before it counts
LA_DEVICE void order_counts() { asm volatile("fence.acq_rel.gpu;\nfence.proxy.async.global;" ::: "memory"); }
// Tiles of dq from shared to global memory, by a warp: the first block of keys stores a tile, the others add to it
struct Adder {
    const AttentionArguments& a;
    const Place& place;
    const u32 shared;
    const int lane;

    __device__ __forceinline__ int number(const Step& step) const { return place.tiles(a, step.head) + step.tile; }
    // of a tile: the number of blocks of keys before this one
    __device__ __forceinline__ int before(const Step& step) const {
        return place.last_block(a, step.query() + QUERIES - 1) - place.tile;
    }
    __device__ __forceinline__ void sum_rows(int tile) const {   // sums of dz of each query: of the tile
        const float2 x = load_shared2(shared + AT_ROWS + lane * 8);
        const float all = warp_sum(x.x + x.y);
        if (lane == 0) a.tiles[(i64)tile * a.blocks + place.tile] = all;
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
