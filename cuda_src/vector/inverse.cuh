// L_ij = sqrt(beta_i) (k_i . k_j decayed from j to i) sqrt(beta_j) of a chunk, j <= i, from scaled copies of the keys
// as P is from those of q and k (copies.cuh, gram.cuh), by the same eight warps. Tile k becomes k Pre h, the quotients
// go over the log decays.
#pragma once
#include "vector/gram.cuh"

LA_DEVICE float2 pair_at(const float* x, int i) { return *(const float2*)(x + i); }
LA_DEVICE float decay_between(float, float) { return 1.f; }   // decays are in L itself
#include "attention/inverse_blocks.cuh"

#ifndef LA_FACTORS   // 1: -W, Kd and the decay of each chunk are stored, for the transfer of segments
#define LA_FACTORS 0
#endif

// Eight rows of keys from row `first` on; as scale_rows. factors: where -W of the chunk is stored, Kd behind it, if it is
template <bool EXACT> LA_DEVICE void scale_key_rows(const Tiles& t, char* factors, int first, float2& pre, float2 suf,
                                                    const Reach& reach, int warp, int lane) {
    typedef Scratch<0> X;
    const int block = warp >> 1, panel = warp & 1;
    const u32 own = t.k + panel * PANEL + block * BLOCK_BYTES + first * 128,
              scratch = t.scratch + panel * X::PANEL_BYTES + first * 128;
    const u32 gates = gates_of(t.gates, block, panel, lane) + first * 128,
              quotients = t.gates + panel * QUOTIENTS + block * BLOCK_BYTES + first * 128;
    float2 a[8];
    u32 k[8];
#pragma unroll
    for (int r = 0; r < 8; r++) a[r] = load_gate(gates, r, lane);
#pragma unroll
    for (int r = 0; r < 8; r++) k[r] = load_word(own + lane_row(r, lane));
    if (LA_GATE == 2) __syncwarp();   // quotients go over the log decays of other lanes
#pragma unroll
    for (int r = 0; r < 8; r++) a[r] = decay_of(a[r]);
    char* const writers = factors + Tokens::SIZE + (own - t.k);
    float2 far = pre * reach.between, s = suf;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        pre *= a[i];
        const float2 x = floats_of(k[i]);
        store_word(own + lane_row(i, lane), pack(x * pre));
        store_word(quotients + lane_row(i, lane), pack(x * (EXACT ? float2{over(pre.x), over(pre.y)} : any_over(pre))));
        const int r = 7 - i;
        const float2 y = floats_of(k[r]) * s;
        store_word_if(block < 3, scratch + X::key(block) * BLOCK_BYTES + lane_row(r, lane), pack(y));
        if (LA_FACTORS && factors) *(u32*)(writers + lane_row(r, lane)) = pack(y * reach.behind);
        s *= a[r];
    }
    if (block == 3)
