// The terms of a chunk's tokens in the gradients by channels (channels.cu): rows of q, k, decays and values in shared
// memory, their products D and E.
#pragma once
#include "portable/chunk.cuh"

#ifndef LA_MARK   // tokens from one mark to the next
#define LA_MARK 128
#endif
constexpr int EARLY = LA_BEFORE, TILES = VALUES / 8, PASSES = (VALUES / 16 + WARPS - 1) / WARPS;
constexpr int ACTIVE = VALUES / 16 < WARPS ? VALUES / 16 : WARPS, PARTS = (K + 16 * WARPS - 1) / (16 * WARPS),
              SQUARE = C * C, READ = VALUES + 8;
constexpr int WRITTEN = LA_ERASE ? 2 : KIND;   // the kind of v, or of e and du
constexpr int READS = 1 + (LA_ERASE && !LA_BACK),
              WRITES = 1 + (LA_ERASE && LA_BACK);   // rows multiplied with a state, rows added to it
constexpr int ROWS = 2 + WRITES + LA_ERASE;         // of a warp
static_assert(LA_MARK % C == 0, "marks are at ends of chunks");
typedef Product<2, 2 * (KIND == 2)> Tf32;
typedef Product<1 + (KIND == 2), 2 * (KIND == 2)> Dots;   // of two rows

// In shared memory, bytes: 8 columns a lane of q, k, g, then of v, dO (e, dO, du); a warp's rows of k (q), a, what it
// writes (and reads; k, k Pre); D of the warps (and E); D (and E); rows that the state is multiplied with, columns that
// are written; Pre_last (in two terms)
constexpr int PIECES = pieces_of(KIND) * THREADS * 16, STAGE = 2 * PIECES + pieces_of(LA_GATE) * THREADS * 16;
constexpr int WRITTEN_PIECES = pieces_of(WRITTEN) * THREADS * 16, PASS_BYTES = PIECES + (1 + LA_ERASE) * WRITTEN_PIECES;
constexpr int AT_ROWS = STAGE + PASSES * PASS_BYTES, AT_PARTS = AT_ROWS + WARPS * ROWS * C * ROW * 4;
constexpr int AT_D = AT_PARTS + (1 + LA_ERASE) * ACTIVE * SQUARE * 4, AT_READ = AT_D + (1 + LA_ERASE) * C * ROW * 4;
constexpr int AT_WRITE = AT_READ + READS * C * READ * 4, AT_LAST = AT_WRITE + WRITES * VALUES * COLUMN * 4;
static_assert(LA_SHARED == AT_LAST + WARPS * (1 + LA_LONG) * C * 4, "LA_SHARED is the size that the launch requests");

template <int KIND_> LA_DEVICE void store_row(char* to, const float (&x)[SPAN], int channel) {
    if constexpr (K % SPAN == 0) {
        if (channel >= K) return;
        store_vec4<KIND_>(to + channel * bytes_of(KIND_), x);
        store_vec4<KIND_>(to + (channel + 4) * bytes_of(KIND_), x + 4);
    } else
#pragma unroll
        for (int c = 0; c < SPAN; c++)
            if (channel + c < K) store_element<KIND_>(to + (channel + c) * bytes_of(KIND_), x[c]);
}

struct Chunk {
    const Arguments& a;
    const Place& at;
    char* shared;
    int warp, lane, first;   // first: of the warp's channels
    __device__ __forceinline__ float* floats(int bytes) const { return (float*)(shared + bytes); }
    __device__ __forceinline__ float* rows(int n) const { return floats(AT_ROWS) + (warp * ROWS + n) * C * ROW; }
    __device__ __forceinline__ float* last() const { return floats(AT_LAST) + warp * (1 + LA_LONG) * C; }
    __device__ __forceinline__ int own() const { return lane / 2; }   // token of a lane
    __device__ __forceinline__ int half() const { return (lane & 1) * SPAN; }
    __device__ __forceinline__ bool valid(int t) const { return (u32)t < (u32)at.s.T; }

