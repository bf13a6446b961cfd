// The reads of a recurrence, 16 value columns a warp: forward w_t (with a free rank-one term), or LA_BACK 1
// from the last token to the first dv_t, dw_t and the gradient of the first state. tiles.cuh has the equations.
#include "token/tiles.cuh"
#include "tile/columns.cuh"

#ifndef LA_BACK
#define LA_BACK 0
#endif
#ifndef LA_BONUS
#define LA_BONUS 0
#endif
typedef Columns<K, 4, 4, 1, 1> State;
typedef RowVector<K, State::GROUPS> Vector;
constexpr int WIDTH = 128, VECTORS = 3 + 2 * LA_ERASE;   // value columns of a block; q, k, e^g, a, b

struct Block {
    const RecurrenceArguments& a;
    const Place& at;
    float* shared;   // of each vector TOKENS rows of keys; the same of v or dO; u
    int column, lane;
    __device__ __forceinline__ float* vectors(int n) const { return shared + n * TOKENS * KEYS; }
    __device__ __forceinline__ float* values() const { return vectors(VECTORS); }
    __device__ __forceinline__ void load(int token, int part) const {
        if (LA_BACK) load_vectors<KEYS>(vectors(0), a.q, at, token, 0);
        load_vectors<KEYS>(vectors(1), a.k, at, token, 0);
        load_decays<KEYS>(vectors(2), a.g, at, token, 0);
        if constexpr (LA_ERASE) {
            load_vectors<KEYS>(vectors(3), a.a, at, token, 0);
            load_vectors<KEYS>(vectors(4), a.b, at, token, 0);
        }
        const Rows& x = LA_BACK ? a.dout : a.v;
        load_tile<KIND, WIDTH, V>(values(), rows_of(x, at.s, at.head), x.token, token, at.s.T, WIDTH * part,
                                  LA_BACK ? a.scale : 1.f);
    }
    __device__ __forceinline__ Vector vector(int n, int row) const {
        Vector y;
        const float* from = vectors(n) + row * KEYS + 4 * (lane / 4);
#pragma unroll
        for (int i = 0; i < Vector::N / 4; i++) {
            const float4 x = *(const float4*)(from + i * Vector::SPAN);
            y.x[4 * i] = x.x;
            y.x[4 * i + 1] = x.y;
            y.x[4 * i + 2] = x.z;
            y.x[4 * i + 3] = x.w;
        }
        return y;
    }
    static __device__ __forceinline__ void one_by_one() {
        asm volatile("" ::: "memory");
    }   // vectors are loaded when needed: registers
    // a lane's columns of a token
    template <int KIND_> __device__ __forceinline__ void store(char* dense, int token, const float (&x)[4]) const {
        if (lane >= 4 || token >= at.s.T) return;
        char* const to = dense + at.row(a, token) * V * bytes_of(KIND_);
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (column + j < V) store_element<KIND_>(to + (column + j) * bytes_of(KIND_), x[j]);
    }
    __device__ __forceinline__ void forward(State& S, int token, int row, const float (&v)[4]) const {
        CrossWarpSum<1, 4> one = {nullptr, 0, 0, 0};
        float w[4];
        S.dot<true>(w, vector(3, row), one, lane);
        one_by_one();
        S.scale_rows(vector(2, row));
        one_by_one();
        S.add_outer(vector(1, row), v);
        one_by_one();
        S.add_outer(vector(4, row), w);
        store<2>(a.w, token, w);
    }
    __device__ __forceinline__ void backward(State& G, int token, int row, const float (&dout)[4]) const {
        CrossWarpSum<1, 4> one = {nullptr, 0, 0, 0};
        float dv[4], dw[4];
        const Vector q = vector(0, row), k = vector(1, row);
        if (!LA_BEFORE) G.add_outer(q, dout);
        G.dot<true>(dv, k, one, lane);
        if constexpr (LA_BONUS) {
            float own = 0.f;
            for (int i = lane; i < K; i += 32)
                own += vectors(0)[row * KEYS + i] * vectors(1)[row * KEYS + i] * a.u[at.head / a.group_u * K + i];
            own = warp_sum(own);
#pragma unroll
            for (int j = 0; j < 4; j++) dv[j] += own * dout[j];
        }
        store<KIND>(a.dv.data, token, dv);
        if constexpr (LA_ERASE) {
            G.dot<true>(dw, vector(4, row), one, lane);
            store<2>(a.dw, token, dw);
        }
        G.scale_rows(vector(2, row));
        if (LA_BEFORE) G.add_outer(q, dout);
        if constexpr (LA_ERASE) G.add_outer(vector(3, row), dw);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS) values(const __grid_constant__ RecurrenceArguments a) {
    extern __shared__ __align__(16) float shared[];
    constexpr int PARTS = VALUES / WIDTH;
    const int part = blockIdx.x % PARTS, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const Place at(a, blockIdx.x / PARTS);
    const int tile = WIDTH * part + 16 * warp;
    const Block block = {a, at, shared, tile + State::first(lane), lane};
    State S;
    S.clear();
    const i64 slot = blockIdx.x / PARTS;
    const bool some = tile < V;
    if (a.start && some) {
        if (V % 4 == 0) S.load<0, 2>(a.start + slot * K * V + tile, V, V - tile, lane);
        else
            S.each([&](int r, int j, float& y) {
                const int d = (r >> 2) * State::SPAN + (r & 3) + lane / 4 * 4;
                if (d < K && block.column + j < V) y = a.start[slot * K * V + d * V + block.column + j];
            });
    }
    const int tiles = (at.s.T + TOKENS - 1) / TOKENS;
    for (int n = 0; n < tiles; n++) {
        const int token = (LA_BACK ? tiles - 1 - n : n) * TOKENS;
        __syncthreads();
        block.load(token, part);
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i < TOKENS; i++) {
            const int row = LA_BACK ? TOKENS - 1 - i : i;
            const float4 x = *(const float4*)(block.values() + row * WIDTH + 16 * warp + State::first(lane));
            const float y[4] = {x.x, x.y, x.z, x.w};
            if constexpr (LA_BACK) block.backward(S, token + row, row, y);
            else block.forward(S, token + row, row, y);
        }
    }
    if (!LA_BACK || !some) return;
    if (V % 4 == 0) S.store<0, 2>(a.end + slot * K * V + tile, V, V - tile, lane);
    else
        S.each([&](int r, int j, float& y) {
            const int d = (r >> 2) * State::SPAN + (r & 3) + lane / 4 * 4;
            if (d < K && block.column + j < V) a.end[slot * K * V + d * V + block.column + j] = y;
        });
}
