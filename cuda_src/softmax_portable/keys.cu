// Gradients of keys and values by products of warps: a block has ROWS keys and goes over the queries that read them, of
// one head after the other of those that share them.
//
//     dv_j = sum_i p_ij dout_i,   dk_j = scale sum_i dz_ij q_i      (queries.cu)
//
// LA_PASS: 1 dv, 2 dk, 3 both.
#include "softmax_portable/portable.cuh"

constexpr int ROWS = LA_ROWS, QUERIES = LA_KEYS, WARPS = ROWS / 16, THREADS = 32 * WARPS, BLOCK = 128;
constexpr bool VALUES = LA_PASS & 1, WEIGHTS = LA_PASS & 2;
typedef Tile<WIDTH_K, BYTES> KeyTile;
typedef Tile<WIDTH_V, BYTES> ValueTile;
constexpr int AT_VALUES = ROWS * KeyTile::ROW, AT_STAGES = AT_VALUES + ROWS * ValueTile::ROW,
              AT_DOUT = QUERIES * KeyTile::ROW;
constexpr int AT_DECAYS = AT_DOUT + QUERIES * ValueTile::ROW, AT_NUMBERS = AT_DECAYS + GATED * QUERIES * 16,
              STAGE = AT_NUMBERS + QUERIES * 8;
static_assert(AT_STAGES + 2 * STAGE == LA_SHARED, "linattn_np/softmax/cuda/portable_plan.py");
static_assert(BLOCK % ROWS == 0 && BLOCK % QUERIES == 0, "blocks of the gates are whole tiles");

struct Worker {
    const PortableArguments& a;
    const Owner& own;
    const int group, lane, warp, row0, j0, keys;   // group: of heads that share keys and values; keys: that are read
    const u32 shared;
    int begin, tiles, steps;   // first query; tiles of queries, of a head and of all
    float near[2], far[2];     // sums of dz
    Decays decays[2];

