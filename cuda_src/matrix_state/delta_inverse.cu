// A of every chunk of the delta rule (delta.cuh), portable: C / 16 warps a chunk and head, the inverse in float32 throughout.
//
// As inverse.cuh; products in tf32, of three terms where elements are float32. A leaves in the kind that gram matrices have.
// Where r reads the state before it decays, L_ij holds the decay from j to the token before i and none is put back.
#include "attention/delta_scan.cuh"

constexpr int C = LA_C, K = LA_K, WARPS = C / 16, THREADS = 32 * WARPS, KP = round_up(K, 16), OUT = Element::GRAM_BYTES;
typedef Tile<KP, Element::BYTES> Keys;
typedef Tile<C, 4> Lower;
constexpr int OUT_ROW = C * OUT + 16;   // padded: columns are written
constexpr int AT_R = C * Keys::ROW * LA_OWN, AT_LOWER = AT_R + C * Keys::ROW, AT_OUT = AT_LOWER + C * Lower::ROW, AT_DIAGONALS = AT_OUT + C * OUT_ROW;
constexpr int DIAGONAL = 16 * 20 * 4, AT_ROOTS = AT_DIAGONALS + WARPS * DIAGONAL, AT_GATES = AT_ROOTS + C * 4, AT_DECAY = AT_GATES + C * 4;
static_assert(LA_SHARED == AT_DECAY + Decay<C>::FLOATS * 4, "LA_SHARED is what the launch asks for");

template <bool EXACT> struct Factors { typedef Float16 Kind; };   // tf32
template <> struct Factors<true> { typedef Float32 Kind; };
typedef Factors<Element::EXACT>::Kind Factor;

// row block `warp` of L: left of the diagonal to `lower`, the diagonal block transposed to `diagonal`
LA_DEVICE void store_lower(u32 keys, u32 lower, float* diagonal, const Decay<C>& decay, const float* roots, int warp, int lane) {
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
#pragma unroll
    for (int j = 0; j < C / 16; j++)
        if (j <= warp)
#pragma unroll
            for (int i = 0; i < 8; i += 2) {
                const int r = row + 8 * ((i >> 1) & 1), c = 8 * (i >> 2) + column;
                const float to = roots[16 * warp + r];
                float y[2] = {to * roots[16 * j + c] * x[j][i >> 2][i & 3], to * roots[16 * j + c + 1] * x[j][i >> 2][(i & 3) + 1]};
                if (LA_BEFORE && LA_DECAY) {
                    const int last = 16 * warp + r - 1;   // token that r's state is after; above the diagonal nothing is kept
                    const float2 from[2] = {decay.upto(16 * j + c), decay.upto(16 * j + c + 1)};
#pragma unroll
                    for (int m = 0; m < 2; m++) y[m] = last >= 16 * j + c + m ? y[m] * Decay<C>::between(from[m], decay.upto(last)) : 0.f;
                }
                if (j < warp) store_shared2(lower + Lower::at(16 * warp + r, 16 * j + c), y[0], y[1]);
                else
#pragma unroll
                    for (int m = 0; m < 2; m++) diagonal[(c + m) * 20 + r] = r > c + m ? y[m] : 0.f;
            }
}

// the diagonal block's inverse by substitution, a column a lane (twice), to `lower`
LA_DEVICE void invert_diagonal(u32 lower, const float* diagonal, int warp, int lane) {
    float x[16];
    const int j = lane & 15;
#pragma unroll
    for (int i = 0; i < 16; i++) x[i] = i == j ? 1.f : 0.f;
#pragma unroll
    for (int m = 0; m < 15; m++)
#pragma unroll
        for (int i = (m + 1) / 4 * 4; i < 16; i += 4) {
            const float4 l = *(const float4*)(diagonal + m * 20 + i);
            if (i > m) x[i] -= l.x * x[m];
            if (i + 1 > m) x[i + 1] -= l.y * x[m];
            if (i + 2 > m) x[i + 2] -= l.z * x[m];
            if (i + 3 > m) x[i + 3] -= l.w * x[m];
        }
#pragma unroll
    for (int i = 0; i < 8; i++)
        store_shared(lower + Lower::at(16 * warp + i + (lane < 16 ? 0 : 8), 16 * warp + j), lane < 16 ? x[i] : x[i + 8]);
}

