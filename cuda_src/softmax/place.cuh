// The work of a block of the softmax kernels: 128 rows of a head, of queries or of keys; which pairs are read; decays
// of pairs.
#pragma once
#include "arguments/ops/Rows.cuh"
#include "softmax/decays.cuh"
#include "tile/bulk.cuh"
#include "tile/wgmma_rows.cuh"

#include "arguments/softmax/AttentionArguments.cuh"

constexpr int BLOCK = 128, GROUPS = 2, CONSUMERS = 128 * GROUPS,
              THREADS = CONSUMERS + 128;   // rows; warpgroups, 64 rows each; the last one produces
constexpr int WIDTH_K = (LA_K + 63) / 64 * 64, WIDTH_V = (LA_V + 63) / 64 * 64;
constexpr bool GATED = LA_GATED;
#ifndef LA_POLYNOMIAL   // 1: weights are a polynomial of the logits in place of their exponentials
#define LA_POLYNOMIAL 0
#endif
constexpr bool POLYNOMIAL = LA_POLYNOMIAL;
static_assert(!(GATED && POLYNOMIAL), "a decay is added to the logits of exponentials");
constexpr int TILE_DQ =
    64 * (WIDTH_K + GATED);   // numbers of 64 queries: of dq as dq.cu says; with decays then sums of dz over keys
LA_DEVICE u32 pack_pair(float lo, float hi) { return LA_DTYPE == 1 ? pack_f16(lo, hi) : pack_bf16(lo, hi); }
LA_DEVICE float low_half(u32 x) { return LA_DTYPE == 1 ? low_f16(x) : low_bf16(x); }
LA_DEVICE float high_half(u32 x) { return LA_DTYPE == 1 ? high_f16(x) : high_bf16(x); }

struct Reach {
    int low, high;
};   // the keys that a query reads

// Blocks are numbered by sections of `section` heads (whose rows the L2 cache holds), then by tile, then by head.
struct Place {
    int head, tile, batch, sequence, first, T, Tk;   // first: token of the batch row; T queries and Tk keys
    i64 row;                                         // of the sequence in arrays (batch, heads, tokens), head 0

    // heads: of the blocks
    __device__ __forceinline__ Place(const AttentionArguments& a, int heads) {
        const u32 pairs = (u32)a.sequences * heads, each = (u32)a.section * a.blocks, n = blockIdx.x / each,
                  rest = blockIdx.x - n * each;
        const u32 wide = min((u32)a.section, pairs - n * a.section), pair = n * a.section + rest % wide;
        tile = rest / wide;
        sequence = pair / heads;
        head = pair - sequence * heads;
        const i64 from = a.offsets ? a.offsets[sequence] : 0;
        batch = a.offsets ? 0 : sequence;
        first = (int)from;
        T = a.offsets ? (int)(a.offsets[sequence + 1] - from) : a.T;
        Tk = a.offsets ? T : a.Tk;
        row = (i64)batch * a.heads * a.T + from;
    }
    __device__ __forceinline__ i64 numbers(const AttentionArguments& a, int head) const {
        return row + (i64)head * a.T;
    }   // of a head
    // the first tile of 64 queries of a head among those of all heads and sequences
    __device__ __forceinline__ int tiles(const AttentionArguments& a, int head) const {
        return (head * a.slots + (a.offsets ? first / BLOCK + sequence : sequence * a.blocks)) * 2;
    }
    // the block among those of all heads and sequences
    __device__ __forceinline__ int slot(const AttentionArguments& a, int head) const {
        return tiles(a, head) / 2 + tile;
    }
    __device__ __forceinline__ Reach reach(const AttentionArguments& a, int i) const {
        if (!a.causal) return {0, Tk - 1};
        return {i + a.offset - a.window + 1, min(i + a.offset, Tk - 1)};
    }
    // the last block of keys that queries up to i read
    __device__ __forceinline__ int last_block(const AttentionArguments& a, int i) const {
        return (a.causal ? min(i + a.offset, Tk - 1) : Tk - 1) / BLOCK;
    }
    // the first query that reads key j, and the end of those that do
    __device__ __forceinline__ int reader(const AttentionArguments& a, int j) const {
        return a.causal ? max(j - a.offset, 0) : 0;
    }
    __device__ __forceinline__ int readers_end(const AttentionArguments& a, int j) const {
        return a.causal ? min((i64)T, (i64)j - a.offset + a.window) : T;
    }
};
LA_DEVICE char* rows_of(const Rows& x, const Place& place, int head) {
    return x.data + place.batch * x.batch + place.first * x.token + (i64)((u32)head / (u32)x.group) * x.head;
}

// The entries of a consumer's thread: rows `row` and row + 8 of the block, columns 8 n + column and one more of every
// tile n.
struct Lane {
    int group, warp, lane, row, column;
    __device__ __forceinline__ Lane(int thread) : group(thread >> 7), warp(thread >> 5 & 3), lane(thread & 31) {
        row = group * 64 + warp * 16 + (lane >> 2);
        column = (lane & 3) * 2;
    }
    __device__ __forceinline__ int first() const { return group * 64 + warp * 16; }   // of the warp's sixteen rows
};
