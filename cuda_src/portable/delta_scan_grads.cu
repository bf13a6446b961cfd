// The gradients of the delta rule that need both states, portable, a block a chunk: from S before it and dS after it,
// which the two chains left in memory (chunk_state.cuh), its new values, U, and dW.
//
//     Z = scale E . lower of dO U^T,        Y = -E' . strict lower of dW U^T
//     dq = scale e dO S + Z K,              dr = -e' dW S + Y K
//     dk = d U dS + Z^T Q + Y^T R,           dbeta_i = (dW U^T)_ii / beta_i^2
//
// R are the erase vectors and e', E' the decays up to the state that they read; where they are the keys, dr is added to
// dk. Token i's log decay multiplies the terms from tokens before it to reads at it or after it, so that, within the
// chunk,
//
//     dg_i = sum over l >= i of (q.dq + r.dr - k.(Z^T Q + Y^T R))_l + e_last <S, dS> + sum over j < i of (k.(d U dS))_j
//
// In float16 dW and U come over beta, which the sums of products are multiplied by. Warps are ROWS x GROUPS: 16 tokens
// by a group's columns of a piece of the keys.
#include "attention/chunk_state.cuh"
#include "attention/delta_scan_grads.cuh"

constexpr int PIECE = LA_PIECE, PIECES = (KP + PIECE - 1) / PIECE, WIDTH = PIECE / GROUPS, TILES = WIDTH / 8;
typedef StateColumns<VP, KP, PIECE> Columns;
typedef Tile<PIECE, Element::BYTES> Keys;
constexpr int SHARE = (Columns::SIZE / 16 + THREADS - 1) / THREADS;   // pieces of 16 bytes of a thread's
constexpr int AT_S = 0, AT_K = AT_S + Columns::SIZE, AT_Q = AT_K + C * Keys::ROW, AT_R = AT_Q + C * Keys::ROW;
constexpr int AT_PIECE = AT_SMALL_END, AT_OUT = AT_PIECE + AT_R + LA_SEPARATE_ERASE_KEY * C * Keys::ROW;
constexpr int OWN = Element::BYTES == 2 ? 16 * WIDTH * 2 : 0;   // bytes of a warp's tile of outputs
static_assert(LA_SHARED == AT_OUT + WARPS * OWN, "LA_SHARED is the size that the launch requests");
static_assert(WIDTH % 16 == 0, "two tiles at a time");

