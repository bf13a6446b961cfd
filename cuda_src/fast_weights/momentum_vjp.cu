// Gradients of the tokens of a tile of the momentum delta rule (docs/cores/fast_weights.md), from the errors e_t, dv_t,
// the states S, M before the tile and the gradients R, N of those after it. With the coefficients w, s of rates.cu,
//
//     c_i, d_i, m_ij     w_i         of what queries read           c'_i, d'_i, m'_ij     a_i w_(i-1)  of predictions
//     u_j = w_n eta_j    of S after the tile                        z_j = s_n eta_j       of M after it
//
//     P = tril(dout e^T) eta_j m_ij,   D = tril(dv e^T, -1) eta_j m'_ij
//     dq = c dout S^T + d dout M^T + P k
//     dk = u e R^T + z e N^T + P^T q - c' dv S^T - d' dv M^T - (D + D^T) k
//
// A block has a tile. Rows come in stages of COLUMNS channels, one stage ahead; keys in parts of KEYS. A warp owns 16
// tokens and half of a part, or 16 x 32 numbers of a matrix of tokens. LA_EXACT 1: products of float32, else of tf32.
#include "arguments/fast_weights/MomentumVjpArguments.cuh"
#include "fast_weights/systems.cuh"
#include "tile/copy.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS, COLUMNS = 16, KEYS = 32;
constexpr int S = COLUMNS + 8, SK = KEYS + 4, SC = C + 8;   // from a row to the next: of a stage, of a part, of P and D
constexpr int STAGE = (3 * C + 4 * KEYS) * S, PER = LA_ALIGN / 4;
constexpr int NUMBERS = 2 * STAGE + 2 * C * SC + COEFFICIENTS * C + 2 * 6 * C + 4 * C + 4 * WARPS;
static_assert(LA_SHARED == 4 * NUMBERS, "LA_SHARED is the size that the launch requests");
static_assert(2 * C * SK <= STAGE, "a stage holds a part of the queries and of the keys");