    __device__ __forceinline__ void request_vectors(int token) const {
        const int t = token + own(), channel = first + half();
        request<KIND, K>(shared, rows_of(a.q, at.s, at.head), a.q.token, t + EARLY, at.s.T, channel);
        request<KIND, K>(shared + PIECES, rows_of(a.k, at.s, at.head), a.k.token, t, at.s.T, channel);
        request<LA_GATE, K>(shared + 2 * PIECES, rows_of(a.g, at.s, at.head), a.g.token, t, at.s.T, channel);
    }
    __device__ __forceinline__ void request_values(int pass, int token) const {
        const int t = token + own(), column = (warp + pass * WARPS) * 16 + half();
        char* const to = shared + STAGE + pass * PASS_BYTES;
        const Rows& written = LA_ERASE ? a.error : a.v;
        request<WRITTEN, V>(to, rows_of(written, at.s, at.head), written.token, t, at.s.T, column);
        request<KIND, V>(to + WRITTEN_PIECES, rows_of(a.dout, at.s, at.head), a.dout.token, t + EARLY, at.s.T, column);
        if constexpr (LA_ERASE)
            request<2, V>(to + WRITTEN_PIECES + PIECES, rows_of(a.du, at.s, at.head), a.du.token, t, at.s.T, column);
    }
    __device__ __forceinline__ float beta_of(int token) const {
        return valid(token) ? *(const float*)(rows_of(a.beta, at.s, at.head) + token * a.beta.token) : 0.f;
    }
    __device__ __forceinline__ void store_column(int bytes, const float (&x)[SPAN], int column) const {
#pragma unroll
        for (int c = 0; c < SPAN; c++) floats(bytes)[(column + c) * COLUMN + own()] = x[c];
    }
    // the rows that a state is multiplied with, the columns that are written, and their products; beta: of the lane's
    // token
    __device__ __forceinline__ void take_values(int pass, int next, float beta) const {
        const int column = (warp + pass * WARPS) * 16 + half();
        const char* const from = shared + STAGE + pass * PASS_BYTES;
        float x[SPAN], y[SPAN], z[SPAN], strength = 0.f;
        receive<WRITTEN>(LA_BACK ? x : y, from);
        receive<KIND>(LA_BACK ? y : x, from + WRITTEN_PIECES);
        if constexpr (LA_ERASE) {
            receive<2>(z, from + WRITTEN_PIECES + PIECES);
            if (!LA_BACK) strength = dot8(y, z);
#pragma unroll
            for (int c = 0; c < SPAN; c++) {
                float& u = (LA_BACK ? x : y)[c];
                u = Tf32::rounded(beta * u);
                z[c] = -Tf32::rounded(beta * z[c]);
            }
            if constexpr (LA_BACK) store_column(AT_WRITE + VALUES * COLUMN * 4, z, column);
            else store8(floats(AT_READ) + (C + own()) * READ + column, z);
        }
        store8(floats(AT_READ) + own() * READ + column, x);
        store_column(AT_WRITE, y, column);
        __syncwarp();
        request_values(pass, next);
        multiply_rows(pass, column - half(), 0);
        if constexpr (LA_ERASE) {
            multiply_rows(pass, column - half(), 1);
            strength += __shfl_xor_sync(0xffffffffu, strength, 1);
            if (!LA_BACK && (lane & 1) == 0) add_part(ACTIVE * SQUARE + own() * (C + 1), strength, pass);
        }
    }
    __device__ __forceinline__ void add_part(int entry, float s, int pass) const {
        float& part = floats(AT_PARTS)[warp * SQUARE + entry];
        part = pass ? part + s : s;
    }
    // D of 16 columns, or E but for its diagonal
    __device__ __forceinline__ void multiply_rows(int pass, int column, int of) const {
        const int row = lane / 4, value = column + (lane & 3) * 2;
        const auto element = [&](bool write, int n, int t, int v) {
            return write ? floats(AT_WRITE)[(n * VALUES + v) * COLUMN + t] : floats(AT_READ)[(n * C + t) * READ + v];
        };
        float x[8], c[2][4] = {};
#pragma unroll
        for (int n = 0; n < 8; n++) x[n] = element(LA_BACK, of, row + (n & 2) * 4, value + (n & 1) + (n & 4) * 2);
        const Dots::A readers = Dots::a(x);
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            float y[4];
#pragma unroll
            for (int n = 0; n < 4; n++) y[n] = element(!LA_BACK, 0, tile * 8 + row, value + (n & 1) + (n & 2) * 4);
            Dots::add(c[tile], readers, Dots::b(y));
        }
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const int i = row + (n & 2) * 4, j = (n & 4) * 2 + (lane & 3) * 2 + (n & 1);
            if (!of || i != j)
                add_part(of * ACTIVE * SQUARE + (LA_BACK ? j * C + i : i * C + j), c[n / 4][n % 4], pass);
        }
    }
    // the rows of k, or scale q, decays, the written values; `mine`: the lane's row of q, or k
    __device__ __forceinline__ void take_vectors(float (&mine)[SPAN], int next) const {
        float x[SPAN], decay[SPAN], g[SPAN];
        receive<KIND>(LA_BACK ? x : mine, shared);
        receive<KIND>(LA_BACK ? mine : x, shared + PIECES);
        receive<LA_GATE>(g, shared + 2 * PIECES);
#pragma unroll
        for (int c = 0; c < SPAN; c++) decay[c] = g[c];
        decays(decay);
#pragma unroll
        for (int c = 0; c < SPAN; c++) (LA_BACK ? x : mine)[c] *= a.scale;
        const int to = own() * ROW + half();
        __syncwarp();   // of the last chunk all lanes have read all rows
        store8(rows(0) + to, x);
        store8(rows(1) + to, decay);
        __syncwarp();
        request_vectors(next);
        float product[SPAN], step[SPAN];
        fill8(product, 1.f);
        for (int t = 0; t < C; t++) {
            load8(step, rows(1) + t * ROW + half());
            if (LA_BACK ? t <= own() : t > own()) scale8(product, step);
        }
        if (own() == (LA_BACK ? C - 1 : 0)) {
            if (!LA_BACK) scale8(decay, product);
            store8(last() + half(), LA_BACK ? product : decay);
        }
        if constexpr (LA_LONG) refine(last(), C, g, lane);
        scale8(x, product);
        store8(rows(2) + to, x);
        if constexpr (LA_ERASE && LA_BACK) {
            store8(rows(3) + to, mine);
            scale8(product, mine);
            store8(rows(4) + to, product);
        }
        __syncwarp();
    }
    __device__ __forceinline__ float sum_parts(int entry) const {
        return sum_over_warps<ACTIVE>(floats(AT_PARTS) + entry);
    }
    // D and E, whose diagonal is the gradient of beta
    __device__ __forceinline__ void sum_products(int token) const {
        for (int entry = threadIdx.x; entry < SQUARE; entry += THREADS) {
            const int r = entry / C, c = entry % C;
            floats(AT_D)[r * ROW + c] = sum_parts(entry);
            if constexpr (LA_ERASE) {
                const float e = sum_parts(ACTIVE * SQUARE + entry);
                floats(AT_D)[(C + r) * ROW + c] = e;
                if (!LA_BACK && r == c && blockIdx.x % PARTS == 0 && valid(token + r))
                    a.dbeta[at.row(a, token + r)] = e;
            }
        }
    }
};
