// PaTH attention: the stored arrays of a block of 128 tokens, and of 8, 64, ... blocks as one.
//
//     H_t = I - beta_t w_t^T w_t,    R = H_last ... H_first of a block or group,    D = (I - R)^T
//     X_lj = beta_l w_l.(k_j H_(j+1) ... H_(l-1)), l > j,    U = (I + diag(beta) tril(W W^T, -1))^-1 diag(beta) W
//     K~_j = k_j H_(j+1) ... H_last of the block, or (level 1, 2, ...) of its group of 8^level blocks
//
// Groups are counted from a sequence's start. Tiles are panels as products read them, each a run of bytes.
#pragma once
#include "softmax/tiles.cuh"

#include "arguments/softmax/PathArguments.cuh"

typedef Panels<WIDTH_K, BLOCK> Rows128;                // of W, K, U, K~
typedef Panels<BLOCK, BLOCK> Pairs;                    // X
typedef Panels<WIDTH_K, WIDTH_K> Maps;                 // D
constexpr int RADIX = 8, RADIX_BITS = 3;               // blocks, or groups, of a group
constexpr int FACTORS = Pairs::SIZE + Rows128::SIZE;   // X and U
constexpr int PARTS =
    Pairs::SIZE + 3 * Rows128::SIZE;   // gradients of X, U, W and K from a block's own pairs, by head of queries

// The groups that a block of queries attends to: at each size those from the last of the next larger size to the block.
// The tiles of queries that attend to them, nearest first, are numbered over the blocks of a sequence.
struct EarlierGroups {
    int block, levels;
    __device__ __forceinline__ EarlierGroups(int block, int levels) : block(block), levels(levels) {}
    __device__ __forceinline__ int end(int level) const {
        return block >> RADIX_BITS * level;
    }   // of the groups' numbers
    __device__ __forceinline__ int count(int level) const {
        return level == levels - 1 ? end(level) : end(level) & RADIX - 1;
    }
    __device__ __forceinline__ int nearer(int level, int number) const {   // groups
        int n = end(level) - 1 - number;
        for (int l = 0; l < level; l++) n += count(l);
        return n;
    }
    __device__ __forceinline__ int all() const { return nearer(levels - 1, -1); }
    __device__ __forceinline__ i64 first() const {   // of the block's tiles
        i64 n = 0;
        for (int l = 0; l < levels; l++) {
            const i64 cycle = l == levels - 1 ? 0 : block >> RADIX_BITS * (l + 1),
                      rest = block - (cycle << RADIX_BITS * (l + 1));
            const i64 d = rest >> RADIX_BITS * l, part = rest - (d << RADIX_BITS * l);
            n += (cycle * (RADIX * (RADIX - 1) / 2) + d * (d - 1) / 2 << RADIX_BITS * l) + d * part;
        }
        return n;
    }
};
// The blocks of queries that attend to group `number` of a size: first .. end
struct Readers {
    int first, end;
    __device__ __forceinline__ Readers(int level, int number, int levels, int blocks)
        : first(number + 1 << RADIX_BITS * level),
          end(level == levels - 1 ? blocks : min(blocks, (number >> RADIX_BITS) + 1 << RADIX_BITS * (level + 1))) {}
};

// Where a head's blocks of a sequence are in the arrays of factors, keys and maps
struct Stored {
    const PathArguments& a;
    int head, slot;
    __device__ __forceinline__ Stored(const PathArguments& a, const Place& place, int head)
        : a(a), head(head), slot(a.of.offsets ? (place.first / BLOCK) + place.sequence : place.sequence * a.each) {}
    __device__ __forceinline__ char* factors(int block) const {
        return a.factors + ((i64)head * a.slots + slot + block) * FACTORS;
    }
    __device__ __forceinline__ char* keys(int level, int block) const {
        return a.keys + (((i64)level * a.key_heads + head) * a.slots + slot + block) * Rows128::SIZE;
    }
    __device__ __forceinline__ char* map_of(char* to, int level, int group) const {
        i64 before = 0;
        for (int l = 0; l < level; l++) before += (i64)a.key_heads * (a.slots >> RADIX_BITS * l);
        return to + (before + (i64)head * (a.slots >> RADIX_BITS * level) + (slot >> RADIX_BITS * level) + group) *
                        Maps::SIZE;
    }
    __device__ __forceinline__ char* maps(int level, int group) const { return map_of(a.maps, level, group); }
    // of the head of queries `head`: a tile of mapped or dmapped; of the gradients of keys; of a block's factors
    __device__ __forceinline__ i64 tile(const Place& place, int head, i64 n) const {
        const i64 first = a.bases ? a.bases[place.sequence] : place.sequence * EarlierGroups(a.each, a.levels).first();
        return ((i64)head * a.tiles + first + n) * Rows128::SIZE;
    }
    __device__ __forceinline__ char* dkeys(int level, int head, int heads, int block) const {
        return a.dkeys + (((i64)level * heads + head) * a.slots + slot + block) * Rows128::SIZE;
    }
    __device__ __forceinline__ char* parts(int head, int block) const {
        return a.parts + ((i64)head * a.slots + slot + block) * PARTS;
    }
};
// The strength of a token of a block
LA_DEVICE float strength(const PathArguments& a, const Place& place, int token) {
    const float x = a.beta[((i64)place.batch * a.of.T + place.first + token) * a.key_heads + place.head];
    return fabsf(x) < a.least ? a.least : x;
}
