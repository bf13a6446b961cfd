// The matrix of the systems of a SOLVED read-out before each chunk of LA_C tokens, and after the last one:
//
//     Z_t = e^{g_t} Z_{t-1} + k_t^T (beta_t k_t)
//
// One block a sequence, head and 32 columns of Z, in float32: lane is the column, a warp has K / 8 rows. Tokens are
// added 32 at a time, each with what decays from it to the last of them.
#include "arguments/matrix_state/SystemsArguments.cuh"
#include "systems/place.cuh"

constexpr int K = LA_K, WARPS = 8, THREADS = 32 * WARPS, TOKENS = 32, EACH = (K + WARPS - 1) / WARPS;
constexpr int PARTS = (K + 31) / 32, LOADS = (TOKENS * K + THREADS - 1) / THREADS, LD = EACH * WARPS;
static_assert(LA_C % TOKENS == 0, "chunks of whole pieces");

struct Piece {                                      // 32 tokens
    float keys[TOKENS][LD], weights[TOKENS], all;   // beta and the decay to the end of the piece; that of the piece
};

// keys of tokens t.. of the sequence, zeros past its end
LA_DEVICE void fetch(float (&next)[LOADS], const char* rows, i64 stride, int t, int T) {
    constexpr bool EVEN = THREADS % K == 0;   // a thread stays in its column
    const char* from = rows + (t + (int)threadIdx.x / K) * stride + threadIdx.x % K * 4;
#pragma unroll
    for (int n = 0; n < LOADS; n++) {
        const int at = n * THREADS + threadIdx.x, token = at / K;
        const bool valid = token < TOKENS && t + token < T;
        if (!EVEN) from = rows + (t + token) * stride + at % K * 4;
        next[n] = valid ? *(const float*)from : 0.f;
        if (EVEN) from += THREADS / K * stride;
    }
}
LA_DEVICE void put(Piece& p, const float (&next)[LOADS], float g, float beta) {
#pragma unroll
    for (int n = 0; n < LOADS; n++) {
        const int at = n * THREADS + threadIdx.x, token = at / K;
        if (token < TOKENS) p.keys[token][at % K] = next[n];
    }
    if (threadIdx.x >= 32) return;
    const int lane = threadIdx.x;
    float from = g;   // the sum from this token on
#pragma unroll
    for (int n = 1; n < 32; n *= 2) {
        const float more = __shfl_down_sync(0xffffffffu, from, n);
        if (lane + n < 32) from += more;
    }
    const float after = __shfl_down_sync(0xffffffffu, from, 1);
    p.weights[lane] = beta * expf(lane < 31 ? after : 0.f);
    if (lane == 0) p.all = expf(from);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) states(const __grid_constant__ SystemsArguments a) {
    __shared__ Piece piece;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 slot = blockIdx.x / PARTS;
    const int column = blockIdx.x % PARTS * 32 + lane, n = (int)(slot / a.heads), head = (int)(slot % a.heads);
    const Sequence s = sequence_of(a.offsets, n, a.T);
    const bool own = column < K;
    const char* rows = rows_of(a.k, s, head);
    const float *g = numbers_of(a.g, s, head), *beta = numbers_of(a.beta, s, head);
    for (int at = threadIdx.x; at < TOKENS * LD; at += THREADS) piece.keys[at / LD][at % LD] = 0.f;   // past K too
    float Z[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int r = warp * EACH + i;
        Z[i] = a.start && own && r < K ? a.start[(slot * K + r) * K + column] : 0.f;
    }
    i64 chunk = first_slot(a.offsets, n, a.chunks);
    float next[LOADS];
    fetch(next, rows, a.k.token, 0, s.T);
    for (int t = 0; t < s.T; t += TOKENS) {
        if (t % LA_C == 0) {
            float* to = a.states + (chunk++ * a.heads + head) * (i64)(K * K) + column;
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (own && warp * EACH + i < K) to[(warp * EACH + i) * K] = Z[i];
        }
        const bool valid = t + lane < s.T;
        const float g_t = valid ? g[(t + lane) * a.g.token] : 0.f,
                    beta_t = valid ? beta[(t + lane) * a.beta.token] : 0.f;
        __syncthreads();   // the last piece has been read
        put(piece, next, g_t, beta_t);
        __syncthreads();
        if (t + TOKENS < s.T) fetch(next, rows, a.k.token, t + TOKENS, s.T);
#pragma unroll
        for (int i = 0; i < EACH; i++) Z[i] *= piece.all;
#pragma unroll 2
        for (int j = 0; j < TOKENS; j++) {
            const float written = own ? piece.weights[j] * piece.keys[j][column] : 0.f;
#pragma unroll
            for (int i = 0; i < EACH; i++) Z[i] = fmaf(piece.keys[j][warp * EACH + i], written, Z[i]);
        }
    }
    if (a.end == nullptr) return;
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (own && warp * EACH + i < K) a.end[(slot * K + warp * EACH + i) * K + column] = Z[i];
}
