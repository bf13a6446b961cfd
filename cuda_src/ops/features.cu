// Features of rows x by products with a table W (LA_K, columns), all in bfloat16, and their transposes.
//
//     LA_WAVES 0   phi = e^{x W - square |x|^2 - less}                d = phi dphi;  dx = d W^T - 2 square (sum d) x
//     LA_WAVES 1   phi = size [sin(y W), cos(y W)], y = x / |x|       d = dphi_sin phi_cos - dphi_cos phi_sin;
//                                                                     dy = d W^T;  dx = (dy - y <y, dy>) / |x|
//
// Up to two arrays x (q and k) in one launch. Products of warps (mma.sync). Their sums have any order of channels and
// of columns, so a lane takes eight neighbours of a row in one load: channel 8 t + 2 s + e, t the lane in its quad, is
// what an operand has at place 2 t + e, or 2 t + 8 + e, of its product s. In features() W has two terms of bfloat16
// each, so that exponents and angles are exact.
#include "arguments/ops/FeaturesArguments.cuh"
#include "ops/narrow_rows.cuh"
#include "tile/mma_sync.cuh"
#include "tile/types.cuh"

constexpr int PARTS = (LA_K + 31) / 32, KP = 32 * PARTS;                      // of 32 channels, two products each
constexpr int pitch(int bytes) { return bytes % 128 ? bytes : bytes + 64; }   // quads of two rows: all banks
constexpr int WARPS = 8, TALL = 2 - LA_WAVES, ROWS = 16 * TALL * WARPS;       // features(): row tiles of a warp
constexpr int PITCH = pitch(2 * KP);                                          // of the table there
constexpr int COLUMNS = 128, PITCH_BACK = pitch(2 * COLUMNS);                 // features_vjp(): a tile of the table

LA_DEVICE float sum_of_quad(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
LA_DEVICE float most_of_quad(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
LA_DEVICE float power_for(float most) { return most > 1e15f ? 0x1p-75f : most > 0 && most < 1e-15f ? 0x1p75f : 1.f; }

// Rows g and g + 8 of a tile, g the quad of the lane: its channels, and what a row is multiplied by
struct TwoRows {
    uint4 x[PARTS][2];
    float square[2], factor[2];   // |factor x|^2; factor: 1 but for waves of very long or short rows

    __device__ __forceinline__ void load(const FeatureRows& a, i64 row, int quad) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const i64 n = row + 8 * h;
            const char* at = row_of(a, n < a.rows ? n : 0) + 16 * quad;
#pragma unroll
            for (int p = 0; p < PARTS; p++) x[p][h] = eight(at + 64 * p, n < a.rows && 32 * p + 8 * quad < LA_K);
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            factor[h] = 1;
            if constexpr (LA_WAVES) {
                float most = 0, now[8];
#pragma unroll
                for (int p = 0; p < PARTS; p++) {
                    floats_of(now, x[p][h]);
#pragma unroll
                    for (int i = 0; i < 8; i++) most = fmaxf(most, fabsf(now[i]));
                }
                factor[h] = power_for(most_of_quad(most));
            }
            float sum = 0, now[8];
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                floats_of(now, x[p][h]);
                if (LA_WAVES && factor[h] != 1) {
#pragma unroll
                    for (int i = 0; i < 8; i++) now[i] *= factor[h];
                    x[p][h] = packed(now);
                }
#pragma unroll
                for (int i = 0; i < 8; i++) sum += now[i] * now[i];
            }
            square[h] = sum_of_quad(sum);
        }
    }
    __device__ __forceinline__ float over_length(int h) const { return square[h] > 0 ? rsqrtf(square[h]) : 1.f; }
};
// operands of the two products of 16 places, of rows g and g + 8 and of a column
LA_DEVICE void multiply(float (&c)[4], const uint4& low, const uint4& high, const uint4& column) {
    const u32 a[4] = {low.x, high.x, low.y, high.y}, b[2] = {column.x, column.y};
    const u32 more_a[4] = {low.z, high.z, low.w, high.w}, more_b[2] = {column.z, column.w};
    mma_bf16(c, a, b);
    mma_bf16(c, more_a, more_b);
}
// the column of W that place g of an operand has in product j of four: 8 t + 2 j + e of results 2 t + e
LA_DEVICE int column_of(int g, int j) { return 8 * (g >> 1) + 2 * j + (g & 1); }

