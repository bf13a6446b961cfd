// Gradients of the queries by products of warps: a block has ROWS queries of a head and goes over their keys, the
// furthest first.
//
//     p_ij = 2^(z_ij - l_i),   dz_ij = p_ij (dout_i.v_j - dout_i.out_i),   dq_i = scale sum_j dz_ij k_j
//
// It stores dots = dout_i.out_i, which keys.cu reads; with gates sums of dz too, as arguments.py has them.
#include "softmax_portable/portable.cuh"
#include "tile/reduce.cuh"

constexpr int ROWS = LA_ROWS, KEYS = LA_KEYS, WARPS = ROWS / 16, THREADS = 32 * WARPS, BLOCK = 128;
typedef Tile<WIDTH_K, BYTES> KeyTile;
typedef Tile<WIDTH_V, BYTES> ValueTile;
constexpr int AT_DOUT = ROWS * KeyTile::ROW, AT_STAGES = AT_DOUT + ROWS * ValueTile::ROW, AT_V = KEYS * KeyTile::ROW;
constexpr int AT_DECAYS = AT_V + KEYS * ValueTile::ROW, STAGE = AT_DECAYS + GATED * KEYS * 16,
              AT_TOTALS = AT_STAGES + 2 * STAGE;
static_assert(AT_TOTALS + 2 * WARPS * 4 == LA_SHARED, "linattn_np/softmax/cuda/portable_plan.py");
static_assert(BLOCK % ROWS == 0 && BLOCK % KEYS == 0, "blocks of the gates are whole tiles");

// Where the sum over all keys before a block of tokens is stored
LA_DEVICE float* crossing_of(const PortableArguments& a, int pair, int i0, int block) {
    return a.crossing + (((i64)pair * (BLOCK / ROWS) + i0 % BLOCK / ROWS) * a.blocks + i0 / BLOCK) * a.blocks + block;
}

struct Worker {
    const PortableArguments& a;
    const Owner& own;
    const int head, pair, lane, warp, row0, i0;
    const u32 shared;
    int begin, end;
    float log[2], dot[2], sum[2], total;   // of the lane's two rows; of all its pairs
    Decays decays[2];

