// Shared by the gradients of a chunk, whether its decays allow quotients or not: its rows, and the products
// that know no decay.
#pragma once
#include "free/grads.cuh"
#include "free/transposed_solve.cuh"

// By one thread: rows a, q, k, b of a chunk on their way; with the log decays, and all else
LA_DEVICE void rows_in(const FreeGradArguments& a, const ChunkPlace& place, u32 to, u32 barrier) {
    const u32 head = place.of.head;
    const int token = place.of.token(place.of.segment), row = place.of.row;
    panels_in<KEY_PANELS>(to, a.a, barrier, head / (u32)a.group_a, token, row);
    panels_in<KEY_PANELS>(to + TILE, a.q, barrier, head / (u32)a.group_q, token, row);
    panels_in<KEY_PANELS>(to + 2 * TILE, a.k, barrier, head / (u32)a.group_k, token, row);
    panels_in<KEY_PANELS>(to + 3 * TILE, a.b, barrier, head / (u32)a.group_b, token, row);
}
LA_DEVICE void load_chunk(const FreeGradArguments& a, const ChunkPlace& place, u32 shared) {
    const ChunkTraversal& of = place.of;
    const u32 rows = shared + AT_BARRIERS, others = rows + 8, head = of.head;
    const int token = of.token(of.segment), row = of.row;
    const i64 stored = place.stored();
    barrier_expect(rows, 4 * TILE + GATE_TILE);
#pragma unroll
    for (int p = 0; p < GATE_TILE / PANEL; p++)
        box_in(shared + AT_GATES + p * PANEL, a.g, rows, p * (128 / GATE_BYTES), head / (u32)a.group_g, token, row);
    rows_in(a, place, shared + AT_ROWS, rows);
    barrier_expect(others, 4 * VALUE_TILE + 2 * STATE_TILE);
    panels_in<VALUES / 64>(shared + AT_V, a.v, others, head / (u32)a.group_v, token, row);
    panels_in<VALUES / 64>(shared + AT_DOUT, a.dout, others, head, token, row);
    run_in(shared + AT_W, a.corrections + stored * VALUE_TILE, VALUE_TILE, others);
    run_in(shared + AT_DW, a.grad_corrections + stored * VALUE_TILE, VALUE_TILE, others);
    run_in(shared + AT_S, a.states + stored * STATE_TILE, STATE_TILE, others);
    run_in(shared + AT_G, a.ends + stored * STATE_TILE, STATE_TILE, others);
}

// A lane's decays; rows past the sequence have none
LA_DEVICE void load_decays(float2 (&a)[ROWS], const Lane& me, int count) {
    const u32 gates = gates_of(me.shared + AT_GATES, me.block, me.panel, me.lane);
#pragma unroll
    for (int r = 0; r < ROWS; r++) a[r] = load_gate(gates, r, me.lane);
#pragma unroll
    for (int r = 0; r < ROWS; r++) a[r] = !LA_RAGGED || me.block * ROWS + r < count ? decay_of(a[r]) : float2{1.f, 1.f};
}
// Rows of a lane's readers q and writers k; those past the sequence are zeros
LA_DEVICE void load_rows(u32 (&q)[ROWS], u32 (&k)[ROWS], u32 reader, u32 writer, const Lane& me, int count) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        q[r] = load_word(reader + lane_row(r, me.lane));
        k[r] = load_word(writer + lane_row(r, me.lane));
        if (LA_RAGGED && me.block * ROWS + r >= count) q[r] = k[r] = 0;
    }
}
// Rows of the next sequence in the tiles of v and dO become zeros
LA_DEVICE void clear_others(const Lane& me, int count) {
    if constexpr (LA_RAGGED)
        for (int i = count * 8 + threadIdx.x; i < C * 8; i += THREADS)
            for (int p = 0; p < 2 * VALUES / 64; p++)
                asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(me.shared + AT_V + p * PANEL + i * 16),
                             "r"(0)
                             : "memory");
}

