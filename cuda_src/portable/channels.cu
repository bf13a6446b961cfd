// Gradients of q, or LA_BACK 1 of k and g, 16 key channels a warp, which has their rows of the state S (LA_BACK: of its
// gradient G) over all values. Reads of the state after token t are counted with t: with LA_BEFORE q_(t+1) and
// dO_(t+1), in chunks from token -1 on. D_ij = <dO_i, v_j>.
//
//     dq_i = scale (Pre_i (S dO_i) + sum_{j<i} D_ij k_j a_(j+1) ... a_i + D_ii k_i)     S' = Pre_last S + (k Suf)^T v
//     dk_j = Suf_j (G v_j) + scale (sum_{i>j} D_ij q_i a_(j+1) ... a_i + D_jj q_j)
//     G' = Pre_last G + scale (q Pre)^T dO
//     dg_t = dg_(t+1) + q_t dq_t - k_t dk_t without the terms of D_tt
//     anew at marks, where <S~, G> is summed, S~ = diag(a) S before the write
//
// With LA_ERASE tokens write u = beta e instead of v, keys read S~ with -dv = -beta du as queries do with scale
// dO, E_ij = -<dv_i, u_j>, and
//
//     dr_i = -Pre_i (S dv_i) + sum_{j<i} E_ij k_j a_(j+1) ... a_i     dbeta_t = <du_t, e_t>
//     dk has sum_{i>j} E_ij k_i a_(j+1) ... a_i and dr_j
//     dg has k_t dr_t                                                     G' has -(k Pre)^T dv
//
// Sums over tokens go by Horner's rule, a lane the token of its outputs. dO and v are exact operands where they have 16
// bits (u and dv are rounded to such), S and G two terms.
#include "portable/channels.cuh"

typedef float State[TILES][4];   // channels, values

struct Block : Chunk {
    // element n of an operand or accumulator of 16 channels and 16 tokens
    __device__ __forceinline__ int place(int n) const {
        return ((lane & 3) * 2 + (n & 1) + (n & 4) * 2) * ROW + lane / 4 + (n & 2) * 4;
    }
    // the state times the rows
    __device__ __forceinline__ void read_state(State& S, float (&c)[2 * READS][4]) const {
        const float* const from = floats(AT_READ) + (lane >> 2) * READ + (lane & 3) * 2;
        const float low = last()[lane >> 2], high = last()[(lane >> 2) + 8];
#pragma unroll
        for (int tile = 0; tile < TILES; tile += 2) {
            const float x[8] = {S[tile][0],     S[tile][1],     S[tile][2],     S[tile][3],
                                S[tile + 1][0], S[tile + 1][1], S[tile + 1][2], S[tile + 1][3]};
            const Tf32::A s = Tf32::a(x);
#pragma unroll
            for (int n = 0; n < 2 * READS; n++) Tf32::add(c[n], s, Tf32::b(from + n * 8 * READ + tile * 8));
            if constexpr (!LA_LONG)
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    S[tile + n][0] *= low;
                    S[tile + n][1] *= low;
                    S[tile + n][2] *= high;
                    S[tile + n][3] *= high;
                }
        }
    }
    // S += k_t^T v_t for tokens with some(t) (dv if of is 1); decays: S is decayed first if LA_LONG, otherwise it
    // already is
    template <class F> __device__ __forceinline__ void write(State& S, F some, int of, bool decays) const {
        float x[8];
#pragma unroll
        for (int n = 0; n < 8; n++) x[n] = some(place(n) / ROW) ? rows(2 + 2 * of)[place(n)] : 0.f;
        const Tf32::A written = Tf32::a(x);
        const float* const from = floats(AT_WRITE) + of * VALUES * COLUMN + (lane >> 2) * COLUMN + (lane & 3) * 2;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const Tf32::B y = Tf32::b(from + tile * 8 * COLUMN);
            if constexpr (LA_LONG) {
                float c[4] = {};
                Tf32::add(c, written, y);
                const float* const decay = last() + (lane >> 2);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    S[tile][i] =
                        decays ? add_to(S[tile][i], c[i], decay[i / 2 * 8], decay[C + i / 2 * 8]) : S[tile][i] + c[i];
            } else Tf32::add(S[tile], written, y);
        }
    }
    // read values, in place of the written ones
    __device__ __forceinline__ void keep(const float (&c)[2 * READS][4]) const {
        __syncwarp();
#pragma unroll
        for (int n = 0; n < 8 * READS; n++) rows(2 + n / 8)[place(n % 8)] = c[n / 4][n % 4];
        __syncwarp();
    }
    // f(element, its number, at) for the warp's part of a state in memory
    template <class F> __device__ __forceinline__ void each(State& S, i64 slot, F f) const {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const int key = first + lane / 4 + (n & 2) * 4, value = tile * 8 + (lane & 3) * 2 + (n & 1);
                if (key < K && value < V) f(S[tile][n], n, (slot * K + key) * V + value);
            }
    }
};

