// The gradients of a chunk that need both states: places in shared memory, and what a block's threads have. free_grads.cu has the equations.
#pragma once
#include "vector_free/place.cuh"

#ifndef LA_EXACT
#define LA_EXACT 0
#endif
// rows q, a, k, b, in place scaled: readers times Pre, writers over it; v, dO, w, dw (the last two transposed); S before, G after; log decays;
// decays of blocks (then sums of the gradient); what crosses the chunk's end; barriers of rows and of the others
constexpr int VALUE_TILE = ValueTile::SIZE, STATE_TILE = StateTile::SIZE;
constexpr int AT_ROWS = 0, AT_V = 4 * TILE, AT_DOUT = AT_V + VALUE_TILE, AT_W = AT_DOUT + VALUE_TILE, AT_DW = AT_W + VALUE_TILE;
constexpr int AT_S = AT_DW + VALUE_TILE, AT_G = AT_S + STATE_TILE, STAGED = C * 64 * 4;
constexpr int OPERANDS = 4 * VALUE_TILE + 2 * STATE_TILE, SUMS = 4 * KEY_PANELS * STAGED, AT_GATES = AT_V + (OPERANDS > SUMS ? OPERANDS : SUMS);
constexpr int GATE_TILE = C * KEYS * GATE_BYTES, PAIR_TABLE = C * ROWS * 16;   // exact: the pairs within blocks take the log decays' place
constexpr int AT_DECAYS = AT_GATES + (LA_EXACT && GATE_TILE < PAIR_TABLE ? PAIR_TABLE : GATE_TILE);
constexpr int AT_ENDS = AT_DECAYS + 4 * WIDE * 4, AT_BARRIERS = AT_ENDS + WIDE * 4;
constexpr int AT_NEAR = AT_BARRIERS + 32, AT_LEFT = AT_NEAR + 32;   // exact: pairs of neighbours in two blocks; flags of chunks to be done, by warps
static_assert(LA_SHARED == (LA_EXACT ? AT_LEFT + 16 * 8 : AT_NEAR), "LA_SHARED is what the launch asks for");
// once products have read v .. G: the four pair matrices, <S, G> over parts of the values; then the sums of all gradients
constexpr int AT_PAIRS_OF = AT_V, AT_PRODUCTS = AT_PAIRS_OF + 4 * Square::SIZE;
constexpr int AT_STAGED = AT_V, SLICES = 8;
constexpr int THREADS = 256 * KEY_PANELS;

// This thread's part. Products: warpgroups read (role 0: dq, da) or write (1: dk, db), 64 channels each; a warp has 16 channels (rows of the
// accumulators). Scaling and gradients: two channels of a block's 16 rows, of q and k (part 0) or a and b
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
    __device__ __forceinline__ u32 reader(int n) const { return shared + AT_ROWS + n * TILE; }
    __device__ __forceinline__ u32 writer(int n) const { return shared + AT_ROWS + (2 + n) * TILE; }
    __device__ __forceinline__ u32 own() const { return panel * PANEL + block * BLOCK_BYTES; }
    // sums before their last factor: of dq, da, dk, db; pieces of 8 channels are permuted by the token's number / 2
    __device__ __forceinline__ u32 staged(int which, int of_panel, int token, int channel) const {
        return shared + AT_STAGED + (which * KEY_PANELS + of_panel) * STAGED + token * 256 + ((channel * 4) ^ (((token >> 1) & 3) << 5));
    }
};
static_assert(AT_PRODUCTS + SLICES * KEYS * 4 <= AT_GATES, "a table of <S, G> has place");

// the smallest that a chunk of this build has, of an x that is smaller
constexpr float SMALLEST_OF_CHUNK = 0x1p-90f, SMALLEST_LOG2 = -90.f;
LA_DEVICE float over_decay(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(fmaxf(x, SMALLEST_OF_CHUNK)));
    return r;
}