// x = dO or dw (rows) times V^T or w^T; pair n: Zk, Zb, Yk, Yb
template <int A, int B> LA_DEVICE void begin_pair(float (&x)[8][4], u32 rows, u32 columns) {
#pragma unroll
    for (int d = 0; d < VALUES / 16; d++)
        product<A, B>(x, panel_descriptor(rows) + (A ? TransposedTile::across(d) : ValueTile::along(d)),
                      panel_descriptor(columns) + (B ? TransposedTile::across(d) : ValueTile::along(d)), d > 0);
}
// Pair matrix n of a warp's rows, by blocks up to the diagonal's: each(J, block)
template <class F> LA_DEVICE void multiply_pair_of(int n, float scale, const Lane& me, F each) {
    float x[8][4];
    accumulator_fence(x);
    products_begin();
    if (n == 0) begin_pair<0, 0>(x, me.shared + AT_DOUT, me.shared + AT_V);
    else if (n == 1) begin_pair<0, 1>(x, me.shared + AT_DOUT, me.shared + AT_W);
    else if (n == 2) begin_pair<1, 0>(x, me.shared + AT_DW, me.shared + AT_V);
    else begin_pair<1, 1>(x, me.shared + AT_DW, me.shared + AT_W);
    products_commit();
    products_wait<0>();
    accumulator_fence(x);
    const float factor = n < 2 ? scale : 1.f;
#pragma unroll
    for (int J = 0; J < 4; J++) {
        if (J > me.quarter) continue;
        float y[2][4];
#pragma unroll
        for (int i = 0; i < 8; i++) y[i >> 2][i & 3] = factor * x[2 * J + (i >> 2)][i & 3];
        if (J == me.quarter) clear_upper(y, n > 1, me.lane);
        each(J, y);
    }
}
// x^T = 64 channels of a state, by rows of tokens: readers S dO^T, S dw^T, writers G V^T, G w^T
LA_DEVICE void multiply_states(float (&x)[8][4], float (&y)[8][4], const Lane& me) {
    const u64 state = panel_descriptor(me.shared + (me.role ? AT_G : AT_S) + me.side * StateTile::PANEL);
    const u64 rows = panel_descriptor(me.shared + (me.role ? AT_V : AT_DOUT)),
              transposed = panel_descriptor(me.shared + (me.role ? AT_W : AT_DW));
    accumulator_fence(x);
    accumulator_fence(y);
    products_begin();
#pragma unroll
    for (int d = 0; d < VALUES / 16; d++) {
        product_AtBt(x, state + StateTile::across(d), rows + ValueTile::along(d), d > 0);
        product_AtB(y, state + StateTile::across(d), transposed + TransposedTile::across(d), d > 0);
    }
    products_commit();
}
// <S, G> of a warp's 8 channels to their place
LA_DEVICE void store_state_products(const Lane& me) {
    const int slice = me.lane >> 2, channel = 8 * me.warp + (me.lane & 3) * 2;
    float2 sum = {0.f, 0.f};
#pragma unroll
    for (int n = 0; n < VALUES / 8; n++) {
        const u32 at = me.shared + AT_S + StateTile::at(slice + 8 * n, channel);
        const float2 s = floats_of(load_word(at)), g = floats_of(load_word(at + AT_G - AT_S));
        sum.x += s.x * g.x;
        sum.y += s.y * g.y;
    }
#pragma unroll
    for (int apart = 4; apart < 32; apart *= 2) {
        sum.x += __shfl_xor_sync(0xffffffffu, sum.x, apart);
        sum.y += __shfl_xor_sync(0xffffffffu, sum.y, apart);
    }
    if (slice == 0) store_pair(me.shared + AT_ENDS + channel * 4, sum);
}
static_assert(THREADS / 32 * 8 == KEYS, "a warp has 8 channels");

LA_DEVICE void scale_rows_of(float (&x)[8][4], float f0, float f1) {
#pragma unroll
    for (int n = 0; n < 8; n++) {
        x[n][0] *= f0;
        x[n][1] *= f0;
        x[n][2] *= f1;
        x[n][3] *= f1;
    }
}
LA_DEVICE void stage_sums(const float (&x)[8][4], int which, const Lane& me) {
    const int channel = me.quarter * 16 + (me.lane >> 2), column = (me.lane & 3) * 2;
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            store_shared(me.staged(which, me.side, 8 * n + column + (i & 1), channel + 8 * (i >> 1)), x[n][i]);
}

LA_DEVICE char* rows_at(const Rows& x, const ChunkTraversal& of, int row, int channel, int bytes) {
    return own_rows(x, of.sequence, of.head) + (of.segment * C + row) * x.token + channel * bytes;
}
LA_DEVICE float2 add(float2 x, float2 y) { return {x.x + y.x, x.y + y.y}; }
LA_DEVICE float2 subtract(float2 x, float2 y) { return {x.x - y.x, x.y - y.y}; }
