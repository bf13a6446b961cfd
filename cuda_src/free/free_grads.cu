// The gradients of q, k, g, a and b of every chunk at once, from the state S before it, the gradient G of the state
// after it, and the corrections w and dw of the chains.
//
//     Zk = scale lower of dO V^T     Zb = scale lower of dO w^T     Yk = strict lower of dw V^T
//     Yb = strict lower of dw w^T
//
// With the decays from the chunk's start on the rows, Pre (a's without its own token's), and the rounded copies q Pre,
// a Pre, k / Pre, b / Pre:
//
//     dq = Pre (scale dO S^T + Zk (k / Pre) + Zb (b / Pre))       dk = (D V G^T + Zk^T (q Pre) + Yk^T (a Pre)) / Pre
//     da = Pre (dw S^T + Yk (k / Pre) + Yb (b / Pre))             db = (D w G^T + Zb^T (q Pre) + Yb^T (a Pre)) / Pre
//     dg_t = sum over l >= t of (q.dq - k.dk - b.db)_l + sum over l > t of (a.da)_l + D (<S, G>
//         + what k and b write for G), by channels
//
// The dots are taken of the sums before their last factor and the rounded copies, so that a pair which does not cross t
// is the same number twice. Zk, Zb and the copies of q, k, b are two terms of bfloat16. A chunk that loses more than 62
// nats is left to free_exact_grads.cu.
#include "free/chunk_products.cuh"
#include "tile/wgmma_part.cuh"

// The decay of a block in a channel of a panel
LA_DEVICE u32 decay_place(int block, int panel, int channel, const Lane& me) {
    const int n = panel * 64 + channel;
    return me.shared + AT_DECAYS +
           (DECAYS_WITHIN ? Square::at(n >> 2, 32 + 8 * block + (n & 3) * 2) : (block * WIDE + n) * 4);
}
// Decays of the blocks before a lane's, and of the chunk
struct Around {
    float2 before, all;
};
LA_DEVICE Around around(const Lane& me) {
    Around x = {{1.f, 1.f}, {1.f, 1.f}};
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const float2 d = load_shared2(decay_place(n, me.panel, 2 * me.lane, me));
        if (n < me.block) x.before *= d;
        x.all *= d;
    }
    return x;
}
// Scaled copies in place; tails: their rounding errors, of a row's four. Returns whether the chunk loses too much for
// quotients
LA_DEVICE bool scale_rows(u32 (&tails)[ROWS], const Lane& me, int count) {
    float2 a[ROWS];
    load_decays(a, me, count);
    float2 all = a[0];
#pragma unroll
    for (int r = 1; r < ROWS; r++) all *= a[r];
    store_pair(decay_place(me.block, me.panel, 2 * me.lane, me), all);
    __syncthreads();
    float2 pre = around(me).before;
    const u32 reader = me.reader(me.part) + me.own(), writer = me.writer(me.part) + me.own();
    u32 q[ROWS], k[ROWS];
    load_rows(q, k, reader, writer, me, count);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float2 before = pre;
        pre *= a[r];
        const float2 x = floats_of(q[r]) * (me.part ? before : pre), y = floats_of(k[r]) * any_over(pre);
        store_word(reader + lane_row(r, me.lane), pack(x));
        store_word(writer + lane_row(r, me.lane), pack(y));
        tails[r] = tails_of(x, y) & (me.part ? 0xffff0000 : 0xffffffff);
    }
    // of a chunk of few tokens as much a token: else what k writes for G, which no decay has crossed, would drown dg
    return fminf(pre.x, pre.y) < exp2_approx(SMALLEST_LOG2 / C * count);
}
// The rounding errors of the copies of q, k and b, to their place
LA_DEVICE void store_rests(const u32 (&tails)[ROWS], const Lane& me) {
    const u32 reader = me.reader(0) + me.own(), writer = me.writer(me.part) + me.own();
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        store_word(writer + AT_RESTS + lane_row(r, me.lane),
                   rest_of<2>(load_word(writer + lane_row(r, me.lane)), tails[r]));
    if (me.part) return;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        store_word(reader + AT_RESTS + lane_row(r, me.lane),
                   rest_of<0>(load_word(reader + lane_row(r, me.lane)), tails[r]));
}