struct Gradients : Block {
    // dq, and its terms of dg
    __device__ __forceinline__ void store_queries(const float (&q)[SPAN], int token) const {
        const int i = own(), t = token + i, channel = first + half();
        float z[SPAN], y[SPAN], before[SPAN], step[SPAN], k[SPAN];   // y: of the erase term
        fill8(z, 0.f);
        fill8(y, 0.f);
        fill8(before, 1.f);
        for (int j = 0; j < C; j++) {
            const float d = j < i ? floats(AT_D)[i * ROW + j] : 0.f;
            load8(step, rows(1) + j * ROW + half());
            load8(k, rows(0) + j * ROW + half());
            if (j <= i) {
                scale8(z, step);
                if (LA_ERASE) scale8(y, step);
                scale8(before, step);
            }
#pragma unroll
            for (int c = 0; c < SPAN; c++) z[c] = fmaf(d, k[c], z[c]);
            if constexpr (LA_ERASE) add8(y, j < i ? floats(AT_D)[(C + i) * ROW + j] : 0.f, k);
        }
        const float d = floats(AT_D)[i * ROW + i];
        float read[SPAN], dots[SPAN];
        load8(k, rows(0) + i * ROW + half());
        load8(read, rows(2) + i * ROW + half());
#pragma unroll
        for (int c = 0; c < SPAN; c++) {
            z[c] = fmaf(before[c], read[c], z[c]);
            dots[c] = q[c] * z[c];   // q has the scale
            z[c] = a.scale * fmaf(d, k[c], z[c]);
        }
        if constexpr (LA_ERASE) {
            load8(read, rows(3) + i * ROW + half());
#pragma unroll
            for (int c = 0; c < SPAN; c++) {
                y[c] = fmaf(before[c], read[c], y[c]);
                dots[c] = fmaf(k[c], y[c], dots[c]);
            }
            if (valid(t)) store_row<2>((char*)(a.dr + at.row(a, t) * K), y, channel);
        }
        if (valid(t)) store_row<2>((char*)(a.dots + at.row(a, t) * K), dots, channel);
        if (valid(t + EARLY)) store_row<KIND>(a.dq.data + at.row(a, t + EARLY) * K * bytes_of(KIND), z, channel);
    }
    // dk; the steps of dg replace the read values; marked: the last token's step begins from the mark
    __device__ __forceinline__ void store_keys(const float (&k)[SPAN], int token, bool marked) const {
        const int j = own(), t = token + j, channel = first + half();
        const i64 row = at.row(a, t) * K;
        float y[SPAN], after[SPAN], step[SPAN], q[SPAN], dots[SPAN], r[SPAN];
#pragma unroll
        for (int c = 0; c < SPAN; c++) {
            dots[c] = valid(t) && channel + c < K ? a.dots[row + channel + c] : 0.f;
            if (LA_ERASE) r[c] = valid(t) && channel + c < K ? a.dr[row + channel + c] : 0.f;
        }
        fill8(y, 0.f);
        fill8(after, 1.f);
        for (int i = C - 1; i >= 0; i--) {
            const float d = i > j ? floats(AT_D)[j * ROW + i] : 0.f;
            load8(step, rows(1) + i * ROW + half());
            load8(q, rows(0) + i * ROW + half());
#pragma unroll
            for (int c = 0; c < SPAN; c++) y[c] = fmaf(d, q[c], y[c]);
            if constexpr (LA_ERASE) {
                load8(q, rows(3) + i * ROW + half());
                add8(y, i > j ? floats(AT_D)[(C + j) * ROW + i] : 0.f, q);
            }
            if (i > j) {
                scale8(y, step);
                scale8(after, step);
            }
        }
        const float d = floats(AT_D)[j * ROW + j];
        const bool ends = marked && t == min(token + C, at.s.T) - 1;
        float read[SPAN];
        load8(q, rows(0) + j * ROW + half());
        load8(read, rows(2) + j * ROW + half());
#pragma unroll
        for (int c = 0; c < SPAN; c++) {
            y[c] = fmaf(after[c], read[c], y[c]);
            if (!ends) dots[c] -= k[c] * y[c];
            y[c] = fmaf(d, q[c], y[c]);
            if (LA_ERASE) y[c] += r[c];
        }
        if (valid(t)) store_row<KIND>(a.dk.data + row * bytes_of(KIND), y, channel);
        store8(rows(2) + j * ROW + half(), dots);
    }
    // dg of a chunk; later: that of the token after it, a channel a lane
    __device__ __forceinline__ void store_gates(float& later, int token) const {
        __syncwarp();
        if (lane < C)
#pragma unroll
            for (int t = C - 1; t >= 0; t--) {
                later += rows(2)[t * ROW + lane];
                if (rows(1)[t * ROW + lane] == 0.f) later = 0.f;
                rows(2)[t * ROW + lane] = later;
            }
        __syncwarp();
        float x[SPAN];
        load8(x, rows(2) + own() * ROW + half());
        if (valid(token + own()))
            store_row<LA_GATE>(a.dg.data + at.row(a, token + own()) * K * bytes_of(LA_GATE), x, first + half());
        __syncwarp();
    }
    // <S~, G> of a mark
    __device__ __forceinline__ float restart(State& G, i64 mark) const {
        float low = 0.f, high = 0.f;
        each(G, mark, [&](float& x, int n, i64 i) {
            float& to = n & 2 ? high : low;
            to = fmaf(x, a.marks[i], to);
        });
#pragma unroll
        for (int d = 1; d < 4; d <<= 1) {
            low += __shfl_xor_sync(0xffffffffu, low, d);
            high += __shfl_xor_sync(0xffffffffu, high, d);
        }
        low = __shfl_sync(0xffffffffu, low, (lane & 7) * 4);
        high = __shfl_sync(0xffffffffu, high, (lane & 7) * 4);
        return lane & 8 ? high : low;
    }
};

