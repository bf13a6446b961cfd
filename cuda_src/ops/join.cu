// Dense arrays, one after the other in one: y from byte parts[n].to on is array n of parts[n].bytes bytes, zeros of
// null.
//
// A block copies up to BLOCK bytes of one array: parts[n].first is the first block of array n. 16 bytes at a time where
// both addresses are multiples of it, else LA_ITEM bytes: those of a number.
#include "arguments/ops/JoinArguments.cuh"
#include "ops/element.cuh"

constexpr int THREADS = 256, BLOCK = 16384;

template <class T> LA_DEVICE void copy(char* to, const char* from, i64 bytes, bool given) {
    for (i64 n = threadIdx.x * sizeof(T); n < bytes; n += THREADS * sizeof(T))
        *(T*)(to + n) = given ? *(const T*)(from + n) : T{};
}

extern "C" __global__ void __launch_bounds__(THREADS) join(const __grid_constant__ JoinArguments a) {
    u32 n = 0, above = a.count;   // the array of this block: first of n <= block < first of n + 1
    while (n + 1 < above) {
        const u32 middle = (n + above) / 2;
        if (a.parts[middle].first <= blockIdx.x) n = middle;
        else above = middle;
    }
    const i64 from = (i64)(blockIdx.x - a.parts[n].first) * BLOCK, bytes = min((i64)BLOCK, a.parts[n].bytes - from);
    const char* const x = a.parts[n].x + from;
    char* const y = a.y + a.parts[n].to + from;
    const bool given = a.parts[n].x != nullptr;
    i64 whole = 0;
    if (((u64)x | (u64)y) % 16 == 0) copy<Part<16>>(y, x, whole = bytes / 16 * 16, given);
    copy<Part<LA_ITEM>>(y + whole, x + whole, bytes - whole, given);
}
