// Gradients of a recurrence's vectors, 32 key channels a block: given w and dw, rows of S and of G are recurrences
// apart. A lane has a channel, a warp a slice of the values. Reads of the state after token t are counted with t:
// a_(t+1) with the cotangent dw_(t+1), and with LA_BEFORE q_(t+1) with dO_(t+1), where else q_t and dO_t stand. With
// S~_t = e^{g_t} S_(t-1), and R_t now the gradient after all of these readers:
//
//     dq = S~_t dO + <dO, v_t> k_t + <dO, w_t> b_t     dk_t = R_t v_t + <dO, v_t> q + <dw, v_t> a
//     R_(t-1) = e^{g_t} (R_t + q^T dO + a^T dw)
//     da = S~_t dw + <dw, v_t> k_t + <dw, w_t> b_t        db_t = R_t w_t + <dO, w_t> q + <dw, w_t> a
//     P_t = <S~_t, R_t>     dg_t = P_t + q (S~_t dO) + a (S~_t dw)
//     P_(t-1) = dg_t - k_(t-1) (R_(t-1) v_(t-1)) - b_(t-1) (R_(t-1) w_(t-1))
//
// channel by channel, P anew at every mark: nothing is in dg that no decay has crossed. Forward dq and da, and S~ at
// marks; LA_BACK 1 dk, db, dg. Readers of the first state are counted with a token before the first one, which writes
// nothing.
#include "token/tiles.cuh"

#ifndef LA_BACK
#define LA_BACK 0
#endif
#ifndef LA_MARK   // tokens from one mark to the next
#define LA_MARK 128
#endif
constexpr int EARLY = LA_BEFORE || LA_ERASE;   // 1: with a token before the first
constexpr int SLICE = VALUES / WARPS, CHANNELS = 32,
              EACH = TOKENS * CHANNELS / THREADS;   // of a warp; of a block; outputs of a thread
constexpr int ROW = TOKENS * VALUES, CELLS = TOKENS * CHANNELS, PAIRS = 1 + LA_ERASE;
static_assert(LA_MARK % TOKENS == 0 && EACH >= 1, "marks are at ends of tiles");
// v, dO (w, dw); q, k, e^g (a, b) of the channels; <dO, v> (<dO, w>, <dw, v>, <dw, w>); sums of the slices; P
constexpr int AT_V = 0, AT_DOUT = ROW, AT_W = 2 * ROW, AT_DW = 3 * ROW, AT_Q = 2 * PAIRS * ROW, AT_K = AT_Q + CELLS,
              AT_DECAY = AT_K + CELLS;
constexpr int AT_A = AT_DECAY + CELLS, AT_B = AT_A + CELLS, AT_OWN = AT_Q + (3 + 2 * LA_ERASE) * CELLS,
              AT_SUMS = AT_OWN + 4 * TOKENS;
constexpr int AT_H = AT_SUMS + PAIRS * WARPS * CELLS;
static_assert(LA_SHARED == 4 * (AT_H + CHANNELS), "LA_SHARED is the size that the launch requests");

typedef float Values[SLICE];

struct Block {
    const RecurrenceArguments& a;
    const Place& at;
    float* shared;
    int channel, warp, lane;   // the block's first channel
    i64 slot;