// Decay of the chunk on a warp's channels: rows of its accumulators
LA_DEVICE void chunk_decay(float (&D)[2], const Lane& me) {
#pragma unroll
    for (int m = 0; m < 2; m++) {
        D[m] = 1.f;
#pragma unroll
        for (int n = 0; n < 4; n++)
            D[m] *= load_shared(decay_place(n, me.side, me.quarter * 16 + (me.lane >> 2) + 8 * m, me));
    }
}
// Terms that cross the chunk's end, a number a channel: D (<S, G> + the sum over tokens of k.x / Pre + b.y / Pre), x
// and y G V^T and G w^T
LA_DEVICE void add_crossing(float (&sum)[2], const float (&x)[8][4], u32 rows, const Lane& me) {
#pragma unroll
    for (int t = 0; t < 4; t++) {
        const auto k = load_a_columns<Bfloat16, KeyTile>(rows, 16 * t, me.side * 64 + me.quarter * 16, me.lane);
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int m = 0; m < 2; m++) {
                sum[m] = fmaf(x[2 * t + h][2 * m], low_bf16(k.x[2 * h + m]), sum[m]);
                sum[m] = fmaf(x[2 * t + h][2 * m + 1], high_bf16(k.x[2 * h + m]), sum[m]);
            }
    }
}
LA_DEVICE void store_crossing(const float (&x)[8][4], const float (&y)[8][4], const float (&D)[2], const Lane& me) {
    float sum[2] = {0.f, 0.f};
    add_crossing(sum, x, me.writer(0), me);
    add_crossing(sum, y, me.writer(1), me);
    add_crossing(sum, x, me.writer(0) + AT_RESTS, me);
    add_crossing(sum, y, me.writer(1) + AT_RESTS, me);
#pragma unroll
    for (int m = 0; m < 2; m++) {
        sum[m] += __shfl_xor_sync(0xffffffffu, sum[m], 1);
        sum[m] += __shfl_xor_sync(0xffffffffu, sum[m], 2);
        const u32 at = me.shared + AT_ENDS + (me.side * 64 + me.quarter * 16 + (me.lane >> 2) + 8 * m) * 4;
        if ((me.lane & 3) == 0) store_shared(at, D[m] * (sum[m] + load_shared(at)));
    }
}
// Of 16 rows D of copies, times pairs of these rows and later ones (WRITES: earlier ones): dq: Zk k + Zb b, da: Yk k +
// Yb b; dk: Zk^T q + Yk^T a, db: Zb^T q + Yb^T a. TERMS: rounded copies and pairs, these with rests of Zk and Zb, rests
// of q, k and b with pairs
template <bool WRITES, int D, int TERMS> LA_DEVICE void multiply_pairs(float (&x)[8][4], float (&y)[8][4],
                                                                       const Lane& me) {
    constexpr int FIRST = WRITES ? 0 : 2 * D, TILES = WRITES ? 2 * D + 2 : 8 - 2 * D;
    const u32 side = me.side * PANEL + (TERMS == 2 ? AT_RESTS : 0);
    const u64 a = panel_descriptor((WRITES ? me.reader(0) : me.writer(0)) + side) + KeyTile::across(D);
    const u64 b = panel_descriptor((WRITES ? me.reader(1) : me.writer(1)) + side) + KeyTile::across(D);
    auto pair = [&](int n) {
        return panel_descriptor(me.shared + (TERMS == 1 ? AT_PAIR_RESTS : AT_PAIRS_OF) + n * Square::SIZE) +
               Square::across(D) + (WRITES ? 0 : Square::along(D));
    };
    product_part<FIRST, TILES, 1, WRITES>(x, a, pair(0), true);
    if (WRITES) product_part<FIRST, TILES, 1, 1>(y, a, pair(1), true);
    else product_part<FIRST, TILES, 1, 0>(x, b, pair(1), true);
    if (TERMS == 1 || (TERMS == 2 && WRITES)) return;
    if (WRITES) product_part<FIRST, TILES, 1, 1>(x, b, pair(2), true);
    else product_part<FIRST, TILES, 1, 0>(y, a, pair(2), true);
    product_part<FIRST, TILES, 1, WRITES>(y, b, pair(3), true);
}
// Sums of the pairs of the chunk: x and y become the sums of all gradients before their last factor
template <bool WRITES, int D = 0> LA_DEVICE void add_pairs(float (&x)[8][4], float (&y)[8][4], const Lane& me) {
    if (!WRITES && D > 0) {   // else products with fewer columns than those before would wait for each other
        float one;
        asm volatile("mov.f32 %0, 0f3F800000;" : "=f"(one));
#pragma unroll
        for (int n = 2 * D; n < 8; n++)
#pragma unroll
            for (int m = 0; m < 4; m++) {
                x[n][m] *= one;
                y[n][m] *= one;
            }
    }
    accumulator_fence(x);
    accumulator_fence(y);
    products_begin();
    multiply_pairs<WRITES, D, 0>(x, y, me);
    multiply_pairs<WRITES, D, 1>(x, y, me);
    multiply_pairs<WRITES, D, 2>(x, y, me);
    products_commit();
    products_wait<0>();
    accumulator_fence(x);
    accumulator_fence(y);
    if constexpr (D < 3) add_pairs<WRITES, D + 1>(x, y, me);
}
// Once all warps have read pairs and rests: sums in their place
LA_DEVICE void stage_both(const float (&x)[8][4], const float (&y)[8][4], const Lane& me) {
    groups_barrier<THREADS>(4);
    stage_sums(x, 2 * me.role, me);
    stage_sums(y, 2 * me.role + 1, me);
}
LA_DEVICE void store_pair_rests(const u32 (&rests)[4][4], const Lane& me) {
    store_blocks(me.shared + AT_PAIR_RESTS + me.group() * Square::SIZE, rests, 16 * me.quarter, me.lane,
                 DECAYS_WITHIN ? me.quarter : 3);
}
struct Outputs {   // a lane's rows of two gradients in memory, from its first on
    char *read, *write;
    u32 read_step, write_step;
};
// Gradients of a lane's rows, dq and dk or da and db. sums: of row r and those behind it in the block, what of the dots
// dg of r has; returned: of all rows what earlier tokens have, which is more by a's of the first row.
LA_DEVICE float2 store_rows_of(float2 (&sums)[ROWS], const u32 (&tails)[ROWS], const Outputs& to, int rows, bool valid,
                               const Lane& me) {
    const u32 reader = me.reader(me.part) + me.own(), writer = me.writer(me.part) + me.own(),
              gates = gates_of(me.shared + AT_GATES, me.block, me.panel, me.lane);
    const int channel = 2 * me.lane, count = rows + me.block * ROWS;
    float2 first = {0.f, 0.f}, pre = around(me).before;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int token = me.block * ROWS + r;
        const float2 before = pre, x = load_shared2(me.staged(me.part, me.panel, token, channel)),
                     y = load_shared2(me.staged(2 + me.part, me.panel, token, channel));
        pre *= decay_at(gates, r, me, count);
        const u32 q = load_word(reader + lane_row(r, me.lane)), k = load_word(writer + lane_row(r, me.lane));
        const float2 read = both_terms<0>(q, tails[r]) * x, none = {0.f, 0.f};
        sums[r] = subtract(me.part ? none : read, both_terms<2>(k, tails[r]) * y);
        if (r == 0) first = me.part ? read : none;
        else sums[r - 1] = add(sums[r - 1], me.part ? read : none);
        if (valid && r < rows) {
            *(u32*)(to.read + r * to.read_step) = pack(x * (me.part ? before : pre));
            *(u32*)(to.write + r * to.write_step) = pack(y * any_over(pre));
        }
    }
