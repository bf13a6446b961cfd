// Words in global memory by which blocks of one launch hand numbers on: a word is there once it is not EMPTY.
#pragma once
#include "tile/types.cuh"

constexpr u64 EMPTY = ~0ull;   // of no number that `publish` stores

LA_DEVICE u64 read_word(const u64* from) {
    u64 x;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(from) : "memory");
    return x;
}
LA_DEVICE void store_word(u64* to, u64 x) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
}
// fetch the 128 bytes around an address into the second cache
LA_DEVICE void prefetch_line(const char* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
