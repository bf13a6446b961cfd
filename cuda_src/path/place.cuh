// PaTH attention: what is stored of a block of 128 tokens, and of 8, 64, ... blocks as one.
//
//     H_t = I - beta_t w_t^T w_t,    R = H_last ... H_first of a block or group,    D = (I - R)^T
//     X_lj = beta_l w_l.(k_j H_(j+1) ... H_(l-1)), l > j,    U = (I + diag(beta) tril(W W^T, -1))^-1 diag(beta) W
//     K~_j = k_j H_(j+1) ... H_last of the block, or (level 1, 2, ...) of its group of 8^level blocks
//
// Groups are counted from a sequence's start. Tiles are panels as products read them, each a run of bytes.
#pragma once
#include "softmax/tiles.cuh"

#include "arguments/softmax/PathArguments.cuh"

typedef Panels<WIDTH_K, BLOCK> Rows128;        // of W, K, U, K~
typedef Panels<BLOCK, BLOCK> Pairs;            // X
typedef Panels<WIDTH_K, WIDTH_K> Maps;         // D
constexpr int RADIX = 8, RADIX_BITS = 3;       // blocks, or groups, of a group
constexpr int FACTORS = Pairs::SIZE + Rows128::SIZE;   // X and U

// Where a head's blocks of a sequence are in the arrays of factors, keys and maps
struct Stored {
    const PathArguments& a;
    int head, slot;
    __device__ __forceinline__ Stored(const PathArguments& a, const Place& place, int head)
        : a(a), head(head), slot(a.of.offsets ? (place.first / BLOCK) + place.sequence : place.sequence * a.each) {}
    __device__ __forceinline__ char* factors(int block) const { return a.factors + ((i64)head * a.slots + slot + block) * FACTORS; }
    __device__ __forceinline__ char* keys(int level, int block) const {
        return a.keys + (((i64)level * a.key_heads + head) * a.slots + slot + block) * Rows128::SIZE;
    }
    __device__ __forceinline__ char* maps(int level, int group) const {
        i64 before = 0;
        for (int l = 0; l < level; l++) before += (i64)a.key_heads * (a.slots >> RADIX_BITS * l);
        return a.maps + (before + (i64)head * (a.slots >> RADIX_BITS * level) + (slot >> RADIX_BITS * level) + group) * Maps::SIZE;
    }
};
