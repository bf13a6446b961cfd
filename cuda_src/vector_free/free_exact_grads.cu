// The same gradients as free_grads.cu of the chunks that it flags, token by token in float32: any log decay in [-inf, 0]. Given w and dw,
// rows of S and G are recurrences apart:
//
//     S_t = e^{g_t} S_(t-1) + b_t w_t + k_t v_t        dq_t = scale dO_t S_t^T      da_t = dw_t S_(t-1)^T
//     G_t = (gradient after t) + scale q_t dO_t        dk_t = v_t G_t^T             db_t = w_t G_t^T        dg_t = e^{g_t} <S_(t-1), G_t>
//     (gradient before t) = e^{g_t} G_t + a_t dw_t
//
// A warp takes a channel at a time, a lane PER neighbouring values; states of 8 tokens are recomputed on the way back. A few
// blocks redo what is flagged.
#include "vector_free/place.cuh"
#include "tile/reduce.cuh"

constexpr int WARPS = 8, PER = VALUES / 32, RUN = 8, RUNS = C / RUN, VALUE_TILE = ValueTile::SIZE;
// v, dO; w and dw, then the state before each run of each warp's channel; w and dw as rows of tokens
constexpr int AT_V = 0, AT_DOUT = VALUE_TILE, AT_TURNED = 2 * VALUE_TILE, AT_BEGINS = AT_TURNED, BEGINS = RUNS * VALUES * 4;
constexpr int AT_W = AT_TURNED + (2 * VALUE_TILE > WARPS * BEGINS ? 2 * VALUE_TILE : WARPS * BEGINS), AT_DW = AT_W + VALUE_TILE;
constexpr int AT_BARRIER = AT_DW + VALUE_TILE, AT_LEFT = AT_BARRIER + 16;   // flags of chunks that a warp has not done
static_assert(LA_SHARED == AT_BARRIER + 96, "LA_SHARED is what the launch asks for");

typedef float Row[PER];   // a lane's values of one row

LA_DEVICE float from_half(u16 x) { return __uint_as_float((u32)x << 16); }
LA_DEVICE u16 load_half(u32 at) {
    u16 x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(at));
    return x;
}
LA_DEVICE void store_half(u32 at, u16 x) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(x) : "memory"); }
// a lane's values of a token
LA_DEVICE void load_token(Row& x, u32 tile, int token, int lane) {
    const u32 at = tile + ValueTile::at(token, PER * lane);
    if constexpr (PER == 4) {
        const float2 y = load_shared2(at);
        const u32 low = __float_as_uint(y.x), high = __float_as_uint(y.y);
        x[0] = low_bf16(low); x[1] = high_bf16(low); x[2] = low_bf16(high); x[3] = high_bf16(high);
    } else {
        const u32 y = load_word(at);
        x[0] = low_bf16(y); x[1] = high_bf16(y);
    }
}
LA_DEVICE void load_state(Row& x, const char* tile, int channel, int lane) {
#pragma unroll
    for (int n = 0; n < PER; n++) x[n] = from_half(*(const u16*)(tile + StateTile::at(PER * lane + n, channel)));
}
LA_DEVICE float dot(const Row& x, const Row& y) {
    float sum = 0.f;
#pragma unroll
    for (int n = 0; n < PER; n++) sum += x[n] * y[n];
    return sum;
}
// sums over a warp of eight values, of which lane l is left with number token_of(l)
LA_DEVICE float sum_of_run(float (&x)[RUN], int lane) {
    exchange_half<1, 4>(x, lane);
    exchange_half<2, 2>(x, lane);
    exchange_half<4, 1>(x, lane);
    x[0] += __shfl_xor_sync(0xffffffffu, x[0], 8);
    return x[0] + __shfl_xor_sync(0xffffffffu, x[0], 16);
}
LA_DEVICE int token_of(int lane) { return (lane & 1) * 4 + (lane & 2) + ((lane >> 2) & 1); }

