// Gradients of the queries of stick-breaking attention (stick.cuh): a block has N queries of a head.
//
//     G_tj = a_tj dout_t.v_j,   dz_ti = (1 - s_ti) G_ti - s_ti sum_{j < i} G_tj,   dq_t = scale sum_i dz_ti k_i
//
// Keys are gone through from the newest to where the stick is used up, and back from there. The rest before each tile,
// and the sum of G before it, are stored for stick_keys.cu.
#include "softmax_portable/stick.cuh"

constexpr int AT_STAGES = PAIR;
static_assert(AT_STAGES + 2 * PAIR == LA_SHARED, "linattn_np/softmax/cuda/stick_plan.py");

struct Worker : Rows16 {
    const StickArguments& s;
    const int head, pair;   // pair: of the launch
    const u32 shared;

    __device__ __forceinline__ Worker(const StickArguments& s, const Owner& own, int head, int pair, int i0)
        : Rows16(s.of, own, i0), s(s), head(head), pair(pair), shared(shared_address(shared_memory())) {}
    __device__ __forceinline__ u32 stage(int j0) const { return shared + AT_STAGES + (j0 / N & 1) * PAIR; }
    __device__ __forceinline__ void fill(int j0, int newest, bool values) const {
        if (j0 >= 0 && j0 <= newest) {
            fill_keys<LA_K, N, THREADS, KeyTile>(stage(j0), a, own, a.past_k, a.k, head, j0, own.T);
            if (values)
                fill_keys<LA_V, N, THREADS, ValueTile>(stage(j0) + AT_SECOND, a, own, a.past_v, a.v, head, j0, own.T);
        }
        copy_commit();
    }
    __device__ __forceinline__ void scores(float (&x)[N / 8][4], int j0) const {
        clear(x);
        multiply_rows<KeyTile, KeyTile>(x, shared, row0, stage(j0), 0, lane);
    }
    __device__ __forceinline__ void run() {
        const auto rows = [&](const Rows& x) {
            return [&](int r) -> const char* { return i0 + r < own.T ? own.token(x, head, i0 + r) : (const char*)0; };
        };
        fill_rows<LA_INPUT, LA_K, THREADS, KeyTile>(shared, 0, N, rows(a.q));
        fill_rows<LA_INPUT, LA_V, THREADS, ValueTile>(shared + AT_SECOND, 0, N, rows(a.dout));
        const int newest = newest_tile(a, own, i0);
        int j0 = newest;
        fill(j0, newest, false);
        for (; j0 >= 0; j0 -= N) {
            copy_wait<0>();
            if (!__syncthreads_or(!is_over())) break;
            fill(j0 - N, newest, false);
            float x[N / 8][4], shares[N / 8][4];
            scores(x, j0);
#pragma unroll
            for (int h = 0; h < 2; h++)
                if ((lane & 3) == 0) mark_of(s, pair, j0, query(h))->x = left[h];
            take(x, shares, j0);
        }
        copy_wait<0>();
        __syncthreads();
        const int oldest = j0 + N;
        if (threadIdx.x == 0) s.ends[pair * s.tiles + i0 / N] = oldest;
        float dq[WIDTH_K / 8][4], earlier[2] = {0.f, 0.f};
        clear(dq);
        fill(oldest, newest, true);
        for (j0 = oldest; j0 <= newest; j0 += N) {
            copy_wait<0>();
            __syncthreads();
            fill(j0 + N, newest, true);
            float x[N / 8][4], shares[N / 8][4], dp[N / 8][4];
            scores(x, j0);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float2* const mark = mark_of(s, pair, j0, query(h));
                left[h] = mark->x;
                __syncwarp();
                if ((lane & 3) == 0) mark->y = earlier[h];
            }
            take(x, shares, j0);
            clear(dp);
            multiply_rows<ValueTile, ValueTile>(dp, shared + AT_SECOND, row0, stage(j0) + AT_SECOND, 0, lane);
            give(x, shares, dp, earlier);
            multiply_weights<KeyTile>(dq, x, stage(j0), 0, lane);
        }
        copy_wait<0>();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (query(h) >= own.T) continue;
            char* const to = own.token(a.dq, head, query(h));
#pragma unroll
            for (int n = 0; n < WIDTH_K / 8; n++)
                store_two<LA_INPUT, LA_K>(to, n * 8 + (lane & 3) * 2, dq[n][2 * h] * a.scale,
                                          dq[n][2 * h + 1] * a.scale);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) stick_queries(const __grid_constant__ StickArguments s) {
    const int pair = blockIdx.x % s.pairs, of = s.first + pair, i0 = (s.tiles - 1 - (int)blockIdx.x / s.pairs) * N;
    const Owner own(s.of, of / s.of.heads, 0);
    if (i0 < own.T) Worker(s, own, of % s.of.heads, pair, i0).run();
}
