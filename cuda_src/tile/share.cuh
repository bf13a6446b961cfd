// The steps of all chains, which are equally long, in a row: a block's share of them.
//
// All blocks have the same number of steps, or one more or less, so that none waits while another has a chain to go. No
// more blocks than chains: a share is at least as long as a chain, and no more than two blocks have parts of one. A
// block takes its chains from the last to the first: the chains that the next block goes on with come first, the chains
// that this one goes on with comes last. It waits for the block before alone, whose first part needs nothing, so that
// blocks that start in order never wait for one that cannot start.
#pragma once
#include "tile/types.cuh"

struct Share {
    int begin, end, length;   // steps; of a chain
    // the first `more` blocks have a step more than `steps`
    __device__ __forceinline__ Share(int steps, int more, int length) : length(length) {
        const int block = opaque(blockIdx.x);
        begin = block * steps + min(block, more);
        end = begin + steps + (block < more);
    }
    __device__ __forceinline__ int last() const { return (u32)(end - 1) / (u32)length; }
    __device__ __forceinline__ bool has(int n) const { return (n + 1) * length > begin; }   // going down from the last
    // this block's steps of chain n
    __device__ __forceinline__ int from(int n) const { return max(begin - n * length, 0); }
    __device__ __forceinline__ int to(int n) const { return min(end - n * length, length); }
};

// Handed to the next block: data, then a word that says that it is there. Memory is as it was allocated:
// the word is a number of 64 bits that no memory holds by chance, and the block that has seen it clears it, for a
// launch that gets the same memory.
constexpr u64 HANDED_OVER = 0x9e3779b97f4a7c15ull;
LA_DEVICE void announce(char* word) {   // by one thread, after a barrier behind the fences of all that have stored
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(HANDED_OVER) : "memory");
}
LA_DEVICE void await(char* word) {   // by one thread, before a barrier
    u64 x;
    do asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(word) : "memory");
    while (x != HANDED_OVER);
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(0ull) : "memory");
}