#if __CUDA_ARCH__ >= 1000 && LA_LONG && !LA_BACK   // 128 registers of a thread: 688 bytes are spilled there
constexpr int BLOCKS = 1;
#else
constexpr int BLOCKS = LA_BLOCKS;
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    channels(const __grid_constant__ VectorPortableArguments a) {
    extern __shared__ __align__(16) char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const Place at(a, blockIdx.x / PARTS);
    const Gradients block = {{{a, at, shared, warp, lane, ((int)(blockIdx.x % PARTS) * WARPS + warp) * 16}}};
    const int tiles = (at.s.T + EARLY + C - 1) / C;
    const auto token_of = [&](int n) { return n < tiles ? (LA_BACK ? tiles - 1 - n : n) * C - EARLY : at.s.T + C; };
    State S = {};
    if (a.start) block.each(S, at.slot, [&](float& x, int, i64 i) { x = a.start[i]; });
    block.request_vectors(token_of(0));
    for (int pass = 0; pass < PASSES; pass++)
        if ((warp + pass * WARPS) * 16 < VALUES) block.request_values(pass, token_of(0));
    copy_commit();
    float later = 0.f, mine[SPAN], beta = 0.f;
    if (LA_ERASE) beta = block.beta_of(token_of(0) + block.own());
    for (int n = 0; n < tiles; n++) {
        const int tile = LA_BACK ? tiles - 1 - n : n, token = token_of(n), next = token_of(n + 1);
        const bool marked = tile + 1 == tiles || (tile + 1) * C % LA_MARK == 0;
        const i64 mark = at.slot * a.marks_of_sequence + tile * C / LA_MARK;
        if (LA_BACK && marked) later = block.restart(S, mark);
        copy_wait<0>();
#pragma unroll 1
        for (int pass = 0; pass < PASSES; pass++)
            if ((warp + pass * WARPS) * 16 < VALUES) block.take_values(pass, next, beta);
        if (LA_ERASE) beta = block.beta_of(next + block.own());
        block.take_vectors(mine, next);
        copy_commit();
        __syncthreads();
        block.sum_products(token);
        float c[2 * READS][4] = {};
        block.read_state(S, c);
        const int end = !LA_BACK && marked ? min(C, at.s.T - token) - 1 : C;
#pragma unroll 1
        for (int last = 0; last < 1 + (end < C); last++) {   // at a mark first all but the last token's write: S~
            block.write(S, [&](int t) { return (t == end) == last; }, 0, !last);
            if (WRITES == 2) block.write(S, [](int) { return true; }, 1, false);
            if (!LA_BACK && marked && !last) block.each(S, mark, [&](float& x, int, i64 i) { a.marks[i] = x; });
        }
        block.keep(c);
        __syncthreads();
        if constexpr (LA_BACK) {
            block.store_keys(mine, token, marked);
            block.store_gates(later, token);
        } else block.store_queries(mine, token);
    }
}
