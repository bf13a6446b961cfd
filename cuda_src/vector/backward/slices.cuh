// A chunk in eight slices of 8 rows, one a warp: a lane owns PER neighbouring channels of its warp's rows, so that the
// decays of its channels are products down its own registers. Only products of a = e^g are formed, never differences of
// sums: a = 0 is exact, and no product exceeds 1. Slices lie straight in memory, rows past the sequence and channels
// past LA_K are zeros (log decays too).
#pragma once
#include "vector/backward/place.cuh"
#include "attention/decay.cuh"

constexpr int SLICE = 8, SLICES = C / SLICE;

LA_DEVICE float reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
// WORDS words of 32 bits, zeros where not `valid`
template <int WORDS> LA_DEVICE void load_words(u32 (&x)[WORDS], const char* p, bool valid) {
    static_assert(WORDS == 1 || WORDS == 2 || WORDS == 4, "one load");
    if constexpr (WORDS == 1)
        asm("{ .reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.nc.b32 %0, [%1]; }"
            : "=r"(x[0])
            : "l"(p), "r"((int)valid));
    else if constexpr (WORDS == 2)
        asm("{ .reg .pred p; setp.ne.b32 p, %3, 0; mov.b32 %0, 0; mov.b32 %1, 0; @p ld.global.nc.v2.b32 {%0, %1}, [%2]; }"
            : "=r"(x[0]), "=r"(x[1])
            : "l"(p), "r"((int)valid));
    else
        asm("{ .reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
            " @p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4]; }"
            : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
            : "l"(p), "r"((int)valid));
}

// KIND as LA_DTYPE: a lane's ROWS rows of PER channels of one array as they came
template <int KIND, int PER, int ROWS = SLICE> struct Slice {
    static constexpr int WORDS = KIND == 2 ? PER : PER / 2, BYTES = KIND == 2 ? 4 : 2;
    u32 x[ROWS][WORDS];

    // rows: of the sequence and head; row r is token `first` + r of it
    __device__ __forceinline__ void load(const char* rows, i64 stride, int channel, int first, int T) {
        const char* p = rows + first * stride + channel * BYTES;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            load_words<WORDS>(x[r], p, first + r < T && channel < LA_K);
            p += stride;
        }
    }
    __device__ __forceinline__ float at(int r, int c) const {
        if constexpr (KIND == 2) return __uint_as_float(x[r][c]);
        const u32 y = x[r][c / 2];
        if constexpr (KIND == 1) return c & 1 ? high_f16(y) : low_f16(y);
        return c & 1 ? high_bf16(y) : low_bf16(y);
    }
};

// One number a channel and slice, in shared memory: [slice][channel]; a lane's PER channels begin at `channel`
template <int CHANNELS, int PER> struct SliceTable {
    static constexpr int ROW = CHANNELS * 4, BYTES = SLICES * ROW;
    u32 base;
    __device__ __forceinline__ void store(int slice, int channel, const float (&x)[PER]) const {
        const u32 to = base + slice * ROW + channel * 4;
#pragma unroll
        for (int c = 0; c < PER; c += 2) store_shared2(to + c * 4, x[c], x[c + 1]);
    }
    __device__ __forceinline__ void load(float (&x)[PER], int slice, int channel) const {
        const u32 from = base + slice * ROW + channel * 4;
#pragma unroll
        for (int c = 0; c < PER; c += 2) {
            const float2 y = load_shared2(from + c * 4);
            x[c] = y.x;
            x[c + 1] = y.y;
        }
    }
    __device__ __forceinline__ float at(int slice, int channel) const {
        return load_shared(base + slice * ROW + channel * 4);
    }
};

// byte offset of a row in a tile of 128-byte rows, for a lane's channels from `channel` on; low: the row's last three
// bits
LA_DEVICE u32 row_offset(int row, int low, int channel) {
    return channel / 64 * Tokens::PANEL + row * 128 + (((channel % 64) * 2) ^ (low << 4));
}
LA_DEVICE void store_words(u32 at, u32 x, u32 y) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(x), "r"(y) : "memory");
}
template <int PER> LA_DEVICE void store_row(u32 at, const float (&x)[PER]) {
    if constexpr (PER == 2) store_shared_u32(at, pack_bf16(x[0], x[1]));
    else store_words(at, pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
}
