// Tiles of rows of a head in shared memory: copied in by the copy engine, cleared past a sequence's end, copied out.
#pragma once
#include "softmax/place.cuh"

// ROWS rows from token `token` of the sequence: boxes of 64 columns of 64 rows
template <class X> LA_DEVICE void tile_in(u32 to, const TensorMap& map, u32 barrier, const Place& place, int head,
                                          int token) {
#pragma unroll
    for (int p = 0; p < X::COLUMNS / 64; p++)
#pragma unroll
        for (int r = 0; r < X::ROWS; r += 64)
            box_in(to + p * X::PANEL + r * 128, map, barrier, p * 64, head, place.first + token + r, place.batch);
}
// Rows from `own` on become zeros, by all consumers: rows after them belong to another sequence
template <class X> LA_DEVICE void clear_rows_from(u32 tile, int own) {
    for (int n = threadIdx.x; n < X::COLUMNS / 8 * X::ROWS; n += CONSUMERS) {
        const int row = n % X::ROWS;
        if (row >= own) store_decays(tile + X::piece(row, n / X::ROWS), {0.f, 0.f, 0.f, 0.f});
    }
}
LA_DEVICE void rows_cleared() {
    publish_shared();
    groups_barrier<CONSUMERS>(GROUPS + 1);
}

// A warp's 16 rows of accumulators times f, one each of its two rows a lane, by way of its rows of panels X at `base`,
// to rows `to` of LA_K or LA_V columns; `left` rows exist
template <class X, int WIDTH, int N>
LA_DEVICE void store_rows(char* to, i64 stride, int left, u32 base, const float (&x)[N][4], const float (&f)[2],
                          const Lane& me) {
    const int row = me.first();
#pragma unroll
    for (int d = 0; d < N / 2; d++) {
        const float (&a)[4] = x[2 * d], (&b)[4] = x[2 * d + 1];
        store_matrix(base + X::block_piece(row, 2 * d, me.lane & 15, me.lane >> 4), pack_pair(a[0] * f[0], a[1] * f[0]),
                     pack_pair(a[2] * f[1], a[3] * f[1]), pack_pair(b[0] * f[0], b[1] * f[0]),
                     pack_pair(b[2] * f[1], b[3] * f[1]));
    }
    __syncwarp();
    constexpr int PIECES = N, ROWS = 32 / PIECES;   // rows at once
#pragma unroll
    for (int r = 0; r < 16; r += ROWS) {
        const int own = row + r + me.lane / PIECES, p = me.lane % PIECES;
        const Decays y = load_decays(base + X::piece(own, p));
        if (own < left && p * 8 < WIDTH) *(Decays*)(to + own * stride + p * 16) = y;
    }
}
// Accumulators as operands A of 16 columns each
template <int N> LA_DEVICE void pack_operands(u32 (&to)[N / 2][4], const float (&x)[N][4]) {
#pragma unroll
    for (int d = 0; d < N / 2; d++) {
        to[d][0] = pack_pair(x[2 * d][0], x[2 * d][1]);
        to[d][1] = pack_pair(x[2 * d][2], x[2 * d][3]);
        to[d][2] = pack_pair(x[2 * d + 1][0], x[2 * d + 1][1]);
        to[d][3] = pack_pair(x[2 * d + 1][2], x[2 * d + 1][3]);
    }
}
template <int N> LA_DEVICE void clear_tiles(float (&x)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) x[n][0] = x[n][1] = x[n][2] = x[n][3] = 0.f;
}

// Log2 decays of a tile of keys for the queries from i0 on, by a warp. Near: sums of each key (16 bytes); else the
// decay from the key to the token before i0 (4 bytes), whose sums are `before`.
template <int KEYS> LA_DEVICE void store_key_decays(u32 to, const Decays* sums, int j0, int Tk, bool near,
                                                    const Decays& before, int lane) {
#pragma unroll
    for (int n = 0; n < KEYS / 32; n++) {
        const int r = n * 32 + lane;
        const Decays x = sums[min(j0 + r, Tk - 1)];
        if (near) store_decays(to + r * 16, x);
        else store_shared(to + r * 4, decay_between(before, x));
    }
}
// The producer is one warp of the last warpgroup, with OWN registers a thread
template <int OWN = 24, class Produce, class Consume> LA_DEVICE void run_roles(Produce produce, Consume consume) {
    if (threadIdx.x >= CONSUMERS) {
        release_registers<OWN>();
        if (threadIdx.x < CONSUMERS + 32) produce(threadIdx.x & 31);
    } else {
        claim_registers<252 - OWN / 2>();
        consume(threadIdx.x);
    }
}
