// Rows of a chunk and states, in and out, that the chains of a vector decay share.
#pragma once
#include "attention/group.cuh"
#include "attention/store.cuh"
#include "tile/wgmma_wide.cuh"
#include "vector/gram.cuh"
#include "vector/traversal.cuh"
#include "arguments/matrix_state/VectorArguments.cuh"   // after TensorMap

#ifndef LA_RAGGED   // 1: sequences are packed in a row, so that a chunk may hold rows of the next one
#define LA_RAGGED 0
#endif

// Rows of the next sequence become zeros: in a lane's channels of q, k, v (if it is there) and g of its block
LA_DEVICE void clear_tail(const Tiles& t, u32 values, int count, int warp, int lane) {
    const int block = warp >> 1, panel = warp & 1;
    const u32 own = panel * PANEL + block * BLOCK_BYTES;
    for (int r = max(count - block * ROWS, 0); r < ROWS; r++) {
        const u32 at = own + lane_row(r, lane);
        store_word(t.q + at, 0);
        store_word(t.k + at, 0);
        if (values) store_word(values + at, 0);
        if (LA_GATE == 2)
            store_pair(gates_of(t.gates, block, panel, lane) + r * 128 + (((lane & 15) * 8) ^ ((r & 7) << 4)),
                       {0.f, 0.f});
        else store_word(t.gates + at, 0);
    }
}

LA_DEVICE void load_state(StateRows<1, WIDE>& S, const VectorArguments& a, const ChunkTraversal& traversal, int row,
                          int lane) {
    if (traversal.segment)
        S.template load<WIDE, WIDE>({a.begins, STATE, WIDE, 1}, traversal.slot * a.segments + traversal.segment, row,
                                    lane);
    else if (a.start.data) S.template load<LA_V, LA_K>(a.start, traversal.slot / a.start_group, row, lane);
    else S.clear();
}
// straight from registers, once a segment
LA_DEVICE void store_first_state(const float (&S)[16][4], char* to, int row, int lane) {
#pragma unroll
    for (int i = 0; i < 16; i++)
#pragma unroll
        for (int m = 0; m < 2; m++)
            *(u32*)(to + StatePanels::at(row + (lane >> 2) + 8 * m, 8 * i + (lane & 3) * 2)) =
                pack_bf16(S[i][2 * m], S[i][2 * m + 1]);
    store_low_bits(to + STATE_BYTES, S, round_up(LA_K, 64) / 64, row / 16, lane);
}
// outputs of the sequence's last tokens
LA_DEVICE void store_part(const VectorArguments& a, const ChunkTraversal& traversal, u32 values, int chunk, int group,
                          int thread) {
    store_group_rows<Tokens, C, LA_V>(own_rows(a.to, traversal.sequence, traversal.head), a.to.token, values, chunk * C,
                                      traversal.sequence.T, group * 64, 0, thread);
}

// the decay of the chunk, 128 floats, on the state's key columns
LA_DEVICE void scale_state(float (&S)[16][4], u32 decay, int lane) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float2 d = load_shared2(decay + i * 32 + (lane & 3) * 8);
        S[i][0] *= d.x;
        S[i][1] *= d.y;
        S[i][2] *= d.x;
        S[i][3] *= d.y;
    }
}
LA_DEVICE void store_outputs(const float (&out)[8][4], float scale, u32 values, int warp, int lane) {
    float x[1][8][4];
#pragma unroll
    for (int i = 0; i < 32; i++) x[0][i >> 2][i & 3] = scale * out[i >> 2][i & 3];
    stage_rows<Bfloat16, Tokens, 1, C>(x, values, 16 * warp, lane);
}
