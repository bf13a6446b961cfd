// The gradients of a chunk that need both states: places in shared memory, and values of a block's threads.
// free_grads.cu has the equations.
#pragma once
#include "free/place.cuh"

#ifndef LA_EXACT
#define LA_EXACT 0
#endif
// rows a, q, k, b, in place scaled: readers times Pre, writers over it; v, dO, w, dw (the last two transposed); S
// before, G after; log decays; decays of blocks (then sums of the gradient); terms that cross the chunk's end; barriers
// of rows and of the others
constexpr int VALUE_TILE = ValueTile::SIZE, STATE_TILE = StateTile::SIZE;
constexpr int AT_ROWS = 0, AT_V = 4 * TILE, AT_DOUT = AT_V + VALUE_TILE, AT_W = AT_DOUT + VALUE_TILE,
              AT_DW = AT_W + VALUE_TILE;
constexpr int AT_S = AT_DW + VALUE_TILE, AT_G = AT_S + STATE_TILE, STAGED = C * 64 * 4;
constexpr int OPERANDS = 4 * VALUE_TILE + 2 * STATE_TILE, SUMS = 4 * KEY_PANELS * STAGED,
              OPERANDS_OR_SUMS = larger(OPERANDS, SUMS);
// once products have read v .. G: the four pair matrices, rounding errors of the copies of q, k and b, and of Zk,
// Zb; then the sums of all gradients. Rests of Zk, Zb are stored before, if nothing else lies there by then: past the
// operands, or where log decays of 16 bits leave a place
constexpr int AT_PAIRS_OF = AT_V, AT_RESTS = AT_PAIRS_OF + 4 * Square::SIZE - TILE, RESTS_END = AT_RESTS + 4 * TILE;
constexpr bool PAST_OPERANDS = RESTS_END >= AT_V + OPERANDS, RESTS_APART = PAST_OPERANDS || LA_GATE == 0;
constexpr int AT_PAIR_RESTS = PAST_OPERANDS || LA_GATE != 0 ? RESTS_END : AT_V + OPERANDS_OR_SUMS,
              PAIR_RESTS_END = AT_PAIR_RESTS + 2 * Square::SIZE;
constexpr int AT_GATES = LA_EXACT ? AT_V + OPERANDS_OR_SUMS : larger(AT_V + OPERANDS_OR_SUMS, PAIR_RESTS_END);
constexpr int GATE_TILE = C * KEYS * GATE_BYTES,
              PAIR_TABLE = C * ROWS * 16;   // exact: the pairs within blocks take the log decays' place
// decays of blocks: above the diagonal of the rounding error of Zb, if nothing else ever lies there
constexpr bool DECAYS_WITHIN = !LA_EXACT && RESTS_APART && AT_PAIR_RESTS + Square::SIZE >= AT_V + OPERANDS_OR_SUMS;
constexpr int AFTER_GATES = AT_GATES + (LA_EXACT ? larger(GATE_TILE, PAIR_TABLE) : GATE_TILE);
constexpr int AT_DECAYS = DECAYS_WITHIN ? AT_PAIR_RESTS + Square::SIZE : AFTER_GATES;
constexpr int AT_ENDS = AFTER_GATES + (DECAYS_WITHIN ? 0 : 4 * WIDE * 4), AT_BARRIERS = AT_ENDS + WIDE * 4;
constexpr int AT_NEAR = AT_BARRIERS + 32,
              AT_LEFT =
                  AT_NEAR + 32;   // exact: pairs of neighbours in two blocks; flags of chunks to be done, by warps
static_assert(LA_SHARED == (LA_EXACT ? AT_LEFT + 16 * 8 : AT_NEAR), "LA_SHARED is the size that the launch requests");
static_assert(AT_ROWS == 0,
              "rests lie as the copies do, AT_RESTS behind them; of a, which has none, over the pair matrices");
constexpr int AT_STAGED = AT_V, THREADS = 256 * KEY_PANELS;

// This thread's part. Products: warpgroups read (role 0: dq, da) or write (1: dk, db), 64 channels each; a warp has 16
// channels (rows of the accumulators). Scaling and gradients: two channels of a block's 16 rows, of q and k (part 0) or
// a and b
struct Lane {
    u32 shared;
    int warp, lane, role, side, quarter, block, panel, part;
    __device__ __forceinline__ Lane(u32 at) : shared(at) {
        warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
        lane = threadIdx.x & 31;
        side = KEY_PANELS == 2 ? (warp >> 2) & 1 : 0;   // which 64 channels
        role = warp >> (KEY_PANELS == 2 ? 3 : 2);
        quarter = warp & 3;
        part = warp & 1;
        panel = KEY_PANELS == 2 ? (warp >> 1) & 1 : 0;
        block = warp >> (KEY_PANELS == 2 ? 2 : 1);
    }
    __device__ __forceinline__ int group() const { return warp >> 2; }
    // tiles of part 0 and 1: readers, writers
    __device__ __forceinline__ u32 reader(int n) const { return shared + AT_ROWS + (1 - n) * TILE; }
    __device__ __forceinline__ u32 writer(int n) const { return shared + AT_ROWS + (2 + n) * TILE; }
    __device__ __forceinline__ u32 own() const { return panel * PANEL + block * BLOCK_BYTES; }
    // sums before their last factor: of dq, da, dk, db; pieces of 8 channels are permuted by the token's number / 2
    __device__ __forceinline__ u32 staged(int which, int of_panel, int token, int channel) const {
        return shared + AT_STAGED + (which * KEY_PANELS + of_panel) * STAGED + token * 256 +
               ((channel * 4) ^ (((token >> 1) & 3) << 5));
    }
};

constexpr float SMALLEST_LOG2 = -90.f;   // of the decay of a chunk that quotients can bear
// of row r of a lane's, 1 of rows past the sequence
LA_DEVICE float2 decay_at(u32 gates, int r, const Lane& me, int count) {
    return !LA_RAGGED || me.block * ROWS + r < count ? decay_of(load_gate(gates, r, me.lane)) : float2{1.f, 1.f};
}
// A float32 is the number that its bits, with the last 16 as one that may be negative, make of its rounding to
// bfloat16. A copy keeps the upper 8 of these, its tail: bytes 0, 1 of two readers, 2, 3 of two writers
LA_DEVICE u32 permute_bytes(u32 x, u32 y, u32 order) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(order));
    return r;
}
LA_DEVICE u32 tails_of(float2 x, float2 y) {
    return permute_bytes(permute_bytes(__float_as_uint(x.x), __float_as_uint(x.y), 0x51),
                         permute_bytes(__float_as_uint(y.x), __float_as_uint(y.y), 0x51), 0x5410);
}
// both terms of copies whose tails are bytes N, N + 1. By other instructions than rest_of(): shared values would lie
// in registers over all products
template <int N> LA_DEVICE float2 both_terms(u32 copies, u32 tails) {
    const int x = (int)(tails << (24 - 8 * N)) >> 24, y = (int)(tails << (16 - 8 * N)) >> 24;
    return {__uint_as_float((copies << 16) + (x << 8)), __uint_as_float((copies & 0xffff0000) + (y << 8))};
}
// the second term
template <int N> LA_DEVICE u32 rest_of(u32 copies, u32 tails) {
    const u32 x = copies << 16, y = copies & 0xffff0000;
    return pack({__uint_as_float(x + permute_bytes(tails, 0, N ? 0xaa24 : 0x8804)) - __uint_as_float(x),
                 __uint_as_float(y + permute_bytes(tails, 0, N ? 0xbb34 : 0x9914)) - __uint_as_float(y)});
}