#pragma unroll
        for (int r = 0; r < 8; r++) {
            far *= a[r];
            store_word(scratch + X::FAR_QUERY * BLOCK_BYTES + lane_row(r, lane), pack(floats_of(k[r]) * far));
        }
    if (block == 0) {
        far = suf * reach.between;
#pragma unroll
        for (int r = 7; r >= 0; r--) {
            store_word(scratch + X::FAR_KEY * BLOCK_BYTES + lane_row(r, lane), pack(floats_of(k[r]) * far));
            far *= a[r];
        }
    }
}
// All copies of a warp's 16 rows of keys. Returns whether the block is on the exact path.
template <bool EXACT> LA_DEVICE bool scale_keys(const Tiles& t, char* factors, int warp, int lane) {
    const int block = warp >> 1, panel = warp & 1;
    const Halves halves = halves_of(gates_of(t.gates, block, panel, lane), lane);
    const float2 own = halves.first * halves.last;
    store_decay(t.decays, own, block, panel, lane);
    __syncthreads();
    Reach reach = reach_of(t.decays, own, block, panel, lane);
    if (LA_FACTORS && factors && block == 0)
        *(float2*)(factors + 2 * Tokens::SIZE + panel * 256 + lane * 8) = reach.all;
    reach.before *= {OVER_MIDDLE, OVER_MIDDLE};
    float2 pre = {MIDDLE, MIDDLE};
#pragma unroll 1
    for (int first = 0; first < ROWS; first += 8)
        scale_key_rows<EXACT>(t, factors, first, pre, first ? float2{1.f, 1.f} : halves.last, reach, warp, lane);
    return fminf(pre.x, pre.y) < SMALLEST_DECAY * MIDDLE;
}
// roots: of beta. L off the diagonal in float16 to `lower`, its diagonal blocks in float32, transposed, to `diagonals`:
// both over quotients, which have been read by then.
template <bool EXACT> LA_DEVICE void store_lower(const Tiles& t, const float* roots, float* diagonals,
                                                 const ExactBlock& exact, int warp, int lane) {
    const int block = warp >> 1, panel = warp & 1, row = lane >> 2, column = 8 * panel + (lane & 3) * 2;
    Packed next = {0, 0}, other = {0, 0};
    float own[4];
#pragma unroll(EXACT ? 1 : 3)   // where registers allow that loads go ahead of the products before
    for (int n = EXACT && block >= 2 ? 1 : 2; n >= 0; n--) {
        if (!EXACT && n == 2 && block >= 2) continue;
        const Operands x = operands_of<0>(t, n, block);
        const int reader = n == 0   ? block
                           : n == 1 ? (block ? block : 3)
                           : block  ? 3
                                    : 2,
                  writer = n == 0   ? block
                           : n == 1 ? (block ? block - 1 : 0)
                                    : block;
        half_block(own, x.a, x.a_apart, x.b, x.b_apart, panel, lane);
        if constexpr (EXACT)
            if (n == 0) finish_diagonal<true, false>(own, t, exact, 0.f, warp, lane);
        const float2 from = pair_at(roots, 16 * writer + column);
        const float over = n ? OVER_MIDDLE : 1.f,
                    to[2] = {roots[16 * reader + row] * over, roots[16 * reader + row + 8] * over};
#pragma unroll
        for (int i = 0; i < 4; i++) own[i] *= to[i >> 1] * (i & 1 ? from.y : from.x);
        const Packed y = {pack_f16(own[0], own[1]), pack_f16(own[2], own[3])};
        if (n == 1) next = y;
        if (n == 2) other = y;
    }
    __syncthreads();   // all quotients have been read
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int r = row + 8 * (i >> 1), c = column + (i & 1);
        diagonals[block * (DIAGONAL / 4) + c * 20 + r] = r >= c ? own[i] : 0.f;
    }
    auto put = [&](int i, int j, Packed x) {
        const u32 at = t.gates + i * BLOCK_BYTES + row * 128 + (((2 * j + panel) ^ (row & 7)) << 4) + (lane & 3) * 4;
        store_word(at, x.low);
        store_word(at + 8 * 128, x.high);
    };
    put(block ? block : 3, block ? block - 1 : 0, next);
    if (block < 2) put(block ? 3 : 2, block, other);
}
// -W = -(beta Kc + N bf(beta Kc)) of a chunk to `to`, by the same eight warps, 16 channels each. Kc of block j is what
// tile k has, times D_0 .. D_(j-1) / h: by Horner's rule, from a row block's own columns down. Where keys are alike,
// both terms are rounded (strengths.cuh).
LA_DEVICE void store_erasers(u32 to, const Tiles& t, u32 N, u32 strengths, int warp, int lane) {
    auto piece = [&](int b) { return Tokens::block_piece(16 * b, 2 * warp, lane & 15, lane >> 4); };
    float w[4][2][4];
    u32 keys[4][4];
#pragma unroll
    for (int b = 0; b < 4; b++) {
        u32 own[4];
        load_matrix(own, t.k + piece(b));
        load_matrix_transposed(keys[b], t.k + piece(b));
#pragma unroll
        for (int i = 0; i < 2; i++) {   // rows lane / 4 and that plus 8; tokens of B's rows
            const float beta = load_shared(strengths + (16 * b + (lane >> 2) + 8 * i) * 4);
            const float2 from = load_shared2(strengths + (16 * b + (lane & 3) * 2 + 8 * i) * 4);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const float2 x = floats_of(own[2 * n + i]) * fabsf(beta), y = beta < 0.f ? floats_of(pack(x)) : x;
                w[b][n][2 * i] = y.x;
                w[b][n][2 * i + 1] = y.y;
                keys[b][2 * n + i] = pack(floats_of(keys[b][2 * n + i]) * float2{fabsf(from.x), fabsf(from.y)});
            }
        }
    }
#pragma unroll
    for (int j = 3; j >= 0; j--) {
        float2 d[2];
#pragma unroll
        for (int n = 0; n < 2; n++) d[n] = load_shared2(t.decays + j * 512 + warp * 64 + n * 32 + (lane & 3) * 8);
#pragma unroll
        for (int i = 3; i >= 0; i--) {
            if (i < j) continue;
            u32 a[4];
            load_matrix(a, N + rows_at(16 * i, 16 * j, lane));
#pragma unroll
            for (int n = 0; n < 2; n++) {
                if (i > j) {
                    w[i][n][0] *= d[n].x;
                    w[i][n][1] *= d[n].y;
                    w[i][n][2] *= d[n].x;
                    w[i][n][3] *= d[n].y;
                }
                multiply(w[i][n], a, keys[j][2 * n], keys[j][2 * n + 1]);
            }
        }
    }
#pragma unroll
    for (int b = 0; b < 4; b++) {
        u32 x[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[i] = pack(float2{w[b][i >> 1][2 * (i & 1)], w[b][i >> 1][2 * (i & 1) + 1]} * -OVER_MIDDLE);
        store_matrix(to + piece(b), x[0], x[1], x[2], x[3]);
    }
}
