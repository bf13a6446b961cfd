// Gradients of keys and values of stick-breaking attention (stick.cuh): a block has N keys and goes over the blocks of
// queries that get to them, of one head after the other of those that share them.
//
//     dv_j = sum_t a_tj dout_t,   dk_j = scale sum_t dz_tj q_t
//
// LA_PASS: 1 dv, 2 dk, 3 both.
#include "softmax_portable/stick.cuh"

constexpr bool VALUES = LA_PASS & 1, WEIGHTS = LA_PASS & 2;
typedef Tile<N, BYTES> PairTile;
constexpr int AT_STAGES = PAIR, AT_SHARES = AT_STAGES + 2 * PAIR, AT_DZ = AT_SHARES + N * PairTile::ROW;
static_assert(AT_DZ + N * PairTile::ROW == LA_SHARED, "linattn_np/softmax/cuda/stick_plan.py");

// c += X^T B of 16 columns of the pairs X, from `column` on, and rows of B
template <class Y, int M> LA_DEVICE void multiply_columns(float (&c)[M][4], u32 x, int column, u32 b, int lane) {
    constexpr int RUN = Element::EXACT && N >= 32 ? 32 : 16;
#pragma unroll
    for (int first = 0; first < N; first += RUN) {
        typename Element::A p[RUN / 16];
#pragma unroll
        for (int t = 0; t < RUN; t += 16)
            p[t / 16] = Element::operand(load_a_columns<Element, PairTile>(x, first + t, column, lane));
#pragma unroll
        for (int m = 0; m < M; m += 2)
            add_products<Element::EXACT>(c, m, [&](float (&d)[4], float (&e)[4]) {
#pragma unroll
                for (int t = 0; t < RUN; t += 16) {
                    typename Element::B y[2];
                    load_b_columns<Element, Y>(y, b, first + t, m * 8, lane);
                    Element::multiply(d, p[t / 16], y[0]);
                    Element::multiply(e, p[t / 16], y[1]);
                }
            });
    }
}

struct Place {
    int head, i0;
};   // a block of queries of a head

struct Worker {
    const StickArguments& s;
    const PortableArguments& a;
    const Owner& own;
    const int first, pair, lane, row0, j0;   // first head of the group, and its pair of the launch
    const u32 shared;

    __device__ __forceinline__ Worker(const StickArguments& s, const Owner& own, int first, int pair, int j0)
        : s(s),
          a(s.of),
          own(own),
          first(first),
          pair(pair),
          lane(threadIdx.x & 31),
          row0((threadIdx.x >> 5) * 16),
          j0(j0),
          shared(shared_address(shared_memory())) {}
    __device__ __forceinline__ u32 stage(int step) const { return shared + AT_STAGES + (step & 1) * PAIR; }
    // the next block of queries from a place on that gets to these keys; head == shared: none
    __device__ __forceinline__ Place next(Place p) const {
        for (; p.head < a.shared; p = {p.head + 1, j0})
            for (; p.i0 < own.T; p.i0 += N)
                if (newest_tile(a, own, p.i0) >= j0 && s.ends[(pair + p.head) * s.tiles + p.i0 / N] <= j0) return p;
        return p;
    }
    __device__ __forceinline__ void fill(const Place& p, int step) const {
        if (p.head < a.shared) {
            const auto rows = [&](const Rows& x) {
                return [&](int r) -> const char* {
                    return p.i0 + r < own.T ? own.token(x, first + p.head, p.i0 + r) : (const char*)0;
                };
            };
            fill_rows<LA_INPUT, LA_K, THREADS, KeyTile>(stage(step), 0, N, rows(a.q));
            fill_rows<LA_INPUT, LA_V, THREADS, ValueTile>(stage(step) + AT_SECOND, 0, N, rows(a.dout));
        }
        copy_commit();
    }
    __device__ __forceinline__ void store_pairs(u32 to, const float (&x)[N / 8][4]) const {
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 at = to + PairTile::at(row0 + (lane >> 2) + 8 * h, n * 8 + (lane & 3) * 2);
                if constexpr (BYTES == 4) store_shared2(at, x[n][2 * h], x[n][2 * h + 1]);
                else store_shared_u32(at, pack_halves<LA_DTYPE>(x[n][2 * h], x[n][2 * h + 1]));
            }
    }
    // shares and dz of a block of queries with these keys, to shared memory
    __device__ __forceinline__ void make_pairs(const Place& p, int step) const {
        Rows16 rows(a, own, p.i0);
        float x[N / 8][4], shares[N / 8][4], dp[N / 8][4], earlier[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float2 mark = *mark_of(s, pair + p.head, j0, rows.query(h));
            rows.left[h] = mark.x;
            earlier[h] = mark.y;
        }
        clear(x);
        clear(dp);
        multiply_rows<KeyTile, KeyTile>(x, stage(step), row0, shared, 0, lane);
        rows.take(x, shares, j0);
        if constexpr (VALUES) store_pairs(shared + AT_SHARES, shares);
        if constexpr (!WEIGHTS) return;
        multiply_rows<ValueTile, ValueTile>(dp, stage(step) + AT_SECOND, row0, shared + AT_SECOND, 0, lane);
        rows.give(x, shares, dp, earlier);
        store_pairs(shared + AT_DZ, x);
    }
    __device__ __forceinline__ void run() {
        float dk[WEIGHTS ? WIDTH_K / 8 : 1][4], dv[VALUES ? WIDTH_V / 8 : 1][4];
        clear(dk);
        clear(dv);
        fill_keys<LA_K, N, THREADS, KeyTile>(shared, a, own, a.past_k, a.k, first, j0, own.T);
        fill_keys<LA_V, N, THREADS, ValueTile>(shared + AT_SECOND, a, own, a.past_v, a.v, first, j0, own.T);
        Place p = next({0, j0});
        fill(p, 0);
        for (int step = 0; p.head < a.shared; step++) {
            copy_wait<0>();
            __syncthreads();
            const Place later = next({p.head, p.i0 + N});
            fill(later, step + 1);
            make_pairs(p, step);
            __syncthreads();
            if constexpr (VALUES)
                multiply_columns<ValueTile>(dv, shared + AT_SHARES, row0, stage(step) + AT_SECOND, lane);
            if constexpr (WEIGHTS) multiply_columns<KeyTile>(dk, shared + AT_DZ, row0, stage(step), lane);
            p = later;
        }
        copy_wait<0>();
        if constexpr (WEIGHTS) store<LA_K>(a.dk, dk, a.scale);
        if constexpr (VALUES) store<LA_V>(a.dv, dv, 1.f);
    }
    template <int WIDTH, int M> __device__ __forceinline__ void store(const Rows& to, const float (&x)[M][4],
                                                                      float f) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int j = j0 + row0 + (lane >> 2) + 8 * h;
            if (j >= own.T) continue;
            char* const row = own.token(to, first / a.shared, j);
#pragma unroll
            for (int n = 0; n < M; n++)
                store_two<LA_INPUT, WIDTH>(row, n * 8 + (lane & 3) * 2, x[n][2 * h] * f, x[n][2 * h + 1] * f);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) stick_keys(const __grid_constant__ StickArguments s) {
    const int groups = s.pairs / s.of.shared, pair = blockIdx.x % groups * s.of.shared, of = s.first + pair,
              j0 = (int)blockIdx.x / groups * N;
    const Owner own(s.of, of / s.of.heads, 0);
    if (j0 < own.T) Worker(s, own, of % s.of.heads, pair, j0).run();
}
