// Shared by the gradients of the delta rule: places in shared memory, barriers, and sums over rows of accumulators.
#pragma once
#include "attention/delta.cuh"
#include "attention/store.cuh"

typedef Panels<WIDE, WIDE> Whole;   // a state of a chunk, value row by key column
// k, v and the checkpoint have two slots. U takes v's place, and dq U's; dk leaves through q's.
constexpr int SLOT = Tokens::SIZE, AT_K = 0, AT_V = 2 * SLOT, AT_Q = 4 * SLOT, AT_DOUT = 5 * SLOT, AT_DV = 6 * SLOT,
              AT_END = 7 * SLOT;
constexpr int AT_STATE = AT_END + END, AT_Z = AT_STATE + END, AT_Y = AT_Z + Square::SIZE,
              AT_WRITTEN = AT_Y + Square::SIZE;
constexpr int AT_CHECKPOINTS = AT_WRITTEN + SLOT, AT_DOTS = AT_CHECKPOINTS + 2 * CHECKPOINT_SUMS,
              AT_BARRIERS = AT_DOTS + (3 * C + 16) * 4;
constexpr int AT_DBETA_PARTS = 1024;   // two groups' parts of dbeta, in A's place once U is made
static_assert(LA_SHARED == AT_BARRIERS + 96, "LA_SHARED is the size that the launch requests");

struct GradBarriers {   // its data have come, or are free again
    u32 base;
    __device__ __forceinline__ u32 chunk(int slot) const { return base + 8 * slot; }   // k, v and the checkpoint
    __device__ __forceinline__ u32 outputs() const { return base + 16; }               // dout, dv
    __device__ __forceinline__ u32 queries() const { return base + 24; }
    __device__ __forceinline__ u32 end() const { return base + 32; }          // dS after the chunk
    __device__ __forceinline__ u32 state() const { return base + 40; }        // S before it
    __device__ __forceinline__ u32 new_values() const { return base + 48; }   // U
    __device__ __forceinline__ u32 written() const { return base + 56; }      // U d
    __device__ __forceinline__ u32 state_free() const { return base + 64; }
    __device__ __forceinline__ u32 chunk_free() const { return base + 72; }
    __device__ __forceinline__ u32 queries_free() const { return base + 80; }
    __device__ __forceinline__ u32 end_done() const { return base + 88; }   // <S, dS>
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < 5; i++) barrier_init(base + 8 * i, 1);
        for (int i = 5; i < 12; i++) barrier_init(base + 8 * i, base + 8 * i == queries_free() ? 2 : 8 * ARRIVALS);
        barriers_made();
    }
};

// inner products of a warp's 16 accumulator rows with 64 columns of 16 rows of a tile; at: this lane's address there
LA_DEVICE void row_dots(const float (&y)[8][4], u32 at, float (&sums)[2]) {
#pragma unroll
    for (int p = 0; p < 4; p++) {
        u32 k[4];
        load_matrix(k, at ^ (p << 5));
#pragma unroll
        for (int m = 0; m < 2; m++)
            sums[m] += y[2 * p][2 * m] * low_bf16(k[m]) + y[2 * p][2 * m + 1] * high_bf16(k[m]) +
                       y[2 * p + 1][2 * m] * low_bf16(k[2 + m]) + y[2 * p + 1][2 * m + 1] * high_bf16(k[2 + m]);
    }
}
LA_DEVICE void store_tile_rows(const float (&y)[8][4], u32 at) {
#pragma unroll
    for (int p = 0; p < 4; p++)
        store_matrix(at ^ (p << 5), pack_bf16(y[2 * p][0], y[2 * p][1]), pack_bf16(y[2 * p][2], y[2 * p][3]),
                     pack_bf16(y[2 * p + 1][0], y[2 * p + 1][1]), pack_bf16(y[2 * p + 1][2], y[2 * p + 1][3]));
}
// y_i -= f_i x_i, x being 64 columns of a tile
LA_DEVICE void subtract_rows(float (&y)[8][4], u32 at, const float (&f)[2]) {
#pragma unroll
    for (int p = 0; p < 4; p++) {
        u32 x[4];
        load_matrix(x, at ^ (p << 5));
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                y[2 * p + h][2 * m] -= f[m] * low_bf16(x[2 * h + m]);
                y[2 * p + h][2 * m + 1] -= f[m] * high_bf16(x[2 * h + m]);
            }
    }
}
LA_DEVICE void quad_sums(float (&x)[2]) {
#pragma unroll
    for (int m = 0; m < 2; m++) {
        x[m] += __shfl_xor_sync(0xffffffffu, x[m], 1);
        x[m] += __shfl_xor_sync(0xffffffffu, x[m], 2);
    }
}
// rq dq^ and rk dk^ less the part along their rows, each of two groups holds 64 columns: x - q rq^2 <q, x>,
// and y alike. dot += <q, x> - <k, y> of the group.
struct UnitRows {
    u32 q, k;   // this lane's addresses in the tiles
    const float *rq, *rk;
    float2* parts;   // 128 pairs of floats that nobody else reads or writes
};
LA_DEVICE void make_normal(float (&x)[8][4], float (&y)[8][4], float (&dot)[2], const UnitRows& of, int group, int i0,
                           int lane) {
    float of_q[2] = {0.f, 0.f}, of_k[2] = {0.f, 0.f};
    row_dots(x, of.q, of_q);
    row_dots(y, of.k, of_k);
    quad_sums(of_q);
    quad_sums(of_k);
    if ((lane & 3) == 0)
#pragma unroll
        for (int m = 0; m < 2; m++) of.parts[C * group + i0 + 8 * m] = {of_q[m], of_k[m]};
    groups_barrier<256>(1);
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const float2 other = of.parts[C * (1 - group) + i0 + 8 * m];
        const float r = of.rq[i0 + 8 * m], s = of.rk[i0 + 8 * m];
        dot[m] += of_q[m] - of_k[m];
        of_q[m] = (of_q[m] + other.x) * r * r;
        of_k[m] = (of_k[m] + other.y) * s * s;
    }
    subtract_rows(x, of.q, of_q);
    subtract_rows(y, of.k, of_k);
}
LA_DEVICE void scale_rows(float (&y)[8][4], float a, float b) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        y[i][0] *= a;
        y[i][1] *= a;
        y[i][2] *= b;
        y[i][3] *= b;
    }
}