LA_DEVICE float exponential(float x) { return exp2_approx(x * 1.44269504089f); }
// with errors below 4e-7: Taylor polynomials of what is left of x without quarter turns, up to 2^16 of them
LA_DEVICE void sin_cos(float x, float& s, float& c) {
    const float n = rintf(x * 0.636619772f), r = fmaf(-n, 4.83826795e-4f, fmaf(-n, 1.5703125f, x)), z = r * r;
    const float sine = r + r * z * (-1.66666667e-1f + z * (8.33333333e-3f - z * 1.98412698e-4f));
    const float cosine = 1 + z * (-0.5f + z * (4.16666667e-2f + z * (-1.38888889e-3f + z * 2.48015873e-5f)));
    const int turns = (int)n & 3;
    const float first = turns & 1 ? cosine : sine, second = turns & 1 ? sine : cosine;
    s = turns & 2 ? -first : first;
    c = (turns + 1) & 2 ? -second : second;
}

// The array of a block, and its number among those of it
LA_DEVICE const FeatureRows& rows_of_block(const FeaturesArguments& a, u32& block) {
    const bool second = blockIdx.x >= a.first;
    block = blockIdx.x - (second ? a.first : 0);
    return a.of[second];
}

// A block: LA_TILE columns of W, in shared memory, and a.steps times ROWS rows. W: (2, columns up to a multiple of
// LA_TILE, KP), the two terms of W^T
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) features(const __grid_constant__ FeaturesArguments a) {
    extern __shared__ __align__(128) char memory[];
    u32 block;
    const FeatureRows& of = rows_of_block(a, block);
    const u32 tiles = (a.columns + LA_TILE - 1) / LA_TILE, tile = block % tiles;
    const i64 begin = (i64)(block / tiles) * (a.steps * ROWS);
    const int thread = threadIdx.x, warp = thread / 32, g = thread % 32 / 4, quad = thread % 4;
    for (int n = thread; n < 2 * LA_TILE * KP / 8; n += 32 * WARPS) {
        const int row = n / (KP / 8), part = n % (KP / 8), term = row / LA_TILE;
        const i64 from = (i64)term * tiles * LA_TILE + tile * LA_TILE + row % LA_TILE;
        *(uint4*)(memory + row * PITCH + 16 * part) = *(const uint4*)(a.W + (from * KP + 8 * part) * 2);
    }
    __syncthreads();
    for (u32 step = 0; step < a.steps; step++) {
        const i64 first = begin + step * ROWS + warp * 16 * TALL + g;
        if (begin + step * ROWS >= of.rows) break;
        TwoRows rows[TALL];
#pragma unroll
        for (int i = 0; i < TALL; i++) rows[i].load(of, first + 16 * i, quad);
#pragma unroll 1
        for (int column = 0; column < LA_TILE; column += 32) {
            float sums[TALL][4][4] = {};
            const char* at = memory + (column + column_of(g, 0)) * PITCH + 16 * quad;
#pragma unroll
            for (int p = 0; p < PARTS; p++)
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int term = 0; term < 2; term++) {
                        const uint4 w = *(const uint4*)(at + (term * LA_TILE + 2 * j) * PITCH + 64 * p);
#pragma unroll
                        for (int i = 0; i < TALL; i++) multiply(sums[i][j], rows[i].x[p][0], rows[i].x[p][1], w);
                    }
            const u32 own = tile * LA_TILE + column + 8 * quad;   // the first of eight columns
#pragma unroll
            for (int i = 0; i < TALL; i++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const i64 row = first + 16 * i + 8 * h;
                    if (row >= of.rows) continue;
                    char* to = of.phi + (row * a.width + own) * 2;
                    float y[8];
                    if constexpr (LA_WAVES) {
                        const float over = rows[i].over_length(h);
                        float other[8];
#pragma unroll
                        for (int n = 0; n < 8; n++) {
                            sin_cos(sums[i][n / 2][2 * h + n % 2] * over, y[n], other[n]);
                            y[n] *= a.size;
                            other[n] *= a.size;
                        }
                        if (own < a.columns) {
                            *(uint4*)to = packed(y);
                            *(uint4*)(to + 2 * a.columns) = packed(other);
                        }
                    } else {
                        const float less = a.square * rows[i].square[h] + a.less;
#pragma unroll
                        for (int n = 0; n < 8; n++)
                            y[n] = own + n < a.columns ? exponential(sums[i][n / 2][2 * h + n % 2] - less) : 0.f;
                        if (own < a.width) *(uint4*)to = packed(y);
                    }
                }
        }
    }
}