#pragma unroll
    for (int r = ROWS - 2; r >= 0; r--) sums[r] = add(sums[r], sums[r + 1]);
    return add(first, sums[0]);
}
// Sums of a lane's rows in place of those before their last factor: of all rows; of a and b those of each row too
LA_DEVICE void share_sums(const float2 (&sums)[ROWS], float2 all, const Lane& me) {
    if (me.part)
#pragma unroll
        for (int r = 0; r < ROWS; r++) store_pair(me.staged(1, me.panel, me.block * ROWS + r, 2 * me.lane), sums[r]);
    store_pair(me.staged(2 + me.part, me.panel, me.block * ROWS, 2 * me.lane), all);
}
// dg of a lane's rows, whose sums of q and k it has
LA_DEVICE void store_gates(const float2 (&sums)[ROWS], char* to, i64 step, int rows, const Lane& me) {
    const int channel = 2 * me.lane;
    float2 later = load_shared2(me.shared + AT_ENDS + me.panel * 256 + me.lane * 8);
    for (int n = 3; n > me.block; n--)
        later = add(later, add(load_shared2(me.staged(2, me.panel, n * ROWS, channel)),
                               load_shared2(me.staged(3, me.panel, n * ROWS, channel))));
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float2 x = add(later, add(sums[r], load_shared2(me.staged(1, me.panel, me.block * ROWS + r, channel))));
        if (r < rows) {
            if constexpr (LA_GATE == 2) *(float2*)to = x;
            else *(u32*)to = pack(x);
        }
        to += step;
    }
}
LA_DEVICE void begin_loads(const FreeGradArguments& a, const ChunkPlace& place, const Lane& me) {   // one thread
    barrier_init(me.shared + AT_BARRIERS, 1);
    barrier_init(me.shared + AT_BARRIERS + 8, 1);
    barriers_made();
    load_chunk(a, place, me.shared);
}

