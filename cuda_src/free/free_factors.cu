// The factors of every chunk (factors.cuh), all at once: a block of eight warps a chunk and head.
//
// With LA_EXACT a block redoes the chunks of a head that the other build has flagged, every LA_PIECES-th.
#ifndef LA_EXACT
#define LA_EXACT 0
#endif
#include "free/levels.cuh"
#include "free/solve.cuh"
#include "free/neighbours.cuh"

// By one thread: a chunk's rows on their way
LA_DEVICE void load_chunk(const FreeArguments& a, const ChunkTraversal& traversal, int chunk, u32 shared) {
    const u32 barrier = shared + AT_BARRIER, head = traversal.head;
    const int token = traversal.token(chunk), row = traversal.row;
    barrier_expect(barrier, 4 * TILE + GATE_TILE);
#pragma unroll
    for (int p = 0; p < GATE_TILE / PANEL; p++)
        box_in(shared + AT_SQUARES + p * PANEL, a.g, barrier, p * (128 / GATE_BYTES), head / (u32)a.group_g, token,
               row);
    panels_in<KEY_PANELS>(shared, a.q, barrier, head / (u32)a.group_q, token, row);
    panels_in<KEY_PANELS>(shared + TILE, a.a, barrier, head / (u32)a.group_a, token, row);
    panels_in<KEY_PANELS>(shared + 2 * TILE, a.k, barrier, head / (u32)a.group_k, token, row);
    panels_in<KEY_PANELS>(shared + 3 * TILE, a.b, barrier, head / (u32)a.group_b, token, row);
}
// The rounding error of a block of A_ab; a diagonal one, negative and transposed
LA_DEVICE void store_rests(const float (&y)[2][4], const u32 (&packed)[4], u32 block, int lane) {
    u32 rest[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        rest[i] =
            pack_bf16(y[i >> 1][2 * (i & 1)] - low_bf16(packed[i]), y[i >> 1][2 * (i & 1) + 1] - high_bf16(packed[i]));
    store_matrix(block + Small::block_piece(0, 0, lane & 15, lane >> 4), rest[0], rest[1], rest[2], rest[3]);
}
LA_DEVICE void store_diagonal(const float (&y)[2][4], float* to, int lane) {
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int m = 0; m < 4; m++) to[(8 * n + (lane & 3) * 2 + (m & 1)) * 20 + (lane >> 2) + 8 * (m >> 1)] = -y[n][m];
}
// Columns from `far` on become the exact pairs
LA_DEVICE void take_exact(float (&x)[8][4], const float (&found)[8][4], int far, int lane) {
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int m = 0; m < 4; m++)
            if (8 * n + (lane & 3) * 2 + (m & 1) >= far) x[n][m] = found[n][m];
}
// Lower triangles of pairs with k (w 0) or b (1), that of q and b with its diagonal, as they are stored; of A_ab rests
// and diagonal blocks to their places
LA_DEVICE void pack_pairs(u32 (&packed)[4][4], const float (&x)[8][4], int w, const Chunk& t, float* diagonals,
                          const Lane& me) {
    const int own = me.warp & 3;
#pragma unroll
    for (int J = 0; J < 4; J++) {
        if (J > own) {
#pragma unroll
            for (int i = 0; i < 4; i++) packed[J][i] = 0;
            continue;
        }
        float y[2][4];
#pragma unroll
        for (int i = 0; i < 8; i++) y[i >> 2][i & 3] = x[2 * J + (i >> 2)][i & 3];
        if (J == own) {
            clear_upper(y, me.group, me.lane);
            take_neighbours(y, w, t, me);
        }
        if constexpr (LA_RAGGED)
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (16 * own + (me.lane >> 2) + 4 * (i & 2) >= t.count) y[i >> 2][i & 3] = 0.f;
        pack_operand(packed[J], y);
        if (w == 1 && me.group && J < own) store_rests(y, packed[J], t.rest(own, J), me.lane);
        if (w == 1 && me.group && J == own) store_diagonal(y, diagonals + J * (DIAGONAL / 4), me.lane);
    }
}
// All pairs of a chunk from its scaled copies to their squares, over the quotients
LA_DEVICE void make_pairs(const float (&found)[2][8][4], int far, const Chunk& t, float* diagonals, const Lane& me) {
    float x[1 + LA_EXACT][8][4];
    u32 packed[2][4][4];
    if constexpr (LA_EXACT)
        multiply_pairs(x, t.reader(me.group), t.quotient(0), t.quotient(1) - t.quotient(0), Chunk::QUOTIENT_PANEL);
#pragma unroll
    for (int w = 1; w >= 0; w--) {   // else one at a time: registers
        if constexpr (!LA_EXACT) multiply_pairs(x, t.reader(me.group), t.quotient(w), 0, Chunk::QUOTIENT_PANEL);
        if constexpr (LA_EXACT) take_exact(x[LA_EXACT * w], found[w], far, me.lane);
        pack_pairs(packed[w], x[LA_EXACT * w], w, t, diagonals, me);
    }
    __syncthreads();   // quotients have been read
#pragma unroll
    for (int w = 0; w < 2; w++) store_blocks(t.square(2 * me.group + w), packed[w], 16 * (me.warp & 3), me.lane);
}
// By one thread, as soon as they are there: q_c, k_d, b_d and D; pairs of q; A_ab and inverses of its diagonal blocks;
// Ac and N
LA_DEVICE void store_decayed(const FreeArguments& a, const Chunk& t, i64 stored) {
    char* const to = a.factors + stored * FACTORS;
    run_out(to, t.reader(0), TILE);
    run_out(to + 2 * TILE, t.writer(0), 2 * TILE);
    run_out(to + AT_CARRY, t.shared + AT_ALL, KEYS * 4);
    run_out(to + AT_DIAGONAL, t.shared + AT_QK_DIAGONAL, C * 4);
    out_commit();
}
LA_DEVICE void store_pairs(const FreeArguments& a, const Chunk& t, i64 stored) {
    run_out(a.factors + stored * FACTORS + AT_PAIRS, t.square(P_QK), 2 * Square::SIZE);
    if (LA_BACKWARD) {
        char* const to = a.extras + stored * EXTRAS;
        run_out(to, t.square(A_AB), Square::SIZE);
#pragma unroll
        for (int n = 0; n < 4; n++) run_out(to + Square::SIZE + n * 1024, t.block(n, 0), 1024);
    }
    out_commit();
}
LA_DEVICE void store_solutions(const FreeArguments& a, const Chunk& t, i64 stored) {
    char* const to = a.factors + stored * FACTORS;
    run_out(to + TILE, t.reader(1), TILE);
    run_out(to + AT_PAIRS + SOLVED * Square::SIZE, t.square(SOLVED), Square::SIZE);
    out_commit();
    out_read();
}
// Of a chunk in shared memory; stored: its number. Returns whether it is left to the exact build
LA_DEVICE bool make_factors(const FreeArguments& a, const Chunk& t, i64 stored, unsigned char* memory, int parity) {
    const Lane me(t.count);
    float* const diagonals = (float*)(memory + AT_DIAGONALS);
    int* const fars = (int*)(memory + AT_FAR);
    barrier_wait(t.shared + AT_BARRIER, parity);
    float2 decays[ROWS];
    float found[2][8][4];
    load_decays(decays, t, me);
    store_neighbours(t, a.scale, me);
    share_decays(decays, t, me);
    const Around reach = around(t, me);
    int far = C;
    if constexpr (LA_EXACT) {
        const int own = first_far(decays, reach.before, me.block);
        if (me.lane == 0) fars[me.warp] = own;
        add_levels<32>(found, t, a.scale, t.shared + AT_LEVELS, me, decays);
#pragma unroll
        for (int w = 0; w < 8; w++) far = min(far, fars[w]);
    }
    if (me.block == 0 && me.part == 0) store_pair(t.shared + AT_ALL + me.panel * 256 + me.lane * 8, reach.all);
    const float2 last = scale_rows(decays, a.scale, t, reach, me);
    publish_shared();
    if (__syncthreads_or(!LA_EXACT && fminf(last.x, last.y) < SMALLEST_OF_CHUNK)) return true;
    if (threadIdx.x == 0) store_decayed(a, t, stored);
    __syncwarp();
    make_pairs(found, far, t, diagonals, me);
    if (me.group) {
        __syncwarp();
        invert_block(t, diagonals, me.warp & 3, me.lane);
    }
    publish_shared();
    __syncthreads();
    if (threadIdx.x == 0) store_pairs(a, t, stored);
    __syncwarp();
    for (int slab = me.warp; slab < KEYS / 16 + 4; slab += 8) {
        const bool keys = slab < KEYS / 16;
        const int block = slab - KEYS / 16;
        if (keys) solve_columns<KeyTile>(t, t.reader(1), 16 * slab, 0, me.lane);
        else solve_columns<Square>(t, t.square(SOLVED), 16 * block, block, me.lane);
    }
    publish_shared();
    __syncthreads();
    if (threadIdx.x == 0) store_solutions(a, t, stored);
    return false;
}

