// A decay a token and key channel and a free rank-one term: the action of a chunk of 64 tokens on the state, as factors
// in memory.
//
//     S_t = diag(e^{g_t}) S_(t-1) + b_t^T w_t + k_t^T v_t        w_t = a_t S_(t-1)        out_t = scale q_t S_t
//
// With the decays of the chunk on the rows (c: from its start, d: to its end) and W = (1 - A_ab)^-1
//
//     w = Ac S + N V     out = q_c S + P_qk V + P_qb w     S <- D S + k_d^T V + b_d^T w     Ac = W a_c     N = W A_ak
//
// A record has scale q_c, Ac, k_d, b_d (tiles of tokens by key channels), scale P_qk without its diagonal, scale P_qb,
// N, D, and that diagonal: tiles as they lie in shared memory.
#pragma once
#include "vector/traversal.cuh"
#include "attention/group.cuh"
#include "attention/store.cuh"
#include "tile/wgmma_wide.cuh"
#include "arguments/matrix_state/FreeArguments.cuh"   // after TensorMap

#ifndef LA_RAGGED   // 1: sequences are packed in a row, so that a chunk may hold rows of the next one
#define LA_RAGGED 0
#endif

#ifndef LA_KEEP   // 1: a chain stores the residuals of the gradients too
#define LA_KEEP 0
#endif
#ifndef LA_BACKWARD   // 1: for the chain from the last chunk to the first
#define LA_BACKWARD 0
#endif

constexpr int VALUES = round_up(LA_V, 64);
typedef Panels<VALUES, C> ValueTile;        // rows of tokens
typedef Panels<C, VALUES> TransposedTile;   // corrections, transposed: value rows, tokens
constexpr int KEYS = round_up(LA_K, 64), KEY_PANELS = KEYS / 64;
typedef Panels<KEYS, C> KeyTile;
typedef Panels<KEYS, VALUES> StateTile;   // a state, transposed: value rows, key columns
constexpr int TILE = KeyTile::SIZE, AT_PAIRS = 4 * TILE, AT_CARRY = AT_PAIRS + 3 * Square::SIZE,
              AT_DIAGONAL = AT_CARRY + KEYS * 4, FACTORS = AT_DIAGONAL + C * 4;
constexpr int P_QK = 0, P_QB = 1, SOLVED = 2, A_AB = 3;   // squares; SOLVED: N, in the place of A_ak
// further inputs of the backward's chain: A_ab, inverses of its diagonal blocks
constexpr int EXTRAS = LA_BACKWARD ? Square::SIZE + 8 * 512 : 0;
static_assert(LA_FACTORS == FACTORS && LA_K <= WIDE && LA_V <= WIDE, "the size that the host allocates by");

// columns of a chunk's rows, all panels
template <int PANELS> LA_DEVICE void panels_in(u32 to, const TensorMap& map, u32 barrier, int head, int token,
                                               int batch) {
#pragma unroll
    for (int p = 0; p < PANELS; p++) box_in(to + p * PANEL, map, barrier, 64 * p, head, token, batch);
}
