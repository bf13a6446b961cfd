// Vector decay: a sequence and a head, its chunks of 64 tokens, and the layouts of their tiles. Tiles are 128 columns
// wide, zeros past LA_K and LA_V; states are transposed, value row by key column.
#pragma once
#include "attention/tokens.cuh"
#include "tile/bulk.cuh"
#include "tile/low_bits.cuh"
#include "tile/wgmma.cuh"

constexpr int C = 64, WIDE = 128;
typedef Panels<WIDE, C> Tokens;      // dO, V, ... of a chunk
typedef Panels<C, C> Square;         // P, Z, ... of a chunk, and 64 channels of its tokens
typedef Panels<WIDE, WIDE> Whole;    // a state: two panels of 64 key channels
constexpr int STATE = WIDE * WIDE;   // floats of a state
static_assert(LA_K <= WIDE && LA_V <= WIDE && LA_K % 8 == 0 && LA_V % 8 == 0 && Element::BYTES == 2,
              "a tile holds whole rows");
static_assert(LA_INVERSE == Square::SIZE + 4 * C && LA_END == Whole::SIZE + !LA_ERASE * LOW_BITS_SIZE &&
                  LA_GRAM == (2 - LA_ERASE) * Square::SIZE,
              "sizes that the host allocates by");

#ifndef LA_BEFORE   // 1: queries read the state before the decay and the write of their token
#define LA_BEFORE 0
#endif
#ifndef LA_BONUS   // 1: and their token's own write, weighted by u
#define LA_BONUS 0
#endif
#ifndef LA_GATE   // of the log decays, as LA_DTYPE: 0 bfloat16, 2 float32
#define LA_GATE 0
#endif
constexpr bool BEFORE = LA_BEFORE, BONUS = LA_BONUS;
static_assert(BEFORE || !BONUS, "a bonus belongs to queries that do not read their token's write");

// A sequence and a head
struct VectorPlace {
    Sequence sequence;
    int head, row;     // batch row
    bool packed;       // other sequences follow in the same row
    i64 slot, block;   // of the sequence and head; number of its first chunk among all: head * slots + ..

    __device__ __forceinline__ VectorPlace(const i64* offsets, int T, int heads, i64 slots, int n, int of_head) {
        sequence = sequence_of(offsets, n, T);
        head = of_head;
        row = (int)sequence.row;
        packed = offsets != nullptr;
        slot = (i64)n * heads + head;
        block = head * slots + (packed ? sequence.first / C + n : (i64)n * ((T + C - 1) / C));
    }
    __device__ __forceinline__ int chunks() const { return (sequence.T + C - 1) / C; }
    __device__ __forceinline__ int token(int chunk) const { return (int)sequence.first + chunk * C; }   // in the tensor
    // rows of a tile that are the sequence's own; the copy engine writes zeros past the tensor, not of other
    // sequences
    __device__ __forceinline__ int own(int chunk) const { return packed ? min(C, sequence.T - chunk * C) : C; }
};

// panels of a chunk's rows of values, of keys
constexpr int TILE_BYTES = round_up(LA_V, 64) / 64 * Tokens::PANEL, KEY_BYTES = round_up(LA_K, 64) / 64 * Tokens::PANEL;
template <int BYTES> LA_DEVICE void panels_in(u32 to, const TensorMap& map, u32 barrier, int head, int token,
                                              int batch) {
#pragma unroll
    for (int p = 0; p < BYTES / Tokens::PANEL; p++)
        box_in(to + p * Tokens::PANEL, map, barrier, 64 * p, head, token, batch);
}
LA_DEVICE void tile_in(u32 to, const TensorMap& map, u32 barrier, int head, int token, int batch) {
    panels_in<TILE_BYTES>(to, map, barrier, head, token, batch);
}
LA_DEVICE void keys_in(u32 to, const TensorMap& map, u32 barrier, int head, int token, int batch) {
    panels_in<KEY_BYTES>(to, map, barrier, head, token, batch);
}

// rows from `own` on of the value panels of a tile become zeros
template <int THREADS> LA_DEVICE void clear_rows(u32 tile, int own, int thread) {
    for (int i = own * 8 + thread; i < C * 8; i += THREADS)
#pragma unroll
        for (int p = 0; p < TILE_BYTES / Tokens::PANEL; p++)
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(tile + p * Tokens::PANEL + i * 16), "r"(0)
                         : "memory");
}
