// Between global and shared memory in pieces of 16, 8, 4 or 2 bytes.
#pragma once
#include "tile/types.cuh"

// One piece; zeros where `valid` is false. Pieces of 4 bytes and more are asynchronous.
template <int BYTES> LA_DEVICE void copy_in(u32 to, const void* from, bool valid) {
    const int n = valid ? BYTES : 0;
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(n) : "memory");
    else if constexpr (BYTES == 8)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(n) : "memory");
    else if constexpr (BYTES == 4)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(n) : "memory");
    else {
        u16 x = 0;
        if (valid) asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(x) : "l"(from));
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(x) : "memory");
    }
}
LA_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> LA_DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// One piece from shared to global memory, if `valid`; by hand, since a compiler splits a guarded 16-byte store.
template <int BYTES> LA_DEVICE void copy_out(void* to, u32 from, bool valid) {
    if constexpr (BYTES == 16) {
        u32 a, b, c, d;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(from));
        if (valid)
            asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(a), "r"(b), "r"(c), "r"(d)
                         : "memory");
    } else if constexpr (BYTES == 8) {
        u32 a, b;
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(from));
        if (valid) asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(a), "r"(b) : "memory");
    } else if constexpr (BYTES == 4) {
        u32 a;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(a) : "r"(from));
        if (valid) asm volatile("st.global.b32 [%0], %1;" ::"l"(to), "r"(a) : "memory");
    } else {
        u16 a;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(a) : "r"(from));
        if (valid) asm volatile("st.global.u16 [%0], %1;" ::"l"(to), "h"(a) : "memory");
    }
}
