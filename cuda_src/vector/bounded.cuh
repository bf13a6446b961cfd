// The producers of a scan whose gates are declared to be so small that no channel loses more than 64 nats in a chunk:
// one reference, the state before the chunk, for all of its rows. With Pre_i = a_0 .. a_i = e^(g_0 + .. + g_i), sums of
// numbers of one sign,
//
//     Qg = q Pre     Kq = k / Pre     P = lower triangle of Qg Kq^T     out = scale (Qg S + P V)
//     S <- diag(Pre_63) (S + Kq^T V)
//
// so that P is one product of whole tiles. Qg goes over q, Kq over k, in P it is two terms; the second goes
// over g; P, in two terms as well, goes over that. A warpgroup makes a chunk by itself, two take turns; a warp has 32
// of its rows and 64 channels.
//
// A segment in which some channel does lose more is flagged, left and redone as a whole by the exact form.
#pragma once
#include "vector/products.cuh"
#include "vector/parts.cuh"

static_assert(!LA_EXACT && !LA_BEFORE && !LA_BONUS, "queries read each token after its own write");
constexpr float LEAST_SUM =
    -93.f;   // of g / ln 2 over a chunk: 1 / Pre and Pre times a query of 2^-33 are normal numbers

LA_DEVICE float2 add_gate(float2 sum, float2 g) { return {fmaf(g.x, LOG2_E, sum.x), fmaf(g.y, LOG2_E, sum.y)}; }
LA_DEVICE float2 decay_of_sum(float2 s) { return {exp2_approx(s.x), exp2_approx(s.y)}; }

// A warp's place in a chunk: rows 32 half + 0..31, channels 64 panel + 2 lane and the next
struct Quarter {
    int half, panel, lane;
    __device__ __forceinline__ u32 gates(const Tiles& t, int row) const {
        return gates_of(t.gates, 0, panel, lane) + row * 128;
    }
};
// the sum of rows 0 .. 31, which the lower half begins with
LA_DEVICE float2 sum_before(const Tiles& t, const Quarter& me) {
    float2 sum = {0.f, 0.f};
#pragma unroll
    for (int first = 0; first < 32; first += 16) {
        float2 g[16];
#pragma unroll
        for (int r = 0; r < 16; r++) g[r] = load_gate(me.gates(t, first), r, me.lane);
#pragma unroll
        for (int r = 0; r < 16; r++) sum = add_gate(sum, g[r]);
    }
    return sum;
}
// Eight rows from `row` on: the sum up to them in, up to the last of them out
LA_DEVICE void scale_eight(const Tiles& t, int row, float2& sum, const Quarter& me) {
    const u32 own = me.panel * PANEL + row * 128, rests = t.gates + me.panel * QUOTIENTS + row * 128;
    float2 g[8];
    u32 q[8], k[8];
#pragma unroll
    for (int r = 0; r < 8; r++) {
        g[r] = load_gate(me.gates(t, row), r, me.lane);
        q[r] = load_word(t.q + own + lane_row(r, me.lane));
        k[r] = load_word(t.k + own + lane_row(r, me.lane));
    }
    if (LA_GATE == 2) __syncwarp();   // second terms go over the log decays of other lanes
#pragma unroll
    for (int r = 0; r < 8; r++) {
        sum = add_gate(sum, g[r]);
        const float2 x = floats_of(q[r]) * decay_of_sum(sum);
        store_word(t.q + own + lane_row(r, me.lane), pack(x));
        store_word(rests + lane_row(r, me.lane), rest_of(x));
        store_word(t.k + own + lane_row(r, me.lane), pack(floats_of(k[r]) * decay_of_sum({-sum.x, -sum.y})));
    }
}
LA_DEVICE void multiply_bounded(float (&p)[8][4], const Tiles& t) {
    const u64 q = panel_descriptor(t.q), k = panel_descriptor(t.k), rests = panel_descriptor(t.gates);
    accumulator_fence(p);
    products_begin();
#pragma unroll
    for (int d = 0; d < 8; d++) product_ABt(p, q + Tokens::along(d), k + Tokens::along(d), d > 0);
#pragma unroll
    for (int d = 0; d < 8; d++)
        product_ABt(p, rests + (d >> 2) * (QUOTIENTS >> 4) + (d & 3) * 2, k + Tokens::along(d), true);
    products_commit();
    products_wait<0>();
    accumulator_fence(p);
}
// a warp's 16 rows of P, from row `first` on, in two terms
LA_DEVICE void store_bounded(float (&p)[8][4], const Tiles& t, int first, int lane) {
    const int row = first + (lane >> 2), column = (lane & 3) * 2;
    u32 a[4][4];
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int n = 0; n < 4; n++)
            if (8 * i + column + (n & 1) > row + 8 * (n >> 1)) p[i][n] = 0.f;
    token_operands(a, p);
    store_state<Square>(t.gates, a, first, lane);
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int m = 0; m < 2; m++) a[i >> 1][2 * (i & 1) + m] = rest_of(float2{p[i][2 * m], p[i][2 * m + 1]});
    store_state<Square>(t.gates + PANEL, a, first, lane);
}

// The copies and P of a chunk, by a group. Returns, of one lane, whether channels lose more
LA_DEVICE bool make_bounded(const Tiles& tiles, const Quarter& me, int group, int number) {
    float2 sum = {0.f, 0.f};
    if (me.half) sum = sum_before(tiles, me);
    group_barrier(3 + group);   // log decays that are summed have been read
#pragma unroll 1
    for (int row = 32 * me.half; row < 32 * me.half + 32; row += 8) scale_eight(tiles, row, sum, me);
    if (me.half) store_pair(tiles.all + me.panel * 256 + me.lane * 8, decay_of_sum(sum));
    const bool far = __any_sync(0xffffffffu, fminf(sum.x, sum.y) < LEAST_SUM) && me.lane == 0;
    publish_shared();
    group_barrier(3 + group);
    float p[8][4];
    multiply_bounded(p, tiles);
    group_barrier(3 + group);   // second terms have been read
    store_bounded(p, tiles, 16 * number, me.lane);
    return far;
}

// Every other chunk, by one of the two groups of producers
LA_DEVICE void producer(const Parts& parts, u32 shared, Barriers bar, int warp, int lane) {
    const int group = warp >> 2, number = warp & 3;
    const Quarter me = {number >> 1, number & 1, lane};
    const Stops stops = {shared + AT_STOPS};
    int begin = 0, n = parts.last();
    do {
        const ChunkTraversal traversal = parts.traversal(n);
        const int end = begin + traversal.steps;
        for (int step = begin + ((begin ^ group) & 1); step < end; step += 2) {
            const int s = step % STAGES, count = traversal.count(traversal.first + step - begin);
            const Tiles tiles = tiles_of(shared, s);
            bar.wait_full(step);
            if (LA_RAGGED)
                barrier_wait(bar.values(step & 1),
                             step >> 1 & 1);   // at every chunk of the group's, so that it knows each phase
            if (LA_RAGGED && count < C) {
#pragma unroll
                for (int block = 0; block < 2; block++)
                    clear_tail(tiles, values_at(shared, step), count, 4 * me.half + 2 * block + me.panel, lane);
                group_barrier(3 + group);
            }
            if (!stops.at(s, n) &&
                make_bounded(tiles, me, group,
                             number)) {   // else nothing is made: the traversal has been left at this stage
                parts.flag(n);
                stops.set(s, n);
            }
            publish_shared();
            warp_arrive(bar.ready(s), lane);
        }
        begin = end;
    } while (parts.has(--n));
}