    __device__ __forceinline__ void load(int token) const {
        load_tile<KIND, VALUES, V>(shared + AT_V, rows_of(a.v, at.s, at.head), a.v.token, token, at.s.T, 0, 1.f);
        load_tile<KIND, VALUES, V>(shared + AT_DOUT, rows_of(a.dout, at.s, at.head), a.dout.token, token + LA_BEFORE,
                                   at.s.T, 0, a.scale);
        if constexpr (LA_ERASE) {
            const i64 step = (i64)a.heads * V * 4;
            load_tile<2, VALUES, V>(shared + AT_W, a.w + at.row(a, 0) * V * 4, step, token, at.s.T, 0, 1.f);
            load_tile<2, VALUES, V>(shared + AT_DW, a.dw + at.row(a, 0) * V * 4, step, token + 1, at.s.T, 0, 1.f);
            load_vectors<CHANNELS>(shared + AT_A, a.a, at, token + 1, channel);
            load_vectors<CHANNELS>(shared + AT_B, a.b, at, token, channel);
        }
        load_vectors<CHANNELS>(shared + AT_Q, a.q, at, token + LA_BEFORE, channel);
        load_vectors<CHANNELS>(shared + AT_K, a.k, at, token, channel);
        load_decays<CHANNELS>(shared + AT_DECAY, a.g, at, token, channel);
    }
    __device__ __forceinline__ float product(int one, int other, int t) const {
        float x = 0.f;
        for (int i = lane; i < VALUES; i += 32) x += shared[one + t * VALUES + i] * shared[other + t * VALUES + i];
        return warp_sum(x);
    }
    // <dO, v> and the others of every token, by a warp
    __device__ __forceinline__ void own_products() const {
        for (int t = warp; t < TOKENS; t += WARPS)
#pragma unroll
            for (int n = 0; n < PAIRS * PAIRS; n++) {
                const float x = product(n & 2 ? AT_DW : AT_DOUT, n & 1 ? AT_W : AT_V, t);
                if (lane == 0) shared[AT_OWN + n * TOKENS + t] = x;
            }
    }
    __device__ __forceinline__ float own(int n, int t) const { return shared[AT_OWN + n * TOKENS + t]; }
    __device__ __forceinline__ float cell(int at_cell, int t) const { return shared[at_cell + t * CHANNELS + lane]; }
    // a warp's slice of a row of values
    __device__ __forceinline__ float4 values(int at_row, int t, int i) const {
        return *(const float4*)(shared + at_row + t * VALUES + warp * SLICE + i);
    }
    __device__ __forceinline__ float dot(const Values& S, int at_row, int t) const {
        float x = 0.f, y = 0.f;
#pragma unroll
        for (int i = 0; i < SLICE; i += 4) {
            const float4 v = values(at_row, t, i);
            x = fmaf(S[i], v.x, fmaf(S[i + 1], v.y, x));
            y = fmaf(S[i + 2], v.z, fmaf(S[i + 3], v.w, y));
        }
        return x + y;
    }
    __device__ __forceinline__ void add(Values& S, float k, int at_row, int t) const {
#pragma unroll
        for (int i = 0; i < SLICE; i += 4) {
            const float4 v = values(at_row, t, i);
            S[i] = fmaf(k, v.x, S[i]);
            S[i + 1] = fmaf(k, v.y, S[i + 1]);
            S[i + 2] = fmaf(k, v.z, S[i + 2]);
            S[i + 3] = fmaf(k, v.w, S[i + 3]);
        }
    }
    __device__ __forceinline__ void scale(Values& S, float e) const {
#pragma unroll
        for (int i = 0; i < SLICE; i++) S[i] *= e;
    }
    __device__ __forceinline__ void keep(int n, int t, float x) const {
        shared[AT_SUMS + (n * WARPS + warp) * CELLS + t * CHANNELS + lane] = x;
    }
    __device__ __forceinline__ float sum(int n, int cell) const {
        float x = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) x += shared[AT_SUMS + (n * WARPS + w) * CELLS + cell];
        return x;
    }
    // f(element, its number, at) for a lane's channel and slice of a state in memory
    template <class F> __device__ __forceinline__ void each(Values& S, F f) const {
        const int d = channel + lane;
#pragma unroll
        for (int i = 0; i < SLICE; i++)
            if (d < K && warp * SLICE + i < V) f(S[i], (i64)d * V + warp * SLICE + i);
    }
    // the decay, the readers, and the values that the token writes
    __device__ __forceinline__ void read(Values& S, int t) const {
        scale(S, cell(AT_DECAY, t));
        keep(0, t, dot(S, AT_DOUT, t));
        if constexpr (LA_ERASE) keep(1, t, dot(S, AT_DW, t));
    }
    __device__ __forceinline__ void write(Values& S, int t) const {
        add(S, cell(AT_K, t), AT_V, t);
        if constexpr (LA_ERASE) add(S, cell(AT_B, t), AT_W, t);
    }
    __device__ __forceinline__ void reverse(Values& R, int t) const {
        keep(0, t, dot(R, AT_V, t));
        if constexpr (LA_ERASE) keep(1, t, dot(R, AT_W, t));
        add(R, cell(AT_Q, t), AT_DOUT, t);
        if constexpr (LA_ERASE) add(R, cell(AT_A, t), AT_DW, t);
        scale(R, cell(AT_DECAY, t));
    }
    // dq and da of a tile, and their terms of dg
    __device__ __forceinline__ void store_reads(int token) const {
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            const int cell = threadIdx.x + n * THREADS, t = cell / CHANNELS, d = channel + cell % CHANNELS,
                      of = token + t;
            if (d >= K) continue;
            const float x = sum(0, cell), k = shared[AT_K + cell];
            float dots = shared[AT_Q + cell] * x, dq = x + own(0, t) * k;
            if constexpr (LA_ERASE) {
                const float y = sum(1, cell), b = shared[AT_B + cell];
                dq += own(1, t) * b;
                dots += shared[AT_A + cell] * y;
                if (of + 1 < at.s.T)
                    store_element<KIND>(a.da.data + (at.row(a, of + 1) * K + d) * bytes_of(KIND),
                                        y + own(2, t) * k + own(3, t) * b);
            }
            if (of + LA_BEFORE >= 0 && of + LA_BEFORE < at.s.T)
                store_element<KIND>(a.dq.data + (at.row(a, of + LA_BEFORE) * K + d) * bytes_of(KIND), dq);
            if (of >= 0 && of < at.s.T) a.dots[at.row(a, of) * K + d] = dots;
        }
    }
    // dk and db of a tile; their terms of dg overwrite the first sums
    __device__ __forceinline__ void store_writes(int token) const {
        float y[EACH];
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            const int cell = threadIdx.x + n * THREADS, t = cell / CHANNELS, d = channel + cell % CHANNELS,
                      of = token + t;
            const float x = sum(0, cell), q = shared[AT_Q + cell];
            const bool valid = of >= 0 && of < at.s.T && d < K;
            const i64 to = (at.row(a, of) * K + d) * bytes_of(KIND);
            float dk = x + own(0, t) * q;
            y[n] = shared[AT_K + cell] * x;
            if constexpr (LA_ERASE) {
                const float z = sum(1, cell), reader = shared[AT_A + cell];
                y[n] += shared[AT_B + cell] * z;
                dk += own(2, t) * reader;
                if (valid) store_element<KIND>(a.db.data + to, z + own(1, t) * q + own(3, t) * reader);
            }
            if (valid) store_element<KIND>(a.dk.data + to, dk);
        }
        __syncthreads();