typedef float Sums[TILES][4];
LA_DEVICE void clear(Sums& x) {
#pragma unroll
    for (int i = 0; i < TILES * 4; i++) x[i >> 2][i & 3] = 0.f;
}
LA_DEVICE void scale_rows(Sums& x, float a, float b) {
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        x[i][0] *= a;
        x[i][1] *= a;
        x[i][2] *= b;
        x[i][3] *= b;
    }
}
// c += a B: 16 columns of the contraction, from row `row` of a tile of keys
LA_DEVICE void multiply_keys(Sums& c, const Element::A& a, u32 keys, int row, int column, int lane) {
#pragma unroll
    for (int t = 0; t < WIDTH; t += 16) {
        Element::B b[2];
        load_b_columns<Element, Keys>(b, keys, row, column + t, lane);
        Element::multiply(c[t / 8], a, b[0]);
        Element::multiply(c[t / 8 + 1], a, b[1]);
    }
}
// rows of accumulators times the same rows of a tile
LA_DEVICE void row_dots(const Sums& x, u32 keys, int row, int column, int lane, float sign, float (&sums)[2]) {
#pragma unroll
    for (int t = 0; t < WIDTH; t += 16) {
        const auto raw = load_a_rows<Element, Keys>(keys, row, column + t, lane);
#pragma unroll
        for (int i = 0; i < 8; i++) sums[(i >> 1) & 1] += sign * x[t / 8 + (i >> 2)][i & 3] * Element::value(raw, i);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS) grads(const __grid_constant__ DeltaGradArguments a) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const int thread = threadIdx.x, lane = thread & 31, warp = __shfl_sync(0xffffffffu, thread >> 5, 0),
              group = warp / ROWS;
    const Traversal<C, 1, false> traversal(a.offsets, a.T, a.heads, a.segments, 1);   // each chunk a segment
    if (traversal.steps <= 0) return;
    const Sequence& sequence = traversal.sequence;
    const int T = sequence.T, token = traversal.first * C;
    const i64 chunk = chunk_number<C>(a, sequence, traversal.slot, traversal.head, traversal.first);
    const char *states = a.states + chunk * ChunkState<VP, KP>::SIZE, *ends = a.ends + chunk * ChunkState<VP, KP>::SIZE;
    load_writes(a, traversal, shared, token, thread);
    copy_commit();
    auto load = [&](int piece) {   // S, keys and queries; dS takes the place of S
        const u32 at = shared + AT_PIECE;
        Columns::load<THREADS>(at + AT_S, states, piece, thread);
        load_rows<Keys, C, THREADS, K>(at + AT_K, rows_of(a.k, sequence, traversal.head), a.k.token, token, T,
                                       piece * PIECE, thread);
        load_rows<Keys, C, THREADS, K>(at + AT_Q, rows_of(a.q, sequence, traversal.head), a.q.token, token, T,
                                       piece * PIECE, thread);
        if constexpr (LA_SEPARATE_ERASE_KEY)
            load_rows<Keys, C, THREADS, K>(at + AT_R, rows_of(a.r, sequence, traversal.head), a.r.token, token, T,
                                           piece * PIECE, thread);
        copy_commit();
    };
    load(0);
    const Decay<C> decay = {shared + AT_DECAY};
    copy_wait<1>();
    __syncthreads();
    if (warp == 0) decay.set(shared + AT_GATES, 1.f, 1.f, 0.f, lane);
    __syncthreads();
    store_products(a, traversal, shared, decay, token, warp, lane);

    const int row = warp % ROWS * 16, i0 = row + (lane >> 2), column = group * WIDTH;
    const u32 betas = shared + AT_BETAS, own = shared + AT_OUT + warp * OWN;
    const bool small = LA_DTYPE == 1;   // dW and U are over beta
    const float b0 = small ? load_shared(betas + i0 * 4) : 1.f, b1 = small ? load_shared(betas + (i0 + 8) * 4) : 1.f;
    Dots dots = {};   // parts of db, and of <S, dS>
    const u32 at = shared + AT_PIECE, keys = at + AT_K, queries = at + AT_Q,
              reading = LA_SEPARATE_ERASE_KEY ? at + AT_R : keys;
    for (int piece = 0; piece < PIECES; piece++) {
        const int first = piece * PIECE + column;   // key column of the warp's first
        copy_wait<0>();
        __syncthreads();   // Z and Y are whole too
        Sums x, y, z;
        clear(x);
        clear(y);
#pragma unroll 4
        for (int v = 0; v < VP; v += 16) {   // dO S, dW S
            const auto o = Element::operand(load_a_rows<Element, Values>(shared + AT_DOUT, row, v, lane)),
                       w = Element::operand(load_a_rows<Element, Values>(shared + AT_DV, row, v, lane));
#pragma unroll
            for (int t = 0; t < WIDTH; t += 16) {
                Element::B b[2];
                Columns::operands<Element>(b, at + AT_S, v, column + t, lane);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    Element::multiply(x[t / 8 + h], o, b[h]);
                    Element::multiply(y[t / 8 + h], w, b[h]);
                }
            }
        }
        __syncthreads();   // S has been read
        Columns::load<THREADS>(at + AT_S, ends, piece, thread);
        copy_commit();
        {
            const float e0 = decay.start(i0), e1 = decay.start(i0 + 8);
            scale_rows(x, a.scale * e0, a.scale * e1);
            scale_rows(y, -b0 * (LA_BEFORE ? i0 ? decay.start(i0 - 1) : 1.f : e0),
                       -b1 * (LA_BEFORE ? decay.start(i0 + 7) : e1));
        }
#pragma unroll 1                                // more would spill, here and above
        for (int j = 0; j * 16 <= row; j++) {   // + Z K, + Y K
            const auto o = Element::operand(load_a_rows<Element, Gram>(shared + AT_Z, row, 16 * j, lane)),
                       w = Element::operand(load_a_rows<Element, Gram>(shared + AT_Y, row, 16 * j, lane));
#pragma unroll
            for (int t = 0; t < WIDTH; t += 16) {
                Element::B b[2];
                load_b_columns<Element, Keys>(b, keys, 16 * j, column + t, lane);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    Element::multiply(x[t / 8 + h], o, b[h]);
                    Element::multiply(y[t / 8 + h], w, b[h]);
                }
            }
        }
        auto put = [&](const Sums& s, const Rows& to) {
            store_sums<Element, WIDTH>(own_rows(to, sequence, traversal.head), to.token, s, own, token + row, T, first,
                                       lane);
        };
        if (LA_DECAY) {
            row_dots(x, queries, row, column, lane, 1.f, dots.reads);
            row_dots(y, reading, row, column, lane, 1.f, LA_BEFORE ? dots.erases : dots.reads);
        }
        put(x, a.dq);
        if constexpr (LA_SEPARATE_ERASE_KEY) put(y, a.dr);
        uint4 share[SHARE];
        if (LA_DECAY) Columns::read<THREADS>(share, states, piece, thread);
        copy_wait<0>();
        __syncthreads();   // dS is there
        if (LA_DECAY) dots.product += Columns::dot<THREADS>(share, at + AT_S, thread);
        clear(z);
#pragma unroll 4
        for (int v = 0; v < VP; v += 16) {   // U dS
            const auto n = Element::operand(load_a_rows<Element, Values>(shared + AT_U, row, v, lane));
#pragma unroll
            for (int t = 0; t < WIDTH; t += 16) {
                Element::B b[2];
                Columns::operands<Element>(b, at + AT_S, v, column + t, lane);
                Element::multiply(z[t / 8], n, b[0]);
                Element::multiply(z[t / 8 + 1], n, b[1]);
            }
        }
        scale_rows(z, b0 * decay.end(i0), b1 * decay.end(i0 + 8));
        if (LA_DECAY) row_dots(z, keys, row, column, lane, 1.f, dots.writes);
        clear(x);
#pragma unroll 1
        for (int j = row / 16; j < ROWS; j++) {   // Z^T Q + Y^T R
            multiply_keys(x, Element::operand(load_a_columns<Element, Gram>(shared + AT_Z, 16 * j, row, lane)), queries,
                          16 * j, column, lane);
            multiply_keys(x, Element::operand(load_a_columns<Element, Gram>(shared + AT_Y, 16 * j, row, lane)), reading,
                          16 * j, column, lane);
        }
        if (LA_DECAY) row_dots(x, keys, row, column, lane, -1.f, dots.reads);
#pragma unroll
        for (int i = 0; i < TILES * 4; i++)
            x[i >> 2][i & 3] += z[i >> 2][i & 3] + (LA_SEPARATE_ERASE_KEY ? 0.f : y[i >> 2][i & 3]);
        put(x, a.dk);
        if (piece + 1 < PIECES) {
            __syncthreads();
            load(piece + 1);
        }
    }
    if (!LA_DECAY) return;
    store_dots(shared, dots, warp, group, i0, lane);
    __syncthreads();
    if (warp == 0) gate_gradients(a, traversal, shared, decay, token, lane);
}