// One channel of a chunk's rows: of tokens `lane` and `lane` + 32
struct Channel {
    float x[2];
    template <class F> __device__ __forceinline__ void load(int count, int lane, float past, F at) {   // past: where there is no token
#pragma unroll
        for (int n = 0; n < 2; n++) x[n] = lane + 32 * n < count ? at(lane + 32 * n) : past;
    }
    __device__ __forceinline__ float at(int token) const { return __shfl_sync(0xffffffffu, token < 32 ? x[0] : x[1], token & 31); }
};
struct Work {
    const FreeGradArguments& a;
    const ChunkTraversal& of;
    u32 shared;
    int channel, count, lane;
    Channel q, k, b, r, decay;   // r: the vector that reads

    __device__ __forceinline__ float element(const Rows& x, int token) const {
        return from_half(*(const u16*)(rows_of(x, of.sequence, of.head) + (of.segment * C + token) * x.token + channel * 2));
    }
    __device__ __forceinline__ void load() {
        q.load(count, lane, 0.f, [&](int t) { return element(a.rows_q, t); });
        k.load(count, lane, 0.f, [&](int t) { return element(a.rows_k, t); });
        r.load(count, lane, 0.f, [&](int t) { return element(a.rows_a, t); });
        b.load(count, lane, 0.f, [&](int t) { return element(a.rows_b, t); });
        decay.load(count, lane, 1.f, [&](int t) {
            const char* at = rows_of(a.rows_g, of.sequence, of.head) + (of.segment * C + t) * a.rows_g.token + channel * GATE_BYTES;
            return exp2_approx((LA_GATE == 2 ? *(const float*)at : from_half(*(const u16*)at)) * LOG2_E);
        });
    }
    __device__ __forceinline__ void write(Row& S, int t) const {
        Row v, w;
        load_token(v, shared + AT_V, t, lane);
        load_token(w, shared + AT_W, t, lane);
        const float d = decay.at(t), kt = k.at(t), bt = b.at(t);
#pragma unroll
        for (int n = 0; n < PER; n++) S[n] = d * S[n] + bt * w[n] + kt * v[n];
    }
    __device__ __forceinline__ void store(const Rows& x, int first, float (&sums)[RUN], bool gate) const {
        const float y = sum_of_run(sums, lane);
        const int t = first + token_of(lane);
        if (lane >= RUN || t >= count) return;
        char* const to = own_rows(x, of.sequence, of.head) + (of.segment * C + t) * x.token + channel * (gate ? GATE_BYTES : 2);
        if (gate && LA_GATE == 2) *(float*)to = y;
        else *(u16*)to = (u16)pack_bf16(y, 0.f);
    }
    // dq and da of a run of tokens
    __device__ __forceinline__ void read_run(Row& S, int first) const {
        float of_q[RUN], of_a[RUN];
#pragma unroll
        for (int n = 0; n < RUN; n++) {
            Row x;
            load_token(x, shared + AT_DW, first + n, lane);
            of_a[n] = dot(x, S);
            write(S, first + n);
            load_token(x, shared + AT_DOUT, first + n, lane);
            of_q[n] = a.scale * dot(x, S);
        }
        store(a.dq, first, of_q, false);
        store(a.da, first, of_a, false);
    }
    // dk, db and dg of a run, from the state before it and the gradient after it, which becomes that before it
    __device__ __forceinline__ void write_run(Row& S, Row& G, int first) const {
        float of_k[RUN], of_b[RUN], of_g[RUN];
        Row states[RUN];
#pragma unroll
        for (int n = 0; n < RUN; n++) {
#pragma unroll
            for (int i = 0; i < PER; i++) states[n][i] = S[i];
            if (n + 1 < RUN) write(S, first + n);
        }
#pragma unroll
        for (int n = RUN - 1; n >= 0; n--) {
            const int t = first + n;
            Row dout, dw, x;
            load_token(dout, shared + AT_DOUT, t, lane);
            load_token(dw, shared + AT_DW, t, lane);
            const float qt = a.scale * q.at(t), d = decay.at(t), at = r.at(t);
#pragma unroll
            for (int i = 0; i < PER; i++) G[i] += qt * dout[i];
            load_token(x, shared + AT_V, t, lane);
            of_k[n] = dot(x, G);
            load_token(x, shared + AT_W, t, lane);
            of_b[n] = dot(x, G);
            of_g[n] = d == 0.f ? 0.f : d * dot(states[n], G);
#pragma unroll
            for (int i = 0; i < PER; i++) G[i] = d * G[i] + at * dw[i];
        }
        store(a.dk, first, of_k, false);
        store(a.db, first, of_b, false);
        if (a.dg.data) store(a.dg, first, of_g, true);
    }
    __device__ __forceinline__ u32 begin(int n, int warp) const { return shared + AT_BEGINS + warp * BEGINS + (n * 32 + lane) * PER * 4; }
    __device__ __forceinline__ void run(i64 stored, int warp) {
        Row S, G;
        load();
        load_state(S, a.states + stored * StateTile::SIZE, channel, lane);
        load_state(G, a.ends + stored * StateTile::SIZE, channel, lane);
#pragma unroll 1
        for (int n = 0; n < RUNS; n++) {
#pragma unroll
            for (int i = 0; i < PER; i++) store_shared(begin(n, warp) + 4 * i, S[i]);
            read_run(S, RUN * n);
        }
#pragma unroll 1
        for (int n = RUNS - 1; n >= 0; n--) {
#pragma unroll
            for (int i = 0; i < PER; i++) S[i] = load_shared(begin(n, warp) + 4 * i);
            write_run(S, G, RUN * n);
        }
    }
};

