// What a tile of the momentum delta rule is to the walks over its states, whatever these are
// (docs/cores/fast_weights.md). With the coefficients w, s of rates.cu, in the letters of momentum_vjp.cu,
//
//     L = tril(k k^T, -1) eta_j m'_ij,   inverse = (I + L)^-1,   P = tril(q k^T) eta_j m_ij
//
// and the rows u, z, c, d, c', d' of numbers of its tokens. A block has a tile; keys come in stages of COLUMNS
// channels. A thread has a column of the inverse, by substitution, four rows at a time.
#include "arguments/fast_weights/MomentumSystemsArguments.cuh"
#include "fast_weights/systems.cuh"
#include "tile/copy.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS, COLUMNS = 16, S = COLUMNS + 8, SC = C + 4, PER = LA_ALIGN / 4;
constexpr int STAGE = 2 * C * S;
static_assert(LA_SHARED == 4 * (2 * STAGE + 2 * C * SC), "LA_SHARED is the size that the launch requests");

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    momentum_systems(const __grid_constant__ MomentumSystemsArguments a) {
    extern __shared__ __align__(16) char shared[];
    float *stages = (float*)shared, *L = stages + 2 * STAGE, *X = L + C * SC;   // L[j][i], X[j][column]
    const int warp = threadIdx.x / 32;
    const Lane l = own_place();
    const i64 tile = blockIdx.x, slot = tile / a.tiles;
    const int first = (int)(tile % a.tiles) * a.n, n = a.n, width = n + 2, count = min(n, a.T - first);
    const float *W = (const float*)a.w + tile * (n + 1) * width, *Z = (const float*)a.s + (tile * (n + 1) + n) * width;
    float* to = (float*)a.systems + tile * SYSTEM;
    const auto rate = [&](const Tokens& y, int i) {
        return i < count ? *(const float*)(y.data + slot / a.heads * y.batch + slot % a.heads * y.head +
                                           (first + i) * y.token)
                         : 0.f;
    };
    const auto read_at = [&](int i) { return LA_DECAYED ? rate(a.alpha, i) : 1.f; };
    const auto fetch = [&](int stage) {
#pragma unroll 1
        for (int i = threadIdx.x; i < 2 * C * (COLUMNS / PER); i += THREADS) {
            const int r = i / (COLUMNS / PER) % C, which = i / (C * (COLUMNS / PER)), c = i % (COLUMNS / PER) * PER,
                      column = stage * COLUMNS + c;
            const Tokens& y = which || a.q.data == nullptr ? a.k : a.q;
            const bool is_there = r < count && column < a.K && (which || a.q.data != nullptr);
            copy_in<LA_ALIGN>(shared_address(stages + stage % 2 * STAGE + (which * C + r) * S + c),
                              y.data + slot / a.heads * y.batch + slot % a.heads * y.head +
                                  (is_there ? (first + r) * y.token + column * 4 : 0),
                              is_there);
        }
        copy_commit();
    };
    const int all = (a.K + COLUMNS - 1) / COLUMNS;
    fetch(0);
    if (threadIdx.x < C) {
        const int i = threadIdx.x;
        const bool has = i < n;
        const float eta = rate(a.eta, i), read = read_at(i), *row = W + i * width;
        float* by = to + BY_TOKEN + i;
        by[OF_R * C] = has ? eta * W[n * width + 2 + i] : 0.f;
        by[OF_N * C] = has ? eta * Z[2 + i] : 0.f;
        by[OF_C * C] = has ? row[width] : 0.f;
        by[OF_D * C] = has ? row[width + 1] : 0.f;
        by[OF_C_POINT * C] = has ? read * row[0] : 0.f;
        by[OF_D_POINT * C] = has ? read * row[1] : 0.f;
        if (i < ENDS_COUNT)
            to[ENDS + i] = i == 0 ? W[n * width] : i == 1 ? W[n * width + 1] : i == 2 ? Z[1] : __uint_as_float(HALF);
    }
    float qk[C / 8][4] = {}, kk[C / 8][4] = {};
    const int own = 16 * warp;
#pragma unroll 1
    for (int stage = 0; stage < all; stage++) {
        __syncthreads();
        if (stage + 1 < all) {
            fetch(stage + 1);
            copy_wait<1>();
        } else copy_wait<0>();
        __syncthreads();
        const float *q = stages + stage % 2 * STAGE, *k = q + C * S;
        const OperandA x = rows_a<S>(q + own * S, l), y = rows_a<S>(k + own * S, l);
#pragma unroll
        for (int m = 0; m < C / 8; m++) {
            const OperandB b = rows_b<S, true>(k + 8 * m * S, l);
            Element::multiply(qk[m], x, b);
            Element::multiply(kk[m], y, b);
        }
    }
    const float read[2] = {read_at(own + l.g), read_at(own + l.g + 8)};
#pragma unroll
    for (int m = 0; m < C / 8; m++)
#pragma unroll
        for (int f = 0; f < 4; f++) {
            const int i = own + l.g + 8 * (f >> 1), j = 8 * m + 2 * l.j + (f & 1);
            const float eta = rate(a.eta, j);
            to[OF_P + i * C + j] = i < n && j <= i ? stored(qk[m][f] * eta * W[(i + 1) * width + 2 + j]) : 0.f;
            L[j * SC + i] = i < n && j < i ? kk[m][f] * eta * read[f >> 1] * W[i * width + 2 + j] : 0.f;
        }
    __syncthreads();
    if (threadIdx.x >= C) return;
    const int column = threadIdx.x, above = column / 32 * 32;   // rows before it are zeros of the whole warp
    for (int i = 0; i < above; i++) to[OF_INVERSE + i * C + column] = X[i * SC + column] = 0.f;
#pragma unroll 1
    for (int i = above; i < C; i += 4) {
        float x[4];
#pragma unroll
        for (int r = 0; r < 4; r++) x[r] = i + r == column;
#pragma unroll 4
        for (int j = above; j < i; j++) {
            const float4 b = *(const float4*)(L + j * SC + i);
            const float y = X[j * SC + column];
            x[0] -= b.x * y, x[1] -= b.y * y, x[2] -= b.z * y, x[3] -= b.w * y;
        }
#pragma unroll
        for (int r = 0; r < 4; r++) {
#pragma unroll
            for (int j = 0; j < r; j++) x[r] -= L[(i + j) * SC + i + r] * x[j];
            X[(i + r) * SC + column] = x[r];
            to[OF_INVERSE + (i + r) * C + column] = stored(x[r]);
        }
    }
}
