// The outputs of stick-breaking attention (stick.cuh): a block has N queries of a head.
#include "softmax_portable/stick.cuh"

static_assert(AT_SECOND + 2 * PAIR == LA_SHARED, "linattn_np/softmax/cuda/stick_plan.py");

struct Worker : Rows16 {
    const int head;
    const u32 shared;

    __device__ __forceinline__ Worker(const PortableArguments& a, const Owner& own, int head, int i0)
        : Rows16(a, own, i0), head(head), shared(shared_address(shared_memory())) {}
    __device__ __forceinline__ u32 stage(int j0) const { return shared + AT_SECOND + (j0 / N & 1) * PAIR; }
    __device__ __forceinline__ void fill(int j0) const {
        if (j0 >= 0) {
            fill_keys<LA_K, N, THREADS, KeyTile>(stage(j0), a, own, a.past_k, a.k, head, j0, own.T);
            fill_keys<LA_V, N, THREADS, ValueTile>(stage(j0) + AT_SECOND, a, own, a.past_v, a.v, head, j0, own.T);
        }
        copy_commit();
    }
    __device__ __forceinline__ void run() {
        float out[WIDTH_V / 8][4];
        clear(out);
        const auto rows = [&](int r) -> const char* {
            return i0 + r < own.T ? own.token(a.q, head, i0 + r) : (const char*)0;
        };
        fill_rows<LA_INPUT, LA_K, THREADS, KeyTile>(shared, 0, N, rows);
        int j0 = newest_tile(a, own, i0);
        fill(j0);
        for (; j0 >= 0; j0 -= N) {
            copy_wait<0>();
            if (!__syncthreads_or(!is_over())) break;
            fill(j0 - N);
            float s[N / 8][4], shares[N / 8][4];
            clear(s);
            multiply_rows<KeyTile, KeyTile>(s, shared, row0, stage(j0), 0, lane);
            take(s, shares, j0);
            multiply_weights<ValueTile>(out, shares, stage(j0) + AT_SECOND, 0, lane);
        }
        copy_wait<0>();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (query(h) >= own.T) continue;
            char* const to = own.token(a.out, head, query(h));
#pragma unroll
            for (int n = 0; n < WIDTH_V / 8; n++)
                store_two<LA_INPUT, LA_V>(to, n * 8 + (lane & 3) * 2, out[n][2 * h], out[n][2 * h + 1]);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) stick_forward(const __grid_constant__ StickArguments s) {
    const int pair = s.first + blockIdx.x % s.pairs, i0 = (s.tiles - 1 - (int)blockIdx.x / s.pairs) * N;
    const Owner own(s.of, pair / s.of.heads, 0);
    if (i0 < own.T) Worker(s.of, own, pair % s.of.heads, i0).run();
}