    __device__ __forceinline__ Worker(const PortableArguments& a, const Owner& own, int group, int j0)
        : a(a),
          own(own),
          group(group),
          lane(threadIdx.x & 31),
          warp(threadIdx.x >> 5),
          row0(warp * 16),
          j0(j0),
          keys(own.keys(a)),
          shared(shared_address(shared_memory())) {
        begin = a.causal ? j0 / QUERIES * QUERIES : 0;
        const int end = a.causal ? (int)min((i64)own.T, (i64)min(j0 + ROWS, own.Tk) - 1 + a.window) : own.T;
        tiles = max(end - begin + QUERIES - 1, 0) / QUERIES;
        steps = tiles * a.shared;
    }
    __device__ __forceinline__ int key(int h) const { return j0 + row0 + (lane >> 2) + 8 * h; }
    __device__ __forceinline__ int head(int step) const { return group * a.shared + step / tiles; }
    __device__ __forceinline__ int first(int step) const { return begin + step % tiles * QUERIES; }
    __device__ __forceinline__ u32 stage(int step) const { return shared + AT_STAGES + (step & 1) * STAGE; }
    __device__ __forceinline__ void fill(int step) const {
        if (step < steps) {
            const int of = head(step), i0 = first(step);
            const auto rows = [&](const Rows& x) {
                return [&, of, i0](int r) -> const char* {
                    return i0 + r < own.T ? own.token(x, of, i0 + r) : (const char*)0;
                };
            };
            fill_rows<LA_INPUT, LA_K, THREADS, KeyTile>(stage(step), 0, QUERIES, rows(a.q));
            fill_rows<LA_INPUT, LA_V, THREADS, ValueTile>(stage(step) + AT_DOUT, 0, QUERIES, rows(a.dout));
            for (int r = threadIdx.x; r < QUERIES; r += THREADS) {
                const i64 n = own.number(a, of, min(i0 + r, own.T - 1));
                copy_in<4>(stage(step) + AT_NUMBERS + r * 8, a.logs + n, true);
                copy_in<4>(stage(step) + AT_NUMBERS + r * 8 + 4, a.normalize ? a.dots + n : a.logs + n, a.normalize);
                if constexpr (GATED) copy_in<16>(stage(step) + AT_DECAYS + r * 16, (const Decays*)a.readers + n, true);
            }
        }
        copy_commit();
    }
    // the weights of a tile in s, from scores, and in dp dz
    __device__ __forceinline__ void finish(float (&s)[QUERIES / 8][4], float (&dp)[QUERIES / 8][4], int step) {
        const float c = a.scale * LOG2_E;
        const int i0 = first(step);
        const bool is_near = i0 / BLOCK == j0 / BLOCK;
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int h = e >> 1, r = n * 8 + (lane & 3) * 2 + (e & 1), i = i0 + r, j = key(h);
                const float2 numbers = load_shared2(stage(step) + AT_NUMBERS + r * 8);
                float z = s[n][e] * c;
                if constexpr (GATED) z += decay_between(load_decays(stage(step) + AT_DECAYS + r * 16), decays[h]);
                const bool read = j < keys && i < own.T && (!a.causal || (i - j >= a.causal - 1 && i - j < a.window));
                s[n][e] = read ? exp2_approx(z - numbers.x) : 0.f;
                if constexpr (WEIGHTS) {
                    dp[n][e] = read ? s[n][e] * (dp[n][e] - numbers.y) : 0.f;
                    if constexpr (GATED) (is_near ? near[h] : far[h]) += dp[n][e];
                }
            }
    }
    __device__ __forceinline__ void begin_head(int step) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            near[h] = far[h] = 0.f;
            decays[h] = ((const Decays*)a.sums)[own.number(a, head(step), min(key(h), own.Tk - 1))];
        }
    }
    __device__ __forceinline__ void end_head(int step) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float x = row_sum(near[h]), y = row_sum(far[h]);
            if ((lane & 3) || key(h) >= own.Tk) continue;
            const i64 n = own.number(a, head(step), key(h));
            a.near[n] = x;
            a.far[n] = y;
        }
    }
    __device__ __forceinline__ void run() {
        float dk[WEIGHTS ? WIDTH_K / 8 : 1][4], dv[VALUES ? WIDTH_V / 8 : 1][4];
        clear(dk);
        clear(dv);
        const int head0 = group * a.shared;
        fill_keys<LA_K, ROWS, THREADS, KeyTile>(shared, a, own, a.past_k, a.k, head0, j0, own.Tk);
        fill_keys<LA_V, ROWS, THREADS, ValueTile>(shared + AT_VALUES, a, own, a.past_v, a.v, head0, j0, own.Tk);
        fill(0);
        for (int step = 0; step < steps; step++) {
            copy_wait<0>();
            __syncthreads();
            fill(step + 1);
            if (GATED && step % tiles == 0) begin_head(step);
            float s[QUERIES / 8][4], dp[QUERIES / 8][4];
            clear(s);
            clear(dp);
            multiply_rows<KeyTile, KeyTile>(s, shared, row0, stage(step), 0, lane);
            if constexpr (WEIGHTS)
                multiply_rows<ValueTile, ValueTile>(dp, shared + AT_VALUES, row0, stage(step) + AT_DOUT, 0, lane);
            finish(s, dp, step);
            if constexpr (VALUES) multiply_weights<ValueTile>(dv, s, stage(step) + AT_DOUT, 0, lane);
            if constexpr (WEIGHTS) multiply_weights<KeyTile>(dk, dp, stage(step), 0, lane);
            if (GATED && WEIGHTS && step % tiles == tiles - 1) end_head(step);
        }
        copy_wait<0>();
        if constexpr (WEIGHTS) store<LA_K>(a.dk, dk, a.scale);
        if constexpr (VALUES) store<LA_V>(a.dv, dv, 1.f);
    }
    template <int WIDTH, int N> __device__ __forceinline__ void store(const Rows& to, const float (&x)[N][4],
                                                                      float f) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (key(h) >= own.Tk) continue;
            char* const row = own.token(to, group, key(h));
#pragma unroll
            for (int n = 0; n < N; n++)
                store_two<LA_INPUT, WIDTH>(row, n * 8 + (lane & 3) * 2, x[n][2 * h] * f, x[n][2 * h + 1] * f);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) portable_keys(const __grid_constant__ PortableArguments a) {
    const int groups = a.heads / a.shared, pairs = a.sequences * groups, pair = blockIdx.x % pairs,
              j0 = (int)blockIdx.x / pairs * ROWS;
    const Owner own(a, pair / groups, 0);
    if (j0 < own.Tk) Worker(a, own, pair % groups, j0).run();
}
