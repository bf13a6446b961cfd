// The part of a call that one block traverses: chunks of a segment of one sequence and head.
#pragma once
#include "vector/decay.cuh"
#include "attention/tokens.cuh"
#include "tile/bulk.cuh"
#include "tile/low_bits.cuh"

constexpr int STATE = WIDE * WIDE,
              STATE_BYTES = STATE * 2;   // numbers of a state; bytes in bfloat16, two panels of 128 rows
constexpr int STORED_BYTES = STATE_BYTES + LOW_BITS_SIZE;   // for a backward without erase
typedef Panels<WIDE, WIDE> StatePanels;                     // S^T: value rows, key columns

// Blocks are numbered segment fastest, then head, sequence; `pieces` of `length` chunks each
struct ChunkTraversal {
    Sequence sequence;
    int head, segment, first, steps, last,
        row;            // first chunk, number of chunks; the sequence's last segment; batch row
    i64 slot, stored;   // of the sequence and head; number of its first chunk among all that are stored

    template <class Arguments> __device__ __forceinline__ ChunkTraversal(const Arguments& a, int pieces, int length,
                                                                         int block = blockIdx.x) {
        const int number = block / pieces;
        segment = block % pieces;
        head = number % a.heads;
        const int n = number / a.heads;
        sequence = sequence_of(a.offsets, n, a.T);
        row = (int)sequence.row;
        const int total = (sequence.T + C - 1) / C;
        last = max(total - 1, 0) / length;
        first = segment * length;
        steps = min(total - first, length);
        slot = (i64)n * a.heads + head;
        stored = head * a.slots + (a.offsets ? sequence.first / C + n : (i64)n * ((a.T + C - 1) / C));
    }
    // its chunks from .. to alone
    __device__ __forceinline__ void cut(int from, int to) {
        first += from;
        steps = min(steps, to) - from;
    }
    __device__ __forceinline__ int token(int chunk) const { return (int)sequence.first + chunk * C; }   // in the tensor
    __device__ __forceinline__ int count(int chunk) const { return min(C, sequence.T - chunk * C); }
};

// a chunk's rows of a tensor of 16 bits, both panels. ONCE: nothing else reads them soon
template <bool ONCE = false> LA_DEVICE void tile_in(u32 to, const TensorMap& map, u32 barrier, int head, int token,
                                                    int batch) {
#pragma unroll
    for (int p = 0; p < 2; p++) (ONCE ? box_in_once : box_in)(to + p * PANEL, map, barrier, p * 64, head, token, batch);
}
// of log decays: boxes of 128 bytes a row
template <bool ONCE = false> LA_DEVICE void gates_in(u32 to, const TensorMap& map, u32 barrier, int head, int token,
                                                     int batch) {
#pragma unroll
    for (int p = 0; p < GATES / PANEL; p++)
        (ONCE ? box_in_once : box_in)(to + p * PANEL, map, barrier, p * (128 / GATE_BYTES), head, token, batch);
}
// Rows from `count` on of a lane's two channels of a block become zeros, in `panels` of 16 bits and in the log decays
LA_DEVICE void clear_rows(u32 panels, int first, int end, int lane) {
    for (int r = first; r < end; r++) store_word(panels + lane_row(r, lane), 0);
}