// Sums that the states give, x of q (role 1: k), y of a (b); pairs, their rests and the rests of the copies to their
// places
LA_DEVICE void begin_sums(float (&x)[8][4], float (&y)[8][4], const u32 (&tails)[ROWS], float scale, const Lane& me) {
    constexpr int GROUPS = 2 * KEY_PANELS,
                  OF_GROUP =
                      4 /
                      GROUPS;   // pair matrices of a warpgroup: its own and, of 64 channels, that of dw instead of dO
    const bool splits = KEY_PANELS == 1 || me.role == 0;
    u32 pairs[OF_GROUP][4][4] = {}, rests[4][4] = {};
#pragma unroll
    for (int n = 0; n < OF_GROUP; n++) {
        multiply_pair_of(me.group() + n * GROUPS, scale, me, [&](int J, const float (&z)[2][4]) {
            if (n == 0 && splits) split_operand(pairs[n][J], rests[J], z);
            else pack_operand(pairs[n][J], z);
        });
        if (RESTS_APART && n == 0 && splits) store_pair_rests(rests, me);
    }
    multiply_states(x, y, me);
    store_state_products(me);
    products_wait<0>();
    accumulator_fence(x);
    accumulator_fence(y);
    __syncthreads();   // states, values and corrections have been read
#pragma unroll
    for (int n = 0; n < OF_GROUP; n++)
        store_blocks(me.shared + AT_PAIRS_OF + (me.group() + n * GROUPS) * Square::SIZE, pairs[n], 16 * me.quarter,
                     me.lane);
    if (!RESTS_APART && splits) store_pair_rests(rests, me);
    store_rests(tails, me);
    publish_shared();
    __syncthreads();
}
// All gradients of a lane's rows, from the sums of all
LA_DEVICE void store_gradients(const FreeGradArguments& a, const ChunkTraversal& of, const u32 (&tails)[ROWS],
                               int count, const Lane& me) {
    const int channel = me.panel * 64 + 2 * me.lane, first = me.block * ROWS, rows = count - first;
    const bool valid = channel < LA_K;
    const Outputs to = me.part ? Outputs{rows_at(a.da, of, first, channel, 2), rows_at(a.db, of, first, channel, 2),
                                         (u32)a.da.token, (u32)a.db.token}
                               : Outputs{rows_at(a.dq, of, first, channel, 2), rows_at(a.dk, of, first, channel, 2),
                                         (u32)a.dq.token, (u32)a.dk.token};
    float2 sums[ROWS];
    const float2 all = store_rows_of(sums, tails, to, rows, valid, me);
    share_sums(sums, all, me);
    __syncthreads();
    if (me.part == 0 && valid && a.dg.data)
        store_gates(sums, rows_at(a.dg, of, first, channel, GATE_BYTES), a.dg.token, rows, me);
}

extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS) grads(const __grid_constant__ FreeGradArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const ChunkPlace place(a, blockIdx.x);
    if (place.of.steps <= 0) {
        if (threadIdx.x == 0) a.flags[blockIdx.x] = 0;
        return;
    }
    const Lane me(shared_address(memory));
    if (threadIdx.x == 0) begin_loads(a, place, me);
    __syncthreads();
    const int count = place.count();
    barrier_wait(me.shared + AT_BARRIERS, 0);
    u32 tails[ROWS];
    const bool far = scale_rows(tails, me, count);
    barrier_wait(me.shared + AT_BARRIERS + 8, 0);
    clear_others(me, count);
    publish_shared();
    const bool leaves = __syncthreads_or(far);
    if (threadIdx.x == 0) a.flags[blockIdx.x] = leaves;
    if (leaves) return;
    float x[8][4], y[8][4], D[2];
    begin_sums(x, y, tails, a.scale, me);
    if (me.role) {   // apart to the end: accumulators that two branches hand on would wait for every product
        chunk_decay(D, me);
        store_crossing(x, y, D, me);
        scale_rows_of(x, D[0], D[1]);
        scale_rows_of(y, D[0], D[1]);
        add_pairs<true>(x, y, me);
        stage_both(x, y, me);
    } else {
        scale_rows_of(x, a.scale, a.scale);
        add_pairs<false>(x, y, me);
        stage_both(x, y, me);
    }
    __syncthreads();
    store_gradients(a, place.of, tails, count, me);
}
