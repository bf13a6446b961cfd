// In place of cuda_src/elementwise/words.cuh: blocks run one after the other, so that words of earlier ones are there.
#pragma once
#include "tile/types.cuh"

constexpr u64 EMPTY = ~0ull;

LA_DEVICE u64 read_word(const u64* from) {
    if (*from == EMPTY) abort();
    return *from;
}
LA_DEVICE void store_word(u64* to, u64 x) { *to = x; }
LA_DEVICE void prefetch_line(const char*) {}