#pragma unroll
        for (int n = 0; n < EACH; n++) shared[AT_SUMS + threadIdx.x + n * THREADS] = y[n];
        __syncthreads();
    }
    // dg of a tile, a channel a lane of the first warp; marked: P is that of the last token
    __device__ __forceinline__ void store_gates(int token, bool marked) const {
        const int d = channel + lane;
        if (warp || d >= K || a.dg.data == nullptr) return;
        float later = shared[AT_H + lane];
        const int last = min(TOKENS, at.s.T - token) - 1;
        for (int t = last; t >= max(0, -token); t--) {
            const i64 to = at.row(a, token + t) * K + d;
            later += a.dots[to] - (marked && t == last ? 0.f : cell(AT_SUMS, t));
            if (cell(AT_DECAY, t) == 0.f) later = 0.f;
            store_element<LA_GATE>(a.dg.data + to * bytes_of(LA_GATE), later);
        }
        shared[AT_H + lane] = later;
    }
    // P at a mark
    __device__ __forceinline__ void restart(Values& R, i64 mark) const {
        float x = 0.f;
        each(R, [&](float& y, i64 i) { x = fmaf(y, a.marks[mark * K * V + i], x); });
        keep(0, 0, x);
        __syncthreads();
        if (threadIdx.x < CHANNELS) shared[AT_H + lane] = sum(0, lane);
        __syncthreads();
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS)
    channels(const __grid_constant__ RecurrenceArguments a) {
    extern __shared__ __align__(16) float shared[];
    constexpr int PARTS = KEYS / CHANNELS;
    const i64 slot = blockIdx.x / PARTS;
    const Place at(a, (int)slot);
    const Block block = {
        a, at, shared, (int)(blockIdx.x % PARTS) * CHANNELS, (int)threadIdx.x / 32, (int)threadIdx.x & 31, slot};
    Values S;
    const float* start = a.start;
#pragma unroll
    for (int i = 0; i < SLICE; i++) S[i] = 0.f;
    if (start) block.each(S, [&](float& y, i64 i) { y = start[slot * K * V + i]; });
    const int tiles = (at.s.T + EARLY + TOKENS - 1) / TOKENS;
    for (int n = 0; n < tiles; n++) {
        const int tile = LA_BACK ? tiles - 1 - n : n, token = tile * TOKENS - EARLY,
                  last = min(TOKENS, at.s.T - token) - 1;
        const bool marked = tile + 1 == tiles || (tile + 1) * TOKENS % LA_MARK == 0;
        const i64 mark = slot * a.marks_of_sequence + tile * TOKENS / LA_MARK;
        __syncthreads();
        if (LA_BACK && marked) block.restart(S, mark);
        block.load(token);
        __syncthreads();
        block.own_products();
#pragma unroll 1
        for (int i = 0; i < TOKENS; i++) {
            if constexpr (LA_BACK) block.reverse(S, TOKENS - 1 - i);
            else {
                block.read(S, i);
                if (marked && i == last) block.each(S, [&](float& y, i64 at_y) { a.marks[mark * K * V + at_y] = y; });
                block.write(S, i);
            }
        }
        __syncthreads();
        if constexpr (LA_BACK) {
            block.store_writes(token);
            block.store_gates(token, marked);
        } else block.store_reads(token);
    }
}
