// A of every chunk of the delta rule (delta.cuh), portable: C / 16 warps a chunk and head.
//
// As inverse.cuh; products in tf32, of three terms where elements are float32, where they are bfloat16 in float16. A
// leaves in the kind that gram matrices have; of its 16 x 16 blocks none above the diagonal is written or read. Where r
// reads the state before it decays, L_ij holds the decay from j to the token before i and none is put back.
#include "attention/delta_scan.cuh"
#include "attention/substitution.cuh"

constexpr int C = LA_C, K = LA_K, WARPS = C / 16, THREADS = 32 * WARPS, KP = round_up(K, 16), OUT = Element::GRAM_BYTES;
constexpr bool HALF = LA_DTYPE == 0;   // factors of the inverse in float16
typedef Tile<KP, Element::BYTES> Keys;
typedef Tile<C, HALF ? 2 : 4> Lower;
typedef Tile<C, OUT> Out;
// shared memory: keys, in whose place A is put together, L and the diagonal blocks of T_inv
constexpr int AT_R = C * Keys::ROW * LA_SEPARATE_ERASE_KEY, KEYS = AT_R + C * Keys::ROW,
              AT_LOWER = KEYS > C *Out::ROW ? KEYS : C * Out::ROW, AT_DIAGONALS = AT_LOWER + C * Lower::ROW;
constexpr int AT_ROOTS = AT_DIAGONALS + WARPS * DIAGONAL, AT_GATES = AT_ROOTS + C * 4, AT_DECAY = AT_GATES + C * 4;
static_assert(LA_SHARED == AT_DECAY + Decay<C>::FLOATS * 4, "LA_SHARED is the size that the launch requests");

template <int DTYPE> struct Factors {
    typedef Float16 Kind;
};   // tf32
template <> struct Factors<0> {
    typedef Half Kind;
};
template <> struct Factors<2> {
    typedef Float32 Kind;
};
typedef Factors<LA_DTYPE>::Kind Factor;

// row block `warp` of L: left of the diagonal to `lower`, the diagonal block transposed to `diagonal`
LA_DEVICE void store_lower(u32 keys, u32 lower, float* diagonal, const Decay<C>& decay, const float* roots, int warp,
                           int lane) {
    float x[C / 16][2][4] = {};
#pragma unroll
    for (int d = 0; d < KP; d += 16) {
        const auto a = Element::operand(load_a_rows<Element, Keys>(keys + AT_R, 16 * warp, d, lane));
#pragma unroll
        for (int j = 0; j < C / 16; j++)
            if (j <= warp) {
                typename Element::B b[2];
                load_b_rows<Element, Keys>(b, keys, 16 * j, d, lane);
                Element::multiply(x[j][0], a, b[0]);
                Element::multiply(x[j][1], a, b[1]);
            }
    }
    const int row = lane >> 2, column = (lane & 3) * 2;
    const float to[2] = {roots[16 * warp + row], roots[16 * warp + row + 8]};
#pragma unroll
    for (int j = 0; j < C / 16; j++)
        if (j <= warp)
#pragma unroll
            for (int i = 0; i < 8; i += 2) {
                const int m = (i >> 1) & 1, r = row + 8 * m, c = 8 * (i >> 2) + column;
                const float2 root = *(const float2*)(roots + 16 * j + c);
                float y[2] = {to[m] * root.x * x[j][i >> 2][i & 3], to[m] * root.y * x[j][i >> 2][(i & 3) + 1]};
                if (LA_BEFORE && LA_DECAY) {
                    const int last =
                        16 * warp + r - 1;   // token that r's state is after; above the diagonal there is nothing
                    const float2 from[2] = {decay.upto(16 * j + c), decay.upto(16 * j + c + 1)};
#pragma unroll
                    for (int m = 0; m < 2; m++)
                        y[m] = last >= 16 * j + c + m ? y[m] * Decay<C>::between(from[m], decay.upto(last)) : 0.f;
                }
                const u32 at = lower + Lower::at(16 * warp + r, 16 * j + c);
                if (j < warp && HALF) store_shared_u32(at, pack_f16(y[0], y[1]));
                else if (j < warp) store_shared2(at, y[0], y[1]);
                else
#pragma unroll
                    for (int m = 0; m < 2; m++) diagonal[(c + m) * 20 + r] = r > c + m ? y[m] : 0.f;
            }
}

// the diagonal block's inverse by substitution, a column a lane (twice), to `lower`
LA_DEVICE void invert_diagonal(u32 lower, const float* diagonal, int warp, int lane) {
    float x[16];
    const int j = lane & 15;
    invert_column(x, diagonal, j);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 at = lower + Lower::at(16 * warp + i + (lane < 16 ? 0 : 8), 16 * warp + j);
        const float y = lane < 16 ? x[i] : x[i + 8];
        if (HALF) asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"((u16)pack_f16(y, 0.f)) : "memory");
        else store_shared(at, y);
    }
}