// block column `warp` of A, from L below the diagonal and the diagonal blocks of X, row by row to `out`
LA_DEVICE void store_inverse(u32 lower, unsigned char* out, const Decay<C>& decay, const float* roots, int warp, int lane) {
    Factor::A x[C / 16];   // X_IJ^T
    const int row = lane >> 2, column = (lane & 3) * 2;
#pragma unroll
    for (int i = 0; i < C / 16; i++) {
        if (i < warp) continue;
        float z[2][4] = {};
        if (i > warp) {
            float y[2][4] = {}, f[8];
            Factor::B b[2];
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
            for (int n = 0; n < 8; n++) z[n >> 2][n & 3] = raw.x[n];
        }
        float f[8];
        flatten(f, z[0], z[1]);
        x[i] = Factor::operand(f);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const int from = 16 * warp + row + 8 * ((n >> 1) & 1), to = 16 * i + 8 * (n >> 2) + column + (n & 1);
            const float y = to < from ? 0.f : f[n] * (roots[to] * roots[from] * (LA_BEFORE ? 1.f : Decay<C>::between(decay.upto(from), decay.upto(to))));
            if constexpr (OUT == 2) *(u16*)(out + to * OUT_ROW + from * OUT) = (u16)pack_bf16(y, 0.f);
            else *(float*)(out + to * OUT_ROW + from * OUT) = y;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) inverse(const __grid_constant__ DeltaScanArguments a) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 shared = shared_address(memory), lower = shared + AT_LOWER;
    const Walk<C, 1, false> walk(a.offsets, a.T, a.heads, a.segments, 1);   // each chunk a segment
    if (walk.steps <= 0) return;
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, T = walk.sequence.T, token = walk.first * C;
    float *diagonal = (float*)(memory + AT_DIAGONALS + warp * DIAGONAL), *roots = (float*)(memory + AT_ROOTS);
    load_rows<Keys, C, THREADS, K>(shared, rows_of(a.k, walk.sequence, walk.head), a.k.token, token, T, 0, thread);
    load_gates<C, THREADS>(shared + AT_GATES, walk.gates(a.g.data, a.g.batch, a.g.token, a.g.head, a.g.group), a.g.token, token, T, thread);
    if (LA_OWN) load_rows<Keys, C, THREADS, K>(shared + AT_R, rows_of(a.r, walk.sequence, walk.head), a.r.token, token, T, 0, thread);
    copy_commit();
    for (int i = thread; i < C; i += THREADS) {
        const float* p = a.beta.data + walk.sequence.row * a.beta.batch + (walk.sequence.first + token + i) * a.beta.token + (u32)walk.head / (u32)a.beta.group * a.beta.head;
        const float beta = token + i < T ? *p : 0.f;
        roots[i] = sqrtf(beta < SMALLEST ? SMALLEST : beta);   // NaN stays NaN
    }
    for (int i = thread; i < C * OUT_ROW / 16; i += THREADS) *(uint4*)(memory + AT_OUT + i * 16) = make_uint4(0, 0, 0, 0);
    copy_wait<0>();
    __syncthreads();
    const Decay<C> decay = {shared + AT_DECAY};
    if (warp == 0) decay.set(shared + AT_GATES, 1.f, 1.f, 0.f, lane);
    if (LA_BEFORE) __syncthreads();
    store_lower(shared, lower, diagonal, decay, roots, warp, lane);
    __syncwarp();
    invert_diagonal(lower, diagonal, warp, lane);
    __syncthreads();
    store_inverse(lower, memory + AT_OUT, decay, roots, warp, lane);
    __syncthreads();
    char* to = inverse_of<C>(a, walk.sequence, walk.slot, walk.head, walk.first);
    for (int i = thread; i < C * C * OUT / 16; i += THREADS) {
        const int row = i / (C * OUT / 16), piece = i % (C * OUT / 16);
        copy_out<16>(to + i * 16, shared + AT_OUT + row * OUT_ROW + piece * 16, true);
    }
}