extern "C" __global__ void __launch_bounds__(256, LA_BLOCKS) factors(const __grid_constant__ FreeArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    if (threadIdx.x == 0) {
        barrier_init(shared + AT_BARRIER, 1);
        barriers_made();
    }
#if LA_EXACT
    const ChunkTraversal traversal(a, LA_PIECES, 1);
    const int total = (traversal.sequence.T + C - 1) / C;
    int parity = 0;
    for (int first = traversal.segment; first < total; first += 32 * LA_PIECES) {   // a flag a lane
        const int own = first + (threadIdx.x & 31) * LA_PIECES;
        u32 left = __ballot_sync(0xffffffffu, own < total && a.flags[traversal.stored + own]);
        for (; left; left &= left - 1) {
            const int chunk = first + (__ffs(left) - 1) * LA_PIECES;
            __syncthreads();
            if (threadIdx.x == 0) load_chunk(a, traversal, chunk, shared);
            make_factors(a, {shared, traversal.count(chunk)}, traversal.stored + chunk, memory, parity);
            parity ^= 1;
        }
    }
#else
    const ChunkTraversal traversal(a, a.chunks, 1);
    if (traversal.steps <= 0) return;
    const i64 stored = traversal.stored + traversal.first;
    if (threadIdx.x == 0) load_chunk(a, traversal, traversal.first, shared);
    __syncthreads();
    const bool left = make_factors(a, {shared, traversal.count(traversal.first)}, stored, memory, 0);
    if (threadIdx.x == 0) a.flags[stored] = left;
#endif
}