LA_DEVICE void store_pair_of_words(u32 at, u32 x, u32 y) { asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(x), "r"(y) : "memory"); }
LA_DEVICE void load_pair_of_words(u32 at, u32& x, u32& y) { asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "r"(at)); }

// All channels of a chunk
LA_DEVICE void redo_chunk(const FreeGradArguments& a, int item, u32 shared, int parity, int warp, int lane) {
    const ChunkPlace place(a, item);
    const ChunkTraversal& of = place.of;
    const i64 stored = place.stored();
    const int token = of.token(of.segment), count = of.count(of.segment);
    __syncthreads();
    if (threadIdx.x == 0) {
        const u32 full = shared + AT_BARRIER;
        barrier_expect(full, 4 * VALUE_TILE);
        panels_in<VALUES / 64>(shared + AT_V, a.v, full, (u32)of.head / (u32)a.group_v, token, of.row);
        panels_in<VALUES / 64>(shared + AT_DOUT, a.dout, full, of.head, token, of.row);
        run_in(shared + AT_TURNED, a.corrections + stored * VALUE_TILE, VALUE_TILE, full);
        run_in(shared + AT_TURNED + VALUE_TILE, a.grad_corrections + stored * VALUE_TILE, VALUE_TILE, full);
    }
    barrier_wait(shared + AT_BARRIER, parity);
    for (int i = threadIdx.x; i < 2 * C * VALUES; i += 32 * WARPS) {
        const int value = i % (C * VALUES) / C, token = i % C, n = i / (C * VALUES) * VALUE_TILE;
        store_half(shared + AT_W + n + ValueTile::at(token, value), load_half(shared + AT_TURNED + n + TurnedTile::at(value, token)));
    }
    __syncthreads();   // states go where w and dw have been
    if (LA_RAGGED && count < C) {   // rows of the next sequence
        for (int i = count * 8 + threadIdx.x; i < C * 8; i += 32 * WARPS)
            for (int p = 0; p < 2 * VALUES / 64; p++)
                asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(shared + AT_V + p * PANEL + i * 16), "r"(0) : "memory");
        __syncthreads();
    }
    for (int channel = warp; channel < LA_K; channel += WARPS) {
        Work work = {a, of, shared, channel, count, lane};
        work.run(stored, warp);
    }
    publish_shared();
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) grads(const __grid_constant__ FreeGradArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        barrier_init(shared + AT_BARRIER, 1);
        barriers_made();
    }
    int parity = 0;
    for (u32 first = blockIdx.x; first < (u32)a.items; first += 32 * gridDim.x) {   // a flag a lane
        const u32 own = first + lane * gridDim.x;
        u32 left = __ballot_sync(0xffffffffu, own < (u32)a.items && a.flags[own]);
        while (left) {
            const int item = first + (__ffs(left) - 1) * gridDim.x;
            store_pair_of_words(shared + AT_LEFT + 8 * warp, left & (left - 1), first);   // registers are scarce
            redo_chunk(a, item, shared, parity, warp, lane);
            load_pair_of_words(shared + AT_LEFT + 8 * warp, left, first);
            parity ^= 1;
        }
    }
}