// this lane's part of <S, dS>, S in registers, dS in shared memory
LA_DEVICE float dot_end(const float (&S)[16][4], u32 end, int warp, int lane) {
    float sum = 0.f;
#pragma unroll
    for (int d = 0; d < 8; d++) {
        u32 x[4];
        load_matrix(x, end + Whole::block_piece(16 * warp, 2 * d, lane & 15, lane >> 4));
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float (&y)[4] = S[2 * d + h];
            sum += y[0] * low_bf16(x[2 * h]) + y[1] * high_bf16(x[2 * h]) + y[2] * low_bf16(x[2 * h + 1]) +
                   y[3] * high_bf16(x[2 * h + 1]);
        }
    }
    return warp_sum(sum);
}

// dbeta of a chunk by one warp, two tokens a lane, of two groups' parts in A's place
struct Strengths {
    float2 beta, sums;
    __device__ __forceinline__ Strengths(const DeltaArguments& a, const DeltaTraversal& traversal, int chunk,
                                         const unsigned char* block, int lane) {
        const float2 u = pair_at((const float*)(block + AT_DBETA_PARTS), 2 * lane),
                     v = pair_at((const float*)(block + AT_DBETA_PARTS) + C, 2 * lane);
        const void* from = LA_UNIT ? (const void*)(a.checkpoints + (traversal.block + chunk) * CHECKPOINT)
                                   : block;   // as far as the fourth is in the block
        beta = pair_at((const float*)((const char*)from + AT_BETA), 2 * lane);
        sums = {u.x + v.x, u.y + v.y};
    }
    __device__ __forceinline__ void store_gradients(const DeltaArguments& a, const DeltaTraversal& traversal, int chunk,
                                                    int lane) const {
        const int token = chunk * C + 2 * lane;
        float* to = a.dbeta + (traversal.sequence.index + token) * a.heads + traversal.head;
        if (token < traversal.sequence.T) to[0] = __fdividef(sums.x, beta.x);
        if (token + 1 < traversal.sequence.T) to[a.heads] = __fdividef(sums.y, beta.y);
    }
};

// dg of a chunk by one warp, two tokens a lane: db summed from each token to the chunk's end. A hard reset's own
// gradient is 0, and so is the sum from there on: earlier terms do not reach past it. dots: two groups' db, then
// log2 decays.
LA_DEVICE void gate_gradients(const DeltaArguments& a, const DeltaTraversal& traversal, int chunk, const float* dots,
                              const float* products, int lane) {
    const float2 u = pair_at(dots, 2 * lane), v = pair_at(dots + C, 2 * lane), g = pair_at(dots + 2 * C, 2 * lane);
    const int token = chunk * C + 2 * lane, T = traversal.sequence.T;
    float x[2] = {u.x + v.x, u.y + v.y};
    if (lane == 31)
#pragma unroll
        for (int i = 0; i < 8; i++) x[1] += products[i];
    const bool reset[2] = {g.x < FLOOR_LOG2 + 0.5f,
                           g.y < FLOOR_LOG2 + 0.5f};              // differences of sums of up to 64 of them
    int next = __shfl_down_sync(0xffffffffu, (int)reset[0], 1);   // of the token after this lane's
    if (lane == 31) next = 0;
    float sum = x[0] + (reset[1] ? 0.f : x[1]);
    int stop = reset[1] | next;
#pragma unroll
    for (int k = 1; k < 32; k <<= 1) {
        const float more = __shfl_down_sync(0xffffffffu, sum, k);
        const int further = __shfl_down_sync(0xffffffffu, stop, k);
        if (lane + k < 32) {
            if (!stop) sum += more;
            stop |= further;
        }
    }
    const float later = __shfl_down_sync(0xffffffffu, sum, 1);
    float* to = a.dg + (traversal.sequence.index + token) / LA_STEPS * a.heads + traversal.head;
    if (token < T && token % LA_STEPS == 0) to[0] = reset[0] ? 0.f : sum;
    if (LA_STEPS == 1 && token + 1 < T) to[a.heads] = reset[1] ? 0.f : x[1] + (lane == 31 || next ? 0.f : later);
}
