// The part of a pass over the tokens that one block traverses: a segment of a sequence and a head.
#pragma once
#include "arguments/matrix_state/Gate.cuh"
#include "attention/state.cuh"
#include "attention/tokens.cuh"

// Blocks are numbered part fastest, then head, segment, sequence. DOWN: a segment is traversed from its last chunk.
template <int C, int PARTS, bool DOWN> struct Traversal {
    static constexpr bool FROM_END = DOWN;
    Sequence sequence;
    int part, head, segment, first, steps, last;   // first chunk and number of chunks; the sequence's last segment
    i64 slot;                                      // of the sequence and head

    __device__ __forceinline__ Traversal(const i64* offsets, int T, int heads, int segments, int chunks) {
        int block = blockIdx.x;
        part = block % PARTS;
        block /= PARTS;
        head = block % heads;
        block /= heads;
        segment = block % segments;
        const int n = block / segments;
        sequence = sequence_of(offsets, n, T);
        const int total = (sequence.T + C - 1) / C;
        first = segment * chunks;
        steps = min(total - first, chunks);
        last = max(total - 1, 0) / chunks;
        slot = (i64)n * heads + head;
    }
    __device__ __forceinline__ int chunk_of(int step) const { return DOWN ? first + steps - 1 - step : first + step; }
    __device__ __forceinline__ int token_of(int step) const {
        return chunk_of(step) * C + (LA_REVERSE ? C - 1 : 0);
    }   // of row 0
    __device__ __forceinline__ bool is_end() const {
        return segment == (LA_REVERSE ? 0 : last);
    }   // time's last segment
    __device__ __forceinline__ const float* gates(const Gate& g) const {
        return LA_DECAY ? g.data + sequence.row * g.batch + sequence.first * g.token + (u32)head / (u32)g.group * g.head
                        : nullptr;
    }
};

// The state that a traversal begins with, of its sequence or (start_group 0) its segment; and what the last one of a
// sequence ends with
template <class Arguments> LA_DEVICE i64 start_slot(const Arguments& a, i64 slot, int segment) {
    return a.start_group ? slot / a.start_group : slot * a.segments + segment;
}
template <int ROWS, int WIDTH, class X, class Arguments, class W> LA_DEVICE void load_start(X& state,
                                                                                            const Arguments& a,
                                                                                            const W& traversal, int row,
                                                                                            int lane) {
    if (a.start.data)
        state.template load<ROWS, WIDTH>(a.start, start_slot(a, traversal.slot, traversal.segment), row, lane);
    else state.clear();
}
template <int ROWS, int WIDTH, class X, class Arguments, class W> LA_DEVICE void store_end(X& state, const Arguments& a,
                                                                                           const W& traversal,
                                                                                           bool is_end, int row,
                                                                                           int lane) {
    if (a.end.data && is_end && traversal.head % a.end_group == 0)
        state.template store<ROWS, WIDTH>(a.end, traversal.slot / a.end_group, row, lane);
}

// Addresses of rows, in shared memory: a loop that needs all its registers loads them there, once a chunk.
struct RowsAddress {
    char* rows;
    i64 stride;
};
LA_DEVICE void store_address(u32 at, const char* rows, i64 stride) {
    asm volatile("st.shared.v2.b64 [%0], {%1, %2};" ::"r"(at), "l"(rows), "l"(stride) : "memory");
}
LA_DEVICE RowsAddress load_address(u32 at) {
    RowsAddress k;
    asm volatile("ld.shared.v2.b64 {%0, %1}, [%2];" : "=l"(k.rows), "=l"(k.stride) : "r"(at));
    return k;
}

// a number a token of a chunk, row by row as load_rows; and its log decays
template <int C, int THREADS> LA_DEVICE void load_numbers(u32 to, const float* g, i64 stride, int token, int T,
                                                          int thread) {
#pragma unroll
    for (int r0 = 0; r0 < C; r0 += THREADS) {
        const int r = r0 + thread, t = token + (LA_REVERSE ? -r : r);
        const bool valid = (u32)t < (u32)T;
        if (r < C) copy_in<4>(to + r * 4, g + t * stride, valid);
    }
}
template <int C, int THREADS> LA_DEVICE void load_gates(u32 to, const float* g, i64 stride, int token, int T,
                                                        int thread) {
    if (LA_DECAY) load_numbers<C, THREADS>(to, g, stride, token, T, thread);
}

// One number a token, summed over the warps that left theirs at `from` (WARPS, C), into row `to` of (.., tokens)
template <int C, int THREADS, int WARPS> LA_DEVICE void store_dots(float* to, u32 from, int token, int T, int thread) {
#pragma unroll
    for (int r0 = 0; r0 < C; r0 += THREADS) {
        const int r = r0 + thread, t = token + (LA_REVERSE ? -r : r);
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += load_shared(from + (w * C + min(r, C - 1)) * 4);
        if (r < C && (u32)t < (u32)T) to[t] = sum;
    }
}
