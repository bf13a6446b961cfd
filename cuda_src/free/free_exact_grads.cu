// The same gradients as free_grads.cu of the chunks that it flags: any log decay in [-inf, 0]. Blocks of 16 rows, no
// decay divides:
//
//     Pre_i, Suf_j     decay from the block's start to row i, from row j to its end (a: without its own token's)
//     D_I     of block I
//     readers:  y = scale dO S^T (dw S^T);
//     for J = 0 .. 2:  y[I > J] = D_J y + Zk[I, J] (k Suf)_J + Zb[I, J] (b Suf)_J
//     dq_i = Pre_i y_i + pairs inside the block
//     writers:  y = V G^T (w G^T);     for I = 3 .. 1:  y[J < I] = D_I y + Zk[I, J]^T (q Pre)_I + Yk[I, J]^T (a Pre)_I
//     dk_j = Suf_j y_j + pairs inside the block
//
// Pairs inside a block: exact_pairs.cuh. A few blocks redo flagged chunks.
#include "free/exact_pairs.cuh"
#include "tile/wgmma_part.cuh"

// Scaled copies in place, decays of the blocks
LA_DEVICE void scale_rows(const Lane& me, int count) {
    float2 a[ROWS], pre = {1.f, 1.f}, suf = {1.f, 1.f};
    load_decays(a, me, count);
    const u32 reader = me.reader(me.part) + me.own(), writer = me.writer(me.part) + me.own();
    u32 q[ROWS], k[ROWS];
    load_rows(q, k, reader, writer, me, count);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float2 before = pre;
        pre *= a[r];
        store_word(reader + lane_row(r, me.lane), pack(floats_of(q[r]) * (me.part ? before : pre)));
    }
