// y = x m / (1 - p), m_n = 1 where the n-th number drawn is at least p, else 0: the numbers that NumPy's default
// generator draws in float32, so that a mask is the same everywhere.
//
//     s_{k+1} = A s_k + c (mod 2^128)      u_k = rotate(high ^ low of s_{k+1}, the 6 highest bits)      (PCG64, XSL-RR)
//     draw_{2k}, draw_{2k+1} = the highest 24 bits of the lower, the upper half of u_k, over 2^24
//
// s_{k + 2^i} is A_i s_k + c_i, with the pairs `jumps` of the host: a thread jumps to its first numbers, and on from
// there. O'Neill, PCG, 2014. LA_WIDE: x and y begin at a multiple of 16 bytes. LA_DTYPE of both.
#include "arguments/ops/DropoutArguments.cuh"
#include "ops/element.cuh"

typedef Wide<LA_DTYPE> Real;
constexpr int THREADS = 256, PER = 8, PIECES = 8;   // neighbours of a thread, how often
constexpr int FURTHER = 10;                         // 2^10 draws of 64 bits: those of a block, for a piece
static_assert(THREADS * PER / 2 == 1 << FURTHER, "draws of a piece");

struct Word {   // of 128 bits
    u64 high, low;
};
LA_DEVICE Word advanced(Word s, u64 a_high, u64 a_low, u64 c_high, u64 c_low) {
    const u64 low = s.low * a_low + c_low;
    return {__umul64hi(s.low, a_low) + s.high * a_low + s.low * a_high + c_high + (low < c_low), low};
}
LA_DEVICE u64 drawn(Word s) {
    const u64 x = s.high ^ s.low;
    const u32 by = (u32)(s.high >> 58);
    return x >> by | x << (64 - by & 63);
}
LA_DEVICE bool keeps(u32 bits, float p) { return (float)(bits >> 8) * 0x1p-24f >= p; }

extern "C" __global__ void __launch_bounds__(THREADS) dropout(const __grid_constant__ DropoutArguments a) {
    i64 n = ((i64)blockIdx.x * PIECES * THREADS + threadIdx.x) * PER;
    if (n >= a.size) return;
    Word s = {a.state_high, a.state_low};
    for (u64 k = n / 2, i = 0; k >> i; i++)
        if (k >> i & 1) {
            const auto& j = a.jumps[i];
            s = advanced(s, j.a_high, j.a_low, j.c_high, j.c_low);
        }
    const Real factor = (Real)a.factor;
    const auto &one = a.jumps[0], &all = a.jumps[FURTHER];
#pragma unroll 2
    for (int piece = 0; piece < PIECES && n < a.size; piece++, n += THREADS * PER) {
        const bool whole = LA_WIDE && n + PER <= a.size;
        Real x[PER];
        if (whole) load_elements<LA_DTYPE, PER>(x, a.x + n * bytes_of(LA_DTYPE));
        else
            for (int i = 0; i < PER; i++) x[i] = n + i < a.size ? (Real)element<LA_DTYPE>(a.x, n + i) : (Real)0;
        Word now = s;
#pragma unroll
        for (int i = 0; i < PER; i += 2) {
            now = advanced(now, one.a_high, one.a_low, one.c_high, one.c_low);
            const u64 u = drawn(now);
            x[i] *= keeps((u32)u, a.p) ? factor : (Real)0;
            x[i + 1] *= keeps((u32)(u >> 32), a.p) ? factor : (Real)0;
        }
        if (whole) store_elements<LA_DTYPE, PER>(a.y + n * bytes_of(LA_DTYPE), x);
        else
            for (int i = 0; i < PER; i++)
                if (n + i < a.size) put_element<LA_DTYPE>(a.y, n + i, x[i]);
        s = advanced(s, all.a_high, all.a_low, all.c_high, all.c_low);
    }
}