LA_DEVICE float sum_of_quad(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
LA_DEVICE float sum_of_rows(float x) {
    x += __shfl_xor_sync(~0u, x, 4);
    x += __shfl_xor_sync(~0u, x, 8);
    return x + __shfl_xor_sync(~0u, x, 16);
}

struct Loader {
    const MomentumVjpArguments& a;
    i64 slot, tile;
    int first, count;   // tokens of the tile
    float* stages;

    // `rows` rows, `valid` of them there, of WIDTH columns
    template <int WIDTH, int ROW> __device__ __forceinline__ void fetch(float* to, const char* from, i64 row, int rows,
                                                                        int valid, int column, int columns) const {
        constexpr int PIECES = WIDTH / PER;
#pragma unroll 1
        for (int i = threadIdx.x; i < rows * PIECES; i += THREADS) {
            const int r = i / PIECES, c = i % PIECES * PER;
            const bool is_there = r < valid && column + c < columns;
            copy_in<LA_ALIGN>(shared_address(to + r * ROW + c), from + (is_there ? r * row + (column + c) * 4 : 0),
                              is_there);
        }
    }
    template <int WIDTH, int ROW> __device__ __forceinline__ void tokens(float* to, const Tokens& y, int column,
                                                                         int columns) const {
        const char* from = y.data + slot / a.heads * y.batch + slot % a.heads * y.head + first * y.token;
        fetch<WIDTH, ROW>(to, y.data == nullptr ? a.errors : from, y.token, C, y.data == nullptr ? 0 : count, column,
                          columns);
    }
    __device__ __forceinline__ void values(float* to, int column) const {
        const i64 row = 4 * (i64)a.V, at = (slot * a.T + first) * row;
        tokens<COLUMNS, S>(to, a.dout, column, a.V);
        fetch<COLUMNS, S>(to + C * S, a.dv + at, row, C, count, column, a.V);
        fetch<COLUMNS, S>(to + 2 * C * S, a.errors + at, row, C, count, column, a.V);
    }
    __device__ __forceinline__ void states(float* to, int key, int column) const {
        const i64 row = 4 * (i64)a.V, at = (tile * a.K + key) * row;
        const int valid = min(KEYS, a.K - key);
        fetch<COLUMNS, S>(to, a.S + at, row, KEYS, valid, column, a.V);
        fetch<COLUMNS, S>(to + KEYS * S, a.M + at, row, KEYS, valid, column, a.V);
        fetch<COLUMNS, S>(to + 2 * KEYS * S, a.R + at, row, KEYS, valid, column, a.V);
        fetch<COLUMNS, S>(to + 3 * KEYS * S, a.N + at, row, KEYS, valid, column, a.V);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS)
    momentum_vjp(const __grid_constant__ MomentumVjpArguments a) {
    extern __shared__ __align__(16) char shared[];
    float *stages = (float*)shared, *P = stages + 2 * STAGE, *D = P + C * SC, *by_token = D + C * SC,
          *sums = by_token + COEFFICIENTS * C, *deta = sums + 2 * 6 * C, *dots = deta + 4 * C;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = warp / 2 * 16, half = warp % 2;
    const Lane l = own_place();
    const i64 tile = blockIdx.x, slot = tile / a.tiles;
    const int first = (int)(tile % a.tiles) * a.n, n = a.n, width = n + 2;
    const Loader from = {a, slot, tile, first, min(n, a.T - first), stages};
    const float *W = (const float*)a.w + tile * (n + 1) * width, *Z = (const float*)a.s + (tile * (n + 1) + n) * width;
    float* d = (float*)a.d + tile * (2 * n + 2) * width;
    float *ends = d + n * width, *points = ends + 2 * width;
    const auto rate = [&](const Tokens& y, int i) {
        return i < from.count ? *(const float*)(y.data + slot / a.heads * y.batch + slot % a.heads * y.head +
                                                (first + i) * y.token)
                              : 0.f;
    };
    const auto read_at = [&](int i) { return LA_DECAYED ? rate(a.alpha, i) : 1.f; };

    const int key_stages = (a.K + COLUMNS - 1) / COLUMNS, value_stages = (a.V + COLUMNS - 1) / COLUMNS;
    const int parts = (a.K + KEYS - 1) / KEYS, all = key_stages + value_stages + parts * (value_stages + 1);
    const auto fetch = [&](int stage) {
        float* to = stages + stage % 2 * STAGE;
        if (stage < key_stages) {
            from.tokens<COLUMNS, S>(to, a.q, stage * COLUMNS, a.K);
            from.tokens<COLUMNS, S>(to + C * S, a.k, stage * COLUMNS, a.K);
        } else if (stage < key_stages + value_stages) from.values(to, (stage - key_stages) * COLUMNS);
        else {
            const int at = stage - key_stages - value_stages, part = at / (value_stages + 1),
                      column = at % (value_stages + 1);
            if (column < value_stages) {
                from.values(to, column * COLUMNS);
                from.states(to + 3 * C * S, part * KEYS, column * COLUMNS);
            } else {
                from.tokens<KEYS, SK>(to, a.q, part * KEYS, a.K);
                from.tokens<KEYS, SK>(to + C * SK, a.k, part * KEYS, a.K);
            }
        }
        copy_commit();
    };
    int stage = 0;
    // where the next stage lies: it has come, and the one after it is on its way
    const auto next = [&] {
        __syncthreads();
        if (stage + 1 < all) {
            fetch(stage + 1);
            copy_wait<1>();
        } else copy_wait<0>();
        __syncthreads();
        return (const float*)stages + stage++ % 2 * STAGE;
    };
    fetch(0);
    for (int i = threadIdx.x; i < COEFFICIENTS * C; i += THREADS)
        by_token[i] = ((const float*)a.systems)[tile * SYSTEM + BY_TOKEN + i];

    {                                                                       // matrices of tokens
        float qk[4][4] = {}, kk[4][4] = {}, re[4][4] = {}, xe[4][4] = {};   // q k^T, k k^T, dout e^T, dv e^T
        for (int i = 0; i < key_stages; i++) {
            const float *q = next(), *k = q + C * S;
            const OperandA x = rows_a<S>(q + own * S, l), y = rows_a<S>(k + own * S, l);
#pragma unroll
            for (int m = 0; m < 4; m++) {
                const OperandB b = rows_b<S>(k + (32 * half + 8 * m) * S, l);
                Element::multiply(qk[m], x, b);
                Element::multiply(kk[m], y, b);
            }
        }
        for (int i = 0; i < value_stages; i++) {
            const float *dout = next(), *dv = dout + C * S, *e = dv + C * S;
            const OperandA x = rows_a<S>(dout + own * S, l), y = rows_a<S>(dv + own * S, l);
#pragma unroll
            for (int m = 0; m < 4; m++) {
                const OperandB b = rows_b<S>(e + (32 * half + 8 * m) * S, l);
                Element::multiply(re[m], x, b);
                Element::multiply(xe[m], y, b);
            }
        }
        const float read[2] = {read_at(own + l.g), read_at(own + l.g + 8)};
#pragma unroll
        for (int m = 0; m < 4; m++) {
            float of_eta[2] = {};
#pragma unroll
            for (int f = 0; f < 4; f++) {
                const int i = own + l.g + 8 * (f >> 1), j = 32 * half + 8 * m + 2 * l.j + (f & 1);
                const bool is_read = i < n && j <= i, is_point = i < n && j < i;
                const float eta = rate(a.eta, j), c = is_read ? W[(i + 1) * width + 2 + j] : 0.f,
                            point = is_point ? read[f >> 1] * W[i * width + 2 + j] : 0.f;
                const float of_read = is_read ? re[m][f] * qk[m][f] : 0.f,
                            of_point = is_point ? xe[m][f] * kk[m][f] : 0.f;
                P[i * SC + j] = is_read ? re[m][f] * eta * c : 0.f;
                if (j <= i) {
                    const float y = is_point ? -(xe[m][f] * eta * point) : 0.f;
                    D[i * SC + j] = y;
                    D[j * SC + i] = y;
                }
                if (i < n && j < n) {
                    d[i * width + 2 + j] = eta * of_read;
                    points[i * width + 2 + j] = -eta * of_point;
                }
                of_eta[f & 1] += of_read * c - of_point * point;
            }
#pragma unroll
            for (int f = 0; f < 2; f++) {
                const float y = sum_of_rows(of_eta[f]);
                if (l.g == 0) deta[warp / 2 * C + 32 * half + 8 * m + 2 * l.j + f] = y;
            }
        }
    }

    float by_row[2][6] = {}, dot[4] = {};   // q S do^T, q M do^T, k S dv^T, k M dv^T, k R e^T, k N e^T of two tokens
    for (int part = 0; part < parts; part++) {
        float y[6][2][4] = {};
#pragma unroll 1
        for (int i = 0; i < value_stages; i++) {
            const float *dout = next(), *dv = dout + C * S, *e = dv + C * S, *s = e + C * S, *m = s + KEYS * S,
                        *r = m + KEYS * S, *z = r + KEYS * S;
#pragma unroll
            for (int b = 0; b < 2; b++) {
                const int at = (16 * half + 8 * b) * S;
                const OperandB of_s = rows_b<S>(s + at, l), of_m = rows_b<S>(m + at, l);
                const OperandA x = rows_a<S>(dout + own * S, l);
                Element::multiply(y[0][b], x, of_s);
                Element::multiply(y[1][b], x, of_m);
                const OperandA back = rows_a<S>(dv + own * S, l);
                Element::multiply(y[2][b], back, of_s);
                Element::multiply(y[3][b], back, of_m);
                const OperandA error = rows_a<S>(e + own * S, l);
                Element::multiply(y[4][b], error, rows_b<S>(r + at, l));
                Element::multiply(y[5][b], error, rows_b<S>(z + at, l));
            }
            const int at = threadIdx.x / 8 * S + threadIdx.x % 8 * 2;
            static_assert(THREADS * 2 == KEYS * COLUMNS, "two numbers of each state of a stage are a thread's");
#pragma unroll
            for (int f = 0; f < 2; f++) {
                dot[0] += r[at + f] * s[at + f];
                dot[1] += r[at + f] * m[at + f];
                dot[2] += z[at + f] * s[at + f];
                dot[3] += z[at + f] * m[at + f];
            }
        }
        const float *q = next(), *k = q + C * SK;
        float dq[2][4], dk[2][4];
#pragma unroll
        for (int b = 0; b < 2; b++)
#pragma unroll
            for (int f = 0; f < 4; f++) {
                const int h = f >> 1, i = own + l.g + 8 * h, c = 16 * half + 8 * b + 2 * l.j + (f & 1);
                const float of_q = q[i * SK + c], of_k = k[i * SK + c];
#pragma unroll
                for (int p = 0; p < 6; p++) by_row[h][p] += (p < 2 ? of_q : of_k) * y[p][b][f];
                const float* by = by_token + i;
                dq[b][f] = by[OF_C * C] * y[0][b][f] + by[OF_D * C] * y[1][b][f];
                dk[b][f] = by[OF_R * C] * y[4][b][f] + by[OF_N * C] * y[5][b][f] -
                           (by[OF_C_POINT * C] * y[2][b][f] + by[OF_D_POINT * C] * y[3][b][f]);
            }
#pragma unroll
        for (int j = 0; j < C; j += 16) {
            const OperandA of_p = rows_a<SC>(P + own * SC + j, l), transposed = columns_a<SC>(P + j * SC + own, l),
                           of_d = rows_a<SC>(D + own * SC + j, l);
#pragma unroll
            for (int b = 0; b < 2; b++) {
                const int at = j * SK + 16 * half + 8 * b;
                const OperandB keys = columns_b<SK>(k + at, l);
                Element::multiply(dq[b], of_p, keys);
                Element::multiply(dk[b], of_d, keys);
                Element::multiply(dk[b], transposed, columns_b<SK>(q + at, l));
            }
        }
        const auto put = [&](const Tokens& to, const float (&x)[2][4]) {
            if (to.data == nullptr) return;
#pragma unroll
            for (int b = 0; b < 2; b++)
#pragma unroll
                for (int f = 0; f < 4; f++) {
                    const int i = own + l.g + 8 * (f >> 1), c = part * KEYS + 16 * half + 8 * b + 2 * l.j + (f & 1);
                    if (i < from.count && c < a.K)
                        ((float*)(to.data + slot / a.heads * to.batch + slot % a.heads * to.head +
                                  (first + i) * to.token))[c] = x[b][f];
                }
        };
        put(a.dq, dq);
        put(a.dk, dk);
    }

#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int p = 0; p < 6; p++) {
            const float y = sum_of_quad(by_row[h][p]);
            if (l.j == 0) sums[(half * 6 + p) * C + own + l.g + 8 * h] = y;
        }
#pragma unroll
    for (int p = 0; p < 4; p++) {
        const float y = sum_of_rows(sum_of_quad(dot[p]));
        if (lane == 0) dots[p * WARPS + warp] = y;
    }
    __syncthreads();
    if (threadIdx.x < n) {
        const int i = threadIdx.x;
        float y[6];
#pragma unroll
        for (int p = 0; p < 6; p++) y[p] = sums[p * C + i] + sums[(6 + p) * C + i];
        d[i * width] = y[0];
        d[i * width + 1] = y[1];
        points[i * width] = -y[2];
        points[i * width + 1] = -y[3];
        const float eta = rate(a.eta, i);
        ends[2 + i] = eta * y[4];
        ends[width + 2 + i] = eta * y[5];
        if (i < from.count)
            ((float*)a.deta)[slot * a.T + first + i] = ((deta[i] + deta[C + i]) + (deta[2 * C + i] + deta[3 * C + i])) +
                                                       W[n * width + 2 + i] * y[4] + Z[2 + i] * y[5];
    }
    if (threadIdx.x < 4) {   // <R, S>, <R, M>, <N, S>, <N, M>
        float y = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) y += dots[threadIdx.x * WARPS + w];
        ends[threadIdx.x / 2 * width + threadIdx.x % 2] = y;
    }
}