#pragma unroll
    for (int r = ROWS - 1; r >= 0; r--) {
        store_word(writer + lane_row(r, me.lane), pack(floats_of(k[r]) * suf));
        suf *= a[r];
    }
    if (me.part == 0) store_decay(me.shared + AT_DECAYS, pre, me.block, me.panel, me.lane);
}
// A lane's decays, from memory: pairs have the place of the log decays
LA_DEVICE void reload_decays(float2 (&a)[ROWS], const FreeGradArguments& x, const ChunkTraversal& of, int count,
                             const Lane& me) {
    const int first = me.block * ROWS, channel = me.panel * 64 + 2 * me.lane;
    const char* const from =
        rows_of(x.rows_g, of.sequence, of.head) + (i64)(of.segment * C + first) * x.rows_g.token + channel * GATE_BYTES;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float2 g = {0.f, 0.f};
        if (first + r < count && channel < LA_K) {
            const char* const at = from + r * x.rows_g.token;
            g = LA_GATE == 2 ? *(const float2*)at : floats_of(*(const u32*)at);
        }
        a[r] = decay_of(g);
    }
}
// Block J of a warp's rows of pair matrix n: pairs inside blocks to its table, in float32; the pair of neighbours
// in two blocks apart
LA_DEVICE void store_inside(u32 (&packed)[4], const float (&x)[2][4], int J, int n, const Lane& me) {
    const u32 to = me.shared + AT_GATES + (16 * me.quarter + (me.lane >> 2)) * ROWS * 16 + (me.lane & 3) * 32 + n * 4;
    if (J == me.quarter)
#pragma unroll
        for (int i = 0; i < 8; i++)
            store_shared(to + ((i >> 1) & 1) * 8 * ROWS * 16 + (i >> 2) * 128 + (i & 1) * 16, x[i >> 2][i & 3]);
    if (n >= 2 && J + 1 == me.quarter && me.lane == 3) {
        store_shared(me.shared + AT_NEAR + me.quarter * 8 + (n & 1) * 4, x[1][1]);
        packed[2] &= 0xffff;
    }
}
// Decay of a block on a warp's channels: rows of its accumulators
LA_DEVICE float block_decay(int block, int m, const Lane& me) {
    return load_shared(me.shared + AT_DECAYS +
                       (block * WIDE + me.side * 64 + me.quarter * 16 + (me.lane >> 2) + 8 * m) * 4);
}
template <int FIRST, int LAST> LA_DEVICE void scale_columns(float (&x)[8][4], const float (&f)[2]) {
#pragma unroll
    for (int n = FIRST; n < LAST; n++) {
        x[n][0] *= f[0];
        x[n][1] *= f[0];
        x[n][2] *= f[1];
        x[n][3] *= f[1];
    }
}
// Sums of q (x) and a (y) over the blocks before their own
template <int J = 0> LA_DEVICE void read_blocks(float (&x)[8][4], float (&y)[8][4], const Lane& me) {
    constexpr int FIRST = 2 * J + 2;
    const float D[2] = {block_decay(J, 0, me), block_decay(J, 1, me)};
    const u64 k = panel_descriptor(me.writer(0) + me.side * PANEL) + KeyTile::across(J),
              b = panel_descriptor(me.writer(1) + me.side * PANEL) + KeyTile::across(J);
    auto pair = [&](int n) {
        return panel_descriptor(me.shared + AT_PAIRS_OF + n * Square::SIZE) + Square::across(J + 1) + Square::along(J);
    };
    scale_columns<FIRST, 8>(x, D);
    scale_columns<FIRST, 8>(y, D);
    accumulator_fence(x);
    accumulator_fence(y);
    products_begin();
    product_part<FIRST, 8 - FIRST, 1, 0>(x, k, pair(0), true);
    product_part<FIRST, 8 - FIRST, 1, 0>(x, b, pair(1), true);
    product_part<FIRST, 8 - FIRST, 1, 0>(y, k, pair(2), true);
    product_part<FIRST, 8 - FIRST, 1, 0>(y, b, pair(3), true);
    products_commit();
    products_wait<0>();
    accumulator_fence(x);
    accumulator_fence(y);
    if constexpr (J < 2) read_blocks<J + 1>(x, y, me);
}
// Sums of k (x) and b (y) over the blocks behind their own
template <int I = 3> LA_DEVICE void write_blocks(float (&x)[8][4], float (&y)[8][4], const Lane& me) {
    const float D[2] = {block_decay(I, 0, me), block_decay(I, 1, me)};
    const u64 q = panel_descriptor(me.reader(0) + me.side * PANEL) + KeyTile::across(I),
              a = panel_descriptor(me.reader(1) + me.side * PANEL) + KeyTile::across(I);
    auto pair = [&](int n) { return panel_descriptor(me.shared + AT_PAIRS_OF + n * Square::SIZE) + Square::across(I); };
    scale_columns<0, 2 * I>(x, D);
    scale_columns<0, 2 * I>(y, D);
    accumulator_fence(x);
    accumulator_fence(y);
    products_begin();
    product_part<0, 2 * I, 1, 1>(x, q, pair(0), true);
    product_part<0, 2 * I, 1, 1>(x, a, pair(2), true);
    product_part<0, 2 * I, 1, 1>(y, q, pair(1), true);
    product_part<0, 2 * I, 1, 1>(y, a, pair(3), true);
    products_commit();
    products_wait<0>();
    accumulator_fence(x);
    accumulator_fence(y);
    if constexpr (I > 1) write_blocks<I - 1>(x, y, me);
}
// Terms that cross the chunk's end, a number a channel: <S, G> and what k and b of all tokens but the last write for G,
// decayed to it
LA_DEVICE void store_crossing(const float (&x)[8][4], const float (&y)[8][4], int count, const Lane& me) {
    float tail[2] = {1.f, 1.f}, sum[2] = {0.f, 0.f};
#pragma unroll
    for (int t = 3; t >= 0; t--) {
        const auto k = load_a_columns<Bfloat16, KeyTile>(me.writer(0), 16 * t, me.side * 64 + me.quarter * 16, me.lane);
        const auto b = load_a_columns<Bfloat16, KeyTile>(me.writer(1), 16 * t, me.side * 64 + me.quarter * 16, me.lane);
        float own[2] = {0.f, 0.f};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int token = 16 * t + 8 * h + (me.lane & 3) * 2;
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const u32 u = k.x[2 * h + m], v = b.x[2 * h + m];
                if (token + 1 != count) own[m] += x[2 * t + h][2 * m] * low_bf16(u) + y[2 * t + h][2 * m] * low_bf16(v);
                if (token + 2 != count)
                    own[m] += x[2 * t + h][2 * m + 1] * high_bf16(u) + y[2 * t + h][2 * m + 1] * high_bf16(v);
            }
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
            sum[m] += tail[m] * own[m];
            tail[m] *= block_decay(t, m, me);
        }
    }
