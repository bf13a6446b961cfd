// From the actions of segments to the state that each begins with: next = S M + added, in float32, sixteen rows a
// block.
//
//     forward   begin(s + 1) = begin(s) M_s + added(s), added(0) being begin(1) itself
//     reverse   the same for gradients from the last segment down, with M_s transposed
//
// M is diag(d) + R, R in bfloat16 (tile/transfer.cuh),
//
//     next = added + S d + bf(S) R
//
// where S d is a product of float32 registers, and R has S rounded as the chunks' own products have. One copy brings a
// matrix, several steps ahead. A warp has sixteen columns; a lane's own part of M and `added` is in registers before
// the state that M multiplies is there.
#include "attention/delta.cuh"
#include "tile/transfer.cuh"

typedef Transfer::Rest Rest;
constexpr bool REVERSE = LA_REVERSE;
constexpr int ROWS = 16, PARTS = WIDE / ROWS, WARPS = WIDE / 16, THREADS = 32 * WARPS,
              MATRICES = 6;   // matrices in flight
constexpr int ROW = WIDE * 2 + 16, AT_ROWS = MATRICES * Transfer::BYTES,
              AT_BARRIERS = AT_ROWS + 2 * ROWS * ROW;   // bytes of a row of S as an operand
static_assert(LA_SHARED == AT_BARRIERS + 64 && Transfer::WIDTH == WIDE && 8 * MATRICES <= 64,
              "LA_SHARED is the size that the launch requests");

// R of a warp's sixteen columns, of each sixteen rows; reverse: of R^T
LA_DEVICE void load_rest(u32 (&b)[WIDE / 16][4], u32 rest, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < WIDE / 16; i++) {
        if (REVERSE)
            load_matrix(b[i],
                        rest + Rest::block_piece(16 * warp, 2 * i, (lane & 7) | ((lane >> 4) << 3), (lane >> 3) & 1));
        else load_matrix_transposed(b[i], rest + Rest::block_piece(16 * i, 2 * warp, lane & 15, lane >> 4));
    }
}
// y += x R for sixteen rows; even and odd products apart, so that they wait less for one another
LA_DEVICE void multiply_rows(float (&y)[2][4], u32 x, const u32 (&b)[WIDE / 16][4], int lane) {
    float odd[2][4] = {};
    x += (lane & 15) * ROW + (lane >> 4) * 16;
#pragma unroll
    for (int i = 0; i < WIDE / 16; i++) {
        const u32 left[2] = {b[i][0], b[i][1]}, right[2] = {b[i][2], b[i][3]};   // eight columns each
        u32 x16[4];
        load_matrix(x16, x + i * 32);
        mma_bf16(i & 1 ? odd[0] : y[0], x16, left);
        mma_bf16(i & 1 ? odd[1] : y[1], x16, right);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) y[i >> 2][i & 3] += odd[i >> 2][i & 3];
}

// A block's rows of a sequence and head, step by step
struct SegmentStates {
    const DeltaArguments& a;
    unsigned char* memory;
    u32 shared;
    i64 slot;
    int part,
        last;   // of the rows; number of steps: segments but the last. Step n has `added` from n = 0 on, M from n = 1 on

    __device__ __forceinline__ SegmentStates(const DeltaArguments& a, unsigned char* memory, int block)
        : a(a), memory(memory), shared(shared_address(memory)), slot(block / PARTS), part(block % PARTS) {
        last = max((sequence_of(a.offsets, slot / a.heads, a.T).T + C - 1) / C - 1, 0) / a.chunks;
    }
    __device__ __forceinline__ int segment(int n) const { return REVERSE ? last - n : n; }
    __device__ __forceinline__ int matrix_at(int n) const { return (n - 1) % MATRICES * Transfer::BYTES; }
    __device__ __forceinline__ u32 full(int n) const { return shared + AT_BARRIERS + (n - 1) % MATRICES * 8; }
    __device__ __forceinline__ void copy_matrix(int n) const {
        if (n >= last) return;
        barrier_expect(full(n), Transfer::BYTES);
        run_in(shared + matrix_at(n), a.transfers + (slot * (a.segments - 1) + segment(n)) * Transfer::BYTES,
               Transfer::BYTES, full(n));
    }
    __device__ __forceinline__ void start() const {   // by one thread
        for (int n = 1; n <= MATRICES; n++) barrier_init(full(n), 1);
        barriers_made();
        for (int n = 1; n <= MATRICES; n++) copy_matrix(n);
    }
    // a lane's two rows and two pairs of columns. Reverse: added(s) of segments 1 .. last are at s - 1, and what
    // precedes segment s begins there
    __device__ __forceinline__ void load_added(float (&y)[2][4], int n, int own) const {
        const float* from =
            a.added + (slot * (a.segments - 1) + segment(n) - REVERSE) * STATE + part * ROWS * WIDE + own;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 z = pair_at(from, (i >> 1) * 8 + (i & 1) * 8 * WIDE);
            y[i >> 1][2 * (i & 1)] = z.x;
            y[i >> 1][2 * (i & 1) + 1] = z.y;
        }
    }
    __device__ __forceinline__ u32 rows(int n) const {
        return shared + AT_ROWS + (n & 1) * ROWS * ROW;
    }   // S after step n, as an operand
    __device__ __forceinline__ void store(const float (&y)[2][4], int n, int own, int row, int column) const {
        float* to = a.begins + (slot * a.segments + segment(n) + (REVERSE ? -1 : 1)) * STATE + part * ROWS * WIDE + own;
        const u32 operand = rows(n) + row * ROW + column * 2;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 z = {y[i >> 1][2 * (i & 1)], y[i >> 1][2 * (i & 1) + 1]};
            *(float2*)(to + (i >> 1) * 8 + (i & 1) * 8 * WIDE) = z;
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(operand + (i & 1) * 8 * ROW + (i >> 1) * 16),
                         "r"(pack_bf16(z.x, z.y))
                         : "memory");
        }
    }
    __device__ __forceinline__ void compute(int warp, int lane) const {
        const int row = lane >> 2, column = 16 * warp + (lane & 3) * 2, own = row * WIDE + column;
        float S[2][4], added[2][4];   // `added` of the next step
        if (warp == 0 && lane == 0) start();
        load_added(S, 0, own);
        if (last > 1) load_added(added, 1, own);
        __syncthreads();
        store(S, 0, own, row, column);
        for (int n = 1; n < last; n++) {
            u32 b[WIDE / 16][4];
            barrier_wait(full(n), (n - 1) / MATRICES & 1);
            load_rest(b, shared + matrix_at(n) + Transfer::AT_REST, warp, lane);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float2 d = pair_at((const float*)(memory + matrix_at(n)), column + 8 * i);
                S[i][0] = added[i][0] + S[i][0] * d.x;
                S[i][1] = added[i][1] + S[i][1] * d.y;
                S[i][2] = added[i][2] + S[i][2] * d.x;
                S[i][3] = added[i][3] + S[i][3] * d.y;
            }
            if (n + 1 < last) load_added(added, n + 1, own);
            __syncthreads();   // the operand is there; M has been read
            if (warp == 0 && lane == 0) copy_matrix(n + MATRICES);
            multiply_rows(S, rows(n - 1), b, lane);
            store(S, n, own, row, column);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) segments(const __grid_constant__ DeltaArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const SegmentStates states(a, memory, blockIdx.x);
    if (states.last > 0) states.compute(threadIdx.x >> 5, threadIdx.x & 31);
}