// A block: 16 rows a warp, all columns. W: (KP, columns up to a multiple of COLUMNS)
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2 - LA_WAVES)
    features_vjp(const __grid_constant__ FeaturesArguments a) {
    __shared__ __align__(16) char table[KP * PITCH_BACK];
    const int thread = threadIdx.x, warp = thread / 32, g = thread % 32 / 4, quad = thread % 4;
    u32 block;
    const FeatureRows& of = rows_of_block(a, block);
    const i64 first = (i64)block * 16 * WARPS + warp * 16 + g;
    const u32 tiles = (a.columns + COLUMNS - 1) / COLUMNS, count = LA_WAVES ? a.columns : a.width;
    float dy[PARTS][4][4] = {}, total[2] = {};
    for (u32 tile = 0; tile < tiles; tile++) {
        __syncthreads();
        for (int n = thread; n < KP * COLUMNS / 8; n += 32 * WARPS) {
            const int row = n / (COLUMNS / 8), part = n % (COLUMNS / 8);
            *(uint4*)(table + row * PITCH_BACK + 16 * part) =
                *(const uint4*)(a.W + (((i64)row * tiles + tile) * COLUMNS + 8 * part) * 2);
        }
        __syncthreads();
#pragma unroll 1
        for (int column = 0; column < COLUMNS; column += 32) {
            const u32 own = tile * COLUMNS + column + 8 * quad;
            uint4 d[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const i64 row = first + 8 * h;
                const bool valid = row < of.rows && own < count;
                const i64 at = valid ? (row * a.width + own) * 2 : 0;
                float x[8], y[8], product[8];
                floats_of(x, eight(of.phi + at, valid));
                floats_of(y, eight(of.dphi + at, valid));
                if constexpr (LA_WAVES) {
                    const i64 other = valid ? at + 2 * a.columns : 0;
                    float z[8], u[8];
                    floats_of(z, eight(of.phi + other, valid));
                    floats_of(u, eight(of.dphi + other, valid));
#pragma unroll
                    for (int n = 0; n < 8; n++) product[n] = y[n] * z[n] - u[n] * x[n];
                } else {
#pragma unroll
                    for (int n = 0; n < 8; n++) {
                        product[n] = x[n] * y[n];
                        total[h] += product[n];
                    }
                }
                d[h] = packed(product);
            }
            const char* at = table + column_of(g, 0) * PITCH_BACK + 2 * column + 16 * quad;
#pragma unroll
            for (int p = 0; p < PARTS; p++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    multiply(dy[p][j], d[0], d[1], *(const uint4*)(at + (32 * p + 2 * j) * PITCH_BACK));
        }
    }
    TwoRows rows;
    rows.load(of, first, quad);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const i64 row = first + 8 * h;
        const float over = rows.over_length(h), sum = 2 * a.square * sum_of_quad(total[h]);
        float x[8], along = 0;
        if constexpr (LA_WAVES) {
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                floats_of(x, rows.x[p][h]);
#pragma unroll
                for (int n = 0; n < 8; n++) along += x[n] * dy[p][n / 2][2 * h + n % 2];
            }
            along = sum_of_quad(along) * over * over;
        }
        if (row >= of.rows) continue;
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            floats_of(x, rows.x[p][h]);
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float now = dy[p][n / 2][2 * h + n % 2];
                x[n] = LA_WAVES ? (now - x[n] * along) * over * rows.factor[h] : now - sum * x[n];
            }
            if (32 * p + 8 * quad < LA_K) *(uint4*)(of.dx + (row * LA_K + 32 * p + 8 * quad) * 2) = packed(x);
        }
    }
}
