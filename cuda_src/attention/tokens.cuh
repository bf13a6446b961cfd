// Addresses of the tokens of a sequence and a head. Strides are in bytes; a ragged batch is one row cut at `offsets`.
#pragma once
#include "arguments/ops/Rows.cuh"
#include "attention/config.cuh"
#include "tile/copy.cuh"

struct Sequence {
    i64 row, first;   // batch row, first token in it
    i64 index;        // number of the first token over the whole batch
    int T;            // tokens
};

LA_DEVICE Sequence sequence_of(const i64* offsets, int n, int T) {
    if (offsets == nullptr) return {n, 0, (i64)n * T, T};
    const i64 first = offsets[n];
    return {0, first, first, (int)(offsets[n + 1] - first)};
}

LA_DEVICE char* own_rows(const Rows& x, const Sequence& s, int head) {   // of an array with all heads
    return x.data + s.row * x.batch + s.first * x.token + head * x.head;
}
LA_DEVICE char* rows_of(const Rows& x, const Sequence& s, u32 head) { return own_rows(x, s, head / (u32)x.group); }

// C rows of one chunk into a tile: row r is token `token` + r * (REVERSE ? -1 : 1). Zeros outside 0 <= token < T and
// past WIDTH columns, counted from `column`. ROLL: turns of the loop laid out one after the other.
template <class X, int C, int THREADS, int WIDTH, int ROLL = 1024>
LA_DEVICE void load_rows(u32 base, const char* rows, i64 stride, int token, int T, int column, u32 thread) {
    constexpr u32 PER_ROW = X::ROW / LA_ALIGN, PER_PIECE = 16 / LA_ALIGN, PIECES = C * PER_ROW;
    constexpr int STEP = LA_REVERSE ? -1 : 1;
    constexpr bool EVEN = THREADS % PER_ROW == 0;   // a thread stays in its column
    const u32 r0 = thread / PER_ROW, c0 = thread % PER_ROW;
    int t = token + (int)r0 * STEP;
    const char* from = rows + t * stride + (column * X::BYTES + (int)c0 * LA_ALIGN);
#pragma unroll ROLL
    for (u32 n = 0; n < (PIECES + THREADS - 1) / THREADS; n++) {
        const u32 i = n * THREADS + thread;
        const u32 r = EVEN ? r0 + n * (THREADS / PER_ROW) : i / PER_ROW, c = EVEN ? c0 : i % PER_ROW;
        if (!EVEN) {
            t = token + (int)r * STEP;
            from = rows + t * stride + (column * X::BYTES + (int)c * LA_ALIGN);
        }
        const bool valid =
            (u32)t < (u32)T && (WIDTH % X::COLUMNS == 0 || column * X::BYTES + (int)c * LA_ALIGN < WIDTH * X::BYTES);
        if (PIECES % THREADS == 0 || i < PIECES)
            copy_in<LA_ALIGN>(base + X::piece(r, c / PER_PIECE) + (c % PER_PIECE) * LA_ALIGN, from, valid);
        if (EVEN) {
            t += STEP * (int)(THREADS / PER_ROW);
            from += STEP * (int)(THREADS / PER_ROW) * stride;
        }
    }
}