    __device__ __forceinline__ Worker(const PortableArguments& a, const Owner& own, int head, int pair, int i0)
        : a(a),
          own(own),
          head(head),
          pair(pair),
          lane(threadIdx.x & 31),
          warp(threadIdx.x >> 5),
          row0(warp * 16),
          i0(i0),
          shared(shared_address(shared_memory())),
          total(0.f) {
        begin = a.causal ? max(i0 - a.window + 1, 0) / KEYS * KEYS : 0;
        end = a.causal ? min(min(i0 + ROWS, own.T), own.Tk) : own.keys(a);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const i64 n = own.number(a, head, min(query(h), own.T - 1));
            log[h] = a.logs[n];
            dot[h] = a.normalize ? dot_of(h) : 0.f;
            if (a.normalize && query(h) < own.T && (lane & 3) == 0) a.dots[n] = dot[h];
            sum[h] = 0.f;
            if constexpr (GATED) decays[h] = ((const Decays*)a.readers)[n];
        }
    }
    __device__ __forceinline__ int query(int h) const { return i0 + row0 + (lane >> 2) + 8 * h; }
    __device__ __forceinline__ float dot_of(int h) const {
        const int t = min(query(h), own.T - 1);
        const char *const x = own.token(a.out, head, t), *const y = own.token(a.dout, head, t);
        float found = 0.f;
        for (int c = lane & 3; c < LA_V; c += 4) found += element_at<LA_INPUT>(x, c) * element_at<LA_INPUT>(y, c);
        return row_sum(found);
    }
    __device__ __forceinline__ u32 stage(int step) const { return shared + AT_STAGES + (step & 1) * STAGE; }
    __device__ __forceinline__ void fill(int step) const {
        const int j0 = begin + step * KEYS;
        if (j0 < end) {
            fill_keys<LA_K, KEYS, THREADS, KeyTile>(stage(step), a, own, a.past_k, a.k, head, j0, end);
            fill_keys<LA_V, KEYS, THREADS, ValueTile>(stage(step) + AT_V, a, own, a.past_v, a.v, head, j0, end);
            if constexpr (GATED)
                for (int r = threadIdx.x; r < KEYS; r += THREADS)
                    copy_in<16>(stage(step) + AT_DECAYS + r * 16,
                                (const Decays*)a.sums + own.number(a, head, min(j0 + r, own.Tk - 1)), true);
        }
        copy_commit();
    }
    // dz of a tile in s, from scores; dp: dout.v
    __device__ __forceinline__ void finish(float (&s)[KEYS / 8][4], const float (&dp)[KEYS / 8][4], int step) {
        const float c = a.scale * LOG2_E;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int h = e >> 1, r = n * 8 + (lane & 3) * 2 + (e & 1), j = begin + step * KEYS + r, i = query(h);
                float z = s[n][e] * c;
                if constexpr (GATED) z += decay_between(decays[h], load_decays(stage(step) + AT_DECAYS + r * 16));
                const bool read = j < end && i < own.T && (!a.causal || (i - j >= a.causal - 1 && i - j < a.window));
                s[n][e] = read ? exp2_approx(z - log[h]) * (dp[n][e] - dot[h]) : 0.f;
                if constexpr (GATED) sum[h] += s[n][e];
            }
        if constexpr (GATED) total = sum[0] + sum[1];
    }
    __device__ __forceinline__ float* crossing(int block) const { return crossing_of(a, pair, i0, block); }
    __device__ __forceinline__ void run() {
        float dq[WIDTH_K / 8][4];
        clear(dq);
        const auto rows = [&](const Rows& x) {
            return [&](int r) -> const char* { return i0 + r < own.T ? own.token(x, head, i0 + r) : (const char*)0; };
        };
        fill_rows<LA_INPUT, LA_K, THREADS, KeyTile>(shared, 0, ROWS, rows(a.q));
        fill_rows<LA_INPUT, LA_V, THREADS, ValueTile>(shared + AT_DOUT, 0, ROWS, rows(a.dout));
        fill(0);
        float* const totals = (float*)(shared_memory() + AT_TOTALS);
        if constexpr (GATED)
            for (int block = threadIdx.x; block < i0 / BLOCK && block * BLOCK <= begin; block += THREADS)
                *crossing(block) = 0.f;
        for (int step = 0; begin + step * KEYS < end; step++) {
            const int j0 = begin + step * KEYS;
            const bool crosses = GATED && j0 % BLOCK == 0 && j0 / BLOCK < i0 / BLOCK && step;
            float* const parts = totals + (j0 / BLOCK & 1) * WARPS;
            if (crosses) {
                const float x = warp_sum(total);
                if (lane == 0) parts[warp] = x;
            }
            copy_wait<0>();
            __syncthreads();
            fill(step + 1);
            if (crosses && threadIdx.x == 0) {
                float x = 0.f;
                for (int w = 0; w < WARPS; w++) x += parts[w];
                *crossing(j0 / BLOCK) = x;
            }
            float s[KEYS / 8][4], dp[KEYS / 8][4];
            clear(s);
            clear(dp);
            multiply_rows<KeyTile, KeyTile>(s, shared, row0, stage(step), 0, lane);
            multiply_rows<ValueTile, ValueTile>(dp, shared + AT_DOUT, row0, stage(step) + AT_V, 0, lane);
            finish(s, dp, step);
            multiply_weights<KeyTile>(dq, s, stage(step), 0, lane);
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if constexpr (GATED) sum[h] = row_sum(sum[h]);
            if (query(h) >= own.T) continue;
            char* const to = own.token(a.dq, head, query(h));
#pragma unroll
            for (int n = 0; n < WIDTH_K / 8; n++)
                store_two<LA_INPUT, LA_K>(to, n * 8 + (lane & 3) * 2, dq[n][2 * h] * a.scale,
                                          dq[n][2 * h + 1] * a.scale);
            if (GATED && (lane & 3) == 0) a.rows[own.number(a, head, query(h))] = sum[h];
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) portable_queries(const __grid_constant__ PortableArguments a) {
    const int pairs = a.sequences * a.heads, pair = blockIdx.x % pairs,
              i0 = (a.tiles - 1 - (int)blockIdx.x / pairs) * ROWS;   // those with most keys first
    const Owner own(a, pair / a.heads, 0);
    if (i0 < own.T) return Worker(a, own, pair % a.heads, pair, i0).run();
    if constexpr (GATED)   // a part of a block that has no queries
        for (int block = threadIdx.x; block < i0 / BLOCK; block += THREADS) *crossing_of(a, pair, i0, block) = 0.f;
}
