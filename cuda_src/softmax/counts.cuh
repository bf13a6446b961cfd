// Counts in global memory by which blocks of a kernel wait for others.
#pragma once
#include "tile/types.cuh"

LA_DEVICE int read_count(const int* count) {
    int x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(count) : "memory");
    return x;
}
LA_DEVICE void store_count(int* count, int n) {
    asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(count), "r"(n) : "memory");
}