#pragma unroll
    for (int m = 0; m < 2; m++) {
        sum[m] += __shfl_xor_sync(0xffffffffu, sum[m], 1);
        sum[m] += __shfl_xor_sync(0xffffffffu, sum[m], 2);
        const int channel = me.side * 64 + me.quarter * 16 + (me.lane >> 2) + 8 * m;
        const u32 at = me.shared + AT_ENDS + channel * 4;
        if ((me.lane & 3) == 0) store_shared(at, sum[m] + tail[m] * load_shared(at));
    }
}
// Once all products have read pairs and copies: sums in their place, and the chunk's rows on their way again
LA_DEVICE void stage_both(const float (&x)[8][4], const float (&y)[8][4], const FreeGradArguments& a, int item,
                          const Lane& me) {
    publish_shared();
    groups_barrier<THREADS>(4);
    if (threadIdx.x == 0) {
        const u32 rows = me.shared + AT_BARRIERS;
        barrier_expect(rows, 4 * TILE);
        rows_in(a, ChunkPlace(a, opaque(item)), me.shared + AT_ROWS, rows);
    }
    __syncwarp();
    stage_sums(x, 2 * me.role, me);
    stage_sums(y, 2 * me.role + 1, me);
}
// Sums over the blocks, staged as rows of tokens
LA_DEVICE void sum_blocks(const FreeGradArguments& a, int item, int count, const Lane& me) {
    constexpr int OF_GROUP = 2 / KEY_PANELS;   // pair matrices of a warpgroup
    u32 pairs[OF_GROUP][4][4] = {};
#pragma unroll
    for (int n = 0; n < OF_GROUP; n++)
        multiply_pair_of(OF_GROUP * me.group() + n, a.scale, me, [&](int J, const float (&z)[2][4]) {
            pack_operand(pairs[n][J], z);
            store_inside(pairs[n][J], z, J, OF_GROUP * me.group() + n, me);
        });
    float x[8][4], y[8][4];
    multiply_states(x, y, me);
    store_state_products(me);
    products_wait<0>();
    accumulator_fence(x);
    accumulator_fence(y);
    __syncthreads();   // values and corrections have been read
#pragma unroll
    for (int n = 0; n < OF_GROUP; n++)
        store_blocks(me.shared + AT_PAIRS_OF + (OF_GROUP * me.group() + n) * Square::SIZE, pairs[n], 16 * me.quarter,
                     me.lane);
    publish_shared();
    __syncthreads();
    if (me.role) {   // apart to the end: accumulators that two branches hand on would wait for every product
        store_crossing(x, y, count, me);
        write_blocks(x, y, me);
        stage_both(x, y, a, item, me);
    } else {
        scale_rows_of(x, a.scale, a.scale);
        read_blocks(x, y, me);
        stage_both(x, y, a, item, me);
    }
    __syncthreads();
}
// dg of a lane's rows
LA_DEVICE void store_gates(const float2 (&a)[ROWS], char* to, i64 step, int rows, const OwnBlock& own) {
    const Lane& me = own.me;
    const u32 channels = me.panel * 256 + me.lane * 8;
    float2 later = load_shared2(me.shared + AT_ENDS + channels);
    for (int n = 3; n > me.block; n--) {
        later = add(later, load_shared2(me.shared + AT_DECAYS + n * WIDE * 4 + channels));
        later = subtract(later, load_shared2(me.staged(2, me.panel, n * ROWS, 2 * me.lane)));
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float2 x = add(later, subtract(load_shared2(own.staged(0, r)), load_shared2(own.staged(2, r))));
        x = {a[r].x == 0.f ? 0.f : x.x, a[r].y == 0.f ? 0.f : x.y};   // a token that forgets everything
        if (r >= rows) continue;
        if constexpr (LA_GATE == 2) *(float2*)(to + r * step) = x;
        else *(u32*)(to + r * step) = pack(x);
    }
}
// All gradients of a chunk; parity: of the barrier of the data that are loaded once
LA_DEVICE void redo_chunk(const FreeGradArguments& a, int item, u32 shared, int parity) {
    const Lane me(shared);
    const int count = ChunkPlace(a, opaque(item))
                          .count();   // where a chunk is, is found again: no register holds it over the products
    __syncthreads();
    if (threadIdx.x == 0) load_chunk(a, ChunkPlace(a, opaque(item)), shared);
    barrier_wait(shared + AT_BARRIERS, 0);
    scale_rows(me, count);
    barrier_wait(shared + AT_BARRIERS + 8, parity);
    clear_others(me, count);
    publish_shared();
    __syncthreads();
    sum_blocks(a, item, count, me);
    const ChunkPlace place(a, opaque(item));
    const ChunkTraversal& of = place.of;
    const OwnBlock own(me, count);
    const int channel = me.panel * 64 + 2 * me.lane, first = me.block * ROWS, rows = channel < LA_K ? count - first : 0;
    float2 decays[ROWS];
    reload_decays(decays, a, of, count, me);
    barrier_wait(shared + AT_BARRIERS, 1);
    float2 reach = {1.f, 1.f}, later = {0.f, 0.f};
    if (me.part) {
        const Places to = {rows_at(a.dk, of, first, channel, 2), rows_at(a.db, of, first, channel, 2), a.dk.token,
                           a.db.token, rows};
        store_writers<1>(reach, later, decays, to, own);
        store_writers<0>(reach, later, decays, to, own);
    } else {
        const Places to = {rows_at(a.dq, of, first, channel, 2), rows_at(a.da, of, first, channel, 2), a.dq.token,
                           a.da.token, rows};
        store_readers<0>(reach, decays, to, own);
        store_readers<1>(reach, decays, to, own);
        store_decay(shared + AT_DECAYS, sum_readers(own), me.block, me.panel, me.lane);
    }
    __syncthreads();
    if (me.part == 0 && a.dg.data)
        store_gates(decays, rows_at(a.dg, of, first, channel, GATE_BYTES), a.dg.token, rows, own);
    publish_shared();
}

LA_DEVICE void store_pair_of_words(u32 at, u32 x, u32 y) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(x), "r"(y) : "memory");
}
LA_DEVICE void load_pair_of_words(u32 at, u32& x, u32& y) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "r"(at));
}

extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS) grads(const __grid_constant__ FreeGradArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        barrier_init(shared + AT_BARRIERS, 1);
        barrier_init(shared + AT_BARRIERS + 8, 1);
        barriers_made();
    }
    int parity = 0;
    for (u32 first = blockIdx.x; first < (u32)a.items; first += 32 * gridDim.x) {   // a flag a lane
        const u32 own = first + lane * gridDim.x;
        u32 left = __ballot_sync(0xffffffffu, own < (u32)a.items && a.flags[own]);
        while (left) {
            const int item = first + (__ffs(left) - 1) * gridDim.x;
            store_pair_of_words(shared + AT_LEFT + 8 * warp, left & (left - 1), first);   // registers are scarce
            redo_chunk(a, item, shared, parity);
            load_pair_of_words(shared + AT_LEFT + 8 * warp, left, first);
            parity ^= 1;
        }
    }
}