struct OfColumns {   // of this lane's columns of A: sums of decays, and roots of beta
    float2 upto[2];
    float root[2];
};
// block (i, warp) of A from its transpose without decays and beta, f, an operand A
LA_DEVICE void store_block(const float (&f)[8], const OfColumns& of, u32 out, const Decay<C>& decay, const float* roots,
                           int i, int warp, int lane) {
    const int row = lane >> 2, column = (lane & 3) * 2;
    u32 pairs[4];   // in block h, m: rows from 16 i + 8 h, columns from 16 warp + 8 m, as its transpose
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int to = 16 * i + 8 * h + column;
        float2 until[2] = {};
        if (LA_DECAY && !LA_BEFORE) decay.upto(to, until);
        const float2 root = *(const float2*)(roots + to);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            float y[2] = {f[4 * h + 2 * m] * (root.x * of.root[m]), f[4 * h + 2 * m + 1] * (root.y * of.root[m])};
#pragma unroll
            for (int n = 0; n < 2; n++) {
                if (!LA_BEFORE) y[n] *= Decay<C>::between(of.upto[m], until[n]);
                if (i == warp && 8 * h + column + n < row + 8 * m) y[n] = 0.f;
                if constexpr (OUT == 4) store_shared(out + Out::at(to + n, 16 * warp + row + 8 * m), y[n]);
            }
            pairs[2 * h + m] = pack_bf16(y[0], y[1]);
        }
    }
    if constexpr (OUT == 2) {
#if __CUDA_ARCH__ >= 900
        store_matrix_transposed(
            out + Out::block_piece(16 * i, 2 * warp, (lane & 7) | ((lane >> 4) << 3), (lane >> 3) & 1), pairs[0],
            pairs[1], pairs[2], pairs[3]);
#else
#pragma unroll
        for (int n = 0; n < 4; n++)
            store_shared_u32(out + Out::at(16 * i + 8 * (n >> 1) + row, 16 * warp + 8 * (n & 1) + column),
                             transpose_block(pairs[n]));
#endif
    }
}

// block column `warp` of A, from L below the diagonal and the diagonal blocks of T_inv, row by row to `out`
template <class Factor> LA_DEVICE void store_inverse(u32 lower, u32 out, const Decay<C>& decay, const float* roots,
                                                     int warp, int lane) {
    typename Factor::A x[C / 16];   // X_IJ^T
    OfColumns of = {};
#pragma unroll
    for (int m = 0; m < 2; m++) {
        if (LA_DECAY && !LA_BEFORE) of.upto[m] = decay.upto(16 * warp + (lane >> 2) + 8 * m);
        of.root[m] = roots[16 * warp + (lane >> 2) + 8 * m];
    }
#pragma unroll
    for (int i = 0; i < C / 16; i++) {
        if (i < warp) continue;
        float z[2][4] = {};
        if (i > warp) {
            float y[2][4] = {}, f[8];
            typename Factor::B b[2];
#pragma unroll
            for (int m = 0; m < i; m++)
                if (m >= warp) {
                    load_b_rows<Factor, Lower>(b, lower, 16 * i, 16 * m, lane);
                    Factor::multiply(y[0], x[m], b[0]);
                    Factor::multiply(y[1], x[m], b[1]);
                }
#pragma unroll
            for (int n = 0; n < 8; n++) f[n] = -y[n >> 2][n & 3];
            const auto less = Factor::operand(f);
            load_b_rows<Factor, Lower>(b, lower, 16 * i, 16 * i, lane);
            Factor::multiply(z[0], less, b[0]);
            Factor::multiply(z[1], less, b[1]);
        } else {
            const auto raw = load_a_columns<Factor, Lower>(lower, 16 * i, 16 * i, lane);
#pragma unroll
            for (int n = 0; n < 8; n++) z[n >> 2][n & 3] = Factor::value(raw, n);
        }
        float f[8];
        flatten(f, z[0], z[1]);
        x[i] = Factor::operand(f);
        store_block(f, of, out, decay, roots, i, warp, lane);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) inverse(const __grid_constant__ DeltaScanArguments a) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 shared = shared_address(memory), lower = shared + AT_LOWER;
    const Traversal<C, 1, false> traversal(a.offsets, a.T, a.heads, a.segments, 1);   // each chunk a segment
    if (traversal.steps <= 0) return;
    const int thread = threadIdx.x, warp = __shfl_sync(0xffffffffu, thread >> 5, 0), lane = thread & 31,
              T = traversal.sequence.T, token = traversal.first * C;
    float *diagonal = (float*)(memory + AT_DIAGONALS + warp * DIAGONAL), *roots = (float*)(memory + AT_ROOTS);
    load_rows<Keys, C, THREADS, K>(shared, rows_of(a.k, traversal.sequence, traversal.head), a.k.token, token, T, 0,
                                   thread);
    load_gates<C, THREADS>(shared + AT_GATES, traversal.gates(a.g), a.g.token, token, T, thread);
    if (LA_SEPARATE_ERASE_KEY)
        load_rows<Keys, C, THREADS, K>(shared + AT_R, rows_of(a.r, traversal.sequence, traversal.head), a.r.token,
                                       token, T, 0, thread);
    copy_commit();
    for (int i = thread; i < C; i += THREADS) {
        const float* p = a.beta.data + traversal.sequence.row * a.beta.batch +
                         (traversal.sequence.first + token + i) * a.beta.token +
                         (u32)traversal.head / (u32)a.beta.group * a.beta.head;
        const float beta = token + i < T ? *p : 0.f;
        roots[i] = sqrtf(beta < SMALLEST ? SMALLEST : beta);   // NaN stays NaN
    }
    copy_wait<0>();
    __syncthreads();
    const Decay<C> decay = {shared + AT_DECAY};
    if (warp == 0) decay.set(shared + AT_GATES, 1.f, 1.f, 0.f, lane);
    if (LA_BEFORE) __syncthreads();
    store_lower(shared, lower, diagonal, decay, roots, warp, lane);
    __syncwarp();
    invert_diagonal(lower, diagonal, warp, lane);
    __syncthreads();
    store_inverse<Factor>(lower, shared, decay, roots, warp, lane);
    __syncthreads();
    char* to = inverse_of<C>(a, traversal.sequence, traversal.slot, traversal.head, traversal.first);
    for (int i = thread; i < C * C * OUT / 16; i += THREADS) {
        const int row = i / Out::PIECES, piece = i % Out::PIECES;
        if (piece / OUT <= row / 16) copy_out<16>(to + i * 16, shared + Out::piece(row, piece), true);
    }
}
